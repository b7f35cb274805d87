"""Audits of a finished run.

Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2: each canary is included or left out by its own coin
toss, and the attacker guesses some of the coins from all that it observes. Canaries may share a run, as nothing is
assumed about their interaction; coins of several runs are counted together. A Clopper-Pearson bound on the rates of
true and false alarms (Jagielski et al. 2020, arXiv:2006.07709) would need independent trials, hence a run for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from comingle.audits.canaries import (
    MIN_REFERENCE_RUNS,
    NUM_REFERENCES,
    SERVER,
    USERS,
    Trial,
    check_auditable,
    infer_membership,
    membership_by_shadows,
    protects_single_examples,
    run_shadow,
    run_trial,
)
from comingle.audits.uploads import invert_uploads, recover, token_factors
from comingle.config import Recipe
from comingle.config.settings import MECHANISMS
from comingle.methods import make
from comingle.models.hardware import torch_defaults
from comingle.privacy.accounting import Release, epsilon
from comingle.privacy.mechanisms import release_of
from comingle.reports.audit import Audit, Proof, check_targets, exposure, write_audit
from comingle.reports.formatting import format_duration
from comingle.runs import shortened as changes_for_rounds
from comingle.runs.api import load
from comingle.runs.given import NOTHING, AnyBase, Given, given_of
from comingle.runs.progress import LOADING, Reporter, reporting
from comingle.runs.results import Run
from comingle.runs.session import prepare
from comingle.training.backends.launched import require_single_process
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.plan import make_plan
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.records import plural

_MAX_HALVINGS = 60
"""Number of times that delta is halved before epsilon counts as infinite."""


def epsilon_of_replacing(
    release: Release, count: int, delta: float, accountant: str, *, is_for_replacing: bool
) -> float:
    """Return an upper bound of epsilon when a user's data is replaced by other data rather than removed.

    Most accountants bound the effect of removing a user, but the canaries of an audit replace data.

    Args:
        release: Noise and sampling of one noisy sum: of the participants' changes in a round, or, if privacy protects
            single examples, of gradients in a step.
        count: Number of such sums in a run.
        delta: Delta of the bound.
        accountant: "rdp" or "pld".
        is_for_replacing: Whether the accountant's epsilon is for replacement already.
    """
    # With a fixed number of participants `epsilon` is for replacement already: a removal would change their number.
    draws_fixed_number = bool(release.sample)
    if is_for_replacing or draws_fixed_number:
        return epsilon(release, count, delta, accountant)
    if not release.sampled:  # no participants are drawn in secret
        half_noise = replace(release, noise=release.noise / 2)  # a replacement has twice the sensitivity of a removal
        return epsilon(half_noise, count, delta, accountant)
    # A replacement is a removal and an addition. If a removal has (epsilon, delta), a replacement has (2 epsilon,
    # (1 + exp(epsilon)) delta) by group privacy (Dwork and Roth 2014, Theorem 2.2). Halve the delta of a removal until
    # the delta of a replacement is small enough.
    for halvings in range(1, _MAX_HALVINGS):
        removal_delta = delta / 2**halvings
        removal_epsilon = epsilon(release, count, removal_delta, "rdp")  # an upper bound, whatever ``accountant`` is
        factor = 1 + math.exp(min(removal_epsilon, 700.0))  # the exponential of more is not a finite float
        if factor * removal_delta <= delta:
            return 2 * removal_epsilon
    return math.inf


_MAX_EPSILON = 64.0
"""Largest epsilon that is refuted."""
_BISECTIONS = 60
"""Number of bisections of the interval from 0 to :data:`_MAX_EPSILON`, down to the precision of floats."""


def guess_probability(epsilon: float, *, trials: int, guesses: int, correct: int, delta: float = 0.0) -> float:
    """Return an upper bound of the probability that at least ``correct`` of ``guesses`` guesses are right.

    A fair coin decides for each canary whether a run includes it, and an attacker guesses the results. Training is
    assumed to be ``(epsilon, delta)``-differentially private for each canary.

    Source: Steinke et al. 2023, arXiv:2305.08846, Theorem 5.2, with all guesses counted as in appendix D.

    Args:
        epsilon: Epsilon for each canary.
        trials: Number of canaries.
        guesses: Number of canaries for which there is a guess.
        correct: Number of right guesses.
        delta: Delta for each canary.
    """
    from scipy.stats import binom

    if correct <= 0 or guesses == 0:
        return 1.0
    p = 1 / (1 + math.exp(-epsilon))  # largest probability that a guess is right
    beta = float(binom.sf(correct - 1, guesses, p))  # probability of at least ``correct`` right guesses
    if delta == 0:
        return beta
    # The theorem's alpha: the maximum over i of P(correct - i <= number of right guesses < correct) / i.
    alpha = 0.0
    probability = 0.0
    for i in range(1, correct + 1):
        probability += float(binom.pmf(correct - i, guesses, p))
        alpha = max(alpha, probability / i)
    return min(1.0, beta + 2 * trials * delta * alpha)


def epsilon_lower_bound(*, trials: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound of epsilon that an attacker's right guesses prove; 0 if they prove nothing.

    With any epsilon up to the bound, this many right guesses have a probability of at most ``1 - confidence``
    (:func:`guess_probability`). The bound is found by bisection.

    Args:
        trials: Number of canaries, each included in a run or left out by the toss of a coin.
        guesses: Number of canaries for which there is a guess.
        correct: Number of right guesses.
        delta: Delta for each canary.
        confidence: Confidence of the bound.
    """

    def is_refuted(epsilon: float) -> bool:
        """Return whether this number of right guesses is too unlikely with this epsilon."""
        probability = guess_probability(epsilon, trials=trials, guesses=guesses, correct=correct, delta=delta)
        return probability <= 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, _MAX_EPSILON  # ``low`` is always refuted
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


DEFAULT_COINS = 40
"""Default for the number of coins, one for each user and run, rounded up to whole runs.

If all guesses are right they prove epsilon 2.5.
"""
KINDS = ("text", "conversations", "samples")
DEFAULT_SHADOWS = 8
"""Default for the number of reference runs."""
_RUNS_OF_ATTACK = 2
"""Runs of an attack on uploads: the easiest case for the attacker, and a round as in the audited run."""
CONFIDENCE = 0.95
DELTA = 1e-5
"""Delta for runs without privacy."""


def audit_run(
    run: Run,
    reporter: Reporter,
    *,
    trials: int | None = None,
    rounds: int = 3,
    shadows: int = DEFAULT_SHADOWS,
    given: Given = NOTHING,
) -> Audit:
    """Attack a run: text and conversations with canaries and membership inference, samples by inverting an upload.

    Canaries are random tokens that short runs insert into users' training data: attackers then guess which were
    inserted. Tokens are recovered from uploads of text only.

    Args:
        run: Finished run.
        reporter: Prints progress.
        trials: Number of short runs with canaries. In each run a coin decides for each user whether its canary is
            included; the default is enough runs for about 40 coins.
        rounds: Rounds of each short run; a larger number than that of the audited run is reduced to it.
        shadows: Reference runs for membership inference; 0 for none.
        given: Data and base model passed from Python, as in the audited run.

    Raises:
        RunError: Users have another kind of data, the method shares nothing, or it is peer-to-peer.
        ComingleError: As in :func:`comingle.runs.session.prepare`.
    """
    check_audited(run)
    recipe = shortened(run.recipe, run.metrics, rounds)
    fields = _audit_fields(run, recipe)
    base = getattr(run.federation.clients.model, "base", None)
    with reporter.waiting(LOADING):
        run_data = prepare(recipe, base=base, given=given)
    if run.recipe.data.kind == "samples":
        runs = _RunCounter(reporter, _RUNS_OF_ATTACK, recipe, run.metrics)
        inversions = invert_uploads(recipe, run_data, runs.observe("one upload"))
        return Audit(**fields, trials=0, proofs=[], members=[], inserted=[], absent=[], inversions=inversions)

    recovers_tokens = run.recipe.data.kind == "text" and bool(token_factors(run.federation.clients))
    num_trials = trials or math.ceil(DEFAULT_COINS / len(run.users))  # one coin per user and run
    num_recovery_runs = _RUNS_OF_ATTACK if recovers_tokens else 0
    # All runs are counted before the first one, for the estimate of the time.
    runs = _RunCounter(reporter, num_trials + shadows + num_recovery_runs, recipe, run.metrics)
    with reporter.waiting("telling training windows from others"):
        members = infer_membership(run)
    canary_trials = [run_trial(recipe, run_data, number, runs.observe("canaries")) for number in range(num_trials)]
    shadow_runs = [run_shadow(recipe, run_data, number, runs.observe("reference models")) for number in range(shadows)]

    inserted_exposures, absent_exposures = _exposures(canary_trials)
    proofs = []
    for view in (SERVER, USERS):
        upper_bound = accounted_epsilon(recipe, run.users, canary_trials, view)
        proofs.append(bound_epsilon(view, canary_trials, fields["delta"], upper_bound))
    shadowed = membership_by_shadows(run.users, shadow_runs)
    recoveries = recover(recipe, run_data, runs.observe("tokens of one upload")) if recovers_tokens else []
    return Audit(
        **fields,
        trials=num_trials,
        proofs=proofs,
        members=members,
        inserted=inserted_exposures,
        absent=absent_exposures,
        shadows=shadows,
        shadowed=shadowed,
        recoveries=recoveries,
    )


def _exposures(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    """Return how much the models of an audit memorised its canaries, as exposures in bits.

    A canary is a sequence of random tokens. Each trial trains with the canaries of about half of the users inserted
    into their data. An exposure is high if the final model gives a canary a lower loss than most reference canaries,
    which no user trained on (:func:`exposure`).

    Args:
        trials: Results of the audit's training runs: for each user's canary whether it was inserted (``inside``), and
            the rank of its loss among those of the references (``ranks``).

    Returns:
        Exposures of the inserted canaries, and for comparison those of the canaries that were left out.
    """
    inserted: list[float] = []
    absent: list[float] = []
    for trial in trials:
        for is_inserted, rank in zip(trial.inside, trial.ranks, strict=True):
            exposures = inserted if is_inserted else absent
            exposures.append(exposure(rank, NUM_REFERENCES))
    return inserted, absent


def _audit_fields(run: Run, recipe: Recipe) -> dict[str, Any]:
    """Return the fields of an :class:`Audit` that do not depend on attacks.

    Args:
        run: The audited run.
        recipe: Recipe of the short runs that are attacked.
    """
    privacy = run.metrics.get("privacy")
    return {
        "run": str(run.folder or "a run in memory"),
        "kind": run.recipe.data.kind,
        "method": run.metrics.get("method", run.recipe.method.name),
        "users": len(run.users),
        "privacy": privacy,
        "rounds": recipe.training.rounds,
        "delta": DELTA if privacy is None else privacy["delta"],  # a run without privacy has none
        "confidence": CONFIDENCE,
        "most": math.log2(NUM_REFERENCES + 1),  # exposure in bits of a canary that ranks before all references
    }


class _RunCounter:
    """Progress over all runs of an audit: prints their number and numbers them as they begin."""

    def __init__(self, reporter: Reporter, num_runs: int, recipe: Recipe, audited_metrics: Mapping[str, Any]):
        """Print the number of runs and an estimate of their time.

        Args:
            reporter: Prints progress.
            num_runs: Number of runs.
            recipe: Recipe of the runs.
            audited_metrics: Metrics of the audited run, whose seconds per round give the estimate.
        """
        self._reporter = reporter
        self._num_runs = num_runs
        self._num_begun = 0
        self._start_time = time.perf_counter()
        rounds = recipe.training.rounds
        audited_rounds = max(1, audited_metrics.get("rounds", 0))
        round_seconds = audited_metrics.get("wall_seconds", 0.0) / audited_rounds
        seconds = round_seconds * rounds * num_runs
        estimate = f", about {format_duration(seconds)} at the speed of the audited run" if seconds else ""
        reporter.say(f"{plural(num_runs, 'short run')} of {plural(rounds, 'round')}{estimate}")

    def observe(self, attack: str) -> Callable[[Clients], list[Observer]]:
        """Return a function that makes the observers of the next run: a progress bar with a title.

        A title is for example ``"run 3 of 10 · canaries (all runs: about 5 min left)"``.

        Args:
            attack: Name of the attack for which the run is made, for the title.
        """

        def start_bar(clients: Clients) -> list[Observer]:
            """Count the run, and return its progress bar; the time left is estimated from the runs that have ended."""
            num_ended = self._num_begun  # runs follow each other, so all that have begun have ended
            self._num_begun += 1
            title = f"run {self._num_begun} of {self._num_runs} · {attack}"
            if num_ended:
                seconds_per_run = (time.perf_counter() - self._start_time) / num_ended
                seconds_left = seconds_per_run * (self._num_runs - num_ended)
                title += f" (all runs: about {format_duration(seconds_left)} left)"
            return [self._reporter.watch(clients, title)]

        return start_bar


def check_audited(run: Run) -> None:
    """Check that a run can be audited: its users share models to attack, and have data for which there is an attack.

    Raises:
        RunError: The run shares nothing, its kind of data has no attack, or secure aggregation hides single uploads.
    """
    where = run.folder or "the run"
    check_auditable(where, run.federation.clients.method)
    if run.recipe.data.kind not in KINDS:
        raise RunError(f"{where}: users have {run.recipe.data.label}; allowed: text, conversations or samples")
    if run.recipe.privacy is not None and run.recipe.privacy.secure_aggregation is not None:
        raise RunError(
            f"{where}: privacy.secure_aggregation shows the server only sums, which no attack here "
            "uses; audit a run without it, in which users see the same"
        )


def shortened(recipe: Recipe, metrics: dict[str, Any], rounds: int) -> Recipe:
    """Return the recipe of a short run that leaks as much per round as the audited run.

    Args:
        recipe: Recipe of the audited run.
        metrics: Metrics of the audited run.
        rounds: Largest number of rounds.
    """
    changes: dict[str, Any] = dict(changes_for_rounds(min(rounds, recipe.training.rounds)))
    changes["evaluation.model"] = "exchanged"  # with local models there is no upload after the last round
    privacy = metrics.get("privacy")
    if privacy is not None:
        # Keep the noise of the audited run, the smallest if it differs between users. Noise derived from epsilon would
        # be less, as the run has fewer rounds.
        noise_by_user = privacy.get("noise_multipliers", {})
        changes["privacy.noise_multiplier"] = min(noise_by_user.values(), default=privacy["noise_multiplier"])
        changes["privacy.epsilon"] = None
    return recipe.with_changes(changes)


# -------------------------------------------------------------------- bounds


def guess(scores: Sequence[float | None]) -> list[bool | None]:
    """Guess for each canary whether it was included: True if its score reaches a threshold, None without a score.

    The threshold splits the scores into a low and a high group, as in Otsu 1979: the variance between the groups is
    largest.
    """
    known = sorted(score for score in scores if score is not None)
    if not known:
        return [None] * len(scores)

    def variance_between(num_low: int) -> float:
        """Return the variance between the smallest ``num_low`` scores and the others, without a constant factor."""
        num_high = len(known) - num_low
        return num_low * num_high * (fmean(known[num_low:]) - fmean(known[:num_low])) ** 2

    num_low = max(range(1, len(known)), key=variance_between, default=0)  # a single score is high
    threshold = known[num_low]  # the smallest score of the high group
    return [None if score is None else score >= threshold for score in scores]


def bound_epsilon(view: str, trials: Sequence[Trial], delta: float, upper: float | None) -> Proof:
    """Guess for every canary whether a run included it, and bound epsilon from below by the number of right guesses.

    Args:
        view: The attacker, SERVER or USERS, from whose observations the scores come.
        trials: Runs with canaries.
        delta: Delta of the bound.
        upper: The accountant's epsilon for these runs, an upper bound; None if nothing is guaranteed.

    Returns:
        The number of guesses, how many were right, the lower bound (``epsilon``), and the lower bound if every guess
        had been right (``provable``).
    """
    was_included: list[bool] = []  # of each canary in each run, decided by a coin
    scores: list[float | None] = []
    for trial in trials:
        was_included += trial.inside
        scores += trial.scores[view]
    num_guesses = num_correct = 0
    for guessed, included in zip(guess(scores), was_included, strict=True):
        if guessed is not None:
            num_guesses += 1
            num_correct += guessed == included
    num_coins = len(was_included)
    bound = partial(epsilon_lower_bound, trials=num_coins, guesses=num_guesses, delta=delta, confidence=CONFIDENCE)
    return Proof(
        view=view,
        coins=num_coins,
        guesses=num_guesses,
        correct=num_correct,
        epsilon=bound(correct=num_correct),
        provable=bound(correct=num_guesses),
        upper=upper,
    )


def accounted_epsilon(recipe: Recipe, names: Sequence[str], trials: Sequence[Trial], view: str) -> float | None:
    """Return the accountant's epsilon for these runs, the upper bound to compare with an audit's lower bound.

    It holds for neighbouring datasets in which the data of one user is replaced, or with ``mechanism: example`` one
    example of the user whose examples are sampled most often.

    Args:
        recipe: Recipe of the runs.
        names: Names of the users.
        trials: Runs with canaries.
        view: Who attacks, SERVER (which sees uploads) or USERS (who see downloads).

    Returns:
        Epsilon; None if nothing is guaranteed: without privacy, with noise that the seed determines, and for the
        server's view with ``mechanism: central``, which trusts the server.
    """
    privacy = recipe.privacy
    if privacy is None or privacy.noise == "reproducible":
        return None
    if view == SERVER and privacy.noise_at == "server":  # the server sees uploads without noise
        return None
    plan = make_plan(recipe, make(recipe.method.name, **recipe.method.settings), names)
    assert plan.privacy is not None
    num_releases = max(trial.metrics["privacy"]["releases"] for trial in trials)  # noisy sums with a user's data
    if protects_single_examples(recipe):
        # The largest probability, over users, that an example is drawn for a step.
        largest_rate = max(work.rate for trial in trials for work in trial.works.values())
        release = Release(noise=plan.privacy.multiplier, rate=largest_rate)
    else:
        release = release_of(plan.privacy, plan.participation, len(names))
    account_type = MECHANISMS[privacy.mechanism].load().account_type
    return epsilon_of_replacing(
        release,
        num_releases,
        privacy.delta,
        plan.privacy.accountant,
        is_for_replacing=account_type.replaces,  # whether the account's own epsilon is for replaced data
    )


@torch_defaults()
def audit(
    run: Run | str | Path,
    *,
    trials: int | None = None,
    rounds: int = 3,
    shadows: int = DEFAULT_SHADOWS,
    out: str | Path | None = None,
    force: bool = False,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    progress: bool = False,
) -> Audit:
    """Attack a finished run of text, conversations or samples, and report what leaks; the same as ``comingle audit``.

    Args:
        run: A finished run, or its folder, which is only read.
        trials: Number of short runs with canaries; each includes every user's canary with probability 1/2. None for 40
            divided by the number of users, rounded up.
        rounds: Rounds of each short run; a larger number than that of the audited run is reduced to it.
        shadows: Short runs on halves of users' training data, as reference models for membership inference; 0 for none.
        out: Folder for ``audit.json`` and ``audit.md``, which may be the run's; None writes nothing.
        force: Replace these files.
        users: The users' data, if it was passed to :func:`run`.
        base: The base model, if it was passed to :func:`run`.
        progress: Print progress on stderr.

    Raises:
        ComingleError: The run is not finished or shares nothing, or the files exist.
    """
    require_single_process("audit")
    if trials is not None and trials < 1:
        raise RecipeError(f"trials: got {trials}; allowed: a whole number from 1")
    if rounds < 1:
        raise RecipeError(f"rounds: got {rounds}; allowed: a whole number from 1")
    if shadows != 0 and shadows < MIN_REFERENCE_RUNS:
        raise RecipeError(f"shadows: got {shadows}; allowed: 0, or a whole number from {MIN_REFERENCE_RUNS}")
    if out is not None:
        check_targets(Path(out), force=force)
    loaded_run = run if isinstance(run, Run) else load(run, users=users, base=base)
    given = given_of(users, base)
    with reporting(quiet=not progress) as reporter:
        results = audit_run(loaded_run, reporter, trials=trials, rounds=rounds, shadows=shadows, given=given)
    if out is not None:
        write_audit(Path(out), results)
    return results
