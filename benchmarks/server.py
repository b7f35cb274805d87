"""What FedMerge's server needs for the exchange that ends a round, and how that grows with users, models and size.

``python benchmarks/server.py [--users 1000] [--models 30] [--parameters 84000] [--grow 2]`` prints one JSON line:

- ``seconds``: one whole exchange: everybody's update against what was sent, the models (eq. 5 and 8), the merging
  weights (eq. 6 and 9, inner products over the last layer) and everybody's next model (eq. 4), the median of some;
- ``all_keys``: the same with inner products over all parameters;
- ``grown``: how many times longer with twice as many users, models or parameters, in the same run.
"""

from __future__ import annotations

import argparse
import json
import time

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from comingle.methods import make
from comingle.methods.server import Received, ServerSetup

HEAD = 6_500
"""Parameters of the last layer, as of ResNet-9 with 100 labels."""


def seconds(users: int, models: int, parameters: int, keys: str, repeats: int = 3) -> float:
    """The median time of an exchange."""
    server = make("fedmerge", models=models, inner_product_keys=keys).server
    random = torch.Generator().manual_seed(0)
    sizes = {"body.weight": parameters - HEAD, "head.weight": HEAD}
    starts = {name: torch.randn(models, size, generator=random) for name, size in sizes.items()}
    names, scales = [str(i) for i in range(users)], torch.ones(users)
    kept = server.start(ServerSetup(models=starts, users=names, scales=scales, seed=0))
    received = Received(
        users=range(users),
        tensors={name: torch.randn(users, size, generator=random) for name, size in sizes.items()},
        weights=torch.full((users,), 1 / users, dtype=torch.float64),
        ranks=torch.zeros(users, dtype=torch.int64),
        scales=scales,
    )
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        server.aggregate(kept, received)
        server.download(kept, range(users))
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--parameters", type=int, default=84_000)
    parser.add_argument("--grow", type=int, default=2, help="how many times more of one thing at a time")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = {"users": args.users, "models": args.models, "parameters": args.parameters}
    once = seconds(**sizes, keys="head")
    grown = {name: seconds(**{**sizes, name: args.grow * size}, keys="head") / once for name, size in sizes.items()}
    found = {
        **sizes,
        "threads": args.threads,
        "seconds": round(once, 3),
        "all_keys": round(seconds(**sizes, keys="all"), 3),
        "grown": {name: round(ratio, 2) for name, ratio in grown.items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
