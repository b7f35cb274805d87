"""Comparisons and advice in Python."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.models.hardware import torch_defaults
from comingle.reports.advice import Advice
from comingle.reports.comparisons import (
    ComparisonTable,
    Tuning,
    baseline_methods,
    baseline_of,
    compare_metrics,
    compare_with_baseline,
    read_tuning,
    require_same_users,
    users_of,
    with_baseline,
)
from comingle.reports.formatting import html_of
from comingle.reports.tables import latex, render_with_verdicts
from comingle.runs import ROUNDS, SEEDS, shortened
from comingle.runs.advise import advise_runs
from comingle.runs.compare import check_baseline, labels_of, recipes_of, run_recipes, tune_recipes, write_table
from comingle.runs.given import AnyBase, AnyMethod, AnyRecipe, Loss, given_of, recipe_with, registered_methods
from comingle.runs.progress import reporting
from comingle.runs.results import Run, records_of, table_of
from comingle.training.backends.launched import require_single_process
from comingle.utils.errors import ComingleError, RecipeError, RunError
from comingle.utils.records import measure_of, read_metrics
from comingle.utils.terminal import printable

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of several methods with several seeds each: the metrics of each run, by (method, seed)."""

    folder: Path | None
    metrics: Mapping[tuple[str, int], dict[str, Any]]
    baseline: str | None = None
    """The ``against`` of :func:`comingle.compare`: the method, or several, with which tables compare the others."""
    tuning: Tuning | None = None
    """Candidates and picked values, if ``tune`` is given or an earlier call with the same folder tuned methods."""

    def __repr__(self) -> str:
        """Return the number of runs and a line with the mean results of each method."""
        folder_text = "" if self.folder is None else f", in {self.folder}"
        lines = [f"Comparison({len(self.metrics)} runs{folder_text})"]
        for record in self.means():
            lines.append(_summary_line(record))
        return printable("\n".join(lines), keep="\n")

    def _repr_html_(self) -> str | None:
        """Return the tables of ``comingle show`` for a notebook; None if there are no runs."""
        if not self.metrics:
            return None
        return html_of(render_with_verdicts(self._table()))

    def _table(self) -> ComparisonTable:
        """Return the table of all runs, compared with the baseline."""
        runs = [(method, metrics) for (method, _seed), metrics in self.metrics.items()]
        table = compare_metrics(runs, self.baseline)
        if self.tuning is not None:
            table["tuning"] = self.tuning
        return table

    def means(self) -> list[dict[str, Any]]:
        """Return one record per run: ``method``, ``seed`` and the mean test result over users."""
        records: list[dict[str, Any]] = []
        for (method, seed), metrics in self.metrics.items():
            key = f"mean_test_{measure_of(metrics)}"
            records.append({"method": method, "seed": seed, key: metrics[key]})
        return records

    def records(self) -> list[dict[str, Any]]:
        """Return one record per run and user: ``method``, ``seed``, and the keys of :meth:`Run.records`."""
        records: list[dict[str, Any]] = []
        for (method, seed), metrics in self.metrics.items():
            for record in records_of(metrics):
                records.append({"method": method, "seed": seed, **record})
        return records

    def against(self, baseline: str | None = None) -> list[dict[str, Any]]:
        """Compare every other method with the baseline; return one record per method, or none if there is one seed.

        A record compares the mean test results over users and seeds with those of the baseline: the ``change`` with its
        95% interval from ``low`` to ``high``, and ``p_value``. The method is better or worse if the interval is on one
        side of 0, else level. The keys are those of :class:`comingle.reports.comparisons.Verdict`.

        Args:
            baseline: The method to compare with. None: ``local``, or the first method.

        Raises:
            RecipeError: The baseline is not among the methods.
            RunError: The runs are of different users.
        """
        require_same_users(users_of(self.metrics.values()))
        results: dict[str, dict[int, dict[str, Any]]] = {}  # test results by method, seed and user
        for (method, seed), metrics in self.metrics.items():
            key = f"test_{measure_of(metrics)}"  # such as "test_perplexity"
            result_by_user = {name: metrics_of_user[key] for name, metrics_of_user in metrics["users"].items()}
            results.setdefault(method, {})[seed] = result_by_user
        first_metrics = next(iter(self.metrics.values()))
        measure = measure_of(first_metrics)  # the same in all runs
        methods = list(results)
        comparison = compare_with_baseline(results, measure, baseline_of(methods, baseline))
        if comparison is None:  # one seed gives no interval
            return []
        return comparison.as_dict()["methods"]

    def to_pandas(self) -> pandas.DataFrame:
        """Return :meth:`records` as a table.

        Raises:
            RunError: pandas is not installed.
        """
        return table_of(self.records())

    def to_latex(self, *, all_users: bool = False, against: str | None = None, everybody: bool | None = None) -> str:
        """Return the results as a LaTeX table of the package booktabs, as ``comingle show --latex`` writes it.

        Args:
            all_users: Whether to add a table with a row for each user, if there are too many users for a column each.
            against: The baseline, such as ``"local"`` or ``"local,fedavg"``; None for :attr:`baseline`.
            everybody: Deprecated; use ``all_users``.

        Raises:
            RunError: There are no runs, or the runs are of different users.
            RecipeError: ``against`` is not among the methods, or it is given with one method or one seed.
        """
        if everybody is not None:
            warnings.warn("to_latex: everybody is now all_users", DeprecationWarning, stacklevel=2)
            all_users = everybody
        if not self.metrics:
            raise RunError("to_latex: got a comparison of 0 runs; allowed: 1 or more")
        table = self._table()
        if against is not None:
            table = with_baseline(table, against)
        name = "comparison" if self.folder is None else self.folder.name
        return latex(table, name=name, all_users=all_users, require_verdicts=against is not None)


def _summary_line(record: Mapping[str, object]) -> str:
    """Return a line for ``repr``, such as "  fedavg, seed 0: mean test perplexity 31.2".

    Args:
        record: A record of :meth:`Comparison.means`: ``method``, ``seed`` and, as the last key, the mean test result.
    """
    result_name, result = list(record.items())[-1]
    shown_result = "not finite" if result is None else f"{result:.4g}"
    return f"  {record['method']}, seed {record['seed']}: {result_name.replace('_', ' ')} {shown_result}"


@torch_defaults()
def compare(
    recipe: AnyRecipe | None = None,
    methods: Sequence[AnyMethod] = (),
    *,
    seeds: Sequence[int] = SEEDS,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    against: str | None = None,
    tune: Mapping[str, Sequence[object]] | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    **changes: object,
) -> Comparison:
    """Run several methods with several seeds on the same base, data and budget, like ``comingle compare``.

    The recipe's method has the recipe's settings, other methods their defaults. With ``out`` each run has a folder
    there, beside ``table.md`` and ``table.json``. The tables and the result then also have comparable runs of earlier
    calls with the same ``out``. Only metrics are kept in memory. To use the models of a run, pass ``out`` and open the
    run's folder.

    Args:
        recipe: As in :func:`run`.
        methods: Methods as in :func:`run`, or texts such as ``"fedprox:proximal=0.1"``. A method may occur with several
            settings; each is then called ``NAME:KEY=VALUE``.
        seeds: The seeds of each method.
        users: As in :func:`run`.
        base: As in :func:`run`.
        loss: As in :func:`run`.
        out: The folder of the comparison; None writes nothing.
        against: The baseline in the tables. None: ``local``, or the first method.
        tune: Candidate values by recipe key, such as ``{"training.experts.learning_rate": [1e-3, 3e-3, 1e-2]}``. Each
            method is trained with each of them and the first seed, and all seeds with those of the lowest mean
            validation loss; :attr:`Comparison.tuning` has the losses.
        resume: Whether to resume the runs in ``out``.
        force: Whether to replace the runs in ``out``.
        progress: As in :func:`run`.
        changes: As in :func:`run`.

    Raises:
        ComingleError: There is a problem that the user can correct; the message is one line. Wrong settings are
            found before any training.
    """
    require_single_process("compare")
    if not methods:
        raise RecipeError("methods: got none; list them with `comingle methods`")
    given = given_of(users, base, loss=loss)
    folder = None if out is None else Path(out)
    with registered_methods(list(methods)) as named_methods, reporting(quiet=not progress) as reporter:
        full_recipe = recipe_with(recipe, given, base=base, method=None, changes=changes)
        recipes = recipes_of(full_recipe, named_methods, list(seeds))
        check_baseline(recipes, folder, against)
        run_all = partial(run_recipes, reporter=reporter, resume=resume, force=force, given=given)
        tuning = None
        if tune:
            tuned = tune_recipes(recipes, tune, folder, run_all, resume=resume, force=force, say=reporter.say)
            recipes, tuning = tuned.recipes, tuned.record
            results = dict(tuned.outcomes_of_all_runs(folder, run_all))
            runs = [(key, results[key]) for key in recipes]  # in the order of the methods
        else:
            runs = run_all(recipes, folder)
        metrics_by_run = {key: _metrics_or_raise(result) for key, result in runs}
    if folder is not None:
        tuning = read_tuning(folder)
        _table, label_by_folder = write_table(folder, labels_of(recipes, folder), against)
        for run_folder, label in label_by_folder.items():
            metrics = read_metrics(run_folder)
            metrics_by_run.setdefault((label, metrics["seed"]), metrics)  # adds the runs of earlier calls
    baseline = against
    if against is not None:
        labels = {label for label, _seed in metrics_by_run}
        # `against` may name a method of an earlier call whose runs could not be added.
        if not labels.issuperset(baseline_methods(against)):
            baseline = None  # the default baseline
    return Comparison(folder=folder, metrics=metrics_by_run, baseline=baseline, tuning=tuning)


def _metrics_or_raise(result: Run | dict[str, Any] | ComingleError) -> dict[str, Any]:
    """Return a run's metrics, or raise the error that stopped the run."""
    if isinstance(result, ComingleError):
        raise result
    return result.metrics if isinstance(result, Run) else result


@torch_defaults()
def advise(
    recipe: AnyRecipe | None = None,
    methods: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int = ROUNDS,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
    **changes: object,
) -> Advice:
    """Run short trials to see whether users gain from each other and with which method, like ``comingle advise``.

    Runs ``local`` and each of ``methods`` with all users, and the first of ``methods`` also with smaller groups: with
    every pair if there are three to five users, and with all users but one if there are six to twelve. Nothing is
    written.

    Args:
        recipe: As in :func:`run`.
        methods: Names of methods that share parameters. None: ``fedavg`` and ``comigs-1g1s``, or ``fedavg`` and
            ``floral`` for users with samples.
        seeds: The seeds of each run; confidence intervals need two or more. None: three or five, depending on the
            amount of data.
        rounds: The number of rounds of each run, in place of the recipe's.
        users: As in :func:`run`.
        base: As in :func:`run`.
        loss: As in :func:`run`.
        progress: As in :func:`run`.
        changes: As in :func:`run`.

    Returns:
        The advice: ``print`` shows it as a paragraph, ``records()`` has every number.

    Raises:
        ComingleError: There is a problem that the user can correct; the message is one line.
    """
    require_single_process("advise")
    given = given_of(users, base, loss=loss)
    with reporting(quiet=not progress) as reporter:
        changes_of_trials = {**changes, **shortened(rounds)}
        full_recipe = recipe_with(recipe, given, base=base, method=None, changes=changes_of_trials)
        seeds_of_trials = None if seeds is None else list(seeds)
        return advise_runs(full_recipe, methods, seeds_of_trials, reporter, given=given)
