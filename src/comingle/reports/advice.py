"""Advice from short runs: users that should train alone, groups that gain from each other, and the method to take.

All values are changes against ``local`` with the same seed, with an interval of the mean over seeds (Student's t).
Intervals are simultaneous: all intervals of users together hold with 95%, and so do those of the means over users. If
an interval contains 0, no advice follows from it; nor does any if accuracies
change equally with all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comingle.reports.formatting import Table, additive_difference, interval_text
from comingle.reports.runs import Gain, gain_over_seeds
from comingle.reports.tables import sizes
from comingle.utils.records import MEASURES, measure_of, plural
from comingle.utils.terminal import printable, words

Runs = Mapping[int, Mapping[str, Any]]
"""Metrics of runs by seed."""

GAINED, HARMED, LEVEL = "gained", "harmed", "level"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Gains against ``local``.

    Args:
        measure: The measure that methods are compared by.
        seeds: Seeds of the runs.
        rounds: Planned rounds of the runs.
        methods: Gains of each user by method.
        means: Gains of the mean over users by method.
        against_best: Gains of each method's mean against that of the best method.
        groups: Gains of each user in smaller groups, by the names of the users that trained together.
        upload_bytes: Bytes that one user sends in a round, by method.
        download_bytes: Bytes that one user receives in a round, by method.
    """

    measure: str
    seeds: tuple[int, ...]
    rounds: int
    stopped: Mapping[str, int]
    """Rounds after which a method's privacy budget was spent, for methods that stopped early."""
    grouped_by: str
    """Method with which the smaller groups trained."""
    methods: Mapping[str, Mapping[str, Gain]]
    means: Mapping[str, Gain]
    against_best: Mapping[str, Gain]
    groups: Mapping[tuple[str, ...], Mapping[str, Gain]]
    upload_bytes: Mapping[str, float]
    download_bytes: Mapping[str, float]

    @property
    def intervals(self) -> int:
        """Number of intervals of users' gains."""
        return sum(map(len, self.methods.values())) + sum(map(len, self.groups.values()))

    def __str__(self) -> str:
        return paragraph(self)

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each user of each method and of each smaller group, for a data frame.

        The keys are ``method``, ``together`` (names of the group; None for all users), ``user``, ``change`` (mean over
        seeds), the ends ``low`` and ``high`` of its interval (None with one seed, and if seeds tie), and ``verdict``.
        """
        trainings = [(method, None, gains) for method, gains in self.methods.items()]
        trainings += [(self.grouped_by, group, gains) for group, gains in self.groups.items()]
        return [
            {"method": method, "together": group, "user": user, **_gain_fields(gain)}
            for method, group, gains in trainings
            for user, gain in gains.items()
        ]


def _gain_fields(gain: Gain) -> dict[str, Any]:
    """Return mean, ends of the interval and verdict, for a record."""
    low, high = gain.interval or (None, None)
    return {"change": gain.change.mean, "low": low, "high": high, "verdict": gain.verdict}


def advise_on(
    local: Runs, methods: Mapping[str, Runs], groups: Mapping[tuple[str, ...], Runs], grouped_by: str
) -> Advice:
    """Compare federated methods, and smaller groups of users, with training alone.

    The result is the basis of advice on which users should train together, and with which method.

    Args:
        local: Runs of ``local`` with all users.
        methods: Runs of at least one other method with all users and the seeds of ``local``.
        groups: Runs of the method ``grouped_by`` with smaller groups of users and the same seeds; a key has the names
            of the group's users.
        grouped_by: The method with which these groups trained.

    Returns:
        The gains, which are changes against ``local``, with their confidence intervals, and each method's traffic.
    """
    first = next(iter(local.values()))
    measure = measure_of(dict(first))
    # Confidence intervals of users' gains: one for each user with each method, and for each user in each smaller group.
    # They are counted because all hold at once with 95%, so each is wider the more there are.
    num_intervals = len(first["users"]) * len(methods) + sum(map(len, groups))
    # Those of gains of the mean over users: each method against `local`, and each but the best against the best.
    num_mean_intervals = 2 * len(methods) - 1
    means = {name: _mean_gain(name, runs, local, measure, num_mean_intervals) for name, runs in methods.items()}
    best = _best_method(means, measure)
    return Advice(
        measure=measure,
        seeds=tuple(local),
        rounds=max(metrics.get("planned_rounds", metrics["rounds"]) for metrics in local.values()),
        # Metrics have "planned_rounds" only if the privacy budget was spent before all of them.
        stopped={
            name: min(metrics["rounds"] for metrics in runs.values())
            for name, runs in {"local": local, **methods}.items()
            if any("planned_rounds" in metrics for metrics in runs.values())
        },
        grouped_by=grouped_by,
        methods={
            name: _gains_of_users(runs, local, list(first["users"]), measure, num_intervals)
            for name, runs in methods.items()
        },
        means=means,
        against_best={
            name: _mean_gain(name, runs, methods[best], measure, num_mean_intervals)
            for name, runs in methods.items()
            if name != best
        },
        groups={names: _gains_of_users(runs, local, names, measure, num_intervals) for names, runs in groups.items()},
        upload_bytes={name: _mean_bytes(runs, "upload") for name, runs in methods.items()},
        download_bytes={name: _mean_bytes(runs, "download") for name, runs in methods.items()},
    )


def _mean_bytes(runs: Runs, direction: str) -> float:
    """Return the mean over seeds of the bytes per user and round; ``direction`` is ``upload`` or ``download``."""
    return fmean(metrics[f"{direction}_bytes_per_user_round"] for metrics in runs.values())


def _gains_of_users(runs: Runs, local: Runs, users: Sequence[str], measure: str, num_intervals: int) -> dict[str, Gain]:
    """Return each user's change against ``local``, paired by seed; users with a result that is not finite are left out.

    Args:
        runs: Runs of a method by seed.
        local: Runs of ``local`` by seed.
        users: The users.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    key, gains = f"test_{measure}", {}
    for user in users:
        pairs = [(runs[seed]["users"][user][key], local[seed]["users"][user][key]) for seed in local]
        if (gain := _gain_of_user(user, pairs, measure, num_intervals)) is not None:
            gains[user] = gain
    return gains


def _mean_gain(name: str, runs: Runs, others: Runs, measure: str, num_intervals: int) -> Gain:
    """Return a method's mean change over users against other runs, paired by seed.

    The mean of log ratios, or of differences of accuracies, gives each user the same weight. Users whose change is
    undefined are left out.

    Args:
        name: The method, which takes the place of a user in the result.
        runs: Its runs by seed.
        others: Runs to compare with, by seed.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    key, means = f"test_{measure}", []  # one mean per seed
    for seed, other_run in others.items():
        users = other_run["users"]
        differences = [additive_difference(runs[seed]["users"][user][key], users[user][key], measure) for user in users]
        means.append(fmean(value for value in differences if value is not None))
    return gain_over_seeds(name, measure, means, num_intervals=num_intervals)


def _gain_of_user(
    user: str, pairs: Sequence[tuple[float | None, float | None]], measure: str, num_intervals: int
) -> Gain | None:
    """Return a user's mean change against ``local`` over seeds; None if a result is not finite.

    Args:
        user: The user.
        pairs: The user's result and its result of ``local``, for each seed.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    differences = [additive_difference(value, baseline, measure) for value, baseline in pairs]
    finite = [difference for difference in differences if difference is not None]
    if len(finite) < len(pairs):
        return None
    return gain_over_seeds(user, measure, finite, num_intervals=num_intervals)


def _best_method(means: Mapping[str, Gain], measure: str) -> str:
    """Return the method with the best mean over users."""
    sign = 1 if MEASURES[measure] == "lower" else -1
    return min(means, key=lambda name: sign * means[name].change.mean)


# -------------------------------------------------------------------- choice of a method


def method_to_take(advice: Advice) -> str | None:
    """Return the method that uploads least among those that gain and are not shown to be worse than the best.

    A method gains if the interval of its mean change over users against ``local`` excludes 0 on the better side. None
    if no method does.
    """
    # ``against_best`` compares each method but the best with the best; HARMED means shown to be worse than the best.
    best = next(name for name in advice.means if name not in advice.against_best)
    not_worse = [name for name, gain in advice.against_best.items() if gain.verdict != HARMED]
    gaining = [name for name in (best, *not_worse) if advice.means[name].verdict == GAINED]
    return min(gaining, key=lambda name: (advice.upload_bytes[name], name != best), default=None)  # the best of equals


def harmed_by_all(advice: Advice) -> list[str]:
    """Return the users that every method is shown to harm."""
    return _users_by_verdict(advice, lambda verdicts: verdicts == {HARMED})


def undecided(advice: Advice) -> list[str]:
    """Return the users for which no method is shown to gain, without those that every method harms."""
    return _users_by_verdict(advice, lambda verdicts: GAINED not in verdicts and verdicts != {HARMED})


def _users_by_verdict(advice: Advice, wanted: Callable[[set[str]], bool]) -> list[str]:
    """Return the users whose verdicts over all methods meet a condition.

    Args:
        advice: Gains of each user with each method against ``local``.
        wanted: The condition; called with the set of a user's verdicts.
    """
    users = dict.fromkeys(user for gains in advice.methods.values() for user in gains)
    verdicts = {user: {gains[user].verdict for gains in advice.methods.values() if user in gains} for user in users}
    return [user for user in users if wanted(verdicts[user])]


def partners(advice: Advice, user: str) -> dict[str, list[str]]:
    """Return a user's partners in groups of two, by the verdict on this user's gain in the pair.

    Args:
        advice: Gains of each user with each method against ``local``.
        user: The user.

    Returns:
        Lists of the other user of each pair, by :data:`GAINED`, :data:`LEVEL` and :data:`HARMED`, and by the verdicts
        of single seeds that occur.
    """
    by_verdict: dict[str, list[str]] = {GAINED: [], LEVEL: [], HARMED: []}
    for names, gains in advice.groups.items():
        if len(names) == 2 and user in gains:
            other = next(name for name in names if name != user)
            by_verdict.setdefault(gains[user].verdict, []).append(other)
    return by_verdict


# -------------------------------------------------------------------- text and tables


def paragraph(advice: Advice) -> str:
    """Return the advice in a few sentences, which name only changes whose confidence intervals exclude 0.

    They name the method to take, users that all methods harm or none is shown to help, pairs of users, and limits of
    the evidence: number of intervals, rounds, seeds, and methods that stopped early. With one seed there are no
    intervals, so only the limits remain.
    """
    sentences = [_method_sentence(advice)]
    if len(advice.seeds) < 2:
        sentences = ["With one seed there are no intervals, so nothing is shown; give at least two seeds."]
    else:
        if harmed := harmed_by_all(advice):
            sentences.append(f"Every method tried harms {_joined_names(harmed)}: train alone.")
        if level := undecided(advice):
            sentences.append(f"No method is shown to help {_joined_names(level)}.")
        sentences += _pair_sentences(advice)
        sentences.append(
            f"The {advice.intervals} intervals of users have a joint confidence of 95%, and so have those of means."
        )
    seeds = ", ".join(map(str, advice.seeds))
    sentences.append(
        f"These are results of runs of {plural(advice.rounds, 'round')} with seeds {seeds}; longer ones may differ."
    )
    sentences += [
        f"{name}: the privacy budget was spent after {done} of {advice.rounds} rounds."
        for name, done in advice.stopped.items()
    ]
    return " ".join(sentences)


def _method_sentence(advice: Advice) -> str:
    """Return the sentences on the method to take, with the methods that may be as good."""
    chosen = method_to_take(advice)
    if chosen is None:
        return "No method is shown to beat local training on average over users; take local, which sends nothing."
    gain = advice.means[chosen]
    # ``against_best`` compares each method but the best with the best.
    best = next(name for name in advice.means if name not in advice.against_best)
    (upload,) = sizes([advice.upload_bytes[chosen]])
    text = f"Take {chosen}: {_gain_text(gain)} on average over users; each user uploads {upload} per round."
    if chosen != best:
        text += f" {best} has the best mean, but is not shown to be better."
    elif not_worse := [name for name, other in advice.against_best.items() if other.verdict != HARMED]:
        text += f" It is not shown to be better than {_joined_names(not_worse)}."
    return text


def _pair_sentences(advice: Advice) -> list[str]:
    """Return a sentence for each user that gains or is harmed when it trains in a pair, with the names of its partners.

    If smaller groups of users have trained and no user gains or is harmed in a pair, return one sentence that says so.
    """
    users = dict.fromkeys(user for gains in advice.groups.values() for user in gains)
    sentences = []
    for user in users:
        by_verdict = partners(advice, user)
        effects = [
            f"{verb} {_joined_names(by_verdict[verdict])}"
            for verdict, verb in ((GAINED, "gains from"), (HARMED, "is harmed by"))
            if by_verdict[verdict]
        ]
        if effects:
            sentences.append(f"In pairs ({advice.grouped_by}) {printable(user)} {' and '.join(effects)}.")
    if advice.groups and not sentences:
        sentences.append(f"No smaller group ({advice.grouped_by}) is shown to gain or to harm a user.")
    return sentences


def _joined_names(names: Sequence[str]) -> str:
    """Join users' names with commas and "and"."""
    *most, last = map(printable, names)
    return f"{', '.join(most)} and {last}" if most else last


def _gain_text(gain: Gain) -> str:
    """Return a mean change with its interval as text, in the unit of its measure."""
    return gain.text + _interval_text(gain)


def _interval_text(gain: Gain) -> str:
    """Return an interval in parentheses; empty with one seed, and if seeds tie."""
    return "" if gain.interval is None else f" ({interval_text(gain.interval, gain.measure)})"


def cell(gain: Gain | None) -> str:
    """Return the text of a gain in a table: mean, interval and verdict."""
    if gain is None:
        return "not finite"
    # The title of the table has the unit of all changes but those of losses, which are written as factors.
    mean = gain.text if gain.measure == "loss" else f"{gain.change.mean:+z.1f}"
    return f"{mean}{_interval_text(gain)} {gain.verdict}"


def rows_of(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of gains against training alone.

    The table has a row for each method with all users, then one for each smaller group of users that trained together.
    The first column ("together") names the method and the group. A column for each user, their mean, and the bytes per
    user and round follow.
    """
    users = list(dict.fromkeys(user for gains in advice.methods.values() for user in gains))
    uploads, downloads = (sizes(list(counts.values())) for counts in (advice.upload_bytes, advice.download_bytes))
    rows = [
        [name, *(cell(gains.get(user)) for user in users), cell(advice.means[name]), uploads[i], downloads[i]]
        for i, (name, gains) in enumerate(advice.methods.items())
    ]
    for names, gains in advice.groups.items():
        label = f"{advice.grouped_by}: {_joined_names(names)}"
        rows.append([label, *(cell(gains[user]) if user in gains else "" for user in users), "", "", ""])
    return ["together", *users, "mean", "sent / round", "received / round"], rows


def render_advice(advice: Advice) -> Table:
    """Return a table for the terminal of the changes of all users, and of their mean, against training alone."""
    units = {"perplexity": "per cent of perplexity", "loss": "as a factor of test loss"}
    unit = units.get(advice.measure, f"in test {advice.measure}")
    title = f"change against local, {unit} ({MEASURES[advice.measure]} is better)"
    title += "; joint confidence of intervals: 95%" if len(advice.seeds) > 1 else ""
    head, rows = rows_of(advice)
    table = Table(title=title, title_justify="left", box=None)
    for name in head:
        table.add_column(words(name), no_wrap=name == "together")
    for row in rows:
        table.add_row(*map(words, row))
    return table
