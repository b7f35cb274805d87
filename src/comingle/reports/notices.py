"""What a reader must know before comparing runs."""

from __future__ import annotations

from collections.abc import Sequence

from comingle.reports.runs import Entry, RunRecord
from comingle.utils.errors import RunError
from comingle.utils.inputs import Inputs, read_inputs
from comingle.utils.records import sample_told


def _tested(key: str) -> bool:
    """Whether a key decides on what is tested; how much is trained on does not."""
    return key.startswith("data.") and "max_train" not in key and key != "data.task.fraction"


def notices(entries: Sequence[Entry]) -> list[str]:
    """What a reader must know before comparing these entries: other bases, other test text, unfinished runs."""
    lines = unlike(entries)
    for run in (run for entry in entries for run in entry.runs):
        if run.metrics is None:
            last = run.evaluations[-1].round
            lines.append(f"{run.folder.name} has not finished: evaluated after round {last} of {run.planned_rounds}.")
        elif sample := sample_told(run.metrics):
            lines.append(f"{run.folder.name}: {sample}.")
    return lines


def unlike(entries: Sequence[Entry]) -> list[str]:
    """Why numbers of these entries should not be compared: other bases, other test text, data that has changed."""
    runs = [run for entry in entries for run in entry.runs]
    lines = []
    bases = sorted({run.base for run in runs})
    if len(bases) > 1:
        lines.append(f"These runs have different bases ({', '.join(bases)}): do not compare their numbers.")
    sources = {repr([pair for pair in run.key if _tested(pair[0])]) for run in runs}
    if len(sources) > 1:
        what = (
            "read their text in different ways: their perplexities"
            if runs[0].unit == "tokens"
            else ("have different tasks: their numbers")
        )
        lines.append(f"These runs {what} may not be comparable.")
    return lines + _changed(runs)


def _changed(runs: Sequence[RunRecord]) -> list[str]:
    """Where recipes are the same and what was read is not, by its digests; of folders that do not tell, nothing."""
    lines: list[str] = []
    first: dict[str, tuple[RunRecord, Inputs]] = {}
    for run in runs:
        try:
            now = read_inputs(run.folder)
        except RunError:
            continue
        read = [pair for pair in run.key if pair[0].startswith("data.") or pair[0] == "training.context"]
        before, was = first.setdefault(repr((run.seed, run.base, now.tokenizer, read)), (run, now))
        changed = ["the base"] if now.base != was.base else []
        changed += [f"the data of {name}" for name, user in now.users.items() if user != was.users.get(name)]
        if changed:
            what = f"have the same recipe, but {changed[0]} changed in between: do not compare their numbers."
            lines.append(f"{run.folder} and {before.folder} {what}")
    return lines
