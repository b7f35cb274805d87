"""FedMerge's settings: personal, cluster and domain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comingle.data.samples.samples import SPLITS, UserSamples
from comingle.utils.errors import DataError, RecipeError
from comingle_papers.tasks.image_tasks import TASKS
from comingle_papers.tasks.kind import KIND as TASK_KIND
from comingle_papers.tasks.kind import Task, make_task

MakeFolder = Callable[..., Path]
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Images that name themselves: the first two pixels of image i are i in base 256; noise elsewhere.

    Train and test of one data set are numbered through, ``labels`` are drawn unevenly.
    """

    def make(name: str, *, train: int = 900, test: int = 180, labels: int = 10, size: int = 8) -> Path:
        random = np.random.default_rng(labels)
        shape = (size, size) if name == "mnist" else (3, size, size)
        pixels = random.integers(0, 256, (train + test, *shape), dtype=np.uint8)
        numbers = np.arange(train + test)
        pixels[..., 0, 0], pixels[..., 0, 1] = (
            (n.reshape(-1, *[1] * (len(shape) - 2))) for n in (numbers // 256, numbers % 256)
        )
        classes = random.choice(labels, train + test, p=(weights := np.arange(1, labels + 1)) / weights.sum())
        if name == "pacs":
            content = {"images": pixels, "label": classes, "domain": random.integers(0, 4, train + test)}
            np.savez(tmp_path / "pacs32.npz", **content, domains=np.array(DOMAINS))
            return tmp_path
        for split, part in (("train", slice(train)), ("test", slice(train, None))):
            np.savez(tmp_path / f"{name}-{split}.npz", images=pixels[part], labels=classes[part])
        return tmp_path

    return make


def numbers(images: Tensor, name: str) -> list[int]:
    """Which images these are."""
    colours = TASKS[name].colours
    first = images[:, 0, 0, :2]
    if colours is not None:
        first = first * colours[1][0] + colours[0][0]
    high, low = (first * 255).round().long().T
    return (256 * high + low).tolist()


def held(user: UserSamples, name: str) -> list[int]:
    return [number for split in SPLITS for number in numbers(user.split(split).inputs, name)]


def labels_of(user: UserSamples) -> Tensor:
    return torch.cat([user.split(split).targets for split in SPLITS])


@pytest.mark.parametrize("name", ["mnist-cluster", "cifar10-cluster", "cifar100-cluster", "pacs"])
def test_every_image_goes_to_one_split_of_one_user(make_folder: MakeFolder, name: str) -> None:
    files = TASKS[name].images
    folder = make_folder(files, labels=TASKS[name].classes if files != "cifar100" else 20)
    task = make_task(name, seed=0, path=folder, **({} if name == "pacs" else {"users": 12}))
    assert sorted(number for user in task.users for number in held(user, name)) == list(range(1080))
    assert task.input_shape == ((1, 8, 8) if files == "mnist" else (3, 8, 8))
    assert (task.loss, task.net, task.augment, task.classes) == ("cross_entropy", "resnet9", False, TASKS[name].classes)
    path = next(folder.glob("*-test.npz"), None)
    if path is not None:  # the data set's own test images are among everybody's
        known = dict(zip(range(900, 1080), np.load(path)["labels"].tolist(), strict=True))
        found = {
            number: label
            for user in task.users
            for number, label in zip(held(user, name), labels_of(user).tolist(), strict=True)
        }
        assert {number: found[number] for number in known} == known


@pytest.mark.parametrize("name", ["cifar10-cluster", "pacs"])
def test_the_splits_of_a_user_have_one_distribution_of_labels(make_folder: MakeFolder, name: str) -> None:
    task = make_task(
        name, seed=0, path=make_folder(TASKS[name].images, labels=TASKS[name].classes, train=4000, test=800)
    )
    for user in task.users:
        total = len(labels_of(user))
        assert len(user.test) == round(total / 6)
        assert len(user.valid) == round((total - len(user.test)) / 10)
        every = labels_of(user).bincount(minlength=10)
        for split, share in (("test", 1 / 6), ("valid", 5 / 60)):
            counts = user.split(split).targets.bincount(minlength=10)
            assert (counts - share * every).abs().max() <= 1.1
        trained = set(user.train.targets.tolist())
        assert set(labels_of(user).tolist()) == trained


def test_clusters_are_consecutive_users_of_the_same_labels(make_folder: MakeFolder) -> None:
    task = make_task("cifar10-cluster", seed=0, path=make_folder("cifar10", train=3000, test=600))
    assert len(task.users) == 50
    assert [user.name for user in task.users] == [f"user-{k}" for k in range(50)]
    assert [user.cluster for user in task.users] == [0] * 6 + [1] * 5 + [2] * 8 + [3] * 13 + [4] * 18
    labels = [set(labels_of(user).tolist()) for user in task.users]
    groups = {user.cluster: own for user, own in zip(task.users, labels, strict=True)}
    assert sorted(label for own in groups.values() for label in own) == list(range(10))
    assert all(own == groups[user.cluster] for user, own in zip(task.users, labels, strict=True))
    for cluster in range(5):  # evenly
        sizes = {len(labels_of(user)) for user in task.users if user.cluster == cluster}
        assert max(sizes) - min(sizes) <= 1


def test_clusters_may_overlap_as_in_the_public_code(make_folder: MakeFolder) -> None:
    task = make_task("cifar10-cluster", seed=0, users=10, labels_per_cluster=3, path=make_folder("cifar10"))
    groups = {user.cluster: set(labels_of(user).tolist()) for user in task.users}
    assert [len(own) for own in groups.values()] == [3] * 5
    assert set(Counter(label for own in groups.values() for label in own).values()) == {1, 2}


def test_domains_are_users(make_folder: MakeFolder) -> None:
    folder = make_folder("pacs", labels=7)
    domain = np.load(folder / "pacs32.npz")["domain"]
    task = make_task("pacs", seed=0, path=folder)
    assert [(user.name, user.cluster) for user in task.users] == list(zip(DOMAINS, range(4), strict=True))
    assert task.clusters == 4
    for k, user in enumerate(task.users):
        assert set(domain[held(user, "pacs")]) == {k}
    more = make_task("pacs", seed=0, users=6, path=folder)
    assert [user.name for user in more.users] == [
        "art_painting-0", "art_painting-1", "cartoon-0", "cartoon-1", "photo", "sketch"
    ]  # fmt: skip
    assert [user.cluster for user in more.users] == [0, 0, 1, 1, 2, 3]
    assert set(domain[held(more.users[3], "pacs")]) == {1}


def test_personal_users_have_few_labels(make_folder: MakeFolder) -> None:
    pytest.importorskip("flwr_datasets", reason="PACKAGE ABSENT: pip install flwr-datasets", exc_type=ImportError)
    folder = make_folder("cifar10", train=3000, test=600)
    task = make_task("cifar10-personal", seed=0, users=10, path=folder)
    assert sorted(n for user in task.users for n in held(user, "cifar10-personal")) == list(range(3600))
    assert {user.cluster for user in task.users} == {None}
    even = make_task("cifar10-personal", seed=0, users=10, alpha=1000, path=folder)
    few, many = ([len(user.train.targets.unique()) for user in t.users] for t in (task, even))
    assert sum(few) / 10 < 6
    assert set(many) == {10}
    for user in (*task.users, *even.users):
        assert set(labels_of(user).tolist()) == set(user.train.targets.tolist())
        assert len(user.test) >= 1
        assert len(user.valid) >= 1


def same(first: Task, second: Task, *splits: Any) -> bool:
    return all(
        torch.equal(a.split(split).inputs, b.split(split).inputs)
        for a, b in zip(first.users, second.users, strict=True)
        for split in splits
    )


def test_samples_follow_the_seed_and_splits_do_not_move_each_other(make_folder: MakeFolder) -> None:
    folder = make_folder("cifar10")
    whole, again, other = (make_task("cifar10-cluster", seed=s, users=8, path=folder) for s in (0, 0, 1))
    assert same(whole, again, *SPLITS)
    assert not same(whole, other, "test")
    unheld = make_task("cifar10-cluster", seed=0, users=8, valid=0, path=folder)
    assert same(whole, unheld, "test")
    for user, old in zip(whole.users, unheld.users, strict=True):
        assert len(old.valid) == 0
        both = Counter(numbers(user.train.inputs, "cifar10-cluster") + numbers(user.valid.inputs, "cifar10-cluster"))
        assert both == Counter(numbers(old.train.inputs, "cifar10-cluster"))


def test_a_fraction_of_the_train_images_has_every_label(make_folder: MakeFolder) -> None:
    folder = make_folder("cifar10", train=3000, test=600)
    whole = make_task("cifar10-cluster", seed=0, users=5, clusters=1, path=folder)
    part = make_task("cifar10-cluster", seed=0, users=5, clusters=1, fraction=0.05, test_samples=30, path=folder)
    for old, user in zip(whole.users, part.users, strict=True):
        assert len(user.train) + len(user.valid) == round(0.05 * (len(old.train) + len(old.valid)))
        assert set(user.train.targets.tolist()) == set(range(10))
        assert torch.equal(user.test.inputs, old.test.inputs[:30])


@pytest.mark.parametrize("name", ["linear", "mlp-norm", "mnist"])
def test_florals_tasks_have_validation_samples_on_demand(make_folder: MakeFolder, name: str) -> None:
    options: dict[str, Any] = {"users": 8, **({"path": make_folder("mnist")} if name == "mnist" else {})}
    plain, held_out = (make_task(name, seed=0, **options, **more) for more in ({}, {"valid": 0.3}))
    assert {len(user.valid) for user in plain.users} == {0}
    assert same(plain, held_out, "test")
    for old, new in zip(plain.users, held_out.users, strict=True):
        assert abs(len(new.valid) - 0.3 * len(old.train)) <= 0.5
        rows = [*new.train.inputs.flatten(1).tolist(), *new.valid.inputs.flatten(1).tolist()]
        assert sorted(rows) == sorted(old.train.inputs.flatten(1).tolist())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("pacs", {"clusters": 2}, "task 'pacs': clusters=2; its clusters are its domains; allowed: none"),
        ("mnist-personal", {"clusters": 2}, "task 'mnist-personal': clusters=2; its users are in no clusters; allowed"),
        (
            "pacs",
            {"alpha": 0.1},
            "task 'pacs': alpha=0.1; this task does not split labels by shares; allowed for: mnist-p",
        ),
        ("cifar10-personal", {"alpha": 0.0}, "task 'cifar10-personal': alpha=0.0; allowed: above 0"),
        ("cifar10-personal", {"alpha": float("nan")}, "task 'cifar10-personal': alpha=nan; allowed: above 0"),
        (
            "cifar10-personal",
            {"labels_per_cluster": 3},
            "task 'cifar10-personal': labels_per_cluster=3; this task has no clusters of labels; allowed for: "
            "mnist-cluster, cifar10-cluster, cifar100-cluster",
        ),
        ("cifar10-cluster", {"shift": "rotate"}, "task 'cifar10-cluster': shift='rotate'; this task has no shift"),
        ("cifar10-cluster", {"users": 3}, "task 'cifar10-cluster': clusters=5; allowed: 1 to 3, the number of users"),
        ("mnist", {"valid": 1.0}, "task 'mnist': valid=1.0; allowed: from 0, below 1"),
        ("mnist", {"valid": float("nan")}, "task 'mnist': valid=nan; allowed: from 0, below 1"),
        ("pacs-domain", {}, "no task 'pacs-domain'. Allowed: linear, mlp, "),
        ("cifar10-personel", {}, "no task 'cifar10-personel'. Did you mean 'cifar10-personal'?"),
    ],
)
def test_wrong_settings_are_said_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_task(name, seed=0, **settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_partitions_that_leave_somebody_out_are_said(make_folder: MakeFolder) -> None:
    folder = make_folder("pacs", train=30, test=6, labels=7)
    with pytest.raises(RecipeError, match="task 'pacs': users=3; allowed: from 4, one per domain"):
        make_task("pacs", seed=0, users=3, path=folder)
    with pytest.raises(
        DataError, match=r"task 'pacs', domain 'art_painting': \d+ images for 15 users; allowed: at least "
    ):
        make_task("pacs", seed=0, users=60, path=folder)
    said = "user 'art_painting-0': no two of 2 images share a label, so none can be held out for testing; allowed: more"
    with pytest.raises(DataError, match=said):
        make_task("pacs", seed=0, users=20, path=folder)


def test_groups_without_images_are_named(make_folder: MakeFolder) -> None:
    folder = make_folder("mnist", train=60, test=12, labels=2)  # two of ten labels
    with pytest.raises(DataError) as error:
        make_task("mnist-cluster", seed=0, users=5, path=folder)
    said = re.fullmatch(
        r"task 'mnist-cluster', cluster \d \(labels (\d), (\d)\): 0 images for 1 user; allowed: .*",
        str(error.value),
    )
    assert said is not None, error.value
    assert not {said[1], said[2]} & {"0", "1"}
    with np.load(make_folder("pacs", labels=7) / "pacs32.npz") as file:
        arrays = dict(file)
    number = list(map(str, arrays["domains"])).index("photo")
    kept = arrays["domain"] != number
    np.savez(
        folder / "pacs32.npz",
        **{key: value[kept] if len(value) == len(kept) else value for key, value in arrays.items()},
    )
    with pytest.raises(DataError, match="task 'pacs', domain 'photo': 0 images for 1 user; allowed: at least one per"):
        make_task("pacs", seed=0, path=folder)


def test_where_to_put_images_is_said_when_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise DataError("hub:somebody/something: cannot be loaded as a data set: no connection")

    monkeypatch.setattr("comingle_papers.tasks.images.iterate_values", unreachable)
    monkeypatch.delenv("COMINGLE_DATA", raising=False)
    said = "no connection; without the hub, give data.task.path or $COMINGLE_DATA/images ($COMINGLE_DATA is not set)"
    with pytest.raises(DataError) as error:
        make_task("pacs", seed=0)
    assert str(error.value).endswith(said)
    monkeypatch.setenv("COMINGLE_DATA", str(tmp_path))
    for name, files in (("mnist-cluster", "mnist"), ("cifar100", "cifar100"), ("pacs", "pacs")):
        with pytest.raises(DataError) as error:
            make_task(name, seed=0)
        assert str(error.value).endswith(f"({tmp_path / 'images'} has no images of {files})")
    with pytest.raises(DataError) as error:
        make_task("pacs", seed=0, path="hub:somebody/something")
    assert str(error.value).endswith("no connection")


def test_labels_that_florals_users_do_not_train_on_are_said_and_not_refused(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however many runs use the task; for tasks made in Python too."""
    task = make_task("mnist", seed=0, users=8, clusters=4, fraction=0.01, path=make_folder("mnist", labels=10))
    assert not caplog.messages
    TASK_KIND.run_data(task)
    lacking = [u for u in task.users if set(u.test.targets.tolist()) - set(u.train.targets.tolist())]
    assert len(lacking) > 3
    (line,) = caplog.messages
    assert line.startswith(
        f"{len(lacking)} of 8 users are validated or tested on labels that their train samples lack: "
    )
    assert all(f"{user.name!r} on " in line for user in lacking[:3])
    assert line.endswith(f"; and {len(lacking) - 3} more users")
    caplog.clear()
    TASK_KIND.run_data(make_task("mlp", seed=0, users=4))
    assert not caplog.messages


def test_images_that_do_not_fit_the_task_are_said(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="task 'pacs': images have labels from 0 to 8; allowed: 0 to 6"):
        make_task("pacs", seed=0, path=make_folder("pacs", labels=9))
    folder = make_folder("cifar10")
    images = np.zeros((60, 3, 10, 10), dtype=np.uint8)
    np.savez(folder / "cifar10-test.npz", images=images, labels=np.arange(60) % 10)
    with pytest.raises(
        DataError, match=r"task 'cifar10-cluster': images of sizes \(3, 8, 8\), \(3, 10, 10\); allowed: o"
    ):
        make_task("cifar10-cluster", seed=0, path=folder)


def test_real_pacs(shared_data: Path) -> None:
    task = make_task("pacs", seed=0, path=shared_data / "images")
    sizes = {user.name: len(labels_of(user)) for user in task.users}
    assert sizes == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    assert [len(user.test) for user in task.users] == [341, 391, 278, 655]
    # The published counts of dogs, elephants and so on among the sketches.
    assert labels_of(task.users[3]).bincount().tolist() == [772, 740, 753, 608, 816, 80, 160]
    assert task.input_shape == (3, 32, 32)
    # Normalised by ImageNet's colours, sketches are brighter than photographs.
    bright = [user.train.inputs.mean().item() for user in task.users]
    assert bright[3] > 1.5 > bright[2] + 1
