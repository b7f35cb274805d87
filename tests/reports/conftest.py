"""Run folders written by hand, whose numbers a test can know."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path, run_writer: Callable[[Path], WriteRun]) -> WriteRun:
    """Writes run folders below the test's own folder."""
    return run_writer(tmp_path)


@pytest.fixture(scope="session")
def run_writer() -> Callable[[Path], WriteRun]:
    """Makes a function that writes ``FOLDER/NAME``.

    ``curve`` maps a round to each user's perplexity, or another ``measure``; ``scores`` to what routers said, and
    ``mixtures`` to each user's weights, ``judged`` to how much of each upload counted.
    With accuracies come losses, twice the share of errors.
    """
    return lambda below: partial(write_folder, below)


def write_folder(
    below: Path,
    name: str,
    method: str,
    curve: dict[int, dict[str, float | None]],
    *,
    seed: int = 0,
    scores: dict[int, dict[str, list[list[float]]]] | None = None,
    experts: dict[str, list[str]] | None = None,
    finished: bool = True,
    recipe: dict[str, Any] | None = None,
    upload_bytes: int = 0,
    base: str = "random:llama",
    measure: str = "perplexity",
    mixtures: dict[int, dict[str, list[float]]] | None = None,
    component: str = "adaptor set",
    clusters: dict[str, int] | None = None,
    judged: dict[int, dict[str, float]] | None = None,
) -> Path:
    folder = below / name
    folder.mkdir(parents=True)
    users = list(curve[max(curve)])
    rounds = max(curve)
    unit = "tokens" if measure == "perplexity" else "samples"
    events: list[dict[str, Any]] = [
        {
            "event": "start",
            "method": method,
            "seed": seed,
            "base": base,
            "rounds": rounds,
            "users": users_of(users, unit),
        }
    ]
    for number, found in curve.items():
        if number:
            events.append(
                {
                    "event": "round",
                    "round": number,
                    "upload_bytes": upload_bytes,
                    "download_bytes": 2 * upload_bytes,
                }
            )
        if number in (judged or {}):
            shares = (judged or {})[number]
            left_out = [user for user, share in shares.items() if share == 0]
            event = {"event": "aggregation", "round": number, "rule": "krum"}
            events.append(event | {"left_out": left_out, "counted": shares})
        told = evaluation(number, found, (scores or {}).get(number), experts, measure)
        if number in (mixtures or {}):
            told |= {"mixtures": (mixtures or {})[number], "component": component, "router_entropy_nats": 0.5}
            told |= {"clusters": clusters, "aggregation_mismatch": 0.25} if clusters else {}
        events.append(told)
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")
    content = {
        "method": {"name": method, "settings": {}},
        "seed": seed,
        "training": {"local_steps": 10},
        **(recipe or {}),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content | (recipe or {})), encoding="utf-8")
    if finished:
        metrics = {
            "upload_bytes_per_user_round": upload_bytes / len(users), "download_bytes_per_user_round": 7.0,
            "trainable_parameters": 1234, f"{unit}_per_second": 10.0 + seed, "wall_seconds": 3.0 + seed,
            "peak_memory_bytes": 2_000_000_000, "dtype": "float32", "device": "cpu",
        }  # fmt: skip
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return folder


def users_of(names: list[str], unit: str) -> dict[str, Any]:
    return {name: {f"train_{unit}": 100, f"test_{unit}": 50} for name in names}


def evaluation(number: int, found: dict[str, float | None], scores: Any, experts: Any, measure: str) -> dict[str, Any]:
    known = [value for value in found.values() if value is not None]
    event: dict[str, Any] = {
        "event": "evaluation",
        "round": number,
        "iterations": 10 * number,
        "users": {name: measures(value, measure) for name, value in found.items()},
        f"mean_test_{measure}": sum(known) / len(known) if len(known) == len(found) else None,
    }
    return event | ({"experts": experts, "expert_scores": scores} if scores else {})


def measures(value: float | None, measure: str) -> dict[str, float | None]:
    found = {f"test_{measure}": value}
    return found if measure != "accuracy" or value is None else {**found, "test_loss": 2 * (1 - value)}
