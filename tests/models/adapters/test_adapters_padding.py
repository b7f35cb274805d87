"""Users of different sizes side by side: padding is inert, and nobody feels who else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base
from comingle.utils.trees import Tree, flatten
from naive import honest_double

SPECIALISTS = (0, 1, 2)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def adapted(specialists: tuple[int, ...] = SPECIALISTS, *, routed: bool = True, **settings: object) -> AdaptedModel:
    base = load_base("random:llama", dtype="float64", device="cpu")
    counts = ExpertCounts(generalists=1, specialists=specialists)
    return adapt(base, AdaptersSection(**({"rank": 2} | settings)), counts, routed=routed, compiled=False)  # type: ignore[arg-type]


def random_rows(model: AdaptedModel) -> Tensor:
    mask = model.mask()
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1 * mask


def leaves(model: AdaptedModel, rows: Tensor) -> Tree:
    return {name: t.clone().requires_grad_() for name, t in model.layout.views(rows).items()}


def losses_and_gradients(
    model: AdaptedModel, tensors: Tree, users: Sequence[int], windows: Tensor
) -> tuple[Tensor, Tree]:
    with honest_double():
        losses, penalties = model.losses(tensors, users, windows)
        objective = (losses.mean((1, 2)) + 0.3 * penalties).sum()
        found = torch.autograd.grad(objective, list(tensors.values()))
    return losses.detach(), dict(zip(tensors, found, strict=True))


@pytest.fixture
def windows() -> Tensor:
    return torch.randint(0, 256, (3, 2, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("mix", ["output", "linear"])
@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_padding_gets_exactly_no_gradient(mix: str, routed: bool, top_k: int, windows: Tensor) -> None:
    model = adapted(routed=routed, mix=mix, top_k=top_k)
    # Even where padding holds something, which it should not.
    rows = torch.randn(model.mask().shape, dtype=torch.float64) * 0.1
    _, found = losses_and_gradients(model, leaves(model, rows), range(3), windows)
    gradient, mask = flatten(list(found.values())), model.mask()
    assert (gradient[~mask] == 0).all()
    if top_k == 3 or not routed:  # otherwise no token may have picked some expert
        assert (gradient[mask] != 0).double().mean() > 0.99


@pytest.mark.parametrize("mix", ["output", "linear"])
def test_padding_says_nothing(mix: str, windows: Tensor) -> None:
    model = adapted(mix=mix)
    rows = random_rows(model)
    wild = torch.where(model.mask(), rows, torch.randn(rows.shape, dtype=torch.float64))
    clean, _ = losses_and_gradients(model, leaves(model, rows), range(3), windows)
    found, _ = losses_and_gradients(model, leaves(model, wild), range(3), windows)
    assert torch.equal(clean, found)


@pytest.mark.parametrize("mix", ["output", "linear"])
@pytest.mark.parametrize("routed", [True, False])
def test_a_padded_user_equals_itself_in_a_federation_of_its_own(mix: str, routed: bool, windows: Tensor) -> None:
    model = adapted(routed=routed, mix=mix)
    tensors = leaves(model, random_rows(model))
    losses, found = losses_and_gradients(model, tensors, range(3), windows)
    for user, specialists in enumerate(SPECIALISTS):
        alone = adapted((specialists,), routed=routed, mix=mix)
        assert any(n.endswith(".router") for n in alone.layout.starts) == (routed and specialists > 0)
        own = {
            name: tensors[name][user : user + 1, : slot.shape[0]].detach().requires_grad_()
            for name, slot in ((slot.name, slot) for slot in alone.layout.slots)
        }
        alone_losses, alone_found = losses_and_gradients(alone, own, [0], windows[user : user + 1])
        torch.testing.assert_close(losses[user], alone_losses[0], **CLOSE)
        for name, gradient in alone_found.items():
            torch.testing.assert_close(found[name][user, : gradient.shape[1]], gradient[0], **CLOSE)


def test_stacked_users_equal_users_alone(windows: Tensor) -> None:
    model = adapted()
    tensors = leaves(model, random_rows(model))
    losses, found = losses_and_gradients(model, tensors, range(3), windows)
    for user in range(3):
        one = {name: t[user : user + 1].detach().requires_grad_() for name, t in tensors.items()}
        alone_losses, alone_found = losses_and_gradients(model, one, [user], windows[user : user + 1])
        torch.testing.assert_close(losses[user], alone_losses[0], **CLOSE)
        for name, gradient in alone_found.items():
            torch.testing.assert_close(found[name][user], gradient[0], **CLOSE)


def test_a_user_may_occupy_several_slots(windows: Tensor) -> None:
    """Also out of order: slots carry users, not positions."""
    model = adapted()
    tensors = leaves(model, random_rows(model))
    slots = [2, 0, 2]
    many = {name: t[slots] for name, t in tensors.items()}
    with honest_double():
        losses, _ = model.losses(many, slots, windows)
        for slot, user in enumerate(slots):
            one = {name: t[user : user + 1] for name, t in tensors.items()}
            alone, _ = model.losses(one, [user], windows[slot : slot + 1])
            torch.testing.assert_close(losses[slot], alone[0], **CLOSE)


def test_users_do_not_see_each_other(windows: Tensor) -> None:
    model = adapted()
    tensors = leaves(model, random_rows(model))
    losses, _ = model.losses(tensors, range(3), windows)
    found = torch.autograd.grad(losses[1].sum(), list(tensors.values()))
    assert all((gradient[[0, 2]] == 0).all() for gradient in found)
    other = windows.clone()
    other[[0, 2]] = (other[[0, 2]] + 1) % 256
    torch.testing.assert_close(model.losses(tensors, range(3), other)[0][1], losses[1], rtol=1e-6, atol=1e-6)


def test_negative_targets_carry_no_loss(windows: Tensor) -> None:
    model = adapted()
    tensors = leaves(model, random_rows(model))
    cut = windows.clone()
    cut[:, :, 4:] = -100
    whole, part = (model.losses(tensors, range(3), w)[0] for w in (windows, cut))
    assert (part[:, :, 3:] == 0).all()
    torch.testing.assert_close(part[:, :, :3], whole[:, :, :3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("routed", [True, False])
def test_the_mask_counts_real_parameters(routed: bool) -> None:
    """Llama, 2 layers of width 32, key and value 16, MLP 88, rank 2."""
    model = adapted(routed=routed)
    attention = 2 * 2 * ((32 + 32) + (32 + 16) + (32 + 16) + (32 + 32))
    expert = 2 * 2 * 3 * (32 + 88)
    expected = []
    for specialists in SPECIALISTS:
        experts = 1 + specialists
        router = 2 * 32 * experts if routed and experts > 1 else 0
        expected.append(attention + experts * expert + router)
    mask = model.mask()
    assert mask.sum(1).tolist() == expected
    assert mask[2].all()  # the user who has most has no padding
    assert mask.shape[1] == model.layout.columns == expected[2]
    assert model.adapters.present.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
