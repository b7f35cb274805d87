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

    def upload(self, members: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Upload the shared tensors of users, and record them as what the server sees.

        Args:
            members: Indices of the users.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        super().upload(members, round_number, losses)
        message = self._upload_of_round  # made by the call above; None or empty without participants
        if message is not None and message.users:
            self.record_view(SERVER, self.clients.numbers(message.users), uploaded(self.server, message))

    def aggregate(self) -> str:
        """Aggregate, then record each user's download twice: as what the user itself sees and what others see.

        Returns:
            Reason why there is no secure sum of the uploads; empty if there is one, or none was needed.
        """
        reason, all_users = super().aggregate(), range(len(self.server.users))
        self.record_view(OWN, all_users, published(self.server))
        self.record_view(USERS, all_users, published(self.server, others=True))
        return reason


def uploaded(server: ServerHalf, upload: Upload) -> Tree:
    """Return the tensors of an upload as the server reads them, ``(users, 1, *shape)``."""
    tensors = fill_ranks(expand(upload.tensors, server.uploads), server.layout)
    return {name: t.unsqueeze(1) for name, t in tensors.items()}


def published(server: ServerHalf, *, others: bool = False) -> Tree:
    """Return what each user would download now, ``(users, models, *shape)``.

    Args:
        server: The server.
        others: Return in row u the download of user u + 1 instead, and in the last row the download of user 0. An
            attack on user u by another user may only use what that other user receives.
    """
    # The server stores the method's tensors in ``kept``. The method computes downloads from them.
    downloads = server.method.server.download(server.kept, range(len(server.users)))
    return {name: t.roll(-1, 0) for name, t in downloads.items()} if others else downloads


def _of_users(tensors: Tree, users: Sequence[int]) -> Tree:
    """Return the rows of some users of tensors ``(users, *shape)``."""
    return {name: t[list(users)] for name, t in tensors.items()}


@dataclass(kw_only=True)
class LastPublished:
    """Shared tensors that the server published last, by view; a change is what is observed next minus these."""

    last: dict[str, Tree] = field(default_factory=dict)

    def models_before(self, view: str, users: Sequence[int]) -> Tree:
        """Return the models that an attacker with this view compares its next observation with.

        The server compares an upload with the model that the user itself had downloaded and trained from, which was
        recorded under the view OWN. Other users compare a download with the previous one.

        Args:
            view: SERVER, USERS or OWN.
            users: Indices of the attacked users.

        Returns:
            Tensors ``(users, models, *shape)``; empty before the first publication.
        """
        return _of_users(self.last.get(OWN if view == SERVER else view, {}), users)

    def remember(self, view: str, tensors: Tree) -> None:
        """Store a copy of what was published to a view; uploads, which only the server sees, are not stored."""
        if view != SERVER:
            self.last[view] = {name: t.clone() for name, t in tensors.items()}


def check_watchable(where: object, method: Method) -> None:
    """Check that users share models that can be observed.

    Args:
        where: Run folder or a description of the run, for the error.
        method: Method of the run.

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


_WINDOWS_AT_ONCE = 16
"""Windows of each user in one pass, which bounds its memory."""


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """Computes losses of token windows under a user's observed shared tensors.

    Local tensors, which are never observed, have their public initial values.
    """

    clients: Clients

    def initial_rows(self, num_users: int) -> Float[Tensor, "users columns"]:
        """Return the initial values of all trainable tensors: a row for each of ``num_users`` users, all rows equal.

        An attacker knows the initial values, as they follow from the public seed. Adapters with their initial values
        leave the base model unchanged.
        """
        model, plan = self.clients.model, self.clients.plan
        initial_row = draw(model.layout, plan.seed, "server").to(self.clients.state.rows)
        return initial_row.repeat(num_users, 1)

    @torch.no_grad()
    def losses(
        self, users: Sequence[int], observed: Tree, windows: Int[Tensor, "users windows width"]
    ) -> Float[Tensor, "users windows"]:
        """Return the mean loss over the targets of each window, in nats, under the user's observed model.

        Windows of text get the begin-of-text token in front; those of conversations have it already.

        Args:
            users: Indices of the users.
            observed: Observed tensors ``(users, models, *shape)``; empty stands for the initial model. Of several
                models the one with the lowest loss on the window is used.
            windows: Windows of each user.
        """
        num_models = next(iter(observed.values())).shape[1] if observed else 1
        losses_by_model = [
            self._losses_of_model(users, {name: t[:, model] for name, t in observed.items()}, windows)
            for model in range(num_models)
        ]
        return torch.stack(losses_by_model).amin(0)

    def _losses_of_model(self, users: Sequence[int], observed: Tree, windows: Tensor) -> Float[Tensor, "users windows"]:
        """Return the mean loss per predicted token of each window, under a single observed model of each user.

        Args:
            users: Indices of the users.
            observed: Observed tensors ``(users, *shape)``; empty stands for the initial model.
            windows: Windows ``(users, windows, width)``.
        """
        model = self.clients.model
        has_parameter = model.mask()[list(users)]  # users with a smaller rank have fewer parameters
        rows = self.initial_rows(len(users)) * has_parameter
        windows, batch_source = windows.long(), self.clients.batch_source
        begin_token = batch_source.begin if isinstance(batch_source, TextBatchSource) else None
        if begin_token is not None:
            # The begin-of-text token comes first, as in training. The last token makes room, as a base may not accept a
            # wider window. Windows count as pieces from the middle of a text, whose first token is not a target.
            at_start = torch.zeros((*windows.shape[:-1], 1), dtype=torch.bool, device=windows.device)
            windows = begin_windows(windows[..., :-1], begin_token, at_start=at_start)
        if observed:
            assign(model.layout.views(rows), model.layout, self.clients.method.shared, observed)
        with torch.compiler.set_stance("force_eager"):  # not compiled: these shapes occur only here
            summed_losses = [
                model.predict(model.tensors(rows), list(users), part.to(model.device)).sum(-1)
                for part in windows.split(_WINDOWS_AT_ONCE, dim=1)
            ]
        num_targets = (windows[..., 1:] >= 0).sum(-1).clamp(min=1)  # hidden tokens and padding are negative
        return torch.cat(summed_losses, dim=1).double().cpu() / num_targets.cpu()


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of a trial.

    Args:
        own: Canary of each user.
        references: Canaries that are never included.
        inside: Whether each user's canary is included.
        conversations: Conversation of each user whose responses are overwritten with canaries for scoring; None for
            text.
    """

    own: Int[Tensor, "users width"]
    references: Int[Tensor, "references width"]
    inside: Bool[Tensor, " users"]
    conversations: Sequence[Int64[Tensor, " _"]] | None = None

    def windows(self, users: Sequence[int], num_references: int) -> Int[Tensor, "users windows width"]:
        """Return the windows to score for some users: the user's own canary, then reference canaries.

        Args:
            users: Indices of the users.
            num_references: Number of reference canaries, the same ones for all users.

        Returns:
            Windows ``(users, 1 + num_references, width)``. For text a window is a canary. For conversations it is one
            conversation of the user, with a canary in place of the responses.
        """
        canaries = [torch.cat([self.own[user].unsqueeze(0), self.references[:num_references]]) for user in users]
        if self.conversations is None:
            windows = canaries
        else:
            windows = [
                overwrite(self.conversations[user], of_user) for user, of_user in zip(users, canaries, strict=True)
            ]
        return torch.stack(widen(windows))  # padded to the width of the widest


def draw_canaries(num_users: int, *, vocabulary: int, context: int, seed: int, trial: int) -> Canaries:
    """Draw a canary of uniformly random tokens for each user, and reference canaries that no user trains on.

    For each user a coin decides whether the user trains on its canary. The random stream is used for nothing else, so
    that training does not depend on it.

    Args:
        num_users: Number of users.
        vocabulary: Number of tokens to draw from.
        context: Largest number of predicted tokens of a canary.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0.
    """
    width = min(context, LONGEST) + 1  # the first token is not predicted
    stream = generator("audit", seed, trial)
    drawn = torch.randint(vocabulary, (num_users + REFERENCES, width), generator=stream)
    coins = torch.rand(num_users, generator=stream) < 0.5
    return Canaries(own=drawn[:num_users], references=drawn[num_users:], inside=coins)


def with_canary(user: UserData, canary: Int[Tensor, " width"], *, seed: int, trial: int) -> UserData:
    """Replace a quarter (:data:`SHARE`) of the training text, at random positions, by copies of the user's canary.

    Args:
        user: The user.
        canary: Tokens.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws other positions.
    """
    width, stream = len(canary), user.train.clone()
    num_pieces = len(stream) // width  # pieces as long as the canary
    shuffled = torch.randperm(num_pieces, generator=generator("audit", seed, trial, user.name))
    for piece in shuffled[: max(1, int(SHARE * num_pieces))].tolist():
        stream[piece * width : (piece + 1) * width] = canary.to(stream)
    return replace(user, train=stream)


def with_example(user: UserData, canary: Int[Tensor, " width"], context: int, *, seed: int, trial: int) -> UserData:
    """Replace one example of a user, a window of ``context + 1`` tokens, by repetitions of its canary.

    Args:
        user: The user.
        canary: Tokens.
        context: Inputs of a window.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws another example.
    """
    stream, width = user.train.clone(), min(context + 1, len(user.train))
    num_windows = len(stream) // width
    index = int(torch.randint(num_windows, (1,), generator=generator("audit", seed, trial, user.name)))
    repeated = canary.repeat(math.ceil(width / len(canary)))[:width]
    stream[index * width : (index + 1) * width] = repeated.to(stream)
    return replace(user, train=stream)


def overwrite(
    window: Int64[Tensor, " window"], canaries: Int[Tensor, "canaries width"]
) -> Int64[Tensor, "canaries window"]:
    """Return one copy of a conversation per canary, with the canary in place of the tokens of the responses.

    Canaries are repeated or truncated to the number of these tokens, which are the targets of the loss.

    Args:
        window: The conversation; tokens that are no targets (prompts, padding) are encoded as negative numbers.
        canaries: The canaries.
    """
    targets = 1 + (window[1:] >= 0).nonzero().flatten()  # places; the first token has no prediction
    windows, repeats = window.repeat(len(canaries), 1), math.ceil(len(targets) / canaries.shape[1])
    windows[:, targets] = canaries.repeat(1, repeats)[:, : len(targets)].to(windows)
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
        count: Number of conversations to overwrite: first the one with most targets, in which the canary is scored,
            then random ones.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws other conversations.
    """
    windows, scored_row = user.train.windows.clone(), longest_responses(user.train)
    shuffled = torch.randperm(len(windows), generator=generator("audit", seed, trial, user.name))
    for row in [scored_row, *shuffled[shuffled != scored_row].tolist()][:count]:
        windows[row] = overwrite(windows[row], canary.unsqueeze(0))[0]  # the only copy, as there is one canary
    return replace(user, train=replace(user.train, windows=windows))


@dataclass(kw_only=True)
class CanaryScores:
    """Scores of a run's canaries, in lists by view, user and observed round; records what an attacker observes."""

    attacker: Attacker
    canaries: Canaries
    scores: dict[str, list[list[float]]]
    last_published: LastPublished = field(default_factory=LastPublished)

    def record_view(self, view: str, users: Sequence[int], tensors: Tree) -> None:
        """Score the canary of each user from what is observed in a round, and append the scores.

        A score is a z-score of the decrease of the canary's loss since the last publication. Mean and standard
        deviation are those of the decreases of reference canaries, on which no user trained. Tensors of the view OWN
        get no score; they are stored as the models before the next uploads.

        Args:
            view: Who observes: SERVER sees uploads, USERS what other users download, OWN what the user itself does.
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        if view in self.scores:  # not OWN
            windows = self.canaries.windows(users, COMPARED)  # of each user: its own canary, then references
            before = self.last_published.models_before(view, users)
            decrease = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            own, references = decrease[:, 0], decrease[:, 1:]
            z_scores = (own - references.mean(1)) / references.std(1)  # not finite if no loss has changed
            for user, z_score in zip(users, z_scores.nan_to_num(0.0, 0.0, 0.0).tolist(), strict=True):
                self.scores[view][user].append(z_score)
        self.last_published.remember(view, tensors)

    def score(self, view: str) -> list[float | None]:
        """Return each user's mean score over the rounds in which it was observed; None if it never was."""
        return [sum(seen) / len(seen) if seen else None for seen in self.scores[view]]

    def ranks(self) -> list[int]:
        """Return the rank of the loss of each user's canary among those of the references; 1 is the lowest loss.

        A low rank means that the final model remembers the canary. User u is attacked by user u + 1, who computes the
        losses under the model that it has downloaded itself.
        """
        users = range(len(self.canaries.own))
        attackers = [(user + 1) % len(users) for user in users]  # the last user is attacked by the first
        # Row u: the newest model that the attacker of user u, who belongs to the view "other users", has downloaded.
        downloads = self.last_published.models_before(USERS, users)
        losses = self.attacker.losses(attackers, downloads, self.canaries.windows(users, REFERENCES))
        own, references = losses[:, :1], losses[:, 1:]
        return (1 + (references < own).sum(1)).tolist()


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
    """Train with canaries in the data of some users, and score all canaries by what attackers observe.

    A canary is a sequence of random tokens. For each user a coin decides whether its canary is inserted into its
    training data. If the run protects single examples, a canary takes the
    place of one example, otherwise of a share :data:`SHARE` of the user's data.

    Args:
        recipe: Shortened recipe, of text or conversations.
        run_data: Data of the run.
        trial: Number of the trial, from 0.
        observers: Returns the observers of a run.
    """
    users, base = run_data.users, run_data.base
    assert base is not None
    # Training in a trial has a seed of its own, different from that of the audited run. Canaries are drawn from the
    # audited run's seed and the trial's number.
    trial_recipe = recipe.with_changes({"seed": recipe.seed + 1 + trial})
    vocabulary = int(base.model.config.vocab_size)
    draw_key = {"seed": recipe.seed, "trial": trial}
    canaries = draw_canaries(len(users), vocabulary=vocabulary, context=recipe.training.context, **draw_key)
    context = recipe.training.context - (base.begin is not None)  # the begin token takes one place of a window
    if all(isinstance(user.train, Answers) for user in users):
        # Each canary replaces the responses in one conversation of its user: that with the longest responses.
        conversations = [user.train.windows[longest_responses(user.train)] for user in users]
        canaries = replace(canaries, conversations=conversations)

    one_example = protects_single_examples(recipe)

    def insert(user: Any, canary: Tensor) -> AnyUser:
        """Return a user whose training data contains its canary."""
        if canaries.conversations is not None:
            count = 1 if one_example else max(1, int(SHARE * len(user.train)))
            return with_response(user, canary, count, **draw_key)
        return with_example(user, canary, context, **draw_key) if one_example else with_canary(user, canary, **draw_key)

    trial_users = as_users(
        insert(user, canary) if inside else user
        for user, canary, inside in zip(users, canaries.own, canaries.inside.tolist(), strict=True)
    )
    # A federation in memory; the observed one below shares its clients and its server.
    unobserved = build(trial_recipe, replace(run_data, users=trial_users), store="memory")
    scores = {view: [[] for _ in users] for view in (SERVER, USERS)}
    canary_scores = CanaryScores(attacker=Attacker(clients=unobserved.clients), canaries=canaries, scores=scores)
    federation = ObservedFederation(
        clients=unobserved.clients, server=unobserved.server, record_view=canary_scores.record_view
    )
    metrics = execute(federation, trial_recipe, None, observers=observers(unobserved.clients)).metrics
    return Trial(
        inside=canaries.inside.tolist(),
        scores={view: canary_scores.score(view) for view in (SERVER, USERS)},
        ranks=canary_scores.ranks(),
        metrics=metrics,
        works={} if (account := unobserved.server.mechanisms.account) is None else dict(account.works()),
    )


def protects_single_examples(recipe: Recipe) -> bool:
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
    """Return for each user how well training windows are distinguished from test windows by the final shared model.

    The score of a window is how much lower its loss is than under the base model. The AUC of the loss alone is given
    for comparison. The attacker is another user, who attacks with the model that it has downloaded itself.
    """
    clients, server = run.federation.clients, run.federation.server
    attacker, memberships = Attacker(clients=clients), []
    final_models = published(server, others=True)  # for each user, what its attacker has downloaded
    # Test splits have targets in responses only; if training had them in prompts too, both splits get them.
    all_tokens = getattr(run.recipe.data, "loss_on", "") == "all"
    for number, user in enumerate(clients.users):
        model = {name: t[number : number + 1] for name, t in final_models.items()}
        train, test = (windows_of(split, clients.plan.training.context) for split in (user.train, user.test))
        splits = [(as_targets(windows) if all_tokens else windows).unsqueeze(0) for windows in (train, test)]
        # Losses are (users, windows), with one user here. Without a model they are those of the base model.
        final_losses = [attacker.losses([number], model, windows)[0] for windows in splits]
        base_losses = [attacker.losses([number], {}, windows)[0] for windows in splits]
        train_scores, test_scores = (
            (before - after).tolist() for before, after in zip(base_losses, final_losses, strict=True)
        )
        train_loss, test_loss = ((-losses).tolist() for losses in final_losses)
        memberships.append(
            Membership(
                user=user.name,
                members=len(train_scores),
                others=len(test_scores),
                auc=auc(train_scores, test_scores),
                auc_of_loss=auc(train_loss, test_loss),
                found=true_positive_rate(train_scores, test_scores),
            )
        )
    return memberships


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the area under the ROC curve: the probability that a member scores higher than a non-member.

    Ties count half. Computed as the Mann-Whitney U of the members, divided by the number of pairs.

    Args:
        members: Scores of examples that were trained on.
        others: Scores of examples that were not trained on.
    """
    ranks = rankdata([*members, *others])
    count = len(members)
    u_of_members = ranks[:count].sum() - count * (count + 1) / 2
    return float(u_of_members / (count * len(others)))


def true_positive_rate(members: Sequence[float], others: Sequence[float], rate: float = FALSE_ALARMS) -> float | None:
    """Return the share of members, data that was trained on, that an attacker finds at a given rate of false alarms.

    The attacker takes data for a member if its score is above a threshold. The threshold is set so that at most the
    share ``rate`` of the others, data that was not trained on, is taken for members.

    Args:
        members: Scores of members.
        others: Scores of others.
        rate: Largest share of the others that is taken for members.

    Returns:
        The share; None if there are too few others for even one false alarm.
    """
    false_alarms = math.floor(rate * len(others) + 1e-9)  # 0.01 * 300 may be rounded to less than 3
    if false_alarms == 0:
        return None
    threshold = sorted(others, reverse=True)[false_alarms]
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

    def with_included(self, index: int, user: UserData | UserAnswers) -> UserData | UserAnswers:
        """Return a copy of a user with only the included windows as training data.

        The rest of a text after its last whole window is always included.

        Args:
            index: Index of the user.
            user: The user.
        """
        if isinstance(user, UserAnswers):
            return replace(user, train=user.train.only(self.inside[index]))
        windows, width = self.windows[index], self.windows[index].shape[1]
        included, rest = windows[self.inside[index]].flatten(), user.train[len(windows) * width :]
        return replace(user, train=torch.cat([included, rest]))


def halves(users: Sequence[UserData | UserAnswers], context: int, *, seed: int, run: int) -> Halves:
    """Cut users' training data into windows, and include each window in a reference run with probability 1/2.

    At least one window of each user is included. Users with fewer than ``LEAST`` (4) windows train on all windows.

    Args:
        users: The users.
        context: Inputs of a window.
        seed: Seed of the recipe.
        run: Number of the run.
    """
    windows, inside = [windows_of(user.train, context, most=len(user.train)) for user in users], []
    for user, users_windows in zip(users, windows, strict=True):
        coins = torch.rand(len(users_windows), generator=generator("shadow", seed, run, user.name)) < 0.5
        if not bool(coins.any()):
            coins[0] = True  # a user without training data cannot train
        inside.append(coins if len(users_windows) >= LEAST else torch.ones_like(coins))
    return Halves(windows=windows, inside=inside)


def indices_to_score(count: int) -> Int[Tensor, " scored"]:
    """Return the indices of at most 64 (``MOST_TARGETS``) windows to score, spread evenly over ``count`` windows.

    With fewer than four windows (``LEAST``) there are none: all of them are included in every reference run, so nothing
    can be guessed about them.
    """
    num_scored = min(count, MOST_TARGETS) if count >= LEAST else 0
    return torch.linspace(0, count - 1, num_scored).long()


@dataclass(kw_only=True)
class WindowScores:
    """Decrease of the loss of each user's windows, by view and user, summed over rounds."""

    attacker: Attacker
    windows: Int[Tensor, "users windows width"]
    last_published: LastPublished = field(default_factory=LastPublished)
    sums: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {SERVER: {}, USERS: {}})

    def record_view(self, view: str, users: Sequence[int], tensors: Tree) -> None:
        """Add the decrease of the loss of each window since the last publication, as observed in a round.

        For the view OWN nothing is added; its tensors are stored as the models before the next uploads.

        Args:
            view: Who observes: SERVER sees uploads, USERS what other users download, OWN what the user itself does.
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        if (total_decreases := self.sums.get(view)) is not None:  # by user; None for OWN
            windows, before = self.windows[list(users)], self.last_published.models_before(view, users)
            decrease = self.attacker.losses(users, before, windows) - self.attacker.losses(users, tensors, windows)
            for user, users_decrease in zip(users, decrease, strict=True):
                earlier = total_decreases.get(user)
                total_decreases[user] = users_decrease if earlier is None else earlier + users_decrease
        self.last_published.remember(view, tensors)


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """Result of one reference run, a short run on a random half of each user's windows of training data.

    Attributes:
        scores: Decrease of the loss of each window that is scored, by the attacker's view (SERVER or USERS) and number
            of the user. Users that the attacker did not observe are left out.
        inside: For each user, which of these windows were in the run's training data.
    """

    scores: dict[str, dict[int, Tensor]]
    inside: Sequence[Bool[Tensor, " windows"]]


def _choose_windows(
    windows: Sequence[Int[Tensor, "_ _"]], indices: Sequence[Int[Tensor, " _"]]
) -> Int[Tensor, "users windows width"]:
    """Return the windows of each user at some indices, as one tensor.

    Users with fewer indices than others repeat these windows. Users without indices repeat their first window.

    Args:
        windows: Windows of each user.
        indices: Indices of each user's windows.
    """
    most = max(map(len, indices))
    chosen = [
        of_user[at[torch.arange(most) % len(at)]] if len(at) else of_user[:1].expand(most, -1)
        for of_user, at in zip(windows, indices, strict=True)
    ]
    return torch.stack(widen(chosen))  # padded to the width of the widest


def run_shadow(
    recipe: Recipe, run_data: RunData, number: int, observers: Callable[[Clients], Sequence[Observer]]
) -> Shadow:
    """Train a reference run on a random half of each user's windows, and score windows by what attackers observe.

    Windows are pieces of the user's training text, or conversations. A score is how much the loss of a window fell.
    Windows of both halves are scored.

    Args:
        recipe: Shortened recipe, of text or conversations.
        run_data: Data of the run.
        number: Number of the run.
        observers: Returns the observers of a run.
    """
    users: Sequence[UserData | UserAnswers] = run_data.users
    shadow_recipe = recipe.with_changes({"seed": recipe.seed + 1 + number})  # a seed of its own
    halves_of_run = halves(users, recipe.training.context, seed=recipe.seed, run=number)
    shadow_users = as_users(halves_of_run.with_included(user_number, user) for user_number, user in enumerate(users))
    # A federation in memory; the observed one below shares its clients and its server.
    unobserved = build(shadow_recipe, replace(run_data, users=shadow_users), store="memory")
    scored_indices = [indices_to_score(len(windows)) for windows in halves_of_run.windows]  # of each user's windows
    scored_windows = _choose_windows(halves_of_run.windows, scored_indices)
    window_scores = WindowScores(attacker=Attacker(clients=unobserved.clients), windows=scored_windows)
    federation = ObservedFederation(
        clients=unobserved.clients, server=unobserved.server, record_view=window_scores.record_view
    )
    execute(federation, shadow_recipe, None, observers=observers(unobserved.clients))
    num_scored = {user: len(indices) for user, indices in enumerate(scored_indices) if len(indices)}
    return Shadow(
        scores={  # without windows that were repeated to fill the tensor
            view: {user: sums[user][:count] for user, count in num_scored.items() if user in sums}
            for view, sums in window_scores.sums.items()
        },
        inside=[inside[indices] for inside, indices in zip(halves_of_run.inside, scored_indices, strict=True)],
    )


# -------------------------------------------------------------------- likelihood ratios


def likelihood_ratios(
    scores: Float[Tensor, "runs windows"], inside: Bool[Tensor, "runs windows"]
) -> Float[Tensor, "runs windows"]:
    """Return ``log N(score; in) - log N(score; out)`` of each run's windows, with Gaussians fitted to all other runs.

    A positive value means that the window was probably included in the run.

    Args:
        scores: How much the loss of each window fell in each run.
        inside: Which windows each run trained on.
    """
    scores = scores - scores.mean(1, keepdim=True)  # progress on all windows says nothing about one
    return torch.stack([_ratios_of_run(scores, inside, run) for run in range(len(scores))])


def _ratios_of_run(scores: Tensor, inside: Tensor, run: int) -> Float[Tensor, " windows"]:
    """Return the log likelihood ratios of one run's windows, fitted to all other runs.

    A window's score has the mean m if the run left it out, m + gap if the run included it, and in both cases the same
    variance. The ratio is ``((score - m)^2 - (score - m - gap)^2) / (2 variance)``.

    Args:
        scores: Scores of all runs, with each run's mean subtracted, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
        run: The run.
    """
    others = torch.arange(len(scores)) != run
    other_scores, other_inside = scores[others], inside[others]
    gap, variance = _fit_gaps(other_scores, other_inside)
    mean_outside = (other_scores - torch.where(other_inside, gap, 0.0)).mean(0)  # m
    variance = variance * (1 + 1 / len(other_scores))  # the mean of few runs has an error too
    from_outside = scores[run] - mean_outside
    from_inside = from_outside - gap
    return (from_outside.square() - from_inside.square()) / (2 * variance)


def _fit_gaps(scores: Tensor, inside: Tensor) -> tuple[Float[Tensor, " windows"], Float[Tensor, ""]]:
    """Return how much higher each window's score is when it is included, and the variance around both means.

    A window's own difference is shrunk towards the mean difference of all windows, to the extent that the spread of
    differences can be explained by chance (empirical Bayes). Negative differences are noise, as training on a window
    does not increase its loss, so they become 0. If they were kept, the attack would guess worse than at random when
    nothing is learned: the attacked run's noise and that of the other runs have opposite signs.

    Args:
        scores: How much the loss of each window fell in each run, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
    """
    counts, means = [], []  # two entries each: over the runs with a window, and over those without it
    for side in (inside, ~inside):
        counts.append(side.sum(0))
        means.append(torch.where(side, scores, 0.0).sum(0) / counts[-1].clamp(min=1))
    fitted = torch.where(inside, *means)
    degrees_of_freedom = sum((count - 1).clamp(min=0).sum() for count in counts)
    variance = ((scores - fitted).square().sum() / max(1, int(degrees_of_freedom))).clamp(min=SMALL)
    has_both = (counts[0] > 0) & (counts[1] > 0)  # windows that some runs include and others do not
    if not bool(has_both.any()):
        return torch.zeros_like(means[0]), variance
    gaps = means[0] - means[1]  # mean score with the window, minus that without it
    chance_variance = variance * (1 / counts[0].clamp(min=1) + 1 / counts[1].clamp(min=1))
    mean_gap = gaps[has_both].mean()
    true_variance = ((gaps[has_both] - mean_gap).square().mean() - chance_variance[has_both].mean()).clamp(min=0)
    own_weight = true_variance / (true_variance + chance_variance)  # of a window's own difference
    shrunk = mean_gap + own_weight * (gaps - mean_gap)
    return torch.where(has_both, shrunk, mean_gap).clamp(min=0), variance


SMALL = 1e-18
"""Smallest variance of a score."""


def membership_by_shadows(names: Sequence[str], shadows: Sequence[Shadow]) -> list[Shadowed]:
    """Measure how well attackers identify the windows of a user's data in the training data of a run.

    Attack each run in turn: compare its scores with those of the other runs. Some of these trained on a window and some
    did not. There are two attackers: the server, which sees uploads, and other users, who see published models.

    Args:
        names: Names of the users.
        shadows: Results of the reference runs. Each run trained on a random half of the windows, ``inside``.

    Returns:
        A result for each attacker and user. Users with scores in fewer than ``FEWEST`` (3) runs are skipped: an attack
        needs, besides the attacked run, one run that trained on the window and one that did not.
    """
    results = []
    for attacker_view in (SERVER, USERS):
        for user, name in enumerate(names):
            runs_with_scores = [run for run in shadows if user in run.scores[attacker_view]]
            if len(runs_with_scores) < FEWEST:
                continue
            scores = torch.stack([run.scores[attacker_view][user] for run in runs_with_scores])  # (runs, windows)
            inside = torch.stack([run.inside[user] for run in runs_with_scores])  # (runs, windows)
            results.append(_membership_of_user(attacker_view, name, scores, inside))
    return results


def _membership_of_user(view: str, user: str, scores: Tensor, inside: Tensor) -> Shadowed:
    """Return how well included windows of a user are distinguished from left-out ones, over all runs.

    ``auc`` and ``found`` use likelihood ratios, which need the other runs as references; ``auc_of_scores`` does not.

    Args:
        view: SERVER or USERS; the attacker's view.
        user: Name of the user.
        scores: Scores of its windows, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
    """
    ratios, plain_scores = likelihood_ratios(scores, inside).flatten(), scores.flatten()
    is_member = inside.flatten()
    members, others = ratios[is_member].tolist(), ratios[~is_member].tolist()
    return Shadowed(
        view=view,
        user=user,
        members=len(members),
        others=len(others),
        auc=auc(members, others),
        auc_of_scores=auc(plain_scores[is_member].tolist(), plain_scores[~is_member].tolist()),
        found=true_positive_rate(members, others),
    )
