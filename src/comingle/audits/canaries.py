"""Attacks on training data: canaries and membership inference, both in short runs that are watched.

In conversations they take the place of tokens that are trained on, which are those of responses.

What is watched is what leaves: the uploads, which the server sees, and what the server publishes, which users see. A
user's own tensors (specialists, routers) are nowhere among it; in their place stands their public start.

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
from comingle.data.text.streams import UserData
from comingle.methods.base import Method
from comingle.models.scoring import PAD, begin_windows, hide
from comingle.privacy.accounting import Work
from comingle.protocol.messages import Upload, expand, fill_ranks
from comingle.reports.audit import Membership, Shadowed
from comingle.runs.results import Run
from comingle.runs.session import build, execute
from comingle.training.backends.local import InProcess
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
"""Of a user's training text, or conversations, is its canary, where it is in: the worst case is what a bound is about.
Where single examples are hidden it is one of them."""
LONGEST = 32
"""Tokens of a canary that are predicted."""
REFERENCES = 63
"""Canaries that are never put in."""
COMPARED = 31
"""Of these as many are scored in every round."""

SERVER, USERS, OWN = "server", "users", "own"
"""Who looks: at the uploads, at what others than the user get, or at what the user itself gets and trains from."""

Look = Callable[[str, Sequence[int], Tree], None]
"""Is shown, by who sees it, shared tensors ``(users, models, *shape)`` of some users, by their number."""


@dataclass(kw_only=True)
class Watched(InProcess):
    """A federation that shows what leaves its users, and what its server publishes."""

    look: Look = lambda who, users, tensors: None

    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """As ever, and seen by the server."""
        super().upload(members, done, losses)
        if self._sent is not None and self._sent.users:
            self.look(SERVER, self.clients.numbers(self._sent.users), uploaded(self.server, self._sent))

    def aggregate(self) -> str:
        """As ever, and what is published is seen: of each user what it gets itself, and what others do."""
        why, everyone = super().aggregate(), range(len(self.server.users))
        self.look(OWN, everyone, published(self.server))
        self.look(USERS, everyone, published(self.server, others=True))
        return why


def uploaded(server: ServerHalf, upload: Upload) -> Tree:
    """The tensors of an upload as the server reads them, ``(users, 1, *shape)``."""
    tensors = fill_ranks(expand(upload.tensors, server.uploads), server.layout)
    return {name: t.unsqueeze(1) for name, t in tensors.items()}


def published(server: ServerHalf, *, others: bool = False) -> Tree:
    """What each user would download now, ``(users, models, *shape)``; with ``others`` what the next user would."""
    tensors = server.method.server.download(server.kept, range(len(server.users)))
    return {name: t.roll(-1, 0) for name, t in tensors.items()} if others else tensors


def _of(tensors: Tree, users: Sequence[int]) -> Tree:
    return {name: t[list(users)] for name, t in tensors.items()}


@dataclass(kw_only=True)
class Looked:
    """What was published last: against that a view sees what has changed."""

    last: dict[str, Tree] = field(default_factory=dict)

    def before(self, who: str, users: Sequence[int]) -> Tree:
        """What the models of some users were: those that they trained from, or what others had; at first nothing."""
        return _of(self.last.get(OWN if who == SERVER else who, {}), users)

    def remember(self, who: str, tensors: Tree) -> None:
        """Keep what everybody was sent."""
        if who != SERVER:
            self.last[who] = {name: t.clone() for name, t in tensors.items()}


def check_watchable(where: object, method: Method) -> None:
    """Whether what leaves users are models that can be looked at.

    Raises:
        RunError: there is not; says why.
    """
    if method.placement.pooled:
        raise RunError(f"{where}: {method.name} pools everybody's text, so there is nothing left to leak")
    if not method.shared or not method.trains:
        raise RunError(f"{where}: {method.name} shares nothing, so nobody sees anything of a user; nothing to audit")
    if method.server.peer_to_peer:
        raise RunError(f"{where}: {method.name} has peers, whose server publishes nothing that could be looked at")


# -------------------------------------------------------------------- the attack


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """Scores windows with shared tensors and nothing else of a user: all else is as it publicly began."""

    clients: Clients

    def rows(self, users: int) -> Float[Tensor, "users columns"]:
        """The public start, on which a base with adapters says what it says without them."""
        model, plan = self.clients.model, self.clients.plan
        start = draw(model.layout, plan.seed, "server").to(self.clients.state.rows)
        return start.repeat(users, 1)

    @torch.no_grad()
    def losses(
        self, users: Sequence[int], seen: Tree, windows: Int[Tensor, "users windows width"]
    ) -> Float[Tensor, "users windows"]:
        """Mean loss in nats over the targets of each of some users' windows, by the model that was seen of that user.

        Windows of text get the token with which texts begin; conversations have theirs. Of several models
        ``(users, models, *shape)`` the one that is surest of the window; none stands for the start.
        """
        models = next(iter(seen.values())).shape[1] if seen else 1
        each = [self._losses(users, {name: t[:, at] for name, t in seen.items()}, windows) for at in range(models)]
        return torch.stack(each).amin(0)

    def _losses(self, users: Sequence[int], seen: Tree, windows: Tensor) -> Float[Tensor, "users windows"]:
        model, rows = self.clients.model, self.rows(len(users)) * self.clients.model.mask()[list(users)]
        windows, batch_source = windows.long(), self.clients.batch_source
        begin = batch_source.begin if isinstance(batch_source, TextBatchSource) else None
        if begin is not None:  # as where training has drawn the window; no wider, for bases that read no more
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
    """One for each user, those never put in, and by whose coin it is in.

    ``places`` is of each user the conversation whose targets it overwrites where it is scored; None with text.
    """

    own: Int[Tensor, "users width"]
    references: Int[Tensor, "references width"]
    inside: Bool[Tensor, " users"]
    places: Sequence[Int64[Tensor, " _"]] | None = None

    def windows(self, users: Sequence[int], references: int) -> Int[Tensor, "users windows width"]:
        """Each user's own before so many that are never put in."""
        each = [torch.cat([self.own[user].unsqueeze(0), self.references[:references]]) for user in users]
        if (places := self.places) is not None:
            each = [overwrite(places[user], tokens) for user, tokens in zip(users, each, strict=True)]
        return torch.stack(widen(each))


def draw_canaries(users: int, *, vocabulary: int, context: int, seed: int, trial: int) -> Canaries:
    """Random tokens, each as probable as any other, and coins, which training does not know."""
    width = min(context, LONGEST) + 1
    stream = generator("audit", seed, trial)
    drawn = torch.randint(vocabulary, (users + REFERENCES, width), generator=stream)
    coins = torch.rand(users, generator=stream) < 0.5
    return Canaries(own=drawn[:users], references=drawn[users:], inside=coins)


def with_canary(user: UserData, canary: Int[Tensor, " width"], *, seed: int, trial: int) -> UserData:
    """The user with its canary written over a part of the training text, at random places."""
    width, stream = len(canary), user.train.clone()
    places = len(stream) // width
    chosen = torch.randperm(places, generator=generator("audit", seed, trial, user.name))
    for place in chosen[: max(1, int(SHARE * places))].tolist():
        stream[place * width : (place + 1) * width] = canary.to(stream)
    return replace(user, train=stream)


def with_example(user: UserData, canary: Int[Tensor, " width"], context: int, *, seed: int, trial: int) -> UserData:
    """The user with one of its examples, a window of ``context + 1`` tokens, replaced by its canary again and again."""
    stream, window = user.train.clone(), min(context + 1, len(user.train))
    place = int(torch.randint(len(stream) // window, (1,), generator=generator("audit", seed, trial, user.name)))
    stream[place * window : (place + 1) * window] = canary.repeat(-(-window // len(canary)))[:window].to(stream)
    return replace(user, train=stream)


def overwrite(
    window: Int64[Tensor, " window"], canaries: Int[Tensor, "canaries width"]
) -> Int64[Tensor, "canaries window"]:
    """Write each canary, repeated or cut short, over the targets of a copy of a conversation."""
    targets = 1 + (window[1:] >= 0).nonzero().flatten()
    windows, copies = window.repeat(len(canaries), 1), -(-len(targets) // canaries.shape[1])
    windows[:, targets] = canaries.repeat(1, copies)[:, : len(targets)].to(windows)
    return windows


def longest_responses(answers: Answers) -> int:
    """Return the number of the conversation with most targets: the one in which a canary is scored."""
    return int((answers.windows[:, 1:] >= 0).sum(1).argmax())


def with_response(
    user: UserAnswers, canary: Int[Tensor, " width"], count: int, *, seed: int, trial: int
) -> UserAnswers:
    """Overwrite the targets of some of a user's training conversations with its canary.

    Args:
        user: keeps its prompts, and as many tokens as before.
        canary: repeated or cut short to the targets of each conversation.
        count: conversations to overwrite: that of :func:`longest_responses`, the others at random.
        seed: of the recipe.
        trial: the number of the run.
    """
    windows, first = user.train.windows.clone(), longest_responses(user.train)
    order = torch.randperm(len(windows), generator=generator("audit", seed, trial, user.name))
    for row in [first, *order[order != first].tolist()][:count]:
        windows[row] = overwrite(windows[row], canary.unsqueeze(0))[0]
    return replace(user, train=replace(user.train, windows=windows))


@dataclass(kw_only=True)
class Sight:
    """What one run let be seen of its canaries: by viewer, each user's scores round by round; and the last ranks."""

    attacker: Attacker
    canaries: Canaries
    scores: dict[str, list[list[float]]]
    looked: Looked = field(default_factory=Looked)

    def look(self, who: str, users: Sequence[int], tensors: Tree) -> None:
        """How much surer of its canary each user's model became since what was last published, in deviations of how
        much surer it became of canaries that were never put in."""
        if who in self.scores:
            windows, before = self.canaries.windows(users, COMPARED), self.looked.before(who, users)
            gained = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            others = gained[:, 1:]
            margins = (gained[:, 0] - others.mean(1)) / others.std(1)
            for user, margin in zip(users, margins.nan_to_num(0.0, 0.0, 0.0).tolist(), strict=True):
                self.scores[who][user].append(margin)
        self.looked.remember(who, tensors)

    def score(self, who: str) -> list[float | None]:
        """Each user's, over all rounds in which something of it was seen; None where nothing was."""
        return [sum(seen) / len(seen) if seen else None for seen in self.scores[who]]

    def ranks(self) -> list[int]:
        """The rank (from 1) of each user's canary among those never put in, in the model that *another* user got."""
        users = range(len(self.canaries.own))
        others = [(user + 1) % len(users) for user in users]
        seen = self.looked.before(USERS, users)
        losses = self.attacker.losses(others, seen, self.canaries.windows(users, REFERENCES))
        return (1 + (losses[:, 1:] < losses[:, :1]).sum(1)).tolist()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One watched run: whose canary was in, scores by viewer, ranks, and the run's metrics.

    ``works`` is what each user did where single examples were hidden.
    """

    inside: Sequence[bool]
    scores: dict[str, list[float | None]]
    ranks: list[int]
    metrics: dict[str, Any]
    works: Mapping[str, Work] = field(default_factory=dict)


def run_trial(
    recipe: Recipe, materials: RunData, trial: int, observers: Callable[[Clients], Sequence[Observer]]
) -> Trial:
    """Train with coins of this trial's own, and look at what leaves.

    ``recipe`` is short, of text or conversations.
    """
    users, base = materials.users, materials.base
    assert base is not None
    own = recipe.with_changes({"seed": recipe.seed + 1 + trial})
    vocabulary = int(base.model.config.vocab_size)
    kwargs = {"seed": recipe.seed, "trial": trial}
    canaries = draw_canaries(len(users), vocabulary=vocabulary, context=recipe.training.context, **kwargs)
    context = recipe.training.context - (base.begin is not None)  # of which a window holds one token less
    if all(isinstance(user.train, Answers) for user in users):
        places = [user.train.windows[longest_responses(user.train)] for user in users]
        canaries = replace(canaries, places=places)

    single = of_examples(recipe)

    def put(user: Any, canary: Tensor) -> object:
        if canaries.places is not None:
            return with_response(user, canary, 1 if single else max(1, int(SHARE * len(user.train))), **kwargs)
        return with_example(user, canary, context, **kwargs) if single else with_canary(user, canary, **kwargs)

    people = tuple(
        put(user, canary) if inside else user
        for user, canary, inside in zip(users, canaries.own, canaries.inside.tolist(), strict=True)
    )
    plain = build(own, replace(materials, users=people), store="memory")
    scores = {who: [[] for _ in users] for who in (SERVER, USERS)}
    sight = Sight(attacker=Attacker(clients=plain.clients), canaries=canaries, scores=scores)
    federation = Watched(clients=plain.clients, server=plain.server, look=sight.look)
    metrics = execute(federation, own, None, observers=observers(plain.clients)).metrics
    return Trial(
        inside=canaries.inside.tolist(),
        scores={who: sight.score(who) for who in (SERVER, USERS)},
        ranks=sight.ranks(),
        metrics=metrics,
        works={} if (account := plain.server.mechanisms.account) is None else dict(account.works()),
    )


def of_examples(recipe: Recipe) -> bool:
    """Whether single examples are hidden, so that a canary is one."""
    return recipe.privacy is not None and protects_examples(recipe.privacy.mechanism)


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
        sets = [windows_of(part, clients.plan.training.context).unsqueeze(0) for part in (user.train, user.test)]
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
