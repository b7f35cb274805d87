"""Golden runs: digests of final tensors, metrics and bytes of every method, to show that nothing has changed.

    python tests/golden/golden.py            compare with digests.json, print the differences; exit status 1 if any
    python tests/golden/golden.py --base REV compare bit for bit with the digests that commit REV gives on this machine
    python tests/golden/golden.py --write    write digests.json anew
    python tests/golden/golden.py --only REGEX
    python tests/golden/golden.py --digests FILE [--write]

CPU, float32, one thread per process. A digest covers every bit, so it holds for one kind of processor and one version
of PyTorch, which the file names. On another machine only the numbers beside the digests are compared, within a relative
tolerance of 1e-5 (an Intel and an AMD processor differ by at most 1.5e-7 in all cases); ``--base`` compares bits there.
The digests of a base are kept in build/golden, so only the first comparison with a commit runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import RESUMED, cases

from comingle.config import parse_recipe
from comingle.privacy.secure_server import simulate_sum
from comingle.runs import api, session
from comingle.training.kinds.samples import PersonalNet

DIGESTS = Path(__file__).with_name("digests.json")
REPOSITORY = Path(__file__).parents[2]
JOBS = "GOLDEN_JOBS"

_PROCESSOR = Path("/proc/cpuinfo")
_TOLERANCE = 1e-5

BYTES = ("upload_bytes", "download_bytes")
"""What an event of a round counts."""


class StoppedError(Exception):
    """Interruption of a run."""


def digest_of(run: Any, folder: Path) -> dict[str, Any]:
    """Every user's final tensors, every loss and score, and what was sent."""
    tensors = hashlib.sha256()
    for user in sorted(run.users):
        own = run.user(user)
        found = own.model.state_dict() if isinstance(own, PersonalNet) else own.tensors
        for name in sorted(n for n in found if not n.endswith("num_batches_tracked")):  # counts passes of the process
            tensors.update(f"{user}/{name}/{tuple(found[name].shape)}".encode())
            tensors.update((found[name].detach() + 0).contiguous().numpy().tobytes())  # padding may be -0.0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    scores = [event for event in events if event["event"] == "evaluation"]
    measure = run.metrics["measure"]
    return {
        "tensors": tensors.hexdigest()[:16],
        "losses": _digest([event["train_loss_nats"] for event in rounds]),
        "scores": _digest([event["users"] for event in scores]),
        "beside": _digest([{k: v for k, v in e.items() if k in ("expert_scores", "mixtures")} for e in scores]),
        "mean": run.metrics[f"mean_test_{measure}"],
        "last_loss": sum(rounds[-1]["train_loss_nats"].values()) if rounds else 0.0,
        **{key: sum(event[key] for event in rounds) for key in BYTES},
        "trainable": run.metrics["trainable_parameters"],
        "selected": run.metrics["selected_round"],
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def run_case(content: dict[str, Any], folder: Path, *, interrupted: bool = False) -> dict[str, Any]:
    """One run, in one go or stopped in its last round but one and resumed."""
    recipe = parse_recipe(content)
    last = recipe.training.rounds

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == last and event["advance"]:
            raise StoppedError

    if interrupted:
        try:
            api.run(recipe, out=folder, observers=[stop])
        except StoppedError:
            pass
        else:
            raise AssertionError("the run was not interrupted")
    return digest_of(api.run(recipe, out=folder, resume=interrupted), folder)


def _serialise() -> None:
    """Pack and unpack every message."""
    build = session.build

    def built(*given: Any) -> Any:
        federation = build(*given)
        federation.serialise, federation.sum_masked = True, simulate_sum
        return federation

    session.build = built


def compare(found: dict[str, Any], kept: dict[str, Any], but: str, *, rounded: bool = False) -> list[str]:
    """Describe the differences between two digests.

    Args:
        found: Digest of this run.
        kept: Digest to compare with.
        but: Regular expression of keys to skip.
        rounded: Compare numbers alone, within the tolerance.
    """
    keys = [key for key in kept | found if not re.search(but, key)]
    return [f"{key}: {kept.get(key)} -> {found.get(key)}" for key in keys if not _same(found, kept, key, rounded)]


def _same(found: dict[str, Any], kept: dict[str, Any], key: str, rounded: bool) -> bool:
    one, other = found.get(key), kept.get(key)
    if not rounded or one is None or other is None:
        return one == other
    return isinstance(one, str) or math.isclose(one, other, rel_tol=_TOLERANCE)


def machine() -> dict[str, str]:
    """Return the versions and hardware for which digests hold bit for bit."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _maker(),
    }


def _maker() -> str:
    """Who made the processor: products of matrices are rounded differently by each."""
    if not _PROCESSOR.exists():
        return platform.processor()
    return next((line.split()[-1] for line in _PROCESSOR.read_text().splitlines() if line.startswith("vendor_id")), "")


def _start_worker(serialise: bool) -> None:
    torch.set_num_threads(1)
    logging.getLogger("comingle").setLevel(logging.ERROR)
    if serialise:
        _serialise()


def check_case(name: str, content: dict[str, Any], folder: Path, but: str) -> tuple[str, dict[str, Any], list[str]]:
    """Run one case; interrupt and resume it too if it is one of ``RESUMED``."""
    found, wrong = run_case(content, folder / "whole"), []
    if name in RESUMED:
        again = run_case(content, folder / "resumed", interrupted=True)
        wrong = [f"resumed, {line}" for line in compare(again, found, but)]
    return name, found, wrong


@contextmanager
def digests_of_base(revision: str, only: str, jobs: int) -> Iterator[Future[dict[str, Any]]]:
    """Run the golden cases of another commit in a temporary worktree, in the background, and keep their digests.

    Args:
        revision: Anything that git resolves to a commit.
        only: Regular expression of the names of cases.
        jobs: Number of processes, where that commit supports more than one.

    Yields:
        The future content of its file of digests; done at once if it was kept before.
    """
    git = ["git", "-C", str(REPOSITORY)]
    named = subprocess.run([*git, "rev-parse", "--verify", f"{revision}^{{commit}}"], stdout=subprocess.PIPE, text=True)
    if named.returncode:
        raise SystemExit(f"--base: got {revision!r}; allowed: a commit, branch or tag of this repository")
    kept = REPOSITORY / "build" / "golden" / f"{named.stdout.strip()}.json"
    done: Future[dict[str, Any]] = Future()
    if kept.exists() and (content := json.loads(kept.read_text()))["machine"] == machine():
        done.set_result(content)
        yield done
        return
    with tempfile.TemporaryDirectory() as folder:
        tree, written = Path(folder) / "base", Path(folder) / "digests.json"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), named.stdout.strip()], check=True)
        own = {"PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree / "papers" / "src")]), JOBS: str(jobs)}
        command = [sys.executable, "tests/golden/golden.py", "--write", "--digests", str(written), "--only", only]
        environment = {**os.environ, **own}
        quiet = subprocess.DEVNULL
        running = subprocess.Popen(command, cwd=tree, env=environment, stdout=quiet, start_new_session=True)
        with ThreadPoolExecutor(1) as waiting:
            try:
                yield waiting.submit(_read_when_done, running, written, None if only else kept)
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)  # with the processes of its pool
                    running.wait()
                subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def _read_when_done(running: subprocess.Popen[bytes], written: Path, kept: Path | None) -> dict[str, Any]:
    if running.wait():
        raise SystemExit(f"--base: its golden.py ended with exit status {running.returncode}")
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(written.read_bytes())
    return json.loads(written.read_text())


def run_all(options: argparse.Namespace, jobs: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Run the chosen cases in ``jobs`` processes; return their digests and what differs after a resume."""
    found: dict[str, Any] = {}
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        chosen = {name: c for name, c in cases(Path(scratch)).items() if re.search(options.only, name)}
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawn, initializer=_start_worker, initargs=(options.serialise,)) as pool:
            running = [
                pool.submit(check_case, name, content, Path(scratch) / f"run-{number}", options.but)
                for number, (name, content) in enumerate(chosen.items())
            ]
            for number, case in enumerate(as_completed(running)):
                name, found[name], wrong[name] = case.result()
                print(f"{number + 1}/{len(chosen)} {name}", end="\r" if sys.stdout.isatty() else "\n", flush=True)
    return found, wrong


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV", help="compare with the digests of this commit, made on this machine")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--but", default="nothing", help="one for what need not be equal, such as bytes")
    parser.add_argument("--serialise", action="store_true", help="pack and unpack every message on its way")
    parser.add_argument("--digests", type=Path, default=DIGESTS, help="the file to compare with or to write")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get(JOBS, "2")), help="number of processes")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.base:
        with digests_of_base(options.base, options.only, max(1, options.jobs // 2)) as base:
            found, wrong = run_all(options, options.jobs if base.done() else max(1, options.jobs - options.jobs // 2))
            kept = base.result()
    else:
        kept = json.loads(options.digests.read_text()) if options.digests.exists() else {"cases": {}}
        found, wrong = run_all(options, options.jobs)
    if options.write:
        whole = {**(kept["cases"] if options.only else {}), **found}
        options.digests.write_text(json.dumps({"machine": machine(), "cases": whole}, indent=1, sort_keys=True) + "\n")
        kept["cases"], kept["machine"] = whole, machine()
    return report(found, wrong, kept, options)


def report(
    found: dict[str, Any], wrong: dict[str, list[str]], kept: dict[str, Any], options: argparse.Namespace
) -> int:
    """Print every difference; return the exit status."""
    rounded = kept.get("machine") != machine()
    for name, digest in found.items():
        if name in kept["cases"]:
            wrong[name] += compare(digest, kept["cases"][name], options.but, rounded=rounded)
        elif not options.base:
            wrong[name].append("not among the digests: --write them")
    if not options.only:
        wrong |= {name: ["no longer run"] for name in kept["cases"].keys() - found.keys()}
    differing = {name: lines for name, lines in wrong.items() if lines}
    for name, lines in differing.items():
        print(f"{name}: {'; '.join(lines)}")
    if new := found.keys() - kept["cases"].keys():
        print(f"{len(new)} cases are not in {options.base or options.digests}")
    how = f"numbers within {_TOLERANCE:g}, since this machine is another" if rounded else "every bit"
    print(f"{len(found)} cases, {len(differing)} differ ({how}; digests of {kept.get('machine')}, here {machine()})")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
