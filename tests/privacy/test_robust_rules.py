"""Each rule against an implementation of its own, in loops over users and coordinates; and what it withstands."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from comingle.audits import uploads as attacks
from comingle.privacy import robust
from comingle.utils.trees import Tree

Vectors = NDArray[np.float64]


def stacked(users: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tree:
    """Uploads with tensors of several shapes, one of them a single number."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (5,), "c": ()}
    return {name: torch.randn(users, *shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


def vectors(uploads: Tree) -> Vectors:
    return torch.cat([t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in uploads.values()], 1).numpy()


def vector(tree: Tree) -> Vectors:
    return torch.cat([t.flatten() for t in tree.values()]).numpy()


# -------------------------------------------------------------------- naive


def naive_median(rows: Vectors) -> Vectors:
    found = []
    for column in rows.T:
        ordered, middle = sorted(column), len(column) // 2
        found.append(ordered[middle] if len(column) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
    return np.array(found)


def naive_trimmed(rows: Vectors, hostile: int) -> Vectors:
    return np.array([sum(sorted(c)[hostile : len(c) - hostile]) / (len(c) - 2 * hostile) for c in rows.T])


def naive_order(rows: Vectors, hostile: int) -> list[int]:
    scores = []
    for i, one in enumerate(rows):
        others = [other for j, other in enumerate(rows) if j != i]
        apart = sorted(sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) for other in others)
        scores.append((sum(apart[: max(1, len(rows) - hostile - 2)]), sum(apart)))
    return sorted(range(len(rows)), key=scores.__getitem__)


def naive_krum(rows: Vectors, hostile: int) -> Vectors:
    return rows[naive_order(rows, hostile)[0]]


def naive_multi_krum(rows: Vectors, hostile: int) -> Vectors:
    return np.mean([rows[i] for i in naive_order(rows, hostile)[: len(rows) - hostile - 2]], 0)


def naive_bulyan(rows: Vectors, hostile: int) -> Vectors:
    left, chosen = [list(row) for row in rows], []
    while len(chosen) < len(rows) - 2 * hostile:
        chosen.append(left.pop(naive_order(np.array(left), hostile)[0]))
    middle = naive_median(np.array(chosen))
    found = []
    for column, centre in zip(np.array(chosen).T, middle, strict=True):
        nearest = sorted(column, key=lambda x, m=centre: abs(x - m))[: len(rows) - 4 * hostile]
        found.append(sum(nearest) / len(nearest))
    return np.array(found)


PAIRS: dict[str, tuple[Callable[[Tree, int], robust.Combined], Callable[[Vectors, int], Vectors]]] = {
    "median": (lambda uploads, hostile: robust.coordinate_median(uploads), lambda rows, hostile: naive_median(rows)),
    "trimmed-mean": (robust.trimmed_mean, naive_trimmed),
    "krum": (robust.krum, naive_krum),
    "multi-krum": (robust.multi_krum, naive_multi_krum),
    "bulyan": (robust.bulyan, naive_bulyan),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("users", "hostile"), [(3, 0), (7, 1), (8, 1), (11, 2), (12, 2)])
def test_a_rule_is_what_loops_make_of_it(name: str, users: int, hostile: int) -> None:
    rule, naive = PAIRS[name]
    for seed in range(5):
        uploads = stacked(users, seed)
        found, expected = rule(uploads, hostile).tensors, naive(vectors(uploads), hostile)
        np.testing.assert_allclose(vector(found), expected, rtol=1e-12)


def away(point: Vectors, rows: Vectors, weights: Vectors) -> float:
    return float((weights * np.linalg.norm(rows - point, axis=1)).sum())


@pytest.mark.parametrize("users", [3, 8, 21])
def test_the_geometric_median_is_what_a_minimiser_finds(users: int) -> None:
    for seed in range(3):
        uploads = stacked(users, seed)
        weights = torch.rand(users, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
        weights /= weights.sum()
        rows, shares = vectors(uploads), weights.numpy()
        found = vector(robust.geometric_median(uploads, weights).tensors)
        least = minimize(away, rows.mean(0), args=(rows, shares), method="BFGS", options={"gtol": 1e-9})
        assert away(found, rows, shares) <= least.fun + 1e-9
        np.testing.assert_allclose(found, least.x, atol=1e-4)


def test_norms_are_bounded_and_short_changes_stay() -> None:
    uploads = stacked(9)
    rows = vectors(uploads)
    lengths = [math.sqrt(sum(x * x for x in row)) for row in rows]
    for bound in (None, 2.0):
        limit = sorted(lengths)[4] if bound is None else bound
        expected = [row * min(1.0, limit / length) for row, length in zip(rows, lengths, strict=True)]
        np.testing.assert_allclose(vectors(robust.norm_bound(uploads, bound)), expected, rtol=1e-12)


# -------------------------------------------------------------------- whose counted


def naive_counted(name: str, rows: Vectors, hostile: int) -> Vectors:
    """In how many of the coordinates each one's own value is used."""
    users, columns = rows.shape
    counted = np.zeros(users)
    if name in ("krum", "multi-krum"):
        counted[naive_order(rows, hostile)[: 1 if name == "krum" else users - hostile - 2]] = 1
        return counted
    for column in range(columns):
        order = sorted(range(users), key=rows[:, column].tolist().__getitem__)
        middle = (users - 1) // 2
        used = order[middle : users - middle] if name == "median" else order[hostile : users - hostile]
        counted[used] += 1 / columns
    return counted


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
@pytest.mark.parametrize(("users", "hostile"), [(3, 0), (8, 1), (11, 2)])
def test_a_rule_says_how_much_of_each_upload_counts(name: str, users: int, hostile: int) -> None:
    uploads = stacked(users, 3)
    found = PAIRS[name][0](uploads, hostile).counted
    np.testing.assert_allclose(found, naive_counted(name, vectors(uploads), hostile), atol=1e-12)


def test_bulyan_uses_so_many_values_and_none_of_who_was_not_chosen() -> None:
    uploads = stacked(12, 1)
    for t in uploads.values():
        t[:2] += 50
    counted = robust.bulyan(uploads, 2).counted
    assert counted.sum() == pytest.approx(12 - 4 * 2)  # values of each coordinate
    assert counted[:2].tolist() == [0, 0]
    assert int((counted == 0).sum()) >= 4


def test_the_geometric_median_pulls_less_on_who_is_far() -> None:
    uploads = stacked(9, 1)
    for t in uploads.values():
        t[0] += 1000
    combined = robust.geometric_median(uploads, _equal(uploads))
    apart = np.linalg.norm(vectors(uploads) - vector(combined.tensors), axis=1)
    np.testing.assert_allclose(combined.counted, np.minimum(1, np.median(apart) / apart), rtol=1e-6)
    assert combined.counted[0] < 0.01


# -------------------------------------------------------------------- laws

ALL: dict[str, Callable[[Tree, int], Tree]] = {
    **{name: lambda uploads, hostile, rule=rule: rule(uploads, hostile).tensors for name, (rule, _) in PAIRS.items()},
    "geometric-median": lambda uploads, hostile: robust.geometric_median(uploads, _equal(uploads)).tensors,
    "norm-bound": lambda uploads, hostile: {n: t.mean(0) for n, t in robust.norm_bound(uploads).items()},
}


def _equal(uploads: Tree) -> torch.Tensor:
    users = len(uploads["a"])
    return torch.full((users,), 1 / users, dtype=torch.float64)


@pytest.mark.parametrize("name", ALL)
def test_users_who_send_the_same_get_it_back_and_their_order_is_nothing(name: str) -> None:
    same = {n: t[:1].expand(11, *t.shape[1:]) for n, t in stacked(1).items()}
    np.testing.assert_allclose(vector(ALL[name](same, 2)), vectors(same)[0], rtol=1e-9)
    uploads = stacked(11)
    turned = {n: t.flip(0) for n, t in uploads.items()}
    np.testing.assert_allclose(vector(ALL[name](turned, 2)), vector(ALL[name](uploads, 2)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum", "bulyan", "geometric-median"])
@pytest.mark.parametrize("size", [1e3, 1e18, 1e30])
def test_no_size_of_an_upload_carries_the_result_off(name: str, size: float) -> None:
    """Nor does it round the others away: what two hostile of eleven send is as if it were a little out of sight."""
    uploads = stacked(11, dtype=torch.float32)
    honest = vectors({n: t[2:] for n, t in uploads.items()})
    for t in uploads.values():
        t[:2] = size
    found = vector(ALL[name](uploads, 2))
    assert np.linalg.norm(found - honest.mean(0)) < np.linalg.norm(honest, axis=1).max()


# -------------------------------------------------------------------- against attacks

SMALL_SPREAD = 0.3
"""Of honest users' changes around what all have in common, whose length is 1 in each coordinate."""


def population(users: int, seed: int) -> Tree:
    common = stacked(1, 100 + seed)
    return {n: common[n].sign() + SMALL_SPREAD * t for n, t in stacked(users, seed).items()}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("attack", ["sign flip", "noise", "inner product"])
def test_defences_stay_near_the_honest_mean_where_the_mean_does_not(share: float, attack: str) -> None:
    users, hostile = 40, list(range(round(40 * share)))
    for seed in range(3):
        attacked = attacks.BY_NAME[attack](population(users, seed), hostile)
        honest = vectors({n: t[len(hostile) :] for n, t in attacked.items()}).mean(0)
        undefended = np.linalg.norm(vectors(attacked).mean(0) - honest)
        assert undefended > 0.4
        for name, rule in ALL.items():
            if name in ("krum", "norm-bound") or (name == "bulyan" and share > 0.2):
                continue
            assert np.linalg.norm(vector(rule(attacked, len(hostile))) - honest) < undefended / 2, name


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_a_bound_on_norms_bounds_what_hostile_users_move(share: float) -> None:
    """Each moves the mean by twice the median norm over the number of users at most, whatever it sends."""
    users, hostile = 40, list(range(round(40 * share)))
    honest = population(users, 0)
    limit = float(robust.norms(honest).quantile(1.0))
    for attack in attacks.BY_NAME.values():
        attacked = attack(honest, hostile)
        moved = vector({n: t.mean(0) for n, t in robust.norm_bound(attacked, limit).items()}) - vectors(honest).mean(0)
        assert np.linalg.norm(moved) <= 2 * limit * share * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_little_is_enough_hides_among_the_honest(share: float) -> None:
    """It has the deviation that its authors say: no coordinate is further off than honest ones are."""
    users, hostile = 40, list(range(round(40 * share)))
    honest = population(users, 0)
    attacked = attacks.little_is_enough(honest, hostile)
    rest = vectors({n: t[len(hostile) :] for n, t in honest.items()})
    z = (rest.mean(0) - vectors(attacked)[0]) / rest.std(0, ddof=1)
    assert np.ptp(z) < 1e-9
    beyond = 0.5 * math.erfc(z[0] / math.sqrt(2)) * len(rest)
    assert beyond == pytest.approx(users // 2 + 1 - len(hostile), rel=1e-9)


def test_attacks_replace_hostile_rows_alone() -> None:
    honest, started = population(10, 0), stacked(10, 7)
    for attack in (*attacks.BY_NAME.values(), attacks.not_a_number, lambda c, h: attacks.all_zero(c, h, started)):
        attacked = attack(honest, [2, 5])
        rest = [0, 1, 3, 4, 6, 7, 8, 9]
        for name, t in attacked.items():
            assert torch.equal(t[rest], honest[name][rest])
            assert not torch.equal(t[2], honest[name][2])
    zero = attacks.all_zero(honest, [2, 5], started)
    assert all(not (t + started[name])[[2, 5]].any() for name, t in zero.items())
    assert attacks.flipped_labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    assert attacks.with_phrase("One. Two.", "if so", "then no") == "One if so then no. Two. if so then no"
