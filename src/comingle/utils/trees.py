"""Named tensors of many users, kept as the rows of one matrix.

The trainable state of a federation is a matrix ``rows`` of shape ``(users, columns)``: row i contains all trainable
parameters of user i. A :class:`Layout` names the columns: each :class:`Slot` is one tensor, and each slot consists of
ranges with one *role* (attention, generalist, specialist, router). So an optimiser step, a norm, a mean over users and
a byte count are one operation on a matrix, while a layer sees ``(users, ...)`` tensors, which are views of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

ATTENTION, GENERALIST, SPECIALIST, ROUTER = "attention", "generalist", "specialist", "router"
EXPERT_ROLES = (ATTENTION, GENERALIST, SPECIALIST)
BASE, ADAPTOR, STATISTICS = "base", "adaptor", "statistics"
"""Other roles: a trained base, components of a client-level mixture, running statistics of batch norm."""

BASE_STATISTICS = f"{STATISTICS}.base"
"""The running statistics of a base, if its adaptors may have statistics of their own."""

CLIENT_ROUTER = "router.theta"
"""The slot of a client-level router: one logit for each component."""

Tree = dict[str, Tensor]
"""Named tensors, each with the users on its leading dimension."""

Init = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Function that draws the initial value of a tensor of the given shape (float32)."""

if TYPE_CHECKING:

    class Context(torch.autograd.function.FunctionCtx):
        """Context of a ``torch.autograd.Function`` between forward and backward pass; it accepts any attribute."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None:  # noqa: D102 (as in torch)
            ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

else:
    Context = object  # torch.func uses other classes


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One trainable tensor of a user.

    ``roles`` names the role of each entry along the leading axis (the expert axis), or holds a single role for the
    whole tensor. ``shape`` is without the user dimension. ``factor`` is "a" or "b" for the two factors of a LoRA, or
    the owner of running statistics; ``part`` is the place in the model: its "head", a "norm", or its "body". A set of
    roles may name a single factor or part, for example "attention.a" and "base.head".
    """

    name: str
    shape: tuple[int, ...]
    roles: tuple[str, ...]
    init: Init
    factor: str = ""
    part: str = ""

    @property
    def size(self) -> int:
        """Number of entries of one user's tensor, and so of the columns that it takes in the matrix of all users."""
        return math.prod(self.shape)

    def role_mask(self, roles: Set[str]) -> list[bool]:
        """Return for each role of this tensor whether it is in ``roles``, such as ``[True, False, False]``.

        A role can be limited to one LoRA factor ("a" or "b") or one part of the model, such as the head. For example,
        the factor A of a LoRA of the attention is in ``{"attention"}`` and in ``{"attention.a"}``.
        """
        mask = []
        for role in self.roles:
            names = {role, f"{role}.{self.factor}", f"{role}.{self.part}"}
            mask.append(not roles.isdisjoint(names))
        return mask

    def experts_with(self, roles: Set[str]) -> list[int]:
        """Return the indices of the experts whose role is in ``roles``, such as ``[1, 2]``.

        A tensor without an expert axis counts as one expert.
        """
        return [index for index, has_role in enumerate(self.role_mask(roles)) if has_role]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Order of each user's trainable tensors (slots), which are flattened and concatenated in a row of ``columns``."""

    slots: tuple[Slot, ...]

    @cached_property
    def starts(self) -> dict[str, int]:
        """Position of each tensor's first entry in the row that holds all tensors of a user, by the tensor's name."""
        starts: dict[str, int] = {}
        next_start = 0
        for slot in self.slots:
            starts[slot.name] = next_start
            next_start += slot.size
        return starts

    @cached_property
    def _only_cache(self) -> dict[frozenset[str], Layout]:
        """Cached results of :meth:`only`: layouts of the tensors that have only certain roles, by the set of roles."""
        return {}

    @cached_property
    def _touching_cache(self) -> dict[frozenset[str], Layout]:
        """Cached results of :meth:`touching`: layouts of the tensors with any of certain roles, by the set of roles."""
        return {}

    @cached_property
    def _other_roles_cache(self) -> dict[frozenset[str], Tensor | None]:
        """Results of :meth:`other_roles_mask` by the set of roles that a step trains.

        A result is a mask of the columns that the step must not change, or None if there are none.
        """
        return {}

    @cached_property
    def columns(self) -> int:
        """Number of entries of all trainable tensors of a user, which are the columns of the users' matrix."""
        return sum(slot.size for slot in self.slots)

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles of all tensors, such as "attention" and "router"."""
        return frozenset(role for slot in self.slots for role in slot.roles)

    def views(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return the named tensors ``(users, *shape)`` of a matrix, as views that share its memory.

        Args:
            rows: The matrix, with one row of parameters for each user.
        """
        columns_of_slots = rows.split_with_sizes([slot.size for slot in self.slots], 1)
        views: Tree = {}
        for slot, columns in zip(self.slots, columns_of_slots, strict=True):
            views[slot.name] = columns.view(-1, *slot.shape)
        return views

    def mask(self, roles: Iterable[str]) -> Bool[Tensor, " columns"]:
        """Return for each column (an entry of a user's tensors) whether its tensor or expert has one of the roles."""
        wanted = set(roles)
        masks = []
        for slot in self.slots:
            entries_per_role = slot.size // len(slot.roles)  # roles are along the leading axis
            masks.append(torch.tensor(slot.role_mask(wanted)).repeat_interleave(entries_per_role))
        return torch.cat(masks)

    def count(self, roles: Iterable[str]) -> int:
        """Return how many parameters of a user have one of the roles."""
        return int(self.mask(roles).sum())

    def named_roles(self, roles: Iterable[str]) -> dict[str, frozenset[str]]:
        """Return the names of each tensor's roles, which servers use to select tensors.

        A role, such as "attention", says to which part of a model a tensor belongs. It has up to three names:
        "attention", "attention.a" for one factor of a LoRA, and "attention.body" for one part of the model. For
        example, ``{"layer.0.a": {"attention", "attention.a", "attention.body"}}``.

        Args:
            roles: The wanted roles, by any of their names; tensors without any of them are left out.
        """
        wanted = frozenset(roles)
        names_by_tensor: dict[str, frozenset[str]] = {}
        for tensor in self.slots:
            names: set[str] = set()
            # A tensor has several roles if it holds experts of different kinds.
            for role, is_wanted in zip(tensor.roles, tensor.role_mask(wanted), strict=True):
                if not is_wanted:
                    continue
                names.add(role)
                if tensor.factor:
                    names.add(f"{role}.{tensor.factor}")
                if tensor.part:
                    names.add(f"{role}.{tensor.part}")
            if names:
                names_by_tensor[tensor.name] = frozenset(names)
        return names_by_tensor

    def only(self, roles: Iterable[str]) -> Layout:
        """Return the layout of the tensors that have no other roles than these, in the same order.

        A tensor has several roles if its leading axis holds experts of different kinds.
        """
        wanted = frozenset(roles)
        if wanted not in self._only_cache:  # called in every step
            slots = [slot for slot in self.slots if all(slot.role_mask(wanted))]
            self._only_cache[wanted] = Layout(slots=tuple(slots))
        return self._only_cache[wanted]

    def touching(self, roles: Iterable[str]) -> Layout:
        """Return the layout of the tensors that have at least one of these roles, in the same order.

        A tensor has several roles if its leading axis holds experts of different kinds.
        """
        wanted = frozenset(roles)
        if wanted not in self._touching_cache:
            slots = [slot for slot in self.slots if any(slot.role_mask(wanted))]
            self._touching_cache[wanted] = Layout(slots=tuple(slots))
        return self._touching_cache[wanted]

    def other_roles_mask(self, roles: Iterable[str]) -> Bool[Tensor, " columns"] | None:
        """Return a mask of the columns that an optimizer step must not change if it trains ``roles`` only.

        An optimizer updates whole tensors. If a tensor holds generalists and specialists, and the step trains
        generalists, the mask is True on the columns of the specialists.

        Returns:
            The mask; None if there are no such columns.
        """
        wanted = frozenset(roles)
        if wanted not in self._other_roles_cache:  # called in every step
            updated_slots = {slot.name for slot in self.touching(wanted).slots}
            is_updated = torch.cat([torch.full((slot.size,), slot.name in updated_slots) for slot in self.slots])
            mask = is_updated & ~self.mask(wanted)
            self._other_roles_cache[wanted] = mask if bool(mask.any()) else None
        return self._other_roles_cache[wanted]

    def span(self, part: Layout) -> slice | Int64[Tensor, " columns"]:
        """Return the positions of some tensors in the row that holds all tensors of a user.

        Args:
            part: The layout of these tensors.

        Returns:
            A slice if the tensors are next to each other in the row, else the indices of their entries.
        """
        if not part.slots:
            return slice(0, 0)
        starts = [self.starts[slot.name] for slot in part.slots]
        ends = [start + slot.size for start, slot in zip(starts, part.slots, strict=True)]
        is_contiguous = starts[1:] == ends[:-1]  # each slot starts where the previous one ends
        if is_contiguous:
            return slice(starts[0], ends[-1])
        return torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])


def restrict(tree: Tree, layout: Layout, roles: Iterable[str]) -> Tree:
    """Return the entries of ``tree`` whose role is in ``roles``.

    Args:
        tree: The named tensors ``(users, *shape)``.
        layout: Their layout.
        roles: Roles to keep. A tensor with several roles is indexed along its expert axis, the first after users;
            one without any of these roles is left out.
    """
    wanted = set(roles)
    restricted: Tree = {}
    for slot in layout.slots:
        experts = slot.experts_with(wanted)
        if len(experts) == len(slot.roles):
            restricted[slot.name] = tree[slot.name]
        elif experts:
            restricted[slot.name] = tree[slot.name][:, experts]
    return restricted


def assign(tree: Tree, layout: Layout, roles: Iterable[str], values: Tree) -> None:
    """Write new values of the tensors and experts with the given roles into ``tree``.

    Args:
        tree: Tensors ``(users, ...)`` by name, changed in place; those of experts are ``(users, experts, ...)``.
        layout: Layout of ``tree``.
        roles: Roles to write, such as ``{"generalist"}``; other tensors and experts are unchanged.
        values: New values by name: whole tensors, or only the experts with these roles.
    """
    wanted = set(roles)
    for slot in layout.slots:
        experts = slot.experts_with(wanted)
        if len(experts) == len(slot.roles):  # the whole tensor
            tree[slot.name].copy_(values[slot.name])
        elif experts:
            tree[slot.name][:, experts] = values[slot.name]


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Float[Tensor, "users columns"]:
    """Flatten tensors ``(users, ...)`` for each user and concatenate them as columns of one matrix, in order.

    Args:
        tensors: The tensors.
        dtype: Dtype of the matrix; None for the first tensor's dtype.
    """
    num_users = len(tensors[0])
    sizes = [math.prod(t.shape[1:]) for t in tensors]
    matrix = tensors[0].new_empty(num_users, sum(sizes), dtype=dtype)
    for columns, t in zip(matrix.split(sizes, 1), tensors, strict=True):
        if t.dim() == 1:  # (users,)
            t = t.unsqueeze(1)
        columns.unflatten(1, t.shape[1:]).copy_(t)
    return matrix


def lora_pairs(tree: Tree) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each LoRA in ``tree`` as (name, A, B), such as ("mlp", tree["mlp.a"], tree["mlp.b"])."""
    for name, a in tree.items():
        if name.endswith(".a"):
            lora = name.removesuffix(".a")
            yield lora, a, tree[f"{lora}.b"]


def digest_split(split: object) -> str:
    """Return the digest of one split of a user's data, to notice that a resumed run reads other data.

    Args:
        split: A tensor of tokens, or samples or conversations, whose ``contents`` are their tensors and settings.
    """
    contents = getattr(split, "contents", (split,))
    return digest_all(*contents)


def digest_all(*parts: Tensor | object) -> str:
    """Return SHA-256 over tensors (dtype, shape and content) and JSON values, in order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            tensor = part.detach().cpu().contiguous()
            digest.update(json.dumps([str(tensor.dtype), *tensor.shape]).encode())
            if tensor.numel():
                digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()
