"""Membership inference, with and without reference models.

Without them a window is scored by how much lower its loss is under the final shared model than under the base: the
loss alone depends more on how hard a text is than on whether it was trained on (difficulty calibration: Watson et al.
2022, arXiv:2111.08440).

Reference models are short runs of the recipe, in each of which a coin decides for every window of a user's training
text whether it is in; a conversation is one window. Each run is attacked by what the others have shown: for every
window a Gaussian of its scores where it was in and one of those where it was not, and the ratio of their likelihoods
(LiRA: Carlini et al. 2022, arXiv:2112.03570, Algorithm 1, online). With few runs all windows of a user share the
variances, as the paper advises (section VI.C).

Differs from the paper: the difference between a window's two means is drawn towards that of all windows, as a few runs
say little of one, and is never negative; the score is how much lower a window's loss became while a user trained (for
the server, summed over rounds) or since the start (for other users), in nats; within each run it is taken from the mean
over the user's windows, as how far a model has been trained says nothing of one window. Each run is a target in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int, Int64
from scipy.stats import rankdata
from torch import Tensor

from comingle.audits.canaries import SERVER, USERS, Attacker, Looked, Watched, published
from comingle.config import Recipe
from comingle.data.conversations.encoding import Answers, UserAnswers, widen
from comingle.data.text.streams import UserData
from comingle.models.windows import PAD, hide
from comingle.reports.audit import Membership, Shadowed
from comingle.runs.results import Run
from comingle.runs.session import build, execute
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree

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


MOST_TARGETS = 64
"""Windows of each user that are scored."""
LEAST = 4
"""Of fewer windows a user's training data is not parted."""
FEWEST = 3
"""Runs: one that is attacked, and for a window that was in and one that was not another."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """One run's training data: of each user the windows, ``(windows, width)``, and which of them are in."""

    windows: Sequence[Int[Tensor, "_ _"]]
    inside: Sequence[Bool[Tensor, " _"]]

    def of(self, number: int, user: UserData | UserAnswers) -> UserData | UserAnswers:
        """Return the user with the windows that are in, and the end of a stream that is too short for one."""
        if isinstance(user, UserAnswers):
            return replace(user, train=user.train.only(self.inside[number]))
        windows, width = self.windows[number], self.windows[number].shape[1]
        kept = windows[self.inside[number]].flatten()
        return replace(user, train=torch.cat([kept, user.train[len(windows) * width :]]))


def halves(users: Sequence[UserData | UserAnswers], context: int, *, seed: int, run: int) -> Halves:
    """Coins for all windows of all users, which training does not know; one window is in at least.

    Who has hardly any windows trains on all of them.
    """
    windows, inside = [windows_of(user.train, context, most=len(user.train)) for user in users], []
    for user, own in zip(users, windows, strict=True):
        coins = torch.rand(len(own), generator=generator("shadow", seed, run, user.name)) < 0.5
        coins[0] |= not bool(coins.any())
        inside.append(coins if len(own) >= LEAST else torch.ones_like(coins))
    return Halves(windows=windows, inside=inside)


def scored(count: int) -> Int[Tensor, " scored"]:
    """Which of so many windows are scored: spread over all; of hardly any none."""
    return torch.linspace(0, count - 1, min(count, MOST_TARGETS) if count >= LEAST else 0).long()


@dataclass(kw_only=True)
class Scores:
    """How much lower the losses of some windows of each user became, by view and user, summed over what is seen."""

    attacker: Attacker
    windows: Int[Tensor, "users windows width"]
    looked: Looked = field(default_factory=Looked)
    sums: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {SERVER: {}, USERS: {}})

    def look(self, who: str, users: Sequence[int], tensors: Tree) -> None:
        """Add what one round shows."""
        if (sums := self.sums.get(who)) is not None:
            windows, before = self.windows[list(users)], self.looked.before(who, users)
            gained = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            for user, more in zip(users, gained, strict=True):
                sums[user] = sums[user] + more if user in sums else more
        self.looked.remember(who, tensors)


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """One run: by view and user the scores of some windows, where anything was seen, and which of them were in."""

    scores: dict[str, dict[int, Tensor]]
    inside: Sequence[Bool[Tensor, " windows"]]


def run_shadow(
    recipe: Recipe, materials: RunData, number: int, observers: Callable[[Clients], Sequence[Observer]]
) -> Shadow:
    """Train on halves of this run's own, and look at what leaves. ``recipe`` is short, of text or conversations."""
    users: Sequence[UserData | UserAnswers] = materials.users
    own = recipe.with_changes({"seed": recipe.seed + 1 + number})
    parts = halves(users, recipe.training.context, seed=recipe.seed, run=number)
    people = tuple(parts.of(at, user) for at, user in enumerate(users))
    plain = build(own, replace(materials, users=people), store="memory")
    places = [scored(len(windows)) for windows in parts.windows]
    most = max(map(len, places))
    padded = [
        windows[at[torch.arange(most) % len(at)]] if len(at) else windows[:1].expand(most, -1)
        for windows, at in zip(parts.windows, places, strict=True)
    ]
    looking = Scores(attacker=Attacker(clients=plain.clients), windows=torch.stack(widen(padded)))
    federation = Watched(clients=plain.clients, server=plain.server, look=looking.look)
    execute(federation, own, None, observers=observers(plain.clients))
    known = [user for user, at in enumerate(places) if len(at)]
    return Shadow(
        scores={
            who: {user: sums[user][: len(places[user])] for user in known if user in sums}
            for who, sums in looking.sums.items()
        },
        inside=[inside[at] for inside, at in zip(parts.inside, places, strict=True)],
    )


# -------------------------------------------------------------------- the attack


def likelihood_ratios(
    scores: Float[Tensor, "runs windows"], inside: Bool[Tensor, "runs windows"]
) -> Float[Tensor, "runs windows"]:
    """``log N(score; in) - log N(score; out)`` of each run's windows, fitted to all other runs."""
    scores = scores - scores.mean(1, keepdim=True)
    return torch.stack([_against_others(scores, inside, run) for run in range(len(scores))])


def _against_others(scores: Tensor, inside: Tensor, run: int) -> Float[Tensor, " windows"]:
    others = torch.arange(len(scores)) != run
    known, sides = scores[others], inside[others]
    gap, variance = _gaps(known, sides)
    outside = (known - torch.where(sides, gap, 0.0)).mean(0)
    wider = variance * (1 + 1 / len(known))  # the mean of few runs is uncertain itself
    away = scores[run] - outside
    return (away.square() - (away - gap).square()) / (2 * wider)


def _gaps(scores: Tensor, inside: Tensor) -> tuple[Float[Tensor, " windows"], Float[Tensor, ""]]:
    """By how much each window's score is higher where it is in; and the variance around both means.

    A window's own difference, out of a few runs, is drawn towards the mean difference of all windows, as far as the
    spread of these differences is no more than chance would make it (empirical Bayes). It is never negative, as
    training on a window does not make a model less sure of it: where nothing is learned, a run would else be attacked
    with the other runs' chance, which is the opposite of its own.
    """
    counts, means = [], []
    for side in (inside, ~inside):
        counts.append(side.sum(0))
        means.append(torch.where(side, scores, 0.0).sum(0) / counts[-1].clamp(min=1))
    fitted = torch.where(inside, *means)
    free = sum((count - 1).clamp(min=0).sum() for count in counts)
    variance = ((scores - fitted).square().sum() / max(1, int(free))).clamp(min=SMALL)
    both = (counts[0] > 0) & (counts[1] > 0)
    if not bool(both.any()):
        return torch.zeros_like(means[0]), variance
    own = means[0] - means[1]
    chance = variance * (1 / counts[0].clamp(min=1) + 1 / counts[1].clamp(min=1))
    mean = own[both].mean()
    spread = ((own[both] - mean).square().mean() - chance[both].mean()).clamp(min=0)
    return torch.where(both, mean + spread / (spread + chance) * (own - mean), mean).clamp(min=0), variance


SMALL = 1e-18
"""The least variance of a score."""


def told_apart(names: Sequence[str], shadows: Sequence[Shadow]) -> list[Shadowed]:
    """How well each user's windows are told apart, by each view in all runs that it has seen something of."""
    found = []
    for view in (SERVER, USERS):
        for user, name in enumerate(names):
            runs = [(one.scores[view][user], one.inside[user]) for one in shadows if user in one.scores[view]]
            if len(runs) < FEWEST:
                continue
            scores, inside = (torch.stack(part) for part in zip(*runs, strict=True))
            found.append(_shadowed(view, name, scores, inside))
    return found


def _shadowed(view: str, user: str, scores: Tensor, inside: Tensor) -> Shadowed:
    ratios, coins = likelihood_ratios(scores, inside), inside.flatten()
    members, others = ratios.flatten()[coins].tolist(), ratios.flatten()[~coins].tolist()
    plain = scores.flatten()
    return Shadowed(
        view=view,
        user=user,
        members=len(members),
        others=len(others),
        auc=auc(members, others),
        auc_of_scores=auc(plain[coins].tolist(), plain[~coins].tolist()),
        found=found_at(members, others),
    )
