"""Training speed on a GPU: many users over one base, beside the base alone, the chip's peak and the usual way.

    python benchmarks/gpu.py --seconds 300 [--toy] [--shapes gpt2-124m,...] [--users 4,16,64,256] [--out FILE]

For each shape and number of users one line of JSON as soon as it is measured, at the end a table for README.md:

- ``tokens_per_s``: local steps of all users of ``comigs-1g1s``, bf16 where the device has it, batch 64 x 128 each;
- ``of_base``: as a share of the frozen base alone, forward and backward, under the same settings and in turns;
- ``of_peak``: FLOPs of matrix products that were computed, per second, as a share of the best product measured here,
  ``of_chip`` of what the maker says of dense bf16 products, where that is known;
- ``mb_per_user``: what a further user costs for good (values, two moments); ``peak_gb`` what the device held at most;
- ``triton``, ``graphs``, ``both``: up to 16 users (with more there are more passes of the same), how many times as fast
  with these words in ``runtime.gpu``, in turns with the same step without them, whose mixture is what torch.compile
  makes of it; or why there is no number;
- ``usual``: how many times faster than `one_by_one.py` (users in turn, each expert a whole MLP), in float32 and bf16.

As many users go through the base at once (``users_per_step``) as the memory has room for: the default, or half of it,
and so on. Lines that exceed memory or time are named with the reason. ``--toy`` is for machines without
a GPU: the same code on shapes of two layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from comingle.cost.counts import Shape, own_entries
from comingle.models.base import Base
from comingle.models.gpu import recorded, triton_backend, with_triton
from comingle.models.hardware import keep_buffers, resolve_device
from comingle.models.kernels import expert_mlp
from comingle.models.loading import load_base
from comingle.models.model import Model
from comingle.training.client import Clients, train
from comingle.training.settings import TOKENS_PER_PASS
from comingle.utils.errors import ComingleError, lacks_memory
from one_by_one import one_by_one
from throughput import base_pass, clients_of, timed

SHAPES = {
    "gpt2-124m": {"family": "gpt2", "layers": 12, "dim": 768, "heads": 12, "vocab": 50257},
    "smollm2-135m": {
        "family": "llama", "layers": 30, "dim": 576, "heads": 9, "kv_heads": 3, "mlp": 1536, "vocab": 49152
    },
    "llama-1b": {
        "family": "llama", "layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocab": 128256
    },
}  # fmt: skip
"""As the models of these names, with random weights."""
TOY = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "mlp": 128, "vocab": 300}
USUAL_AT = 16
TURNS, WARM = 3, 1
LEAST_TIME = 4.0
"""Least duration of a line, in steps: two turns of the step and of the base."""
CHIPS = {"H100 PCIe": 756.5, "H100 NVL": 835.5, "H200 NVL": 835.5, "H100": 989.4, "H200": 989.4, "A100": 312.0}
"""TFLOP/s of dense bf16 products in NVIDIA's data sheets (half of those with sparsity), by a part of the name."""
FASTER: dict[str, Callable[[Any], Any]] = {"triton": with_triton, "graphs": recorded}
WAYS = {"triton": ["triton"], "graphs": ["graphs"], "both": ["triton", "graphs"]}


def arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="in all; what does not fit is left out and named")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--users", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.counts = [int(count) for count in (args.users or ("2,4" if args.toy else "4,16,64,256")).split(",")]
    args.batch, args.ctx = (4, 16) if args.toy else (64, 128)
    args.compile = not (args.no_compile or args.toy)
    return args


def name_of(shape: dict[str, Any], toy: bool) -> str:
    sizes = {key: TOY[key] if toy else value for key, value in shape.items() if key != "family"}
    return f"random:{shape['family']}?" + "&".join(f"{key}={value}" for key, value in sizes.items())


def best_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return FLOPs per second of the fastest of ten square products.

    Args:
        device: Device of the products.
        dtype: Type of the operands.
        size: Width of the operands.
    """
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = lambda: one @ other  # noqa: E731
    for _ in range(3):
        timed(product, time.perf_counter)
    return 2 * size**3 / min(timed(product, time.perf_counter) for _ in range(10))


@contextmanager
def measured_memory(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Within, the most that the device has held since, in GB; None where that is not known."""
    if device.type != "cuda":
        yield lambda: None
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) / 1e9


def chip_of(name: str) -> float | None:
    """FLOPs a second that a chip's maker names, if it is a known one."""
    return next((tflops * 1e12 for part, tflops in CHIPS.items() if part in name), None)


def medians(steps: dict[str, Callable[[], object]], deadline: float, warm: int = WARM) -> dict[str, list[float]]:
    """Return the seconds of each step, timed in turns; fewer turns if time runs out.

    Args:
        steps: Steps by name.
        deadline: Time at which to stop.
        warm: Turns to warm up.
    """
    times: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(warm + TURNS):
        began = time.perf_counter()
        for key, step in steps.items():
            seconds = timed(step, time.perf_counter)
            if turn >= warm:
                times[key].append(seconds)
        if turn >= warm and time.perf_counter() + (time.perf_counter() - began) > deadline:
            break
    return times


def settings(args: Namespace, shape: dict[str, Any], users: int, at_once: int | None) -> Namespace:
    """Return arguments for the functions of throughput.py.

    Args:
        args: The command line.
        shape: Sizes of the model.
        users: Number of users.
        at_once: Users per pass; None takes the default.
    """
    return Namespace(
        users=users,
        batch=args.batch,
        ctx=args.ctx,
        vocab=TOY["vocab"] if args.toy else shape["vocab"],
        method="comigs-1g1s",
        experts=2,
        no_compile=not args.compile,
        no_native=True,
        users_per_step=at_once,
        micro_batch=None,
    )


def ways(clients: Clients, step: Callable[[], object], deadline: float) -> dict[str, Any]:
    """Return the speed-up of each GPU option, or the reason why it is missing.

    Args:
        clients: Users and their model.
        step: Function that takes a local step.
        deadline: Time at which to stop.
    """
    plain = clients.steps.model

    def as_in(model: Model, part: Any) -> None:
        # The backend is global to the process, so each turn sets it again.
        clients.steps.model = model
        expert_mlp.set_backend(part)
        step()

    def gain(names: list[str]) -> float:
        if time.perf_counter() > deadline:
            raise TimeoutError("no time")
        model = plain
        for name in names:
            model = FASTER[name](model)
        taken = partial(as_in, model, triton_backend(plain.device) if "triton" in names else None)
        taken()  # compiled, captured
        if "graphs" in names and None in getattr(model, "recordings").values():  # noqa: B009
            raise RuntimeError("not captured, see what was said")
        times = medians({"plain": partial(as_in, plain, None), "other": taken}, deadline, warm=0)
        return round(statistics.median(a / b for a, b in zip(times["plain"], times["other"], strict=True)), 3)

    found: dict[str, Any] = {}
    for way, names in WAYS.items():
        found[way] = tried(gain, names)
        clients.steps.model = plain
        expert_mlp.set_backend(None)
        gc.collect()
    return found


def tried(measured: Callable[..., float], *args: Any) -> float | str:
    """Return a measurement, or the error that prevented it."""
    try:
        return measured(*args)
    except Exception as error:
        return why(error)


def why(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def flops_of_token(clients: Clients) -> float:
    """Return FLOPs of matrix products per token in the phases of every step.

    At most 25 steps are timed here, and none of them trains the router.
    """
    layout = clients.model.layout
    names = (slot.name for slot in layout.slots)
    shape = Shape(clients, 0, dict(zip(names, own_entries(clients)[0].tolist(), strict=True)))
    return sum(shape.training(phase).total for phase in clients.phases if phase.every == 1)


def measure(
    args: Namespace, shape: dict[str, Any], base: Base, users: int, at_once: int | None, peak: float, deadline: float
) -> Any:
    """Return one line of the table.

    Args:
        args: The command line.
        shape: Sizes of the model.
        base: The base model.
        users: Number of users.
        at_once: Users per pass; None takes the default.
        peak: FLOPs per second of the best product.
        deadline: Time at which to stop.
    """
    given = settings(args, shape, users, at_once)
    with measured_memory(base.device) as held:
        clients = clients_of(given, base)
        everybody, numbers = list(range(users)), iter(range(10_000))
        alone = base_pass(given, base, clients.pass_size.users * clients.pass_size.sequences)
        step = lambda: train(clients, everybody, next(numbers))  # noqa: E731
        times = medians({"train": step, "base": alone}, deadline)
        gigabytes = held()
    others = ways(clients, step, deadline) if users <= USUAL_AT else {}
    tokens = users * args.batch * args.ctx
    seconds = statistics.median(times["train"])
    flops, state = tokens / seconds * flops_of_token(clients), clients.state
    chip = chip_of(torch.cuda.get_device_name(base.device)) if base.device.type == "cuda" else None
    return {
        "users": users,
        "users_per_step": clients.pass_size.users,
        "dtype": str(base.dtype).removeprefix("torch."),
        "compiled": args.compile,
        "tokens_per_s": round(tokens / seconds),
        "of_base": round(statistics.median(b / t for b, t in zip(times["base"], times["train"], strict=True)), 3),
        "of_peak": round(flops / peak, 4),
        "of_chip": None if chip is None else round(flops / chip, 4),
        "mb_per_user": round((state.rows.nbytes + state.first.nbytes + state.second.nbytes) / users / 1e6, 2),
        "peak_gb": None if gigabytes is None else round(gigabytes, 2),
        "seconds": round(seconds, 4),
        **others,
    }


def measure_what_fits(args: Namespace, shape: dict[str, Any], base: Base, users: int, *rest: float) -> Any:
    """Call :func:`measure`, and halve the users per pass until memory suffices.

    Args:
        args: The command line.
        shape: Sizes of the model.
        base: The base model.
        users: Number of users.
        *rest: Peak and deadline.
    """
    at_once = None
    while True:
        try:
            return measure(args, shape, base, users, at_once, *rest)
        except (ComingleError, torch.OutOfMemoryError) as error:
            room = TOKENS_PER_PASS["cuda"] // (args.batch * args.ctx)
            at_once = (min(users, room) if at_once is None else at_once) // 2
            if not at_once or not (lacks_memory(error) or "memory" in str(error)):
                raise


def usual(args: Namespace, shape: dict[str, Any], users: int, seconds: float, dtype: str, device: str) -> float:
    """Return the speed-up over the usual implementation.

    Args:
        args: The command line.
        shape: Sizes of the model.
        users: Number of users.
        seconds: Seconds of a step here.
        dtype: Type of the base.
        device: Device to train on.
    """
    gc.collect()
    name = name_of(shape, args.toy)
    vocab = TOY["vocab"] if args.toy else shape["vocab"]
    sizes = {"users": 1, "batch": args.batch, "context": args.ctx, "vocab": vocab, "experts": 2}
    step = one_by_one(name, **sizes, dtype=dtype, device=device)  # a user takes as long as any other
    for _ in range(2):
        timed(step, time.perf_counter)
    return round(statistics.median(timed(step, time.perf_counter) for _ in range(5)) * users / seconds, 2)


def lines(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results, or the reasons why they are missing."""
    device = resolve_device(args.device)
    ends = time.perf_counter() + args.seconds
    loaded = load_base(name_of(SHAPES["gpt2-124m"], True), dtype=args.dtype, device=args.device)
    peak = best_product(device, loaded.dtype, 512 if args.toy else 8192)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    yield {"device": where, "torch": torch.__version__, "best_product_tflops": round(peak / 1e12, 3)}
    names = args.shapes.split(",")
    for number, label in enumerate(names):
        share = (ends - time.perf_counter()) / (len(names) - number)
        yield from lines_of(args, label, time.perf_counter() + share, peak)
        gc.collect()


def lines_of(args: Namespace, label: str, deadline: float, peak: float) -> Iterator[dict[str, Any]]:
    """Yield the results of one shape.

    Args:
        args: The command line.
        label: Name of the shape.
        deadline: Time at which to stop.
        peak: FLOPs per second of the best product.
    """
    shape, needed = SHAPES[label], 0.0
    base = load_base(name_of(shape, args.toy), dtype=args.dtype, device=args.device)
    for users in args.counts:
        left = deadline - time.perf_counter()
        if left < needed * users:
            yield {"shape": label, "users": users, "left_out": f"{left:.0f} s left, {needed * users:.0f} needed"}
            continue
        try:
            found = {"shape": label, **measure_what_fits(args, shape, base, users, peak, deadline)}
            needed = found["seconds"] / users * LEAST_TIME
            if shape["family"] == "gpt2" and users == (args.counts[-1] if args.toy else USUAL_AT):
                kinds = dict.fromkeys(["float32", str(base.dtype).removeprefix("torch.")])
                found["usual"] = {k: tried(usual, args, shape, users, found["seconds"], k, args.device) for k in kinds}
            yield found
        except Exception as error:  # the other lines may still be had
            yield {"shape": label, "users": users, "left_out": why(error)}


def table(found: list[dict[str, Any]]) -> str:
    """Return the table for README.md."""
    keys = ("shape", "users", "tokens_per_s", "of_base", "of_peak", "of_chip", "mb_per_user", "peak_gb", *WAYS, "usual")
    whole = [{"tokens_per_s": line.get("left_out", ""), **line} for line in found]
    rows = [[str(line.get(key, "")) for key in keys] for line in whole]
    return "\n".join("| " + " | ".join(row) + " |" for row in (keys, ["---"] * len(keys), *rows))


def main() -> None:
    args = arguments()
    keep_buffers()
    # Each number of users has passes of one size: code for any size, which a second one asks for, is not what they run.
    torch._dynamo.config.automatic_dynamic_shapes = False
    found = []
    try:
        for line in lines(args):
            print(json.dumps(line), flush=True)
            found.append(line)
    finally:  # also where gpu.sh stops it
        print(table([line for line in found if "shape" in line]), flush=True)
        if args.out is not None:
            args.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


if __name__ == "__main__":
    main()
