from __future__ import annotations

import math

import pytest
import torch

from comingle.models.routers import ClientRouter
from comingle.utils.errors import RecipeError


def test_a_new_router_mixes_the_clusters_equally() -> None:
    router = ClientRouter(4)
    assert router.theta.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(router.mixture(), torch.full((4,), 0.25))
    assert router().tolist() == router.mixture().tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_mixture_is_a_softmax_of_theta_over_the_temperature_and_is_not_clamped(temperature: float) -> None:
    router = ClientRouter(3, temperature=temperature, dtype=torch.float64)
    values = [0.3, -20.0, 1.2]
    router.theta.data = torch.tensor(values, dtype=torch.float64)
    weights = [math.exp(value / temperature) for value in values]
    expected = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    torch.testing.assert_close(router.mixture(), expected, rtol=1e-12, atol=0)
    router.mixture()[1].backward()
    assert router.theta.grad is not None
    assert (router.theta.grad != 0).all()


def test_noise_is_drawn_in_training_only_with_the_standard_deviation_asked_for() -> None:
    router = ClientRouter(2, noise=0.3, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = torch.stack([router.mixture().detach() for _ in range(4000)])
    # log pi_0 - log pi_1 is the difference of two independent draws of noise.
    assert (draws[:, 0] / draws[:, 1]).log().std() == pytest.approx(0.3 * math.sqrt(2), rel=0.05)
    router.eval()
    assert router.mixture().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clusters": 0}, "num_clusters: got 0;"),
        ({"num_clusters": 2, "temperature": 0.0}, "router temperature: got 0.0;"),
        ({"num_clusters": 2, "noise": -1.0}, "router noise: got -1.0;"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        ClientRouter(**settings)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
