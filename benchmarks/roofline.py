"""How near training comes to what the machine could do: the base's products alone at the rate of its best product.

    python benchmarks/roofline.py [--shapes gpt2,small] [--iters 4] [--threads 1 --cpu-time]

Prints one JSON line, for each shape:

- ``best_tflops``: the fastest of some square and oblong bfloat16 products;
- ``limit_tokens_per_s``: tokens a second if every linear of the base and its head took, forward and backward to the
  inputs, 4 floating-point operations for each of their weights at that rate, and nothing else took any time;
- ``base_tokens_per_s``, ``tokens_per_s``, ``adapter_efficiency``: as in ``throughput.py``;
- ``roofline_share``: ``tokens_per_s`` over the limit.

All are timed in turns within one run; shares are medians over turns, so a machine whose speed drifts moves both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from clocks import add_clock, select_clock
from comingle.models.hardware import keep_buffers
from comingle.models.loading import load_base
from comingle.training.client import Clients, train
from throughput import base_pass, make_clients, time_step

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "users": 4, "batch": 4},
    "small": {"layers": 4, "dim": 256, "heads": 4, "vocab": 8192, "users": 4, "batch": 16},
}
CONTEXT = 128
PRODUCTS = ((2048, 2048, 2048), (2048, 768, 3072), (2048, 3072, 768), (512, 4096, 4096), (4096, 1024, 1024))
"""Rows, inner and outer width."""


class Products:
    """A few large products, whose fastest one shows the machine's rate."""

    def __init__(self) -> None:
        self.operands = [(torch.randn(n, k).bfloat16(), torch.randn(k, m).bfloat16()) for n, k, m in PRODUCTS]

    def best(self, clock: Callable[[], float]) -> float:
        """Return the FLOPs per second of the fastest product.

        Args:
            clock: Function that returns the time in seconds.
        """
        rates = []
        for (n, k, m), (a, b) in zip(PRODUCTS, self.operands, strict=True):
            repeats = max(1, 4 * 10**10 // (2 * n * k * m))
            started = clock()
            for _ in range(repeats):
                torch.mm(a, b)
            rates.append(2 * n * k * m * repeats / (clock() - started))
        return max(rates)


def product_flops(clients: Clients) -> int:
    """Return FLOPs per token in the base's linears and head: forward, and backward to the inputs."""
    model: Any = clients.model
    adapted = [*model.adapters.attention.values(), *model.adapters.experts.values()]
    kinds = ("Linear", "Conv1D")
    weights = sum(m.weight.numel() for one in adapted for m in one.modules() if type(m).__name__ in kinds)
    return 4 * (weights + model.base.model.get_output_embeddings().weight.numel())


def measure(shape: dict[str, int], method: str, iters: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Measure one shape.

    Args:
        shape: Sizes of the model and the batch.
        method: Name of the method.
        iters: Number of timed turns.
        clock: Function that returns the time in seconds.
    """
    name = "random:gpt2?" + "&".join(f"{key}={shape[key]}" for key in ("layers", "dim", "heads", "vocab"))
    settings = {"method": method, "experts": 2, "ctx": CONTEXT, "dtype": "bfloat16", "device": "cpu"}
    switches = {"users_per_step": None, "micro_batch": None, "no_compile": False, "no_native": False}
    args = argparse.Namespace(**shape, **settings, **switches)
    clients, products = make_clients(args, load_base(name, dtype=args.dtype, device=args.device)), Products()
    bare_base = load_base(name, dtype=args.dtype, device=args.device)
    base = base_pass(args, bare_base, clients.pass_size.users * clients.pass_size.sequences)
    tokens, flops = shape["users"] * shape["batch"] * CONTEXT, product_flops(clients)
    turns: list[tuple[float, float, float]] = []
    for number in range(iters + 2):  # the first two compile and warm up
        rate = products.best(clock)
        train_seconds = time_step(lambda number=number: train(clients, list(range(shape["users"])), number), clock)
        turns.append((rate, time_step(base, clock), train_seconds))
    rates, base_times, train_times = zip(*turns[2:], strict=True)
    shares = [flops * tokens / train_seconds / rate for rate, _, train_seconds in turns[2:]]
    return {
        "best_tflops": round(statistics.median(rates) / 1e12, 3),
        "limit_tokens_per_s": round(statistics.median(rates) / flops),
        "base_tokens_per_s": round(tokens / statistics.median(base_times)),
        "tokens_per_s": round(tokens / statistics.median(train_times)),
        "adapter_efficiency": round(statistics.median(b / t for b, t in zip(base_times, train_times, strict=True)), 3),
        "roofline_share": round(statistics.median(shares), 3),
    }


def main() -> None:
    """Measure each shape and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="gpt2,small")
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--iters", type=int, default=4)
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args)
    keep_buffers()
    by_shape = {shape: measure(SHAPES[shape], args.method, args.iters, clock.now) for shape in args.shapes.split(",")}
    print(json.dumps({**clock.fields, **by_shape}))


if __name__ == "__main__":
    main()
