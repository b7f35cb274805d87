"""Rules in federations: where they take a mean's place, what they refuse, and that it is the same over the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from tests.federation.direct import federated
from tests.federation.tiny import one_base, tiny
from tests.quick import recipe_with

from comingle.config import Recipe, parse_recipe
from comingle.config.settings import AggregationSection, PrivacySection, Rule, SecureSection
from comingle.cost.planning import plan
from comingle.federation.messages import check_upload
from comingle.methods import REGISTRY, make
from comingle.privacy import robust
from comingle.privacy.mechanisms import check_supported
from comingle.privacy.noise import norms
from comingle.privacy.robust import capped
from comingle.protocol.messages import Upload
from comingle.runs.session import prepare, run_in
from comingle.training.backends.local import InProcess
from comingle.utils.errors import MessageError, RecipeError
from comingle.utils.records import read_events
from comingle.utils.trees import Tree
from federations import local_round

USERS = ("ann", "bob", "cem", "dan", "eve")
EVERYONE = list(range(len(USERS)))
RULES: list[Rule] = [rule for rule in get_args(Rule) if rule != "mean"]
MEANS = (
    "fedavg", "ffa-lora", "fedsa-lora", "fdlora", "fedavg-moe", "fedavg-moe-tr", "pfedmoe", "comigs-tr", "comigs",
    "comigs-1g1s", "comigs-2g", "comigs-1gxs", "fedem", "fedavg+", "fedit", "fedlora", "local-adaptor",
    "stacking",
)  # fmt: skip
RIVALS = ("ditto", "fedbn", "feddpa", "fedper", "fedprox", "rolora")
"""The same of plug-ins, whose servers are plain means."""
BOUNDED = (
    "fedmerge", "fedmerge-fixed", "ifca", "floral", "floral-optimal", "floral-mfl", "ensemble", "ensemble-optimal",
    "mfl", "fml", "momentum-clustering",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def apply_rule(federate: Any, method: Any, rule: str, **changes: Any) -> InProcess:
    """Five users, of whom nobody has sent anything; one of them is assumed to be hostile."""
    settings = {"rule": rule, "hostile": 0.2, **changes.pop("aggregation", {})}
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    small = {"users": USERS, "base": "random:llama?layers=1&dim=32"}
    return federate(method, **small, changes={"aggregation": settings, **changes})


def trained(federation: InProcess) -> Upload:
    """What the users send after a round."""
    local_round(federation, EVERYONE, 0)
    return federation.clients.upload(EVERYONE, 1, {"loss": torch.ones(len(USERS))})


def had(federation: InProcess) -> Tree:
    return {name: t[:, 0].clone() for name, t in federation.server.download(USERS).tensors.items()}


# -------------------------------------------------------------------- in a mean's place


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"])
@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "fedsa-lora"])
def test_users_get_what_the_rule_makes_of_what_they_share(federate: Any, method: str, rule: str) -> None:
    federation = apply_rule(federate, method, rule)
    upload = trained(federation)
    federation.server.aggregate(upload)
    sent = upload.tensors
    expected = {
        "median": lambda: robust.coordinate_median(sent),
        "trimmed-mean": lambda: robust.trimmed_mean(sent, 1),
        "krum": lambda: robust.krum(sent, 1),
        "multi-krum": lambda: robust.multi_krum(sent, 1),
        "geometric-median": lambda: robust.geometric_median(sent, torch.full((5,), 0.2, dtype=torch.float64)),
    }[rule]().tensors
    for name, t in had(federation).items():
        torch.testing.assert_close(t, expected[name].expand_as(t))
    assert any(not torch.allclose(t, sent[name].mean(0)) for name, t in expected.items())


@pytest.mark.parametrize(
    "method", ["fedavg", "fdlora", {"name": "ifca", "models": 2}, {"name": "fedmerge", "models": 2}]
)
@pytest.mark.parametrize("bound", [0.01, "median"])
def test_no_upload_moves_a_model_by_more_than_the_bound(federate: Any, method: Any, bound: Any) -> None:
    """One user's upload is made wild, or is without any change: the difference between the models is bounded."""
    moved: list[Tree] = []
    limit = bound
    for wild in (0.0, 1e9):
        federation = apply_rule(federate, method, "norm-bound", aggregation={"bound": bound})
        upload = trained(federation)
        before, sent = had(federation), dict(upload.tensors)
        if "choice" in upload.reports:
            models = federation.server.download(USERS).tensors
            before = {n: t[torch.arange(5), upload.reports["choice"]] for n, t in models.items()}
        if bound == "median":
            changes = {n: t - before[n] for n, t in sent.items()}
            limit = float(norms(changes).sort().values[3])  # one wild of five moves the median up by one at most
        for name, t in sent.items():
            sent[name] = t.clone()
            sent[name][0] = before[name][0] + wild
        federation.server.aggregate(replace(upload, tensors=sent))
        moved.append({n: t.clone() for n, t in federation.server.kept.items() if t.is_floating_point()})
    whole = {n: (moved[1][n] - moved[0][n]).unsqueeze(0) for n in moved[0] if n != "merging"}
    share = (
        2 if isinstance(method, dict) else 1.2
    )  # a soup's model may be almost one user's; fdlora's step is 0.7 (1 + 0.9)
    assert 0 < float(norms(whole)) <= share * limit * (2 if bound == "median" else 1)


def test_a_lie_about_the_amount_of_data_is_worth_no_more_than_the_median() -> None:
    weights = torch.tensor([0.9, 0.04, 0.03, 0.02, 0.01], dtype=torch.float64)
    torch.testing.assert_close(capped(weights), torch.tensor([3, 3, 3, 2, 1], dtype=torch.float64) / 12)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "bulyan"])
def test_it_is_told_whose_uploads_counted(federate: Any, rule: str) -> None:
    """One of five sends something huge: it counts little or nothing, and the others do."""
    federation = apply_rule(federate, "fedavg", rule)
    upload = trained(federation)
    sent = {name: t.clone() for name, t in upload.tensors.items()}
    for t in sent.values():
        t[2] += 1e3
    federation.server.aggregate(replace(upload, tensors=sent))
    assert federation.server.mechanisms.rule_result is not None
    event = federation.server.mechanisms.rule_result.as_event(1)
    counted = event["counted"]
    assert (event["event"], event["round"], event["rule"]) == ("aggregation", 1, rule)
    assert list(counted) == list(USERS)
    assert all(0 <= share <= 1 for share in counted.values())
    assert event["left_out"] == [name for name, share in counted.items() if share == 0]
    if rule in ("median", "trimmed-mean", "krum", "multi-krum"):
        assert "cem" in event["left_out"]
    else:
        assert 0 < counted["cem"] < 0.01 < min(share for name, share in counted.items() if name != "cem")
    if rule == "multi-krum":
        assert sorted(counted.values()) == [0, 0, 0, 1, 1]  # n - f - 2 = 2


def test_a_change_within_the_bound_counts_whole_and_one_that_is_no_number_does_not(federate: Any) -> None:
    federation = apply_rule(federate, "fedavg", "norm-bound", aggregation={"bound": 1e6})
    upload, before = trained(federation), had(federation)
    sent = {name: t.clone() for name, t in upload.tensors.items()}
    for name, t in sent.items():
        t[0], t[1] = before[name][0], torch.nan
    federation.server.aggregate(replace(upload, tensors=sent))
    assert federation.server.mechanisms.rule_result is not None
    assert federation.server.mechanisms.rule_result.counted == {"ann": 1, "bob": 0, "cem": 1, "dan": 1, "eve": 1}


@pytest.mark.parametrize("rule", RULES)
def test_a_round_with_too_few_uploads_changes_nothing(federate: Any, rule: str) -> None:
    hostile = 0.0 if rule == "bulyan" else 0.2
    federation = apply_rule(federate, "fedavg", rule, aggregation={"hostile": hostile})
    before = had(federation)
    upload = trained(federation)
    federation.server.aggregate(replace(upload.of_user(0), round=1))
    assert federation.server.version == 1
    same = [torch.equal(t, before[name]) for name, t in had(federation).items()]
    assert all(same)
    assert federation.server.mechanisms.rule_result is not None
    event = federation.server.mechanisms.rule_result.as_event(1)
    assert event.pop("reason").startswith(f"1 uploads are too few for {rule}")
    assert event == {"event": "aggregation", "round": 1, "rule": rule}
    federation.server.aggregate(replace(upload, round=2))
    assert not all(torch.equal(t, before[name]) for name, t in had(federation).items())


def test_nothing_is_computed_or_kept_without_a_rule(federate: Any) -> None:
    federation = federate("fedavg", users=USERS, base="random:llama?layers=1&dim=32", changes={"aggregation": "mean"})
    assert not federation.server.mechanisms
    upload = trained(federation)
    federation.server.aggregate(upload)
    assert federation.server.mechanisms.rule_result is None
    for name, t in had(federation).items():
        torch.testing.assert_close(t[0], upload.tensors[name].mean(0))


# -------------------------------------------------------------------- recipes


def recipe(**changes: Any) -> Recipe:
    return parse_recipe({"data": {"users": {"ann": "ann.txt"}}, **changes})


def test_a_rule_is_a_plain_name_or_a_mapping() -> None:
    plain, mapping = recipe(aggregation="krum"), recipe(aggregation={"rule": "krum"})
    assert plain.aggregation == mapping.aggregation
    assert plain.fingerprint == mapping.fingerprint != recipe().fingerprint
    assert recipe(aggregation="mean").fingerprint == recipe().fingerprint
    assert "aggregation" not in recipe().result_content
    assert parse_recipe(yaml.safe_load(plain.as_yaml())).fingerprint == plain.fingerprint
    for wrong in ("kurm", {"rule": "krum", "hostile": 0.5}, {"bound": 0}):
        with pytest.raises(RecipeError, match="aggregation"):
            recipe(aggregation=wrong)


NOT_MEANS = (
    "centralized", "pcl", "hetlora", "flexlora", "fedalt", "fedamole", "fedex-lora", "flora-stacking", "scaffold",
    "sdflora", "fedlease", "fed-sb", "fedtreelora",
)  # fmt: skip
KNOWN = [*MEANS, *RIVALS, *BOUNDED, *NOT_MEANS, *(name for name in REGISTRY if not make(name).shared)]


@pytest.mark.parametrize("rule", RULES)
def test_every_method_says_what_applies_to_it(rule: Rule) -> None:
    for method in dict.fromkeys(KNOWN):
        made = make(method)
        applies = not made.shared or method in (*MEANS, *RIVALS) or (method in BOUNDED and rule == "norm-bound")
        settings = recipe_with(aggregation=AggregationSection(rule=rule))
        if applies and not made.placement.pooled:
            check_supported(made, settings)
            continue
        with pytest.raises(RecipeError, match=f"aggregation: .*{method}") as found:
            check_supported(made, settings)
        assert "\n" not in str(found.value)
        assert ("allowed: norm-bound" in str(found.value)) == (method in BOUNDED), method


@pytest.mark.parametrize(
    ("rule", "settings", "why"),
    [
        ("median", {"training": {"weighting": "tokens"}}, "training.weighting: got tokens, .*geometric-median"),
        ("krum", {"evaluation": {"select": "best"}}, "validation losses"),
        ("median", {"privacy": PrivacySection(noise_multiplier=1.0)}, "mechanism: central"),
        ("norm-bound", {"privacy": PrivacySection(noise_multiplier=1.0)}, "mechanism: central"),
        (
            "krum",
            {"privacy": PrivacySection(mechanism="none", secure_aggregation=SecureSection())},
            "krum .*privacy.secure_aggregation",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(rule: Rule, settings: dict[str, Any], why: str) -> None:
    fine: dict[str, Any] = {"privacy": None}
    local = PrivacySection(mechanism="local", noise_multiplier=1.0)
    check_supported(
        make("fedavg"), recipe_with(aggregation=AggregationSection(rule=rule), **{**fine, "privacy": local})
    )
    with pytest.raises(RecipeError, match=why):
        check_supported(make("fedavg"), recipe_with(aggregation=AggregationSection(rule=rule), **{**fine, **settings}))


@pytest.mark.parametrize(
    ("rule", "participation", "why"),
    [
        ("krum", 0.8, r"krum needs 5 users .*\b1 hostile .*participation \w+ 4;"),
        ("bulyan", 1.0, "aggregation: bulyan needs 7 users"),
        ("median", [["ann", "bob", "cem"], ["ann", "bob"]], r"median needs 3 users .*participation \w+ 2;"),
    ],
)
@pytest.mark.sampled(1)
def test_rounds_that_are_too_small_are_refused(tmp_path: Path, rule: str, participation: Any, why: str) -> None:
    content = tiny(tmp_path, "fedavg", users=4, training__participation=participation, aggregation=rule)
    content["data"]["users"]["eve"] = content["data"]["users"]["ann"]
    found = parse_recipe(content)
    with pytest.raises(RecipeError, match=why) as refused:
        run_in(None, found, prepare(found), resume=False, force=False)
    assert "\n" not in str(refused.value)
    with pytest.raises(RecipeError, match=why):
        federated(content, tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match=why):
        plan(found, ["fedavg"])


@pytest.mark.slow
def test_what_can_be_run_has_costs(tmp_path: Path) -> None:
    """They are rehearsed with fewer users than a rule needs."""
    content = tiny(tmp_path, "fedavg", users=4, aggregation="median")
    assert [cost.method for cost in plan(parse_recipe(content), ["fedavg"]).methods] == ["fedavg"]


def test_different_ranks_have_no_coordinates_in_common(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"adapters\.rank differs"):
        apply_rule(federate, "fedavg", "median", adapters__rank=[2, 2, 2, 1, 1])
    federation = apply_rule(federate, "fedavg", "norm-bound", adapters__rank=[2, 2, 2, 1, 1])
    federation.server.aggregate(trained(federation))


# -------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    ("method", "aggregation", "changes"),
    [
        ("comigs-1g1s", "median", {}),
        ("fedavg", {"rule": "geometric-median"}, {"training__weighting": "tokens"}),
        ("fedavg", {"rule": "krum", "hostile": 0.0}, {"training__uploads": "int8", "training__participation": 0.75}),
        ("ifca", {"rule": "norm-bound", "bound": 0.01}, {}),
        pytest.param("fedmerge", "norm-bound", {"training__participation": 0.75}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_users_elsewhere_end_with_the_same(tmp_path: Path, method: str, aggregation: Any, changes: Any) -> None:
    changes = {"evaluation__model": "exchanged", "users": 4, "aggregation": aggregation, **changes}
    content = tiny(tmp_path, method, **changes)
    found = parse_recipe(content)
    run = run_in(None, found, prepare(found), resume=False, force=False)
    here = run.metrics
    there, _ = federated(content, tmp_path / "elsewhere")
    assert _scores(there) == _scores(here)
    told = [event for event in run.events if event["event"] == "aggregation"]
    assert [event["round"] for event in told] == [1, 2]
    assert told == [e for e in read_events(tmp_path / "elsewhere" / "server") if e["event"] == "aggregation"]
    plain = found.with_changes({"aggregation": "mean"})
    undefended = run_in(None, plain, prepare(plain), resume=False, force=False).metrics
    assert _scores(undefended) != _scores(here)


def _scores(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: user["test_perplexity"] for name, user in metrics["users"].items()}


def test_an_upload_that_is_not_a_number_is_none(federate: Any) -> None:
    federation = apply_rule(federate, "fedavg", "median")
    upload = trained(federation).of_user(0)
    about = {"user": "ann", "number": 1, "rank": int(upload.ranks[0])}
    check_upload(upload, federation.clients.model.layout, federation.clients.method, **about)
    for t in upload.tensors.values():
        t.view(-1)[0] = torch.nan
    with pytest.raises(MessageError, match="is not finite"):
        check_upload(upload, federation.clients.model.layout, federation.clients.method, **about)
