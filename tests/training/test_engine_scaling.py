"""float16: the loss is scaled on its way back, so that small gradients are not lost and large ones do not overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comingle.config import load_recipe
from comingle.runs import api
from comingle.training import steps
from comingle.training.backends.local import InProcess
from comingle.training.steps import Steps, run_with_loss_scaling, starting_scales
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree
from federations import everyone

Federate = Callable[..., InProcess]

BASE = "random:llama?layers=1&dim=32"
METHODS = ["fedavg", "comigs-1g1s", "floral", "floral-mfl", "stacking"]


def first_gradients(federate: Federate, name: str, dtype: str = "float16") -> tuple[torch.Tensor, Tree]:
    """Of everybody's first batch."""
    federation = federate(name, base=BASE, dtype=dtype)
    clients = federation.clients
    federation.download(everyone(federation))
    rows = list(range(clients.num_rows))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # nobody's tensors are zero: then all of them have gradients
        clients.state.rows.add_(0.02 * torch.randn(clients.state.rows.shape))
    cohort, phase = clients.cohort(rows, 0), clients.method.client.phases[0]
    drawn = clients.batch_source.draw(cohort.owners, phase, 0, 0, 0)
    return clients.steps.gradient(cohort, drawn, phase)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_float32_to_the_rounding_of_float16(federate: Federate, name: str) -> None:
    losses, found = first_gradients(federate, name)
    wanted_losses, wanted = first_gradients(federate, name, "float32")
    torch.testing.assert_close(losses, wanted_losses, rtol=2e-3, atol=0)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert found[key].dtype == torch.float32
        assert (found[key] - gradient).norm() <= 0.02 * gradient.norm() + 1e-8, key


def test_what_is_too_small_for_float16_is_not_lost(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses as small as a mean over very many targets has in each: unscaled gradients are 0 there."""

    def share_of_zeros(start: float) -> float:
        monkeypatch.setattr(steps, "starting_scales", lambda targets: torch.full((len(targets),), start))
        weigh = Steps._forward_backward

        def faint(self: Steps, *args: Any, scales: Any = None) -> tuple[torch.Tensor, Tree]:
            losses, gradients = weigh(self, *args, scales=scales * 2**-16)
            return losses, Tree({n: g * 2**16 for n, g in gradients.items()})

        with monkeypatch.context() as patch:
            patch.setattr(Steps, "_forward_backward", faint)
            found = first_gradients(federate, "fedavg")[1]
        entries = torch.cat([g.flatten() for g in found.values()])
        return float((entries == 0).double().mean())

    assert share_of_zeros(1.0) > 0.3
    assert share_of_zeros(2.0**16) < 0.02


def test_who_overflows_takes_the_pass_again_and_nobody_else_notices(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = first_gradients(federate, "comigs-1g1s")
    passes: list[list[float]] = []
    weigh = Steps._forward_backward

    def counted(self: Steps, *args: Any, scales: Any = None) -> tuple[torch.Tensor, Tree]:
        passes.append(scales.tolist())
        return weigh(self, *args, scales=scales)

    monkeypatch.setattr(Steps, "_forward_backward", counted)
    monkeypatch.setattr(
        steps, "starting_scales", lambda targets: starting_scales(targets) * torch.tensor([1, 2.0**20, 1])
    )
    losses, gradients = first_gradients(federate, "comigs-1g1s")
    assert len(passes) > 1
    assert all(scales[::2] == passes[0][::2] for scales in passes)  # the others keep theirs
    assert passes[-1][1] < passes[0][1]
    assert torch.equal(losses, plain[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradients[name][::2], gradient[::2]), name
        assert (gradients[name][1] - gradient[1]).norm() <= 0.01 * gradient[1].norm() + 1e-8, name


def test_scales_are_powers_of_two_near_the_number_of_targets() -> None:
    assert starting_scales(torch.tensor([0, 1, 2, 3, 127, 128])).tolist() == [16, 16, 32, 32, 1024, 2048]


def test_what_no_scale_makes_finite_is_handed_on() -> None:
    """A loss that is not finite is not tried again; a gradient that never fits is, down to the smallest scale."""
    tried: list[list[float]] = []

    def run(scales: torch.Tensor) -> tuple[torch.Tensor, Tree]:
        tried.append(scales.tolist())
        bad = torch.tensor([1.0, 1.0, torch.inf])
        return torch.tensor([1.0, torch.nan, 1.0]), Tree({"w": (scales * bad).unsqueeze(1)})

    _, gradients = run_with_loss_scaling(run, torch.tensor([1, 1, 1]))
    assert gradients["w"][:2].flatten().tolist() == [1, 1]
    assert gradients["w"][2].isinf()
    assert all(scales[:2] == [16, 16] for scales in tried)
    assert tried[-1][2] <= 2.0**-24
    assert len(tried) == 8


@pytest.mark.parametrize("name", ["comigs-1g1s"])
def test_a_run_ends_where_one_in_float32_does(recipe_file: Any, name: str) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": name, "training.experts.learning_rate": 0.01})
    half, full = (
        api.run(recipe.with_changes({"runtime.dtype": dtype})).metrics["mean_test_perplexity"]
        for dtype in ("float16", "float32")
    )
    assert half == pytest.approx(full, rel=0.005)
    assert half != full


def test_examples_are_not_hidden_by_what_is_scaled() -> None:
    """Where recipes are checked: nothing has been read yet."""
    privacy = {"mechanism": "example", "clip_norm": 1.0, "noise_multiplier": 1.0}
    recipe = {"data": {"users": {"ann": "unused.txt"}}, "privacy": privacy, "runtime": {"dtype": "float16"}}
    with pytest.raises(RecipeError, match=r"^runtime.dtype: got 'float16'; .*privacy.mechanism: example.*allowed: "):
        api.run({"base": BASE, "method": "fedavg", **recipe})


def test_nets_have_other_formats() -> None:
    recipe = {"method": "fedavg", "data": {"task": {"name": "mlp-norm", "users": 4}}, "runtime": {"dtype": "float16"}}
    with pytest.raises(RecipeError, match=r"^runtime.dtype: .*float16.*auto, bfloat16"):
        api.run(recipe)
