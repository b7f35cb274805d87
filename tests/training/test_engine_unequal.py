"""Users with unequal resources: values by name, and different numbers of local steps and batch sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import load_recipe, parse_recipe
from comingle.config.settings import largest
from comingle.federation.messages import check_upload
from comingle.methods.server import Received
from comingle.models.scoring import PAD
from comingle.protocol.messages import STEPS
from comingle.runs import api
from comingle.training.client import Clients, finetuned, train
from comingle.training.server import normalise_steps
from comingle.utils.errors import MessageError, RecipeError, RunError
from comingle.utils.records import read_events
from federations import download_all, exchange, local_round

USERS = ("ann", "bob", "cem")
COMIGS = {"name": "comigs", "router_every": 2, "router_steps": 1}
CONSTANT = {"training.experts.schedule": "constant", "training.rounds": 2}
LISTS = {
    "method": {**COMIGS, "specialists": [0, 1, 2]},
    "adapters.rank": [4, 2, 3],
    "training.local_steps": [1, 3, 2],
    "training.batch_size": [2, 1, 3],
}
BY_NAME = {
    "method": {**COMIGS, "specialists": {"cem": 2, "ann": 0, "bob": 1}},
    "adapters.rank": {"bob": 2, "cem": 3, "ann": 4},
    "training.local_steps": {"cem": 2, "bob": 3, "ann": 1},
    "training.batch_size": {"ann": 2, "cem": 3, "bob": 1},
}


@pytest.mark.slow
def test_values_by_name_are_those_of_a_list(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 1, "evaluation.first": False})
    listed, named = recipe.with_changes(LISTS), recipe.with_changes(BY_NAME)
    assert named.fingerprint == listed.fingerprint != recipe.fingerprint
    runs = [api.run(one) for one in (listed, named)]
    rows = [run.federation.clients.state.rows for run in runs]
    assert torch.equal(rows[0], rows[1])
    assert runs[0].metrics["users"] == runs[1].metrics["users"]


@pytest.mark.parametrize(
    ("key", "section"), [("method.specialists", "method"), ("adapters.rank", ""), ("training.local_steps", "")]
)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ann": 1, "bobb": 1, "cem": 1}, "no user 'bobb'; allowed: ann, bob, cem. Did you mean 'bob'?"),
        ({"ann": 1, "cem": 1}, "no value for bob; give one for each user, or one for all"),
    ],
    ids=["unknown", "missing"],
)
def test_names_of_values_are_checked(
    recipe_file: Path, key: str, section: str, values: dict[str, int], said: str
) -> None:
    changes = {"method": "comigs"} if section else {}
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file).with_changes({**changes, key: values})
    assert str(caught.value) == f"recipe: {key}: {said}"


def test_names_that_only_the_data_has_are_checked_when_it_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("who,text\n" + "".join(f"{name},{name} says {n}\n" for n in range(90) for name in USERS))
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": "local",
        "data": {"dataset": {"path": str(rows), "user": "who", "text": "text"}, "max_test_tokens": 60},
        "training": {"rounds": 1, "local_steps": {"cem": 1, "bob": 2, "ann": 3}, "batch_size": 1, "context": 8},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }
    run = api.run(parse_recipe(content))
    source = run.federation.clients.batch_source
    assert {user.name: source.steps(i) for i, user in enumerate(source.trainers)} == {"ann": 3, "bob": 2, "cem": 1}
    content["training"]["local_steps"] = {"ann": 1, "bob": 1, "cen": 1}
    with pytest.raises(RecipeError, match=r"training\.local_steps: no user 'cen'; .* Did you mean 'cem'\?"):
        api.run(parse_recipe(content))


@pytest.mark.parametrize("key", ["training.local_steps", "training.batch_size"])
def test_a_list_has_as_many_values_as_there_are_users(recipe_file: Path, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{key}: 2 numbers for 3 users; give one, or one per user$"):
        api.run(load_recipe(recipe_file).with_changes({key: [1, 2]}))


def test_values_by_name_follow_reordered_users_and_lists_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 1})
    users = recipe.model_dump(mode="json", exclude_unset=True)["data"]["users"]
    turned = {"data.users": {name: users[name] for name in ("cem", "ann", "bob")}}
    for folder, changes in (("named", BY_NAME), ("listed", LISTS)):
        api.run(recipe.with_changes(changes), out=tmp_path / folder)
    api.run(recipe.with_changes({**BY_NAME, **turned}), out=tmp_path / "named", resume=True)
    with pytest.raises(RunError, match=r"belongs to another recipe, adapters.rank.ann was 4 and is 2"):
        api.run(recipe.with_changes({**LISTS, **turned}), out=tmp_path / "listed", resume=True)


@pytest.mark.parametrize("key", ["training.local_steps", "training.batch_size"])
@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "ifca", "scaffold"])
def test_users_with_own_values_train_as_they_would_alone(federate: Any, key: str, method: str) -> None:
    values = [2, 3, 1]
    together = download_all(federate(method, changes={**CONSTANT, key: values}))
    local_round(together, range(3), 0)
    rows = together.clients.state.rows
    for number, name in enumerate(USERS):
        alone = download_all(federate(method, users=(name,), changes={**CONSTANT, key: values[number]}))
        local_round(alone, [0], 0)
        torch.testing.assert_close(alone.clients.state.rows[0], rows[number], rtol=1e-9, atol=1e-12)


def test_pooled_data_takes_the_most_steps_and_all_batches(recipe_file: Path) -> None:
    run = api.run(load_recipe(recipe_file).with_changes({**BY_NAME, "method": "centralized", "training.rounds": 1}))
    clients = run.federation.clients
    assert (clients.batch_source.steps(0), clients.batch_size) == (3, 6)
    assert clients.batch_source.draw([0], clients.phases[0], 0, 0, 0).shape[1] == 6


@pytest.mark.parametrize("method", ["fedavg", pytest.param({"name": "ifca", "models": 2}, marks=pytest.mark.slow)])
def test_nets_train_as_with_their_own_batch_size_for_all(federate_nets: Any, method: Any) -> None:
    sizes = [40, 15, 15, 30]
    unequal = download_all(federate_nets(method, changes={"training.batch_size": sizes}))
    done = local_round(unequal, range(4), 0)
    for number, size in enumerate(sizes):
        equal = download_all(federate_nets(method, changes={"training.batch_size": size}))
        expected = local_round(equal, [number], 0)
        torch.testing.assert_close(
            unequal.clients.state.rows[number], equal.clients.state.rows[number], rtol=1e-9, atol=1e-12
        )
        assert done.steps[number] == expected.steps[number]
        source, of_equal = unequal.clients.batch_source, equal.clients.batch_source
        assert source.trained_amount(number) == of_equal.trained_amount(number)
        assert source.batch_sizes(source.trainers[number])[0] == of_equal.batch_sizes(source.trainers[number])[0]


def trained(federation: Any, rounds: int = 2) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return everybody's tensors, and what the server has, after some rounds with all users."""
    for number in range(rounds):
        local_round(federation, range(3), number)
        exchange(federation, done=number + 1)
    return federation.clients.state.rows, federation.server.kept


@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "scaffold", "ditto", "fedavg+"])
def test_users_that_run_out_of_time_equal_users_with_fewer_steps(federate: Any, method: str) -> None:
    """A second passes between two local steps."""
    changes = {"training.rounds": 2, "training.local_steps": 4}
    limited = federate(method, changes={**changes, "training.max_seconds_per_round": [None, 2.0, 0.5]})
    limited.clients.clock = map(float, count()).__next__
    fewer = federate(method, changes={**changes, "training.local_steps": [4, 2, 1]})
    rows, kept = trained(limited)
    expected_rows, expected_kept = trained(fewer)
    assert torch.equal(rows, expected_rows)
    assert kept.keys() == expected_kept.keys()
    assert all(torch.equal(t, expected_kept[name]) for name, t in kept.items())
    assert limited.clients.steps_taken == {0: 4, 1: 2, 2: 1}


def test_copies_of_a_user_take_equally_many_steps_in_its_time(federate: Any) -> None:
    """Both copies of a user of Ditto share its time, each in a pass of its own."""
    changes = {"training.local_steps": 6, "runtime.users_per_step": 1}
    limited = federate("ditto", changes={**changes, "training.max_seconds_per_round": 4.0})
    limited.clients.clock = map(float, count()).__next__
    assert local_round(limited, range(3), 0).steps == {0: 2, 1: 2, 2: 2}


def test_a_round_says_how_many_steps_users_took(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr(Clients, "clock", lambda clients: float(next(seconds)))
    changes = {"training.rounds": 1, "training.max_seconds_per_round": {"cem": 1, "bob": 2, "ann": None}}
    recipe = load_recipe(recipe_file).with_changes(changes)
    api.run(recipe, out=tmp_path / "run")
    (event,) = (event for event in read_events(tmp_path / "run") if event["event"] == "round")
    assert event["local_steps"] == {"ann": 3, "bob": 2, "cem": 1}
    assert event["tokens"] == 6 * recipe.training.batch_size * recipe.training.context
    plain = api.run(recipe.with_changes({"training.max_seconds_per_round": None}), out=tmp_path / "plain")
    assert all("local_steps" not in event for event in read_events(tmp_path / "plain"))
    assert plain.recipe.fingerprint == load_recipe(recipe_file).with_changes({"training.rounds": 1}).fingerprint


def fednova(starts: Any, uploads: Any, weights: list[float], steps: list[int]) -> Any:
    """Return FedNova's new model, user by user: ``x + tau_eff sum_i p_i (x_i - x) / tau_i``."""
    effective = sum(p * tau for p, tau in zip(weights, steps, strict=True))
    moved = torch.zeros_like(starts)
    for upload, p, tau in zip(uploads, weights, steps, strict=True):
        moved += p * (upload - starts) / tau
    return starts + effective * moved


def test_normalised_uploads_have_fednovas_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    start, uploads = torch.randn(2, 5, generator=draw), torch.randn(3, 2, 5, generator=draw)
    weights, steps = [0.5, 0.3, 0.2], [1, 4, 10]
    received = Received(
        users=(0, 1, 2),
        tensors={"w": uploads, "mean": uploads},
        weights=torch.tensor(weights),
        ranks=torch.zeros(3, dtype=torch.int64),
        scales=torch.ones(3),
        reports={STEPS: torch.tensor(steps)},
        roles={"w": frozenset({"attention"}), "mean": frozenset({"statistics.base"})},
    )
    starts = {name: start.expand(3, 2, 5) for name in ("w", "mean")}
    normalised = normalise_steps(received, starts).tensors
    mean = torch.einsum("u,u...->...", received.weights, normalised["w"])
    torch.testing.assert_close(mean, fednova(start, uploads, weights, steps))
    assert torch.equal(normalised["mean"], uploads)  # running statistics take no steps
    equal = replace(received, reports={STEPS: torch.tensor([4, 4, 4])})
    assert torch.equal(normalise_steps(equal, starts).tensors["w"], uploads)


@pytest.mark.parametrize("ranks", [2, [2, 1, 2]], ids=["one rank", "ranks"])
def test_a_server_normalises_by_the_steps_that_users_report(federate: Any, ranks: Any) -> None:
    steps = [4, 1, 2]
    changes = {"training.local_steps": steps, "training.normalise_steps": True, "adapters.rank": ranks}
    federation = download_all(federate("fedavg", changes=changes))
    begun = {name: t.clone() for name, t in federation.server.model.items()}
    local_round(federation, range(3), 0)
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    sent = {name: views[name].clone() for name in begun}
    mask = federation.clients.model.layout.views(federation.clients.mask.double())
    exchange(federation, done=1, download=False)
    assert not federation.server.needs_only_sums
    for name, t in federation.server.model.items():
        own_starts = begun[name] * mask[name]  # a user of a smaller rank began without the rest
        third = [
            fednova(own_starts[i], sent[name][i : i + 1], [1], [tau]) - own_starts[i] for i, tau in enumerate(steps)
        ]
        effective = sum(steps) / 3
        expected = sum(own_starts[i] + effective / tau * third[i] for i, tau in enumerate(steps)) / 3
        torch.testing.assert_close(t, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "scaffold"}, "for scaffold, whose server uses more of uploads than their change"),
        ({"privacy": {"noise_multiplier": 1.0}}, "with privacy, which hides users' numbers of local steps"),
        ({"aggregation": "median"}, "with aggregation median, as a hostile user may report any number"),
    ],
    ids=["method", "privacy", "aggregation"],
)
def test_steps_are_not_normalised_where_they_do_not_fit(recipe_file: Path, changes: dict[str, Any], said: str) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.normalise_steps": True, "method": "fedavg", **changes})
    with pytest.raises(RecipeError) as caught:
        api.run(recipe)
    assert f"training.normalise_steps: got true {said}; allowed: false" in str(caught.value)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_server_refuses_more_steps_than_the_recipe_has_and_none(federate: Any, steps: int) -> None:
    federation = federate("fedavg", changes={"training.local_steps": 3, "training.max_seconds_per_round": 9})
    clients = federation.clients
    assert local_round(federation, [0], 0).steps == {0: 3}
    upload = clients.upload([0], 1, {})
    about = {"user": "ann", "number": 1, "rank": 2, "most_steps": 3}
    check_upload(upload, clients.model.layout, clients.method, **about)
    wrong = replace(upload, reports={STEPS: torch.tensor([steps])})
    with pytest.raises(MessageError, match=r"report 'local_steps' is out of range or not finite; allowed: 1 to 3"):
        check_upload(wrong, clients.model.layout, clients.method, **about)
    with pytest.raises(MessageError, match="report 'local_steps' is missing"):
        check_upload(replace(upload, reports={}), clients.model.layout, clients.method, **about)


def test_fine_tuning_for_an_evaluation_has_no_time_limit(federate: Any) -> None:
    federation = federate("fedavg+", changes={"training.local_steps": 3, "training.max_seconds_per_round": 1.0})
    federation.clients.clock = map(float, count()).__next__
    assert local_round(federation, range(3), 0).steps == {0: 1, 1: 1, 2: 1}
    before = federation.clients.state.rows.clone()
    with finetuned(federation.clients, 1):
        assert (federation.clients.state.iterations == 4).all()
        assert federation.clients.steps_taken == {0: 1, 1: 1, 2: 1}
    assert torch.equal(federation.clients.state.rows, before)


def test_users_of_a_cohort_have_equal_batch_sizes(federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate("fedavg", changes={"training.batch_size": [2, 1, 2], "training.local_steps": 1})
    source, drawn = federation.clients.batch_source, list[torch.Tensor]()
    draw = source.draw
    monkeypatch.setattr(source, "draw", lambda *place: drawn.append(draw(*place)) or drawn[-1])
    local_round(federation, range(3), 0)
    assert [tuple(batch.shape[:2]) for batch in drawn] == [(2, 2), (1, 1)]
    padded = draw([0, 1], federation.clients.phases[0], 0, 0, 0)
    assert (padded != PAD).all(-1).tolist() == [[True, True], [True, False]]


def test_routers_see_equally_many_instances_of_users_with_small_batches(federate: Any) -> None:
    federation = federate("comigs-1g1s", changes={"training.batch_size": [1, 3, 2]})
    batches = federation.clients.cohort([0, 1, 2], 0)._instances([0, 1, 2], 5)
    assert sum((batch != PAD).any(-1).sum(1) for batch in batches).tolist() == [5, 5, 5]


def test_no_limit_is_the_largest_value() -> None:
    assert largest([3.0, None, 9.0]) is None
    assert largest([3, 9, 1]) == 9


@pytest.mark.slow
def test_users_on_disk_have_their_own_batch_sizes(tmp_path: Path) -> None:
    """A user with less data takes more steps, which determines the schedule of all."""
    rows = {"ann": 12, "bob": 20}
    for name, number in rows.items():
        lines = [json.dumps({"prompt": f"{i}?", "response": f"{name} says {i}"}) for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": "fedavg",
        "data": {"kind": "conversations", "users": {name: str(tmp_path / f"{name}.jsonl") for name in rows}},
        "training": {"rounds": 2, "batch_size": {"bob": 8, "ann": 1}, "context": 48},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False, "threads": 1},
    }
    runs = {
        store: api.run(parse_recipe(content).with_changes({"runtime.store": store}), out=tmp_path / store)
        for store in ("memory", "disk")
    }
    steps = {store: run.federation.clients.steps.local_steps for store, run in runs.items()}
    assert steps["disk"] == steps["memory"] > 3
    assert runs["disk"].metrics["users"] == runs["memory"].metrics["users"]


def test_a_sweep_reads_as_much_text_as_each_user_trains_on(federate: Any) -> None:
    changes = {"training.batch_size": [1, 3, 2], "training.local_steps": [4, 1, 2]}
    source = federate("ifca", changes=changes).clients.batch_source
    swept = sum((batch != PAD).any(-1).sum(1) for batch in source.sweep([0, 1, 2], 0))
    assert swept.tolist() == [4, 3, 4]


def test_values_of_a_skipped_user_are_left_out(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    Path(recipe.data.users["bob"].path).write_text("Too short.")
    changes = {
        "data.on_small_user": "skip",
        "training.rounds": 1,
        "training.local_steps": {"ann": 1, "bob": 2, "cem": 3},
    }
    run = api.run(
        recipe.with_changes({**changes, "method": {"name": "comigs", "specialists": {"bob": 0, "cem": 2, "ann": 1}}})
    )
    clients = run.federation.clients
    assert [clients.batch_source.steps(number) for number in range(2)] == [1, 3]
    assert clients.method.placement.specialists == (1, 2)


def test_steps_are_not_reported_with_privacy(federate: Any) -> None:
    privacy = {"privacy": {"mechanism": "local", "noise_multiplier": 1.0, "noise": "reproducible"}}
    changes = {"training.max_seconds_per_round": 9.0, "training.local_steps": 1}
    for extra, reports in (({}, {STEPS}), (privacy, set())):
        clients = federate("fedavg", changes={**changes, **extra}).clients
        local_round_of = train(clients, [0], 0)
        assert local_round_of.steps == {0: 1}
        assert set(clients.upload([0], 1, {}).reports) == reports


def test_new_keys_count_in_a_fingerprint_only_where_they_are_set(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    new = {"max_seconds_per_round": 5.0, "normalise_steps": True}
    assert not new.keys() & recipe.result_content["training"].keys()
    changed = recipe.with_changes({f"training.{key}": value for key, value in new.items()})
    assert {key: changed.result_content["training"][key] for key in new} == new
