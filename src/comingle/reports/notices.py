"""What a reader must know before comparing runs."""

from __future__ import annotations

from collections.abc import Sequence

from comingle.records import sample_told
from comingle.reports.runs import Entry


def _tested(key: str) -> bool:
    """Whether a key decides on what is tested; how much is trained on does not."""
    return key.startswith("data.") and "max_train" not in key and key != "data.task.fraction"


def notices(entries: Sequence[Entry]) -> list[str]:
    """What a reader must know before comparing these entries: other bases, other test text, unfinished runs."""
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
    for run in runs:
        if run.metrics is None:
            last = run.evaluations[-1].round
            lines.append(f"{run.folder.name} has not finished: evaluated after round {last} of {run.planned_rounds}.")
        elif sample := sample_told(run.metrics):
            lines.append(f"{run.folder.name}: {sample}.")
    return lines
