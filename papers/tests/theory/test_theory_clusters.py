"""FLoRAL's local SGD over clusters: closed forms against enumerated draws, its lemmas, and what the paper prints."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import optimize

from comingle_papers.theory.clusters import (
    Cluster,
    Descent,
    Schedule,
    descend,
    descent_bound,
    draw_clients,
    drift_bound,
    error_bound,
    estimate_weights,
    local_sgd_bound,
    printed_rate,
    rate_bound,
    uniformity,
)


def cluster_of(seed: int, clients: int = 4, size: int = 3, condition: float = 9.0) -> tuple[Cluster, np.ndarray]:
    """A cluster, and what uniform routers make of its weights."""
    rng = np.random.default_rng(seed)
    hessians, centres = draw_clients(rng, clients, size, condition)
    amounts, shares = rng.dirichlet(np.full(clients, 3.0)), rng.uniform(0.05, 0.95, clients)
    return Cluster(hessians=hessians, centres=centres, weights=amounts * shares / (amounts @ shares)), amounts


def run(cluster: Cluster, guessed: np.ndarray, schedule: Schedule, steps: int, replicas: int = 48) -> Descent:
    start = 2 * np.ones(cluster.centres.shape[1])
    rng = np.random.default_rng(5)
    return descend(
        cluster, schedule, initial_weights=guessed, decay=0.5, start=start, steps=steps, replicas=replicas, rng=rng
    )


def as_it_holds(cluster: Cluster, guessed: np.ndarray, local_steps: int) -> Schedule:
    mu, smooth = cluster.moduli
    shift = max(local_steps, 24 * smooth / mu / uniformity(cluster.weights, guessed))
    return Schedule(scale=3, shift=shift, local_steps=local_steps)


# ---------------------------------------------------------------- closed forms


def test_gradients_are_those_of_the_gap() -> None:
    cluster, _ = cluster_of(0)
    point = np.array([0.3, -1.0, 2.0])
    slope = optimize.approx_fprime(point, lambda w: float(cluster.gap(w)), 1e-7)
    np.testing.assert_allclose(cluster.gradient_moments(point)[0], slope, rtol=1e-5)
    np.testing.assert_allclose(cluster.gradient_moments(cluster.minimiser)[0], 0, atol=1e-12)
    found = optimize.minimize(lambda w: float(cluster.gap(w)), np.zeros(3), tol=1e-12)
    np.testing.assert_allclose(found.x, cluster.minimiser, atol=1e-5)


def test_expectations_are_those_of_all_draws() -> None:
    cluster, guessed = cluster_of(1, clients=3)
    schedule = Schedule(scale=1, shift=20.0, local_steps=2)
    found = run(cluster, guessed, schedule, 1, replicas=2)
    start, best = 2 * np.ones(3), cluster.minimiser
    true = sum(p * h @ (start - m) for p, h, m in zip(cluster.weights, cluster.hessians, cluster.centres, strict=True))
    after = wrong = 0.0
    for drawn in product(range(3), repeat=3):  # everybody's own
        chance = np.prod(cluster.weights[list(drawn)])
        mean = sum(guessed[k] * cluster.hessians[i] @ (start - cluster.centres[i]) for k, i in enumerate(drawn))
        after += chance * np.sum((start - found.step_sizes[0] * mean - best) ** 2)
        wrong += chance * np.sum((true - mean) ** 2)
    assert found.next_squared_distance[0] == pytest.approx(after, rel=1e-12)
    assert found.squared_error[0] == pytest.approx(wrong, rel=1e-12)


def test_a_descent_is_that_of_a_naive_loop() -> None:
    cluster, guessed = cluster_of(2)
    schedule = Schedule(scale=2, shift=30.0, local_steps=3)
    found = run(cluster, guessed, schedule, 7, replicas=2)
    rng, mu = np.random.default_rng(5), cluster.moduli[0]
    models = [[2 * np.ones(3) for _ in range(4)] for _ in range(2)]
    distances = []
    for t in range(7):
        if t % 3 == 0:
            trusted = cluster.weights + (1 + t / 30) ** -0.25 * (guessed - cluster.weights)
        virtual = [sum(trusted[k] * models[r][k] for k in range(4)) for r in range(2)]
        distances.append(np.mean([np.sum((w - cluster.minimiser) ** 2) for w in virtual]))
        drawn = rng.choice(4, size=(2, 4), p=cluster.weights)
        for r, k in product(range(2), range(4)):
            i = drawn[r, k]
            models[r][k] = models[r][k] - 2 / (mu * (t + 30)) * cluster.hessians[i] @ (
                models[r][k] - cluster.centres[i]
            )
        if (t + 1) % 3 == 0:
            models = [[sum(trusted[k] * models[r][k] for k in range(4))] * 4 for r in range(2)]
    np.testing.assert_allclose(found.squared_distance, distances, rtol=1e-12)


# ---------------------------------------------------------------- what holds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("mismatch", [0.0, 0.4, 1.0])
@pytest.mark.sampled(5)
def test_every_lemma_and_the_rate_hold(seed: int, local_steps: int, mismatch: float) -> None:
    cluster, amounts = cluster_of(seed)
    guessed = cluster.weights + mismatch * (amounts - cluster.weights)
    schedule = as_it_holds(cluster, guessed, local_steps)
    found = run(cluster, guessed, schedule, 120)
    assert (found.squared_error <= error_bound(found, cluster)).all()
    assert (found.drift <= drift_bound(found, local_steps)).all()
    assert (found.next_squared_distance <= descent_bound(found, cluster, local_steps)).all()
    assert (found.average_gap <= rate_bound(found, cluster, schedule)).all()
    if mismatch == 0:  # Corollary A.5: local SGD's own descent, which Lemma A.4 is no tighter than
        assert (found.next_squared_distance <= local_sgd_bound(found, cluster) * (1 + 1e-12)).all()
        assert (local_sgd_bound(found, cluster) <= descent_bound(found, cluster, local_steps)).all()


@pytest.mark.slow
def test_the_rate_says_something() -> None:
    """Ten times the steps leave less than a seventh of the bound, once the start is forgotten."""
    cluster, _ = cluster_of(3)
    schedule = as_it_holds(cluster, cluster.weights, 2)
    bound = rate_bound(run(cluster, cluster.weights, schedule, 4000, replicas=2), cluster, schedule)
    assert bound[-1] < bound[399] / 7


@pytest.mark.parametrize("seed", range(10))
def test_a_guess_stays_between_its_start_and_the_truth(seed: int) -> None:
    cluster, start = cluster_of(seed)
    least = uniformity(cluster.weights, start)
    sizes = [np.abs(estimate_weights(cluster, start, t, 50.0, 0.5) - cluster.weights).sum() for t in (0, 10, 1000)]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert sizes[2] == pytest.approx(sizes[0] * (1 + 1000 / 50) ** -0.25)
    assert all(
        (estimate_weights(cluster, start, t, 50.0, 0.5) >= least * cluster.weights - 1e-15).all() for t in (0, 10, 1000)
    )


# ---------------------------------------------------------------- what the paper says too strongly


def test_one_draw_for_all_clients_has_no_variance_reduction() -> None:
    """L1: eq. 4 has one i_t. Then Lemma A.2 fails: its first term is of independent draws."""
    cluster, _ = cluster_of(0, clients=8)
    even = Cluster(hessians=cluster.hessians, centres=cluster.centres, weights=np.full(8, 1 / 8))
    models = np.ones((8, 3))
    mean, spread, _ = even.gradient_moments(models)
    drawn = even.gradients(models)  # by client, then by whom everybody has drawn
    shared = np.mean([np.sum((even.weights @ mean - even.weights @ drawn[:, i]) ** 2) for i in range(8)])
    assert shared == pytest.approx(spread.max())
    assert shared > 2 * spread.max() * np.sum(even.weights**2)


def test_one_draw_for_a_round_is_biased_in_its_second_step() -> None:
    """L2: eq. 4 draws every H steps, but the gradient of who was drawn before is not one of the mean in expectation."""
    cluster, _ = cluster_of(1)
    start = np.ones(3)
    first = [start - 0.05 * h @ (start - m) for h, m in zip(cluster.hessians, cluster.centres, strict=True)]
    again = [h @ (w - m) for w, h, m in zip(first, cluster.hessians, cluster.centres, strict=True)]
    wanted = [cluster.gradient_moments(w)[0] for w in first]
    assert np.abs(cluster.weights @ np.array(again) - cluster.weights @ np.array(wanted)).max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("condition", [10.0, pytest.param(50.0, marks=pytest.mark.slow)])
def test_the_printed_rate_fails_without_noise_where_ours_holds(condition: float) -> None:
    """L9: gradient descent on two numbers, one client that routers know: the average falls behind the printed rate."""
    cluster = Cluster(hessians=np.diag([1.0, condition])[None], centres=np.zeros((1, 2)), weights=np.ones(1))

    def descent(schedule: Schedule) -> Descent:
        start, rng = np.array([1.0, 0.0]), np.random.default_rng(0)
        return descend(
            cluster, schedule, initial_weights=np.ones(1), decay=0.5, start=start, steps=8000, replicas=1, rng=rng
        )

    printed = Schedule(scale=1, shift=4 * condition, local_steps=1)
    found = descent(printed)
    assert found.variance == pytest.approx(0)
    assert found.average_gap[-1] > 1.5 * printed_rate(found, cluster, printed, 0.5)[-1]
    # 9/8 mu D^2 (s - 1)^2 / T^2, by hand: w_t = (s - 1) / (t + s - 1), averaged with weights (t + s)^2.
    t = np.arange(8000) + 4 * condition
    assert found.average_gap[-1] == pytest.approx(
        (((4 * condition - 1) * t**2 / (t - 1)).sum() / (t**2).sum()) ** 2 / 2
    )
    ours = as_it_holds(cluster, np.ones(1), 1)
    held = descent(ours)
    assert (held.average_gap <= rate_bound(held, cluster, ours)).all()
