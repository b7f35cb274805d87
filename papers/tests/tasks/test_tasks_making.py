from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comingle.data.samples.samples import bank_of, join
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import generator
from comingle_papers.tasks import image_tasks
from comingle_papers.tasks.image_tasks import TASKS
from comingle_papers.tasks.images import read_images
from comingle_papers.tasks.kind import Task, make_task

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Images of a data set whose pixels name the image: image i is i in its first row, noise below."""

    def make(
        name: str, *, train: int = 240, test: int = 60, labels: int = 10, shape: tuple[int, ...] | None = None
    ) -> Path:
        shape = shape or ((8, 8) if name == "mnist" else (3, 8, 8))
        for split, count in (("train", train), ("test", test)):
            pixels = np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)
            pixels[..., 0, :] = (np.arange(count) % 256).reshape(-1, *[1] * (len(shape) - 1))
            np.savez(tmp_path / f"{name}-{split}.npz", images=pixels, labels=np.arange(count) % labels)
        return tmp_path

    return make


def pixels(images: Tensor, name: str) -> Tensor:
    """Bytes of a task's inputs."""
    if name != "mnist":
        mean, std = torch.tensor((0.4914, 0.4822, 0.4465)), torch.tensor((0.2023, 0.1994, 0.2010))
        images = images * std[:, None, None] + mean[:, None, None]
    return (images * 255).round().to(torch.uint8)


def test_defaults_are_those_of_the_paper() -> None:
    numbers = {name: (s.users, s.clusters, s.net, s.train, s.test) for name, s in TASKS.items()}
    assert {name: numbers[name] for name in list(numbers)[:6]} == {
        "linear": (10, 2, "linear", 7, 1),
        "mlp": (20, 4, "mlp", 97, 23),
        "mlp-norm": (20, 4, "mlp-norm", 97, 23),
        "mnist": (300, 4, "mnist", 0, 0),
        "cifar10": (20, 4, "cifar10", 0, 0),
        "cifar100": (100, 10, "vgg8", 0, 0),
    }
    assert {name: numbers[name] for name in list(numbers)[6:]} == {  # train and test on average
        "mnist-personal": (50, 1, "resnet9", 1050, 233),
        "mnist-cluster": (50, 5, "resnet9", 1050, 233),
        "cifar10-personal": (50, 1, "resnet9", 900, 200),
        "cifar10-cluster": (50, 5, "resnet9", 900, 200),
        "cifar100-personal": (50, 1, "resnet9", 900, 200),
        "cifar100-cluster": (50, 5, "resnet9", 900, 200),
        "pacs": (4, 4, "resnet9", 1873, 416),
    }


@pytest.mark.parametrize(("name", "outputs", "kept"), [("linear", 3, 7), ("mlp", 1, 10), ("mlp-norm", 1, 10)])
def test_synthetic_tasks(name: str, outputs: int, kept: int) -> None:
    task = make_task(name, seed=0, test_samples=50, fraction=0.05)
    setting = TASKS[name]
    assert len(task.users) == setting.users
    assert [user.cluster for user in task.users] == [k % setting.clusters for k in range(setting.users)]
    assert {(len(user.train), len(user.test)) for user in task.users} == {(kept, 50)}
    assert (task.loss, task.classes, task.input_shape, task.net) == ("mse", outputs, (10,), name)
    assert not task.augment
    whole = make_task(name, seed=0)
    assert len(whole.users[0].train) == setting.train
    assert torch.equal(whole.users[3].train.inputs[:kept], task.users[3].train.inputs)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_image_goes_to_one_user_turned_as_its_cluster(make_folder: MakeFolder, name: str, split: Any) -> None:
    folder = make_folder(name, train=250, test=61)
    task = make_task(name, seed=0, users=8, path=folder)
    images = read_images(name, folder)[split]
    sizes = [len(user.split(split)) for user in task.users]
    assert sum(sizes) == len(images)
    assert max(sizes) - min(sizes) <= 1
    seen = []
    for user in task.users:
        samples = user.split(split)
        assert user.cluster is not None
        # Turned back, the top row names the image.
        upright = pixels(torch.rot90(samples.inputs, -user.cluster, (-2, -1)), name)
        for image, label in zip(upright, samples.targets.tolist(), strict=True):
            number = int(image[0, 0, 0])
            assert torch.equal(image, images.pixels[number].view(image.shape))
            assert label == number % 10
            seen.append(number)
    assert sorted(seen) == list(range(len(images)))


def test_users_images_are_in_memory_once(make_folder: MakeFolder) -> None:
    task = make_task("mnist", seed=0, users=8, path=make_folder("mnist"))
    parts = [user.train for user in task.users]
    assert join(parts).inputs.data_ptr() == parts[0].inputs.data_ptr()


def test_labels_are_shifted_by_the_cluster(make_folder: MakeFolder) -> None:
    task = make_task("mnist", seed=0, users=8, shift="labels", path=make_folder("mnist"))
    assert task.shift == "labels"
    for k, user in enumerate(task.users):
        for samples in (user.train, user.test):
            numbers = pixels(samples.inputs, "mnist")[:, 0, 0, 0].long()
            assert torch.equal(samples.targets, (numbers + k % 4) % 10)


def test_the_same_images_whatever_the_shift_the_fraction_and_the_clusters(make_folder: MakeFolder) -> None:
    folder = make_folder("mnist")
    turned, labelled = (make_task("mnist", seed=0, users=8, shift=s, path=folder) for s in ("rotate", "labels"))
    alike = make_task("mnist", seed=0, users=8, clusters=1, path=folder)
    reduced = make_task("mnist", seed=0, users=8, fraction=0.5, path=folder)
    for k in range(8):
        upright = torch.rot90(turned.users[k].train.inputs, -(k % 4), (-2, -1))
        assert torch.equal(upright, labelled.users[k].train.inputs)
        assert torch.equal(upright, alike.users[k].train.inputs)
        assert torch.equal(reduced.users[k].train.inputs, turned.users[k].train.inputs[:15])
        assert torch.equal(reduced.users[k].test.inputs, turned.users[k].test.inputs)
    other = make_task("mnist", seed=1, users=8, path=folder)
    assert not torch.equal(other.users[0].train.inputs, turned.users[0].train.inputs)


def test_reduced_users_keep_ten_samples(make_folder: MakeFolder) -> None:
    task = make_task("mnist", seed=0, users=8, fraction=0.05, test_samples=4, path=make_folder("mnist"))
    assert {(len(user.train), len(user.test)) for user in task.users} == {(10, 4)}


def test_each_cluster_of_cifar100_has_labels_of_its_own(make_folder: MakeFolder) -> None:
    folder = make_folder("cifar100", train=600, test=200, labels=100)
    task = make_task("cifar100", seed=0, users=20, path=folder)
    assert (task.classes, task.clusters, task.net, task.augment) == (100, 10, "vgg8", True)
    for k, user in enumerate(task.users):
        assert len(user.train) == 30
        assert len(user.test) == 10
        assert set((user.train.targets % 10).tolist()) == {k % 10}
    both = torch.cat([user.train.targets for user in task.users if user.cluster == 3])
    assert sorted(both.tolist()) == sorted([*range(3, 100, 10)] * 6)


def augmented(task: Task, rows: list[int], seed: str) -> Tensor:
    bank = bank_of([user.train for user in task.users])
    inputs, _, _ = bank.take(rows, torch.arange(6).expand(len(rows), -1))
    return task.augmented(rows, inputs, generator("augment", seed))


@pytest.mark.parametrize("shift", ["rotate", "labels"])
@pytest.mark.slow
def test_augmented_images_are_those_augmented_upright_and_then_turned(make_folder: MakeFolder, shift: str) -> None:
    """Every outcome of a turned image, turned back, is one of the flips and crops of the upright image."""
    folder = make_folder("cifar10")
    task = make_task("cifar10", seed=0, users=4, shift=shift, path=folder)
    upright = make_task("cifar10", seed=0, users=4, shift="labels", path=folder)
    black = -torch.tensor((0.4914, 0.4822, 0.4465)) / torch.tensor((0.2023, 0.1994, 0.2010))
    flips = set()
    for seed in ("0", "1", "2"):
        found = augmented(task, [0, 1, 2, 3], seed)
        for k in range(4):
            back = torch.rot90(found[k], -k if shift == "rotate" else 0, (-2, -1))
            for image, original in zip(back, upright.users[k].train.inputs[:6], strict=True):
                outcomes = [
                    (flipped, top, left)
                    for flipped in (False, True)
                    for top in range(9)
                    for left in range(9)
                    if torch.allclose(image, crop(original.flip(-1) if flipped else original, top, left, black))
                ]
                assert len(outcomes) == 1
                flips.add((k, outcomes[0][0]))
    assert flips == {(k, flipped) for k in range(4) for flipped in (False, True)}


def crop(image: Tensor, top: int, left: int, fill: Tensor) -> Tensor:
    padded = fill[:, None, None].repeat(1, image.shape[1] + 8, image.shape[2] + 8)
    padded[:, 4:-4, 4:-4] = image
    return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


def test_images_turned_by_other_angles_are_only_cropped(make_folder: MakeFolder) -> None:
    task = make_task("cifar10", seed=0, users=3, clusters=3, path=make_folder("cifar10"))
    bank = bank_of([user.train for user in task.users])
    inputs, _, _ = bank.take([1, 2], torch.arange(4).expand(2, -1))
    black = [-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010]
    expected = image_tasks.crop_randomly(inputs.flatten(0, 1), generator("a"), fill=black)
    assert torch.equal(task.augmented([1, 2], inputs, generator("a")), expected.view(inputs.shape))


def test_images_are_found_through_the_variable_before_the_hub(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder("mnist")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(folder, target_is_directory=True)
    monkeypatch.setenv("COMINGLE_DATA", str(tmp_path / "data"))
    task = make_task("mnist", seed=0, users=4)
    assert torch.equal(
        task.users[0].train.inputs, make_task("mnist", seed=0, users=4, path=folder).users[0].train.inputs
    )
    asked = []

    def ask(name: str, source: Any) -> dict[str, Any]:
        asked.append((name, source))
        raise DataError("no network here")

    monkeypatch.setattr("comingle_papers.tasks.kind.read_images", ask)
    for name in ("cifar100", "cifar10"):  # the folder does not hold them
        with pytest.raises(DataError, match="no network here"):
            make_task(name, seed=0)
    assert asked == [("cifar100", "hub:uoft-cs/cifar100"), ("cifar10", "hub:uoft-cs/cifar10")]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mnst", {}, "no task 'mnst'. Did you mean 'mnist'? Allowed: linear, mlp, mlp-norm, mnist, cifar10, cifar100"),
        ("linear", {"users": 0}, "task 'linear': users=0; allowed: from 1"),
        ("linear", {"clusters": 0}, "task 'linear': clusters=0; allowed: 1 to 10, the number of users"),
        (
            "linear",
            {"users": 3, "clusters": 5},
            "task 'linear': clusters=5; allowed: 1 to 3, the number of users, as cluster 3 would have no user",
        ),
        ("mlp", {"fraction": 0.0}, "task 'mlp': fraction=0.0; allowed: above 0, up to 1"),
        ("mlp", {"fraction": 1.5}, "task 'mlp': fraction=1.5; allowed: above 0, up to 1"),
        ("mlp", {"fraction": float("nan")}, "task 'mlp': fraction=nan; allowed: above 0, up to 1"),
        ("mlp", {"test_samples": 0}, "task 'mlp': test_samples=0; allowed: from 1"),
        ("mlp", {"shift": "rotate"}, "task 'mlp': shift='rotate'; this task has no shift"),
        ("cifar100", {"shift": "labels"}, "task 'cifar100': shift='labels'; this task has no shift"),
        ("mnist", {"shift": "rotat"}, "task 'mnist': shift='rotat'. Did you mean 'rotate'? Allowed: rotate, labels"),
    ],
)
def test_wrong_settings_are_said_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_task(name, seed=0, **settings)
    assert str(error.value).startswith(message)


def test_images_that_do_not_fit_the_task_are_said(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match=r"task 'mnist': train images have labels from 0 to 11; allowed: 0 to 9"):
        make_task("mnist", seed=0, users=4, path=make_folder("mnist", labels=12))
    with pytest.raises(DataError, match=r"task 'cifar10': train images have shape \(240, 8, 8\); allowed: 3 channels"):
        make_task("cifar10", seed=0, users=4, path=make_folder("cifar10", shape=(8, 8)))
    with pytest.raises(DataError, match=r"task 'mnist': train images have shape \(240, 3, 8, 8\); allowed: grey"):
        make_task("mnist", seed=0, users=4, path=make_folder("mnist", shape=(3, 8, 8)))


def test_more_users_than_images_is_said(make_folder: MakeFolder) -> None:
    with pytest.raises(RecipeError, match="task 'mnist': users=25; allowed: 1 to 20, one image per split"):
        make_task("mnist", seed=0, users=25, path=make_folder("mnist", train=20, test=25))
    with pytest.raises(RecipeError, match="task 'mnist': users=10; allowed: 1 to 7, one image per split"):
        make_task("mnist", seed=0, users=10, path=make_folder("mnist", train=40, test=7))


def test_a_made_task_takes_no_path(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"task 'linear': path='.*'; this task is generated"):
        make_task("linear", seed=0, path=tmp_path)


def test_real_mnist_with_300_users(shared_data: Path) -> None:
    task = make_task("mnist", seed=0, path=shared_data / "images")
    assert len(task.users) == 300
    assert {len(user.train) for user in task.users} == {200}
    assert sum(len(user.test) for user in task.users) == 10_000
    assert task.input_shape == (1, 28, 28)
    assert not task.augment
    # IID: every user has about a tenth of its images in each class; 5 standard deviations of 200 draws.
    shares = torch.stack([user.train.targets.bincount(minlength=10) for user in task.users]) / 200
    assert (shares - shares.mean(0)).abs().max() < 5 * (0.1 * 0.9 / 200) ** 0.5


def test_real_cifar_reduced(shared_data: Path) -> None:
    task = make_task("cifar10", seed=0, shift="labels", fraction=0.05, path=shared_data / "images")
    assert {(len(user.train), len(user.test)) for user in task.users} == {(20, 100)}
    assert (task.input_shape, task.augment, task.classes) == ((3, 32, 32), True, 10)
    everything = torch.cat([user.train.inputs for user in task.users])
    assert everything.mean().abs() < 0.15
    assert everything.std().item() == pytest.approx(1.23, abs=0.1)  # the customary deviations are a little small
