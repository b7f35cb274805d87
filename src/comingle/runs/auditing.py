"""An audit of a finished run: canaries in short runs of its recipe, and membership by its final shared model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from comingle.errors import RunError
from comingle.privacy.accounting import epsilon_of_replacing, release_of
from comingle.privacy.proving import least_epsilon
from comingle.progress import LOADING, Reporter
from comingle.recipes import Recipe
from comingle.reports.audit import Audit, Proof, exposure
from comingle.runs.canaries import REFERENCES, SERVER, USERS, Trial, check_watchable, run_trial
from comingle.runs.given import NOTHING, Given
from comingle.runs.membership import infer
from comingle.runs.results import Run
from comingle.runs.session import prepare, privacy_of, training_settings

COINS = 40
"""As many canaries, or a few more, are tossed for where nothing else is asked for: all right proves epsilon 2.5."""
CONFIDENCE = 0.95
DELTA = 1e-5
"""Where the run has none."""


def audit_run(
    run: Run, reporter: Reporter, *, trials: int | None = None, rounds: int = 3, given: Given = NOTHING
) -> Audit:
    """Attack a run whose users have text; nothing is written.

    Raises:
        RunError: users have no text, the method shares nothing, or no single model.
        ComingleError: as :func:`comingle.runs.session.prepare`.
    """
    check_audited(run)
    names, metrics = run.users, run.metrics
    recipe = shortened(run.recipe, metrics, rounds)
    with reporter.waiting(LOADING):
        materials = prepare(recipe, base=run.federation.clients.model.base, given=given)  # pyright: ignore[reportAttributeAccessIssue]
    count = trials or math.ceil(COINS / len(names))
    with reporter.waiting("telling training windows from others"):
        members = infer(run)
    done = [
        run_trial(
            recipe, materials, n, lambda clients, n=n: [reporter.watch(clients, f"canaries, run {n + 1}/{count}")]
        )
        for n in range(count)
    ]
    privacy = metrics.get("privacy")
    delta = DELTA if privacy is None else privacy["delta"]
    exposures = [
        (inside, exposure(rank, REFERENCES)) for t in done for inside, rank in zip(t.inside, t.ranks, strict=True)
    ]
    return Audit(
        run=str(run.folder or "a run in memory"),
        method=metrics.get("method", run.recipe.method.name),
        users=len(names),
        privacy=privacy,
        trials=count,
        rounds=recipe.training.rounds,
        delta=delta,
        confidence=CONFIDENCE,
        proofs=[prove(who, done, delta, promised(recipe, names, done, who)) for who in (SERVER, USERS)],
        members=members,
        inserted=[bits for inside, bits in exposures if inside],
        absent=[bits for inside, bits in exposures if not inside],
        most=math.log2(REFERENCES + 1),
    )


def check_audited(run: Run) -> None:
    """Whether there is something to attack, and users have what canaries can be put into.

    Raises:
        RunError: there is not.
    """
    where = run.folder or "the run"
    check_watchable(where, run.federation.clients.method)
    if run.recipe.data.kind != "text":
        raise RunError(f"{where}: users have {run.recipe.data.label}; canaries are put into text alone")


def shortened(recipe: Recipe, metrics: dict[str, Any], rounds: int) -> Recipe:
    """The recipe in fewer rounds, with the noise that the run had, and evaluated once."""
    rounds = min(rounds, recipe.training.rounds)
    changes = {
        "training.rounds": rounds,
        "evaluation.every": rounds,
        "evaluation.first": False,
        "evaluation.model": "exchanged",
    }
    if (privacy := metrics.get("privacy")) is not None:
        changes |= {"privacy.noise_multiplier": privacy["noise_multiplier"], "privacy.epsilon": None}
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
    numbers = {"trials": len(coins), "guesses": len(made), "delta": delta, "confidence": CONFIDENCE}
    return Proof(
        view=view,
        coins=len(coins),
        guesses=len(made),
        correct=correct,
        epsilon=least_epsilon(correct=correct, **numbers),
        provable=least_epsilon(correct=len(made), **numbers),
        upper=upper,
    )


def promised(recipe: Recipe, names: Sequence[str], trials: Sequence[Trial], view: str) -> float | None:
    """What the account says of these short runs to who looks so, of a user whose text is replaced; None: nothing.

    With ``mechanism: central`` the server is trusted, so uploads are not covered; with the seed as key nothing is.
    """
    privacy = privacy_of(recipe)
    if privacy is None or privacy.noise == "reproducible" or (privacy.mechanism == "central" and view == SERVER):
        return None
    training = training_settings(recipe, names)
    assert training.privacy is not None
    release = release_of(training.privacy, training.participation, len(names))
    count = max(trial.metrics["privacy"]["releases"] for trial in trials)
    replaced = privacy.mechanism == "local"
    return epsilon_of_replacing(release, count, privacy.delta, training.privacy.accountant, counted=replaced)
