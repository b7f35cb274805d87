"""Attacks on training data: canaries and membership inference, both in short runs that are observed.

Canaries: random tokens are written over parts of users' training text; in conversations over tokens that are trained
on, which are those of responses.

Observed are the uploads, which the server sees, and what the server publishes, which users see. A user's local tensors
(specialists, routers) are never observed; their public initial values stand in for them.

Membership without reference models: a window is scored by how much lower its loss is under the final shared model than
under the base. The loss alone depends more on how hard a text is than on whether it was trained on (difficulty
calibration: Watson et al. 2022, arXiv:2111.08440).

Membership with reference models: in each of several short runs a coin decides for every window of a user's training
text whether it is included; a conversation is one window. Each run is attacked with the scores of the other runs: for
every window a Gaussian is fitted to the scores of the runs that included it, and another to those of the runs that did
not. The attack is the ratio of the two likelihoods (LiRA: Carlini et al. 2022, arXiv:2112.03570, Algorithm 1, online).
With few runs all windows of a user share the variances, as the paper advises (section VI.C).

Differs from the paper:

- The paper fits the two means of each example freely. Here the difference between a window's two means is shrunk
  towards the mean difference of all windows, as a few runs say little about one window, and it is never negative.
- The paper scores an example by the final model's confidence, on a logit scale. Here the score is the decrease of a
  window's loss in nats: while a user trained (for the server, summed over rounds), or since the start (for other
  users). The mean over the user's windows is subtracted within each run, as overall progress says nothing about one
  window.
- Algorithm 1 attacks one given model. Here each run is the target once, and all other runs are its references.
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
from comingle.models.hardware import without_compiling
from comingle.models.scoring import PAD, begin_windows, hide
from comingle.privacy.accounting import Work
from comingle.protocol.messages import Upload, decompress, fill_ranks
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

CANARY_SHARE = 0.25
"""Fraction of a user's training text, or of its conversations, that its canary replaces.

It is large because the bound of privacy holds for the worst case. Where privacy protects single examples, a canary
replaces one example.
"""
MAX_CANARY_TOKENS = 32
"""Largest number of predicted tokens of a canary."""
NUM_REFERENCES = 63
"""Number of reference canaries, which are never included."""
NUM_COMPARED_REFERENCES = 31
"""Number of reference canaries with which a user's canary is compared in each round; at the end all are used."""

SERVER, USERS, OWN = "server", "users", "own"
"""Views: the server sees uploads, other users what they download, the user itself what it trains from."""

RecordView = Callable[[str, Sequence[int], Tree], None]
"""Called with a view, user indices, and the observed shared tensors ``(users, models, *shape)`` of these users."""

MakeObservers = Callable[[Clients], Sequence[Observer]]
"""Returns, for the clients of a run that begins, the observers of its events, such as a progress bar."""


@dataclass(kw_only=True)
class ObservedFederation(InProcess):
    """Federation in one process that passes uploads and published models to ``record_view``."""

    record_view: RecordView = lambda view, users, tensors: None

    def upload(self, users: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Upload the shared tensors of users, and record them as what the server sees.

        Args:
            users: Indices of the users.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        super().upload(users, round_number, losses)  # sets `_upload_of_round`
        message = self._upload_of_round
        if message is None or not message.users:  # the round has no participants
            return
        senders = self.clients.numbers(message.users)
        self.record_view(SERVER, senders, uploaded(self.server, message))

    def aggregate(self) -> str:
        """Aggregate, then record each user's download twice: as what the user itself sees and what others see.

        Returns:
            Reason why there is no secure sum of the uploads; empty if there is one, or none was needed.
        """
        reason = super().aggregate()
        all_users = range(len(self.server.users))
        self.record_view(OWN, all_users, published(self.server))
        self.record_view(USERS, all_users, published(self.server, others=True))
        return reason


def uploaded(server: ServerHalf, upload: Upload) -> Tree:
    """Return the tensors of an upload as an attacking server sees them, ``(users, 1, *shape)``.

    Compressed numbers are decompressed, and LoRA factors padded to the largest rank of all users.
    """
    tensors = fill_ranks(decompress(upload.tensors, server.uploads), server.layout)
    return {name: t.unsqueeze(1) for name, t in tensors.items()}  # a user uploads one model


def published(server: ServerHalf, *, others: bool = False) -> Tree:
    """Return what each user would download now, ``(users, models, *shape)``.

    Args:
        server: The run's server with its state.
        others: Return for each user u the download of its attacker: user u + 1, or user 0 for the last user.
    """
    all_users = range(len(server.users))
    downloads = server.method.server.download(server.kept, all_users)  # ``kept`` has the server's tensors
    if not others:
        return downloads
    return {name: t.roll(-1, 0) for name, t in downloads.items()}  # row u + 1 becomes row u


def _select_users(tensors: Tree, users: Sequence[int]) -> Tree:
    """Return the rows of some users of tensors ``(users, *shape)``."""
    return {name: t[list(users)] for name, t in tensors.items()}


@dataclass(kw_only=True)
class LastPublished:
    """Shared tensors that the server published last, by view, with which an attacker compares what it sees next."""

    last: dict[str, Tree] = field(default_factory=dict)

    def models_before(self, view: str, users: Sequence[int]) -> Tree:
        """Return the older models with which an attacker compares what it observes next.

        The attacker scores a text by how much its loss has fallen since these models.

        Args:
            view: SERVER, USERS or OWN. The server compares an upload with the model that the user had downloaded (OWN);
                other users compare a download with the previous one.
            users: Indices of the attacked users.

        Returns:
            Shared tensors ``(users, models, *shape)`` by name, where models counts the models that each user downloads;
            empty before the first publication.
        """
        compared_view = OWN if view == SERVER else view
        last_tensors = self.last.get(compared_view, {})
        return _select_users(last_tensors, users)

    def remember(self, view: str, tensors: Tree) -> None:
        """Store a copy of tensors that an attacker has observed, to compare them with those that it observes next.

        Args:
            view: What they are: "users" for a download of other users, "own" for one of the attacked users, "server"
                for an upload. An upload is compared with the user's own last download, so it is not stored.
            tensors: The observed tensors by name.
        """
        if view != SERVER:
            self.last[view] = {name: t.clone() for name, t in tensors.items()}


def check_auditable(where: object, method: Method) -> None:
    """Check that users share models that can be observed.

    Args:
        where: Run folder or a description of the run, for the error.
        method: Method of the run.

    Raises:
        RunError: Users share no such models; the message says why.
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
        """Return a row per user with the initial values of all trainable tensors, flattened and joined.

        Every attacker knows them, as they follow from the public seed of the recipe.
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
        if not observed:
            return self._losses_of_model(users, {}, windows)
        num_models = next(iter(observed.values())).shape[1]
        losses_by_model = []
        for model in range(num_models):
            tensors_of_model = {name: t[:, model] for name, t in observed.items()}
            losses_by_model.append(self._losses_of_model(users, tensors_of_model, windows))
        return torch.stack(losses_by_model).amin(0)  # over models

    def _losses_of_model(self, users: Sequence[int], observed: Tree, windows: Tensor) -> Float[Tensor, "users windows"]:
        """Return the mean loss per predicted token of each window, under a single observed model of each user.

        Args:
            users: Indices of the users.
            observed: Observed tensors ``(users, *shape)``; empty stands for the initial model.
            windows: Windows ``(users, windows, width)``.
        """
        model = self.clients.model
        rank_mask = model.mask()[list(users)]  # 0 for padding of users with a smaller rank
        rows = self.initial_rows(len(users)) * rank_mask
        if observed:  # overwrite the initial values of the shared tensors
            assign(model.layout.views(rows), model.layout, self.clients.method.shared, observed)
        windows = self._with_begin_token(windows.long())
        summed_losses = []
        with without_compiling():  # not compiled: these shapes occur only here
            for part in windows.split(_WINDOWS_AT_ONCE, dim=1):
                losses_of_tokens = model.predict(model.tensors(rows), list(users), part.to(model.device))
                summed_losses.append(losses_of_tokens.sum(-1))
        num_targets = (windows[..., 1:] >= 0).sum(-1).clamp(min=1)  # hidden tokens and padding are negative
        return torch.cat(summed_losses, dim=1).double().cpu() / num_targets.cpu()

    def _with_begin_token(self, windows: Int64[Tensor, "*batch width"]) -> Int64[Tensor, "*batch width"]:
        """Return windows of text with the begin-of-text token in front, as in training, and without their last token.

        Windows are unchanged for conversations, and if the base model has no such token.
        """
        batch_source = self.clients.batch_source
        if not isinstance(batch_source, TextBatchSource) or batch_source.begin is None:
            return windows
        # Take all windows for windows from the middle of a text, whose first token is no target.
        begins_stream = torch.zeros((*windows.shape[:-1], 1), dtype=torch.bool, device=windows.device)
        return begin_windows(windows[..., :-1], batch_source.begin, begins_stream=begins_stream)


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of a trial.

    Args:
        canary_by_user: Canary of each user.
        references: Canaries that are never included.
        inside: Whether each user's canary is included.
        conversations: Conversation of each user whose responses are overwritten with canaries for scoring; None for
            text.
    """

    canary_by_user: Int[Tensor, "users width"]
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
        references = self.references[:num_references]
        windows_by_user = []
        for user in users:
            canaries = torch.cat([self.canary_by_user[user].unsqueeze(0), references])
            if self.conversations is None:
                windows_by_user.append(canaries)
            else:
                windows_by_user.append(overwrite_responses(self.conversations[user], canaries))
        return torch.stack(widen(windows_by_user))  # padded to the width of the widest


def draw_canaries(num_users: int, *, vocabulary: int, context: int, seed: int, trial: int) -> Canaries:
    """Draw a canary of uniformly random tokens for each user, and reference canaries that no user trains on.

    For each user a coin decides whether the user trains on its canary.

    Args:
        num_users: Number of users.
        vocabulary: Number of tokens to draw from.
        context: Largest number of predicted tokens of a canary.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0.

    Returns:
        The canary of each user and whether the user trains on it (``inside``), and the reference canaries.
    """
    width = min(context, MAX_CANARY_TOKENS) + 1  # the first token is not predicted
    random = generator("audit", seed, trial)
    canaries = torch.randint(vocabulary, (num_users + NUM_REFERENCES, width), generator=random)
    coins = torch.rand(num_users, generator=random)
    return Canaries(canary_by_user=canaries[:num_users], references=canaries[num_users:], inside=coins < 0.5)


def with_canary(user: UserData, canary: Int[Tensor, " width"], *, seed: int, trial: int) -> UserData:
    """Replace a quarter of the training text, at random positions, by copies of the user's canary.

    Args:
        user: The user with its data.
        canary: Tokens.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws other positions.
    """
    width = len(canary)
    tokens = user.train.clone()
    num_pieces = len(tokens) // width  # pieces as long as the canary
    num_replaced = max(1, int(CANARY_SHARE * num_pieces))
    shuffled = torch.randperm(num_pieces, generator=generator("audit", seed, trial, user.name))
    for piece in shuffled[:num_replaced].tolist():
        tokens[piece * width : (piece + 1) * width] = canary.to(tokens)
    return replace(user, train=tokens)


def with_example(user: UserData, canary: Int[Tensor, " width"], context: int, *, seed: int, trial: int) -> UserData:
    """Write a user's canary over one training example, for runs whose privacy protects single examples.

    An example is a window of ``context + 1`` tokens. The canary is repeated until it fills the window.

    Args:
        user: The user with its data.
        canary: Tokens of the user's canary.
        context: Number of tokens that a model reads in a window, which has one token more: the last target.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws another example.
    """
    tokens = user.train.clone()
    width = min(context + 1, len(tokens))
    num_windows = len(tokens) // width
    index = int(torch.randint(num_windows, (1,), generator=generator("audit", seed, trial, user.name)))
    num_repeats = math.ceil(width / len(canary))
    repeated = canary.repeat(num_repeats)[:width]
    tokens[index * width : (index + 1) * width] = repeated.to(tokens)
    return replace(user, train=tokens)


def overwrite_responses(
    window: Int64[Tensor, " window"], canaries: Int[Tensor, "canaries width"]
) -> Int64[Tensor, "canaries window"]:
    """Return one copy of a conversation per canary, with the canary in place of the tokens of the responses.

    Args:
        window: The conversation; tokens that are not in responses (prompts, padding) are negative numbers.
        canaries: The canaries; repeated or truncated to the number of tokens in responses.
    """
    is_in_response = window[1:] >= 0  # without the first token, which the model does not predict
    positions = 1 + is_in_response.nonzero().flatten()
    num_repeats = math.ceil(len(positions) / canaries.shape[1])
    repeated = canaries.repeat(1, num_repeats)[:, : len(positions)]
    windows = window.repeat(len(canaries), 1)
    windows[:, positions] = repeated.to(windows)
    return windows


def longest_responses(answers: Answers) -> int:
    """Return the index of the conversation with most targets, in which a canary is scored."""
    return int((answers.windows[:, 1:] >= 0).sum(1).argmax())


def with_response(
    user: UserAnswers, canary: Int[Tensor, " width"], count: int, *, seed: int, trial: int
) -> UserAnswers:
    """Overwrite the responses in some of a user's training conversations with its canary.

    Args:
        user: The user; its prompts and number of tokens stay the same.
        canary: Tokens, repeated or truncated to the responses of each conversation.
        count: Number of conversations to overwrite: first the one with the longest responses, in which the canary is
            scored, then random ones.
        seed: Seed of the recipe.
        trial: Number of the run with canaries, from 0. Each run draws other conversations.
    """
    windows = user.train.windows.clone()
    scored_row = longest_responses(user.train)
    shuffled = torch.randperm(len(windows), generator=generator("audit", seed, trial, user.name))
    other_rows = shuffled[shuffled != scored_row].tolist()
    rows = [scored_row, *other_rows][:count]
    for row in rows:
        (overwritten,) = overwrite_responses(windows[row], canary.unsqueeze(0))
        windows[row] = overwritten
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

        A score is how much the canary's loss fell since the last publication, as a z-score: relative to the mean and
        the standard deviation of reference canaries, on which no user trained.

        Args:
            view: What the tensors are: uploads (SERVER), downloads of another user (USERS), or the users' own (OWN).
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        is_scored = view in self.scores  # not OWN: a user's download is only stored, to compare its next upload with
        if is_scored:
            # Of each user: its own canary, then reference canaries.
            windows = self.canaries.windows(users, NUM_COMPARED_REFERENCES)
            losses_before = self.attacker.losses(users, self.last_published.models_before(view, users), windows)
            losses_now = self.attacker.losses(users, tensors, windows)
            decrease = losses_before - losses_now
            of_canary, of_references = decrease[:, 0], decrease[:, 1:]
            z_scores = (of_canary - of_references.mean(1)) / of_references.std(1)
            z_scores = z_scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # not finite if no loss has changed
            for user, z_score in zip(users, z_scores.tolist(), strict=True):
                self.scores[view][user].append(z_score)
        self.last_published.remember(view, tensors)

    def score(self, view: str) -> list[float | None]:
        """Return each user's mean score over the rounds in which its upload or download was observed.

        Args:
            view: The attacker, SERVER or USERS, whose scores are averaged.

        Returns:
            The mean scores; None for a user that was never observed. A high score means that its canary was included.
        """
        mean_scores: list[float | None] = []
        for scores_by_round in self.scores[view]:
            if scores_by_round:
                mean_scores.append(sum(scores_by_round) / len(scores_by_round))
            else:
                mean_scores.append(None)
        return mean_scores

    def ranks(self) -> list[int]:
        """Return for each user 1 plus the number of reference canaries with a lower loss than the user's canary.

        A low rank means that the final model remembers the canary. User u is attacked by user u + 1, who computes the
        losses under the model that it has downloaded itself.
        """
        users = range(len(self.canaries.canary_by_user))
        attackers = [(user + 1) % len(users) for user in users]  # the last user is attacked by the first
        downloads = self.last_published.models_before(USERS, users)  # row u: the newest download of u's attacker
        windows = self.canaries.windows(users, num_references=NUM_REFERENCES)
        losses = self.attacker.losses(attackers, downloads, windows)
        canary_losses, reference_losses = losses[:, :1], losses[:, 1:]
        num_lower = (reference_losses < canary_losses).sum(1)
        return (1 + num_lower).tolist()


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


def run_trial(recipe: Recipe, run_data: RunData, trial: int, make_observers: MakeObservers) -> Trial:
    """Train with canaries in the data of some users, and score all canaries by what attackers observe.

    A canary is a sequence of random tokens. For each user a coin decides whether its canary is inserted into its
    training data.

    Args:
        recipe: Recipe of the audited run with fewer rounds; its data is text or conversations.
        run_data: Data of the audited run.
        trial: Number of the trial, from 0.
        make_observers: Returns the observers of the trial's events, such as a progress bar.

    Returns:
        Which canaries were included, their scores, and what the accountant needs to compute the trial's epsilon.
    """
    users = run_data.users
    canaries = _canaries_of_trial(recipe, run_data, trial)
    trial_users: list[Any] = []
    for user, canary, is_inside in zip(users, canaries.canary_by_user, canaries.inside.tolist(), strict=True):
        if is_inside:
            user = _insert_canary(user, canary, recipe, run_data, trial)
        trial_users.append(user)
    trial_data = replace(run_data, users=as_users(trial_users))
    trial_recipe = recipe.with_changes({"seed": recipe.seed + 1 + trial})  # the audited run has another seed
    built = build(trial_recipe, trial_data, store="memory")
    empty_scores: dict[str, list[list[float]]] = {view: [[] for _ in users] for view in (SERVER, USERS)}
    canary_scores = CanaryScores(attacker=Attacker(clients=built.clients), canaries=canaries, scores=empty_scores)
    federation = ObservedFederation(clients=built.clients, server=built.server, record_view=canary_scores.record_view)
    metrics = execute(federation, trial_recipe, None, observers=make_observers(built.clients)).metrics
    account = built.server.mechanisms.account
    return Trial(
        inside=canaries.inside.tolist(),
        scores={view: canary_scores.score(view) for view in (SERVER, USERS)},
        ranks=canary_scores.ranks(),
        metrics=metrics,
        works={} if account is None else dict(account.works()),  # each user's examples and steps with noise
    )


def _canaries_of_trial(recipe: Recipe, run_data: RunData, trial: int) -> Canaries:
    """Draw the canaries of a trial from the vocabulary of the base model; for users with text or conversations.

    Args:
        recipe: Recipe of the run.
        run_data: Data of the run.
        trial: Number of the run with canaries, from 0. Each run draws other canaries.
    """
    users, base = run_data.users, run_data.base
    assert base is not None
    canaries = draw_canaries(
        len(users),
        vocabulary=int(base.model.config.vocab_size),
        context=recipe.training.context,
        seed=recipe.seed,
        trial=trial,
    )
    if not all(isinstance(user.train, Answers) for user in users):
        return canaries
    # A canary is scored in place of the responses of one conversation of its user, the one with the longest responses.
    conversations = [user.train.windows[longest_responses(user.train)] for user in users]
    return replace(canaries, conversations=conversations)


def _insert_canary(user: Any, canary: Tensor, recipe: Recipe, run_data: RunData, trial: int) -> AnyUser:
    """Return a user whose training data contains its canary.

    The canary replaces a quarter of the data (:data:`CANARY_SHARE`), or one example if privacy protects single
    examples.

    Args:
        user: A user with text or conversations.
        canary: Tokens.
        recipe: Recipe of the run.
        run_data: Data of the run.
        trial: Number of the trial, from 0.
    """
    replaces_one_example = protects_single_examples(recipe)
    if isinstance(user.train, Answers):
        count = 1 if replaces_one_example else max(1, int(CANARY_SHARE * len(user.train)))
        return with_response(user, canary, count, seed=recipe.seed, trial=trial)
    if not replaces_one_example:
        return with_canary(user, canary, seed=recipe.seed, trial=trial)
    assert run_data.base is not None
    context = recipe.training.context
    if run_data.base.begin is not None:
        context -= 1  # the begin-of-text token takes one place of a window
    return with_example(user, canary, context, seed=recipe.seed, trial=trial)


def protects_single_examples(recipe: Recipe) -> bool:
    """Return whether privacy protects single examples, so that a canary is one of them."""
    return recipe.privacy is not None and protects_examples(recipe.privacy.mechanism)


MAX_WINDOWS = 200
"""Largest number of windows, or conversations, of each user and split in :func:`infer_membership`."""
FALSE_ALARM_RATE = 0.01
"""Share of windows that were not trained on and that the attacker may take for training windows."""


def windows_of(
    data: Int[Tensor, " tokens"] | Answers, context: int, most: int = MAX_WINDOWS
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
    num_chosen = min(most, len(windows))
    indices = torch.linspace(0, len(windows) - 1, num_chosen).long()
    return windows[indices]


def as_targets(windows: Int64[Tensor, "*batch width"]) -> Int64[Tensor, "*batch width"]:
    """Make every token but ``PAD`` a target, as in training with ``data.loss_on: all``.

    Args:
        windows: Token ids. Tokens that are input but no target are stored as negative numbers below ``PAD``.
    """
    is_hidden = windows < PAD
    return torch.where(is_hidden, hide(windows), windows)  # ``hide`` is its own inverse


def infer_membership(run: Run) -> list[Membership]:
    """Return for each user how well an attacker tells training windows from test windows with the final shared model.

    The attacker is another user, with the model that it has downloaded itself. It scores a window by how much lower the
    loss is under this model than under the base model. The AUC of the loss alone is given for comparison. ``found`` is
    the share of the training windows that the attacker finds at a false alarm rate of 1%.
    """
    clients, server = run.federation.clients, run.federation.server
    attacker = Attacker(clients=clients)
    final_models = published(server, others=True)  # for each user, what its attacker has downloaded
    # Test splits have targets in responses only; if training had them in prompts too, both splits get them.
    trained_on_prompts = getattr(run.recipe.data, "loss_on", "") == "all"
    memberships = []
    for number, user in enumerate(clients.users):
        final_model = {name: t[number : number + 1] for name, t in final_models.items()}
        train_windows = windows_of(user.train, clients.plan.training.context)
        test_windows = windows_of(user.test, clients.plan.training.context)
        if trained_on_prompts:
            train_windows, test_windows = as_targets(train_windows), as_targets(test_windows)
        train_scores, train_losses = _score_windows(attacker, number, final_model, train_windows)
        test_scores, test_losses = _score_windows(attacker, number, final_model, test_windows)
        memberships.append(
            Membership(
                user=user.name,
                members=len(train_scores),
                others=len(test_scores),
                auc=auc(train_scores.tolist(), test_scores.tolist()),
                auc_of_loss=auc((-train_losses).tolist(), (-test_losses).tolist()),  # members have lower losses
                found=true_positive_rate(train_scores.tolist(), test_scores.tolist()),
            )
        )
    return memberships


def _score_windows(
    attacker: Attacker, user: int, final_model: Tree, windows: Int[Tensor, "windows width"]
) -> tuple[Float[Tensor, " windows"], Float[Tensor, " windows"]]:
    """Return how much lower the loss of each window is than under the base model, and the loss itself, in nats.

    Args:
        attacker: Computes losses.
        user: Index of the user whose windows they are.
        final_model: Shared tensors ``(1, models, *shape)`` with which the user is attacked.
        windows: The windows.
    """
    base_model: Tree = {}  # no observed tensors stand for the initial model
    windows = windows.unsqueeze(0)  # one user
    (final_losses,) = attacker.losses([user], final_model, windows)
    (base_losses,) = attacker.losses([user], base_model, windows)
    return base_losses - final_losses, final_losses


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the area under the ROC curve: the probability that a member scores higher than a non-member.

    Ties count half.

    Args:
        members: Scores of examples that were trained on.
        others: Scores of examples that were not trained on.
    """
    ranks_of_members = rankdata([*members, *others])[: len(members)]
    smallest_rank_sum = len(members) * (len(members) + 1) / 2  # if all members were below all others
    u = ranks_of_members.sum() - smallest_rank_sum  # Mann-Whitney U: number of pairs in which the member is higher
    return float(u / (len(members) * len(others)))


def true_positive_rate(
    members: Sequence[float], others: Sequence[float], rate: float = FALSE_ALARM_RATE
) -> float | None:
    """Return the share of members, data that was trained on, that an attacker finds at a given rate of false alarms.

    Args:
        members: Scores of members; the attacker takes data with a score above a threshold for members.
        others: Scores of data that was not trained on.
        rate: Largest share of the others that is taken for members; the threshold follows from it.

    Returns:
        The share; None if there are too few others for even one false alarm.
    """
    num_false_alarms = math.floor(rate * len(others) + 1e-9)  # 0.01 * 300 may be rounded to less than 3
    if num_false_alarms == 0:
        return None
    threshold = sorted(others, reverse=True)[num_false_alarms]
    num_found = sum(score > threshold for score in members)
    return num_found / len(members)


MAX_SCORED_WINDOWS = 64
"""Largest number of windows of each user that are scored in a reference run."""
MIN_WINDOWS = 4
"""Smallest number of training windows of a user from which some are left out; with fewer all are included."""
MIN_REFERENCE_RUNS = 3
"""Smallest number of reference runs: the target, and for each window one run with it and one without."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Training data of one reference run: each user's windows ``(windows, width)``, and a mask of the included ones."""

    windows: Sequence[Int[Tensor, "_ _"]]
    inside: Sequence[Bool[Tensor, " _"]]

    def with_included(self, index: int, user: UserData | UserAnswers) -> UserData | UserAnswers:
        """Return a copy of a user with only the included windows as training data.

        The rest of a text after its last whole window is always included.

        Args:
            index: Index of the user.
            user: The user with its data.
        """
        is_included = self.inside[index]
        if isinstance(user, UserAnswers):
            return replace(user, train=user.train.only(is_included))
        windows = self.windows[index]
        rest_start = windows.numel()  # tokens in all windows
        return replace(user, train=torch.cat([windows[is_included].flatten(), user.train[rest_start:]]))


def draw_halves(users: Sequence[UserData | UserAnswers], context: int, *, seed: int, run: int) -> Halves:
    """Cut users' training data into windows, and include each window in a reference run with probability 1/2.

    If no window of a user was drawn, the user's first window is included. Of users with fewer than ``MIN_WINDOWS`` (4)
    windows, all windows are included.

    Args:
        users: The users.
        context: Number of tokens that a model reads in a window of text, which has one token more: the last target.
        seed: Seed of the recipe.
        run: Number of the reference run, from 0. Each run draws another half.
    """
    windows_by_user, inside_by_user = [], []
    for user in users:
        windows = windows_of(user.train, context, most=len(user.train))
        inside = torch.rand(len(windows), generator=generator("shadow", seed, run, user.name)) < 0.5
        if len(windows) < MIN_WINDOWS:
            inside[:] = True
        elif not bool(inside.any()):
            inside[0] = True
        windows_by_user.append(windows)
        inside_by_user.append(inside)
    return Halves(windows=windows_by_user, inside=inside_by_user)


def indices_to_score(count: int) -> Int[Tensor, " scored"]:
    """Return the indices of at most 64 (``MAX_SCORED_WINDOWS``) windows to score, spread evenly over ``count`` windows.

    With fewer than four windows (``MIN_WINDOWS``) none is scored, as every reference run includes all of them.
    """
    if count < MIN_WINDOWS:
        return torch.zeros(0, dtype=torch.int64)
    return torch.linspace(0, count - 1, min(count, MAX_SCORED_WINDOWS)).long()


@dataclass(kw_only=True)
class WindowScores:
    """Decrease of the loss of each user's windows, by view and user, summed over rounds."""

    attacker: Attacker
    windows: Int[Tensor, "users windows width"]
    last_published: LastPublished = field(default_factory=LastPublished)
    decreases: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {SERVER: {}, USERS: {}})

    def record_view(self, view: str, users: Sequence[int], tensors: Tree) -> None:
        """Add how much the loss of each window fell from the model that was published last to the one observed now.

        Args:
            view: What the tensors are: uploads (SERVER), downloads of another user (USERS), or the users' own (OWN).
            users: Indices of the users.
            tensors: Their observed tensors, ``(users, models, *shape)``.
        """
        if view in self.decreases:  # OWN is only stored, to compare the next uploads with
            total_by_user = self.decreases[view]
            windows = self.windows[list(users)]
            losses_before = self.attacker.losses(users, self.last_published.models_before(view, users), windows)
            losses_now = self.attacker.losses(users, tensors, windows)
            for user, decrease in zip(users, losses_before - losses_now, strict=True):
                if user in total_by_user:
                    total_by_user[user] = total_by_user[user] + decrease
                else:
                    total_by_user[user] = decrease
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
    most_indices = max(len(indices_of_user) for indices_of_user in indices)
    chosen = []
    for windows_of_user, indices_of_user in zip(windows, indices, strict=True):
        if len(indices_of_user):
            cycled = torch.arange(most_indices) % len(indices_of_user)  # such as 0, 1, 2, 0, 1
            chosen.append(windows_of_user[indices_of_user[cycled]])
        else:
            chosen.append(windows_of_user[:1].expand(most_indices, -1))
    return torch.stack(widen(chosen))  # padded to the width of the widest


def run_shadow(recipe: Recipe, run_data: RunData, number: int, make_observers: MakeObservers) -> Shadow:
    """Train a reference run on a random half of each user's windows, and score windows by what attackers observe.

    A score is how much the loss of a window fell. Windows of both halves are scored.

    Args:
        recipe: Recipe of the audited run with fewer rounds; its data is text or conversations.
        run_data: Data of the audited run.
        number: Number of the reference run, from 0, which determines the halves.
        make_observers: Returns the observers of the run's events, such as a progress bar.

    Returns:
        The scores of each user's windows by what the attacker sees, and whether the user trained on each of them.
    """
    users: Sequence[UserData | UserAnswers] = run_data.users
    halves = draw_halves(users, recipe.training.context, seed=recipe.seed, run=number)
    shadow_users = as_users(halves.with_included(index, user) for index, user in enumerate(users))
    shadow_recipe = recipe.with_changes({"seed": recipe.seed + 1 + number})  # differs from all other runs' seeds
    built = build(shadow_recipe, replace(run_data, users=shadow_users), store="memory")
    scored_indices = [indices_to_score(len(windows)) for windows in halves.windows]  # of each user's windows
    scored_windows = _choose_windows(halves.windows, scored_indices)
    window_scores = WindowScores(attacker=Attacker(clients=built.clients), windows=scored_windows)
    federation = ObservedFederation(clients=built.clients, server=built.server, record_view=window_scores.record_view)
    execute(federation, shadow_recipe, None, observers=make_observers(built.clients))
    scores: dict[str, dict[int, Tensor]] = {}
    for view, decrease_by_user in window_scores.decreases.items():
        scores[view] = {}
        for user, indices in enumerate(scored_indices):
            has_scores = user in decrease_by_user  # the user took part in a round
            if has_scores and len(indices):
                # `_choose_windows` repeats windows of users with few indices; leave out the repetitions.
                scores[view][user] = decrease_by_user[user][: len(indices)]
    inside = [is_inside[indices] for is_inside, indices in zip(halves.inside, scored_indices, strict=True)]
    return Shadow(scores=scores, inside=inside)


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
    mean_scores = scores.mean(1, keepdim=True)
    centred_scores = scores - mean_scores  # how much more the loss of a window fell than that of the others
    ratios = [_ratios_of_run(centred_scores, inside, run) for run in range(len(scores))]
    return torch.stack(ratios)


def _ratios_of_run(scores: Tensor, inside: Tensor, run: int) -> Float[Tensor, " windows"]:
    """Return the log likelihood ratios of one run's windows, fitted to all other runs.

    A window's score has the mean m if the run left it out, m + gap if the run included it, and in both cases the same
    variance. The ratio is ``((score - m)^2 - (score - m - gap)^2) / (2 variance)``.

    Args:
        scores: Scores of all runs, with each run's mean subtracted, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
        run: The run.
    """
    is_other = torch.arange(len(scores)) != run
    other_scores, other_inside = scores[is_other], inside[is_other]
    gap, variance = _fit_gaps(other_scores, other_inside)
    scores_without_gap = other_scores - torch.where(other_inside, gap, 0.0)
    m = scores_without_gap.mean(0)
    variance = variance * (1 + 1 / len(other_scores))  # plus the variance of m, a mean over the other runs
    distance_if_outside = scores[run] - m
    distance_if_inside = distance_if_outside - gap
    return (distance_if_outside.square() - distance_if_inside.square()) / (2 * variance)


def _fit_gaps(scores: Tensor, inside: Tensor) -> tuple[Float[Tensor, " windows"], Float[Tensor, ""]]:
    """Estimate how much training on a window (a piece of text) raises its score, for membership inference.

    A window's gap, the difference between its mean scores in runs with and without it, is shrunk towards the mean gap
    of all windows, the more the spread of gaps can be explained by chance (empirical Bayes). Negative gaps become 0:
    training on a window does not increase its loss.

    Args:
        scores: How much the loss of each window fell in each run, ``(runs, windows)``.
        inside: Which windows each run trained on, ``(runs, windows)``.

    Returns:
        The gap of each window, and the variance of scores around a window's mean with or without it, one for all.
    """
    num_inside, mean_inside = _count_and_mean(scores, inside)
    num_outside, mean_outside = _count_and_mean(scores, ~inside)
    means = torch.where(inside, mean_inside, mean_outside)  # (runs, windows)
    degrees_of_freedom = (num_inside - 1).clamp(min=0).sum() + (num_outside - 1).clamp(min=0).sum()
    variance = ((scores - means).square().sum() / max(1, int(degrees_of_freedom))).clamp(min=MIN_VARIANCE)
    has_both = (num_inside > 0) & (num_outside > 0)  # windows that some runs include and others do not
    if not bool(has_both.any()):
        return torch.zeros_like(mean_inside), variance
    gaps = mean_inside - mean_outside
    mean_gap = gaps[has_both].mean()
    chance_variance = variance * (1 / num_inside.clamp(min=1) + 1 / num_outside.clamp(min=1))  # of each gap
    observed_variance = (gaps[has_both] - mean_gap).square().mean()
    true_variance = (observed_variance - chance_variance[has_both].mean()).clamp(min=0)
    shrinkage = true_variance / (true_variance + chance_variance)  # 0: the mean gap; 1: the window's own gap
    shrunk_gaps = mean_gap + shrinkage * (gaps - mean_gap)
    return torch.where(has_both, shrunk_gaps, mean_gap).clamp(min=0), variance


def _count_and_mean(scores: Tensor, chosen: Tensor) -> tuple[Int[Tensor, " windows"], Float[Tensor, " windows"]]:
    """Return for each window the number of chosen runs and their mean score, which is 0 if no run is chosen.

    Args:
        scores: Scores ``(runs, windows)``.
        chosen: Runs to count for each window, ``(runs, windows)``.
    """
    counts = chosen.sum(0)
    means = torch.where(chosen, scores, 0.0).sum(0) / counts.clamp(min=1)
    return counts, means


MIN_VARIANCE = 1e-18
"""Smallest variance of a score."""


def membership_by_shadows(names: Sequence[str], shadows: Sequence[Shadow]) -> list[Shadowed]:
    """Measure how well attackers tell which windows of a user's data a run trained on.

    Each reference run is the target once; its scores are compared with those of all other runs.

    Args:
        names: Names of the users.
        shadows: Results of the reference runs. Each run trained on a random half of the windows, ``inside``.

    Returns:
        A result for each attacker (the server and other users) and user. Users with scores in fewer than 3 runs
        (``MIN_REFERENCE_RUNS``) are skipped: besides the target, an attack needs a run that trained on a window and one
        that did not.
    """
    results = []
    for view in (SERVER, USERS):
        for user, name in enumerate(names):
            shadows_with_scores = [shadow for shadow in shadows if user in shadow.scores[view]]
            if len(shadows_with_scores) < MIN_REFERENCE_RUNS:
                continue
            scores = torch.stack([shadow.scores[view][user] for shadow in shadows_with_scores])  # (runs, windows)
            inside = torch.stack([shadow.inside[user] for shadow in shadows_with_scores])  # (runs, windows)
            results.append(_membership_of_user(view, name, scores, inside))
    return results


def _membership_of_user(view: str, user: str, scores: Tensor, inside: Tensor) -> Shadowed:
    """Return how well an attacker tells the windows of a user that a run trained on from the others, over all runs.

    The AUC is computed twice: ``auc`` from likelihood ratios, which need the other runs as references, and
    ``auc_of_scores`` from the scores alone. ``found`` is the share of included windows that likelihood ratios find at a
    false alarm rate of 1%.

    Args:
        view: SERVER or USERS; the attacker's view.
        user: Name of the user.
        scores: Scores of its windows, ``(runs, windows)``.
        inside: Which windows each run included, ``(runs, windows)``.
    """
    is_member = inside.flatten()
    ratios = likelihood_ratios(scores, inside).flatten()
    plain_scores = scores.flatten()
    member_ratios, other_ratios = ratios[is_member].tolist(), ratios[~is_member].tolist()
    member_scores, other_scores = plain_scores[is_member].tolist(), plain_scores[~is_member].tolist()
    return Shadowed(
        view=view,
        user=user,
        members=len(member_ratios),
        others=len(other_ratios),
        auc=auc(member_ratios, other_ratios),
        auc_of_scores=auc(member_scores, other_scores),
        found=true_positive_rate(member_ratios, other_ratios),
    )
