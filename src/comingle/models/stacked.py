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
from comingle.models.hardware import without_compiling
from comingle.models.loading import Head, backbone, lm_head
from comingle.models.lora import init_zero
from comingle.models.loss import cross_entropy
from comingle.models.model import FakeWeights, Model, call_with, copy_with_tensors, share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.routers import ClientMixture, merge_models, mix_probabilities, weigh_gradient
from comingle.models.scoring import MSE, PAD, Loss, inputs_of
from comingle.models.side_by_side import Folded, FusedNorms, SideBySideNet, can_fold, channels_last
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

# Roles of the submodules of a `GatedPair`.
_ROLE_BY_SUBMODULE = {"shared": GENERALIST, "own": SPECIALIST, "head": SPECIALIST, "gate": ROUTER}


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
            gate: Map from a sample to two logits: of ``shared``, then of ``own``.
        """
        super().__init__()
        self.shared, self.own, self.head, self.gate = shared, own, head, gate

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch outputs"]:
        """Return the head's outputs for the features of both extractors, mixed by the gate's two probabilities."""
        gates = self.gate(inputs).softmax(-1)
        return self.head(gates[:, :1] * self.shared(inputs) + gates[:, 1:] * self.own(inputs))


def gated_pair(shared: nn.Module, local: nn.Module, *, inputs: int, seed: int) -> GatedPair:
    """Combine two nets of one architecture with a linear gate on the flattened sample.

    Args:
        shared: Net whose feature extractor is shared; its head is dropped.
        local: Net whose feature extractor and head are local.
        inputs: Number of entries of a flattened sample.
        seed: Seed of the gate.

    Raises:
        RecipeError: The nets are a single layer, so there are no features to share.
    """
    shared_features, _ = split_head(shared)
    local_features, local_head = split_head(local)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive("gate", seed))
        gate = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))
    return GatedPair(shared_features, local_features, local_head, gate)


def split_head(net: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """Return a net's feature extractor and its head, which is its last layer, for the method pFedMoE.

    Raises:
        RecipeError: The net is not an ``nn.Sequential`` of several layers.
    """
    named_layers = list(net.named_children())
    if named_layers and not isinstance(net, nn.Sequential):
        class_name = type(net).__name__
        raise RecipeError(f"method pfedmoe: net {class_name} has no defined last layer; allowed: an nn.Sequential")
    if not isinstance(net, nn.Sequential) or len(named_layers) < 2:
        raise RecipeError("method pfedmoe: net 'linear' is one layer, without features to share; allowed: deeper nets")
    *named_features, (_, head) = named_layers
    return nn.Sequential(OrderedDict(named_features)), head


def assign_role(slot: Slot) -> Slot:
    """Return the slot of a tensor of a :class:`GatedPair` (a shared and an own net) with the role of its submodule.

    For example, "own.0.weight" gets the role "specialist". The running statistic "own.1.running_mean" keeps the role
    "statistics" and gets the factor "own", so that a recipe can name "statistics.own".

    Args:
        slot: Name, shape and role of the tensor.
    """
    submodule, _, _ = slot.name.partition(".")
    if slot.roles == (STATISTICS,):
        return replace(slot, factor=submodule)
    return replace(slot, roles=(_ROLE_BY_SUBMODULE[submodule],))


_ROLE_ORDER = (BASE, ADAPTOR, GENERALIST, SPECIALIST, ROUTER, STATISTICS)
"""Order of roles in a layout."""


def layout_of(nets: Sequence[nn.Module], *, side_by_side: bool) -> Layout:
    """Return the layout of a user's tensors: their names, shapes and roles, in the order of :data:`_ROLE_ORDER`.

    Args:
        nets: Nets of one architecture with their initial values. Only the first is used unless ``side_by_side``.
        side_by_side: Each user has a mixture of all nets, and a router.
    """
    if side_by_side:
        slots = [*_component_slots(nets), _router_slot(len(nets))]
    elif isinstance(nets[0], FloralModel):
        slots = _adapted_slots(nets[0])
    else:
        slots = _net_slots(nets[0])
    slots.sort(key=lambda slot: _ROLE_ORDER.index(slot.roles[0]))
    return Layout(slots=tuple(slots))


def row_of(net: nn.Module, layout: Layout) -> Float[Tensor, " columns"]:
    """Return a net's parameters and running statistics as one flat vector, in the order of the layout's slots."""
    tensors_and_roles = _tensors_and_roles(net)
    flat = []
    for slot in layout.slots:
        tensor, _role = tensors_and_roles[slot.name]
        flat.append(tensor.flatten().cpu())
    return torch.cat(flat)


def _router_slot(clusters: int) -> Slot:
    """Return name, shape, role and initialiser of the client-level router's logits."""
    return Slot(name=CLIENT_ROUTER, shape=(clusters,), roles=(ROUTER,), init=init_zero)


def _tensors_and_roles(net: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """Return a net's parameters and running statistics by name, each with its role, "base" or "statistics".

    Integer buffers, such as the number of batches that a batch norm has seen, are left out.
    """
    by_name = {name: (parameter.detach(), BASE) for name, parameter in net.named_parameters()}
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            by_name[name] = (buffer, STATISTICS)
    return by_name


def _net_slots(net: nn.Module) -> list[Slot]:
    """Return the :class:`Slot` (name, shape, role, initial value, part) of each tensor of a net without adaptors.

    Parameters have the role "base", or in a :class:`GatedPair` (two experts and a gate) that of their submodule
    (:func:`assign_role`).
    """
    parts_by_module = _module_parts(net)  # such as {"0": "body", "1": "norm", "4": "head"}
    slots = []
    for name, (tensor, role) in _tensors_and_roles(net).items():
        module_name, _, _ = name.rpartition(".")
        slot = Slot(
            name=name,
            shape=tuple(tensor.shape),
            roles=(role,),
            init=_constant_init(tensor),
            part=parts_by_module[module_name],
        )
        slots.append(assign_role(slot) if isinstance(net, GatedPair) else slot)
    return slots


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def _module_parts(net: nn.Module) -> dict[str, str]:
    """Map each module's name to its part of the net: "norm", "head" (the last module with parameters) or "body".

    Recipes and methods can share or train a single part, such as "base.head".
    """
    head = None
    for name, _ in net.named_parameters():
        head, _, _ = name.rpartition(".")  # the module of the last parameter
    part_by_module = {}
    for name, module in net.named_modules():
        if isinstance(module, _NORMS):
            part_by_module[name] = "norm"
        elif name == head:
            part_by_module[name] = "head"
        else:
            part_by_module[name] = "body"
    return part_by_module


def _component_slots(nets: Sequence[nn.Module]) -> list[Slot]:
    """Return the :class:`Slot` (name, shape, roles, initial value) of each tensor of a mixture of whole models.

    A tensor holds all components, ``(components, ...)``.

    Parameters of the nets have the role "adaptor" instead of "base", so that servers weigh each component by the users'
    mixtures.

    Args:
        nets: One net per component, all of one architecture.
    """
    components = [_tensors_and_roles(net) for net in nets]
    slots = []
    for name, (_, role) in components[0].items():
        tensors = []
        for component in components:
            component_tensor, _ = component[name]
            tensors.append(component_tensor)
        stacked = torch.stack(tensors)
        component_role = ADAPTOR if role == BASE else role
        roles = (component_role,) * len(nets)
        slots.append(Slot(name=name, shape=tuple(stacked.shape), roles=roles, init=_constant_init(stacked)))
    return slots


def _adapted_slots(model: FloralModel) -> list[Slot]:
    """Return a description of each tensor of a net with adaptors: name, shape, role and initial value.

    The role says what a method may do with the tensor: "base", "adaptor", "router" or "statistics" (running means and
    variances of norms).
    """
    initialiser_by_name = initialisers(model)  # of adaptors and routers
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    adapted_layers = model.layers()
    slots = []
    for name, role in roles(model).items():
        value = tensors[name].detach()
        # An adaptor has a leading axis of clusters, and a slot gives the role of each index of that axis.
        roles_along_axis = (role,) * model.num_clusters if role == ADAPTOR else (role,)
        init = initialiser_by_name.get(name, _constant_init(value))
        factor = ""
        if role == STATISTICS:  # recipes can name "statistics.adaptor" and "statistics.base"
            module_name, _, _ = name.rpartition(".")
            factor = "adaptor" if module_name in adapted_layers else "base"
        slots.append(Slot(name=name, shape=tuple(value.shape), roles=roles_along_axis, init=init, factor=factor))
    return slots


def _constant_init(value: Tensor) -> Init:
    """Return an initialiser that gives all users a copy of this value."""
    initial = value.detach().clone().cpu()

    def init(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return initial

    return init


Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs ``(users, batch, ...)``, targets ``(users, batch, ...)`` and presence ``(users, batch)``."""


_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules of torch that may draw random numbers; modules from elsewhere are assumed to."""


@dataclass(frozen=True, kw_only=True)
class StackedModel(Model):
    """One net architecture for all users, whose tensors are stacked: ``(users, ...)`` for each parameter.

    Args:
        name: Name of the net.
        net: One copy of the net; its own values are not used.
        layout: Columns of a user's copy.
        users: Number of users.
        device: Device of the tensors.
        dtype: Dtype of the computations.
        mixture: How components are mixed; None without components.
        others: Initial models of a server that keeps several, without the first, which is the users' initial model.
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
        """True if the components' predictions are averaged as class probabilities, not as outputs (logits).

        This is so for classifiers whose mixture assigns each sample to components (FedEM).
        """
        return self.loss.classes and self.mixture is not None and self.mixture.at == "samples"

    @property
    def other_initial_rows(self) -> Float[Tensor, "others columns"]:
        """Initial models of a server that keeps several, without the first, one per row.

        Each is a net with other initial values; all users start from the first model.
        """
        return torch.zeros(0, self.layout.columns) if self.others is None else self.others

    def only(self, users: Sequence[int]) -> StackedModel:
        """Return the model of some users; only their number matters."""
        return replace(self, users=len(users))

    @property
    def base_parameters(self) -> int:
        """Number of parameters of one copy of the net."""
        return sum(p.numel() for p in self.net.parameters())

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """Zeros in place of the users' LoRA ranks: all users have nets of the same shape, so nothing is padded."""
        return torch.zeros(self.users, dtype=torch.int64)

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """Ones in place of the users' LoRA scales, which nets of the same shape do not have."""
        return torch.ones(self.users)

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return True everywhere, as every user has every parameter; ``ranks`` is ignored."""
        columns = self.layout.columns
        return torch.ones(1, columns, dtype=torch.bool, device=self.device).expand(self.users, columns)

    @cached_property
    def _is_random(self) -> bool:
        """True if a training pass of the net may draw random numbers."""
        for module_class in {type(module) for module in self.net.modules()}:
            is_from_torch = module_class.__module__.startswith("torch.nn.")
            if issubclass(module_class, _RANDOM_MODULES) or not is_from_torch:  # any other class may draw
                return True
        return False

    @contextmanager
    def randomness(self, *key: object) -> Iterator[None]:
        """Seed torch's random numbers in the context, such as those of dropout.

        Args:
            *key: Parts of the seed, such as the run's seed, the users and the number of the step.
        """
        if not self._is_random:
            yield
            return
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
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

        With the loss f_c of component c, the value depends on the level at which the mixture is mixed:

        - "losses": ``sum_c pi_c f_c``, but the gradient is that of ``sum_c f_c`` (FLoRAL, eq. 4), because the server
          weighs component c by pi_c when it aggregates.
        - "samples": ``sum_c shares_c f_c`` with shares per sample.
        - Otherwise the loss of one model: the user's only one, or the mixture of its components' weights or outputs.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            users: Ignored, as users differ only in their tensors.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
            shares: Mixture weights of each sample; None for the users' weights.
        """
        mixture = self.mixture
        if mixture is None or mixture.at not in ("losses", "samples"):  # no losses are mixed
            return self._model_losses(tensors, batch, train), 0.0
        losses = self.component_losses(tensors, users, batch, train=train)  # (users, clusters, batch, ...)
        if mixture.at == "samples":
            if shares is None:
                shares = self.shares(tensors).unsqueeze(2)
            return (shares * losses).sum(1), 0.0
        pi = self.shares(tensors).to(losses.dtype)
        weighted_sum, plain_sum = torch.einsum("uc,uc...->u...", pi, losses), losses.sum(1)
        zero = plain_sum - plain_sum.detach()  # with the gradient of `plain_sum`
        return weighted_sum.detach() + zero, 0.0

    def _model_losses(self, tensors: Tree, batch: Any, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the loss of every sample under the users' models; 0 for padding.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
        """
        inputs, targets, present = batch
        outputs = self._outputs(tensors, inputs, train)
        return self.loss(outputs, targets).masked_fill(~present, 0)

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False
    ) -> Float[Tensor, "users clusters batch"]:
        """Return the loss of every sample under each component of the users' mixtures alone; 0 for padding.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            users: Ignored, as users differ only in their tensors.
            batch: The users' inputs, targets and presence, as in :data:`Batch`.
            train: Run in training mode.
        """
        inputs, targets, present = batch
        outputs = self._component_outputs(tensors, inputs, train)
        num_users, clusters = outputs.shape[:2]
        targets_per_component = targets.unsqueeze(1).expand(num_users, clusters, *targets.shape[1:])
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
        """Return each user's mixture weights pi of the components, one for each cluster, which sum to 1.

        They follow from the logits of the user's router. With ``layers`` every layer has its own weights.

        Args:
            tensors: The users' tensors. In training, the trainer has added any noise of the router to its logits.
        """
        assert self.mixture is not None
        return self.mixture.shares(tensors[CLIENT_ROUTER])

    def _outputs(self, tensors: Tree, inputs: Tensor, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of the users' models: single nets, mixtures of nets, or nets with a mixture of adaptors.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        mixture = self.mixture
        if mixture is None:
            return self._run_single_nets(train, tensors, inputs)
        if mixture.merges_models:  # nets mixed in their weights
            return self._merged_outputs(tensors, inputs, train)
        pi = self.shares(tensors)  # mixture weights
        if mixture.of == "models":  # nets mixed in their outputs
            outputs = self._component_outputs(tensors, inputs, train)
            if self.mixes_probabilities:
                return mix_probabilities(outputs, pi)
            return torch.einsum("uc,uc...->u...", pi, outputs)
        # Adaptors, which the net's forward pass mixes.
        return self._run_users(train, self._call_user_with_mixture, tensors, inputs, pi)

    def _call_user_with_mixture(self, user_tensors: Tree, inputs: Tensor, pi: Tensor) -> Tensor:
        """Return the outputs of one user's net with adaptors, which are mixed with the weights ``pi``."""
        return self._call_user(user_tensors, inputs, mixture=pi)

    def _merged_outputs(self, tensors: Tree, inputs: Tensor, train: bool) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of one merged net per user, with the weights ``sum_c pi_c w_c`` of the C components.

        In training the merged net's new running statistics are copied to all components.

        Args:
            tensors: The users' tensors ``(users, clusters, ...)``; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        merged = merge_models(tensors, self.shares(tensors))
        statistic_names = [slot.name for slot in self.layout.only({STATISTICS}).slots]
        for name in statistic_names:
            merged[name] = merged[name].detach()  # the pass updates it in place
        outputs = self._run_single_nets(train, merged, inputs)
        if train:
            for name in statistic_names:
                all_components = tensors[name]  # (users, clusters, ...)
                all_components.copy_(merged[name].unsqueeze(1).expand_as(all_components))
        return outputs

    def _component_outputs(
        self, tensors: Tree, inputs: Tensor, train: bool
    ) -> Float[Tensor, "users clusters batch ..."]:
        """Return the outputs of each component of the users' mixtures: a whole model, or the base with one adaptor set.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        assert self.mixture is not None
        if self.mixture.of != "models":
            return self._adaptor_set_outputs(tensors, inputs, train)
        models = {name: t for name, t in tensors.items() if name != CLIENT_ROUTER}
        # Within the vmap over users: tensors have a leading axis of components, inputs have none.
        call_components = vmap(self._call_user, in_dims=(0, None), randomness="different")
        return self._run_users(train, call_components, models, inputs)

    def _adaptor_set_outputs(
        self, tensors: Tree, inputs: Tensor, train: bool
    ) -> Float[Tensor, "users clusters batch ..."]:
        """Return the outputs of the base with each of the C adaptor sets alone.

        One-hot mixture weights, such as (0, 1, 0), select one set. In training, each set c updates a copy stats_c of
        the user's running statistics, which then become ``sum_c pi_c stats_c``.

        Args:
            tensors: The users' tensors; in training their running statistics change.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        assert self.mixture is not None
        clusters = self.mixture.clusters
        # Tensors with an axis of adaptor sets, (users, clusters, ...): copies of the running statistics, and a trained
        # base whose gradient from set c is multiplied by pi_c.
        statistics: Tree = {}
        if train:
            for slot in self.layout.only({STATISTICS}).slots:
                statistics[slot.name] = tensors[slot.name].unsqueeze(1).repeat_interleave(clusters, 1)
        trained_base: Tree = {}
        for slot in self.layout.only({BASE}).slots:
            if tensors[slot.name].requires_grad:
                trained_base[slot.name] = weigh_gradient(tensors[slot.name], self.shares(tensors).detach())
        per_set = {**statistics, **trained_base}
        set_axes = {name: 0 if name in per_set else None for name in tensors}  # of one user's tensors
        call_sets = vmap(self._call_user_with_mixture, in_dims=(set_axes, None, 0), randomness="different")
        one_hot = torch.eye(clusters, dtype=self.dtype, device=inputs.device)  # row c selects set c

        def call_user_with_each_set(user_tensors: Tree, user_inputs: Tensor) -> Tensor:
            return call_sets(user_tensors, user_inputs, one_hot)

        outputs = self._run_users(train, call_user_with_each_set, {**tensors, **per_set}, inputs)
        for name, stats in statistics.items():
            mean_over_sets = torch.einsum("uc,uc...->u...", self.shares(tensors).detach(), stats)
            tensors[name].copy_(mean_over_sets)
        return outputs

    def _run_users(self, train: bool, call: Callable[..., Tensor], *stacked: Any) -> Tensor:
        """Call a function for each user under ``vmap`` and stack the results.

        Args:
            train: Run the net in training mode.
            call: Function of one user's tensors, inputs and further arguments.
            *stacked: All users' tensors, inputs and further arguments, each with a leading user axis.
        """
        self.net.train(train)
        tensors, *others = stacked
        call_users = vmap(call, randomness="different")
        # Both for speed: FusedNorms runs each norm once for all users, channels_last speeds up small convolutions.
        with FusedNorms():
            return call_users(channels_last(tensors), *others)

    def _run_single_nets(self, train: bool, tensors: Tree, inputs: Tensor) -> Float[Tensor, "users batch ..."]:
        """Return the outputs of one net per user, computed in the fastest way that supports the net.

        Args:
            train: Run in training mode.
            tensors: One net's tensors per user, ``(users, ...)``.
            inputs: Samples ``(users, batch, ...)``.
        """
        native_net = self.native_net  # None if the net has layers without native code
        if native_net is not None and native_net.takes(inputs):
            return native_net(tensors, inputs, train=train)
        if not self._can_fold:
            return self._run_users(train, self._call_user, tensors, inputs)  # under vmap, the slowest way
        self.net.train(train)
        users_and_batch = inputs.shape[:2]
        samples_of_all_users = inputs.flatten(0, 1)
        with Folded():  # F.linear multiplies each user's samples by the user's weights
            outputs = self._call_user(tensors, samples_of_all_users)
        return outputs.unflatten(0, users_and_batch)

    @cached_property
    def native_net(self) -> SideBySideNet | None:
        """The net rewritten to run the convolutions of all users at once in C++; None to use ``vmap``."""
        if not self.compiled:
            return None
        from comingle.models.side_by_side import native_net

        return native_net(self.net)

    @cached_property
    def _can_fold(self) -> bool:
        """True if the net can process all users' samples as one batch, which is faster than ``vmap``."""
        return can_fold(self.net)

    def _call_user(self, user_tensors: Tree, inputs: Tensor, **options: object) -> Tensor:
        """Return the net's outputs for one user; ``options`` are further arguments of its ``forward``."""
        return call_with(self.net, user_tensors, inputs, options=options)

    # ---------------------------------------------------------------- adaptors

    @cached_property
    def _adaptor_pairs(self) -> Pairs | None:
        """Names of the adaptors' tensors, with the base's tensors that they change; None for a net without adaptors."""
        return self.net.pairs() if isinstance(self.net, FloralModel) else None

    @torch.no_grad()
    def precondition(self, tensors: Tree, gradients: Tree) -> Tree:
        """Return the gradients, those of low-rank adaptors preconditioned by the other factor (FLoRAL eq. 36).

        Args:
            tensors: The users' tensors, at which the gradients were taken.
            gradients: Their gradients, by name.
        """
        if self._adaptor_pairs is None:
            return gradients
        return precondition(self._adaptor_pairs, tensors, gradients)

    @torch.no_grad()
    def centre(self, tensors: Tree, shares: Float[Tensor, " clusters"]) -> Tree:
        """Move the mean of the clusters' adaptors into the base (FLoRAL eq. 37); a net without adaptors is unchanged.

        Args:
            tensors: Tensors of base and adaptors by name.
            shares: Weight p(c) of each cluster in the mean: how much all users together use it. The weights sum to 1.

        Returns:
            New tensors by name. Those of adaptors hold the differences from the mean.
        """
        if self._adaptor_pairs is None:
            return tensors
        return centre(self._adaptor_pairs, tensors, shares)


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

    All users start from the values of the given nets.

    Args:
        nets: Without a mixture, a net from which all users start; further nets are only further initial models of the
            server. For a mixture of adaptors, a :class:`FloralModel`. For a mixture of whole models, a net for each
            cluster, with initial values of its own.
        name: Name of the model.
        users: Number of users.
        mixture: How components are mixed; None if each user has a single net.
        device: Device of the tensors; the CPU by default.
        dtype: Dtype of the computations.
        loss: Loss of outputs and targets.
        compiled: Allow convolutions in C++ for all users at once, if the net supports it.
        batchwise: A sample's output in training depends on the other samples of its batch. Norms of torch are found
            automatically; this is for nets that mix samples in other ways.
    """
    device = device or torch.device("cpu")
    nets = [net.to(device, dtype) for net in nets]
    mixes_whole_models = mixture is not None and mixture.of == "models"
    layout = layout_of(nets, side_by_side=mixes_whole_models)
    other_initial_rows = None  # the server's initial models after the first
    if len(nets) > 1 and not mixes_whole_models:
        other_initial_rows = torch.stack([row_of(net, layout) for net in nets[1:]])
    return StackedModel(
        name=name,
        net=nets[0].requires_grad_(False),
        layout=layout,
        users=users,
        device=device,
        dtype=dtype,
        mixture=mixture,
        others=other_initial_rows,
        loss=loss,
        compiled=compiled,
        batchwise=batchwise or any(map(_depends_on_batch, nets[0].modules())),
    )


def _depends_on_batch(module: nn.Module) -> bool:
    """Return whether a sample's output in training depends on the other samples of its batch.

    This holds for batch norms of torch, and for instance norms that track running statistics.
    """
    norms = nn.modules.batchnorm
    if isinstance(module, norms._BatchNorm):
        return True
    return isinstance(module, norms._NormBase) and module.track_running_stats


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
        """Return the loss in nats at every position under each component of the users' mixtures alone.

        Args:
            tensors: The users' tensors.
            users: Ignored, as users differ only in their tensors.
            batch: Windows of context + 1 tokens; a negative target has loss 0.
            train: Without effect, as language models always run in evaluation mode.
        """
        inputs, targets = inputs_of(batch), batch[..., 1:]
        hidden = self._component_outputs(tensors, inputs, train)
        targets_per_component = targets.unsqueeze(1).expand(hidden.shape[:-1])
        return cross_entropy(hidden, self.head, targets_per_component)

    def predict(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"]
    ) -> Float[Tensor, "users batch context"]:
        """Return the next-token losses in nats for evaluation, under each user's mixture of adaptors.

        Args:
            tensors: The users' tensors.
            users: Ignored, as users differ only in their tensors.
            batch: Windows of context + 1 tokens; a negative target has loss 0.
        """
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
        continuations = []
        with without_compiling():  # lengths change with every token
            for row, user_prompts in enumerate(prompts.to(self.device)):
                user_tensors = {name: t[row : row + 1] for name, t in tensors.items()}
                user_model = self.of_one_user(user_tensors)
                (mixture,) = self.shares(user_tensors)
                with user_model.mixing(mixture):
                    network = cast(PreTrainedModel, user_model.model)
                    continuations.append(continue_greedily(network, user_prompts, limit))
        longest = max(tokens.shape[1] for tokens in continuations)
        padded = [F.pad(tokens, (0, longest - tokens.shape[1]), value=PAD) for tokens in continuations]
        return torch.stack(padded)

    def of_one_user(self, tensors: Tree) -> FloralModel:
        """Return one user's causal language model with its adaptors; the base's weights are shared.

        Args:
            tensors: The user's tensors, ``(1, ...)`` by name.

        Returns:
            A wrapper with the adaptors and the router, whose ``model`` is the language model of transformers.
        """
        base = self.base.model
        assert isinstance(self.net, FloralModel)
        wrapper = copy_with_tensors(self.net, tensors, shared=(*base.parameters(), *base.buffers()))
        # The wrapper's model is a backbone with adaptors: put it into a causal language model.
        language_model = share_weights(base)
        setattr(language_model, language_model.base_model_prefix, wrapper.model)
        wrapper.model = language_model
        return wrapper

    @property
    def base_parameters(self) -> int:
        """Number of parameters of the base."""
        return self.base.model.num_parameters()

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Replace the weights of the base, which no user trains, by fake tensors, to estimate memory.

        Fake tensors have a shape and a dtype but no data. The net's tensors are replaced in place; the language model
        head, which is a separate field, only in the returned model.

        Args:
            fakes: Makes the fake tensors.

        Returns:
            The model, and the bytes of the replaced weights.
        """
        replaced_bytes = fakes.size_of(self.base.model)
        fake_head = self.head.with_tensors(lambda real: fakes.of(real, self.device))
        fakes.replace(self.net, self.device)
        return replace(self, head=fake_head), replaced_bytes

    def _run_users(self, train: bool, call: Callable[..., Tensor], *stacked: Any) -> Tensor:
        """Embed the tokens, then call the function for each user; always in evaluation mode, without dropout.

        Args:
            train: Ignored, as language models always run in evaluation mode.
            call: Function of one user's tensors, embedded tokens and further arguments.
            *stacked: All users' tensors, their tokens, and further arguments, each with a leading user axis.
        """
        tensors, tokens, *others = stacked
        # Embed before vmap: some families search the token ids for padding, which vmap does not support.
        embedded = self.embedding(tokens)
        return super()._run_users(False, call, tensors, embedded, *others)

    def _call_user(self, user_tensors: Tree, inputs: Tensor, **options: object) -> Tensor:
        """Return one user's last hidden states ``(batch, context, width)``, the inputs of the language model head.

        Args:
            user_tensors: The user's tensors.
            inputs: Embedded tokens ``(batch, context, width)``.
            options: Further arguments of the net's forward pass, such as the weights of a mixture.
        """
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
    trained_slots = []  # of adaptors and the router
    for slot in stacked.layout.slots:
        is_frozen = BASE in slot.roles or STATISTICS in slot.roles
        if not is_frozen:
            trained_slots.append(slot)
    layout = Layout(slots=tuple(trained_slots))
    fields_of_stacked = {**vars(stacked), "layout": layout}
    embedding = network.get_input_embeddings()
    return MixedLanguageModel(**fields_of_stacked, base=base, head=lm_head(base), embedding=embedding)
