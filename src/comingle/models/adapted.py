"""A frozen base with adapters: what the engine trains, evaluates and generates with.

Users are a batch dimension: one forward pass serves ``(users, batch)`` sequences over the one base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comingle.config.settings import AdaptersSection, Gating
from comingle.models import routing
from comingle.models.base import Base
from comingle.models.generation import continue_greedily
from comingle.models.injection import Adapters, ExpertCounts, inject
from comingle.models.kernels import expert_mlp
from comingle.models.layouts import decoder_layers
from comingle.models.loading import Head, backbone, lm_head
from comingle.models.loss import cross_entropy
from comingle.models.model import FakeWeights, Gates, Model, TokenRouting, share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.quantised import giving_back, packed_parameters
from comingle.models.scoring import PAD, hide, inputs_of, prompt_ends
from comingle.utils.files import cache_folder
from comingle.utils.trees import ATTENTION, ROUTER, Layout, Tree

Windows = Int[Tensor, "users batch window"]
"""Tokens, one more in each window than are predicted."""


@dataclass(frozen=True, kw_only=True)
class AdapterRouting(TokenRouting):
    """Token-level routers in the adapters of a base."""

    adapters: Adapters
    backbone: nn.Module

    @property
    def routed(self) -> bool:
        """Whether somebody has more than one expert, and the method does not average them."""
        return routing.routed(self.adapters)

    @contextmanager
    def watched(self) -> Iterator[Gates]:
        """Within, every pass leaves its gates behind."""
        with routing.watched(self.adapters):
            yield lambda: routing.gates(self.adapters)

    @torch.no_grad()
    def router_inputs(self, tensors: Tree, users: Sequence[int], batch: Windows, *, whole: bool = False) -> Tree:
        """What reaches each MLP there."""
        self.adapters.bind({n: t for n, t in tensors.items() if not n.endswith(f".{ROUTER}")}, users)
        with routing.overheard(self.adapters) as read, torch.compiler.set_stance("force_eager"):
            self.backbone(input_ids=inputs_of(batch).flatten(0, 1), use_cache=False)
        at, real = prompt_ends(batch)[..., None, None], (batch != PAD).any(-1, keepdim=True)
        wide = {name: x.view(*batch.shape[:2], batch.shape[2] - 1, -1) for name, x in read.items()}
        if whole:
            there = (batch[..., :-1] != PAD).double()
            shares = there / there.sum(-1, keepdim=True).clamp(min=1)
            return {n: torch.einsum("ubt,ubtw->ubw", shares.to(x), x) for n, x in wide.items()}
        return {n: x.gather(2, at.expand(-1, -1, 1, x.shape[-1])).squeeze(2) * real for n, x in wide.items()}

    def expert_names(self, user: int) -> list[str]:
        """As "generalist", "specialist 1", "specialist 2", in their order."""
        return routing.expert_names(self.adapters, user)


@dataclass(frozen=True, kw_only=True)
class AdaptedModel(AdapterRouting, Model):
    """A base whose linears carry the adapters of many users."""

    name: str
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    base: Base
    network: PreTrainedModel
    head: Head

    @property
    def base_parameters(self) -> int:
        """The base's parameters."""
        return self.base.model.num_parameters() + packed_parameters(self.base.model)

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """Each user's LoRA rank."""
        return self.adapters.ranks

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """Each user's LoRA scale."""
        return self.adapters.scales

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """True where a user really has a parameter, on the base's device; ``ranks`` as in :meth:`Adapters.mask`."""
        return self.adapters.mask(ranks).to(self.base.device)

    def only(self, users: Sequence[int]) -> AdaptedModel:
        """Some users, in adapters as wide as everybody's."""
        return replace(self, adapters=self.adapters.only(users))

    def without(self, roles: frozenset[str]) -> Model:
        """Experts of these roles, and routers with them: those that are left are averaged."""
        return replace(self, adapters=self.adapters.without(roles))

    def losses(
        self,
        tensors: Tree,
        users: Sequence[int],
        batch: Windows,
        *,
        train: bool = False,
        shares: Tensor | None = None,
        powers: Float[Tensor, " users"] | None = None,
    ) -> tuple[Float[Tensor, "users batch context"], Float[Tensor, " users"] | float]:
        """Next-token loss in nats at every position, and each user's load-balancing penalty.

        ``batch`` holds windows of context + 1 tokens; a negative target carries no loss. Row i of ``tensors`` and of
        ``batch`` belongs to user ``users[i]``, who may occupy several. ``train`` changes nothing: there is no dropout.
        ``powers`` multiply each row's logits, and are for heads without bias and cap.
        """
        hidden, penalty = self.states(*self.adapters.of_users(tensors, users), inputs_of(batch))
        hidden = hidden if powers is None else hidden * powers.to(hidden).view(-1, 1, 1, 1)
        return cross_entropy(hidden, self.head, batch[..., 1:]), penalty

    def states(
        self, tensors: Tree, present: Bool[Tensor, "users experts"], inputs: Int[Tensor, "users batch context"]
    ) -> tuple[Float[Tensor, "users batch context width"], Float[Tensor, " users"] | float]:
        """What the head reads, and :meth:`losses`' penalty, of what :meth:`Adapters.of_users` has found."""
        self.adapters.place(tensors, present)
        with giving_back() if self.base.quantised else nullcontext():
            hidden = self.backbone(input_ids=inputs.flatten(0, 1), use_cache=False).last_hidden_state
        return hidden.view(*inputs.shape, -1), self.adapters.penalties()

    def losses_of_each(
        self, tensors: Tree, users: Sequence[int], batch: Windows
    ) -> Float[Tensor, "users batch context"]:
        """Every place is predicted, and those without a target are left out afterwards."""
        shown = torch.where(batch < 0, hide(batch), batch).clamp(min=0)
        return self.losses(tensors, users, shown, train=True)[0].masked_fill(batch[..., 1:] < 0, 0.0)

    def predict(self, tensors: Tree, users: Sequence[int], batch: Windows) -> Float[Tensor, "users batch context"]:
        """The losses alone, which is all that perplexity is made of."""
        return self.losses(tensors, users, batch)[0]

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Contiguous, as the adapters' products would copy them again and again."""
        return {name: t.contiguous() for name, t in super().tensors(rows).items()}

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """All users share every pass."""
        prompts = prompts.to(self.device)
        with torch.compiler.set_stance("force_eager"):  # lengths change with every token: compiling would not pay
            self.adapters.bind(tensors, users)
            return continue_greedily(self.network, prompts.flatten(0, 1), limit).view(*prompts.shape[:2], -1)

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Nobody trains the base."""
        size, head = fakes.size_of(self.network), self.head.with_tensors(lambda real: fakes.of(real, self.device))
        fakes.replace(self.network, self.device)
        return replace(self, head=head), size


def adapt(
    base: Base,
    settings: AdaptersSection,
    counts: ExpertCounts,
    *,
    routed: bool,
    compiled: bool,
    gating: Gating | None = None,
    native_code: bool | None = None,
    residual: int | None = None,
    checkpointed: bool = False,
) -> AdaptedModel:
    """Inject adapters into a copy of ``base`` that shares all its weights; ``base`` itself stays as it is.

    ``compiled`` switches torch.compile on, ``native_code`` the compiled mixture
    (:mod:`comingle.models.kernels.expert_mlp`, CPUs only, built once for each machine); None: with ``compiled``. Both
    switches hold for the whole process. ``gating`` and ``residual`` are as in
    :func:`~comingle.models.injection.inject`. With ``checkpointed`` a layer keeps its input alone for the backward pass
    and is computed once more there; such layers, and those of a quantised base, are not compiled.

    Raises:
        BaseModelError: the family or its head is not one that comingle can adapt.
    """
    head = lm_head(base)
    network = share_weights(base.model)
    adapters = inject(network, settings, counts, routed=routed, gating=gating, residual=residual)
    expert_mlp.fusing(compiled)
    expert_mlp.disable()
    wanted = (compiled if native_code is None else native_code) and expert_mlp.fits(base.device, base.dtype)
    if wanted and expert_mlp.enable(cache_folder() / "native"):
        from comingle.models.loss import faster

        faster(network, attention=base.attention == "auto")
    layers = decoder_layers(network)
    if checkpointed:
        for layer in layers:
            setattr(layer, "forward", _computed_twice(layer))  # noqa: B010 (a method, not a Tensor)
    elif compiled and not base.quantised:
        _keep_compiled_code()
        _forget_other_models(base.model, adapters)
        for mlp in adapters.experts.values():
            # The mixture brings its own fused kernels; tracing its autograd function as well would undo them.
            setattr(mlp, "forward", torch.compiler.disable(mlp.forward))  # noqa: B010 (a method, not a Tensor)
        for layer in layers:
            layer.compile()
    return AdaptedModel(
        name=base.name,
        layout=adapters.layout,
        device=base.device,
        dtype=base.dtype,
        base=base,
        network=network,
        backbone=backbone(network),
        head=head,
        adapters=adapters,
    )


def _keep_compiled_code() -> None:
    """Let the next process find what was compiled of blocks with LoRA's own autograd function, as it finds the rest.

    PyTorch leaves such functions out of its cache by default; what they do, forward and backward, is part of its keys.
    """
    from torch._functorch import config

    if hasattr(config, _KEEPS):  # not every version has it
        setattr(config, _KEEPS, True)


_KEEPS = "autograd_cache_allow_custom_autograd_functions"


def _computed_twice(layer: nn.Module) -> Callable[..., object]:
    """The second time with what was bound at the first: a loss may be of several models, bound one after another."""

    @wraps(forward := layer.forward)
    def call(*args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        bound = [(module, dict(vars(module))) for module in layer.modules()]

        def as_bound(*args: object, **kwargs: object) -> object:
            for module, was in bound:
                vars(module).update(was)
            return forward(*args, **kwargs)

        return checkpoint(as_bound, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


_compiled_for: tuple[weakref.ref[nn.Module], Layout] | None = None


def _forget_other_models(model: nn.Module, adapters: Adapters) -> None:
    """Empty the compiler's cache, where every variant counts against a limit, unless it was filled by such a model.

    Methods of one comparison that adapt the attention alike share what was compiled for the first of them.
    """
    global _compiled_for
    attention = adapters.layout.only({ATTENTION})
    if _compiled_for is None or _compiled_for[0]() is not model or _compiled_for[1] != attention:
        torch.compiler.reset()
    _compiled_for = (weakref.ref(model), attention)
