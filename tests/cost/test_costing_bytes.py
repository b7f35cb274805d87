"""The bytes of a plan are those that a run counts, for every method."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.cost.counts import count_exchanges, mean_bytes, message_bytes
from comingle.methods import REGISTRY, make
from comingle.training.checkpoints import Clock
from comingle.training.kinds.base import check_recipe
from comingle.training.rounds import run_rounds


def runs_on_text(name: str) -> bool:
    try:
        check_recipe(parse_recipe({"method": name, "data": {"users": {"a": "b"}}}))
    except ValueError:
        return False
    return True


ON_TEXT = [name for name in REGISTRY if runs_on_text(name)]
EXCHANGED = ("comigs-1g1s", "fdlora", "fedavg", "fedmerge", "floral", "pcl", "scaffold")
"""Methods with which quick tests evaluate what comes of an exchange, too."""


def totals(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(sent for sent, _ in sizes), sum(received for _, received in sizes)


@pytest.mark.parametrize(
    ("name", "evaluated"),
    [
        *((name, "local") for name in REGISTRY),
        *(pytest.param(n, "exchanged", marks=() if n in EXCHANGED else pytest.mark.slow) for n in REGISTRY),
    ],
)
@pytest.mark.sampled(8)
def test_a_plan_has_the_bytes_that_a_run_counts(name: str, evaluated: str, federate: Any, federate_nets: Any) -> None:
    """Everybody takes part; some methods begin with a download."""
    made = partial(federate, base="random:llama?layers=1") if name in ON_TEXT else federate_nets
    method = {"name": name, "exchange_from": 1, "exchange_every": 1} if name == "pcl" else name
    federation = made(method, changes={"training.rounds": 3, "evaluation.model": evaluated})
    users = [user.name for user in federation.clients.trainers]
    planned, exchanges = message_bytes(federation, users), count_exchanges(federation)
    first = message_bytes(federation, users, version=0)
    assert (first == planned) == (not make(name).placement.once)
    clock = Clock()
    run_rounds(federation, observe=lambda event: None, clock=clock)
    downloads = exchanges + make(name).server.first_download
    (sent, received), (first_sent, first_received) = totals(planned), totals(first)
    assert clock.upload_bytes == first_sent + (exchanges - 1) * sent
    assert clock.download_bytes == first_received + (downloads - 1) * received
    assert bool(clock.upload_bytes) == bool(exchanges)


def test_names_travel_so_users_differ_by_their_lengths(federate: Any) -> None:
    federation = federate("fedavg", users=("a", "ab", "abc"))
    found = message_bytes(federation, ("a", "ab", "abc"))
    (one, _), (two, _), (three, _) = found
    assert (two - one, three - two) == (1, 1)
    assert mean_bytes(found) == found[1]
