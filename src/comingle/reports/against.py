"""Methods held against a baseline: better, level or worse, in the mean over users and seeds.

Differences are paired by user and seed: log ratios of perplexities and losses, whose mean is the ratio of geometric
means, and plain differences of accuracies and ROUGE-1. A method is *better* or *worse* where the interval of its mean
difference (:func:`comingle.reports.significance.two_way`), at the level that Holm's procedure gives it among all
methods, leaves out 0; else it is *level*, which is no proof that there is no difference.

A baseline may be several methods, and then is the better of them, for each user with each seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.text import Text

from comingle.reports.significance import (
    ERROR,
    Estimate,
    holm,
    holm_shares,
    signed_rank,
    smallest_signed_rank,
    two_way,
)
from comingle.tables.framing import Table
from comingle.tables.measures import (
    as_change,
    best_of,
    change_text,
    difference,
    is_worse,
    markdown_line,
    reach_text,
    rule,
    worst_of,
)
from comingle.utils.errors import RecipeError, did_you_mean
from comingle.utils.terminal import words

Results = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""Each user's result of each method with each seed; None where it is not finite."""

BASELINE = "local"
BETTER, LEVEL, WORSE = "better", "level", "worse"
NOT_FINITE, ONE_SEED = "not finite", "one seed"
STYLES = {BETTER: "green", WORSE: "red"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One method against the baseline.

    ``change`` and its interval from ``low`` to ``high`` are in the unit of :func:`comingle.tables.measures.change`:
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

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for :meth:`read`."""
        unit = {"perplexity": "per cent", "loss": "powers of ten"}.get(self.measure, "points of 0.01")
        methods = [{**asdict(one), "seeds": list(one.seeds)} for one in self.verdicts]
        about = {"baseline": self.baseline, "measure": self.measure, "users": self.users, "unit": unit}
        return {**about, "methods": methods}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Against:
        """What :meth:`as_dict` has made, out of a file."""
        verdicts = tuple(Verdict(**{**one, "seeds": tuple(one["seeds"])}) for one in content["methods"])
        return cls(**{key: content[key] for key in ("baseline", "measure", "users")}, verdicts=verdicts)


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
        seed: [difference(of[seed].get(user), value, measure) for user, value in users.items()]
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
