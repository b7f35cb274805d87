"""Adapters injected into a frozen causal language model.

:func:`inject` replaces every attention linear by a :class:`LoraLinear` and every MLP by a :class:`RoutedMLP`, and
returns the :class:`Adapters`: the layout of what each user trains, and :meth:`Adapters.bind`, which hands a cohort's
tensors to the modules. The base's own parameters are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import islice

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from comingle.config.settings import AdaptersSection, Gating, TargetsSection
from comingle.models.experts import RoutedMLP
from comingle.models.kernels.expert_mlp import SHORT
from comingle.models.layouts import activation_name, decoder_layers, find_targets
from comingle.models.lora import (
    RESIDUAL,
    LoraLinear,
    base_weight,
    factors_of,
    init_a,
    init_zero,
    lora_scale,
    residual_slots,
)
from comingle.models.routers import init_router
from comingle.utils.errors import BaseModelError, RecipeError
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Layout, Slot, Tree

logger = logging.getLogger("comingle")

Linear = tuple[str, nn.Module, tuple[int, ...], tuple[str, ...]]
"""A linear that gets a LoRA: name, module, leading dimensions of the factors, roles along the expert axis."""


def check_ranks(ranks: Int[Tensor, " users"], linears: Sequence[Linear]) -> None:
    """A change of a weight has at most the rank of its smaller side; what is above is trained and sent for nothing.

    Raises:
        RecipeError: a rank above both sides together of every weight, where factors dwarf what they change.
    """
    shapes = {name: tuple(base_weight(linear)[0].shape) for name, linear, _, _ in linears}
    user = int(ranks.argmax())
    rank = int(ranks[user])
    whose = f" for user {user + 1} of {len(ranks)}" if len(ranks.unique()) > 1 else ""
    name = max(shapes, key=lambda name: sum(shapes[name]))
    d_out, d_in = shapes[name]
    if rank > d_in + d_out:
        raise RecipeError(
            f"adapters.rank: got {rank}{whose}; the largest weight, {name}, maps {d_in} to {d_out}, so its changes "
            f"have a rank of at most {min(d_in, d_out)}; allowed: up to {d_in + d_out}"
        )
    above = {name: shape for name, shape in shapes.items() if rank > min(shape)}
    for name, (d_out, d_in) in islice(above.items(), 1):
        logger.warning(
            "adapters.rank: %d%s: more than a change can have in %d of %d weights (%s maps %d to %d), adds nothing",
            rank, whose, len(above), len(shapes), name, d_in, d_out,
        )  # fmt: skip


@torch.no_grad()
def check_same_function(original: nn.Module, mlp: RoutedMLP, family: str) -> None:
    """With adapters at zero the mixture is the MLP that it replaces, or the family's MLP has something more to it."""
    _require_one_input(original, family)
    weights = {name: base_weight(linear)[0] for name, linear in [*mlp.first.items(), ("down", mlp.last)]}
    up = weights["up"]
    mlp.factors = {
        name: (up.new_zeros(1, 1, 1, weight.shape[1]), up.new_zeros(1, 1, 1, weight.shape[0]))
        for name, weight in weights.items()
    }
    mlp.router.present = torch.ones(1, 1, dtype=torch.bool, device=up.device)
    x = torch.linspace(-1, 1, 4 * up.shape[1], dtype=up.dtype, device=up.device).view(1, 4, -1)
    wanted, got = original(x), mlp(x)
    error = (got - wanted).double().norm() / wanted.double().norm()
    if error > (0.05 if up.dtype in SHORT else 1e-4):  # rounding is far below
        raise BaseModelError(
            f"{family}: its MLP is not act, gate, up and down alone (with adapters at zero the output differs by "
            f"{error:.1%}), so comingle cannot adapt it"
        )


def _require_one_input(original: nn.Module, family: str) -> None:
    """Some MLPs are handed more than their input, as Bloom's is the residual that it adds."""
    needed = [
        p.name
        for p in signature(original.forward).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) != 1:
        raise BaseModelError(
            f"{family}: its MLP ({type(original).__name__}) is called with {', '.join(needed) or 'nothing'}; comingle "
            "can only adapt MLPs of one input"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """How many experts each MLP block has: ``generalists`` for everybody, ``specialists`` per user.

    Experts are ordered generalists first; a user with fewer specialists than another is padded and masked.
    """

    generalists: int
    specialists: tuple[int, ...]

    @property
    def width(self) -> int:
        """Experts of the user who has most: the stacked tensors' expert axis."""
        return self.generalists + max(self.specialists)

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each place on the expert axis."""
        return (GENERALIST,) * self.generalists + (SPECIALIST,) * max(self.specialists)

    def present(self) -> Bool[Tensor, "users experts"]:
        """Which experts each user has."""
        counts = self.generalists + torch.tensor(self.specialists)
        return torch.arange(self.width) < counts.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The injected modules, the layout of a user's trainable tensors, and which experts and rank each user has.

    ``scales`` are the users' LoRA scales ``alpha / sqrt(rank)``. The modules multiply by ``scale``, the smallest of
    everybody's.
    """

    layout: Layout
    present: Bool[Tensor, "users experts"]
    ranks: Int[Tensor, " users"]
    scales: Float[Tensor, " users"]
    scale: float
    attention: dict[str, LoraLinear]
    experts: dict[str, RoutedMLP]

    def only(self, users: Sequence[int]) -> Adapters:
        """Of some users, numbered anew; the modules stay as wide as everybody's."""
        at = list(users)
        return replace(self, present=self.present[at], ranks=self.ranks[at], scales=self.scales[at])

    def without(self, roles: frozenset[str]) -> Adapters:
        """Of fewer experts, for tensors that :func:`comingle.utils.trees.restrict` has cut to the other roles."""
        experts = next(slot.roles for slot in self.layout.slots if slot.roles != (ATTENTION,))
        keep = [i for i, role in enumerate(experts) if role not in roles]
        return replace(self, present=self.present[:, keep])

    def bind(self, tensors: Tree, users: Sequence[int]) -> None:
        """Hand ``tensors`` (leading dimension ``len(users)``) to the modules for the next forward passes."""
        self.place(*self.of_users(tensors, users))

    def of_users(self, tensors: Tree, users: Sequence[int]) -> tuple[Tree, Bool[Tensor, "users experts"]]:
        """What passes depend on: the tensors by the modules' scale, and which experts these users have."""
        if bool((self.scales != self.scale).any()):
            tensors = self._scaled(tensors, users)
        return tensors, self.present[list(users)].to(next(iter(tensors.values())).device)

    def place(self, tensors: Tree, present: Bool[Tensor, "users experts"]) -> None:
        """:meth:`bind` what :meth:`of_users` has found."""
        for name, lora in self.attention.items():
            lora.factors = factors_of(tensors, name, lora.scale)
        for name, mlp in self.experts.items():
            mlp.factors = {k: factors_of(tensors, f"{name}.{k}", mlp.scale) for k in (*mlp.first, "down")}
            mlp.router.weight, mlp.router.keys = tensors.get(f"{name}.router"), mlp.factors["up"][0]
            mlp.router.present = present
            mlp.router.penalty = None  # of the last pass, and this one may have no router

    def _scaled(self, tensors: Tree, users: Sequence[int]) -> Tree:
        """What a user's own scale differs from the modules' goes into A."""
        ratio = (self.scales / self.scale)[list(users)]
        a = {name: t for name, t in tensors.items() if name.endswith(".a")}
        return tensors | {name: t * ratio.to(t).view(-1, *[1] * (t.dim() - 1)) for name, t in a.items()}

    def penalties(self) -> Tensor | float:
        """Load-balancing penalty of the last forward pass, mean over blocks: ``(users,)``, or 0 if there is none."""
        by_block = [mlp.router.penalty for mlp in self.experts.values() if mlp.router.penalty is not None]
        return torch.stack(by_block).mean(0) if by_block else 0.0

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """True where a user really has a parameter: off for padding, and for the router of a user with one expert.

        ``ranks`` replaces the users' own, for methods that change them.
        """
        ranks = self.ranks if ranks is None else ranks
        return torch.cat([self._own(slot, ranks).flatten(1) for slot in self.layout.slots], 1)

    def _own(self, slot: Slot, ranks: Int[Tensor, " users"]) -> Bool[Tensor, "users ..."]:
        users = len(ranks)
        if slot.name.endswith(".router"):
            competing = self.present & (self.present.sum(1, keepdim=True) > 1)
            rows = competing[:, -slot.shape[0] :] if slot.shape[0] <= self.present.shape[1] else competing[:, :1]
            return rows.unsqueeze(-1).expand(users, *slot.shape)
        if slot.roles[0] == RESIDUAL:
            there = self.present if len(slot.shape) > 2 else torch.ones(users, dtype=torch.bool)
            return there.view(*there.shape, 1, 1).expand(users, *slot.shape)
        places = torch.arange(slot.shape[-2]) < ranks.unsqueeze(1)  # (users, rank)
        if slot.roles == (ATTENTION,):
            return places.unsqueeze(-1).expand(users, *slot.shape)
        return (self.present.unsqueeze(-1) & places.unsqueeze(1)).unsqueeze(-1).expand(users, *slot.shape)


def ranks_of(settings: AdaptersSection, users: int) -> Int[Tensor, " users"]:
    """The rank of each of ``users`` users.

    Raises:
        RecipeError: as many numbers were given as there are not users.
    """
    ranks = (settings.rank,) * users if isinstance(settings.rank, int) else settings.rank
    if len(ranks) != users:
        raise RecipeError(f"adapters.rank: {len(ranks)} numbers for {users} users; give one, or one per user")
    return torch.tensor(ranks)


def inject(
    model: nn.Module,
    settings: AdaptersSection,
    counts: ExpertCounts,
    *,
    routed: bool,
    gating: Gating | None = None,
    residual: int | None = None,
) -> Adapters:
    """Replace the targets of every decoder layer of ``model`` by adapters, in place.

    A router exists where ``routed`` and some user has more than one expert; ``gating`` says how it weighs them, where a
    softmax over logits does not. ``residual`` is the rank of what stands frozen beside each LoRA
    (:mod:`comingle.models.lora`), None for nothing.

    Raises:
        BaseModelError: unknown family, or targets or an activation that it cannot adapt.
        RecipeError: a rank above what some weight can have.
    """
    targets = find_targets(model, settings.targets)
    ranks = ranks_of(settings, len(counts.specialists))
    rank, act = int(ranks.max()), activation_name(model, targets)
    scale = lora_scale(settings.alpha, rank)
    attention: dict[str, LoraLinear] = {}
    experts: dict[str, RoutedMLP] = {}
    for i, layer in enumerate(decoder_layers(model)):
        for name in targets.attention:
            attention[f"layers.{i}.{name}"] = lora = LoraLinear(layer.get_submodule(name), scale=scale)
            layer.set_submodule(name, lora)
        experts[f"layers.{i}.mlp"] = mlp = _routed_mlp(layer, targets, act, scale, settings, counts)
        mlp.router.gating = gating
        if targets.mlp and i == 0 and not next(layer.parameters()).is_meta:
            check_same_function(layer.get_submodule(targets.mlp), mlp, type(model).__name__)
        _place(layer, targets, mlp)
    linears: list[Linear] = [(name, lora.linear, (rank,), (ATTENTION,)) for name, lora in attention.items()]
    for name, mlp in experts.items():
        for key, linear in [*mlp.first.items(), ("down", mlp.last)]:
            linears.append((f"{name}.{key}", linear, (counts.width, rank), counts.roles))
    check_ranks(ranks, linears)
    # All A, all B, all routers, so that whatever a phase trains is one run of columns.
    slots = [_a_slot(*linear) for linear in linears] + [_b_slot(*linear) for linear in linears]
    if routed and counts.width > 1:
        slots += [_router_slot(name, mlp, counts.width, rank) for name, mlp in experts.items()]
    if residual is not None:
        slots += residual_slots(
            [(name, linear, len(lead[:-1]) * counts.width) for name, linear, lead, _ in linears], residual
        )
    scales = settings.alpha / ranks.double().sqrt()
    return Adapters(
        layout=Layout(slots=tuple(replace(slot, part=_part(slot.name, experts)) for slot in slots)),
        present=counts.present(),
        ranks=ranks,
        scales=scales,
        scale=float(scales.min()),
        attention=attention,
        experts=experts,
    )


def _routed_mlp(
    layer: nn.Module, targets: TargetsSection, act: str, scale: float, settings: AdaptersSection, counts: ExpertCounts
) -> RoutedMLP:
    first = {"gate": layer.get_submodule(targets.gate)} if targets.gate else {}
    first["up"] = layer.get_submodule(targets.up)
    mlp = RoutedMLP(first=first, last=layer.get_submodule(targets.down), act=act, scale=scale, mix=settings.mix)
    mlp.router.top_k = settings.top_k
    # Favouring expert 0 only makes sense where it is the one generalist.
    mlp.router.balance = "uniform" if settings.balance == "generalist" and counts.generalists != 1 else settings.balance
    return mlp


def _part(name: str, experts: dict[str, RoutedMLP]) -> str:
    """The last MLP is the head, as the last layer of a net is."""
    return "head" if name.startswith(f"{list(experts)[-1]}.") else "body"


def _place(layer: nn.Module, targets: TargetsSection, mlp: RoutedMLP) -> None:
    if targets.mlp:
        layer.set_submodule(targets.mlp, mlp)
        return
    leaves = [name for name, child in layer.named_children() if not list(child.children())]
    activations = [name for name in leaves if "activation" in name and not name.endswith("norm")]
    if not activations:  # it would act a second time, on the mixture's output
        raise BaseModelError(f"adapters.targets.mlp: '' needs a layer with an activation module; got {sorted(leaves)}")
    layer.set_submodule(targets.up, mlp)
    for name in (targets.down, *activations):
        layer.set_submodule(name, nn.Identity())


def _a_slot(name: str, linear: nn.Module, lead: tuple[int, ...], roles: tuple[str, ...]) -> Slot:
    width = base_weight(linear)[0].shape[1]
    return Slot(name=f"{name}.a", shape=(*lead, width), roles=roles, init=init_a, factor="a")


def _b_slot(name: str, linear: nn.Module, lead: tuple[int, ...], roles: tuple[str, ...]) -> Slot:
    width = base_weight(linear)[0].shape[0]
    return Slot(name=f"{name}.b", shape=(*lead, width), roles=roles, init=init_zero, factor="b")


def _router_slot(name: str, mlp: RoutedMLP, experts: int, rank: int) -> Slot:
    width, gating = base_weight(mlp.first["up"])[0].shape[1], mlp.router.gating
    rows, init = (experts, init_router) if gating is None else gating.start(experts, rank, width)
    return Slot(name=f"{name}.router", shape=(rows, width), roles=(ROUTER,) * rows, init=init)
