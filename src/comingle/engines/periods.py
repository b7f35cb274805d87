"""How often everybody's models are evaluated, where a recipe leaves that open.

As often that all evaluations together take at most a tenth as long as the local steps, but not before each fifth round.
What takes how long is counted and never measured, and a method's further steps are left out: all methods of a
comparison, a resumed run, and users in other processes or on other machines come to the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

from comingle.config.settings import AUTO, SHORTEST, Training
from comingle.engines.client import Clients
from comingle.engines.clock import Federation
from comingle.privacy.accounting import sample_size

logger = logging.getLogger("comingle")

SHARE, TRAINED = Fraction(1, 10), Fraction(23, 10)
"""Of the time of the local steps; and so many times as long as to be scored a token takes to be trained on."""


def amounts_of(clients: Clients) -> list[int]:
    """Of those who are evaluated here: how many train, on how much in a round, and how much is scored at once."""
    trainers, splits = clients.scored_trainers, ("test", "valid") if clients.training.select == "best" else ("test",)
    scored = [clients.feed.scoring(getattr(user, split)) for user in clients.scored_users for split in splits]
    return [len(trainers), sum(map(clients.feed.seen, trainers)), sum(scored)]


def settle(federation: Federation) -> None:
    """Find out how often this federation evaluates."""
    clients, training = federation.clients, federation.clients.training
    if training.evaluate_every == AUTO and clients.method.trains:
        parts = federation.gather(lambda: amounts_of(clients))
        every = federation.share(
            lambda: period(training, [*map(sum, zip(*parts, strict=True))], len(clients.everybody))
        )
        clients.training = replace(training, evaluate_every=every)


def period(training: Training, amounts: Sequence[int], users: int) -> int:
    """Rounds from one evaluation to the next; says so where those that there are always take more than a tenth.

    Trainers of whom the ``amounts`` are stand for all of the ``users``.
    """
    (trainers, trained, scored), part = amounts, training.participation
    if not trained or not scored:
        return SHORTEST
    present = sample_size(part, users) if isinstance(part, float | int) else Fraction(sum(map(len, part)), len(part))
    room = SHARE * TRAINED * training.rounds * present * Fraction(trained, trainers) / scored
    others = training.evaluate_first + (training.select == "best")  # whose models are scored once more
    every = max(SHORTEST, math.ceil(training.rounds / max(1, math.floor(room) - others)))
    if (count := others + math.ceil(training.rounds / every)) > room:
        less = f"lower {training.test_limit}" if training.test_limit else "give less test data"
        first = " or set evaluation.first: false" if training.evaluate_first else ""
        _say(float(100 * count * SHARE / room), less + first)
    return every


@cache
def _say(percent: float, advice: str) -> None:
    """Log the share of evaluation once, however many methods of a comparison have it."""
    logger.warning("evaluation takes %.0f%% of the time of training; %s", percent, advice)
