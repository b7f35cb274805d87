"""Samples out of folders of images and npz files, by recipe and from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import comingle
from comingle.errors import ComingleError, DataError, RecipeError, RunError
from comingle.kinds.samples.folders import Look, read_folder
from comingle.models.personal_net import PersonalNet
from comingle.recipes import Recipe, load_recipe
from comingle.runs import api
from comingle.runs.session import prepare


def paint(path: Path, value: int, size: tuple[int, int] = (6, 6)) -> None:
    """A picture of (width, height) in one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value // 2, 255 - value)).save(path)


def write_images(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10) -> Path:
    for number, name in enumerate(classes):
        for i in range(count):
            paint(folder / name / f"{i}.png", 100 * number + i)
    return folder


def recipe_in(folder: Path, users: dict[str, Any], **data: Any) -> Path:
    content = {
        "method": "fedavg",
        "data": {"kind": "samples", "users": users, **data},
        "training": {"rounds": 2, "batch_size": 8},
        "checkpoints": {"every": 1},
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1},
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def two_users(folder: Path) -> Recipe:
    write_images(folder / "ada")
    write_images(folder / "bob", ("dog", "owl"))
    return load_recipe(recipe_in(folder, {"ada": "ada", "bob": "bob"}))


# ---------------------------------------------------------------- folders of images


def test_classes_are_those_of_all_users_together_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    common = prepare(two_users(tmp_path)).common
    assert (common.labels, common.classes, common.input_shape) == (("cat", "dog", "owl"), 3, (3, 6, 6))
    assert common.net == "cnn"
    ada, bob = common.users
    assert [len(part) for part in (ada.train, ada.valid, ada.test)] == [16, 2, 2]
    assert ada.train.targets.unique().tolist() == [0, 1]
    assert bob.train.targets.unique().tolist() == [1, 2]
    for image, target in zip(bob.train.inputs, bob.train.targets, strict=True):
        red, green, blue = (round(float(v) * 255) for v in image[:, 0, 0])
        assert red // 100 == int(target) - 1  # as it was painted
        assert (green, blue) == (red // 2, 255 - red)
    assert "3 classes are those of all users together: cat, dog, owl; 2 of 2 users lack some, as 'ada' lacks owl" in (
        caplog.text
    )


def test_a_folder_may_have_splits_of_its_own(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("val", 3), ("test", 4)):
        write_images(tmp_path / "ada" / split, count=count)
    (user,) = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"}))).users
    assert [len(part) for part in (user.train, user.valid, user.test)] == [12, 6, 8]
    named = {"train": "ada/train", "test": "ada/test"}
    (user,) = prepare(load_recipe(recipe_in(tmp_path, {"ada": named}, split={"valid": 0.25}))).users
    assert [len(part) for part in (user.train, user.valid, user.test)] == [9, 3, 8]


def test_images_are_scaled_and_made_grey_where_asked_for(tmp_path: Path) -> None:
    for i in range(10):
        paint(tmp_path / "ada" / "cat" / f"{i}.jpg", 90 + i, (5 + i, 9))
        paint(tmp_path / "ada" / "dog" / f"{i}.bmp", 10 + i, (9, 5 + i))
    users = {"ada": "ada"}
    common = prepare(load_recipe(recipe_in(tmp_path, users, image_size=[4, 7], grayscale=True))).common
    assert common.input_shape == (1, 4, 7)
    grey = torch.tensor([0.299, 0.587, 0.114]) @ torch.tensor([10.0, 5.0, 245.0])
    pixels = read_folder(tmp_path / "ada", Look(size=(4, 7), grey=True)).pixels
    assert int(pixels[10, 0, 0, 0]) == pytest.approx(float(grey), abs=1)  # the first dog
    with pytest.raises(DataError, match=r"1.jpg: an image of 6 x 9, but .*0.jpg has 5 x 9; give data.image_size"):
        prepare(load_recipe(recipe_in(tmp_path, users)))


def empty(folder: Path) -> None:
    (folder / "ada").mkdir()


def without_images(folder: Path) -> None:
    (folder / "ada" / "cat").mkdir(parents=True)
    (folder / "ada" / "cat" / "notes.txt").write_text("none")


def damaged(folder: Path) -> None:
    write_images(folder / "ada")
    (folder / "ada" / "cat" / "0.png").write_bytes(b"\x89PNG but no more")


def a_text_file(folder: Path) -> None:
    (folder / "ada").write_text("text")


def one_image(folder: Path) -> None:
    write_images(folder / "ada", ("cat",), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "user 'ada': {folder}/ada: no such file or folder"),
        (empty, "{folder}/ada: no folders in it; allowed: a subfolder of images for each class"),
        (without_images, "{folder}/ada: no images in cat; looked for .bmp"),
        (damaged, "{folder}/ada/cat/0.png: not a readable image: "),
        (a_text_file, "user 'ada': {folder}/ada: allowed: an .npz file, or a folder with a subfolder of images"),
        (one_image, "user 'ada': 1 sample, of which none can be spared for data.split.test; give more"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    recipe = load_recipe(recipe_in(tmp_path, {"ada": str(tmp_path / "ada")}))
    with pytest.raises(ComingleError) as error:
        prepare(recipe)
    assert message.format(folder=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- npz


@pytest.mark.parametrize(("x", "y"), [("inputs", "targets"), ("x", "y"), ("X", "y")])
def test_an_npz_file_has_inputs_and_targets(tmp_path: Path, x: str, y: str) -> None:
    draw = np.random.default_rng(0)
    inputs, targets = draw.normal(size=(20, 3)), draw.normal(size=20)
    np.savez(tmp_path / "ada.npz", **{x: inputs, y: targets})
    common = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"}, split={"valid": 0}))).common
    assert (common.measure.name, common.classes, common.input_shape, common.net) == ("mse", 1, (3,), "mlp")
    (ada,) = common.users
    found = torch.cat([torch.cat([part.inputs, part.targets], 1) for part in (ada.train, ada.test)])
    expected = torch.from_numpy(np.concatenate([inputs, targets[:, None]], 1))
    assert torch.equal(found[found[:, 0].argsort()], expected[expected[:, 0].argsort()])


def test_an_npz_file_may_have_splits(tmp_path: Path) -> None:
    images = np.zeros((12, 5, 5), np.uint8)
    targets = np.arange(12) % 3
    np.savez(tmp_path / "ada.npz", x_train=images, y_train=targets, x_test=images[:4], y_test=targets[:4])
    (ada,) = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"}, split={"valid": 0}))).users
    assert [len(part) for part in (ada.train, ada.valid, ada.test)] == [12, 0, 4]
    assert ada.train.inputs.shape == (12, 1, 5, 5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "ada.npz: found a; allowed: inputs and targets, or x and y"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "ada.npz: inputs have shape (3, 2) but targets (2,)"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, "ada.npz: inputs are <U1; allowed: numbers"),
    ],
)
def test_arrays_that_are_no_samples_are_one_line(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "ada.npz", **arrays)
    with pytest.raises(DataError) as error:
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"})))
    assert message in str(error.value)


def test_a_file_that_is_no_npz_and_kinds_side_by_side_are_one_line(tmp_path: Path) -> None:
    write_images(tmp_path / "ada")
    (tmp_path / "bob.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"bob.npz: not a readable npz file: no complete zip archive"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada", "bob": "bob.npz"})))
    np.savez(tmp_path / "bob.npz", x=np.zeros((5, 2)), y=np.zeros(5))
    with pytest.raises(DataError, match=r"user 'bob': an .npz file, but others have folders of images; give all the"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada", "bob": "bob.npz"})))
    with pytest.raises(DataError, match=r"data.image_size and grayscale are for folders of images"):
        prepare(load_recipe(recipe_in(tmp_path, {"bob": "bob.npz"}, image_size=4)))


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "floral", "clusters": 2}, {"name": "centralized"}])
def test_a_run_goes_on_and_opens_without_the_images(tmp_path: Path, method: dict[str, Any]) -> None:
    recipe = two_users(tmp_path).with_changes({"method": method})
    whole = api.run(recipe, out=tmp_path / "whole")

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 2 and event["advance"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(recipe, out=tmp_path / "run", observers=[stop])
    done = api.run(recipe, out=tmp_path / "run", resume=True)
    shutil.move(tmp_path / "ada", tmp_path / "elsewhere")
    opened = api.load(tmp_path / "run")
    inputs = torch.rand(3, 3, 6, 6)
    for name in ("ada", "bob"):
        nets = [run.user(name) for run in (whole, done, opened)]
        assert all(isinstance(net, PersonalNet) for net in nets)
        expected, *others = [net.predict(inputs) for net in nets if isinstance(net, PersonalNet)]
        assert all(torch.equal(found, expected) for found in others)
    with pytest.raises(ComingleError, match="this needs the users' data"):
        opened.federation.clients.evaluate()
    shutil.move(tmp_path / "elsewhere", tmp_path / "ada")
    accuracies = [score.measures["accuracy"] for score in opened.federation.clients.evaluate()]
    assert accuracies == [user["test_accuracy"] for user in done.metrics["users"].values()]


def test_changed_images_are_refused_where_a_run_goes_on(tmp_path: Path) -> None:
    recipe = two_users(tmp_path)
    api.run(recipe, out=tmp_path / "run")
    paint(tmp_path / "bob" / "owl" / "3.png", 7)
    with pytest.raises(RunError, match=r"user 'bob': the .* data changed since the run began"):
        api.run(recipe, out=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_data_and_cost_are_told_before_training(tmp_path: Path, comingle: Callable[..., Any]) -> None:
    two_users(tmp_path)
    shown = comingle("data", tmp_path / "own.yaml").out
    assert "net:cnn: samples of 3 x 6 x 6, classes cat, dog, owl" in " ".join(shown.split())
    cost = json.loads(comingle("cost", tmp_path / "own.yaml", "--method", "fedavg,floral,fedmerge", "--json").out)
    assert [one["method"] for one in cost["methods"]] == ["fedavg", "floral", "fedmerge"]
    assert cost["unit"] == "sample"
    refused = comingle("cost", tmp_path / "own.yaml", "--users", 5)
    assert refused.code == 2
    assert "--users: got 5; the users' samples are read, so leave it out" in refused.err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "samples"}, "data: give users, as {ada: path/to/ada}"),
        ({"kind": "samples", "users": {}}, "zero users; name at least one"),
        ({"kind": "samples", "users": {"ada": 3}}, "data.users.ada: give a path, or a mapping with path"),
        ({"kind": "samples", "users": {"ada": {"train": "x"}}}, "train without test; give test too"),
        ({"kind": "samples", "users": {"ada": "x"}, "image_size": "big"}, "image_size: give a number of pixels"),
        ({"kind": "samples", "users": {"ada": "x"}, "split": {"valid": 0.6, "test": 0.5}}, "leave nothing to train on"),
        ({"kind": "samples", "users": {"ada": "x"}, "max_train_tokens": 3}, "samples have no tokens"),
        ({"kind": "samples", "users": {"ada": "x"}, "los": "mse"}, "unknown key 'data.los'. Did you mean 'loss'?"),
    ],
)
def test_a_wrong_section_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ComingleError) as error:
        Recipe(data=data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["base", "loss"])
def test_a_function_for_samples_out_of_files_is_refused(tmp_path: Path, given: str) -> None:
    np.savez(tmp_path / "ada.npz", inputs=np.zeros((9, 4), "float32"), targets=np.arange(9) % 3)
    recipe = {"data": {"kind": "samples", "users": {"ada": str(tmp_path / "ada.npz")}}}
    with pytest.raises(RecipeError, match=f"{given}: got a function, for users who are read; allowed: beside users="):
        comingle.run(recipe, method="fedavg", **{given: lambda *_: torch.nn.Linear(4, 3)})
