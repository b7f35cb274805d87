"""Named tensors as columns of one matrix, on layouts of several kinds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comingle.utils.trees import Layout, Slot, Tree, assign, flatten, restrict


def nothing(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape)


def slot(name: str, shape: tuple[int, ...], *roles: str) -> Slot:
    return Slot(name=name, shape=shape, roles=roles, init=nothing)


LAYOUTS = {
    "one": Layout(slots=(slot("a", (3,), "attention"),)),
    "same roles": Layout(slots=(slot("a", (2, 3), "attention"), slot("b", (4,), "attention"))),
    "mixed": Layout(
        slots=(
            slot("q.a", (2, 5), "attention"),
            slot("up.a", (3, 2, 4), "generalist", "specialist", "specialist"),
            slot("up.b", (3, 2, 1), "generalist", "specialist", "specialist"),
            slot("router", (3, 4), "router", "router", "router"),
        )
    ),
    "two generalists": Layout(
        slots=(slot("up", (4, 3), "generalist", "generalist", "specialist", "specialist"), slot("z", (1,), "attention"))
    ),
    "specialists only": Layout(slots=(slot("up", (2, 2), "specialist", "specialist"),)),
}
ROLES = [[], ["attention"], ["generalist"], ["specialist"], ["attention", "generalist"], ["specialist", "router"]]

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
some_roles = pytest.mark.parametrize("roles", ROLES, ids=lambda r: "+".join(r) or "none")


def numbered(layout: Layout, users: int = 3) -> Tensor:
    """Every entry is different, so that a wrong place cannot pass."""
    return torch.arange(users * layout.columns, dtype=torch.float64).view(users, layout.columns)


def columns_by_hand(layout: Layout, roles: list[str]) -> list[int]:
    """Column numbers owned by the roles, counted entry by entry."""
    owned, at = [], 0
    for s in layout.slots:
        lead = 1 if len(s.roles) == 1 else s.shape[0]
        for place in range(lead):
            for _ in range(math.prod(s.shape) // lead):
                if s.roles[place] in roles:
                    owned.append(at)
                at += 1
    return owned


@layouts
def test_views_hold_the_columns_in_order(layout: Layout) -> None:
    rows = numbered(layout)
    views = layout.views(rows)
    assert list(views) == [s.name for s in layout.slots]
    assert [tuple(v.shape) for v in views.values()] == [(3, *s.shape) for s in layout.slots]
    at = 0
    for s in layout.slots:
        assert layout.starts[s.name] == at
        for user in range(3):
            assert views[s.name][user].flatten().tolist() == rows[user, at : at + s.size].tolist()
        at += s.size
    assert layout.columns == at


@layouts
def test_views_write_through(layout: Layout) -> None:
    rows = numbered(layout)
    for i, view in enumerate(layout.views(rows).values()):
        view[1] = -i - 1.0
    expected = [-i - 1.0 for i, s in enumerate(layout.slots) for _ in range(s.size)]
    assert rows[1].tolist() == expected
    assert torch.equal(rows[[0, 2]], numbered(layout)[[0, 2]])


@layouts
def test_views_of_a_view_of_some_users_write_through_too(layout: Layout) -> None:
    rows = numbered(layout)
    for view in layout.views(rows[1:2]).values():
        view.zero_()
    assert (rows[1] == 0).all()
    assert torch.equal(rows[[0, 2]], numbered(layout)[[0, 2]])


@layouts
@some_roles
def test_mask_marks_the_columns_of_the_roles(layout: Layout, roles: list[str]) -> None:
    mask = layout.mask(iter(roles))
    assert mask.dtype == torch.bool
    assert mask.shape == (layout.columns,)
    assert mask.nonzero().flatten().tolist() == columns_by_hand(layout, roles)


@layouts
def test_masks_of_all_roles_cut_the_columns_without_overlap(layout: Layout) -> None:
    assert torch.stack([layout.mask([role]) for role in layout.roles]).sum(0).tolist() == [1] * layout.columns


@layouts
def test_flatten_undoes_views(layout: Layout) -> None:
    rows = numbered(layout)
    assert torch.equal(flatten(list(layout.views(rows).values())), rows)


@layouts
@some_roles
def test_only_keeps_slots_all_of_whose_roles_are_wanted(layout: Layout, roles: list[str]) -> None:
    part = layout.only(iter(roles))
    assert [s.name for s in part.slots] == [s.name for s in layout.slots if all(r in roles for r in s.roles)]
    assert layout.only(layout.roles) == layout


@layouts
def test_span_of_a_part_in_several_pieces_has_their_columns_alone(layout: Layout) -> None:
    rows = numbered(layout)
    for slots in (layout.slots[::2], layout.slots[1::2]):
        part = Layout(slots=slots)
        expected = flatten([layout.views(rows)[s.name] for s in slots]) if slots else rows[:, :0]
        assert torch.equal(rows[:, layout.span(part)], expected)


@layouts
def test_span_is_where_a_contiguous_part_lies(layout: Layout) -> None:
    rows = numbered(layout)
    for start in range(len(layout.slots)):
        for end in range(start, len(layout.slots) + 1):
            part = Layout(slots=layout.slots[start:end])
            expected = flatten([layout.views(rows)[s.name] for s in part.slots]) if part.slots else rows[:, :0]
            assert torch.equal(rows[:, layout.span(part)], expected)
            found = part.views(rows[:, layout.span(part)])
            assert all(torch.equal(v, layout.views(rows)[name]) for name, v in found.items())


@layouts
@some_roles
def test_restrict_keeps_exactly_the_entries_of_the_roles(layout: Layout, roles: list[str]) -> None:
    rows = numbered(layout)
    cut = restrict(layout.views(rows), layout, iter(roles))
    found = flatten(list(cut.values())) if cut else rows[:, :0]
    assert torch.equal(found, rows[:, columns_by_hand(layout, roles)])
    for s in layout.slots:
        kept = [role in roles for role in s.roles]
        assert (s.name in cut) == any(kept)
        if any(kept):
            lead = s.shape[0] if len(s.roles) == 1 else sum(kept)
            assert cut[s.name].shape == (3, lead, *s.shape[1:])


@layouts
@some_roles
def test_assign_writes_these_entries_and_no_others(layout: Layout, roles: list[str]) -> None:
    rows, other = numbered(layout), -1 - numbered(layout)
    assign(layout.views(rows), layout, iter(roles), restrict(layout.views(other), layout, roles))
    mask = torch.zeros(layout.columns, dtype=torch.bool)
    mask[columns_by_hand(layout, roles)] = True
    assert torch.equal(rows, torch.where(mask, other, numbered(layout)))


def test_a_mixed_slot_is_cut_along_its_expert_axis() -> None:
    layout = LAYOUTS["mixed"]
    tree: Tree = layout.views(numbered(layout))
    assert torch.equal(restrict(tree, layout, ["generalist"])["up.a"], tree["up.a"][:, :1])
    assert torch.equal(restrict(tree, layout, ["specialist"])["up.a"], tree["up.a"][:, 1:])


def test_a_role_can_be_narrowed_to_one_factor() -> None:
    a = Slot(name="q.a", shape=(2, 5), roles=("attention",), init=nothing, factor="a")
    b = Slot(name="q.b", shape=(2, 3), roles=("attention",), init=nothing, factor="b")
    layout = Layout(slots=(a, b))
    assert layout.only({"attention"}).slots == (a, b)
    assert layout.only({"attention.b"}).slots == (b,)
    assert layout.mask({"attention.a"}).nonzero().flatten().tolist() == list(range(10))
    assert restrict(layout.views(numbered(layout)), layout, {"attention.b"}).keys() == {"q.b"}
    assert layout.roles == {"attention"}


def test_flatten_keeps_users_apart() -> None:
    first, second = torch.arange(12.0).view(2, 2, 3), torch.arange(2.0).view(2, 1)
    assert flatten([first, second]).tolist() == [[0, 1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11, 1]]
