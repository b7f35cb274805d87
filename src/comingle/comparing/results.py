"""What a comparison leaves in a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.reports.comparisons import baseline_of, compare_metrics, hold, require_same_users, users_of
from comingle.reports.formatting import html_of
from comingle.reports.tables import latex, tables_of
from comingle.runs.results import records_of, table_of
from comingle.utils.errors import RunError
from comingle.utils.records import measure_of
from comingle.utils.terminal import printable

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What several methods have come to, with several seeds each: the metrics of each run, by (method, seed)."""

    folder: Path | None
    metrics: Mapping[tuple[str, int], dict[str, Any]]
    baseline: str | None = None
    """The ``against`` of :func:`comingle.compare`, which tables use."""

    def __repr__(self) -> str:
        place = "" if self.folder is None else f", in {self.folder}"
        return printable(
            "\n".join([f"Comparison({len(self.metrics)} runs{place})", *map(_told, self.means())]), keep="\n"
        )

    def _repr_html_(self) -> str | None:
        """Return the tables of ``comingle show`` for a notebook; None where there are no runs."""
        if not self.metrics:
            return None
        return html_of(tables_of(self._table()))

    def _table(self) -> dict[str, Any]:
        named = [(method, metrics) for (method, _), metrics in self.metrics.items()]
        return compare_metrics(named, self.baseline)

    def means(self) -> list[dict[str, Any]]:
        """One record a run: ``method``, ``seed`` and the mean over users of what they are measured by."""
        return [
            {"method": method, "seed": seed, (key := f"mean_test_{measure_of(metrics)}"): metrics[key]}
            for (method, seed), metrics in self.metrics.items()
        ]

    def records(self) -> list[dict[str, Any]]:
        """One record a user of each run: ``method``, ``seed``, and what :meth:`Run.records` has."""
        return [
            {"method": method, "seed": seed, **record}
            for (method, seed), metrics in self.metrics.items()
            for record in records_of(metrics)
        ]

    def against(self, baseline: str | None = None) -> list[dict[str, Any]]:
        """One record for every other method, as :class:`comingle.reports.comparisons.Verdict`; none with one seed.

        Whether it is better, level or worse than ``baseline`` (default: ``local``, or the first method) in the mean
        over users and seeds, with ``change``, its interval from ``low`` to ``high``, and ``p_value``.

        Raises:
            RecipeError: the baseline is not among the methods.
            RunError: runs are of other users.
        """
        require_same_users(users_of(self.metrics.values()))
        results: dict[str, dict[int, dict[str, Any]]] = {}
        for (method, seed), metrics in self.metrics.items():
            key = f"test_{measure_of(metrics)}"
            users = {name: user[key] for name, user in metrics["users"].items()}
            results.setdefault(method, {})[seed] = users
        measure = measure_of(next(iter(self.metrics.values())))
        found = hold(results, measure, baseline_of(list(results), baseline))
        return [] if found is None else found.as_dict()["methods"]

    def to_pandas(self) -> pandas.DataFrame:
        """:meth:`records` as a table.

        Raises:
            RunError: pandas is not installed.
        """
        return table_of(self.records())

    def to_latex(self, *, everybody: bool = False) -> str:
        """Return the results as a LaTeX table of the package booktabs, as ``comingle show --latex`` writes it.

        Args:
            everybody: of more users than have a column, add a table with a row for each.

        Raises:
            RunError: there are no runs, or runs are of other users.
        """
        if not self.metrics:
            raise RunError("to_latex: got a comparison of 0 runs; allowed: 1 or more")
        return latex(self._table(), everybody=everybody)


def _told(mean: dict[str, Any]) -> str:
    *_, (key, value) = mean.items()
    shown = "not finite" if value is None else f"{value:.4g}"
    return f"  {mean['method']}, seed {mean['seed']}: {key.replace('_', ' ')} {shown}"
