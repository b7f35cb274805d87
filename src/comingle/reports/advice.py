"""Advice from short runs: users that should train alone, groups that gain from each other, and the method to take.

All values are changes against ``local`` with the same seed, with an interval of the mean over seeds (Student's t).
Intervals are simultaneous: all intervals of users together hold with 95%, and so do those of the means over users. If
an interval contains 0, no advice follows from it; nor does any if accuracies change equally with all seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comingle.reports.formatting import Table, additive_difference, best_of, interval_text
from comingle.reports.runs import Gain, gain_over_seeds
from comingle.reports.tables import sizes
from comingle.utils.records import MEASURES, measure_of, plural
from comingle.utils.terminal import literal_text, printable

Runs = Mapping[int, Mapping[str, Any]]
"""Metrics of runs by seed."""

GAINED, HARMED, LEVEL = "gained", "harmed", "level"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Gains of methods, and of smaller groups of users, against training alone (``local``).

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
        """Number of confidence intervals of single users' gains, one per user in each method and each group.

        All of them hold together with 95%, so each is the wider the more there are (Bonferroni).
        """
        all_gains = [*self.methods.values(), *self.groups.values()]
        return sum(len(gains_by_user) for gains_by_user in all_gains)

    def __str__(self) -> str:
        """Return the advice in a few sentences."""
        return paragraph(self)

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each user of each method and of each smaller group, for a data frame.

        The keys are ``method``, ``together`` (names of the group; None for all users), ``user``, ``change`` (mean over
        seeds), the ends ``low`` and ``high`` of its interval, and ``verdict``. The ends are None with one seed, and if
        accuracies change equally with all seeds.
        """
        records = []
        for method, gains_by_user in self.methods.items():
            for user, gain in gains_by_user.items():
                records.append({"method": method, "together": None, "user": user, **_gain_fields(gain)})
        for group, gains_by_user in self.groups.items():
            for user, gain in gains_by_user.items():
                records.append({"method": self.grouped_by, "together": group, "user": user, **_gain_fields(gain)})
        return records


def _gain_fields(gain: Gain) -> dict[str, Any]:
    """Return mean, ends of the interval and verdict, for a record."""
    low, high = gain.interval or (None, None)
    return {"change": gain.change.mean, "low": low, "high": high, "verdict": gain.verdict}


def advise_on(
    local: Runs, methods: Mapping[str, Runs], groups: Mapping[tuple[str, ...], Runs], grouped_by: str
) -> Advice:
    """Compare federated methods, and smaller groups of users, with training alone.

    Args:
        local: Runs of ``local`` with all users.
        methods: Runs of at least one other method with all users and the seeds of ``local``.
        groups: Runs of the method ``grouped_by`` with smaller groups of users and the same seeds; a key has the names
            of the group's users.
        grouped_by: The method with which these groups trained.

    Returns:
        The gains against ``local`` with their confidence intervals, and each method's bytes per round.
    """
    first = next(iter(local.values()))
    users = list(first["users"])
    measure = measure_of(dict(first))
    # All intervals of users hold together with 95%, and so do all of means: the more of them, the wider each one.
    num_user_intervals = len(users) * len(methods) + sum(len(names) for names in groups)
    num_mean_intervals = len(methods) + len(methods) - 1  # each against local, and each but the best against the best

    gains_by_method = {}
    mean_gains = {}
    for name, runs in methods.items():
        gains_by_method[name] = _gains_of_users(runs, local, users, measure, num_user_intervals)
        mean_gains[name] = _mean_gain(name, runs, local, measure, num_mean_intervals)
    best = _best_method(mean_gains, measure)
    gains_against_best = {}
    for name, runs in methods.items():
        if name != best:
            gains_against_best[name] = _mean_gain(name, runs, methods[best], measure, num_mean_intervals)
    gains_by_group = {}
    for names, runs in groups.items():
        gains_by_group[names] = _gains_of_users(runs, local, names, measure, num_user_intervals)

    last_round_by_stopped_method = {}
    for name, runs in {"local": local, **methods}.items():
        has_stopped = any("planned_rounds" in metrics for metrics in runs.values())  # as the privacy budget was spent
        if has_stopped:
            last_round_by_stopped_method[name] = min(metrics["rounds"] for metrics in runs.values())
    return Advice(
        measure=measure,
        seeds=tuple(local),
        rounds=max(metrics.get("planned_rounds", metrics["rounds"]) for metrics in local.values()),
        stopped=last_round_by_stopped_method,
        grouped_by=grouped_by,
        methods=gains_by_method,
        means=mean_gains,
        against_best=gains_against_best,
        groups=gains_by_group,
        upload_bytes={name: _mean_bytes(runs, "upload") for name, runs in methods.items()},
        download_bytes={name: _mean_bytes(runs, "download") for name, runs in methods.items()},
    )


def _mean_bytes(runs: Runs, direction: str) -> float:
    """Return the bytes that a user uploads or downloads per round, as a mean over the runs.

    Args:
        runs: Metrics of runs that differ in their seeds, by seed.
        direction: "upload" or "download".
    """
    return fmean(metrics[f"{direction}_bytes_per_user_round"] for metrics in runs.values())


def _gains_of_users(runs: Runs, local: Runs, users: Sequence[str], measure: str, num_intervals: int) -> dict[str, Gain]:
    """Return each user's change against ``local``, paired by seed; users with a result that is not finite are left out.

    Args:
        runs: Runs of a method by seed.
        local: Runs of ``local`` by seed.
        users: Names of the users whose gains are returned.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    key = f"test_{measure}"
    gains = {}
    for user in users:
        differences = []  # one per seed
        for seed, local_run in local.items():
            result = runs[seed]["users"][user][key]
            local_result = local_run["users"][user][key]
            differences.append(additive_difference(result, local_result, measure))
        finite = [difference for difference in differences if difference is not None]
        if len(finite) == len(differences):
            gains[user] = gain_over_seeds(user, measure, finite, num_intervals=num_intervals)
    return gains


def _mean_gain(name: str, runs: Runs, baseline_runs: Runs, measure: str, num_intervals: int) -> Gain:
    """Return a method's mean change over users against a baseline, paired by seed.

    Users whose change is not finite are left out.

    Args:
        name: The method, for the field ``user`` of the gain.
        runs: Its runs by seed.
        baseline_runs: Runs of the method to compare with, by seed.
        measure: Name of the measure of the results, such as "perplexity".
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    key = f"test_{measure}"
    mean_differences = []  # one per seed
    for seed, baseline_run in baseline_runs.items():
        differences = []  # one per user
        for user, baseline_results in baseline_run["users"].items():
            result = runs[seed]["users"][user][key]
            differences.append(additive_difference(result, baseline_results[key], measure))
        mean_differences.append(fmean(difference for difference in differences if difference is not None))
    return gain_over_seeds(name, measure, mean_differences, num_intervals=num_intervals)


def _best_method(mean_gains: Mapping[str, Gain], measure: str) -> str:
    """Return the method with the best mean over users."""
    min_or_max = best_of(measure)
    return min_or_max(mean_gains, key=lambda name: mean_gains[name].change.mean)


# -------------------------------------------------------------------- choice of a method


def method_to_take(advice: Advice) -> str | None:
    """Return the method to recommend: the one that uploads least among good ones; None if no method is good.

    A good method is shown to be better than ``local`` on average over users, and not shown to be worse than the method
    with the best mean. Shown means that the confidence interval excludes 0.
    """
    best = _method_with_best_mean(advice)
    candidates = [best]
    for name, gain_against_best in advice.against_best.items():
        if gain_against_best.verdict != HARMED:
            candidates.append(name)
    gaining = [name for name in candidates if advice.means[name].verdict == GAINED]
    # The best is the first candidate, so it is preferred to others that upload as much.
    return min(gaining, key=lambda name: advice.upload_bytes[name], default=None)


def _method_with_best_mean(advice: Advice) -> str:
    """Return the method with the best mean, which is the only one missing in ``against_best``."""
    return next(name for name in advice.means if name not in advice.against_best)


def harmed_by_all(advice: Advice) -> list[str]:
    """Return the users that every method is shown to harm."""
    return [user for user, verdicts in _verdicts_by_user(advice).items() if verdicts == {HARMED}]


def helped_by_none(advice: Advice) -> list[str]:
    """Return the users that no method is shown to help, except those that all are shown to harm."""
    users = []
    for user, verdicts in _verdicts_by_user(advice).items():
        is_harmed_by_all = verdicts == {HARMED}
        if GAINED not in verdicts and not is_harmed_by_all:
            users.append(user)
    return users


def _verdicts_by_user(advice: Advice) -> dict[str, set[str]]:
    """Return which verdicts a user has under any of the methods, to find users that no method helps.

    For example, ``{"ann": {"gained", "level"}}`` if one method helps ann, and others have no clear effect.
    """
    verdicts_by_user: dict[str, set[str]] = {}
    for gains in advice.methods.values():
        for user, gain in gains.items():
            verdicts_by_user.setdefault(user, set()).add(gain.verdict)
    return verdicts_by_user


def partners(advice: Advice, user: str) -> dict[str, list[str]]:
    """Return a user's partners in groups of two, by the verdict on this user's gain in the pair.

    Args:
        advice: Gains of each user in each smaller group against ``local``.
        user: Name of the user.

    Returns:
        The partners by verdict, such as ``{"gained": ["bob"], "level": [], "harmed": ["cem"]}``.
    """
    partners_by_verdict: dict[str, list[str]] = {GAINED: [], LEVEL: [], HARMED: []}
    for names, gains in advice.groups.items():
        if len(names) == 2 and user in gains:
            partner = next(name for name in names if name != user)
            partners_by_verdict.setdefault(gains[user].verdict, []).append(partner)
    return partners_by_verdict


# -------------------------------------------------------------------- text and tables


def paragraph(advice: Advice) -> str:
    """Return the advice in a few sentences, which name only changes whose confidence intervals exclude 0."""
    sentences = []
    if len(advice.seeds) < 2:
        sentences.append("With one seed there are no intervals, so nothing is shown; give at least two seeds.")
    else:
        sentences.append(_method_sentence(advice))
        harmed = harmed_by_all(advice)
        if harmed:
            sentences.append(f"Every method tried harms {_joined_names(harmed)}: train alone.")
        not_helped = helped_by_none(advice)
        if not_helped:
            sentences.append(f"No method is shown to help {_joined_names(not_helped)}.")
        sentences += _pair_sentences(advice)
        sentences.append(
            f"The {advice.intervals} intervals of users have a joint confidence of 95%, and so have those of means."
        )
    rounds, seeds = plural(advice.rounds, "round"), ", ".join(map(str, advice.seeds))
    sentences.append(f"These are results of runs of {rounds} with seeds {seeds}; longer ones may differ.")
    for name, last_round in advice.stopped.items():
        sentences.append(f"{name}: the privacy budget was spent after {last_round} of {advice.rounds} rounds.")
    return " ".join(sentences)


def _method_sentence(advice: Advice) -> str:
    """Return the sentences on the method to take, with the methods that may be as good."""
    chosen = method_to_take(advice)
    if chosen is None:
        return "No method is shown to beat local training on average over users; take local, which sends nothing."
    gain_text = _gain_text(advice.means[chosen])
    (upload,) = sizes([advice.upload_bytes[chosen]])
    text = f"Take {chosen}: {gain_text} on average over users; each user uploads {upload} per round."
    best = _method_with_best_mean(advice)
    if chosen != best:
        return f"{text} {best} has the best mean, but is not shown to be better."
    not_worse = [name for name, gain in advice.against_best.items() if gain.verdict != HARMED]
    if not_worse:
        text += f" It is not shown to be better than {_joined_names(not_worse)}."
    return text


def _pair_sentences(advice: Advice) -> list[str]:
    """Return a sentence for each user that gains or is harmed in pairs, such as "In pairs (fedavg) ann gains from bob".

    If smaller groups of users have trained without such effects, return one sentence that says so.
    """
    users = dict.fromkeys(user for gains in advice.groups.values() for user in gains)
    sentences = []
    for user in users:
        partners_by_verdict = partners(advice, user)
        effects = []
        if partners_by_verdict[GAINED]:
            effects.append(f"gains from {_joined_names(partners_by_verdict[GAINED])}")
        if partners_by_verdict[HARMED]:
            effects.append(f"is harmed by {_joined_names(partners_by_verdict[HARMED])}")
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
    """Return a gain's interval in parentheses; empty if it has none, as with a single seed."""
    return "" if gain.interval is None else f" ({interval_text(gain.interval, gain.measure)})"


def gain_cell(gain: Gain | None) -> str:
    """Return the text of a gain in a table: mean, interval and verdict, such as "-9.7 (-12.0 to -7.4) gained"."""
    if gain is None:
        return "not finite"
    number = f"{gain.change.mean:+z.1f}"  # without unit, which is in the table's title
    mean = gain.text if gain.measure == "loss" else number  # a factor for losses, such as "×0.9"
    return f"{mean}{_interval_text(gain)} {gain.verdict}"


def gain_rows(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of gains against training alone.

    There is a row for each method with all users, then one for each smaller group, which has only gains of users. The
    first column, "together", names the method or the group.
    """
    users = list(dict.fromkeys(user for gains in advice.methods.values() for user in gains))
    header = ["together", *users, "mean", "sent / round", "received / round"]
    upload_texts = sizes(list(advice.upload_bytes.values()))
    download_texts = sizes(list(advice.download_bytes.values()))
    rows = []
    for method, upload, download in zip(advice.methods, upload_texts, download_texts, strict=True):
        gains = advice.methods[method]
        user_cells = [gain_cell(gains.get(user)) for user in users]
        rows.append([method, *user_cells, gain_cell(advice.means[method]), upload, download])
    for members, gains in advice.groups.items():
        user_cells = [gain_cell(gains[user]) if user in gains else "" for user in users]
        rows.append([f"{advice.grouped_by}: {_joined_names(members)}", *user_cells, "", "", ""])
    return header, rows


def render_advice(advice: Advice) -> Table:
    """Return a table for the terminal of the changes of all users, and of their mean, against training alone."""
    units = {"perplexity": "per cent of perplexity", "loss": "as a factor of test loss"}
    unit = units.get(advice.measure, f"in test {advice.measure}")
    title = f"change against local, {unit} ({MEASURES[advice.measure]} is better)"
    if len(advice.seeds) > 1:
        title += "; joint confidence of intervals: 95%"
    header, rows = gain_rows(advice)
    table = Table(title=title, title_justify="left", box=None)
    for column, name in enumerate(header):
        is_label_column = column == 0  # with methods and groups of users
        table.add_column(literal_text(name), no_wrap=is_label_column)
    for row in rows:
        table.add_row(*(literal_text(text) for text in row))
    return table
