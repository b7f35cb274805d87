"""Attacks on training data: canaries and membership inference, both in short runs that are observed.

Canaries: random tokens are written over parts of users' training text; in conversations over tokens that are trained
on, which are those of responses.

Observed are the uploads, which the server sees, and what the server publishes, which users see. A user's local tensors
(specialists, routers) are never observed; their public initial values stand in for them.

Membership without reference models: a window is scored by how much lower its loss is under the final shared model than
under the base. The loss alone depends more on how hard a text is than on whether it was trained on (difficulty
calibration: Watson et al. 2022, arXiv:2111.08440).

Membership with reference models: in each of several short runs a coin decides for every window of a user's training
text whether it is included; a conversation is one window. Each run is attacked with what the others show: for every
window a Gaussian of its scores with the window included, another without it, and the ratio of their likelihoods (LiRA:
Carlini et al. 2022, arXiv:2112.03570, Algorithm 1, online). With few runs all windows of a user share the variances, as
the paper advises (section VI.C).

Differs from the paper: the difference between a window's two means is shrunk towards that of all windows, as a few runs
say little about one, and is never negative. The score is the decrease of a window's loss while a user trained (for the
server, summed over rounds) or since the start (for other users), in nats. The mean over the user's windows is
subtracted within each run, as overall progress says nothing about one window. Each run is the target once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from scipy.stats import rankdata
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import protects_examples
from comingle.data.conversations.encoding import Answers, UserAnswers, widen
from comingle.data.populations import as_users
from comingle.data.text.streams import UserData
from comingle.methods.base import Method
from comingle.models.scoring import PAD, begin_windows, hide
from comingle.privacy.accounting import Work
from comingle.protocol.messages import Upload, expand, fill_ranks
from comingle.reports.audit import Membership, Shadowed
from comingle.runs.results import Run
from comingle.runs.session import build, execute
from comingle.training.backends.local import InProcess
from comingle.training.batch_sources import AnyUser
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import TextBatchSource
from comingle.training.server import ServerHalf
from comingle.training.state import draw
from comingle.utils.errors import RunError
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree, assign

SHARE = 0.25
"""Fraction of a user's training text, or conversations, that its canary replaces: a bound is about the worst case.

Where privacy protects single examples, a canary replaces one of them.
"""
LONGEST = 32
"""Largest number of predicted tokens of a canary."""
REFERENCES = 63
"""Number of reference canaries, which are never included."""
COMPARED = 31
"""Number of reference canaries that are scored in each round."""

SERVER, USERS, OWN = "server", "users", "own"
"""Views: the server sees uploads, other users what they download, the user itself what it trains from."""

RecordView = Callable[[str, Sequence[int], Tree], None]
"""Called with a view, user indices, and the observed shared tensors ``(users, models, *shape)`` of these users."""


@dataclass(kw_only=True)
class ObservedFederation(InProcess):
    """Federation in one process that passes uploads and published models to ``record_view``."""

    record_view: RecordView = lambda view, users, tensors: None

    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """Send uploads, observed by the server."""
        super().upload(members, done, losses)
        message = self._upload_of_round
        if message is not None and message.users:
            self.record_view(SERVER, self.clients.numbers(message.users), uploaded(self.server, message))

    def aggregate(self) -> str:
        """Aggregate, then report each user's download to the user itself and to the others."""
        why, everyone = super().aggregate(), range(len(self.server.users))
        self.record_view(OWN, everyone, published(self.server))
        self.record_view(USERS, everyone, published(self.server, others=True))
        return why


def uploaded(server: ServerHalf, upload: Upload) -> Tree:
    """Return the tensors of an upload as the server reads them, ``(users, 1, *shape)``."""
    tensors = fill_ranks(expand(upload.tensors, server.uploads), server.layout)
    return {name: t.unsqueeze(1) for name, t in tensors.items()}


def published(server: ServerHalf, *, others: bool = False) -> Tree:
    """Return what each user would download now, ``(users, models, *shape)``.

    With ``others`` return for each user the download of the next user.
    """
    tensors = server.method.server.download(server.kept, range(len(server.users)))
    return {name: t.roll(-1, 0) for name, t in tensors.items()} if others else tensors


def _of_users(tensors: Tree, users: Sequence[int]) -> Tree:
    """Return the rows of some users of tensors ``(users, *shape)``."""
    return {name: t[list(users)] for name, t in tensors.items()}


@dataclass(kw_only=True)
class LastPublished:
    """Tensors that were published last, from which a view computes changes."""

    last: dict[str, Tree] = field(default_factory=dict)

    def before(self, view: str, users: Sequence[int]) -> Tree:
        """Return the last models of some users as the view knows them; empty before the first round.

        For the server they are the models that the users trained from, for others what those had downloaded.
        """
        return _of_users(self.last.get(OWN if view == SERVER else view, {}), users)

    def remember(self, view: str, tensors: Tree) -> None:
        """Store what was published."""
        if view != SERVER:
            self.last[view] = {name: t.clone() for name, t in tensors.items()}


def check_watchable(where: object, method: Method) -> None:
    """Check that users share models that can be observed.

    Raises:
        RunError: They do not; the message says why.
    """
    if method.placement.pooled:
        raise RunError(f"{where}: {method.name} pools the text of all users, so there is nothing to audit")
    if not method.shared or not method.trains:
        raise RunError(f"{where}: {method.name} shares no parameters, so there is nothing to audit")
    if method.server.peer_to_peer:
        raise RunError(
            f"{where}: {method.name} exchanges models between peers; its server publishes none that could be audited"
        )


# -------------------------------------------------------------------- canaries


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """Scores windows with a user's shared tensors; all others have their public initial values."""

    clients: Clients

    def rows(self, users: int) -> Float[Tensor, "users columns"]:
        """Return the public initial tensors, for which adapters leave the base unchanged."""
        model, plan = self.clients.model, self.clients.plan
        start = draw(model.layout, plan.seed, "server").to(self.clients.state.rows)
        return start.repeat(users, 1)

    @torch.no_grad()
    def losses(
        self, users: Sequence[int], seen: Tree, windows: Int[Tensor, "users windows width"]
    ) -> Float[Tensor, "users windows"]:
        """Return the mean loss over the targets of each window, in nats, under the user's observed model.

        Windows of text get the token with which texts begin; conversations have theirs.

        Args:
            users: Indices of the users.
            seen: Observed tensors ``(users, models, *shape)``; empty stands for the initial model. Of several models
                the one with the lowest loss on the window is used.
            windows: Windows of each user.
        """
        models = next(iter(seen.values())).shape[1] if seen else 1
        each = [
            self._losses_of_model(users, {name: t[:, at] for name, t in seen.items()}, windows) for at in range(models)
        ]
        return torch.stack(each).amin(0)

    def _losses_of_model(self, users: Sequence[int], seen: Tree, windows: Tensor) -> Float[Tensor, "users windows"]:
        """Return :meth:`losses` for one observed model of each user, ``(users, *shape)``."""
        model, rows = self.clients.model, self.rows(len(users)) * self.clients.model.mask()[list(users)]
        windows, batch_source = windows.long(), self.clients.batch_source
        begin = batch_source.begin if isinstance(batch_source, TextBatchSource) else None
        if begin is not None:  # as in training; the width stays the same, as bases may not accept more
            inside = torch.zeros((*windows.shape[:-1], 1), dtype=torch.bool, device=windows.device)
            windows = begin_windows(windows[..., :-1], begin, at_start=inside)
        if seen:
            assign(model.layout.views(rows), model.layout, self.clients.method.shared, seen)
        with torch.compiler.set_stance("force_eager"):
            parts = [
                model.predict(model.tensors(rows), list(users), part.to(model.device)).sum(-1)
                for part in windows.split(16, dim=1)
            ]
        targets = (windows[..., 1:] >= 0).sum(-1).clamp(min=1)
        return torch.cat(parts, dim=1).double().cpu() / targets.cpu()


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of a trial.

    Args:
        own: Canary of each user.
        references: Canaries that are never included.
        inside: Whether each user's canary is included.
        places: Conversation of each user whose targets are overwritten for scoring; None for text.
    """

    own: Int[Tensor, "users width"]
    references: Int[Tensor, "references width"]
    inside: Bool[Tensor, " users"]
    places: Sequence[Int64[Tensor, " _"]] | None = None

    def windows(self, users: Sequence[int], references: int) -> Int[Tensor, "users windows width"]:
        """Return windows with each user's own canary, then with the first ``references`` reference canaries."""
        each = [torch.cat([self.own[user].unsqueeze(0), self.references[:references]]) for user in users]
        if (places := self.places) is not None:
            each = [overwrite(places[user], tokens) for user, tokens in zip(users, each, strict=True)]
        return torch.stack(widen(each))


def draw_canaries(users: int, *, vocabulary: int, context: int, seed: int, trial: int) -> Canaries:
    """Draw uniformly random tokens, and coins that training does not know.

    Args:
        users: Number of users.
        vocabulary: Number of tokens to draw from.
        context: Largest number of predicted tokens of a canary.
        seed: Seed of the recipe.
        trial: Number of the run.
    """
    width = min(context, LONGEST) + 1
    stream = generator("audit", seed, trial)
    drawn = torch.randint(vocabulary, (users + REFERENCES, width), generator=stream)
    coins = torch.rand(users, generator=stream) < 0.5
    return Canaries(own=drawn[:users], references=drawn[users:], inside=coins)


def with_canary(user: UserData, canary: Int[Tensor, " width"], *, seed: int, trial: int) -> UserData:
    """Write a user's canary over a part of the training text, at random places.

    Args:
        user: The user.
        canary: Tokens.
        seed: Seed of the recipe.
        trial: Number of the run.
    """
    width, stream = len(canary), user.train.clone()
    places = len(stream) // width
    chosen = torch.randperm(places, generator=generator("audit", seed, trial, user.name))
    for place in chosen[: max(1, int(SHARE * places))].tolist():
        stream[place * width : (place + 1) * width] = canary.to(stream)
    return replace(user, train=stream)


def with_example(user: UserData, canary: Int[Tensor, " width"], context: int, *, seed: int, trial: int) -> UserData:
    """Replace one example of a user, a window of ``context + 1`` tokens, by repetitions of its canary.

    Args:
        user: The user.
        canary: Tokens.
        context: Inputs of a window.
        seed: Seed of the recipe.
        trial: Number of the run.
    """
    stream, window = user.train.clone(), min(context + 1, len(user.train))
    place = int(torch.randint(len(stream) // window, (1,), generator=generator("audit", seed, trial, user.name)))
    stream[place * window : (place + 1) * window] = canary.repeat(-(-window // len(canary)))[:window].to(stream)
    return replace(user, train=stream)


def overwrite(
    window: Int64[Tensor, " window"], canaries: Int[Tensor, "canaries width"]
) -> Int64[Tensor, "canaries window"]:
    """Write each canary, repeated or truncated, over the targets of a copy of a conversation."""
    targets = 1 + (window[1:] >= 0).nonzero().flatten()
    windows, copies = window.repeat(len(canaries), 1), -(-len(targets) // canaries.shape[1])
    windows[:, targets] = canaries.repeat(1, copies)[:, : len(targets)].to(windows)
    return windows


def longest_responses(answers: Answers) -> int:
    """Return the index of the conversation with most targets, in which a canary is scored."""
    return int((answers.windows[:, 1:] >= 0).sum(1).argmax())


def with_response(
    user: UserAnswers, canary: Int[Tensor, " width"], count: int, *, seed: int, trial: int
) -> UserAnswers:
    """Overwrite the targets of some of a user's training conversations with its canary.

    Args:
        user: The user; its prompts and number of tokens stay the same.
        canary: Tokens, repeated or truncated to the targets of each conversation.
        count: Conversations to overwrite: that of :func:`longest_responses`, then random ones.
        seed: Seed of the recipe.
        trial: Number of the run.
    """
    windows, first = user.train.windows.clone(), longest_responses(user.train)
    order = torch.randperm(len(windows), generator=generator("audit", seed, trial, user.name))
    for row in [first, *order[order != first].tolist()][:count]:
        windows[row] = overwrite(windows[row], canary.unsqueeze(0))[0]
    return replace(user, train=replace(user.train, windows=windows))


@dataclass(kw_only=True)
class CanaryScores:
    """Observed scores of a run's canaries, by view, user and round."""

    attacker: Attacker
    canaries: Canaries
    scores: dict[str, list[list[float]]]
    last_published: LastPublished = field(default_factory=LastPublished)

    def record_view(self, view: str, users: Sequence[int], tensors: Tree) -> None:
        """Score what is observed in a round.

        The score is how much the loss of a user's canary fell since the last publication, minus the mean of the same
        for the reference canaries, in units of their standard deviation.

        Args:
            view: SERVER, USERS or OWN.
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        if view in self.scores:
            windows, before = self.canaries.windows(users, COMPARED), self.last_published.before(view, users)
            gained = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            others = gained[:, 1:]
            margins = (gained[:, 0] - others.mean(1)) / others.std(1)
            for user, margin in zip(users, margins.nan_to_num(0.0, 0.0, 0.0).tolist(), strict=True):
                self.scores[view][user].append(margin)
        self.last_published.remember(view, tensors)

    def score(self, view: str) -> list[float | None]:
        """Return each user's mean score over the rounds in which it was observed; None if it never was."""
        return [sum(seen) / len(seen) if seen else None for seen in self.scores[view]]

    def ranks(self) -> list[int]:
        """Return the rank (from 1) of each user's canary among the references.

        Losses are under the model that the *next* user downloaded.
        """
        users = range(len(self.canaries.own))
        others = [(user + 1) % len(users) for user in users]
        seen = self.last_published.before(USERS, users)
        losses = self.attacker.losses(others, seen, self.canaries.windows(users, REFERENCES))
        return (1 + (losses[:, 1:] < losses[:, :1]).sum(1)).tolist()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one observed run.

    Args:
        inside: Whether each user's canary was included.
        scores: Each user's score, by view.
        ranks: Rank of each user's canary among the references.
        metrics: Metrics of the run.
        works: Work of each user, where privacy protects single examples.
    """

    inside: Sequence[bool]
    scores: dict[str, list[float | None]]
    ranks: list[int]
    metrics: dict[str, Any]
    works: Mapping[str, Work] = field(default_factory=dict)


def run_trial(
    recipe: Recipe, run_data: RunData, trial: int, observers: Callable[[Clients], Sequence[Observer]]
) -> Trial:
    """Train with a trial's own coins, and score its canaries from what is observed.

    Args:
        recipe: Shortened recipe, of text or conversations.
        run_data: Data of the run.
        trial: Number of the run.
        observers: Returns the observers of a run.
    """
    users, base = run_data.users, run_data.base
    assert base is not None
    trial_recipe = recipe.with_changes({"seed": recipe.seed + 1 + trial})
    vocabulary = int(base.model.config.vocab_size)
    kwargs = {"seed": recipe.seed, "trial": trial}
    canaries = draw_canaries(len(users), vocabulary=vocabulary, context=recipe.training.context, **kwargs)
    context = recipe.training.context - (base.begin is not None)  # the begin token takes one place of a window
    if all(isinstance(user.train, Answers) for user in users):
        places = [user.train.windows[longest_responses(user.train)] for user in users]
        canaries = replace(canaries, places=places)

    one_example = of_examples(recipe)

    def insert(user: Any, canary: Tensor) -> AnyUser:
        """Return a user whose training data contains its canary."""
        if canaries.places is not None:
            count = 1 if one_example else max(1, int(SHARE * len(user.train)))
            return with_response(user, canary, count, **kwargs)
        return with_example(user, canary, context, **kwargs) if one_example else with_canary(user, canary, **kwargs)

    trial_users = as_users(
        insert(user, canary) if inside else user
        for user, canary, inside in zip(users, canaries.own, canaries.inside.tolist(), strict=True)
    )
    plain = build(trial_recipe, replace(run_data, users=trial_users), store="memory")
    scores = {view: [[] for _ in users] for view in (SERVER, USERS)}
    canary_scores = CanaryScores(attacker=Attacker(clients=plain.clients), canaries=canaries, scores=scores)
    federation = ObservedFederation(clients=plain.clients, server=plain.server, record_view=canary_scores.record_view)
    metrics = execute(federation, trial_recipe, None, observers=observers(plain.clients)).metrics
    return Trial(
        inside=canaries.inside.tolist(),
        scores={view: canary_scores.score(view) for view in (SERVER, USERS)},
        ranks=canary_scores.ranks(),
        metrics=metrics,
        works={} if (account := plain.server.mechanisms.account) is None else dict(account.works()),
    )


def of_examples(recipe: Recipe) -> bool:
    """Return whether privacy protects single examples, so that a canary is one of them."""
    return recipe.privacy is not None and protects_examples(recipe.privacy.mechanism)


MOST_WINDOWS = 200
"""Largest number of windows, or conversations, of each user and split."""
FALSE_ALARMS = 0.01


def windows_of(
    data: Int[Tensor, " tokens"] | Answers, context: int, most: int = MOST_WINDOWS
) -> Int[Tensor, "windows width"]:
    """Return windows of one split of a user, spread evenly over it.

    Args:
        data: A token stream, which is cut into windows without overlap (one shorter window if the stream is
            shorter), or conversations, each a window padded with ``PAD``.
        context: Inputs of a window of a stream; a window has one token more.
        most: Largest number of windows.
    """
    if isinstance(data, Answers):
        windows = data.windows
    else:
        width = min(context + 1, len(data))
        windows = data.unfold(0, width, width)
    return windows[torch.linspace(0, len(windows) - 1, min(most, len(windows))).long()]


def as_targets(windows: Int64[Tensor, "*batch width"]) -> Int64[Tensor, "*batch width"]:
    """Make every token but ``PAD`` a target, as in training with ``data.loss_on: all``."""
    return torch.where(windows < PAD, hide(windows), windows)


def infer_membership(run: Run) -> list[Membership]:
    """Return how well training windows are distinguished from test windows of each user, by the final shared model."""
    clients, server = run.federation.clients, run.federation.server
    attacker, final_models, found = Attacker(clients=clients), published(server, others=True), []
    all_tokens = getattr(run.recipe.data, "loss_on", "") == "all"  # test splits have targets in responses only
    for number, user in enumerate(clients.users):
        model = {name: t[number : number + 1] for name, t in final_models.items()}
        sets = [windows_of(part, clients.plan.training.context).unsqueeze(0) for part in (user.train, user.test)]
        sets = [as_targets(windows) if all_tokens else windows for windows in sets]
        final_losses = [attacker.losses([number], model, windows)[0] for windows in sets]
        base_losses = [attacker.losses([number], {}, windows)[0] for windows in sets]
        inside, outside = ((before - after).tolist() for before, after in zip(base_losses, final_losses, strict=True))
        losses = [(-values).tolist() for values in final_losses]
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
    """Return the probability that a member scores higher than another, with ties counting half."""
    ranks = rankdata([*members, *others])
    count = len(members)
    return float((ranks[:count].sum() - count * (count + 1) / 2) / (count * len(others)))


def found_at(members: Sequence[float], others: Sequence[float], rate: float = FALSE_ALARMS) -> float | None:
    """Return the share of members that score above all but ``rate`` of the others; None if there are too few others.

    Args:
        members: Scores of members.
        others: Scores of others.
        rate: Rate of false alarms.
    """
    allowed = math.floor(rate * len(others) + 1e-9)
    if allowed == 0:
        return None
    threshold = sorted(others, reverse=True)[allowed]
    return sum(score > threshold for score in members) / len(members)


MOST_TARGETS = 64
"""Largest number of windows of each user that are scored."""
LEAST = 4
"""Smallest number of windows of a user whose training data is divided."""
FEWEST = 3
"""Smallest number of runs: the target, and for each window one run with it and one without."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Training data of one run: windows ``(windows, width)`` of each user, and which of them are included."""

    windows: Sequence[Int[Tensor, "_ _"]]
    inside: Sequence[Bool[Tensor, " _"]]

    def of(self, number: int, user: UserData | UserAnswers) -> UserData | UserAnswers:
        """Return a user with its included windows, and the rest of a stream after the last whole window."""
        if isinstance(user, UserAnswers):
            return replace(user, train=user.train.only(self.inside[number]))
        windows, width = self.windows[number], self.windows[number].shape[1]
        kept = windows[self.inside[number]].flatten()
        return replace(user, train=torch.cat([kept, user.train[len(windows) * width :]]))


def halves(users: Sequence[UserData | UserAnswers], context: int, *, seed: int, run: int) -> Halves:
    """Toss coins for all windows of all users; at least one window of each user is included.

    Users with fewer than ``LEAST`` windows train on all of them.

    Args:
        users: The users.
        context: Inputs of a window.
        seed: Seed of the recipe.
        run: Number of the run.
    """
    windows, inside = [windows_of(user.train, context, most=len(user.train)) for user in users], []
    for user, of_user in zip(users, windows, strict=True):
        coins = torch.rand(len(of_user), generator=generator("shadow", seed, run, user.name)) < 0.5
        coins[0] |= not bool(coins.any())  # a user without training data cannot train
        inside.append(coins if len(of_user) >= LEAST else torch.ones_like(coins))
    return Halves(windows=windows, inside=inside)


def scored(count: int) -> Int[Tensor, " scored"]:
    """Return the indices of the windows to score, spread over ``count`` windows.

    There are none if ``count`` is below ``LEAST``.
    """
    return torch.linspace(0, count - 1, min(count, MOST_TARGETS) if count >= LEAST else 0).long()


@dataclass(kw_only=True)
class WindowScores:
    """Decrease of the loss of each user's windows, by view and user, summed over rounds."""

    attacker: Attacker
    windows: Int[Tensor, "users windows width"]
    last_published: LastPublished = field(default_factory=LastPublished)
    sums: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {SERVER: {}, USERS: {}})

    def record_view(self, view: str, users: Sequence[int], tensors: Tree) -> None:
        """Add what is observed in a round.

        Args:
            view: SERVER, USERS or OWN.
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        if (sums := self.sums.get(view)) is not None:
            windows, before = self.windows[list(users)], self.last_published.before(view, users)
            gained = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            for user, more in zip(users, gained, strict=True):
                sums[user] = sums[user] + more if user in sums else more
        self.last_published.remember(view, tensors)


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """Result of one reference run: scores by view and user, if observed, and which windows were included."""

    scores: dict[str, dict[int, Tensor]]
    inside: Sequence[Bool[Tensor, " windows"]]


def run_shadow(
    recipe: Recipe, run_data: RunData, number: int, observers: Callable[[Clients], Sequence[Observer]]
) -> Shadow:
    """Train on random halves of the users' windows, and score what is observed.

    Args:
        recipe: Shortened recipe, of text or conversations.
        run_data: Data of the run.
        number: Number of the run.
        observers: Returns the observers of a run.
    """
    users: Sequence[UserData | UserAnswers] = run_data.users
    shadow_recipe = recipe.with_changes({"seed": recipe.seed + 1 + number})
    parts = halves(users, recipe.training.context, seed=recipe.seed, run=number)
    trial_users = as_users(parts.of(at, user) for at, user in enumerate(users))
    plain = build(shadow_recipe, replace(run_data, users=trial_users), store="memory")
    places = [scored(len(windows)) for windows in parts.windows]
    most = max(map(len, places))
    # Users with fewer scored windows repeat them, so that all users' windows are one tensor.
    padded = [
        windows[at[torch.arange(most) % len(at)]] if len(at) else windows[:1].expand(most, -1)
        for windows, at in zip(parts.windows, places, strict=True)
    ]
    window_scores = WindowScores(attacker=Attacker(clients=plain.clients), windows=torch.stack(widen(padded)))
    federation = ObservedFederation(clients=plain.clients, server=plain.server, record_view=window_scores.record_view)
    execute(federation, shadow_recipe, None, observers=observers(plain.clients))
    with_scores = [user for user, at in enumerate(places) if len(at)]
    return Shadow(
        scores={
            view: {user: sums[user][: len(places[user])] for user in with_scores if user in sums}
            for view, sums in window_scores.sums.items()
        },
        inside=[inside[at] for inside, at in zip(parts.inside, places, strict=True)],
    )


# -------------------------------------------------------------------- likelihood ratios


def likelihood_ratios(
    scores: Float[Tensor, "runs windows"], inside: Bool[Tensor, "runs windows"]
) -> Float[Tensor, "runs windows"]:
    """Return ``log N(score; in) - log N(score; out)`` of each run's windows, fitted to all other runs.

    Args:
        scores: How much the loss of each window fell in each run.
        inside: Which windows each run trained on.
    """
    scores = scores - scores.mean(1, keepdim=True)
    return torch.stack([_ratios_of_run(scores, inside, run) for run in range(len(scores))])


def _ratios_of_run(scores: Tensor, inside: Tensor, run: int) -> Float[Tensor, " windows"]:
    """Return the log likelihood ratios of one run's windows, fitted to all other runs.

    Args:
        scores: Scores of all runs, with each run's mean subtracted, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
        run: The run.
    """
    others = torch.arange(len(scores)) != run
    known, sides = scores[others], inside[others]
    gap, variance = _fit_gaps(known, sides)
    mean_outside = (known - torch.where(sides, gap, 0.0)).mean(0)
    wider = variance * (1 + 1 / len(known))  # the mean of few runs has an error too
    away = scores[run] - mean_outside
    return (away.square() - (away - gap).square()) / (2 * wider)


def _fit_gaps(scores: Tensor, inside: Tensor) -> tuple[Float[Tensor, " windows"], Float[Tensor, ""]]:
    """Return how much higher each window's score is when it is included, and the variance around both means.

    A window's own difference is shrunk towards the mean difference of all windows, to the extent that the spread of
    differences can be explained by chance (empirical Bayes). It is never negative, as training on a window does not
    increase its loss: otherwise, if nothing is learned, a run would be attacked with the other runs' noise, which has
    the opposite sign of its own.
    """
    counts, means = [], []
    for side in (inside, ~inside):  # runs with the window, and runs without it
        counts.append(side.sum(0))
        means.append(torch.where(side, scores, 0.0).sum(0) / counts[-1].clamp(min=1))
    fitted = torch.where(inside, *means)
    freedom = sum((count - 1).clamp(min=0).sum() for count in counts)
    variance = ((scores - fitted).square().sum() / max(1, int(freedom))).clamp(min=SMALL)
    both = (counts[0] > 0) & (counts[1] > 0)
    if not bool(both.any()):
        return torch.zeros_like(means[0]), variance
    gaps = means[0] - means[1]
    chance = variance * (1 / counts[0].clamp(min=1) + 1 / counts[1].clamp(min=1))
    mean = gaps[both].mean()
    spread = ((gaps[both] - mean).square().mean() - chance[both].mean()).clamp(min=0)
    return torch.where(both, mean + spread / (spread + chance) * (gaps - mean), mean).clamp(min=0), variance


SMALL = 1e-18
"""Smallest variance of a score."""


def membership_by_shadows(names: Sequence[str], shadows: Sequence[Shadow]) -> list[Shadowed]:
    """Return how well each user's windows are distinguished, by view, over all runs with scores."""
    found = []
    for view in (SERVER, USERS):
        for user, name in enumerate(names):
            runs = [(run.scores[view][user], run.inside[user]) for run in shadows if user in run.scores[view]]
            if len(runs) < FEWEST:
                continue
            scores, inside = (torch.stack(part) for part in zip(*runs, strict=True))
            found.append(_membership_of_user(view, name, scores, inside))
    return found


def _membership_of_user(view: str, user: str, scores: Tensor, inside: Tensor) -> Shadowed:
    """Return how well a user's windows are distinguished.

    Args:
        view: SERVER or USERS; the attacker's view.
        user: Name of the user.
        scores: Scores of its windows, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
    """
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
