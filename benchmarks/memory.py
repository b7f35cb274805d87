"""Memory per additional user on a random GPT2-124M; each measurement runs in its own process.

    python benchmarks/memory.py

Prints one JSON line: peak memory of 4 users with batch 4 and of 16 users with batch 1 (the same 16 sequences), their
ratio, the cost of each additional user (its adapters, both moments, and its share of activations), and the peak with a
batch of 64 in the default micro-batches, which bound it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SHAPE = ["--layers", "12", "--dim", "768", "--heads", "12", "--vocab", "50257", "--iters", "1", "--no-base"]
THROUGHPUT = Path(__file__).with_name("throughput.py")


def peak_mb(users: int, batch: int, *more: str) -> float:
    command = [sys.executable, str(THROUGHPUT), *SHAPE, "--users", str(users), "--batch", str(batch), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_rss_mb"])


def main() -> None:
    more = sys.argv[1:]
    few, many = peak_mb(4, 4, *more), peak_mb(16, 1, *more)
    result = {
        "4_users_batch_4_mb": few,
        "16_users_batch_1_mb": many,
        "ratio": round(many / few, 3),
        "mb_per_further_user": round((many - few) / 12, 1),
        "1_user_batch_64_mb": peak_mb(1, 64, *more),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
