"""Golden runs: digests of final tensors, metrics and bytes of every method, to show that nothing has changed.

    python tests/golden/golden.py            compare with digests.json, say what differs; exit status 1 if anything does
    python tests/golden/golden.py --write    write digests.json anew
    python tests/golden/golden.py --only REGEX
    python tests/golden/golden.py --digests FILE [--write]

CPU, float32, one thread. A digest is of every bit, so it holds for one kind of processor and one version of PyTorch,
which the file names. Elsewhere only the numbers beside it are compared, to rounding; to compare bits there, ``--write``
a file of the older commit first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import RESUMED, cases

from comingle.masking.rehearsal import rehearsed
from comingle.models.personal_net import PersonalNet
from comingle.recipes import parse_recipe
from comingle.runs import api, session

DIGESTS = Path(__file__).with_name("digests.json")

_PROCESSOR = Path("/proc/cpuinfo")
_ROUNDING = 1e-4

BYTES = ("upload_bytes", "download_bytes")
"""What an event of a round counts."""


class StoppedError(Exception):
    """Stands for whatever ends a run in the middle."""


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
    """Have every message packed and unpacked."""
    build = session.build

    def built(*given: Any) -> Any:
        federation = build(*given)
        federation.serialise, federation.masked = True, rehearsed
        return federation

    session.build = built


def compare(found: dict[str, Any], kept: dict[str, Any], but: str, *, rounded: bool = False) -> list[str]:
    """What differs, in words; but for keys that match. ``rounded``: numbers alone, and not their last bits."""
    keys = [key for key in kept | found if not re.search(but, key)]
    return [f"{key}: {kept.get(key)} -> {found.get(key)}" for key in keys if not _same(found, kept, key, rounded)]


def _same(found: dict[str, Any], kept: dict[str, Any], key: str, rounded: bool) -> bool:
    one, other = found.get(key), kept.get(key)
    if not rounded or None in (one, other):
        return one == other
    return isinstance(one, str) or math.isclose(one, other, rel_tol=_ROUNDING)


def machine() -> dict[str, str]:
    """What digests hold for."""
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


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--but", default="nothing", help="one for what need not be equal, such as bytes")
    parser.add_argument("--serialise", action="store_true", help="pack and unpack every message on its way")
    parser.add_argument("--digests", type=Path, default=DIGESTS, help="the file to compare with or to write")
    options = parser.parse_args()
    if options.serialise:
        _serialise()
    torch.set_num_threads(1)
    logging.getLogger("comingle").setLevel(logging.ERROR)
    kept = json.loads(options.digests.read_text()) if options.digests.exists() else {"cases": {}}
    rounded = kept.get("machine") != machine()
    found, differing = dict(kept["cases"]) if options.only else {}, 0
    with tempfile.TemporaryDirectory() as scratch:
        chosen = {name: c for name, c in cases(Path(scratch)).items() if re.search(options.only, name)}
        for number, (name, content) in enumerate(chosen.items()):
            found[name] = run_case(content, Path(scratch) / f"run-{number}")
            wrong = (
                [] if options.write else compare(found[name], kept["cases"].get(name, {}), options.but, rounded=rounded)
            )
            if name in RESUMED:
                again = run_case(content, Path(scratch) / f"resumed-{number}", interrupted=True)
                wrong += [f"resumed, {line}" for line in compare(again, found[name], options.but)]
            differing += bool(wrong)
            print(f"{number + 1}/{len(chosen)} {name}: {'; '.join(wrong) or 'equal'}", flush=True)
    if options.write:
        options.digests.write_text(json.dumps({"machine": machine(), "cases": found}, indent=1, sort_keys=True) + "\n")
    elif not options.only and (gone := kept["cases"].keys() - found.keys()):
        print(f"no longer run: {', '.join(sorted(gone))}")
        differing += len(gone)
    how = "numbers to rounding, as this machine is another" if rounded and not options.write else "every bit"
    print(f"{len(chosen)} cases, {differing} differ ({how}; digests of {kept.get('machine')}, here {machine()})")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
