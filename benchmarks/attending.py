"""Native against eager attention: seconds of a training step by context, timed in turns within one run.

    python benchmarks/attending.py [--shape small] [--contexts 128,512,1024] [--dtype bfloat16] [--iters 8]
    python benchmarks/attending.py --only eager --contexts 512

Prints one JSON line. Every context has the same number of tokens per step; ``roofline.py`` defines the shapes. With
``--only`` one of the two runs alone, and the line has the peak memory of the process instead: give it one context.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from clocks import add_clock, select_clock
from comingle.models.hardware import keep_buffers, peak_memory_bytes
from comingle.models.loading import load_base
from comingle.training.client import train
from roofline import CONTEXT, SHAPES
from throughput import make_clients, time_step

WAYS = {"native": "auto", "eager": "eager"}


def measure(args: argparse.Namespace, context: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the seconds of a step with each attention, or the peak memory of one.

    Args:
        args: The command line.
        context: Tokens per sequence.
        clock: Function that returns the time in seconds.
    """
    shape = dict(SHAPES[args.shape])
    shape["batch"] = max(1, shape["batch"] * CONTEXT // context)
    name = f"random:gpt2?ctx={max(1024, context)}&" + "&".join(
        f"{key}={shape[key]}" for key in ("layers", "dim", "heads", "vocab")
    )
    switches = {"users_per_step": None, "micro_batch": None, "no_compile": False, "no_native": False}
    arguments = argparse.Namespace(**shape, **switches, method="comigs-1g1s", experts=2, ctx=context)
    ways = WAYS if args.only is None else {args.only: WAYS[args.only]}
    clients_by_way = {
        way: make_clients(arguments, load_base(name, dtype=args.dtype, device="cpu", attention=style))
        for way, style in ways.items()
    }
    turns = []
    for number in range(args.iters + 2):  # the first two compile and warm up
        turns.append(
            {
                way: time_step(partial(train, clients_by_way[way], list(range(shape["users"])), number), clock)
                for way in clients_by_way
            }
        )
    if args.only is not None:
        return {"peak_bytes": peak_memory_bytes()}
    medians = {f"{way}_s": round(statistics.median(turn[way] for turn in turns[2:]), 3) for way in clients_by_way}
    return {**medians, "times": round(statistics.median(t["eager"] / t["native"] for t in turns[2:]), 3)}


def main() -> None:
    """Measure each context and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--contexts", default="128,512,1024")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--only", choices=WAYS, default=None)
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args)
    keep_buffers()
    by_context = {context: measure(args, int(context), clock.now) for context in args.contexts.split(",")}
    print(json.dumps({**clock.fields, "shape": args.shape, "dtype": args.dtype, **by_context}))


if __name__ == "__main__":
    main()
