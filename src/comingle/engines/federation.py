"""Users, their state and their models: what can be asked of a federation at any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from comingle.adapters import watching
from comingle.data.answers import UserAnswers
from comingle.data.pack import UserData
from comingle.data.samples import UserSamples
from comingle.engines.exchange import build_uploads, download_bytes, said_bytes, upload_bytes
from comingle.engines.feeds import Feed, TextFeed
from comingle.engines.state import State, draw, initial_state
from comingle.engines.surveys import Losses, Survey
from comingle.engines.training import Portions, Training, cohorts
from comingle.errors import DataError, RecipeError
from comingle.evaluation.answers import AnswerScore
from comingle.evaluation.perplexity import Gates, Score
from comingle.evaluation.samples import SampleScore
from comingle.methods.base import Beginning, Method
from comingle.models.adapted import AdaptedModel
from comingle.models.greedy import continue_prompts
from comingle.models.hardware import require_room
from comingle.models.mixed import MixedLanguageModel
from comingle.models.stacked import StackedModel
from comingle.routers.mixtures import NEVER
from comingle.trees import ADAPTOR, CLIENT_ROUTER, STATISTICS, Slot, Tree, assign

AnyScore = Score | SampleScore | AnswerScore
"""Text, samples and answers are scored alike: ``mean_loss`` and ``measures``."""

People = Sequence[UserData] | Sequence[UserSamples] | Sequence[UserAnswers]
"""Users have a name, and what they train, validate and test on."""


class Federation:
    """Everybody's tensors over one frozen base.

    ``trainers`` own rows of the state: the users themselves, or the single pooled trainer of an upper bound; where a
    method keeps several copies, row ``copy * trainers + i`` is a copy of trainer i. ``users`` are always the real ones;
    ``row_of`` maps each to the row whose model it uses. Without ``reads``, nobody's data is asked for before something
    needs it, and then ``feed`` may be what makes the feed: a state is to be restored, as what a server begins with can
    depend on data.
    """

    def __init__(
        self,
        model: AdaptedModel | StackedModel,
        method: Method,
        training: Training,
        *,
        trainers: People,
        users: People,
        feed: Feed | Callable[[], Feed] | None = None,
        state: State | None = None,
        reads: bool = True,
    ):
        self.model, self.method, self.training = model, method, training
        self.trainers, self.users = list(trainers), list(users)
        last = (method.copies - 1) * len(trainers)
        self.row_of = [last] * len(users) if method.pooled else list(range(last, last + len(users)))
        # A pooled trainer sees as many sequences a step as its users would have together.
        self.batch_size = training.batch_size * (len(users) if method.pooled else 1)
        self._feed = feed or TextFeed(cast(list[UserData], self.trainers), training, self.batch_size)
        self._reads = reads
        self.mixture = method.mixture
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.phases if model.layout.only(phase.roles).slots]
        self.clustered = frozenset(slot.name for slot in model.layout.slots if self._is_clustered(slot))
        self.round_number = -1  # none has begun
        initial = self._initial()
        self.start = initial.rows.clone() if method.resets else initial.rows[:0]
        self.state = state or initial
        self.resized()

    def _is_clustered(self, slot: Slot) -> bool:
        """Whether the tensor's leading axis is a mixture's components; whole models have statistics of their own."""
        whole = self.mixture is not None and self.mixture.of == "models"
        return set(slot.roles) == {ADAPTOR} or (whole and set(slot.roles) == {STATISTICS})

    @cached_property
    def feed(self) -> Feed:
        """The trainers' data."""
        return self._feed if isinstance(self._feed, Feed) else self._feed()

    @cached_property
    def portions(self) -> Portions:
        """What goes through the model at once."""
        return self.feed.portions(self.model.device, self.model.layout.columns)

    @cached_property
    def local_steps(self) -> int:
        """Local iterations of a round, of the trainer who has most."""
        return max(self.feed.steps(i) for i in range(len(self.trainers)))

    @property
    def iterations(self) -> int:
        """Local iterations of the whole run."""
        return self.training.rounds * self.local_steps

    def resized(self) -> None:
        """Take note of the users' ranks, which are part of the state."""
        users = len(self.trainers)
        ranks = self.state.ranks.cpu().view(self.method.copies, users)
        masks = [self.model.mask(r) for r in ranks]
        self.mask = torch.cat(masks) if len(masks) > 1 else masks[0]
        self.padded = not bool(self.mask.all())
        if self.padded:
            for rows in (self.state.rows, self.state.first, self.state.second):
                rows.mul_(self.mask[:, : rows.shape[1]])

    def _initial(self) -> State:
        layout, method = self.model.layout, self.method
        state = initial_state(
            layout,
            self.model.mask().repeat(method.copies, 1),
            names=[t.name for t in self.trainers] * method.copies,
            local=layout.mask(method.trained) & ~layout.mask(method.shared),
            ranks=self.model.ranks.repeat(method.copies),
            seed=self.training.seed,
            moments=self.training.experts.moments | self.training.router.moments,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        if method.mixture is not None and method.mixture.optimal:
            layout.views(state.rows)[CLIENT_ROUTER].copy_(self._true_clusters(method.mixture.clusters))
        if method.welcome is not None and not bool(self.model.mask().all()):
            raise RecipeError(
                f"method {method.name}: adapters.rank differs between users; the server's models have one rank"
            )
        if method.memory is not None:
            names = [trainer.name for trainer in self.trainers]
            starts = build_uploads(method, layout, self._starts(state.rows))
            kept = method.memory(Beginning(starts=starts, users=names, seed=self.training.seed))
            state.server = {name: t.to(state.rows.device) for name, t in kept.items()}
            if method.welcome is not None and self._reads:
                rows = state.rows[: len(names)]
                first = method.welcome(state.server, lambda models: self.assess(models, rows))
                assign(layout.views(rows), layout, method.shared, first)
        if self.training.select == "best":
            if self._reads:
                self._check_validation()
            state.remember(0, math.inf)
        return state

    def _check_validation(self) -> None:
        if not any(len(user.valid) for user in self.users):
            raise DataError(
                "evaluation.select: best needs validation data and no user has any; give some (data.task.valid, "
                "data.questions.valid or a valid split), or select: last"
            )

    def _starts(self, rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "starts columns"]:
        """The differently initialised models that the server begins with; the first is what users start from."""
        count = self.method.starts
        if isinstance(self.model, StackedModel):
            found = torch.cat([rows[:1].cpu(), self.model.other_starts])
        else:
            require_room(f"method {self.method.name}", count, self.model.layout.columns)
            found = torch.stack([draw(self.model.layout, self.training.seed, f"server/{n}") for n in range(count)])
            found[0] = rows[0]
        return found.to(rows)

    def _true_clusters(self, clusters: int) -> Float[Tensor, "rows clusters"]:
        """Logits whose softmax is exactly one-hot at each trainer's true cluster."""
        found = [getattr(trainer, "cluster", None) for trainer in self.trainers] * self.method.copies
        if any(cluster is None for cluster in found):
            raise RecipeError(f"method {self.method.name}: needs users whose true clusters are known, as in made tasks")
        own = torch.tensor(found) % clusters
        return torch.full((len(own), clusters), NEVER).scatter(1, own.unsqueeze(1), 0.0)

    @property
    def adapted(self) -> AdaptedModel:
        """The model of users over one frozen base."""
        assert isinstance(self.model, AdaptedModel)
        return self.model

    @property
    def stacked(self) -> StackedModel:
        """The model of users with copies of a net, or with a client-level mixture."""
        assert isinstance(self.model, StackedModel)
        return self.model

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return isinstance(self.model, AdaptedModel) and watching.routed(self.model.adapters)

    @property
    def weighted(self) -> bool:
        """Whether means are weighted by how much users train on."""
        return self.training.weighting != "uniform"

    def owners(self, rows: Sequence[int]) -> list[int]:
        """The trainer to whom each row belongs."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Name of the trainer to whom a row belongs."""
        return self.trainers[row % len(self.trainers)].name

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Named tensors in the model's dtype, contiguous where adapters' products would copy them again and again."""
        tensors = {name: t.to(self.model.dtype) for name, t in self.model.layout.views(rows).items()}
        if isinstance(self.model, StackedModel):  # nets are large, and used once a step
            return tensors
        return {name: t.contiguous() for name, t in tensors.items()}

    # ---------------------------------------------------------------- scores

    def evaluate(self) -> Sequence[AnyScore]:
        """Test score of every user with the model that it has now, and how much each of its experts said."""
        streams = [user.test for user in self.users]
        if not self.routed:
            return self._examine(streams, None)
        adapters = self.adapted.adapters
        with watching.watched(adapters):
            return self._examine(streams, lambda: watching.gates(adapters))

    def validate(self) -> float:
        """Mean over users, of those who have validation data, of the loss on it."""
        held = [(row, user.valid) for row, user in zip(self.row_of, self.users, strict=True) if len(user.valid)]
        return fmean(score.mean_loss for score in self.score([valid for _, valid in held], [row for row, _ in held]))

    def _examine(self, sets: Sequence[Any], gates: Gates | None) -> Sequence[AnyScore]:
        return self.feed.examine(self.predict, self.speak, sets, self.row_of, self.portions, gates)

    def score(self, sets: Sequence[Any], rows: Sequence[int], gates: Gates | None = None) -> Sequence[AnyScore]:
        """Score set i, a token stream or samples, with the model of row ``rows[i]``."""
        return self.feed.score(self.predict, sets, rows, self.portions, gates)

    def predict(self, rows: Sequence[int], batch: Tensor) -> Float[Tensor, "slots batch ..."]:
        """What the model of row ``rows[slot]`` makes of each slot's batch."""
        tensors = self.tensors(self.state.rows[list(rows)])
        return self.model.predict(tensors, self.owners(rows), batch.to(self.model.device))

    def speak(self, rows: Sequence[int], prompts: Tensor, limit: int) -> Int64[Tensor, "slots batch new"]:
        """How the model of row ``rows[slot]`` goes on after each slot's prompts."""
        assert isinstance(self.model, (AdaptedModel, MixedLanguageModel))
        tensors = self.tensors(self.state.rows[list(rows)])
        return continue_prompts(self.model, tensors, self.owners(rows), prompts, limit=limit)

    def cross_validate(self, members: Sequence[int]) -> Float[Tensor, "users users"]:
        """Mean loss in nats of user j's model on user i's validation text at (i, j), NaN where either is absent."""
        pairs = [(i, j) for i in members for j in members]
        scores = self.score([self.trainers[i].valid for i, _ in pairs], [j for _, j in pairs])
        found = torch.full((len(self.trainers),) * 2, torch.nan, dtype=torch.float64)
        for (i, j), score in zip(pairs, scores, strict=True):
            found[i, j] = score.mean_loss
        return found

    @torch.no_grad()
    def assess(self, models: Tree, rows: Float[Tensor, "users columns"]) -> Float[Tensor, "users models"]:
        """Mean loss in nats of each of some models of the server's on everybody's training data, as for a next round.

        What a user does not share is as in its row. Users without data have zeros.
        """
        layout, shared, count = self.model.layout, self.method.shared, len(next(iter(models.values())))
        found = torch.zeros(len(self.trainers), count, dtype=rows.dtype)
        for cohort in cohorts([i for i, t in enumerate(self.trainers) if len(t.train)], self.portions.users):
            survey = Survey(self.feed, cohort, self.round_number + 1, self.portions, rows.device)
            for number in range(count):
                own = rows[cohort]
                assign(layout.views(own), layout, shared, {n: t[number : number + 1] for n, t in models.items()})
                found[cohort, number] = survey.means(self._losses(own, cohort))[:, 0].to(found)
        return found

    def _losses(self, rows: Float[Tensor, "users columns"], users: Sequence[int]) -> Losses:
        """What the models of these rows lose on their users' batches."""
        tensors = self.tensors(rows)
        return lambda batch: self.model.losses(tensors, users, batch)[0].unsqueeze(1)

    # ---------------------------------------------------------------- counts

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user really trains."""
        trained = self.model.layout.mask(self.method.trained).to(self.mask.device)
        rows = (self.mask & trained).sum(1).view(self.method.copies, -1).sum(0).tolist()
        return [rows[owner] for owner in self.owners(self.row_of)]

    def upload_bytes(self) -> list[int]:
        """Bytes that each user sends in an exchange in which it takes part."""
        sent = upload_bytes(self.method, self.model.layout, self.mask, weighted=self.weighted)
        return [sent[owner] for owner in self.owners(self.row_of)]

    def download_bytes(self, own: int, everything: int) -> int:
        """Bytes that a user receives who sends ``own`` of ``everything`` that is sent in an exchange."""
        said = said_bytes(self.method, self.model.layout, weighted=self.weighted)
        return download_bytes(self.method, own, everything, said=said)

    def exchanged_bytes(self, members: Sequence[int]) -> tuple[int, int]:
        """Bytes that ``members`` send and receive together in an exchange."""
        all_sent = self.upload_bytes()
        own = [all_sent[m] for m in members]
        return sum(own), sum(self.download_bytes(sent, sum(own)) for sent in own)
