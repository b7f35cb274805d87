"""Audits of a finished run.

Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2: every one of ``trials`` canaries is put in or left out
by a coin of its own, and the attacker guesses some of the coins from everything that is seen. Canaries of one run may
share that run, as nothing is assumed of how they act on each other; coins of several runs count together. A bound by
Clopper and Pearson on rates of right and wrong alarms (Jagielski et al. 2020, arXiv:2006.07709) would need
trials that are independent, hence a run for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from comingle.audits.canaries import (
    FEWEST,
    REFERENCES,
    SERVER,
    USERS,
    Trial,
    check_watchable,
    infer,
    of_examples,
    run_shadow,
    run_trial,
    told_apart,
)
from comingle.audits.uploads import invert, recover, token_factors
from comingle.config import Recipe
from comingle.config.settings import MECHANISMS
from comingle.methods import make
from comingle.models.hardware import torch_defaults
from comingle.privacy.accounting import Release, epsilon
from comingle.privacy.mechanisms import release_of
from comingle.reports.audit import Audit, Proof, check_targets, exposure, write_audit
from comingle.runs import shortened as in_rounds
from comingle.runs.api import load
from comingle.runs.given import NOTHING, AnyBase, Given, given_of
from comingle.runs.progress import LOADING, Reporter, about, reporting
from comingle.runs.results import Run
from comingle.runs.session import prepare
from comingle.training.backends.launched import require_alone
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.plan import make_plan
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.records import plural

_HALVINGS = 60


def epsilon_of_replacing(release: Release, count: int, delta: float, accountant: str, *, counted: bool) -> float:
    """Epsilon of a user whose data is replaced by other data rather than taken away; an upper bound.

    ``counted`` says that the release counts a replacement already, as does one of so many users. Without sampling the
    Gaussian's sensitivity is twice as large. With it the user is taken away and another one comes: twice an epsilon,
    and ``(1 + exp(epsilon)) delta`` (group privacy, Dwork and Roth 2014, Theorem 2.2, of two).
    """
    if counted or release.sample:
        return epsilon(release, count, delta, accountant)
    if not release.sampled:
        return epsilon(replace(release, noise=release.noise / 2), count, delta, accountant)
    for halvings in range(1, _HALVINGS):
        part = delta / 2**halvings
        once = epsilon(release, count, part, "rdp")
        if (1 + math.exp(min(once, 700.0))) * part <= delta:
            return 2 * once
    return math.inf


_MOST = 64.0
_STEPS = 60


def chance(epsilon: float, *, trials: int, guesses: int, correct: int, delta: float = 0.0) -> float:
    """At most how probable it is that of ``guesses`` so many are correct, if ``(epsilon, delta)`` holds of each coin.

    Source: the theorem above with all guesses counted, as in the paper's appendix D.
    """
    from scipy.stats import binom

    if correct <= 0 or guesses == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return tail
    steepest, below = 0.0, 0.0
    for back in range(1, correct + 1):
        below += float(binom.pmf(correct - back, guesses, right))
        steepest = max(steepest, below / back)
    return min(1.0, tail + 2 * trials * delta * steepest)


def least_epsilon(*, trials: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that is refuted with this confidence; 0 where none is."""

    def refuted(epsilon: float) -> bool:
        return chance(epsilon, trials=trials, guesses=guesses, correct=correct, delta=delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


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
        runs = _Runs(reporter, 2, recipe, run.metrics)
        inverted = invert(recipe, materials, runs.watch("one upload"))
        return Audit(**about, trials=0, proofs=[], members=[], inserted=[], absent=[], inversions=inverted)
    recovers = run.recipe.data.kind == "text" and bool(token_factors(run.federation.clients))
    count = trials or math.ceil(COINS / len(run.users))
    runs = _Runs(reporter, count + shadows + 2 * recovers, recipe, run.metrics)
    with reporter.waiting("telling training windows from others"):
        members = infer(run)
    done = [run_trial(recipe, materials, number, runs.watch("canaries")) for number in range(count)]
    compared = [run_shadow(recipe, materials, number, runs.watch("reference models")) for number in range(shadows)]
    exposures = [
        (inside, exposure(rank, REFERENCES)) for t in done for inside, rank in zip(t.inside, t.ranks, strict=True)
    ]
    return Audit(
        **about,
        trials=count,
        proofs=[
            bound_epsilon(who, done, about["delta"], accounted_epsilon(recipe, run.users, done, who))
            for who in (SERVER, USERS)
        ],
        members=members,
        inserted=[bits for inside, bits in exposures if inside],
        absent=[bits for inside, bits in exposures if not inside],
        shadows=shadows,
        shadowed=told_apart(run.users, compared),
        recoveries=recover(recipe, materials, runs.watch("tokens of one upload")) if recovers else [],
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


class _Runs:
    """Progress over all runs of an audit: announces how many there are, and numbers them as they begin.

    Args:
        reporter: where to print.
        total: number of runs.
        recipe: of the runs.
        metrics: of the audited run, whose seconds per round estimate how long all of them take.
    """

    def __init__(self, reporter: Reporter, total: int, recipe: Recipe, metrics: Mapping[str, Any]):
        self._reporter, self._total, self._begun = reporter, total, 0
        self._began = time.perf_counter()
        rounds = recipe.training.rounds
        seconds = metrics.get("wall_seconds", 0.0) / max(1, metrics.get("rounds", 0)) * rounds * total
        taking = f", about {about(seconds)} at the speed of the audited run" if seconds else ""
        reporter.say(f"{plural(total, 'short run')} of {plural(rounds, 'round')}{taking}")

    def watch(self, what: str) -> Callable[[Clients], list[Observer]]:
        """Return what makes the observers of one or several runs, titled by number, attack and time left."""

        def begin(clients: Clients) -> list[Observer]:
            done, self._begun = self._begun, self._begun + 1
            rest = (time.perf_counter() - self._began) / max(1, done) * (self._total - done)
            left = f" (all runs: about {about(rest)} left)" if done else ""
            return [self._reporter.watch(clients, f"run {self._begun} of {self._total} · {what}{left}")]

        return begin


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


def bound_epsilon(view: str, trials: Sequence[Trial], delta: float, upper: float | None) -> Proof:
    """Guess the coin of every canary, and bound epsilon from below by how many guesses are right.

    Args:
        view: SERVER or USERS; whose observations the scores come from.
        trials: runs with canaries.
        delta: of the bound.
        upper: the accountant's epsilon for these runs, or None.

    Returns:
        The bound (``epsilon``), and the bound if every guess had been right (``provable``).
    """
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


def accounted_epsilon(recipe: Recipe, names: Sequence[str], trials: Sequence[Trial], view: str) -> float | None:
    """Return the accountant's epsilon for these runs, against an attacker with this view.

    Neighbours differ in the data of one user, which is replaced; with ``mechanism: example`` in one example of the
    user whose examples are sampled most often.

    Returns:
        Epsilon; None where nothing is guaranteed: without privacy, with noise that the seed determines, and for the
        server's view with ``mechanism: central``, which trusts the server.
    """
    privacy = recipe.privacy
    if privacy is None or privacy.noise == "reproducible" or (privacy.noise_at == "server" and view == SERVER):
        return None
    plan = make_plan(recipe, make(recipe.method.name, **recipe.method.settings), names)
    assert plan.privacy is not None
    count = max(trial.metrics["privacy"]["releases"] for trial in trials)
    if of_examples(recipe):
        rate = max(work.rate for trial in trials for work in trial.works.values())
        release = Release(noise=plan.privacy.multiplier, rate=rate)
    else:
        release = release_of(plan.privacy, plan.participation, len(names))
    replaced = MECHANISMS[privacy.mechanism].load().account_type.replaces
    return epsilon_of_replacing(release, count, privacy.delta, plan.privacy.accountant, counted=replaced)


@torch_defaults()
def audit(
    run: Run | str | Path,
    *,
    trials: int | None = None,
    rounds: int = 3,
    shadows: int = SHADOWS,
    out: str | Path | None = None,
    force: bool = False,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    progress: bool = False,
) -> Audit:
    """Attack a finished run of text, conversations or samples, and say what leaks; as ``comingle audit``.

    Args:
        run: a finished run, or its folder, which is only read.
        trials: runs with canaries, by default as many as toss about 40 coins.
        rounds: of each of them, or fewer where the run had fewer.
        shadows: runs with halves of users' training data, as reference models for membership; 0 does without.
        out: a folder for ``audit.json`` and ``audit.md``, which may be the run's; None writes nothing.
        force: replace these files.
        users: everybody's data, where a program handed it over to :func:`run`, again.
        base: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: no finished run, nothing that is shared, or files that are there already.
    """
    require_alone("audit")
    for name, value in (("trials", 1 if trials is None else trials), ("rounds", rounds)):
        if value < 1:
            raise RecipeError(f"{name}: got {value}; allowed: a whole number from 1")
    if shadows < 0 or 0 < shadows < FEWEST:
        raise RecipeError(f"shadows: got {shadows}; allowed: 0, or a whole number from {FEWEST}")
    if out is not None:
        check_targets(Path(out), force=force)
    opened = run if isinstance(run, Run) else load(run, users=users, base=base)
    with reporting(quiet=not progress) as reporter:
        found = audit_run(opened, reporter, trials=trials, rounds=rounds, shadows=shadows, given=given_of(users, base))
    if out is not None:
        write_audit(Path(out), found)
    return found
