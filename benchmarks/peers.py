"""comingle beside other tools on the same work, in one run: seconds of a turn and peak memory.

    python benchmarks/peers.py --rows small,opacus
    python benchmarks/peers.py --rows all --turns 3 --python PEERS/bin/python --python pfl=PFL/bin/python
        --checkout pfllib=PFLlib --checkout pfl=pfl-research --data FOLDER

Prints one line of JSON for each row and peer, and a table at the end. Every implementation is a process of its own
(``peers_ours.py``, ``peers_theirs.py``); they take turns: comingle, peer, comingle, ... ``times`` is how many times
faster comingle is, the median over turns, ``memory_times`` how many times as much memory the peer takes at its peak;
``behind`` names the measures in which comingle is not ahead. The first turns, which compile, do not count.

- ``gpt2``, ``small``, ``sixteen``: a step of AdamW of every user's LoRA of rank 8 on all linears. GPT2-124M, 4 users,
  batch 4; 4 layers, 256 wide, 4 users, batch 16; the same, 16 users, batch 1. Beside PEFT, one adapter after another.
- ``nets``: a round of FedAvg of 784-200-10 on MNIST, 300 users, SGD. Beside pfl-research's simulation.
- ``pfl-llm``: a round of FedAvg of one LoRA of rank 8 on all linears of a Llama, 4 layers, 256 wide: 16 users, 4 steps
  of 4 windows of 128 bytes, SGD. Beside pfl-research's ``benchmarks/llm``.
- ``flower``: the same with AdamW. Beside Flower's simulation on Ray, an actor for each core.
- ``opacus``: the sum of clipped gradients of 16 windows, the same model. Beside Opacus, with gradients of
  single windows and with ghost clipping; ``difference`` is the relative one of the two sums.
- ``blazefl``: a round of BlazeFL's example, its small CNN, 100 users, an epoch of 500 stand-in images, batch 50. Beside
  BlazeFL with threads and with processes; ``is_repeatable`` says whether a round repeats bit by bit.
- ``pfllib``: a round of PFLlib's published case, 500 users, its 4-layer CNN, 90 stand-in images, batch 10.

Environments: ``pip install torch peft opacus h5py scikit-learn matplotlib tqdm 'flwr[simulation]'`` and
``pip install --no-deps --ignore-requires-python blazefl==3.0.0a1`` (later ones need Python 3.12) in one,
``pip install torch pfl peft`` in another. A peer that is not installed is skipped, and its line says so. Losses are of
the shared model after all turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BOTH = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Work that comingle and its peers share.

    Args:
        peers: Peers of ``peers_theirs.py``.
        tool: Name of the environment and of the checkout that they need.
        module: Module that the peers import.
        dtypes: Number formats in which the row is measured.
        needs_checkout: Whether the peer's code is read from a checkout.
        warm_up: Turns that are not counted.
    """

    peers: tuple[str, ...]
    tool: str
    module: str
    dtypes: tuple[str, ...] = ("float32",)
    needs_checkout: bool = False
    warm_up: int = 2


ROWS: Mapping[str, Row] = {
    "gpt2": Row(peers=("peft",), tool="peft", module="peft", dtypes=BOTH),
    "small": Row(peers=("peft",), tool="peft", module="peft", dtypes=BOTH),
    "sixteen": Row(peers=("peft",), tool="peft", module="peft", dtypes=BOTH),
    "nets": Row(peers=("pfl-nets",), tool="pfl", module="pfl", dtypes=BOTH, warm_up=1),
    "pfl-llm": Row(peers=("pfl-llm",), tool="pfl", module="pfl", dtypes=BOTH, needs_checkout=True),
    "flower": Row(peers=("flower",), tool="flower", module="ray", dtypes=BOTH),
    "opacus": Row(peers=("opacus", "opacus-ghost"), tool="opacus", module="opacus"),
    "blazefl": Row(peers=("blazefl-threads", "blazefl-processes"), tool="blazefl", module="blazefl", warm_up=1),
    "pfllib": Row(peers=("pfllib",), tool="pfllib", module="h5py", needs_checkout=True, warm_up=1),
}


@dataclass(kw_only=True)
class Worker:
    """A process that takes the turns of one implementation.

    Args:
        process: The process, which answers lines on standard input.
        log: File with what it writes to standard error.
        peak_bytes: Largest memory of the process and its children at once.
        seconds: Seconds of the counted turns.
        cpu_seconds: Processor time of the process itself in these turns, without its children.
    """

    process: subprocess.Popen[str]
    log: Path
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        """Wait for an answer, and watch the memory meanwhile.

        Raises:
            RuntimeError: The process ended.
        """
        done = threading.Event()
        watch = threading.Thread(target=self._watch_memory, args=(done,))
        watch.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        done.set()
        watch.join()
        if not line:
            raise RuntimeError(f"{self.process.args}: ended without an answer: ...{self.log.read_text()[-2000:]}")
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self.read()

    def _watch_memory(self, done: threading.Event) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self.process.pid))
            if done.wait(0.1):
                return


def tree_bytes(pid: int) -> int:
    """Return a process's peak memory (VmHWM) plus the private memory that its descendants have now.

    A child that was forked a moment ago, such as to start a compiler, still shares all memory with its parent.
    """
    total = 0
    for number, member in enumerate(_descendants(pid)):
        name, size = ("smaps_rollup", "Private_Dirty") if number else ("status", "VmHWM")
        with suppress(OSError, ValueError, KeyError):
            lines = Path(f"/proc/{member}/{name}").read_text().splitlines()
            sizes = {
                key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines) if "kB" in rest
            }
            total += sizes[size]
    return 1024 * total


def _descendants(pid: int) -> list[int]:
    """Return a process and all processes below it."""
    found = [pid]
    for member in found:
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found


@contextmanager
def start(command: Sequence[str | Path], log: Path) -> Iterator[Worker]:
    """Start a worker and wait until it is ready; end it on exit.

    Args:
        command: The command line.
        log: File for what it writes to standard error.
    """
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **quiet}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as errors:
        process = subprocess.Popen([str(part) for part in command], stderr=errors, env=environment, **pipes)
    worker = Worker(process=process, log=log)
    try:
        worker.read()
        yield worker
    finally:
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def is_installed(python: str, module: str) -> bool:
    """Return whether an interpreter finds a module."""
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", script], capture_output=True).returncode == 0


def compare(name: str, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the lines of a row in one number format: one for each peer.

    Args:
        name: Name of the row.
        dtype: Number format.
        args: The command line.
    """
    row = ROWS[name]
    python = args.python.get(row.tool) or args.python.get("") or sys.executable
    checkout = args.checkout.get(row.tool)
    reason = "" if is_installed(python, row.module) else f"{row.module} is not installed for {Path(python).name}"
    if row.needs_checkout and checkout is None:
        reason = f"no --checkout {row.tool}=FOLDER"
    if reason and not args.ours_alone:
        yield {"row": name, "dtype": dtype, "skipped": reason}
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        options = ["--work", folder, "--dtype", dtype, "--threads", str(args.threads)]
        our_options = [*options, *(["--data", args.data] if args.data else []), *(["--toy"] if args.toy else [])]
        with start([sys.executable, FOLDER / "peers_ours.py", name, *our_options], folder / "ours.log") as ours:
            if reason:
                results = measure({"comingle": ours}, args.turns, row.warm_up)
                yield {"row": name, "dtype": dtype, "comingle": results["comingle"], "skipped": reason}
                return
            theirs = [*options, *(["--checkout", Path(checkout).resolve()] if checkout else [])]
            with ExitStack() as stack:
                workers = {"comingle": ours}
                for peer in row.peers:
                    command = [python, FOLDER / "peers_theirs.py", peer, *theirs]
                    workers[peer] = stack.enter_context(start(command, folder / f"{peer}.log"))
                results = measure(workers, args.turns, row.warm_up)
            for peer in row.peers:
                yield comparison_line(name, dtype, peer, results)


def measure(workers: Mapping[str, Worker], turns: int, warm_up: int) -> dict[str, dict[str, Any]]:
    """Return what each worker took: seconds of its turns, peak memory, and what its model has learnt.

    Args:
        workers: The workers by name, comingle's first; they take turns.
        turns: Number of counted turns.
        warm_up: Number of turns before them.
    """
    for number in range(warm_up + turns):
        for worker in workers.values():
            reply = worker.ask("turn")
            if number >= warm_up:
                worker.seconds.append(reply["seconds"])
                worker.cpu_seconds.append(reply["cpu_seconds"])
    peaks = {name: worker.peak_bytes for name, worker in workers.items()}  # before scores, which take memory
    return {
        name: {
            "turns": worker.seconds,
            "cpu_seconds": round(statistics.median(worker.cpu_seconds), 3),
            "peak_mib": peaks[name] >> 20,
            **worker.ask("score"),
        }
        for name, worker in workers.items()  # comingle first: its score writes what peers compare with
    }


def comparison_line(name: str, dtype: str, peer: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the line of a peer.

    Args:
        name: Name of the row.
        dtype: Number format.
        peer: Name of the peer.
        results: What comingle and the peer took.
    """
    ours, theirs = results["comingle"], results[peer]
    speedup = statistics.median(b / a for a, b in zip(ours["turns"], theirs["turns"], strict=True))
    memory = theirs["peak_mib"] / ours["peak_mib"]
    behind = [measure for measure, ratio in (("seconds", speedup), ("memory", memory)) if ratio <= 1]
    sides = {
        side: {"seconds": round(statistics.median(of["turns"]), 3)} | {k: v for k, v in of.items() if k != "turns"}
        for side, of in (("comingle", ours), ("peer", theirs))
    }
    ratios = {"times": round(speedup, 2), "memory_times": round(memory, 2), "behind": behind}
    return {"row": name, "dtype": dtype, "name": peer, **sides, **ratios}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines as a table."""
    header = "| row | peer | comingle | peer | times | MiB: comingle, peer | behind in |"
    rows = [header, "|---|---|---|---|---|---|---|"]
    for line in lines:
        if "skipped" in line:
            continue
        ours, theirs = line["comingle"], line["peer"]
        cells = [f"{line['row']}, {line['dtype']}", line["name"], f"{ours['seconds']} s", f"{theirs['seconds']} s"]
        cells += [f"{line['times']}", f"{ours['peak_mib']}, {theirs['peak_mib']}", ", ".join(line["behind"]) or "-"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def parse_named(values: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=PATH`` options by name; a path alone has the name ``""``."""
    return {name if path else "": path or name for name, _, path in (value.partition("=") for value in values)}


def main() -> None:
    """Compare the rows, and print a line of JSON for each peer and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="gpt2,small,sixteen,nets", help=f"of {', '.join(ROWS)}, or all")
    parser.add_argument("--dtypes", default=",".join(BOTH))
    # --iters is the name in earlier commits, which compare_commits.py also measures.
    parser.add_argument("--turns", "--iters", type=int, default=3, help="turns that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", action="append", default=[], metavar="[TOOL=]PATH", help="Python of the peers")
    parser.add_argument("--checkout", action="append", default=[], metavar="TOOL=FOLDER", help="public code of a peer")
    parser.add_argument("--data", help="a folder with MNIST's files, where the hub is not at hand")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which only show that everything runs")
    parser.add_argument("--ours-alone", action="store_true", help="run comingle's side where a peer is not installed")
    args = parser.parse_args()
    args.python, args.checkout = parse_named(args.python), parse_named(args.checkout)
    lines = []
    for name in ROWS if args.rows == "all" else args.rows.split(","):
        for dtype in ROWS[name].dtypes:
            if dtype not in args.dtypes.split(","):
                continue
            for line in compare(name, dtype, args):
                print(json.dumps(line), flush=True)
                lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()
