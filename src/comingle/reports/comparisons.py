"""Comparisons of methods over seeds, with intervals and p-values.

Every statistic that tables, pages and advice print is made here. Which interval, and why no bootstrap:
decision 14 (docs/decisions/0014-two-way-intervals.md).

Differences are paired by user and seed: log ratios of perplexities and losses, whose mean is the ratio of geometric
means, and plain differences of accuracies and ROUGE-1. A method is *better* or *worse* where the interval of its mean
difference (:func:`comingle.reports.comparisons.two_way`), at the level that Holm's procedure gives it among all
methods, leaves out 0; else it is *level*, which is no proof that there is no difference.

A baseline may be several methods, and then is the better of them, for each user with each seed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, cast

import numpy as np
from jaxtyping import Float
from rich.text import Text
from scipy.special import stdtr, stdtrit

from comingle.reports.formatting import (
    Table,
    additive_difference,
    as_change,
    best_of,
    change_text,
    is_worse,
    markdown_line,
    reach_text,
    rule,
    worst_of,
)
from comingle.utils.errors import RecipeError, RunError, did_you_mean, list_names
from comingle.utils.records import GEOMETRIC, geometric, measure_of, read_metrics
from comingle.utils.terminal import words

ERROR = 0.05
"""How often a family of intervals, or of tests, may be wrong: 5 in 100."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, its standard error, and the degrees of freedom that Student's t has for it."""

    mean: float
    error: float
    freedom: float

    def interval(self, share: float = 1.0) -> tuple[float, float]:
        """``mean -+ t error``, of confidence ``1 - 0.05 share``."""
        reach = self.error * float(stdtrit(self.freedom, 1 - share * ERROR / 2)) if self.error else 0.0
        return self.mean - reach, self.mean + reach

    @property
    def p_value(self) -> float:
        """Two-sided, of the hypothesis that the mean is 0: the share of ERROR at which the interval reaches 0."""
        if not self.error:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


def one_way(values: Sequence[float]) -> Estimate:
    """The mean of at least two independent values, ``s / sqrt(n)``, ``n - 1``."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), error=error, freedom=len(values) - 1)


def interval(values: Sequence[float], *, together: int = 1) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean, ``mean -+ t s / sqrt(n)``; None for a single value.

    Of intervals that hold ``together``, so many, with 95%, each is wider (Bonferroni).
    """
    return None if len(values) < 2 else one_way(values).interval(1 / together)


def two_way(values: Float[np.ndarray, "user seed"]) -> Estimate:
    """The mean over users and seeds, both drawn: ``value = mean + user + seed + rest``, from at least two seeds.

    With the mean squares of users, seeds and rest, ``variance = (users + seeds - rest) / (U S)``, with Satterthwaite's
    degrees of freedom (Biometrics Bulletin 2, 1946). Never less than users alone or seeds alone would give: where the
    rest is all there is, so that subtracting it may leave nothing, the interval is too wide and never too narrow.
    """
    num_users, num_seeds = values.shape
    if num_users == 1:
        return one_way(values[0].tolist())
    mean, by_user, by_seed = values.mean(), values.mean(1), values.mean(0)
    of_users, of_seeds = num_seeds * by_user.var(ddof=1), num_users * by_seed.var(ddof=1)
    of_rest = ((values - by_user[:, None] - by_seed + mean) ** 2).sum() / ((num_users - 1) * (num_seeds - 1))
    variance, freedom = max((of_users, num_users - 1.0), (of_seeds, num_seeds - 1.0))
    if (both := of_users + of_seeds - of_rest) > variance:
        parts = ((of_users, num_users - 1), (of_seeds, num_seeds - 1), (of_rest, (num_users - 1) * (num_seeds - 1)))
        variance, freedom = both, both**2 / sum(square**2 / own for square, own in parts)
    return Estimate(mean=float(mean), error=math.sqrt(variance / values.size), freedom=float(freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979): those of at most 0.05 are rejected, and
    with 95% no true hypothesis is among them."""
    adjusted, floor = [1.0] * len(p_values), 0.0
    for rank, number in enumerate(np.argsort(p_values, kind="stable")):
        floor = max(floor, (len(p_values) - rank) * p_values[number])
        adjusted[number] = min(1.0, floor)
    return adjusted


def holm_shares(p_values: Sequence[float]) -> list[float]:
    """The share of ERROR at which Holm's procedure tests each: the interval of that share leaves out 0 exactly where
    the hypothesis is rejected. The smallest p-value has ``1 / n``, the next ``1 / (n - 1)``, until one is not rejected;
    that one's share is for all that are left."""
    rejected = sum(adjusted <= ERROR for adjusted in holm(p_values))
    shares = [1.0] * len(p_values)
    for rank, number in enumerate(np.argsort(p_values, kind="stable")):
        shares[number] = 1 / (len(p_values) - min(rank, rejected))
    return shares


def signed_rank(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of Wilcoxon's signed-rank test (Biometrics Bulletin 1, 1945), one value a user.

    Differences of 0 are left out, equal ones share their ranks; counts all signs, so nothing is approximated.
    """
    known = np.array([value for value in differences if value])
    if not len(known):
        return 1.0
    _, place, counts = np.unique(np.abs(known), return_inverse=True, return_counts=True)
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]  # twice the rank, so that shared ones are whole
    chances = np.ones(1)  # of each sum of the ranks with a positive sign
    for rank in ranks:
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    found = int(ranks[known > 0].sum())
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def smallest_signed_rank(users: int) -> float:
    """Less than this :func:`signed_rank` cannot be, ``2 / 2^users``: 0.125 of 4 users."""
    return min(1.0, 2.0 ** (1 - users))


Results = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""Each user's result of each method with each seed; None where it is not finite."""

BASELINE = "local"
BETTER, LEVEL, WORSE = "better", "level", "worse"
NOT_FINITE, ONE_SEED = "not finite", "one seed"
STYLES = {BETTER: "green", WORSE: "red"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One method against the baseline.

    ``change`` and its interval from ``low`` to ``high`` are in the unit of :func:`comingle.reports.formatting.change`:
    per cent of perplexities, points of shares, powers of ten of losses; the interval has ``confidence``, 0.95 or more.
    All are None where ``verdict`` is :data:`NOT_FINITE` or :data:`ONE_SEED`. ``p_value`` is Wilcoxon's over users,
    adjusted by Holm; None where so few users could not give 0.05. ``ahead`` of ``pairs`` results, one for each user and
    seed, are better than the baseline's, and ``worst`` is the change of the one that is furthest behind, None where one
    is not finite.
    """

    method: str
    seeds: tuple[int, ...]
    verdict: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    p_value: float | None = None
    ahead: int = 0
    pairs: int = 0
    worst: float | None = None


class AgainstRecord(TypedDict):
    """:class:`Against` as plain data; each of ``methods`` has the fields of a :class:`Verdict`."""

    baseline: str
    measure: str
    users: int
    unit: str
    methods: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Against:
    """All methods of a comparison against ``baseline``, as :func:`spoken`."""

    baseline: str
    measure: str
    users: int
    verdicts: tuple[Verdict, ...]

    @property
    def judged(self) -> int:
        """How many methods there is an interval for: over so many Holm's procedure goes."""
        return sum(one.change is not None for one in self.verdicts)

    def as_dict(self) -> AgainstRecord:
        """Return plain data, for :meth:`read`."""
        unit = {"perplexity": "per cent", "loss": "powers of ten"}.get(self.measure, "points of 0.01")
        methods = [{**asdict(one), "seeds": list(one.seeds)} for one in self.verdicts]
        return {
            "baseline": self.baseline,
            "measure": self.measure,
            "users": self.users,
            "unit": unit,
            "methods": methods,
        }

    @classmethod
    def read(cls, content: AgainstRecord) -> Against:
        """What :meth:`as_dict` has made, out of a file."""
        verdicts = tuple(Verdict(**{**one, "seeds": tuple(one["seeds"])}) for one in content["methods"])
        baseline, measure, users = content["baseline"], content["measure"], content["users"]
        return cls(baseline=baseline, measure=measure, users=users, verdicts=verdicts)


def baseline_of(methods: Sequence[str], wanted: str | None) -> str:
    """What the others are held against: ``wanted`` (several with commas between), else ``local``, else the first.

    Raises:
        RecipeError: it is not among the methods.
    """
    if wanted is None:
        return BASELINE if BASELINE in methods else methods[0]
    for name in members(wanted):
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise RecipeError(f"--against {name!r}: not among the methods.{hint} There are: {', '.join(methods)}")
    return ",".join(members(wanted))


def members(baseline: str) -> list[str]:
    """The methods that a baseline is the better of, each once."""
    return list(dict.fromkeys(name.strip() for name in baseline.split(",")))


def spoken(names: Sequence[str]) -> str:
    """A baseline in words."""
    *others, last = names
    if not others:
        return last
    return f"the {'better' if len(others) == 1 else 'best'} of {', '.join(others)} and {last}"


def hold(results: Results, measure: str, baseline: str) -> Against | None:
    """Every other method against ``baseline``; None where there is no other, or fewer than two seeds of any."""
    theirs = _best([results[name] for name in members(baseline)], measure)
    pairs = {name: _differences(of, theirs, measure) for name, of in results.items() if name != baseline}
    if not any(len(found) > 1 for found in pairs.values()):
        return None
    tables = {name: table for name, found in pairs.items() if (table := _whole(found)) is not None}
    estimates = {name: two_way(table) for name, table in tables.items()}
    shares = dict(zip(tables, holm_shares([one.p_value for one in estimates.values()]), strict=True))
    p_values = dict(zip(tables, holm([signed_rank(table.mean(1).tolist()) for table in tables.values()]), strict=True))
    users = len(next(iter(theirs.values())))
    sayable = len(tables) * smallest_signed_rank(users) <= ERROR

    def verdict(name: str) -> Verdict:
        seeds = tuple(pairs[name])
        if name not in tables:
            return Verdict(method=name, seeds=seeds, verdict=NOT_FINITE if len(seeds) > 1 else ONE_SEED)
        p_value = p_values[name] if sayable else None
        return _verdict(name, seeds, estimates[name], measure, shares[name], p_value)

    return Against(
        baseline=spoken(members(baseline)),
        measure=measure,
        users=users,
        verdicts=tuple(replace(verdict(name), **_counted(found, measure)) for name, found in pairs.items()),
    )


def _best(of: Sequence[Mapping[int, Mapping[str, float | None]]], measure: str) -> dict[int, dict[str, float | None]]:
    """Each user's best result with each seed that all of them have; None where one of them is not finite."""
    pick = best_of(measure)

    def pick_of(seed: int, user: str) -> float | None:
        values = [value for one in of if (value := one[seed].get(user)) is not None and math.isfinite(value)]
        return pick(values) if len(values) == len(of) else None

    seeds = [seed for seed in of[0] if all(seed in one for one in of)]
    return {seed: {user: pick_of(seed, user) for user in of[0][seed]} for seed in seeds}


def _counted(pairs: Mapping[int, Sequence[float | None]], measure: str) -> dict[str, Any]:
    """How many of the differences are for the better, and the worst of them."""
    found = [value for values in pairs.values() for value in values]
    known = [value for value in found if value is not None]
    ahead = sum(value != 0 and not is_worse(value, measure) for value in known)
    last = worst_of(measure)(known) if known and len(known) == len(found) else None
    return {"ahead": ahead, "pairs": len(found), "worst": None if last is None else as_change(last, measure)}


def _differences(
    of: Mapping[int, Mapping[str, float | None]], baseline: Mapping[int, Mapping[str, float | None]], measure: str
) -> dict[int, list[float | None]]:
    """Each seed that both have, with each user's difference."""
    return {
        seed: [additive_difference(of[seed].get(user), value, measure) for user, value in users.items()]
        for seed, users in baseline.items()
        if seed in of
    }


def _whole(found: Mapping[int, Sequence[float | None]]) -> np.ndarray | None:
    """Users x seeds; None with fewer than two seeds, or where a difference is missing."""
    if len(found) < 2 or any(value is None for values in found.values() for value in values):
        return None
    return np.array(list(found.values()), dtype=float).T


def _verdict(
    name: str, seeds: tuple[int, ...], estimate: Estimate, measure: str, share: float, p_value: float | None
) -> Verdict:
    reach = estimate.interval(share)
    harm = is_worse(estimate.mean, measure)
    low, high = (as_change(end, measure) for end in reach)
    return Verdict(
        method=name,
        seeds=seeds,
        verdict=LEVEL if reach[0] <= 0 <= reach[1] else WORSE if harm else BETTER,
        change=as_change(estimate.mean, measure),
        low=low,
        high=high,
        confidence=1 - share * ERROR,
        p_value=p_value,
    )


# -------------------------------------------------------------------- told


def heading(against: Against) -> str:
    """What the table is of."""
    mean = "geometric mean of test" if against.measure in ("perplexity", "loss") else "mean test"
    seeds = sorted({seed for one in against.verdicts for seed in one.seeds})
    over = f"{against.users} user{'s' if against.users != 1 else ''} and seeds {', '.join(map(str, seeds))}"
    return f"against {against.baseline}: {mean} {against.measure} over {over} ({rule(against.measure)})"


def rows_of(against: Against) -> tuple[list[str], list[list[str]]]:
    """Head and rows as text."""
    return ["method", "change", "interval", "verdict", "p over users", "ahead", "worst"], [
        [
            one.method,
            "–" if one.change is None else change_text(one.change, against.measure),
            "–" if one.low is None or one.high is None else reach_text((one.low, one.high), against.measure),
            one.verdict,
            _p_text(one.p_value),
            f"{one.ahead} of {one.pairs}" if one.pairs else "–",
            "–" if one.worst is None else change_text(one.worst, against.measure),
        ]
        for one in against.verdicts
    ]


def _p_text(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def notes(against: Against) -> list[str]:
    """How to read the table, and what cannot be said."""
    number = against.judged
    many = (
        f" Over {number} methods Holm widens them, so that all verdicts hold together with 95%." if number > 1 else ""
    )
    told = [
        "better, worse: the interval of the mean change leaves out 0; level: it does not, so nothing is shown. "
        f"Users and seeds both count as drawn.{many}",
    ]
    least = smallest_signed_rank(against.users)
    if number * least > ERROR:
        after = f", {min(1.0, number * least):.3g} after Holm" if number > 1 else ""
        few = f"{against.users} user{'s' if against.users != 1 else ''}"
        p_value = f"No p: of {few} Wilcoxon's test cannot give less than {least:.3g}{after}."
    else:
        p_value = "p: Wilcoxon's signed-rank test over users, with the seeds as given; adjusted by Holm."
    return [
        *told,
        p_value,
        "ahead: results, one for each user and seed, better than the baseline's; worst: the one furthest behind.",
    ]


def markdown(against: Against) -> list[str]:
    """Lines of a Markdown table with its notes."""
    head, rows = rows_of(against)
    lines = [f"Table: {heading(against)}", "", markdown_line(head), "|" + "---|" * len(head)]
    return [*lines, *map(markdown_line, rows), "", *notes(against)]


def render(against: Against) -> Iterator[Table | Text]:
    """The table for the terminal, between its heading and its notes."""
    yield words(heading(against), "italic")  # as a title it would be no wider than the table
    head, rows = rows_of(against)
    shown = Table(box=None)
    for name in head:
        shown.add_column(name, justify="left" if name in ("method", "verdict") else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(words(cell, STYLES.get(cell, "") if i == 3 else "") for i, cell in enumerate(row)))
    yield shown
    yield words(" ".join(notes(against)), "dim")


CellSpread = dict[str, float | None]
"""``mean`` and ``std`` over seeds, each None where it is not finite."""


class _MethodRow(TypedDict):
    method: str
    seeds: list[int]
    rounds: list[int]
    users: dict[str, CellSpread]
    results: dict[str, list[float | None]]
    upload_bytes_per_user_round: float
    trainable_parameters: int
    wall_seconds: float


class MethodRow(_MethodRow, total=False):
    """A method in a table of methods. Its means have further keys, which hold the measure and the unit of its data."""

    planned_rounds: int
    sample: Mapping[str, Any]
    privacy: Mapping[str, Any]
    warnings: list[str]


class _ComparisonTable(TypedDict):
    methods: list[MethodRow]


class ComparisonTable(_ComparisonTable, total=False):
    """A comparison as ``table.json`` has it; ``against`` is absent from older tables."""

    against: AgainstRecord | None


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (0 for a single value); None where a value is not finite."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def folder_name(label: str) -> str:
    """Return the name of a method's run folders in a comparison, without ``-seedN``: all systems can have it."""
    return re.sub(r"[^\w=.,+-]+", "-", label)


def compare_runs(
    folders: Sequence[Path], baseline: str | None = None, labels: Mapping[Path, str] = MappingProxyType({})
) -> ComparisonTable:
    """Mean and deviation over seeds, for each method in the order given, and each against a baseline.

    Args:
        folders: run folders.
        baseline: a method, or several with commas between, of which the best counts.
        labels: names of runs that are not called by their method's name, as one of several with its settings.

    Raises:
        RunError: a run is missing or has not finished, or runs are of other users.
        RecipeError: the baseline is not among the methods.
    """
    read = [(folder, read_metrics(folder)) for folder in folders]
    return compare_metrics([(labels.get(folder, metrics["method"]), metrics) for folder, metrics in read], baseline)


def compare_metrics(named: Iterable[tuple[str, dict[str, Any]]], baseline: str | None = None) -> ComparisonTable:
    """Return the table of :func:`compare_runs` for metrics in memory, each with its method's name.

    Raises:
        RunError: runs are of other users.
        RecipeError: the baseline is not among the methods.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for name, metrics in named:
        by_method.setdefault(name, []).append(metrics)
    require_same_users(users_of(run for runs in by_method.values() for run in runs))
    return hold_against({"methods": [_row(name, runs) for name, runs in by_method.items()]}, baseline)


def require_same_users(runs: Sequence[tuple[str, Collection[str]]]) -> None:
    """Whether runs, by what they are called, are of the same users, so that means and differences are.

    Raises:
        RunError: they are not.
    """
    first, theirs = runs[0]
    for name, users in runs[1:]:
        if set(users) != set(theirs):
            raise RunError(
                f"{name}: its users are {list_names(users)}, those of {first} are {list_names(theirs)}; give runs of "
                "the same users (data.on_small_user: skip may leave out others with another seed)"
            )


def users_of(runs: Iterable[Mapping[str, Any]]) -> list[tuple[str, Collection[str]]]:
    """For :func:`require_same_users`, out of metrics."""
    return [(f"{run['method']}, seed {run['seed']}", run["users"]) for run in runs]


def hold_against(table: ComparisonTable, baseline: str | None) -> ComparisonTable:
    """A comparison with its methods held against a baseline, by default ``local`` or the first; with one seed, or one
    method, against none.

    Raises:
        RunError: an older table, which does not have the results of each seed.
        RecipeError: the baseline is not among the methods.
    """
    rows = table["methods"]
    if any("results" not in row for row in rows):
        raise RunError("the table does not have each seed's results; make it again with `comingle compare --resume`")
    chosen = baseline_of([row["method"] for row in rows], baseline)
    results = {
        row["method"]: {
            seed: {user: values[i] for user, values in row["results"].items()} for i, seed in enumerate(row["seeds"])
        }
        for row in rows
    }
    found = hold(results, measure_of(rows[0]), chosen)
    return {**table, "against": None if found is None else found.as_dict()}


def against_of(table: ComparisonTable) -> Against | None:
    """What a table says of its baseline; older ones, and those of one seed, have none."""
    found = table.get("against")
    return Against.read(found) if found else None


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> MethodRow:
    measure, unit = measure_of(runs[0]), runs[0].get("unit", "tokens")
    mean, std = _spread([run[f"mean_test_{measure}"] for run in runs])
    results = {user: [run["users"][user][f"test_{measure}"] for run in runs] for user in runs[0]["users"]}
    users = {user: dict(zip(("mean", "std"), _spread(values), strict=True)) for user, values in results.items()}
    row = {
        "method": name,
        "seeds": [run["seed"] for run in runs],
        "rounds": [run["rounds"] for run in runs],
        **({"planned_rounds": planned} if (planned := max(run.get("planned_rounds", 0) for run in runs)) else {}),
        f"mean_test_{measure}": {"mean": mean, "std": std},
        **_geometric_row(runs, measure),
        "users": users,
        "results": results,
        "upload_bytes_per_user_round": runs[0]["upload_bytes_per_user_round"],
        "trainable_parameters": runs[0]["trainable_parameters"],
        f"{unit}_per_second": statistics.fmean(run[f"{unit}_per_second"] for run in runs),
        "wall_seconds": statistics.fmean(run["wall_seconds"] for run in runs),
        **({"sample": runs[0]["sample"]} if len(runs) == 1 and "sample" in runs[0] else {}),
        **({"privacy": _most_revealing(runs)} if any(run.get("privacy") for run in runs) else {}),
        **({"warnings": warned} if (warned := _warnings(runs)) else {}),
    }
    return cast(MethodRow, row)  # two of its keys depend on measure and unit


def _most_revealing(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, object]:
    """Return the privacy of the seed with the largest epsilon."""
    return max((run["privacy"] for run in runs if run.get("privacy")), key=lambda privacy: privacy["epsilon"] or 0.0)


def _warnings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the warnings of all seeds, each with its seed."""
    return [f"seed {run['seed']}: {warning}" for run in runs for warning in run.get("warnings", ())]


def _geometric_row(runs: Sequence[Mapping[str, Any]], measure: str) -> dict[str, CellSpread]:
    """Each seed's geometric mean over users, for perplexities: mean and deviation over seeds."""
    means = [mean for run in runs for mean in geometric(run["users"], measure).values()]
    return {GEOMETRIC: dict(zip(("mean", "std"), _spread(means), strict=True))} if means else {}


def read_comparison(folder: Path) -> ComparisonTable:
    """The table of a comparison.

    Raises:
        RunError: not the folder of a comparison.
    """
    try:
        return json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: not the folder of a comparison ({error})") from None
