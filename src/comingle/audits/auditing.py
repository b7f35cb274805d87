"""An audit of a finished run: canaries in short runs of its recipe, membership, or the inversion of an upload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from comingle.audits.canaries import REFERENCES, SERVER, USERS, Trial, check_watchable, of_examples, run_trial
from comingle.audits.inversion import invert
from comingle.audits.membership import infer
from comingle.audits.proving import least_epsilon
from comingle.audits.replacing import epsilon_of_replacing
from comingle.audits.shadows import Shadow, run_shadow, told_apart
from comingle.audits.tokens import recover
from comingle.comparing.trials import shortened as in_rounds
from comingle.errors import RunError
from comingle.kinds.base import Materials
from comingle.privacy.accounting import Release, release_of
from comingle.progress import LOADING, Reporter
from comingle.recipes import Recipe
from comingle.reports.audit import Audit, Proof, Recovery, exposure
from comingle.runs.given import NOTHING, Given
from comingle.runs.results import Run
from comingle.runs.session import prepare
from comingle.runs.settings import privacy_of, training_settings

COINS = 40
"""As many canaries, or a few more, are tossed for where nothing else is asked for: all right proves epsilon 2.5."""
KINDS = ("text", "conversations", "samples")
SHADOWS = 8
"""Runs for reference, where nothing else is asked for."""
CONFIDENCE = 0.95
DELTA = 1e-5
"""Where the run has none."""


def audit_run(
    run: Run,
    reporter: Reporter,
    *,
    trials: int | None = None,
    rounds: int = 3,
    shadows: int = SHADOWS,
    given: Given = NOTHING,
) -> Audit:
    """Attack a run: of text or conversations by canaries and membership, of samples by inverting an upload.

    Nothing is written. Tokens are read off uploads of text alone.

    Raises:
        RunError: users have data of another kind, the method shares nothing, or has peers.
        ComingleError: as :func:`comingle.runs.session.prepare`.
    """
    check_audited(run)
    recipe = shortened(run.recipe, run.metrics, rounds)
    about = _about(run, recipe)
    base = getattr(run.federation.clients.model, "base", None)
    with reporter.waiting(LOADING):
        materials = prepare(recipe, base=base, given=given)
    if run.recipe.data.kind == "samples":
        inverted = invert(recipe, materials, lambda clients: [reporter.watch(clients, "one upload")])
        return Audit(**about, trials=0, proofs=[], members=[], inserted=[], absent=[], inversions=inverted)
    recovers = run.recipe.data.kind == "text"
    with reporter.waiting("telling training windows from others"):
        members = infer(run)
    count = trials or math.ceil(COINS / len(run.users))
    done = [_trial(recipe, materials, number, count, reporter) for number in range(count)]
    compared = [_shadow(recipe, materials, number, shadows, reporter) for number in range(shadows)]
    exposures = [
        (inside, exposure(rank, REFERENCES)) for t in done for inside, rank in zip(t.inside, t.ranks, strict=True)
    ]
    return Audit(
        **about,
        trials=count,
        proofs=[prove(who, done, about["delta"], promised(recipe, run.users, done, who)) for who in (SERVER, USERS)],
        members=members,
        inserted=[bits for inside, bits in exposures if inside],
        absent=[bits for inside, bits in exposures if not inside],
        shadows=shadows,
        shadowed=told_apart(run.users, compared),
        recoveries=_recoveries(recipe, materials, reporter) if recovers else [],
    )


def _about(run: Run, recipe: Recipe) -> dict[str, Any]:
    privacy = run.metrics.get("privacy")
    return {
        "run": str(run.folder or "a run in memory"),
        "kind": run.recipe.data.kind,
        "method": run.metrics.get("method", run.recipe.method.name),
        "users": len(run.users),
        "privacy": privacy,
        "rounds": recipe.training.rounds,
        "delta": DELTA if privacy is None else privacy["delta"],
        "confidence": CONFIDENCE,
        "most": math.log2(REFERENCES + 1),
    }


def _trial(recipe: Recipe, materials: Materials, number: int, count: int, reporter: Reporter) -> Trial:
    title = f"canaries, run {number + 1} of {count}"
    return run_trial(recipe, materials, number, lambda clients: [reporter.watch(clients, title)])


def _shadow(recipe: Recipe, materials: Materials, number: int, count: int, reporter: Reporter) -> Shadow:
    title = f"reference models, run {number + 1} of {count}"
    return run_shadow(recipe, materials, number, lambda clients: [reporter.watch(clients, title)])


def _recoveries(recipe: Recipe, materials: Materials, reporter: Reporter) -> list[Recovery]:
    return recover(recipe, materials, lambda clients: [reporter.watch(clients, "tokens of one upload")])


def check_audited(run: Run) -> None:
    """Whether there is something to attack, and users have what canaries can be put into.

    Raises:
        RunError: there is not.
    """
    where = run.folder or "the run"
    check_watchable(where, run.federation.clients.method)
    if run.recipe.data.kind not in KINDS:
        raise RunError(f"{where}: users have {run.recipe.data.label}; allowed: text, conversations or samples")
    if run.recipe.privacy is not None and run.recipe.privacy.secure_aggregation is not None:
        told = "its server sees sums alone, which no attack here looks at; what users see is as without"
        raise RunError(f"{where}: {told} privacy.secure_aggregation: audit such a run")


def shortened(recipe: Recipe, metrics: dict[str, Any], rounds: int) -> Recipe:
    """The recipe in fewer rounds, with the noise that the run had (the least of any user), and evaluated once."""
    changes = in_rounds(min(rounds, recipe.training.rounds)) | {"evaluation.model": "exchanged"}
    if (privacy := metrics.get("privacy")) is not None:
        noise = min(privacy.get("noise_multipliers", {}).values(), default=privacy["noise_multiplier"])
        changes |= {"privacy.noise_multiplier": noise, "privacy.epsilon": None}
    return recipe.with_changes(changes)


# -------------------------------------------------------------------- what is proven


def guess(scores: Sequence[float | None]) -> list[bool | None]:
    """Whether each canary was in: scores above the gap that parts them best (Otsu 1979). Blind to the coins.

    No guess where nothing was seen.
    """
    known = sorted(score for score in scores if score is not None)
    if not known:
        return [None] * len(scores)

    def between(low: int) -> float:
        return low * (len(known) - low) * (fmean(known[low:]) - fmean(known[:low])) ** 2

    least = known[max(range(1, len(known)), key=between, default=0)]
    return [None if score is None else score >= least for score in scores]


def prove(view: str, trials: Sequence[Trial], delta: float, upper: float | None) -> Proof:
    """What the guesses of all runs together prove."""
    coins = [coin for trial in trials for coin in trial.inside]
    guesses = guess([score for trial in trials for score in trial.scores[view]])
    made = [(said, coin) for said, coin in zip(guesses, coins, strict=True) if said is not None]
    correct = sum(said == coin for said, coin in made)

    def least(right: int) -> float:
        return least_epsilon(trials=len(coins), guesses=len(made), correct=right, delta=delta, confidence=CONFIDENCE)

    return Proof(
        view=view,
        coins=len(coins),
        guesses=len(made),
        correct=correct,
        epsilon=least(correct),
        provable=least(len(made)),
        upper=upper,
    )


def promised(recipe: Recipe, names: Sequence[str], trials: Sequence[Trial], view: str) -> float | None:
    """What the account says of these short runs to who looks so, of a user whose data is replaced; None: nothing.

    Where single examples are hidden, of one of them that is replaced, of the user whose are hidden least. With
    ``mechanism: central`` the server is trusted, so uploads are not covered; with the seed as key nothing is.
    """
    privacy = privacy_of(recipe)
    if privacy is None or privacy.noise == "reproducible" or (privacy.mechanism == "central" and view == SERVER):
        return None
    training = training_settings(recipe, names)
    assert training.privacy is not None
    count = max(trial.metrics["privacy"]["releases"] for trial in trials)
    if of_examples(recipe):
        rate = max(work.rate for trial in trials for work in trial.works.values())
        release = Release(noise=training.privacy.multiplier, rate=rate)
    else:
        release = release_of(training.privacy, training.participation, len(names))
    replaced = privacy.mechanism == "local"
    return epsilon_of_replacing(release, count, privacy.delta, training.privacy.accountant, counted=replaced)
