"""A frozen base model with the adapters of many users; the engine trains, evaluates and generates with it.

Users are a batch dimension: one forward pass computes ``(users, batch)`` sequences over one copy of the base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comingle.config.settings import AdaptersSection, Gating
from comingle.models import routing
from comingle.models.base import Base
from comingle.models.generation import continue_greedily
from comingle.models.hardware import without_compiling
from comingle.models.injection import Adapters, ExpertCounts, inject
from comingle.models.kernels import expert_mlp
from comingle.models.layouts import decoder_layers
from comingle.models.loading import Head, backbone, lm_head
from comingle.models.lora import PeftAdapter, weight_shape
from comingle.models.loss import cross_entropy
from comingle.models.model import FakeWeights, Gates, Model, TokenRouting, share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.quantised import packed_parameters, unpack_in_backward
from comingle.models.scoring import PAD, hide, inputs_of, prompt_ends
from comingle.utils.errors import RecipeError
from comingle.utils.files import cache_folder
from comingle.utils.trees import ATTENTION, ROUTER, Layout, Tree

Windows = Int[Tensor, "users batch window"]
"""Token IDs. A window of context + 1 tokens yields ``context`` predictions."""


@dataclass(frozen=True, kw_only=True)
class AdapterRouting(TokenRouting):
    """Queries about the token-level routers of a base model with adapters."""

    adapters: Adapters
    backbone: nn.Module

    @property
    def routed(self) -> bool:
        """True if some user has more than one expert and the method does not average experts."""
        return routing.routed(self.adapters)

    @contextmanager
    def record_gates(self) -> Iterator[Gates]:
        """Record the gates of each forward pass while the context is active.

        Yields:
            A function that returns the gates of the last pass.
        """
        with routing.record_gates(self.adapters):
            yield lambda: routing.gates(self.adapters)  # which each router has stored in its last pass

    @torch.no_grad()
    def router_inputs(self, tensors: Tree, users: Sequence[int], batch: Windows, *, whole: bool = False) -> Tree:
        """Return the input of each MLP's router for each window, at the last token of the window's prompt.

        Client hooks use means of these inputs, for example to initialise a router. In this pass routers are off, and
        the experts are averaged.

        Args:
            tensors: The users' trainable tensors; those of routers are ignored.
            users: Indices of the users.
            batch: Windows of context + 1 tokens.
            whole: Return the mean input over all tokens of a window instead.

        Returns:
            One tensor ``(users, batch, width)`` per MLP, by the name of its router's tensor; zeros for windows that
            are all padding.
        """
        without_routers = {name: t for name, t in tensors.items() if not name.endswith(f".{ROUTER}")}
        self.adapters.bind(without_routers, users)
        with routing.record_router_inputs(self.adapters) as recorded, without_compiling():
            self.backbone(input_ids=inputs_of(batch).flatten(0, 1), use_cache=False)
        num_users, num_windows, window = batch.shape
        context = window - 1
        states = {name: x.view(num_users, num_windows, context, -1) for name, x in recorded.items()}
        if whole:
            is_token = (batch[..., :-1] != PAD).double()
            num_tokens = is_token.sum(-1, keepdim=True).clamp(min=1)  # a window may be all padding
            token_weights = is_token / num_tokens
            return {name: torch.einsum("ubt,ubtw->ubw", token_weights.to(x), x) for name, x in states.items()}
        end_positions = prompt_ends(batch)[..., None, None]  # (users, batch, 1, 1)
        has_tokens = (batch != PAD).any(-1, keepdim=True)
        states_at_end = {}
        for name, x in states.items():
            width = x.shape[-1]
            state_at_end = x.gather(2, end_positions.expand(-1, -1, 1, width)).squeeze(2)
            states_at_end[name] = state_at_end * has_tokens
        return states_at_end

    def expert_names(self, user: int) -> list[str]:
        """Return a user's expert names in order: "generalist", "specialist 1", "specialist 2"."""
        return routing.expert_names(self.adapters, user)


@dataclass(frozen=True, kw_only=True)
class AdaptedModel(AdapterRouting, Model):
    """A base model whose linear layers carry the adapters of many users."""

    name: str
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    base: Base
    network: PreTrainedModel
    head: Head

    @property
    def base_parameters(self) -> int:
        """The number of parameters of the base model, quantised ones included."""
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
        """Return True where a user has a parameter, False for padding, on the base's device (:meth:`Adapters.mask`)."""
        return self.adapters.mask(ranks).to(self.base.device)

    def set_adapter(
        self, rows: Float[Tensor, "rows columns"], adapter: PeftAdapter, users: Sequence[int]
    ) -> Bool[Tensor, " columns"]:
        """Set the LoRAs of attention and of each expert to an adapter, in place.

        B is multiplied by the ratio of both LoRA scales. Factors of ranks above the adapter's keep their values, with
        B = 0, as do linears without an adapter.

        Args:
            rows: Parameters before the first round.
            adapter: The adapter.
            users: Index of the user of each row.

        Returns:
            True for columns of linears that the adapter changes.

        Raises:
            RecipeError: The adapter changes other linears than this model, has other shapes, or a higher rank.
        """
        linears = self._linears()
        self._check_adapter(adapter, linears, users)
        ratios = (adapter.scale / self.scales[list(users)]).to(rows)
        views = self.layout.views(rows)
        for name, (name_in_base, _linear) in linears.items():
            if name_in_base not in adapter.factors:
                continue
            a, b = (factor.to(rows) for factor in adapter.factors[name_in_base])
            ratio_per_row = ratios.view(-1, *[1] * (views[f"{name}.b"].dim() - 1))
            views[f"{name}.a"][..., : adapter.rank, :] = a
            views[f"{name}.b"][..., : adapter.rank, :] = ratio_per_row * b.mT
        is_changed = torch.zeros(self.layout.columns, dtype=torch.bool)
        for slot in self.layout.slots:
            linear_name, _dot, factor = slot.name.rpartition(".")
            if factor in ("a", "b") and linears[linear_name][0] in adapter.factors:
                start = self.layout.starts[slot.name]
                is_changed[start : start + slot.size] = True
        return is_changed

    def _check_adapter(
        self, adapter: PeftAdapter, linears: Mapping[str, tuple[str, nn.Module]], users: Sequence[int]
    ) -> None:
        """Check that an adapter fits the model.

        Args:
            adapter: The adapter.
            linears: Result of :meth:`_linears`.
            users: Indices of the users who start from it.

        Raises:
            RecipeError: It changes other linears than the model, its factors have other shapes, or its rank is higher.
        """
        where = f"adapters.start: {adapter.name}"
        smallest_rank = int(self.ranks[list(users)].min())
        if adapter.rank > smallest_rank:
            raise RecipeError(f"adapters.rank: got {smallest_rank}; allowed: from {adapter.rank}, the rank of {where}")
        shapes = {name: tuple(weight_shape(linear)) for name, linear in linears.values()}
        for name, (a, b) in adapter.factors.items():
            if name not in shapes:
                raise RecipeError(f"{where}: got a LoRA of {name!r}; allowed: {', '.join(shapes)}")
            shape = (b.shape[0], a.shape[1])
            if shape != shapes[name]:
                raise RecipeError(
                    f"{where}: {name}: got a weight of shape {shape}; allowed: the base's, {shapes[name]}"
                )

    def _linears(self) -> dict[str, tuple[str, nn.Module]]:
        """Return name in the base and module of each adapted linear, by the prefix of its tensors' names."""
        modules: dict[str, nn.Module] = {name: lora.linear for name, lora in self.adapters.attention.items()}
        for name, mlp in self.adapters.experts.items():
            modules |= {f"{name}.{key}": linear for key, linear in (*mlp.first.items(), ("down", mlp.last))}
        names: dict[int, str] = {}  # by a tensor that both modules share; quantised linears have buffers only
        for name, module in self.base.model.named_modules():
            names |= {id(t): name for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        return {
            prefix: (names[id(next(chain(module.parameters(), module.buffers())))], module)
            for prefix, module in modules.items()
        }

    def only(self, users: Sequence[int]) -> AdaptedModel:
        """Return the model restricted to some users; the adapters keep their width."""
        return replace(self, adapters=self.adapters.only(users))

    def without(self, roles: frozenset[str]) -> Model:
        """Return the model without the experts of these roles and without routers: the other experts are averaged."""
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
        """Return the next-token loss in nats at every position, and each user's load-balancing penalty.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users; row i of ``tensors`` and ``batch`` belongs to ``users[i]``. They may repeat.
            batch: Windows of context + 1 tokens; a negative target has loss 0.
            train: Ignored, as there is no dropout.
            shares: Ignored; for models that mix experts per sample.
            powers: Factor of each user's logits (an inverse temperature); None for 1. Only for heads without bias and
                soft cap, as it multiplies the hidden states.

        Returns:
            The losses, and the penalties (0.0 without load balancing).
        """
        rescaled, present = self.adapters.prepare(tensors, users)
        hidden, penalty = self.states(rescaled, present, inputs_of(batch))
        if powers is not None:
            hidden = hidden * powers.to(hidden).view(-1, 1, 1, 1)
        targets = batch[..., 1:]
        return cross_entropy(hidden, self.head, targets), penalty

    def states(
        self, tensors: Tree, present: Bool[Tensor, "users experts"], inputs: Int[Tensor, "users batch context"]
    ) -> tuple[Float[Tensor, "users batch context width"], Float[Tensor, " users"] | float]:
        """Run the base with the users' adapters up to the last hidden states, which the output head reads.

        Args:
            tensors: The users' tensors, from :meth:`Adapters.prepare`.
            present: Which experts each user has, as numbers may differ, from :meth:`Adapters.prepare`.
            inputs: Token IDs.

        Returns:
            The last hidden states, and each user's load-balancing penalty (0.0 without load balancing).
        """
        self.adapters.assign(tensors, present)
        sequences = inputs.flatten(0, 1)  # (users * batch, context)
        with unpack_in_backward() if self.base.quantised else nullcontext():
            hidden = self.backbone(input_ids=sequences, use_cache=False).last_hidden_state
        return hidden.view(*inputs.shape, -1), self.adapters.penalties()

    def losses_in_fixed_order(
        self, tensors: Tree, users: Sequence[int], batch: Windows
    ) -> Float[Tensor, "users batch context"]:
        """Return the training losses, each with the same bits whether or not other positions have a target.

        Differential privacy needs it: the clipped gradient of an example must not depend on other examples.
        :meth:`losses` computes only positions with a target, so that rounding depends on their number. Here all
        positions are computed, and the losses of those without a target are then set to 0.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            batch: Windows of context + 1 tokens; ``PAD`` and hidden tokens (:func:`hide`) are no targets.
        """
        unhidden = torch.where(batch < 0, hide(batch), batch)  # hiding twice restores a token
        windows_of_targets = unhidden.clamp(min=0)  # every token is a target; token 0 instead of PAD
        losses, _ = self.losses(tensors, users, windows_of_targets, train=True)
        has_no_target = batch[..., 1:] < 0
        return losses.masked_fill(has_no_target, 0.0)

    def predict(self, tensors: Tree, users: Sequence[int], batch: Windows) -> Float[Tensor, "users batch context"]:
        """Return the values from which evaluation computes a score, for text the next-token loss of each position.

        Losses are in nats; they are 0 where the target is negative, as padding is.
        """
        losses, _penalty = self.losses(tensors, users, batch)
        return losses

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return each user's columns as named tensors, contiguous so that matrix products need not copy them."""
        return {name: t.contiguous() for name, t in super().tensors(rows).items()}

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Continue prompts greedily; all users share each forward pass.

        Args:
            tensors: The users' trainable tensors.
            users: Indices of the users.
            prompts: Token ids, padded on the left with ``PAD``.
            limit: Largest number of new tokens.
        """
        num_users, num_prompts, _width = prompts.shape
        prompts = prompts.to(self.device)
        with without_compiling():  # the length grows with each token: do not compile
            self.adapters.bind(tensors, users)
            new_tokens = continue_greedily(self.network, prompts.flatten(0, 1), limit)
        return new_tokens.view(num_users, num_prompts, -1)

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Replace the base's weights by fake tensors, to estimate memory.

        The network is changed in place; the output head is replaced in the returned model only.

        Args:
            fakes: Makes fake tensors, which have a shape and a dtype but no data.

        Returns:
            The model, and the bytes of the replaced weights.
        """
        replaced_bytes = fakes.size_of(self.network)
        fake_head = self.head.with_tensors(lambda real: fakes.of(real, self.device))
        fakes.replace(self.network, self.device)
        return replace(self, head=fake_head), replaced_bytes


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
    middle: bool = False,
    checkpointed: bool = False,
) -> AdaptedModel:
    """Inject adapters into a copy of ``base`` that shares all its weights; ``base`` itself is unchanged.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        settings: Ranks, scale and target modules of the adapters.
        counts: How many generalists and specialists each user has in an MLP.
        routed: Add a router to each MLP with more than one expert.
        compiled: Compile the layers with torch.compile, for the whole process; ignored with ``checkpointed`` and for
            quantised bases.
        gating: How routers compute gates; None: a softmax over logits.
        native_code: Use the C++ kernels of :mod:`comingle.models.kernels.expert_mlp` for the whole process (CPUs only,
            built once per machine); None: as ``compiled``.
        residual: Rank of a frozen low-rank matrix that the server may add to each adapted weight
            (:mod:`comingle.models.lora`); 0 for full rank, None for no such matrix.
        middle: Whether each LoRA has a matrix R between its factors, ``W x + s B R A x``.
        checkpointed: Use activation checkpointing: a layer saves only its input and is recomputed in the backward pass.

    Raises:
        BaseModelError: The family or its head is not one that comingle can adapt.
    """
    head = lm_head(base)
    network = share_weights(base.model)
    adapters = inject(network, settings, counts, routed=routed, gating=gating, residual=residual, middle=middle)
    expert_mlp.set_fusing(compiled)  # whether torch.compile fuses the functions of expert MLPs
    expert_mlp.disable()  # an earlier model of this process may have enabled the kernels
    wants_kernels = compiled if native_code is None else native_code
    if wants_kernels and expert_mlp.fits(base.device, base.dtype) and expert_mlp.enable(cache_folder() / "native"):
        from comingle.models.loss import use_native_code

        use_native_code(network, attention=base.attention == "auto")
    if checkpointed:
        for layer in decoder_layers(network):
            setattr(layer, "forward", _checkpointed_forward(layer))  # noqa: B010 (a method, not a Tensor)
    elif compiled and not base.quantised:
        _cache_custom_autograd()
        _reset_compiler(base.model, adapters)
        _compile_layers(network, adapters)
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


def _compile_layers(network: PreTrainedModel, adapters: Adapters) -> None:
    """Compile the decoder layers with torch.compile, in place, except for expert mixtures, which have fused kernels.

    Args:
        network: The model whose layers carry the adapters.
        adapters: The adapters, with the expert mixtures of all layers.
    """
    for mlp in adapters.experts.values():
        setattr(mlp, "forward", torch.compiler.disable(mlp.forward))  # noqa: B010 (a method, not a Tensor)
    for layer in decoder_layers(network):
        layer.compile()


def _cache_custom_autograd() -> None:
    """Let torch.compile cache graphs with custom autograd functions, such as LoRA's, on disk for later processes."""
    from torch._functorch import config

    if hasattr(config, _CACHE_OPTION):  # missing in some versions of PyTorch
        setattr(config, _CACHE_OPTION, True)


_CACHE_OPTION = "autograd_cache_allow_custom_autograd_functions"


def _checkpointed_forward(layer: nn.Module) -> Callable[..., object]:
    """Return the layer's forward pass with activation checkpointing.

    The recomputation in the backward pass uses the adapters that were bound in the forward pass.
    """
    forward = layer.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> object:
        """Run the layer; with gradients save its input and its adapters, instead of activations."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        saved_attributes = [(module, dict(vars(module))) for module in layer.modules()]  # such as bound factors

        def forward_with_attributes(*args: object, **kwargs: object) -> object:
            """Run the layer with the attributes of the forward pass."""
            for module, attributes in saved_attributes:
                vars(module).update(attributes)
            return forward(*args, **kwargs)

        return checkpoint(forward_with_attributes, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed


_compiled_for: tuple[weakref.ref[nn.Module], Layout] | None = None


def _reset_compiler(model: nn.Module, adapters: Adapters) -> None:
    """Reset torch.compile, unless the previously compiled model had the same base and attention adapters.

    Such a model reuses the compiled code. Without a reset, other models would soon reach PyTorch's limit: by default a
    function is recompiled at most 8 times, and then runs without compiling.

    Args:
        model: The base model.
        adapters: The adapters of the model that is about to be compiled.
    """
    global _compiled_for
    attention_layout = adapters.layout.only({ATTENTION})
    can_share_code = False
    if _compiled_for is not None:
        previous_model, previous_attention_layout = _compiled_for
        can_share_code = previous_model() is model and previous_attention_layout == attention_layout
    if not can_share_code:
        torch.compiler.reset()
    _compiled_for = (weakref.ref(model), attention_layout)
