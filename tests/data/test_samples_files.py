"""Samples out of folders of images and npz files, by recipe and from the command line."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import comingle
from comingle.config import Recipe, load_recipe
from comingle.data.samples.images import BrokenImagesError, ImageFormat, read_folder
from comingle.models.nets import NETS, make_net
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import ComingleError, DataError, PluginError, RecipeError, RunError


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
    lacking, single = (record.getMessage() for record in caplog.records)
    assert re.search(
        r"2 of 2 users .*3 classes .*\(cat, dog, owl\).*'ada' lacks owl.*data\.classes: \[cat, dog, owl\]", lacking
    )
    assert re.search(r"cat \('ada'\), owl \('bob'\)", single)


def test_classes_that_differ_only_in_case_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for user, classes in (("ada", ("cat", "dog")), ("bob", ("Cat", "dog"))):
        write_images(tmp_path / user, classes)
    users = {"ada": "ada", "bob": "bob"}
    assert prepare(load_recipe(recipe_in(tmp_path, users))).common.labels == ("Cat", "cat", "dog")
    assert "Cat and cat" in caplog.text
    caplog.clear()
    prepare(load_recipe(recipe_in(tmp_path, users, classes=["cat", "Cat", "dog"])))
    assert len(caplog.records) == 1  # the recipe has fixed the names; users lack some


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
    pixels = read_folder(tmp_path / "ada", ImageFormat(size=(4, 7), grey=True), "ada").pixels
    assert int(pixels[10, 0, 0, 0]) == pytest.approx(float(grey), abs=1)  # the first dog
    with pytest.raises(DataError, match=r"1\.jpg: .*6 x 9.*0\.jpg .*5 x 9; .*data\.image_size"):
        prepare(load_recipe(recipe_in(tmp_path, users)))


def counts_of(user: Any) -> list[int]:
    return [len(part) for part in (user.train, user.valid, user.test)]


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("Train", None, "Test"),
        ("TRAINING", "Eval", "testing"),
        ("training_set", None, "test_set"),
        ("Train", "Dev", "TEST"),
    ],
)
def test_splits_are_known_in_any_spelling(tmp_path: Path, train: str, valid: str | None, test: str) -> None:
    for split, count in ((train, 6), (valid, 3), (test, 4)):
        if split is not None:
            write_images(tmp_path / "ada" / split, count=count)
    common = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"}, split={"valid": 0}))).common
    assert common.labels == ("cat", "dog")
    assert counts_of(common.users[0]) == [12, 6 if valid else 0, 8]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_validation_split_alone_is_the_test_split_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: str
) -> None:
    for split, count in (("train", 6), ("Val", 3)):
        write_images(tmp_path / "ada" / split, count=count)
    recipe = load_recipe(recipe_in(tmp_path, {"ada": "ada"}, split={"valid": 0})).with_changes({"runtime.store": store})
    common = prepare(recipe).common
    assert common.labels == ("cat", "dog")
    assert counts_of(common.users[0]) == [12, 0, 6]
    assert re.search("no test split.*Val .*ada", caplog.text)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["photos"], r"ada: photos .*cat and dog.*no images.*; .*data\.users\.ada as .*/photos$"),
        (["train"], r"ada: train .*cat and dog.*no images.*; .*data\.users\.ada as .*/train$"),
        (["cats/test", "cats/train", "dogs/train"], "ada: cats and dogs .*test and train.*no images"),
        (["images/train", "images/val"], "ada: images .*train and val.*no images"),
        (["valid", "test"], r"cat and dog.*no images.*; .*data\.users\.ada as {train: FOLDER, test: FOLDER}"),
        (["train/images", "test/images"], "train: images .*cat and dog.*no images"),
        (["train", "training", "test"], r"ada: train and training .*train split; .*data\.users\.ada as "),
    ],
)
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_images_one_level_deeper_are_refused(tmp_path: Path, folders: list[str], message: str, store: str) -> None:
    for folder in folders:
        if folder.partition("/")[0] in ("cats", "dogs"):
            paint(tmp_path / "ada" / folder / "0.png", 0)
        else:
            write_images(tmp_path / "ada" / folder, count=2)
    recipe = load_recipe(recipe_in(tmp_path, {"ada": "ada"})).with_changes({"runtime.store": store})
    with pytest.raises(DataError, match=message) as error:
        prepare(recipe)
    assert "\n" not in str(error.value)


def test_classes_may_be_called_train_and_hold_folders(tmp_path: Path) -> None:
    write_images(tmp_path / "ada", ("bus", "train"))
    paint(tmp_path / "ada" / "bus" / "red" / "old" / "0.png", 5)
    common = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"}))).common
    assert common.labels == ("bus", "train")
    assert sum(counts_of(common.users[0])) == 21


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_one_class_alone_is_refused(tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "ada", ("cat",))
    np.savez(tmp_path / "bob.npz", x=np.zeros((9, 4), "float32"), y=np.zeros(9, int))
    for users, name in (({"ada": "ada"}, r" \(cat\)"), ({"bob": "bob.npz"}, "")):
        recipe = load_recipe(recipe_in(tmp_path, users)).with_changes({"runtime.store": store})
        with pytest.raises(DataError, match=rf"^samples: .*one class{name},.*data\.classes"):
            prepare(recipe)
        prepare(recipe.with_changes({"data.classes": 3}))  # one user of a federation
    (tmp_path / "ada" / "dog").mkdir()
    prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"})).with_changes({"runtime.store": store}))
    assert "class 0 (cat)" in caplog.text


def test_files_of_the_system_are_left_out_and_others_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ada = write_images(tmp_path / "ada")
    recipe = load_recipe(recipe_in(tmp_path, {"ada": "ada"}))
    plain = prepare(recipe).common
    for folder in ("__MACOSX/cat", "@eaDir", ".thumbnails", "cat/@eaDir/0.png", "dog/.cache", "$RECYCLE.BIN"):
        paint(ada / folder / "0.png", 1)
    for name in ("Thumbs.db", "cat/Thumbs.db", ".DS_Store", "dog/._0.png", "desktop.ini", "cat/.DS_Store"):
        (ada / name).write_bytes(b"no image")
    found = prepare(recipe).common
    assert found.labels == plain.labels == ("cat", "dog")
    assert torch.equal(found.users[0].train.inputs, plain.users[0].train.inputs)
    assert "of ada" not in caplog.text
    for name in ("cat/0.heic", "cat/1.heic", "notes.txt"):
        (ada / name).write_bytes(b"no image")
    prepare(recipe)
    assert re.search(r": 2 \.heic, 1 \.txt, of ada; .*\.bmp", caplog.text)


def test_links_to_folders_of_images_are_followed_once(tmp_path: Path) -> None:
    write_images(tmp_path / "elsewhere")
    for name in ("cat", "dog"):
        (tmp_path / "ada" / name).mkdir(parents=True)
        paint(tmp_path / "ada" / name / "0.png", 3)
        (tmp_path / "ada" / name / "more").symlink_to(tmp_path / "elsewhere" / name)
        (tmp_path / "ada" / name / "loop").symlink_to(tmp_path / "ada")
    assert sum(counts_of(prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"}))).users[0])) >= 22


def ramp(kind: str) -> np.ndarray:
    return np.rint(np.linspace(0, 65535, 16)).reshape(4, 4).astype(kind)


def as_tiff_of_12_bits(path: Path) -> None:
    """Two pixels in three bytes, rows of two pixels; Pillow reads this and does not write it."""
    values, tags = [0, 4095, 1365, 2730], {256: 2, 257: 2, 258: 12, 259: 1, 262: 1, 273: 0, 277: 1, 278: 2, 279: 6}
    packed = b"".join(((a << 12) | b).to_bytes(3, "big") for a, b in zip(values[::2], values[1::2], strict=True))
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags))
    path.write_bytes(header + entries + struct.pack("<I", 0) + packed)


def write_deep(folder: Path, suffix: str, image: Image.Image, **how: Any) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            image.save(folder / name / f"{number}{suffix}", **how)
    return folder


@pytest.mark.parametrize("grey", [True, False])
@pytest.mark.parametrize(
    ("suffix", "kind", "how"),
    [
        (".png", "uint16", {}),
        (".pgm", "int32", {}),
        (".tif", "uint16", {}),
        (".tif", ">u2", {}),
        (".tif", "uint16", {"tiffinfo": {262: 0}}),  # white is zero
    ],
)
def test_images_of_16_bits_are_scaled(tmp_path: Path, suffix: str, kind: str, how: dict[str, Any], grey: bool) -> None:
    write_deep(tmp_path / "ada", suffix, Image.fromarray(ramp(kind)), **how)
    pixels = read_folder(tmp_path / "ada", ImageFormat(size=None, grey=grey), "ada").pixels.float() / 255
    expected = torch.linspace(0, 1, 16)
    for image in pixels:
        for channel in image.flatten(0, 1).T:
            torch.testing.assert_close(channel, expected.flip(0) if how else expected, atol=0.003, rtol=0)
    assert pixels.shape[-1] == (1 if grey else 3)


def test_a_tiff_of_12_bits_is_scaled_by_them(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    as_tiff_of_12_bits(tmp_path / "cat" / "0.tif")
    pixels = read_folder(tmp_path, ImageFormat(size=None, grey=True), "ada").pixels
    assert pixels.flatten().tolist() == [0, 255, 85, 170]


@pytest.mark.parametrize(("kind", "named"), [("int32", "I"), ("float32", "F")])
def test_images_without_a_range_are_refused(tmp_path: Path, kind: str, named: str) -> None:
    write_deep(tmp_path / "ada", ".tif", Image.fromarray(ramp(kind)))
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}/ada/cat/0\.tif: .*\({named}\).*8 or 16 bits"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada"})))


def see_through(mode: str) -> tuple[Image.Image, dict[str, Any]]:
    """Black where it is opaque, red (or grey) below where it is transparent, with what saving it needs."""
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 255))
    image.paste((255, 0, 0, 0), (0, 0, 4, 2))
    if mode == "P":
        colours = Image.new("P", (4, 4), 0)
        colours.putpalette([0, 0, 0, 255, 0, 0])
        colours.paste(1, (0, 0, 4, 2))
        return colours, {"transparency": 1}
    if mode == "RGB":
        return image.convert("RGB"), {"transparency": (255, 0, 0)}
    return image.convert(mode), {}


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    image, how = see_through(mode)
    write_deep(tmp_path / "ada", ".png", image, **how)
    for grey in (True, False):
        pixels = read_folder(tmp_path / "ada", ImageFormat(size=None, grey=grey), "ada").pixels
        assert pixels[:, :2].unique().tolist() == [255]
        assert pixels[:, 2:].unique().tolist() == [0]


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
        (lambda folder: None, "data.users.ada: {folder}/ada: no such file"),
        (empty, "{folder}/ada: no subfolders"),
        (without_images, "{folder}/ada: no images .*cat; .*[.]bmp"),
        (damaged, "{folder}/ada/cat/0.png: .*image "),
        (a_text_file, "user 'ada': {folder}/ada: got .*''; allowed: an .npz file"),
        (one_image, "user 'ada': 1 sample.*data.split.test"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    recipe = load_recipe(recipe_in(tmp_path, {"ada": str(tmp_path / "ada")}))
    with pytest.raises(ComingleError, match=f"^{message.format(folder=re.escape(str(tmp_path)))}") as error:
        prepare(recipe)
    assert "\n" not in str(error.value)


def test_without_pillow_the_file_and_the_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "ada")
    recipe = load_recipe(recipe_in(tmp_path, {"ada": str(tmp_path / "ada")}))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}/ada/.*\.png: .*pip install 'comingle\[data\]'$"):
        prepare(recipe)


# ---------------------------------------------------------------- npz


@pytest.mark.parametrize(("x", "y"), [("inputs", "targets"), ("x", "y"), ("X", "y")])
def test_an_npz_file_has_inputs_and_targets(tmp_path: Path, x: str, y: str) -> None:
    draw = np.random.default_rng(0)
    inputs, targets = draw.normal(size=(20, 3)), draw.normal(size=20)
    np.savez(tmp_path / "ada.npz", **{x: inputs, y: targets})  # pyright: ignore[reportArgumentType]
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


@pytest.mark.parametrize(("kind", "largest"), [("uint8", 255), ("uint16", 65535), (">u2", 65535), ("bool", 1)])
@pytest.mark.parametrize("shape", [(12, 5, 6), (12, 5, 6, 3), (12, 3, 5, 6), (12, 5, 6, 4), (12, 4, 5, 6)])
def test_whole_pixels_become_images_from_0_to_1(
    tmp_path: Path, kind: str, largest: int, shape: tuple[int, ...]
) -> None:
    pixels = np.random.default_rng(0).integers(0, largest + 1, shape).astype(kind)
    np.savez(tmp_path / "ada.npz", x=pixels, y=np.arange(12) % 2)
    (ada,) = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"}, split={"valid": 0}))).users
    found = torch.cat([ada.train.inputs, ada.test.inputs])
    channels = 1 if len(shape) == 3 else 4 if 4 in shape else 3
    assert found.shape == (12, channels, 5, 6)
    torch.testing.assert_close(found.mean(), torch.tensor(float((pixels / largest).mean())), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["int16", "int32", "int64", "uint32"])
def test_whole_pixels_without_a_range_are_refused(tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "ada.npz", x=np.ones((12, 5, 6), kind), y=np.arange(12) % 2)
    with pytest.raises(DataError, match=r"ada\.npz: inputs .*int\d+ .*\(12, 5, 6\).*allowed: uint8"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"})))
    np.savez(tmp_path / "ada.npz", x=np.ones((12, 5), kind), y=np.arange(12) % 2)  # features, as they are
    (ada,) = prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"}))).users
    assert ada.train.inputs.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, r"ada\.npz: found a; allowed: inputs and targets"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, r"ada\.npz: inputs .*\(3, 2\) .*targets .*\(2,\)"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, r"ada\.npz: inputs .*<U1; allowed: numbers"),
    ],
)
def test_arrays_that_are_no_samples_are_one_line(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "ada.npz", **arrays)
    with pytest.raises(DataError, match=message):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada.npz"})))


def test_a_file_that_is_no_npz_and_kinds_side_by_side_are_one_line(tmp_path: Path) -> None:
    write_images(tmp_path / "ada")
    (tmp_path / "bob.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"bob\.npz: .*got 6 bytes, .*zip archive"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada", "bob": "bob.npz"})))
    np.savez(tmp_path / "bob.npz", x=np.zeros((5, 2)), y=np.zeros(5))
    with pytest.raises(DataError, match=r"^user 'bob': .*\.npz file.*folders"):
        prepare(load_recipe(recipe_in(tmp_path, {"ada": "ada", "bob": "bob.npz"})))
    with pytest.raises(DataError, match=r"^data\.image_size and grayscale .*\.npz"):
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
    with pytest.raises(ComingleError, match="users' data"):
        opened.federation.clients.evaluate()
    shutil.move(tmp_path / "elsewhere", tmp_path / "ada")
    accuracies = [score.measures["accuracy"] for score in opened.federation.clients.evaluate()]
    assert accuracies == [user["test_accuracy"] for user in done.metrics["users"].values()]


def test_changed_images_are_refused_where_a_run_goes_on(tmp_path: Path) -> None:
    recipe = two_users(tmp_path)
    api.run(recipe, out=tmp_path / "run")
    paint(tmp_path / "bob" / "owl" / "3.png", 7)
    with pytest.raises(RunError, match=r"user 'bob': .* data changed"):
        api.run(recipe, out=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_data_and_cost_are_told_before_training(tmp_path: Path, comingle: Callable[..., Any]) -> None:
    two_users(tmp_path)
    shown = comingle("data", tmp_path / "own.yaml").out
    assert "net:cnn: samples of 3 x 6 x 6, classes cat, dog, owl" in " ".join(shown.split())
    table = [line.split() for line in shown.splitlines()]
    assert ["user", "train", "valid", "test", "cat", "dog", "owl"] in table
    assert ["ada", "16", "2", "2", "10", "10", "0"] in table
    cost = json.loads(comingle("cost", tmp_path / "own.yaml", "--method", "fedavg,floral,fedmerge", "--json").out)
    assert [one["method"] for one in cost["methods"]] == ["fedavg", "floral", "fedmerge"]
    assert cost["unit"] == "sample"
    refused = comingle("cost", tmp_path / "own.yaml", "--users", 5)
    assert refused.code == 2
    assert "--users: got 5" in refused.err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "samples"}, "data: give users"),
        ({"kind": "samples", "users": {}}, "data: no users; "),
        ({"kind": "samples", "users": {"ada": 3}}, "data.users.ada: "),
        ({"kind": "samples", "users": {"ada": {"train": "x"}}}, "train without test"),
        ({"kind": "samples", "users": {"ada": "x"}, "image_size": "big"}, "data.image_size: "),
        (
            {"kind": "samples", "users": {"ada": "x"}, "split": {"valid": 0.6, "test": 0.5}},
            "valid 0.6 and test 0.5",
        ),
        ({"kind": "samples", "users": {"ada": "x"}, "max_train_tokens": 3}, "max_train_tokens is not used for samples"),
        ({"kind": "samples", "users": {"ada": "x"}, "los": "mse"}, "unknown key 'data.los'. Did you mean 'loss'?"),
    ],
)
def test_a_wrong_section_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ComingleError) as error:
        Recipe(data=data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "base"), [({}, lambda: torch.nn.Linear(4, 3)), ({"data": {"kind": "samples"}}, "net:linear")]
)
@pytest.mark.parametrize("as_splits", [False, True])
def test_paths_in_the_place_of_samples_name_what_reads_them(
    tmp_path: Path, recipe: dict[str, Any], base: Any, as_splits: bool
) -> None:
    path = str(tmp_path / "ada")
    data = {"train": path, "test": path} if as_splits else path
    with pytest.raises(DataError) as error:
        comingle.run(recipe, users={"ada": data}, base=base, method="fedavg")
    message = str(error.value)
    assert message.startswith("users: ")
    assert "'ada'" in message
    assert repr(path) in message
    assert "data={'kind': 'samples', 'users': {'ada': " in message
    assert "\n" not in message


def test_a_registered_net_trains_on_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "ada.npz", inputs=np.zeros((9, 4), "float32"), targets=np.arange(9) % 3)
    NETS.register("of-the-test", lambda shape, outputs: torch.nn.Linear(shape[0], outputs))
    recipe = {"data": {"kind": "samples", "users": {"ada": str(tmp_path / "ada.npz")}}, "training": {"rounds": 1}}
    assert comingle.run(recipe, base="net:of-the-test", method="local").users == ["ada"]


def test_all_broken_images_of_all_users_are_named(tmp_path: Path) -> None:
    for user, count in (("ada", 2), ("bob", 5)):
        write_images(tmp_path / user)
        for i in range(count):
            path = tmp_path / user / "dog" / f"{i}.png"
            path.write_bytes(path.read_bytes()[:20])
    recipe = load_recipe(recipe_in(tmp_path, {"ada": str(tmp_path / "ada"), "bob": str(tmp_path / "bob")}))
    with pytest.raises(BrokenImagesError, match=f"^{tmp_path / 'ada' / 'dog' / '0.png'}: ") as error:
        prepare(recipe)
    assert [path.parts[-3:] for path in error.value.files] == [
        *(("ada", "dog", f"{i}.png") for i in range(2)),
        *(("bob", "dog", f"{i}.png") for i in range(5)),
    ]
    named = re.findall(r"[^ ,]*\.png", str(error.value))
    assert named == [str(path) for path in error.value.files[:5]]
    assert "7" in str(error.value)
    assert "2 more" in str(error.value)


def trained_on_images(folder: Path) -> comingle.Run:
    for i in range(10):
        paint(folder / "ada" / "cat" / f"{i}.png", 90 + i, (5, 9))
        paint(folder / "ada" / "dog" / f"{i}.png", 10 + i, (5, 9))
    recipe = recipe_in(folder, {"ada": str(folder / "ada")}, image_size=[6, 7], grayscale=True)
    return comingle.run(recipe, out=folder / "run", training={"rounds": 1})


def test_a_net_predicts_for_tensors_and_images_as_in_training(tmp_path: Path) -> None:
    trained = trained_on_images(tmp_path)
    for run in (trained, comingle.load(tmp_path / "run")):
        assert run.classes == ["cat", "dog"]
        ada = run.user("ada")
        paths = sorted((tmp_path / "ada" / "dog").iterdir())
        pixels = read_folder(tmp_path / "ada", ImageFormat(size=(6, 7), grey=True), "ada").pixels[10:, :, :, 0]
        wanted = ada.model(pixels.unsqueeze(1) / 255)
        for inputs in (pixels.unsqueeze(1) / 255, pixels.unsqueeze(1), pixels, paths, [str(path) for path in paths]):
            torch.testing.assert_close(ada.predict(inputs), wanted)
        torch.testing.assert_close(ada.predict(paths[0]), wanted[:1])


def test_inputs_of_another_shape_or_type_are_refused(tmp_path: Path) -> None:
    ada = trained_on_images(tmp_path).user("ada")
    (tmp_path / "broken.png").write_bytes(b"PNG")
    for inputs, got in (
        (torch.rand(1, 6, 7), "(1, 6, 7)"),
        (torch.rand(2, 3, 6, 7), "(2, 3, 6, 7)"),
        (torch.rand(2, 1, 8, 8), "(2, 1, 8, 8)"),
        (torch.zeros(2, 1, 6, 7, dtype=torch.int64), "int64"),
        (torch.tensor(1.0), "number"),
        ([], "list"),
        ([1.0], "float"),
        (np.zeros((2, 1, 6, 7)), "ndarray"),
        (tmp_path / "broken.png", "broken.png"),
        ("no.png", "no.png"),
    ):
        with pytest.raises(DataError) as error:
            ada.predict(inputs)
        assert got in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"list of str.*\(batch, 4\)"):
        PersonalNet(name="ada", model=torch.nn.Linear(4, 2), input_shape=(4,)).predict(["a.png"])


class FixedNet(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


INSTANCE = FixedNet()


def from_shape_alone(shape: Any) -> torch.nn.Module:
    return FixedNet()


@pytest.mark.parametrize("build", [lambda: torch.nn.Linear(4, 3), FixedNet, INSTANCE, from_shape_alone])
def test_a_registered_net_takes_no_arguments_or_two(build: Any) -> None:
    with NETS.temporarily_registered("fixed-of-the-test", build):
        if build is not INSTANCE and build is not from_shape_alone:
            assert make_net("fixed-of-the-test", (4,), 3)(torch.zeros(2, 4)).shape == (2, 3)
        else:
            with pytest.raises(PluginError, match=r"^net 'fixed-of-the-test': "):
                make_net("fixed-of-the-test", (4,), 3)


def test_a_net_that_does_not_exist_is_refused_before_users_are_read(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_in(tmp_path, {"ada": "missing"})).with_changes({"base": "net:cn"})
    with pytest.raises(RecipeError, match=r"^base: .*'cn'") as error:
        prepare(recipe)
    assert "FUNCTION" not in str(error.value)


@pytest.mark.parametrize("given", ["base", "loss"])
def test_a_function_for_samples_out_of_files_is_refused(tmp_path: Path, given: str) -> None:
    np.savez(tmp_path / "ada.npz", inputs=np.zeros((9, 4), "float32"), targets=np.arange(9) % 3)
    recipe = {"data": {"kind": "samples", "users": {"ada": str(tmp_path / "ada.npz")}}}
    function: dict[str, Any] = {given: lambda *_: torch.nn.Linear(4, 3)}
    with pytest.raises(RecipeError, match=f"^{given}: got a function.*users="):
        comingle.run(recipe, method="fedavg", **function)


def test_a_resumed_run_says_from_which_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "ada")
    recipe = recipe_in(tmp_path, {"ada": str(tmp_path / "ada")})

    def interrupt(event: Any) -> None:
        if event["event"] == "step" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comingle.run(recipe, out=tmp_path / "run", observers=[interrupt])
    capsys.readouterr()
    comingle.run(recipe, out=tmp_path / "run", resume=True, progress=True)
    loaded, resumed, *rounds = capsys.readouterr().err.splitlines()
    assert "net" in loaded
    assert "round 1" in resumed
    assert "round 2/2" in rounds[0]
