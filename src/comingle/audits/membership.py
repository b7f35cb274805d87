"""Membership inference: which windows of a user's text, or conversations, did the final shared model train on?

Whoever has that model and the base scores a window by how much lower its loss has become: the loss alone says more of
how hard a text is than of who has trained on it (difficulty calibration: Watson et al. 2022, arXiv:2111.08440).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int, Int64
from scipy.stats import rankdata
from torch import Tensor

from comingle.audits.canaries import Attacker, published
from comingle.data.conversations.encoding import Answers
from comingle.models.windows import PAD, hide
from comingle.reports.audit import Membership
from comingle.runs.results import Run

MOST_WINDOWS = 200
"""Windows, or conversations, of each user and split."""
FALSE_ALARMS = 0.01


def windows_of(
    data: Int[Tensor, " tokens"] | Answers, context: int, most: int = MOST_WINDOWS
) -> Int[Tensor, "windows width"]:
    """Return windows of one split of a user, spread evenly over it.

    Args:
        data: a token stream, which is cut into windows without overlap (one shorter window where the stream is
            shorter), or conversations, each a window filled with ``PAD``.
        context: inputs of a window of a stream, which has one token more.
        most: the largest number of windows.
    """
    if isinstance(data, Answers):
        whole = data.windows
    else:
        width = min(context + 1, len(data))
        whole = data.unfold(0, width, width)
    return whole[torch.linspace(0, len(whole) - 1, min(most, len(whole))).long()]


def show(windows: Int64[Tensor, "*batch width"]) -> Int64[Tensor, "*batch width"]:
    """Make every token a target but ``PAD``, as in training with ``data.loss_on: all``."""
    return torch.where(windows < PAD, hide(windows), windows)


def infer(run: Run) -> list[Membership]:
    """How well members are told from others, for each user, by the shared model that the users have at the end."""
    clients, server = run.federation.clients, run.federation.server
    attacker, seen, found = Attacker(clients=clients), published(server, others=True), []
    all_tokens = getattr(run.recipe.data, "loss_on", "") == "all"  # test splits have targets in responses alone
    for number, user in enumerate(clients.users):
        own = {name: t[number : number + 1] for name, t in seen.items()}
        sets = [windows_of(part, clients.training.context).unsqueeze(0) for part in (user.train, user.test)]
        sets = [show(windows) if all_tokens else windows for windows in sets]
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
