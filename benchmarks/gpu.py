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

from comingle.cost.counts import Shape, unpadded_entries
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
from throughput import base_pass, make_clients, time_step

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
"""Largest number of users with which options are measured, and the number with which the usual way is."""
TURNS, WARM = 3, 1
"""Timed turns, and turns before them to warm up."""
LEAST_TIME = 4.0
"""Least duration of a line, in steps: two turns of the step and of the base."""
CHIPS = {"H100 PCIe": 756.5, "H100 NVL": 835.5, "H200 NVL": 835.5, "H100": 989.4, "H200": 989.4, "A100": 312.0}
"""TFLOP/s of dense bf16 products in NVIDIA's data sheets (half of those with sparsity), by a part of the name."""
FASTER: dict[str, Callable[[Any], Any]] = {"triton": with_triton, "graphs": recorded}
WAYS = {"triton": ["triton"], "graphs": ["graphs"], "both": ["triton", "graphs"]}


def parse_arguments() -> Namespace:
    """Return the command line with numbers of users, batch size, context and compilation set."""
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


def base_name(shape: dict[str, Any], toy: bool) -> str:
    """Return the name of a random base model.

    Args:
        shape: Family and sizes of the model.
        toy: Use the toy sizes instead.
    """
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
        time_step(product, time.perf_counter)
    return 2 * size**3 / min(time_step(product, time.perf_counter) for _ in range(10))


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


def chip_flops(name: str) -> float | None:
    """Return the FLOPs per second that a chip's maker names; None if the chip is unknown."""
    return next((tflops * 1e12 for part, tflops in CHIPS.items() if part in name), None)


def time_in_turns(steps: dict[str, Callable[[], object]], deadline: float, warm: int = WARM) -> dict[str, list[float]]:
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
            seconds = time_step(step, time.perf_counter)
            if turn >= warm:
                times[key].append(seconds)
        if turn >= warm and time.perf_counter() + (time.perf_counter() - began) > deadline:
            break
    return times


def throughput_arguments(args: Namespace, shape: dict[str, Any], users: int, at_once: int | None) -> Namespace:
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


def measure_options(clients: Clients, step: Callable[[], object], deadline: float) -> dict[str, Any]:
    """Return the speed-up of each GPU option, or the reason why it is missing.

    Args:
        clients: Users and their model.
        step: Function that takes a local step.
        deadline: Time at which to stop.
    """
    plain = clients.steps.model

    def step_with(model: Model, backend: Any) -> None:
        """Take a step with this model and this backend for mixtures."""
        # The backend is global to the process, so each turn sets it again.
        clients.steps.model = model
        expert_mlp.set_backend(backend)
        step()

    def measure_speedup(names: list[str]) -> float:
        """Return how many times as fast a step is with the named options as without."""
        if time.perf_counter() > deadline:
            raise TimeoutError("no time")
        model = plain
        for name in names:
            model = FASTER[name](model)
        changed_step = partial(step_with, model, triton_backend(plain.device) if "triton" in names else None)
        changed_step()  # compiled, captured
        if "graphs" in names and None in getattr(model, "recordings").values():  # noqa: B009
            raise RuntimeError("not captured, see what was said")
        times = time_in_turns({"plain": partial(step_with, plain, None), "other": changed_step}, deadline, warm=0)
        return round(statistics.median(a / b for a, b in zip(times["plain"], times["other"], strict=True)), 3)

    results: dict[str, Any] = {}
    for option, names in WAYS.items():
        results[option] = try_measurement(measure_speedup, names)
        clients.steps.model = plain
        expert_mlp.set_backend(None)
        gc.collect()
    return results


def try_measurement(measurement: Callable[..., float], *args: Any) -> float | str:
    """Return a measurement, or the error that prevented it."""
    try:
        return measurement(*args)
    except Exception as error:
        return describe_error(error)


def describe_error(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def flops_per_token(clients: Clients) -> float:
    """Return FLOPs of matrix products per token in the phases of every step.

    At most 25 steps are timed here, and none of them trains the router.
    """
    layout = clients.model.layout
    names = (slot.name for slot in layout.slots)
    shape = Shape(clients, 0, dict(zip(names, unpadded_entries(clients)[0].tolist(), strict=True)))
    return sum(shape.training(phase).total for phase in clients.phases if phase.every == 1)


def measure(
    args: Namespace, shape: dict[str, Any], base: Base, users: int, at_once: int | None, peak: float, deadline: float
) -> Any:
    """Measure one shape with one number of users and return a line of the table.

    Args:
        args: The command line.
        shape: Sizes of the model.
        base: The base model.
        users: Number of users.
        at_once: Users per pass; None takes the default.
        peak: FLOPs per second of the best product.
        deadline: Time at which to stop.
    """
    pass_arguments = throughput_arguments(args, shape, users, at_once)
    with measured_memory(base.device) as read_peak:
        clients = make_clients(pass_arguments, base)
        all_users, numbers = list(range(users)), iter(range(10_000))
        base_step = base_pass(pass_arguments, base, clients.pass_size.users * clients.pass_size.sequences)
        step = lambda: train(clients, all_users, next(numbers))  # noqa: E731
        times = time_in_turns({"train": step, "base": base_step}, deadline)
        peak_gb = read_peak()
    speedups = measure_options(clients, step, deadline) if users <= USUAL_AT else {}
    tokens = users * args.batch * args.ctx
    seconds = statistics.median(times["train"])
    flops, state = tokens / seconds * flops_per_token(clients), clients.state
    chip = chip_flops(torch.cuda.get_device_name(base.device)) if base.device.type == "cuda" else None
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
        "peak_gb": None if peak_gb is None else round(peak_gb, 2),
        "seconds": round(seconds, 4),
        **speedups,
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
            default = TOKENS_PER_PASS["cuda"] // (args.batch * args.ctx)
            at_once = (min(users, default) if at_once is None else at_once) // 2
            if not at_once or not (lacks_memory(error) or "memory" in str(error)):
                raise


def measure_usual_speedup(
    args: Namespace, shape: dict[str, Any], users: int, seconds: float, dtype: str, device: str
) -> float:
    """Return the speed-up over the usual implementation, timed for one user and multiplied by their number.

    Args:
        args: The command line.
        shape: Sizes of the model.
        users: Number of users.
        seconds: Seconds of comingle's step of all users.
        dtype: Type of the base.
        device: Device to train on.
    """
    gc.collect()
    name = base_name(shape, args.toy)
    vocab = TOY["vocab"] if args.toy else shape["vocab"]
    sizes = {"users": 1, "batch": args.batch, "context": args.ctx, "vocab": vocab, "experts": 2}
    step = one_by_one(name, **sizes, dtype=dtype, device=device)  # a user takes as long as any other
    for _ in range(2):
        time_step(step, time.perf_counter)
    return round(statistics.median(time_step(step, time.perf_counter) for _ in range(5)) * users / seconds, 2)


def measure_all(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results, or the reasons why they are missing."""
    device = resolve_device(args.device)
    end = time.perf_counter() + args.seconds
    toy_base = load_base(base_name(SHAPES["gpt2-124m"], True), dtype=args.dtype, device=args.device)
    peak = best_product(device, toy_base.dtype, 512 if args.toy else 8192)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    yield {"device": where, "torch": torch.__version__, "best_product_tflops": round(peak / 1e12, 3)}
    names = args.shapes.split(",")
    for number, label in enumerate(names):
        share = (end - time.perf_counter()) / (len(names) - number)
        yield from measure_shape(args, label, time.perf_counter() + share, peak)
        gc.collect()


def measure_shape(args: Namespace, label: str, deadline: float, peak: float) -> Iterator[dict[str, Any]]:
    """Yield the results of one shape.

    Args:
        args: The command line.
        label: Name of the shape.
        deadline: Time at which to stop.
        peak: FLOPs per second of the best product.
    """
    shape, seconds_per_user = SHAPES[label], 0.0
    base = load_base(base_name(shape, args.toy), dtype=args.dtype, device=args.device)
    for users in args.counts:
        seconds_left = deadline - time.perf_counter()
        if seconds_left < seconds_per_user * users:
            yield {
                "shape": label,
                "users": users,
                "left_out": f"{seconds_left:.0f} s left, {seconds_per_user * users:.0f} needed",
            }
            continue
        try:
            line = {"shape": label, **measure_what_fits(args, shape, base, users, peak, deadline)}
            seconds_per_user = line["seconds"] / users * LEAST_TIME
            if shape["family"] == "gpt2" and users == (args.counts[-1] if args.toy else USUAL_AT):
                kinds = dict.fromkeys(["float32", str(base.dtype).removeprefix("torch.")])
                line["usual"] = {
                    k: try_measurement(measure_usual_speedup, args, shape, users, line["seconds"], k, args.device)
                    for k in kinds
                }
            yield line
        except Exception as error:  # the other lines may still be had
            yield {"shape": label, "users": users, "left_out": describe_error(error)}


def format_table(results: list[dict[str, Any]]) -> str:
    """Return the table for README.md."""
    keys = ("shape", "users", "tokens_per_s", "of_base", "of_peak", "of_chip", "mb_per_user", "peak_gb", *WAYS, "usual")
    complete = [{"tokens_per_s": line.get("left_out", ""), **line} for line in results]
    rows = [[str(line.get(key, "")) for key in keys] for line in complete]
    return "\n".join("| " + " | ".join(row) + " |" for row in (keys, ["---"] * len(keys), *rows))


def main() -> None:
    """Measure and print each line, and the table at the end even if the run is stopped."""
    args = parse_arguments()
    keep_buffers()
    # Each number of users has passes of one size: code for any size, which a second one asks for, is not what they run.
    torch._dynamo.config.automatic_dynamic_shapes = False
    results = []
    try:
        for line in measure_all(args):
            print(json.dumps(line), flush=True)
            results.append(line)
    finally:  # also where gpu.sh stops it
        print(format_table([line for line in results if "shape" in line]), flush=True)
        if args.out is not None:
            args.out.write_text("".join(json.dumps(line) + "\n" for line in results), encoding="utf-8")


if __name__ == "__main__":
    main()
