"""Audits of conversations: losses of responses, canaries in responses, membership by conversation."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import comingle
from comingle.audits.auditing import shortened
from comingle.audits.canaries import (
    SERVER,
    USERS,
    Attacker,
    as_targets,
    draw_canaries,
    draw_halves,
    infer_membership,
    longest_responses,
    overwrite_responses,
    run_shadow,
    run_trial,
    windows_of,
    with_response,
)
from comingle.data.conversations.encoding import Answers, UserAnswers
from comingle.models.scoring import PAD
from comingle.reports.audit import conclusions, markdown
from comingle.runs.given import given_of
from comingle.runs.results import Run
from comingle.runs.session import build, prepare
from comingle.training.kinds.base import RunData

NAMES = ("ann", "bob", "cem")


def words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(count))


def chats(name: str, count: int = 30) -> list[dict[str, Any]]:
    """Conversations of one or two turns, whose responses follow from nothing."""
    draw, rows = random.Random(name), []
    for number in range(count):
        turns = [("user", words(draw, 2)), ("assistant", words(draw, 4))]
        turns += [("user", "and?"), ("assistant", words(draw, 1))] * (number % 2)
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows


CHATS = {name: chats(name) for name in NAMES}


def settings(epochs: int, rounds: int, learning_rate: float, **data: Any) -> dict[str, Any]:
    return {
        "base": "random:llama",
        "method": "fedavg",
        "adapters": {"rank": 16},
        "data": {"split": {"valid": 0.1, "test": 0.4}, **data},
        "training": {
            "rounds": rounds,
            "local_epochs": epochs,
            "batch_size": 4,
            "context": 128,
            "experts": {"learning_rate": learning_rate},
        },
        "evaluation": {"every": rounds, "first": False, "model": "exchanged"},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }


def trained(
    epochs: int = 1, rounds: int = 1, learning_rate: float = 0.02, *, loss_on: str = "responses", **changes: Any
) -> Run:
    return comingle.run(settings(epochs, rounds, learning_rate, loss_on=loss_on), users=CHATS, **changes)


def prepared(run: Run) -> RunData:
    return prepare(run.recipe, given=given_of(CHATS, None))


# -------------------------------------------------------------------- losses


@pytest.mark.parametrize("loss_on", ["responses", "all"])
def test_losses_are_those_of_a_loop_over_targets(loss_on: str) -> None:
    """One conversation after the other without padding, by the base alone, as nothing was seen."""
    run = trained(loss_on=loss_on)
    clients = run.federation.clients
    train: Answers = clients.users[0].train
    network = vars(clients.model)["base"].model
    expected = []
    for number, window in enumerate(train.windows):
        tokens = train.tokens(number)
        with torch.no_grad():
            logits = network(tokens.unsqueeze(0)).logits[0].double()
        targets = [at for at in range(1, len(tokens)) if window[at] >= 0]
        expected.append(fmean(float(F.cross_entropy(logits[at - 1], tokens[at])) for at in targets))
    found = Attacker(clients=clients).losses([0], {}, train.windows.unsqueeze(0))[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=0)


def test_padding_and_other_windows_change_no_loss() -> None:
    clients = trained().federation.clients
    attacker, windows = Attacker(clients=clients), clients.users[0].train.windows
    wider = F.pad(windows, (0, 9), value=PAD)
    every = attacker.losses([0], {}, wider.unsqueeze(0))[0]
    one = attacker.losses([0], {}, windows[3:4].unsqueeze(0))[0]
    torch.testing.assert_close(every[3:4], one, atol=1e-5, rtol=0)


# -------------------------------------------------------------------- membership


@pytest.mark.slow
@pytest.mark.parametrize("loss_on", ["responses", "all"])
def test_conversations_learnt_by_heart_are_told(loss_on: str) -> None:
    """Of one user, whose model is then the shared one."""
    content = settings(10, 8, 0.01, loss_on=loss_on) | {"base": "random:gpt2"}
    (found,) = infer_membership(comingle.run(content, users={"ann": CHATS["ann"]}))
    assert found.auc > 0.8
    assert found.auc_of_loss > 0.8


@pytest.mark.parametrize("loss_on", ["responses", "all"])
def test_without_training_nothing_is_told(loss_on: str) -> None:
    """The model that is published is as it began, so all scores are ties."""
    run = trained(loss_on=loss_on)
    untrained = replace(run, federation=build(run.recipe, prepared(run)))
    found = infer_membership(untrained)
    assert [one.auc for one in found] == [0.5] * 3
    assert all(0.2 < one.auc_of_loss < 0.8 for one in found)
    assert {(one.members, one.others) for one in found} == {(15, 12)}


def test_every_token_counts_where_every_token_is_trained_on() -> None:
    user = prepared(trained()).users[0]
    shown = as_targets(user.test.windows)
    for number in range(len(user.test)):
        tokens = user.test.tokens(number)
        assert torch.equal(shown[number, : len(tokens)], tokens)
        assert bool((shown[number, len(tokens) :] == PAD).all())
    everywhere = prepared(trained(loss_on="all")).users[0]
    assert torch.equal(as_targets(everywhere.train.windows), everywhere.train.windows)


def test_conversations_are_spread_over_a_split() -> None:
    train = prepared(trained()).users[0].train
    assert torch.equal(windows_of(train, 128), train.windows)
    assert torch.equal(windows_of(train, 128, most=3), train.windows[[0, 7, 14]])


# -------------------------------------------------------------------- halves


def test_a_half_has_the_conversations_that_are_in_with_their_responses() -> None:
    users: list[UserAnswers] = list(prepared(trained()).users)
    parts = draw_halves(users, 128, seed=0, run=1)
    for number, user in enumerate(users):
        kept, inside = parts.with_included(number, user).train, parts.inside[number].nonzero().flatten().tolist()
        assert isinstance(kept, Answers)
        assert 0 < len(inside) < len(user.train)
        assert torch.equal(kept.windows, user.train.windows[inside])
        expected = [
            (inside.index(owner), prompt, reference)
            for owner, prompt, reference in zip(
                user.train.owners.tolist(), user.train.prompt_tokens.tolist(), user.train.references, strict=True
            )
            if owner in inside
        ]
        assert list(zip(kept.owners.tolist(), kept.prompt_tokens.tolist(), kept.references, strict=True)) == expected
    assert not torch.equal(parts.inside[0], draw_halves(users, 128, seed=0, run=2).inside[0])


def test_both_views_score_every_conversation() -> None:
    run = trained()
    shadow = run_shadow(shortened(run.recipe, run.metrics, 1), prepared(run), 0, lambda clients: [])
    for view in (SERVER, USERS):
        assert [t.shape for t in shadow.scores[view].values()] == [(15,)] * 3
        assert all(bool(t.isfinite().all()) and bool(t.any()) for t in shadow.scores[view].values())


# -------------------------------------------------------------------- canaries


@pytest.mark.parametrize("count", [1, 4])
def test_a_canary_overwrites_responses_alone(count: int) -> None:
    user = prepared(trained()).users[0]
    canary = torch.arange(5) + 200
    changed = with_response(user, canary, count, seed=0, trial=0)
    old, new = user.train.windows, changed.train.windows
    rows = (old != new).any(1).nonzero().flatten().tolist()
    assert len(rows) == count
    assert longest_responses(user.train) in rows
    for row in rows:
        targets = old[row] >= 0
        assert torch.equal(old[row][~targets], new[row][~targets])
        assert new[row][targets].tolist() == [200 + at % 5 for at in range(int(targets.sum()))]
    assert torch.equal(changed.test.windows, user.test.windows)


def test_the_first_token_is_no_target() -> None:
    window = torch.tensor([7, 8, -12, 9, PAD])
    assert overwrite_responses(window, torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [
        [7, 1, -12, 2, PAD],
        [7, 4, -12, 5, PAD],
    ]


def test_canaries_are_scored_where_they_are_put() -> None:
    users: list[UserAnswers] = list(prepared(trained()).users)
    conversations = [user.train.windows[longest_responses(user.train)] for user in users]
    canaries = replace(draw_canaries(3, vocabulary=256, context=128, seed=0, trial=0), conversations=conversations)
    windows = canaries.windows([2, 0], 4)
    assert windows.shape[:2] == (2, 5)
    for at, user in enumerate((2, 0)):
        changed = with_response(users[user], canaries.canary_by_user[user], 1, seed=0, trial=0).train
        own = changed.windows[longest_responses(users[user].train)]
        assert torch.equal(windows[at, 0, : len(own)], own)
        assert bool((windows[at, :, len(own) :] == PAD).all())


@pytest.mark.slow
def test_single_examples_are_one_conversation() -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"mechanism": "example", "noise_multiplier": 8.0, "clip_norm": 1.0, "delta": 1e-5, "accountant": "rdp"}
    run = trained(privacy=privacy)
    trial = run_trial(shortened(run.recipe, run.metrics, 1), prepared(run), 0, lambda clients: [])
    assert {work.examples for work in trial.works.values()} == {15}
    found = comingle.audit(run, trials=1, shadows=0, users=CHATS)
    assert all(proof.upper is not None and not proof.contradicts for proof in found.proofs)
    assert "replacement of one example" in conclusions(found)[0]


@pytest.mark.slow
def test_canaries_in_conversations_are_found() -> None:
    found = comingle.audit(trained(20, 2), trials=4, shadows=0, users=CHATS)
    server = found.proofs[0]
    assert (server.view, server.coins) == (SERVER, 12)
    assert server.correct >= 11
    assert fmean(found.inserted) > fmean(found.absent) + 0.5


# -------------------------------------------------------------------- the page


@pytest.mark.slow
def test_a_page_names_what_was_attacked_and_what_was_not() -> None:
    found = comingle.audit(trained(), trials=1, rounds=1, shadows=3, users=CHATS)
    assert (found.kind, found.recoveries) == ("conversations", [])
    assert {one.view for one in found.shadowed} == {SERVER, USERS}
    said = conclusions(found)
    assert sum("tokens from one upload" in line for line in said) == 1
    assert "windows" not in markdown(found)
    assert "training" in markdown(found).lower()
