"""Audits: the attack wins where nothing protects, proves no more than the account allows, sees what is shared."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import comingle
from comingle.audits.auditing import epsilon_lower_bound, guess, shortened
from comingle.audits.canaries import (
    MAX_CANARY_TOKENS,
    OWN,
    SERVER,
    USERS,
    Attacker,
    ObservedFederation,
    auc,
    draw_canaries,
    infer_membership,
    published,
    run_trial,
    true_positive_rate,
    windows_of,
    with_canary,
    with_example,
)
from comingle.data.text.streams import UserData
from comingle.models.scoring import fixed_windows
from comingle.privacy.accounting import Release, epsilon
from comingle.reports.audit import Audit, Membership, Proof, conclusions, exposure
from comingle.runs.given import given_of
from comingle.runs.results import Run
from comingle.runs.session import build, prepare
from comingle.utils.errors import RunError
from comingle.utils.trees import restrict

NAMES = ("ann", "bob", "cem", "dan")


def prose(name: str) -> list[str]:
    draw = random.Random(name)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(250)]
    return [" ".join(words[i : i + 25]) + "." for i in range(0, len(words), 25)]


USERS_TEXT = {name: prose(name) for name in NAMES}


def settings(method: str, steps: int = 2, rounds: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "base": "random:llama",
        "method": method,
        "adapters": {"rank": 4},
        "data": {"split": {"valid": 0.15, "test": 0.15}},
        "training": {
            "rounds": rounds,
            "local_steps": steps,
            "batch_size": 8,
            "context": 16,
            "experts": {"learning_rate": 0.02},
        },
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
        **more,
    }


def trained(method: str, **options: Any) -> Run:
    return comingle.run(settings(method, **options), users=USERS_TEXT)


# -------------------------------------------------------------------- the attack


@pytest.mark.slow
def test_an_upload_without_privacy_gives_the_canary_away() -> None:
    found = comingle.audit(trained("fedavg", steps=24, rounds=3), trials=6, users=USERS_TEXT)
    server = found.proofs[0]
    assert (server.view, server.coins, server.upper) == (SERVER, 24, None)
    assert server.correct >= 22
    assert server.epsilon > 1
    assert f"at least {server.epsilon:.2f} " in conclusions(found)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "noise"), [("local", 8.0), ("central", 4.0)])
def test_with_noise_no_more_is_proven_than_the_account_allows(mechanism: str, noise: float) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"mechanism": mechanism, "noise_multiplier": noise, "clip_norm": 1.0, "delta": 1e-5}
    found = comingle.audit(trained("fedavg", steps=16, privacy=privacy), trials=6, users=USERS_TEXT)
    by_view = {proof.view: proof for proof in found.proofs}
    upper = {view: proof.upper for view, proof in by_view.items()}
    replaced = epsilon(Release(noise=noise / 2), 2, 1e-5, "pld")  # of whichever mechanism: a coin replaces text
    assert upper == {SERVER: replaced if mechanism == "local" else None, USERS: replaced}  # central: it is trusted
    for proof in found.proofs:
        assert proof.epsilon <= (proof.upper or float("inf"))
        assert not proof.contradicts


def of_examples(multiplier: float, steps: int, data: dict[str, Any] | None = None, **more: Any) -> Run:
    """A run that hides single examples: windows of 17 tokens."""
    pytest.importorskip("dp_accounting")
    privacy = {"mechanism": "example", "noise_multiplier": multiplier, "clip_norm": 1.0, "delta": 1e-5}
    privacy |= {"accountant": "rdp", **more}  # distributions of losses of hardly any noise take gigabytes
    return trained("fedavg", steps=steps, privacy=privacy, **({} if data is None else {"data": data}))


EIGHT = {"split": {"valid": 0.15, "test": 0.15}, "max_train_tokens": 8 * 17}
"""So many examples that one of them can be found."""


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "found"), [(0.01, True), (8.0, False)])
def test_of_single_examples_no_more_is_proven_than_the_account_allows(noise: float, found: bool) -> None:
    """With hardly any noise an example is found, so the attack can find one; with some it is not."""
    audit = comingle.audit(of_examples(noise, 16, EIGHT), trials=6, shadows=0, users=USERS_TEXT)
    for proof in audit.proofs:
        assert proof.upper is not None
        assert not proof.contradicts
    server = audit.proofs[0]
    assert (server.view, server.coins) == (SERVER, 24)
    assert (server.epsilon > 0.5) == found
    assert "replacement of one example" in conclusions(audit)[0]


@pytest.mark.slow
def test_what_is_promised_of_an_example_is_twice_the_account_of_the_user_with_fewest() -> None:
    """Of rates, steps and noise: an example goes and another comes (group privacy of two)."""
    run = of_examples(2.0, 3)
    audit = comingle.audit(run, trials=1, shadows=0, users=USERS_TEXT)
    fewest = min(-(-len(user.train) // 17) for user in run.federation.clients.trainers)
    release = Release(noise=2.0, rate=8 / fewest)
    parts = (1e-5 / 2**halvings for halvings in range(1, 60))
    once = next(e for d in parts if (1 + math.exp(e := epsilon(release, 6, d, "rdp"))) * d <= 1e-5)
    assert [proof.upper for proof in audit.proofs] == [pytest.approx(2 * once)] * 2
    hidden = of_examples(2.0, 3, noise="reproducible")
    assert [p.upper for p in comingle.audit(hidden, trials=1, shadows=0, users=USERS_TEXT).proofs] == [None, None]


def test_short_runs_have_the_least_noise_of_any_user() -> None:
    recipe = comingle.run(settings("fedavg", rounds=4), users=USERS_TEXT).recipe.with_changes(
        {"privacy": {"mechanism": "example", "epsilon": 4.0}}
    )
    spent = {"noise_multiplier": 3.0, "noise_multipliers": {"ann": 3.0, "bob": 1.5}}
    short = shortened(recipe, {"privacy": spent}, 2).privacy
    assert short is not None
    assert (short.noise_multiplier, short.epsilon) == (1.5, None)


@pytest.mark.parametrize("context", [16, 40])
def test_a_canary_among_single_examples_is_one_of_them(context: int) -> None:
    stream = torch.randint(200, (500,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    user = UserData(name="ann", train=stream, valid=stream, test=stream)
    canary = torch.arange(min(context, MAX_CANARY_TOKENS) + 1) + 200
    changed = with_example(user, canary, context, seed=0, trial=0)
    old, new = (fixed_windows(one.train, context=context) for one in (user, changed))
    (at,) = (old != new).any(1).nonzero().flatten().tolist()
    assert torch.equal(new[at], canary.repeat(2)[: context + 1])


def test_guesses_look_at_scores_alone() -> None:
    assert guess([5.0, 0.1, None, 4.8, 0.3, 5.5]) == [True, False, None, True, False, True]
    assert guess([None, None]) == [None, None]
    assert guess([1.0]) == [True]


# -------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedsa-lora", "fedavg-moe"])
def test_nothing_but_what_is_shared_is_seen(method: str) -> None:
    given = given_of(USERS_TEXT, None)
    recipe = comingle.run(settings(method), users=USERS_TEXT).recipe
    plain = build(recipe, prepare(recipe, given=given))
    seen: list[tuple[str, dict[str, tuple[int, ...]]]] = []
    federation = ObservedFederation(
        clients=plain.clients,
        server=plain.server,
        record_view=lambda who, users, tensors: seen.append(
            (who, {name: tuple(t.shape[1:]) for name, t in tensors.items()})
        ),
    )
    federation.download(range(4))
    federation.upload([0, 2], 1, {0: 1.0, 2: 1.0})
    federation.aggregate()
    layout = plain.clients.model.layout
    shared = restrict(layout.views(plain.clients.state.rows), layout, plain.clients.method.shared)
    assert [who for who, _ in seen] == [SERVER, OWN, USERS]
    for _, shapes in seen:
        assert shapes == {name: (1, *t.shape[1:]) for name, t in shared.items()}


def test_no_attack_reads_a_tensor_that_stays_with_its_user() -> None:
    run = trained("comigs-1g1s")
    clients = run.federation.clients
    before = infer_membership(run)
    local = ~clients.model.layout.mask(clients.method.shared)
    assert bool(local.any())
    clients.state.rows[:, local] = float("nan")
    assert infer_membership(run) == before


def test_without_what_was_seen_an_attacker_has_the_base() -> None:
    run = trained("fedavg")
    clients = run.federation.clients
    windows = torch.randint(200, (4, 3, 17), generator=torch.Generator().manual_seed(1))
    attacker = Attacker(clients=clients)
    with torch.no_grad():
        logits = vars(clients.model)["base"].model(windows.flatten(0, 1)[:, :-1]).logits
    plain = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows.flatten(0, 1)[:, 1:], reduction="none")
    found = attacker.losses(range(4), {}, windows)
    assert torch.allclose(found, plain.mean(1).view(4, 3).double(), atol=1e-4)
    assert not torch.allclose(attacker.losses(range(4), published(run.federation.server), windows), found, atol=1e-4)


# -------------------------------------------------------------------- canaries


def test_a_canary_is_a_quarter_of_a_text_that_stays_as_long() -> None:
    given = given_of(USERS_TEXT, None)
    recipe = comingle.run(settings("fedavg"), users=USERS_TEXT).recipe
    user = prepare(recipe, given=given).users[0]
    canary = torch.arange(17, dtype=torch.int64) + 100
    changed = with_canary(user, canary, seed=0, trial=0)
    slots = changed.train[: len(user.train) // 17 * 17].view(-1, 17)
    copies = int((slots == canary).all(1).sum())
    assert len(changed.train) == len(user.train)
    assert copies == int(len(slots) / 4)
    assert torch.equal(changed.test, user.test)


def test_canaries_and_coins_are_drawn_anew_each_time() -> None:
    drawn = [draw_canaries(200, vocabulary=256, context=16, seed=0, trial=trial) for trial in (0, 1)]
    assert not torch.equal(drawn[0].inside, drawn[1].inside)
    for one in drawn:
        assert 70 < int(one.inside.sum()) < 130
        assert len({tuple(row) for row in one.canary_by_user.tolist()}) == 200


def test_a_trial_scores_everybody_by_both_views() -> None:
    given = given_of(USERS_TEXT, None)
    recipe = comingle.run(settings("comigs-1g1s"), users=USERS_TEXT).recipe
    trial = run_trial(recipe, prepare(recipe, given=given), 0, lambda clients: [])
    assert {who: len(scores) for who, scores in trial.scores.items()} == {SERVER: 4, USERS: 4}
    assert all(1 <= rank <= 64 for rank in trial.ranks)


# -------------------------------------------------------------------- membership


def test_auc_is_how_often_a_member_is_above() -> None:
    draw = random.Random(1)
    members, others = [draw.choice(range(6)) for _ in range(9)], [draw.choice(range(6)) for _ in range(7)]
    pairs = [1.0 if m > o else 0.5 if m == o else 0.0 for m in members for o in others]
    assert auc([float(m) for m in members], [float(o) for o in others]) == pytest.approx(sum(pairs) / 63)


def test_found_at_one_false_alarm_in_a_hundred() -> None:
    others = [float(i) for i in range(200)]
    assert true_positive_rate([198.5, 197.5, 500.0, 1.0], others) == 0.75  # above all but two of them
    assert true_positive_rate([198.5], others[:99]) is None


def test_windows_do_not_overlap() -> None:
    windows = windows_of(torch.arange(100), 9, most=4)
    assert windows.shape == (4, 10)
    assert len(set(windows.flatten().tolist())) == 40
    assert windows_of(torch.arange(5), 9).tolist() == [[0, 1, 2, 3, 4]]


# -------------------------------------------------------------------- what is said


def page(*, correct: int, upper: float | None, aucs: tuple[float, ...]) -> Audit:
    proof = Proof(
        view=SERVER,
        coins=40,
        guesses=40,
        correct=correct,
        epsilon=epsilon_lower_bound(trials=40, guesses=40, correct=correct, delta=1e-5),
        provable=2.5,
        upper=upper,
    )
    members = [
        Membership(user=f"u{i}", members=50, others=50, auc=one, auc_of_loss=one, found=None)
        for i, one in enumerate(aucs)
    ]
    numbers: dict[str, Any] = {"inserted": [0.1, 3.0], "absent": [1.0, 2.0], "most": 6.0}
    about: dict[str, Any] = {"run": "r", "method": "fedavg", "users": 4, "privacy": None, "trials": 10, "rounds": 3}
    return Audit(**about, delta=1e-5, confidence=0.95, proofs=[proof], members=members, **numbers)


def test_the_verdict_says_no_more_than_the_intervals() -> None:
    said = conclusions(page(correct=22, upper=None, aucs=(0.9, 0.2, 0.7)))
    assert "is not shown to learn" in said[0]
    assert "not shown to be distinguishable" in said[1]
    assert "not shown to have memorised" in said[2]
    said = conclusions(page(correct=40, upper=9.0, aucs=(0.71, 0.7, 0.72)))
    assert "can infer whether" in said[0]
    assert "can be distinguished" in said[1]
    assert "please report it" in conclusions(page(correct=40, upper=1.0, aucs=(0.5,)))[0]
    assert "no interval" in conclusions(page(correct=40, upper=1.0, aucs=(0.5,)))[1]


def test_exposure_is_in_bits() -> None:
    assert exposure(1, 63) == 6
    assert exposure(64, 63) == 0


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("local", "shares no parameters"),
        ("pretrained", "shares no parameters"),
        ("centralized", "pools"),
        ("pcl", "peers"),
    ],
)
def test_methods_without_one_shared_model_are_refused(method: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        comingle.audit(trained(method), users=USERS_TEXT)


def test_sums_that_nobody_looks_behind_are_refused() -> None:
    hidden = {"mechanism": "none", "secure_aggregation": {"threshold": 0.6}}
    with pytest.raises(RunError, match=r"privacy\.secure_aggregation"):
        comingle.audit(trained("fedavg", privacy=hidden), users=USERS_TEXT)


# -------------------------------------------------------------------- nets


def images(name: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    sizes = {"train": 12, "valid": 4, "test": 6}
    return {
        split: (torch.rand(size, 1, 6, 6, generator=draw), torch.randint(3, (size,), generator=draw))
        for split, size in sizes.items()
    }


PICTURES = {name: images(name) for name in NAMES[:3]}
SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}


def net_run(base: str = "net:mlp", experts: dict[str, Any] | None = None, **more: Any) -> Run:
    training = {"rounds": 1, "batch_size": 4, **({"experts": experts} if experts else {})}
    runtime = {"dtype": "float32", "device": "cpu"}
    return comingle.run(
        {"base": base, "method": "fedavg", "training": training, "runtime": runtime, **more}, users=PICTURES
    )


def test_one_step_on_one_sample_gives_it_away() -> None:
    alone, whole = comingle.audit(net_run(experts=SGD), users=PICTURES).inversions
    assert max(alone.errors) < 1e-3 < 0.1 < min(alone.guesses)
    assert min(whole.errors) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["adam", "noise", "noise of each step"])
def test_where_inversion_fails_it_is_said(hidden: str) -> None:
    privacy = {"mechanism": "local", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3}
    if hidden != "adam":
        pytest.importorskip("dp_accounting")
    if hidden == "noise of each step":
        privacy["mechanism"] = "example"
    run = net_run() if hidden == "adam" else net_run(experts=SGD, privacy=privacy)
    found = comingle.audit(run, users=PICTURES)
    assert all(min(one.errors) > 0.3 for one in found.inversions)
    assert all("reconstructs no input" in said and "others may" in said for said in conclusions(found)[:2])


def test_a_net_that_begins_with_a_convolution_is_refused() -> None:
    with pytest.raises(RunError, match="first layer is not linear"):
        comingle.audit(net_run(base="net:cnn"), users=PICTURES)
