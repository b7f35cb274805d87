"""Cost of population size: memory and time of few and of many users with an equal cohort.

``python benchmarks/population.py net`` (1,000 and 1,000,000 synthetic users of a small net, 1,000 of them a round),
``python benchmarks/population.py text --model FOLDER`` (1,000 and 100,000 users of a language model, 100 a round) and
``python benchmarks/population.py rows --model FOLDER`` (1,000 and 20,000 users whose text is rows of one file, which a
recipe names) print one JSON line each:

- ``memory_ratio``: peak anonymous memory of a process with many users over that of one with few;
- ``seconds_ratio``: processor seconds for each participant of a round, the first round left out, likewise;
- ``start_s``: from the recipe to the first round; ``checkpoint_bytes``: of a checkpoint; ``store_bytes``: of users;
- of ``rows`` also ``read_s``: the same where the text has not been read before, ``read_memory_ratio`` of these runs,
  and ``text_MB``: the sizes of the files, in which users' rows lie mixed;
- ``resumed``: whether the larger run, killed (SIGKILL) in its third round and resumed, ends as the one that was not.

Every case is a process of its own; users' tensors are on disk (``runtime.store: disk``) and 50 users are evaluated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from comingle.config import parse_recipe
from comingle.data.population_files import read_population, write_population
from comingle.data.populations import LazyPopulation, NumberedNames
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import Samples, UserSamples
from comingle.data.text.streams import UserData
from comingle.models.loading import load_base
from comingle.models.scoring import CROSS_ENTROPY
from comingle.runs import api
from comingle.training.kinds.base import RunData
from comingle.training.kinds.samples import KIND as SAMPLES
from comingle.training.kinds.text import KIND as TEXT
from comingle.utils.seeds import generator

INPUTS, CLASSES, SAMPLES_EACH, TOKENS_EACH = 32, 10, 24, 400
"""Inputs and classes of the net; train samples of its users, train tokens of users with text."""
ROUNDS, EVALUATED, NETS_AT_ONCE = 4, 50, 100
"""Rounds of a run, evaluated users, and users of nets per step."""


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Peak(threading.Thread):
    """Thread that polls the peak of anonymous memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        """Poll the anonymous memory of this process every 20 ms."""
        while True:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.02)


def net_user(number: int) -> UserSamples:
    """Return a user whose classes follow from a perturbed copy of a common linear map."""
    common = torch.randn(INPUTS, CLASSES, generator=generator("population"))
    draw = generator("population", number)
    inputs = torch.randn(2 * SAMPLES_EACH, INPUTS, generator=draw)
    targets = (inputs @ (common + 0.5 * torch.randn(INPUTS, CLASSES, generator=draw))).argmax(1)
    parts = [Samples(inputs=inputs[a:b], targets=targets[a:b]) for a, b in ((0, 24), (24, 24), (24, 48))]
    return UserSamples(name=f"user-{number}", train=parts[0], valid=parts[1], test=parts[2])


def net_data(users: int) -> RunData:
    """Return a population of synthetic users of a small net, made when they are needed."""
    # Kept are those of one step, so that users are made anew in each round however many there are.
    population = LazyPopulation(NumberedNames("user-", users), net_user, digest="population", cache_size=NETS_AT_ONCE)
    common = Population(users=population, loss=CROSS_ENTROPY, classes=CLASSES, input_shape=(INPUTS,), net="mlp")
    return RunData(kind=SAMPLES, base=None, users=population, common=common, unread=True)


def text_user(number: int) -> UserData:
    """Return a user with random tokens: 400 to train on, 50 for validation and 50 for testing."""
    tokens = torch.randint(3, 256, (TOKENS_EACH + 100,), generator=generator("population", number), dtype=torch.int32)
    parts = tokens.split([TOKENS_EACH, 50, 50])
    return UserData(name=f"user-{number}", train=parts[0], valid=parts[1], test=parts[2])


WORDS = ("tide", "lamp", "chalk", "river", "bread", "stone", "cloud", "glass", "green", "slow", "told", "went", "and")
ROWS_EACH, WORDS_EACH = 4, 100


def write_rows(path: Path, users: int) -> None:
    """Write four documents of each user to a file of rows, in an order in which users are mixed."""
    owner_of_row = [number for number in range(users) for _ in range(ROWS_EACH)]
    draw = random.Random(0)
    draw.shuffle(owner_of_row)
    with path.open("w", encoding="utf-8") as file:
        for number in owner_of_row:
            row = {"who": f"user-{number}", "text": " ".join(draw.choices(WORDS, k=WORDS_EACH))}
            file.write(json.dumps(row) + "\n")


def text_data(users: int, folder: Path, recipe: Any) -> RunData:
    """Return a population of users of a language model, whose tokens are read from a folder.

    Args:
        users: Number of users.
        folder: Folder that ``write_population`` wrote.
        recipe: Recipe with the base model.
    """
    base = load_base(recipe.base, device="cpu", dtype="float32")
    return RunData(kind=TEXT, base=base, users=read_population(folder), unread=True)


def recipe_of(kind: str, users: int, cohort: int, model: str, rows: Path) -> Any:
    """Return the recipe of a run.

    Args:
        kind: "net", "text" or "rows".
        users: Number of users.
        cohort: Expected participants of a round.
        model: Base model of users with text.
        rows: File of rows of kind "rows".
    """
    training = {"rounds": ROUNDS, "participation": cohort / users, "batch_size": 8}
    content: dict[str, Any] = {
        "data": {"users": {"somebody": "handed-over"}},
        "evaluation": {"users": EVALUATED, "every": ROUNDS, "first": False},
        "checkpoints": {"every": 1},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False, "store": "disk", "threads": 1},
    }
    if kind == "net":
        content |= {"method": "fedper", "data": {"kind": "samples", "users": {"somebody": "handed-over"}}}
        content["runtime"]["users_per_step"] = NETS_AT_ONCE
    else:
        content |= {"base": model, "method": "comigs-1g1s", "adapters": {"rank": 2}}
        training |= {"local_steps": 2, "context": 32}
        content["runtime"]["users_per_step"] = 10
    if kind == "rows":
        content["data"] = {"dataset": {"path": str(rows), "user": "who"}, "on_small_user": "skip"}
    return parse_recipe(content | {"training": training})


def run_child(arguments: argparse.Namespace) -> None:
    """Run once and print measurements as JSON; with ``--kill``, end by SIGKILL in the third round."""
    began, peak = time.process_time(), Peak()
    peak.start()
    recipe = recipe_of(arguments.kind, arguments.users, arguments.cohort, arguments.model, arguments.data)
    run_data = None
    if arguments.kind == "net":
        run_data = net_data(arguments.users)
    elif arguments.kind == "text":
        run_data = text_data(arguments.users, arguments.data, recipe)
    marks: list[float] = []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "step" and not event.get("evaluating"):
            if not event["advance"]:
                marks.append(time.process_time())
            elif arguments.kill and event["round"] == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    finished = api.run(recipe, run_data=run_data, out=arguments.out, resume=arguments.resume, observers=[observe])
    clients = finished.federation.clients
    kept_tensors = clients.state.take(list(clients.scored)).tensors() | finished.federation.server.state
    content = b"".join(t.numpy().tobytes() for _, t in sorted(kept_tensors.items()))
    newest = max((arguments.out / "checkpoints").iterdir())
    line = {
        "peak_bytes": peak.bytes,
        "start_s": round(marks[0] - began, 2),
        "seconds": float(np.diff(marks[1:]).mean()) / arguments.cohort if len(marks) > 2 else None,
        "checkpoint_bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "store_bytes": sum(path.stat().st_size for path in (arguments.out / "store").iterdir()),
        "interval": finished.metrics["sample"]["interval"],
        "digest": hashlib.sha256(content + json.dumps(finished.metrics["users"]).encode()).hexdigest(),
    }
    print(json.dumps(line))


def start_child(
    kind: str, users: int, cohort: int, model: str, folder: Path, *flags: str, name: str = ""
) -> dict[str, Any] | None:
    """Run a child process and return its line of JSON; None if it killed itself as asked.

    Args:
        kind: "net", "text" or "rows".
        users: Number of users.
        cohort: Expected participants of a round.
        model: Base model of users with text.
        folder: Folder of data, cache and runs.
        *flags: Further options of the child: ``--kill`` or ``--resume``.
        name: Suffix of the run folder's name; by default "-killed" with flags, so that both share a folder.
    """
    out = folder / f"run-{users}{name or ('-killed' if flags else '')}"
    command = [sys.executable, __file__, kind, "--users", str(users), "--cohort", str(cohort), "--model", model]
    command += ["--child", "--out", str(out), "--data", str(data_path(kind, users, folder)), *flags]
    environment = {**os.environ, "COMINGLE_CACHE": str(folder / "cache")}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    if completed.returncode == -signal.SIGKILL and "--kill" in flags:
        return None
    if completed.returncode:
        sys.exit(completed.stderr)
    return json.loads(completed.stdout.splitlines()[-1])


def data_path(kind: str, users: int, folder: Path) -> Path:
    """Return the file or folder of the users' text.

    Args:
        kind: "net", "text" or "rows".
        users: Number of users.
        folder: Folder of data, cache and runs.
    """
    return folder / (f"rows-{users}.jsonl" if kind == "rows" else f"tokens-{users}")


def measure_first_read(arguments: argparse.Namespace, sizes: list[int], cohort: int, folder: Path) -> dict[str, Any]:
    """Run with an empty cache, so that users' text is read; later runs find it in the cache.

    Args:
        arguments: The command line.
        sizes: Numbers of users, the smaller one first.
        cohort: Participants of a round.
        folder: Folder of data, cache and runs.
    """
    for users in sizes:
        write_rows(data_path("rows", users, folder), users)
    children = [start_child("rows", users, cohort, arguments.model, folder, name="-first") for users in sizes]
    peaks = [child["peak_bytes"] for child in children if child is not None]
    return {
        "read_s": [child["start_s"] for child in children if child is not None],
        "read_memory_ratio": round(peaks[1] / peaks[0], 3),
        "read_peak_MB": [round(peak / 1e6) for peak in peaks],
        "text_MB": [round(data_path("rows", users, folder).stat().st_size / 1e6, 1) for users in sizes],
    }


def main() -> None:
    """Run few and many users, kill and resume the larger run, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["net", "text", "rows"])
    parser.add_argument("--few", type=int, default=1000)
    parser.add_argument("--users", type=int, help="how many there are in the larger population")
    parser.add_argument("--cohort", type=int, help="how many of them take part in a round")
    parser.add_argument("--model", default="random:llama", help="the language model of text users")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments)
        return
    kind, model = arguments.kind, arguments.model
    many = arguments.users or {"net": 1_000_000, "text": 100_000, "rows": 20_000}[kind]
    cohort = arguments.cohort or (1000 if kind == "net" else 100)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for users in (arguments.few, many) if kind == "text" else ():
            write_population(data_path(kind, users, place), map(text_user, range(users)))
        of_first_read = measure_first_read(arguments, [arguments.few, many], cohort, place) if kind == "rows" else {}
        small, large = (start_child(kind, users, cohort, model, place) for users in (arguments.few, many))
        start_child(kind, many, cohort, model, place, "--kill")
        resumed = start_child(kind, many, cohort, model, place, "--resume")
    assert small is not None
    assert large is not None
    assert resumed is not None
    print(
        json.dumps(
            {
                "kind": kind,
                "users": [arguments.few, many],
                "cohort": cohort,
                "memory_ratio": round(large["peak_bytes"] / small["peak_bytes"], 3),
                "seconds_ratio": round(large["seconds"] / small["seconds"], 3),
                "peak_MB": [round(one["peak_bytes"] / 1e6) for one in (small, large)],
                "ms_per_participant": [round(1e3 * one["seconds"], 3) for one in (small, large)],
                "start_s": [one["start_s"] for one in (small, large)],
                "checkpoint_bytes": [one["checkpoint_bytes"] for one in (small, large)],
                "store_bytes": [one["store_bytes"] for one in (small, large)],
                "interval": large["interval"],
                "resumed": resumed["digest"] == large["digest"],
                **of_first_read,
            }
        )
    )


if __name__ == "__main__":
    main()
