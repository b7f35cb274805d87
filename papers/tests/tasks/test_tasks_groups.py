from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import Tensor

from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import generator
from comingle_papers.tasks.images import choose_labels, cluster_sizes, deal_images, draw_dirichlet, group_by_labels

KEY = ("cifar100-cluster", 0)


def labels_of(count: int, classes: int) -> Tensor:
    return torch.randint(classes, (count,), generator=generator("labels", count, classes))


def test_fifty_users_are_in_the_papers_clusters() -> None:
    assert cluster_sizes(50, 5) == [6, 5, 8, 13, 18]
    assert cluster_sizes(100, 5) == [12, 10, 16, 26, 36]


@pytest.mark.parametrize(("users", "clusters"), [(5, 5), (6, 5), (7, 5), (11, 5), (23, 5), (10, 3), (3, 3), (9, 1)])
def test_every_cluster_has_a_user(users: int, clusters: int) -> None:
    sizes = cluster_sizes(users, clusters)
    assert len(sizes) == clusters
    assert sum(sizes) == users
    assert min(sizes) >= 1
    if clusters == 5:
        for size, published in zip(sizes, (6, 5, 8, 13, 18), strict=True):
            assert abs(size - users * published / 50) < 1.5
    else:
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("classes", "clusters"), [(100, 5), (10, 5), (10, 3), (7, 7)])
def test_every_label_is_in_one_cluster(classes: int, clusters: int) -> None:
    chosen = choose_labels(classes, clusters, None, KEY)
    assert sorted(label for own in chosen for label in own) == list(range(classes))
    assert max(map(len, chosen)) - min(map(len, chosen)) <= 1
    assert chosen == choose_labels(classes, clusters, None, KEY)
    assert classes == clusters or chosen != choose_labels(classes, clusters, None, ("cifar100-cluster", 1))


@pytest.mark.parametrize(("classes", "clusters", "each"), [(100, 5, 30), (100, 5, 20), (10, 5, 3), (10, 3, 10)])
def test_clusters_of_more_labels_overlap_evenly(classes: int, clusters: int, each: int) -> None:
    chosen = choose_labels(classes, clusters, each, KEY)
    assert [len(set(own)) for own in chosen] == [each] * clusters
    uses = Counter(label for own in chosen for label in own)
    assert sorted(uses) == list(range(classes))
    assert max(uses.values()) - min(uses.values()) <= 1


@pytest.mark.parametrize(
    ("classes", "clusters", "each", "message"),
    [
        (10, 11, None, "task 'cifar100-cluster': clusters=11; allowed: 1 to 10, the number of labels"),
        (100, 5, 19, "labels_per_cluster=19; allowed: 20, so that every label is used, to 100, all labels"),
        (100, 5, 101, "labels_per_cluster=101; allowed: 20, so that every label is used, to 100, all labels"),
    ],
)
def test_labels_that_do_not_fit_the_clusters_are_said(
    classes: int, clusters: int, each: int | None, message: str
) -> None:
    with pytest.raises(RecipeError) as error:
        choose_labels(classes, clusters, each, KEY)
    assert message in str(error.value)


def test_images_follow_their_labels_to_the_clusters() -> None:
    labels = labels_of(1000, 10)
    chosen = choose_labels(10, 5, None, KEY)
    groups = group_by_labels(labels, chosen, [1] * 5, KEY)
    assert sorted(torch.cat(groups).tolist()) == list(range(1000))
    assert [sorted(set(labels[group].tolist())) for group in groups] == chosen


def test_images_of_a_label_of_two_clusters_are_parted_by_their_users() -> None:
    labels = torch.tensor([0] * 40 + [1] * 40 + [2] * 9)
    groups = group_by_labels(labels, [[0, 1], [1, 2]], [3, 1], KEY)
    assert sorted(torch.cat(groups).tolist()) == list(range(89))
    assert labels[groups[0]].bincount().tolist() == [40, 30]
    assert labels[groups[1]].bincount().tolist() == [0, 10, 9]
    shared = sorted(groups[0][labels[groups[0]] == 1].tolist())
    assert shared != list(range(shared[0], shared[0] + 30))  # at random


def test_even_shares_of_consecutive_users() -> None:
    labels = labels_of(103, 4)
    groups = [torch.arange(40), torch.arange(40, 103)]
    parts = deal_images(groups, [3, 2], labels, alpha=None, key=KEY)
    assert [len(part) for part in parts] == [14, 13, 13, 32, 31]
    assert sorted(torch.cat(parts[:3]).tolist()) == list(range(40))
    assert sorted(torch.cat(parts[3:]).tolist()) == list(range(40, 103))
    again, other = (deal_images(groups, [3, 2], labels, alpha=None, key=("cifar100-cluster", s)) for s in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not torch.equal(parts[0], other[0])


def test_fewer_images_than_users_is_said() -> None:
    with pytest.raises(DataError) as error:
        deal_images([torch.arange(2)], [3], labels_of(2, 2), alpha=None, key=KEY)
    assert str(error.value) == (
        "task 'cifar100-cluster': 2 images for 3 users; allowed: at least one per user: more images, or fewer users"
    )


# ---------------------------------------------------------------- Dirichlet shares


@pytest.fixture
def partitioners() -> None:
    pytest.importorskip("flwr_datasets", reason="PACKAGE ABSENT: pip install flwr-datasets", exc_type=ImportError)


def entropy_of_labels(labels: Tensor, parts: list[Tensor]) -> float:
    """Mean over users, in nats."""
    shares = torch.stack([labels[part].bincount(minlength=10) / len(part) for part in parts])
    return torch.special.entr(shares).sum(1).mean().item()


@pytest.mark.usefixtures("partitioners")
def test_dirichlet_shares_part_the_images_and_skew_the_labels() -> None:
    labels = labels_of(3000, 10)
    entropies = []
    for alpha in (0.1, 1.0, 1000.0):
        parts = draw_dirichlet(labels, 20, alpha=alpha, key=KEY)
        assert sorted(torch.cat(parts).tolist()) == list(range(3000))
        assert min(map(len, parts)) >= 7  # a twentieth of the average is less than the ten labels
        entropies.append(entropy_of_labels(labels, parts))
    assert entropies[0] < 1.2 < entropies[1] < 2.2 < entropies[2]
    even = torch.stack([labels[part].bincount(minlength=10) for part in parts])
    # Dir(1000) over 20 users: shares have a standard deviation of sqrt(.05 * .95 / 20001), 0.5 images of 300.
    assert (even - labels.bincount() / 20).abs().max() < 5


@pytest.mark.usefixtures("partitioners")
def test_dirichlet_shares_follow_the_key_alone() -> None:
    labels = labels_of(600, 10)
    first, again = (draw_dirichlet(labels, 5, alpha=0.3, key=KEY) for _ in range(2))
    other = draw_dirichlet(labels, 5, alpha=0.3, key=("cifar100-cluster", 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [len(part) for part in first] != [len(part) for part in other]
    # Within a user images are not sorted by label.
    assert any(not torch.equal(labels[part], labels[part].sort().values) for part in first)


@pytest.mark.usefixtures("partitioners")
def test_shares_that_leave_somebody_with_nothing_are_said() -> None:
    with pytest.raises(DataError) as error:
        draw_dirichlet(labels_of(300, 2), 90, alpha=0.01, key=KEY)
    assert str(error.value) == (
        "task 'cifar100-cluster': no draw of alpha=0.01 gives each of 90 users 4 of 300 images; "
        "allowed: fewer users, a larger alpha or more images"
    )


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    monkeypatch.delitem(sys.modules, "flwr_datasets.partitioner", raising=False)
    with pytest.raises(DataError, match=r"needs the package flwr-datasets: pip install 'comingle-papers\[flower\]'"):
        draw_dirichlet(labels_of(30, 3), 2, alpha=1.0, key=KEY)
