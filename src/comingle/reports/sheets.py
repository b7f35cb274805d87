"""The numbers of figures as comma-separated values: one header, one row for each thing that is drawn."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comingle.reports.mixtures import Mixtures
from comingle.reports.tokens import TokenView
from comingle.utils.records import read_metrics

Sheet = Sequence[Sequence[object]]
"""A header and rows."""


def csv_text(sheet: Sheet) -> str:
    """Comma-separated values; None is an empty cell, and numbers have all their digits."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(sheet)
    return file.getvalue()


def data_uri(sheet: Sheet) -> str:
    """A link that holds the whole file."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(csv_text(sheet).encode()).decode("ascii")


def user_records(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """One record for each user of each finished run: the run's folder, method, seed, base and rounds, the user, and
    everything that was measured of it.

    Raises:
        RunError: none of the runs has finished.
    """
    finished = [run for run in runs if (run / "metrics.json").exists()] or list(runs[:1])  # refused where it is read
    return [
        {
            "run": run.name,
            **{key: metrics[key] for key in ("method", "seed", "base", "rounds")},
            "user": user,
            **measured,
        }
        for run in finished
        for metrics in [read_metrics(run)]
        for user, measured in metrics["users"].items()
    ]


def sheet_of(records: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """A column for every key that a record has; what others lack is None."""
    head = list(dict.fromkeys(key for record in records for key in record))
    return [[*head], *([record.get(key) for key in head] for record in records)]


def mixtures_sheet(mixtures: Mixtures) -> list[list[object]]:
    """Each user's weight of each component at each evaluation."""
    rows: list[list[object]] = [["seed", "round", "user", "true_cluster", "component", "weight"]]
    clusters = mixtures.clusters or (None,) * len(mixtures.users)
    for number, values in zip(mixtures.rounds, mixtures.values, strict=True):
        for user, cluster, weights in zip(mixtures.users, clusters, values, strict=True):
            pairs = zip(mixtures.order, weights, strict=True)
            rows += [[mixtures.seed, number, user, cluster, name, float(weight)] for name, weight in pairs]
    return rows


def tokens_sheet(view: TokenView, layer: int) -> list[list[object]]:
    """Each token of each text under each user's model, and what the router of ``layer`` says to each expert."""
    rows: list[list[object]] = [["text", "model", "layer", "token_number", "token", "expert", "probability"]]
    for text, row in zip(view.texts, view.gates, strict=True):
        for user, experts, gates in zip(view.users, view.experts, row, strict=True):
            for number, (token, said) in enumerate(zip(text.tokens, gates[layer], strict=True)):
                pairs = zip(experts, said, strict=True)
                rows += [[text.name, user, layer, number, token, name, float(gate)] for name, gate in pairs]
    return rows
