"""Models stacked over users: small nets trained whole, and language models with a client-level mixture of adaptors.

Parameters ``(users, ...)`` go through ``torch.func.functional_call`` under ``vmap``, so users are a batch dimension. A
user's model may be a mixture (:class:`~comingle.models.routers.ClientMixture`) of C adaptor sets or of C whole models;
then the components are the leading axis of a user's tensors.

The base of language models is one module for all users. Only adaptors and routers are stacked, so ``vmap`` shares each
product with a base weight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from comingle.models.base import Base
from comingle.models.floral.layers import Pairs, centre, precondition
from comingle.models.floral.model import FloralModel, initialisers, roles
from comingle.models.floral.wrapper import floral
from comingle.models.generation import continue_greedily
from comingle.models.loading import Head, backbone, lm_head
from comingle.models.lora import init_zero
from comingle.models.loss import cross_entropy
from comingle.models.model import FakeWeights, Model, call_with, copy_with_tensors, share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.routers import ClientMixture, merge_models, mix_probabilities, weigh_gradient
from comingle.models.scoring import MSE, PAD, Loss, inputs_of
from comingle.models.side_by_side import Folded, FusedNorms, SideBySideNet, channels_last, folds
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import derive
from comingle.utils.trees import (
    ADAPTOR,
    BASE,
    CLIENT_ROUTER,
    GENERALIST,
    ROUTER,
    SPECIALIST,
    STATISTICS,
    Init,
    Layout,
    Slot,
    Tree,
)

# Roles of the parts of a `GatedPair`.
_ROLES = {"shared": GENERALIST, "own": SPECIALIST, "head": SPECIALIST, "gate": ROUTER}


class GatedPair(nn.Module):
    """``head(g_0(x) shared(x) + g_1(x) own(x))``, where g is the softmax of the gate's two outputs.

    ``shared`` and ``own`` map samples to the same number of features (Yi et al. 2024, arXiv:2402.01350).
    """

    def __init__(self, shared: nn.Module, own: nn.Module, head: nn.Module, gate: nn.Module):
        """Combine the submodules.

        Args:
            shared: Feature extractor that users share.
            own: Feature extractor of the user.
            head: Map from features to outputs, of the user.
            gate: Map from samples to two logits, of the weights of ``shared`` and ``own``.
        """
        super().__init__()
        self.shared, self.own, self.head, self.gate = shared, own, head, gate

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch outputs"]:
        """Return the head's outputs for the mixed features."""
        gates = self.gate(inputs).softmax(-1)
        return self.head(gates[:, :1] * self.shared(inputs) + gates[:, 1:] * self.own(inputs))


def gated_pair(shared: nn.Module, local: nn.Module, *, inputs: int, seed: int) -> GatedPair:
    """Combine two nets of one architecture with a linear gate on the flattened sample.

    Args:
        shared: Net whose feature extractor is shared; its head is dropped.
        local: Net whose feature extractor and head are local.
        inputs: Entries of a sample.
        seed: Seed of the gate.

    Raises:
        RecipeError: The nets are a single layer, so there are no features to share.
    """
    (shared, _), (local, head) = split_head(shared), split_head(local)  # one head for both: the local one
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("gate", seed))
        gate = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))
    return GatedPair(shared, local, head, gate)


def split_head(net: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """Return a net's feature extractor and its head, which is its last layer, for the method pFedMoE.

    Raises:
        RecipeError: The net is not an ``nn.Sequential`` of several layers.
    """
    layers = list(net.named_children())
    if layers and not isinstance(net, nn.Sequential):
        kind = type(net).__name__
        raise RecipeError(f"method pfedmoe: net {kind} has no defined last layer; allowed: an nn.Sequential")
    if not isinstance(net, nn.Sequential) or len(layers) < 2:
        raise RecipeError("method pfedmoe: net 'linear' is one layer, without features to share; allowed: deeper nets")
    return nn.Sequential(OrderedDict(layers[:-1])), layers[-1][1]


def assign_role(slot: Slot) -> Slot:
    """Return the description of a tensor of a :class:`GatedPair` with the role of the submodule that it belongs to.

    For example, tensors of the submodule "own" are "specialist". Running statistics keep the role "statistics". Their
    field ``factor`` becomes the submodule's name, so that a recipe can address the statistics of one submodule, such as
    "statistics.own".

    Args:
        slot: Name, shape and role of the tensor.
    """
    submodule = slot.name.partition(".")[0]
    if slot.roles == (STATISTICS,):
        return replace(slot, factor=submodule)
    return replace(slot, roles=(_ROLES[submodule],))


_ORDER = (BASE, ADAPTOR, GENERALIST, SPECIALIST, ROUTER, STATISTICS)
"""Order of roles in a layout."""


def layout_of(nets: Sequence[nn.Module], *, side_by_side: bool) -> Layout:
    """Return the layout of a user's tensors: their names, shapes and roles, in the order of :data:`_ORDER`.

    Args:
        nets: Nets of one architecture with their initial values. Only the first is used unless ``side_by_side``.
        side_by_side: Whether a user has all nets, as components of a mixture with a router.
    """
    if side_by_side:
        slots = [*_component_slots(nets), _router_slot(len(nets))]
    else:
        slots = _adapted_slots(nets[0]) if isinstance(nets[0], FloralModel) else _net_slots(nets[0])
    return Layout(slots=tuple(sorted(slots, key=lambda slot: _ORDER.index(slot.roles[0]))))


def row_of(net: nn.Module, layout: Layout) -> Float[Tensor, " columns"]:
    """Return a net's parameters and running statistics as one flat vector, in the order of the layout's slots."""
    tensors = _tensors(net)
    return torch.cat([tensors[slot.name][0].flatten().cpu() for slot in layout.slots])


def _router_slot(clusters: int) -> Slot:
    """Return name, shape, role and initialiser of the client-level router's logits."""
    return Slot(name=CLIENT_ROUTER, shape=(clusters,), roles=(ROUTER,), init=init_zero)


def _tensors(net: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """Return a net's parameters and running statistics with their roles, by name; other buffers are not stacked."""
    by_name = {name: (p.detach(), BASE) for name, p in net.named_parameters()}
    return by_name | {name: (b, STATISTICS) for name, b in net.named_buffers() if b.is_floating_point()}


def _net_slots(net: nn.Module) -> list[Slot]:
    """Return name, shape, role, initial value and part of the net of each tensor of a net without adaptors.

    All parameters have the role "base", except in a :class:`GatedPair`, where the role depends on the submodule, such
    as "specialist" for a user's own feature extractor.
    """
    parts, slots = _module_parts(net), []
    for name, (t, role) in _tensors(net).items():
        module_name = name.rpartition(".")[0]
        part = parts[module_name]  # "norm", "head" or "body"
        slots.append(Slot(name=name, shape=tuple(t.shape), roles=(role,), init=_constant_init(t), part=part))
    return [assign_role(slot) for slot in slots] if isinstance(net, GatedPair) else slots


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def _module_parts(net: nn.Module) -> dict[str, str]:
    """Map each module to "norm", "head" (the last module with parameters) or "body", by name.

    Placements can treat these parts differently, such as a local head.
    """
    head = [name.rpartition(".")[0] for name, _ in net.named_parameters()][-1:]  # empty without parameters
    parts = {}
    for name, module in net.named_modules():
        parts[name] = "norm" if isinstance(module, _NORMS) else "head" if name in head else "body"
    return parts


def _component_slots(nets: Sequence[nn.Module]) -> list[Slot]:
    """Return names, shapes, roles and initial values of the tensors of a mixture of whole models.

    A tensor holds all components, ``(components, ...)``. Parameters have the role "adaptor", because servers average
    each adaptor with its users' mixture weights.

    Args:
        nets: One net per component, all of one architecture.
    """
    components = [_tensors(net) for net in nets]
    slots = []
    for name, (_, role) in components[0].items():
        value = torch.stack([tensors[name][0] for tensors in components])
        new_role = ADAPTOR if role == BASE else role
        roles = (new_role,) * len(nets)
        slots.append(Slot(name=name, shape=tuple(value.shape), roles=roles, init=_constant_init(value)))
    return slots


def _adapted_slots(model: FloralModel) -> list[Slot]:
    """Return name, shape, roles and initialiser of each tensor of a net with adaptors.

    Tensors have the role "base", "adaptor", "router" or "statistics" (running means and variances of norms).
    """
    inits, values = initialisers(model), dict(model.named_parameters()) | dict(model.named_buffers())
    slots, layers = [], model.layers()
    for name, role in roles(model).items():
        value = values[name].detach()
        # The leading axis of an adaptor is that of the clusters; a slot names the role of each index of that axis.
        roles_along_axis = (role,) * (model.num_clusters if role == ADAPTOR else 1)
        init = inits.get(name, _constant_init(value))  # base tensors keep their values
        factor = ""
        if role == STATISTICS:  # of an adapted norm, or of a norm of the base
            factor = "adaptor" if name.rpartition(".")[0] in layers else "base"
        slots.append(Slot(name=name, shape=tuple(value.shape), roles=roles_along_axis, init=init, factor=factor))
    return slots


def _constant_init(value: Tensor) -> Init:
    """Return an initialiser that gives all users a copy of this value."""
    initial = value.detach().clone().cpu()
    return lambda shape, generator: initial


Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs ``(users, batch, ...)``, targets ``(users, batch, ...)`` and presence ``(users, batch)``."""


_RANDOM = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules of torch that may draw random numbers; modules from elsewhere are assumed to."""


@dataclass(frozen=True, kw_only=True)
class StackedModel(Model):
    """The nets of all users: one module that is called with each user's tensors, which are stacked over users.

    Args:
        name: Name of the net.
        net: One copy of the net; its own values are not used.
        layout: Columns of a user's copy.
        users: Number of users.
        device: Device of the tensors.
        dtype: Dtype of the computations.
        mixture: How components are mixed; None without components.
        others: Further initial models for the server.
        loss: Loss of outputs and targets.
        compiled: Allow a native form of the net.
        batchwise: A sample's output in training depends on its batch.
    """

    name: str
    net: nn.Module
    layout: Layout
    users: int
    device: torch.device
    dtype: torch.dtype
    mixture: ClientMixture | None = None
    others: Float[Tensor, "others columns"] | None = None
    loss: Loss = MSE
    compiled: bool = False
    batchwise: bool = False

    @property
    def mixes_probabilities(self) -> bool:
        """Whether predictions are mixed as probabilities, not as outputs."""
        return self.loss.classes and self.mixture is not None and self.mixture.at == "samples"

    @property
    def other_initial_rows(self) -> Float[Tensor, "others columns"]:
        """Further initial models for the server, one per row, initialised differently from the users' own."""
        return torch.zeros(0, self.layout.columns) if self.others is None else self.others

    def only(self, users: Sequence[int]) -> StackedModel:
        """Return the model of some users, who are all alike."""
        return replace(self, users=len(users))

    @property
    def base_parameters(self) -> int:
        """Number of parameters of one copy of the net."""
        return sum(p.numel() for p in self.net.parameters())

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """Zeros; ranks belong to the net, not to users."""
        return torch.zeros(self.users, dtype=torch.int64)

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """Ones; users have no scales of their own."""
        return torch.ones(self.users)

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return True for all: every user has every parameter."""
        return torch.ones(1, self.layout.columns, dtype=torch.bool, device=self.device).expand(self.users, -1)

    @cached_property
    def _is_random(self) -> bool:
        """Whether a training pass of the net may draw random numbers."""
        classes = {type(m) for m in self.net.modules()}
        return any(issubclass(c, _RANDOM) or not c.__module__.startswith("torch.nn.") for c in classes)

    @contextmanager
    def randomness(self, *key: object) -> Iterator[None]:
        """Seed torch's random numbers in the context, such as dropout, so that a resumed run draws the same ones.

        Args:
            *key: Parts of the seed, which identify the pass: the run's seed, the users and the number of the step.
        """
        if not self._is_random:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []  # in addition to the CPU
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive("dropout", *(str(part) for part in key)))
            yield

    # ---------------------------------------------------------------- passes

    def losses(
        self,
        tensors: Tree,
        users: Sequence[int],
        batch: Any,
        *,
        train: bool = False,
        shares: Float[Tensor, "users clusters batch"] | None = None,
    ) -> tuple[Float[Tensor, "users batch ..."], float]:
        """Return the loss of every sample, 0 for padding, and 0.0 as the load-balancing penalty.

        For a mixture of losses, the value is ``sum_c pi_c f(w_c)`` with the loss f and the components' weights w_c.
        Each component's gradient is that of its own loss alone (FLoRAL, eq. 4), as pi weighs it in the aggregation.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            users: Ignored, as users differ only in their tensors.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
            shares: Mixture weights of each sample; None for the users' weights.
        """
        if self.mixture is None or self.mixture.at not in ("losses", "samples"):
            return self._model_losses(tensors, batch, train), 0.0
        losses = self.component_losses(tensors, users, batch, train=train)
        if self.mixture.at == "samples":
            sample_shares = self.shares(tensors).unsqueeze(2) if shares is None else shares
            return (sample_shares * losses).sum(1), 0.0
        weights, unweighted = self.shares(tensors).to(losses.dtype), losses.sum(1)
        mixed = torch.einsum("uc,uc...->u...", weights, losses)
        # The value is that of the mixture, the gradient that of the unweighted sum.
        return mixed.detach() + (unweighted - unweighted.detach()), 0.0

    def _model_losses(self, tensors: Tree, batch: Any, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the loss of every sample under the users' models, whether they are mixtures or not; 0 for padding.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
        """
        inputs, targets, present = batch
        return self.loss(self._outputs(tensors, inputs, train), targets).masked_fill(~present, 0)

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False
    ) -> Float[Tensor, "users clusters batch"]:
        """Return the loss of every sample for each component of the users' mixtures by itself; 0 for padding.

        The axis ``clusters`` has the components.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            users: Ignored, as users differ only in their tensors.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
        """
        inputs, targets, present = batch
        outputs = self._components(tensors, inputs, train)
        targets_per_component = targets.unsqueeze(1).expand(*outputs.shape[:2], *targets.shape[1:])
        return self.loss(outputs, targets_per_component).masked_fill(~present.unsqueeze(1), 0)

    def predict(
        self, tensors: Tree, users: Sequence[int], batch: Float[Tensor, "users batch ..."]
    ) -> Float[Tensor, "users batch ..."]:
        """Return the outputs for inputs, in evaluation mode.

        Args:
            tensors: The users' tensors.
            users: Ignored, as users differ only in their tensors.
            batch: Inputs alone, without targets.
        """
        return self._outputs(tensors, batch, train=False)

    def shares(self, tensors: Tree) -> Float[Tensor, "users *layers clusters"]:
        """Return each user's mixture weights pi; in training the engine has added noise to the router's logits."""
        assert self.mixture is not None
        return self.mixture.shares(tensors[CLIENT_ROUTER])

    def _outputs(self, tensors: Tree, inputs: Tensor, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of the users' models.

        A user's model is a single net, a mixture of C nets, or a net with a mixture of C adaptor sets. The mixture's
        settings say whether weights, outputs or predicted probabilities are mixed.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        mixture = self.mixture
        if mixture is None:
            return self._run_alone(train, tensors, inputs)
        if mixture.merges_models:  # nets mixed in their weights
            return self._merged_outputs(tensors, inputs, train)
        shares = self.shares(tensors)
        if mixture.of == "models":  # nets mixed in their outputs
            outputs = self._components(tensors, inputs, train)
            if self.mixes_probabilities:
                return mix_probabilities(outputs, shares)
            return torch.einsum("uc,uc...->u...", shares, outputs)
        # Adaptor sets, which the net's own forward pass mixes with the weights pi.
        return self._run_users(
            train, lambda user_tensors, x, pi: self._call_user(user_tensors, x, mixture=pi), tensors, inputs, shares
        )

    def _merged_outputs(self, tensors: Tree, inputs: Tensor, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of one merged net per user: the mixture ``sum_c pi_c w_c`` of its C components' weights.

        In training only the merged net runs, so its updated running statistics are copied to all components.

        Args:
            tensors: The users' tensors ``(users, clusters, ...)``; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        merged = merge_models(tensors, self.shares(tensors))
        statistics = {s.name: merged[s.name].detach() for s in self.layout.only({STATISTICS}).slots}
        outputs = self._run_alone(train, merged | statistics, inputs)
        for name, value in statistics.items() if train else ():
            tensors[name].copy_(value.unsqueeze(1).expand_as(tensors[name]))  # over (users, clusters, ...)
        return outputs

    def _components(self, tensors: Tree, inputs: Tensor, train: bool) -> Float[Tensor, "users clusters batch ..."]:
        """Return the outputs of each component of the users' mixtures alone.

        A component is a whole model, or the base with one set of adaptors. In training, running statistics in
        ``tensors`` change.

        Args:
            tensors: The users' tensors.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        assert self.mixture is not None
        if self.mixture.of != "models":
            return self._adaptor_set_outputs(tensors, inputs, train)
        models = {name: t for name, t in tensors.items() if name != CLIENT_ROUTER}
        over_components = vmap(self._call_user, in_dims=(0, None), randomness="different")
        return self._run_users(train, over_components, models, inputs)

    def _adaptor_set_outputs(
        self, tensors: Tree, inputs: Tensor, train: bool
    ) -> Float[Tensor, "users clusters batch ..."]:
        """Return the outputs of the base with each of the C adaptor sets alone.

        The net's forward pass mixes all adaptor sets, so a one-hot mixture selects one. In training each adaptor set
        updates a copy stats_c of the user's running statistics, and the user gets the mean ``sum_c pi_c stats_c``.

        Args:
            tensors: The users' tensors.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        assert self.mixture is not None
        clusters = self.mixture.clusters
        statistics = {slot.name for slot in self.layout.only({STATISTICS}).slots} if train else set()
        copies = {name: tensors[name].unsqueeze(1).repeat_interleave(clusters, 1) for name in statistics}
        # A trained base gets from each component's loss a gradient with the weight pi_c.
        trained_base = {slot.name for slot in self.layout.only({BASE}).slots if tensors[slot.name].requires_grad}
        weighted = {name: weigh_gradient(tensors[name], self.shares(tensors).detach()) for name in trained_base}
        # One user's tensors have a leading component axis only if they are in `copies` or `weighted`. All others, such
        # as the adaptor sets, are the same for every component.
        component_axes = {name: 0 if name in statistics | trained_base else None for name in tensors}
        over_components = vmap(
            lambda user_tensors, x, pi: self._call_user(user_tensors, x, mixture=pi),
            in_dims=(component_axes, None, 0),
            randomness="different",
        )
        one_hot = torch.eye(clusters, dtype=self.dtype, device=inputs.device)
        outputs = self._run_users(
            train,
            lambda user_tensors, x: over_components(user_tensors, x, one_hot),
            {**tensors, **copies, **weighted},
            inputs,
        )
        for name, copied in copies.items():
            tensors[name].copy_(torch.einsum("uc,uc...->u...", self.shares(tensors).detach(), copied))
        return outputs

    def _run_users(self, train: bool, call: Callable[..., Tensor], *stacked: Any) -> Tensor:
        """Call a function for each user under ``vmap`` and stack the results.

        Args:
            train: Run the net in training mode.
            call: The function of one user's tensors, inputs and further arguments.
            *stacked: Arguments of the function, each with a leading user axis; the first is a tree of tensors.
        """
        self.net.train(train)
        tensors, *others = stacked
        # Both for speed: FusedNorms runs each norm once for all users, channels_last speeds up small convolutions.
        with FusedNorms():
            return vmap(call, randomness="different")(channels_last(tensors), *others)

    def _run_alone(self, train: bool, tensors: Tree, inputs: Tensor) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of one net per user, without a mixture, computed in the fastest way that supports the net.

        Args:
            train: Run in training mode.
            tensors: One net's tensors per user, ``(users, ...)``.
            inputs: Samples ``(users, batch, ...)``.
        """
        native_net = self.form  # convolutions of all users at once in C++; None if the net does not support it
        if native_net is not None and native_net.takes(inputs):
            return native_net(tensors, inputs, train=train)
        if not self._can_fold:
            return self._run_users(train, self._call_user, tensors, inputs)  # under vmap, the slowest way
        # All users' samples as one batch; inside Folded, F.linear multiplies each user's samples by its weights.
        self.net.train(train)
        with Folded():
            return self._call_user(tensors, inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])

    @cached_property
    def form(self) -> SideBySideNet | None:
        """The net rewritten to run the convolutions of all users at once in C++; None to use ``vmap``."""
        if not self.compiled:
            return None
        from comingle.models.side_by_side import native_net

        return native_net(self.net)

    @cached_property
    def _can_fold(self) -> bool:
        """Whether the net can process all users' samples as one batch, which is faster than ``vmap``."""
        return folds(self.net)

    def _call_user(self, user_tensors: Tree, inputs: Tensor, **options: object) -> Tensor:
        """Return the net's outputs for one user; ``options`` are further arguments of its ``forward``."""
        return call_with(self.net, user_tensors, inputs, options=options)

    # ---------------------------------------------------------------- adaptors

    @cached_property
    def _adaptor_pairs(self) -> Pairs | None:
        """Names of the adaptors' tensors; None for a net without adaptors."""
        return self.net.pairs() if isinstance(self.net, FloralModel) else None

    @torch.no_grad()
    def precondition(self, tensors: Tree, gradients: Tree) -> Tree:
        """Return the gradients, those of adaptors preconditioned (FLoRAL eq. 36)."""
        return gradients if self._adaptor_pairs is None else precondition(self._adaptor_pairs, tensors, gradients)

    @torch.no_grad()
    def centre(self, tensors: Tree, shares: Float[Tensor, " clusters"]) -> Tree:
        """Move the mean of the clusters' adaptors into the base (FLoRAL eq. 37); a net without adaptors is unchanged.

        Args:
            tensors: Tensors of base and adaptors by name.
            shares: Weight p(c) of each cluster in the mean: how much all users together use it. The weights sum to 1.

        Returns:
            New tensors by name. Those of adaptors hold the differences from the mean.
        """
        return tensors if self._adaptor_pairs is None else centre(self._adaptor_pairs, tensors, shares)


def stack(
    nets: Sequence[nn.Module],
    *,
    name: str,
    users: int,
    mixture: ClientMixture | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    loss: Loss = MSE,
    compiled: bool = False,
    batchwise: bool = False,
) -> StackedModel:
    """Stack copies of a net over users.

    All users start from the values of the given nets; with several nets and no mixture, from the first.

    Args:
        nets: One net, which is a :class:`FloralModel` for a mixture of adaptors; or several with different initial
            values: one per cluster for a mixture of whole models, or the server's initial models without a mixture.
        name: Name of the model.
        users: Number of users.
        mixture: How components are mixed.
        device: Device of the tensors; the CPU by default.
        dtype: Dtype of the computations.
        loss: Loss of outputs and targets.
        compiled: Allow convolutions in C++ for all users at once, if the net supports it.
        batchwise: A sample's output in training depends on the other samples of its batch. Norms of torch are found
            automatically; this is for nets that mix samples in other ways.
    """
    device = device or torch.device("cpu")
    nets = [net.to(device, dtype) for net in nets]
    whole_models = mixture is not None and mixture.of == "models"
    layout = layout_of(nets, side_by_side=whole_models)
    # Further initial models for the server, each a row of values.
    others = None if whole_models or len(nets) == 1 else torch.stack([row_of(net, layout) for net in nets[1:]])
    return StackedModel(
        name=name,
        net=nets[0].requires_grad_(False),
        layout=layout,
        users=users,
        device=device,
        dtype=dtype,
        mixture=mixture,
        others=others,
        loss=loss,
        compiled=compiled,
        batchwise=batchwise or any(map(_depends_on_batch, nets[0].modules())),
    )


def _depends_on_batch(module: nn.Module) -> bool:
    """Return whether a module of torch is a batch norm or another norm that tracks running statistics."""
    norms = nn.modules.batchnorm
    return isinstance(module, norms._BatchNorm) or (isinstance(module, norms._NormBase) and module.track_running_stats)


@dataclass(frozen=True, kw_only=True)
class MixedLanguageModel(StackedModel):
    """Language models of users who mix several sets of LoRA adaptors over one frozen base."""

    base: Base
    head: Head
    embedding: nn.Module

    def _model_losses(
        self, tensors: Tree, batch: Int[Tensor, "users batch window"], train: bool
    ) -> Float[Tensor, "users batch context"]:
        """Return the next-token loss in nats at every position; 0 where the target is negative.

        Args:
            tensors: The users' tensors.
            batch: Windows of context + 1 tokens.
            train: Without effect, as language models always run in evaluation mode.
        """
        inputs, targets = inputs_of(batch), batch[..., 1:]
        return cross_entropy(self._outputs(tensors, inputs, train), self.head, targets)

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"], *, train: bool = False
    ) -> Float[Tensor, "users clusters batch context"]:
        """Return the loss in nats at every position for each component of the users' mixtures by itself.

        The axis ``clusters`` has the components.

        Args:
            tensors: The users' tensors.
            users: Ignored, as users differ only in their tensors.
            batch: Windows of context + 1 tokens; a negative target has loss 0.
            train: Without effect, as language models always run in evaluation mode.
        """
        inputs, targets = inputs_of(batch), batch[..., 1:]
        hidden = self._components(tensors, inputs, train)
        targets_per_component = targets.unsqueeze(1).expand(hidden.shape[:-1])
        return cross_entropy(hidden, self.head, targets_per_component)

    def predict(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"]
    ) -> Float[Tensor, "users batch context"]:
        """Return the losses with adaptors mixed in the weights, whatever level the mixture has in training."""
        return self._model_losses(tensors, batch, train=False)

    @torch.no_grad()
    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Continue the prompts greedily, one user after another.

        Args:
            tensors: The users' tensors.
            users: Ignored, as users differ only in their tensors.
            prompts: Token ids, padded on the left with ``PAD``.
            limit: Largest number of new tokens.
        """
        continued, prompts = [], prompts.to(self.device)
        # Lengths change with every token, so compiling would not pay off.
        with torch.compiler.set_stance("force_eager"):
            for row, user_prompts in enumerate(prompts):
                user_tensors = {name: t[row : row + 1] for name, t in tensors.items()}
                personal = self.of_one_user(user_tensors)
                (mixture,) = self.shares(user_tensors)
                with personal.mixing(mixture):
                    continued.append(continue_greedily(cast(PreTrainedModel, personal.model), user_prompts, limit))
        width = max(tokens.shape[1] for tokens in continued)
        return torch.stack([F.pad(tokens, (0, width - tokens.shape[1]), value=PAD) for tokens in continued])

    def of_one_user(self, tensors: Tree) -> FloralModel:
        """Return one user's causal language model with its adaptors; the base's weights are shared.

        Args:
            tensors: The user's tensors, ``(1, ...)`` by name.

        Returns:
            A wrapper with the adaptors and the router, whose ``model`` is the language model of transformers.
        """
        base, net = self.base.model, self.net
        assert isinstance(net, FloralModel)
        copied = copy_with_tensors(net, tensors, shared=(*base.parameters(), *base.buffers()))
        # `copied` holds the backbone with adaptors. Put it into a causal language model, in place of its own backbone.
        network = share_weights(base)
        setattr(network, network.base_model_prefix, copied.model)
        copied.model = network
        return copied

    @property
    def base_parameters(self) -> int:
        """Number of parameters of the base."""
        return self.base.model.num_parameters()

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Replace the weights of the base, which no user trains, by fake tensors, to estimate memory.

        Fake tensors have a shape and a dtype but no data. The net of this model is changed in place; the output head is
        replaced in the returned model only.

        Args:
            fakes: Makes the fake tensors.

        Returns:
            The model, and the bytes of the replaced weights.
        """
        size = fakes.size_of(self.base.model)
        head = self.head.with_tensors(lambda real: fakes.of(real, self.device))  # the head is no part of the net
        fakes.replace(self.net, self.device)
        return replace(self, head=head), size

    def _run_users(self, train: bool, call: Callable[..., Tensor], *stacked: Any) -> Tensor:
        """Embed the tokens, then call the function for each user; always in evaluation mode, without dropout.

        Args:
            train: Ignored.
            call: The function of one user's tensors, inputs and further arguments.
            *stacked: Arguments of the function, each with a leading user axis: a tree of tensors, the tokens, and
                others.
        """
        # Embed first: some families search the token ids for padding, which vmap does not support.
        tensors, inputs, *rest = stacked
        return super()._run_users(False, call, tensors, self.embedding(inputs), *rest)

    def _call_user(self, user_tensors: Tree, inputs: Tensor, **options: object) -> Tensor:
        """Return one user's last hidden states for embedded tokens ``(batch, context, width)``."""
        options |= {"inputs_embeds": inputs, "use_cache": False}
        return call_with(self.net, user_tensors, options=options).last_hidden_state


def mix_language_model(
    base: Base, mixture: ClientMixture, *, users: int, rank: int, alpha: float
) -> MixedLanguageModel:
    """Add LoRA adaptors to every linear of a base's blocks: one for each component of the users' mixtures.

    Args:
        base: The frozen base; it is not changed.
        mixture: How components are mixed.
        users: Number of users.
        rank: Rank of the adaptors.
        alpha: Factor of the adaptors' outputs.
    """
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
        generator=torch.Generator(),  # values are drawn again for each user; torch's global generator stays untouched
    )
    stacked = stack([net], name=base.name, users=users, mixture=mixture, device=base.device, dtype=base.dtype)
    # Users train and upload adaptors and routers, so the frozen base's tensors are left out.
    slots = tuple(s for s in stacked.layout.slots if not {BASE, STATISTICS} & set(s.roles))
    fields = {**vars(stacked), "layout": Layout(slots=slots)}
    embedding = network.get_input_embeddings()
    return MixedLanguageModel(**fields, base=base, head=lm_head(base), embedding=embedding)
