"""Planned memory of ``comingle cost`` against the peak of a run, each in a process of its own.

    python benchmarks/planned_memory.py [CASE ...]

Prints one JSON line for each case: planned and measured MB (10^6 bytes) and their difference as a fraction.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they"]


def text_recipe(
    base: str, method: Any, *, users: int = 2, dtype: str = "float32", batch: int = 8, **changes: Any
) -> dict[str, Any]:
    """Return a recipe of users with text.

    Args:
        base: The base model.
        method: The method: its name, or a mapping of name and settings.
        users: Number of users.
        dtype: Type of the base.
        batch: Sequences per step.
        **changes: Values by section; mappings are merged into the section.
    """
    content = {
        "base": base,
        "method": method,
        "data": {"users": {f"user{i}": f"user{i}.txt" for i in range(users)}},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": batch, "context": 128},
        "runtime": {"device": "cpu", "dtype": dtype, "threads": 1, "compile": False},
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    return content


CASES = {
    "comigs": text_recipe("random:llama?layers=4&dim=128&heads=4&vocab=2048", "comigs-1g1s", users=3),
    "large vocabulary, bf16": text_recipe(
        "random:gpt2?layers=3&dim=256&heads=4&vocab=16384", "fedavg", dtype="bfloat16", batch=4
    ),
    "wide": text_recipe("random:llama?layers=2&dim=768&heads=12&vocab=8192", "local", batch=4),
    "mixture": text_recipe(
        "random:llama?layers=2&dim=128&heads=4&vocab=2048", {"name": "floral", "clusters": 2}, batch=4
    ),
    "on disk": text_recipe(
        "random:llama?layers=2&dim=128&heads=4&vocab=2048",
        "fedavg",
        users=100,
        batch=2,
        training={"participation": 0.2},
        adapters={"rank": 64},
        evaluation={"first": False, "every": 2},
        runtime={"store": "disk", "users_per_step": 4},
    ),
    "checkpointed": text_recipe(
        "random:llama?layers=12&dim=256&heads=4&vocab=2048", "comigs-1g1s", runtime={"gradient_checkpointing": True}
    ),
    "4 bits": text_recipe(
        "random:llama?layers=12&dim=512&heads=8&vocab=2048", "fedavg", batch=2, quantise="4bit", dtype="bfloat16"
    ),
    "net": {
        "method": "fedavg",
        "data": {"task": {"name": "mlp-norm", "users": 20, "clusters": 2}},
        "training": {"rounds": 2, "batch_size": 40},
        "runtime": {"device": "cpu", "threads": 1},
    },
    "convolutions": {
        "method": "fedavg",
        "base": "net:resnet9",
        "data": {"kind": "samples", "users": {f"user{i}": f"user{i}.npz" for i in range(20)}},
        "training": {"rounds": 3, "batch_size": 64},
        "runtime": {"device": "cpu", "threads": 1, "compile": True},
    },
}
CASES["convolutions, vmap"] = {**CASES["convolutions"], "runtime": {"device": "cpu", "threads": 1, "compile": False}}


def write_case(case: str, folder: Path) -> Path:
    """Write the recipe of a case, with made-up text or images beside it."""
    draw = random.Random(case)
    for name, path in CASES[case]["data"].get("users", {}).items():
        if path.endswith(".npz"):
            pixels = np.random.default_rng(0).integers(0, 256, (80, 32, 32, 3), dtype=np.uint8)
            np.savez(folder / path, x=pixels, y=np.arange(80) % 10)
            continue
        paragraphs = (" ".join(draw.choices(WORDS, k=40)) for _ in range(60))
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(CASES[case]), encoding="utf-8")
    return path


def measure_case(case: str) -> tuple[int, int]:
    """Return the planned and the measured bytes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_case(case, Path(folder))
        comingle = [sys.executable, "-c", "from comingle.cli import main; main()"]
        cost = subprocess.run([*comingle, "cost", str(path), "--json"], check=True, capture_output=True, text=True)
        out = Path(folder) / "run"
        subprocess.run([*comingle, "run", str(path), "--out", str(out)], check=True, capture_output=True, text=True)
        measured = json.loads((out / "metrics.json").read_text())["peak_memory_bytes"]
    return json.loads(cost.stdout)["methods"][0]["machine"]["total_bytes"], measured


def main() -> None:
    """Plan and run the cases and print a line of JSON for each."""
    for case in sys.argv[1:] or CASES:
        planned, measured = measure_case(case)
        off = round(planned / measured - 1, 3)
        result = {"case": case, "planned_mb": planned // 10**6, "measured_mb": measured // 10**6, "off": off}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
