"""Membership inference: which windows of a user's text did the final shared model train on?

Whoever has that model and the base scores a window by how much lower its loss has become: the loss alone says more of
how hard a text is than of who has trained on it (difficulty calibration: Watson et al. 2022, arXiv:2111.08440).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
from scipy.stats import rankdata
from torch import Tensor

from comingle.audits.canaries import Attacker, published
from comingle.reports.audit import Membership
from comingle.runs.results import Run

MOST = 200
"""Windows of each user and each kind."""
FALSE_ALARMS = 0.01


def windows_of(stream: Int[Tensor, " tokens"], context: int, most: int = MOST) -> Int[Tensor, "windows width"]:
    """Windows that do not overlap, spread over the stream; one shorter window where it is shorter."""
    width = min(context + 1, len(stream))
    whole = stream.unfold(0, width, width)
    return whole[torch.linspace(0, len(whole) - 1, min(most, len(whole))).long()]


def infer(run: Run) -> list[Membership]:
    """How well members are told from others, for each user, by the shared model that the users have at the end."""
    clients, server = run.federation.clients, run.federation.server
    attacker, seen, found = Attacker(clients=clients), published(server, others=True), []
    for number, user in enumerate(clients.users):
        own = {name: t[number : number + 1] for name, t in seen.items()}
        sets = [windows_of(stream, clients.training.context).unsqueeze(0) for stream in (user.train, user.test)]
        plain = [attacker.losses([number], own, one)[0] for one in sets]
        base = [attacker.losses([number], {}, one)[0] for one in sets]
        inside, outside = ((before - after).tolist() for before, after in zip(base, plain, strict=True))
        losses = [(-one).tolist() for one in plain]
        found.append(
            Membership(
                user=user.name,
                members=len(inside),
                others=len(outside),
                auc=auc(inside, outside),
                auc_of_loss=auc(losses[0], losses[1]),
                found=found_at(inside, outside),
            )
        )
    return found


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """How often a member scores higher than another, ties counting half."""
    ranks = rankdata([*members, *others])
    count = len(members)
    return float((ranks[:count].sum() - count * (count + 1) / 2) / (count * len(others)))


def found_at(members: Sequence[float], others: Sequence[float], rate: float = FALSE_ALARMS) -> float | None:
    """The share of members that score above all but ``rate`` of the others; None where these are too few to say."""
    allowed = math.floor(rate * len(others) + 1e-9)
    if allowed == 0:
        return None
    threshold = sorted(others, reverse=True)[allowed]
    return sum(score > threshold for score in members) / len(members)
