"""A frozen language model with a client-level mixture of adaptors: FLoRAL beside CoMiGS, on the same base.

The base is one module for all; only adaptors and routers are stacked over users, so that ``vmap`` shares every product
with a base weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from comingle.models.base import Base
from comingle.models.floral.model import FloralModel
from comingle.models.floral.wrapper import floral
from comingle.models.generation import continue_greedily
from comingle.models.loading import Head, backbone, lm_head
from comingle.models.loss import cross_entropy
from comingle.models.model import Model, call_with, own_copy, share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.routers import ClientMixture
from comingle.models.stacked import StackedModel, stack
from comingle.models.windows import PAD, inputs_of
from comingle.utils.trees import BASE, STATISTICS, Layout, Tree


@dataclass(frozen=True, kw_only=True)
class MixedLanguageModel(StackedModel):
    """Users' adaptors and routers over one base; a batch is windows of tokens."""

    base: Base
    head: Head
    embedding: nn.Module

    def _own_losses(
        self, tensors: Tree, batch: Int[Tensor, "users batch window"], train: bool
    ) -> Float[Tensor, "users batch context"]:
        """Next-token loss in nats at every position; a negative target carries no loss."""
        inputs, targets = inputs_of(batch), batch[..., 1:]
        return cross_entropy(self._outputs(tensors, inputs, train), self.head, targets)

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"], *, train: bool = False
    ) -> Float[Tensor, "users clusters batch context"]:
        """The loss at every position under each component alone."""
        inputs, targets = inputs_of(batch), batch[..., 1:]
        hidden = self._components(tensors, inputs, train)
        wide = targets.unsqueeze(1).expand(hidden.shape[:-1])
        return cross_entropy(hidden, self.head, wide)

    def predict(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"]
    ) -> Float[Tensor, "users batch context"]:
        """Losses with the adaptors mixed in the weights, wherever the mixture stands in training."""
        return self._own_losses(tensors, batch, False)

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Each user speaks by itself."""
        parts, prompts = [], prompts.to(self.device)
        with torch.compiler.set_stance("force_eager"):  # lengths change with every token: compiling would not pay
            for row, of_user in enumerate(prompts):
                mine = {name: t[row : row + 1] for name, t in tensors.items()}
                personal = self.of_one_user(mine)
                with personal.mixing(self.shares(mine)[0]):
                    parts.append(continue_greedily(cast(PreTrainedModel, personal.model), of_user, limit))
        width = max(part.shape[1] for part in parts)
        return torch.stack([F.pad(part, (0, width - part.shape[1]), value=PAD) for part in parts])

    def of_one_user(self, tensors: Tree) -> FloralModel:
        """The whole causal language model (``.model``) of one user: its own adaptors over the base's very weights."""
        base, net = self.base.model, self.net
        assert isinstance(net, FloralModel)
        copied = own_copy(net, tensors, shared=(*base.parameters(), *base.buffers()))
        network = share_weights(base)
        setattr(network, network.base_model_prefix, copied.model)
        copied.model = network
        return copied

    @property
    def base_parameters(self) -> int:
        """The base's parameters."""
        return self.base.model.num_parameters()

    def without_weights(self, fakes: Any) -> tuple[Model, int]:
        """Nobody trains the base."""
        size, head = fakes.size_of(self.base.model), fakes.of_head(self.head, self.device)
        fakes.replace(self.net, self.device)
        return replace(self, head=head), size

    def _run(self, train: bool, call: Callable[..., Tensor], *stacked: Any) -> Tensor:
        # Embedded first: some families look at token numbers for padding, which vmap cannot follow.
        tensors, inputs, *rest = stacked
        return super()._run(False, call, tensors, self.embedding(inputs), *rest)

    def _call(self, user_tensors: Tree, inputs: Tensor, **options: Any) -> Tensor:
        options |= {"inputs_embeds": inputs, "use_cache": False}
        return call_with(self.net, user_tensors, options=options).last_hidden_state


def mix_language_model(
    base: Base, mixture: ClientMixture, *, users: int, rank: int, alpha: float
) -> MixedLanguageModel:
    """LoRA adaptors for each component on every linear of the blocks; ``alpha`` is the factor of their output."""
    network = share_weights(base.model)
    net = floral(
        backbone(network),
        num_clusters=mixture.clusters,
        rank=rank,
        alpha=alpha,
        bias=False,
        norm=False,
        per_layer=mixture.per_layer,
        copy=False,
        generator=torch.Generator(),  # values are drawn again, for each user; torch's own stream stays untouched
    )
    stacked = stack([net], name=base.name, users=users, mixture=mixture, device=base.device, dtype=base.dtype)
    slots = tuple(s for s in stacked.layout.slots if not {BASE, STATISTICS} & set(s.roles))
    fields = {**vars(stacked), "layout": Layout(slots=slots)}
    embedding = network.get_input_embeddings()
    return MixedLanguageModel(**fields, base=base, head=lm_head(base), embedding=embedding)
