"""Cost of secure aggregation: seconds per user and on the server, and bytes compared with a plain upload.

    python benchmarks/secure_sums.py --users 10 --entries 1180000 --lost 1

Prints one JSON line. User seconds cover all four steps, averaged over users. Server seconds cover unmasking when
``lost`` users drop out after they have shared their keys.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from comingle.config.settings import SecureSection, Terms
from comingle.privacy.secure_server import SimulatedSum
from comingle.privacy.secure_sum import received_bytes, sent_bytes


def measure(users: int, entries: int, lost: int) -> dict[str, float]:
    """Time one secure sum.

    Args:
        users: Number of users.
        entries: Number of entries of an upload.
        lost: Number of users who drop out between sharing keys and uploading.

    Returns:
        The line of results.
    """
    names, secure = tuple(f"user {number}" for number in range(users)), SecureSection()
    terms = Terms(
        run="", round=1, users=names, expected=users, threshold=secure.required_users(users),
        word=secure.word_bits(users), entries=entries,
    )  # fmt: skip
    upload = np.random.default_rng(0).integers(0, 1000, entries).astype(f"<u{terms.word // 8}")
    dropped = names[users - lost :]
    simulated = SimulatedSum(
        terms=terms,
        uploads=dict.fromkeys(names, upload),
        answers=lambda step, name: step in ("advertise", "share") or name not in dropped,
    )
    began = time.perf_counter()
    total = simulated.total(1000)
    total_seconds = time.perf_counter() - began
    began = time.perf_counter()
    server_total = simulated.server.total(1000)
    server_seconds = time.perf_counter() - began
    assert np.array_equal(total, server_total)
    assert np.array_equal(total, upload.astype(np.int64) * (users - lost))
    return {
        "users": users,
        "entries": entries,
        "lost": lost,
        "word_bits": terms.word,
        "user_seconds": round((total_seconds - server_seconds) / users, 4),
        "server_seconds": round(server_seconds, 4),
        "upload_bytes": sent_bytes(terms, names[0], users),
        "float32_bytes": 4 * entries,
        "download_bytes": received_bytes(terms, names[0], names),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--entries", type=int, default=1_180_000)
    parser.add_argument("--lost", type=int, default=0)
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
