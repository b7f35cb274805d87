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
    """Return the peak memory of ``throughput.py`` in MB, in a process of its own.

    Args:
        users: Number of users.
        batch: Sequences per user.
        *more: Further options.
    """
    command = [sys.executable, str(THROUGHPUT), *SHAPE, "--users", str(users), "--batch", str(batch), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_rss_mb"])


def main() -> None:
    """Measure the peaks and print one line of JSON."""
    more = sys.argv[1:]
    four_users, sixteen_users = peak_mb(4, 4, *more), peak_mb(16, 1, *more)
    result = {
        "4_users_batch_4_mb": four_users,
        "16_users_batch_1_mb": sixteen_users,
        "ratio": round(sixteen_users / four_users, 3),
        "mb_per_further_user": round((sixteen_users - four_users) / 12, 1),
        "1_user_batch_64_mb": peak_mb(1, 64, *more),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
