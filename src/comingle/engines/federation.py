"""Users, their state and their models: what can be asked of a federation at any time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.adapters import watching
from comingle.data.pack import UserData
from comingle.engines.exchange import build_uploads, upload_bytes
from comingle.engines.state import State, initial_state
from comingle.engines.training import Training, portions
from comingle.evaluation.perplexity import Gates, Score, score_streams
from comingle.methods.base import Method
from comingle.models.adapted import AdaptedModel
from comingle.trees import Tree


class Federation:
    """Everybody's tensors over one frozen base.

    ``trainers`` own rows of the state: the users themselves, or the single pooled trainer of an upper bound; where a
    method keeps several copies, row ``copy * trainers + i`` is a copy of trainer i. ``users`` are always the real ones;
    ``row_of`` maps each to the row whose model it uses.
    """

    def __init__(
        self,
        model: AdaptedModel,
        method: Method,
        training: Training,
        *,
        trainers: Sequence[UserData],
        users: Sequence[UserData],
        state: State | None = None,
    ):
        self.model, self.method, self.training = model, method, training
        self.trainers, self.users = list(trainers), list(users)
        last = (method.copies - 1) * len(trainers)
        self.row_of = [last] * len(users) if method.pooled else list(range(last, last + len(users)))
        # A pooled trainer sees as many sequences a step as its users would have together.
        self.batch_size = training.batch_size * (len(users) if method.pooled else 1)
        self.portions = portions(training, model.base.device, self.batch_size)
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.phases if model.layout.only(phase.roles).slots]
        self.state = state or self._initial()
        self.resized()

    def resized(self) -> None:
        """Take note of the users' ranks, which are part of the state."""
        users = len(self.trainers)
        ranks = self.state.ranks.cpu().view(self.method.copies, users)
        self.mask = torch.cat([self.model.mask(r) for r in ranks])
        self.padded = not bool(self.mask.all())
        if self.padded:
            for rows in (self.state.rows, self.state.first, self.state.second):
                rows.mul_(self.mask)

    def _initial(self) -> State:
        layout, method = self.model.layout, self.method
        state = initial_state(
            layout,
            self.model.mask().repeat(method.copies, 1),
            names=[t.name for t in self.trainers] * method.copies,
            local=layout.mask(method.trained) & ~layout.mask(method.shared),
            ranks=self.model.adapters.ranks.repeat(method.copies),
            seed=self.training.seed,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.base.dtype, torch.float32),
        )
        if method.memory is not None:
            state.server = method.memory(build_uploads(method, layout, state.rows[: len(self.trainers)]))
        return state

    def owners(self, rows: Sequence[int]) -> list[int]:
        """The trainer to whom each row belongs."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Name of the trainer to whom a row belongs."""
        return self.trainers[row % len(self.trainers)].name

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Named tensors in the base's dtype, each contiguous so that products need no copies of them."""
        dtype = self.model.base.dtype
        return {name: t.to(dtype).contiguous() for name, t in self.model.layout.views(rows).items()}

    # ---------------------------------------------------------------- scores

    def evaluate(self) -> list[Score]:
        """Test score of every user with the model that it has now, and how much each of its experts said."""
        streams, adapters = [user.test for user in self.users], self.model.adapters
        if not watching.routed(adapters):
            return self.score(streams, self.row_of)
        with watching.watched(adapters):
            return self.score(streams, self.row_of, gates=lambda: watching.gates(adapters))

    def score(
        self, streams: Sequence[Int[Tensor, " _"]], rows: Sequence[int], gates: Gates | None = None
    ) -> list[Score]:
        """Score stream i with the model of row ``rows[i]``."""
        batch = min(16, self.portions.users * self.portions.sequences)
        slots = max(1, self.portions.users * self.portions.sequences // batch)
        context = self.training.context
        return score_streams(self.losses, streams, rows, context=context, batch=batch, slots=slots, gates=gates)

    def losses(
        self, rows: Sequence[int], windows: Int[Tensor, "slots batch window"]
    ) -> Float[Tensor, "slots batch context"]:
        """Losses of each slot's windows with the model of row ``rows[slot]``."""
        tensors = self.tensors(self.state.rows[list(rows)])
        return self.model.losses(tensors, self.owners(rows), windows.to(self.model.base.device))[0]

    def cross_validate(self, members: Sequence[int]) -> Float[Tensor, "users users"]:
        """Mean loss in nats of user j's model on user i's validation text at (i, j), NaN where either is absent."""
        pairs = [(i, j) for i in members for j in members]
        scores = self.score([self.trainers[i].valid for i, _ in pairs], [j for _, j in pairs])
        found = torch.full((len(self.trainers),) * 2, torch.nan, dtype=torch.float64)
        for (i, j), score in zip(pairs, scores, strict=True):
            found[i, j] = score.mean_nats
        return found

    # ---------------------------------------------------------------- counts

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user really trains."""
        trained = self.model.layout.mask(self.method.trained).to(self.mask.device)
        rows = (self.mask & trained).sum(1).view(self.method.copies, -1).sum(0).tolist()
        return [rows[owner] for owner in self.owners(self.row_of)]

    def upload_bytes(self) -> list[int]:
        """Bytes that each user sends in an exchange in which it takes part."""
        sent = upload_bytes(self.method, self.model.layout, self.mask)
        return [sent[owner] for owner in self.owners(self.row_of)]

    def exchanged_bytes(self, members: Sequence[int]) -> tuple[int, int]:
        """Bytes that ``members`` send and receive together in an exchange.

        An answer is as large as an upload. Between peers everybody receives what everybody else sends.
        """
        sent = sum(self.upload_bytes()[m] for m in members)
        return sent, sent * (len(members) - 1) if self.method.peers else sent
