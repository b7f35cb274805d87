from __future__ import annotations

import gzip
import io
import json
import lzma
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comingle.utils.errors import DataError
from comingle_papers.tasks.images import (
    Images,
    has_images,
    read_domains,
    read_idx,
    read_idx_pair,
    read_images,
    read_npz,
)

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def write_idx(path: Path, values: np.ndarray, *, kind: int = 8) -> Path:
    content = struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape) + values.tobytes()
    with OPENERS.get(path.suffix, open)(path, "wb") as file:
        file.write(content)
    return path


def damage(path: Path, read: Callable[[Path], Any], step: int) -> list[str]:
    """What is said of a file with one byte turned over, for every ``step``-th byte; "" where the damage is harmless."""
    content, said = path.read_bytes(), []
    for place in range(0, len(content), step):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            read(path)
            said.append("")
        except DataError as error:
            said.append(str(error))
    return said


def pictures(count: int = 4, *, shape: tuple[int, ...] = (5, 6), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def classes(count: int = 4) -> np.ndarray:
    return np.arange(count, dtype=np.uint8) % 3


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_idx_files_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    images = write_idx(tmp_path / f"images-ubyte{suffix}", pictures())
    labels = write_idx(tmp_path / f"labels-ubyte{suffix}", classes())
    found = read_idx_pair(images, labels)
    assert torch.equal(found.pixels, torch.from_numpy(pictures()))
    assert found.labels.tolist() == [0, 1, 2, 0]
    assert found.labels.dtype == torch.int64
    assert len(found) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG and so on", "not an IDX file; it should begin with two zero bytes"),
        (b"", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", "IDX values of type 0x0d; allowed: 0x08, unsigned bytes"),
        (b"\0\0\x08\x03\0\0\0\1", "truncated within its header of 16 bytes, got 8"),
        (b"\0\0\x08\x02\0\0\0\2\0\0\0\3abcde", "5 values, but its header says 2 x 3; truncated or damaged"),
        (b"\0\0\x08\x01\0\0\0\2abc", "3 values, but its header says 2; truncated or damaged"),
    ],
)
def test_damaged_idx_files_are_said_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_idx(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("keep", [0.6, 0.0])
def test_cut_off_compressed_files_are_said(tmp_path: Path, suffix: str, keep: float) -> None:
    path = write_idx(tmp_path / f"images-ubyte{suffix}", pictures(50))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))] or b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_compressed_files_are_said_wherever_the_damage_is(tmp_path: Path, suffix: str) -> None:
    path = write_idx(tmp_path / f"images-ubyte{suffix}", pictures(9))
    found = list(filter(None, damage(path, read_idx, 7)))  # gzip's time stamp is nothing to us
    assert len(found) > 20
    assert all(said.startswith(f"{path}: ") and "\n" not in said for said in found)


def test_files_that_do_not_belong_together_are_said(tmp_path: Path) -> None:
    images, labels = write_idx(tmp_path / "i", pictures()), write_idx(tmp_path / "l", classes(3))
    with pytest.raises(DataError, match=r"i and l: 4 images but labels of shape \(3,\)"):
        read_idx_pair(images, labels)
    with pytest.raises(DataError, match="l: 1 axes; allowed: 3"):
        read_idx_pair(labels, labels)
    with pytest.raises(DataError, match="i: 3 axes; allowed: 1"):
        read_idx_pair(images, images)
    with pytest.raises(DataError, match="absent: no such file"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize("layout", ["channels first", "channels last", "grey"])
@pytest.mark.parametrize("keys", [("images", "labels"), ("x", "y"), ("x_train", "y_train"), ("data", "fine_label")])
def test_npz_files_in_the_usual_names_and_layouts(tmp_path: Path, layout: str, keys: tuple[str, str]) -> None:
    expected = pictures(shape=(5, 6) if layout == "grey" else (3, 5, 6))
    stored = expected.transpose(0, 2, 3, 1) if layout == "channels last" else expected
    np.savez(tmp_path / "a.npz", **{keys[0]: stored, keys[1]: classes()})
    found = read_npz(tmp_path / "a.npz", split="train")
    assert torch.equal(found.pixels, torch.from_numpy(expected))
    assert found.labels.tolist() == [0, 1, 2, 0]


def test_one_npz_file_with_both_splits(tmp_path: Path) -> None:
    """As Keras stores CIFAR: labels as a column."""
    train, test = pictures(4, shape=(8, 8, 3)), pictures(2, shape=(8, 8, 3), seed=1)
    labels = {"y_train": classes(4)[:, None], "y_test": classes(2)[:, None]}
    np.savez(tmp_path / "cifar10.npz", x_train=train, x_test=test, **labels)
    found = read_images("cifar10", tmp_path)
    assert torch.equal(found["test"].pixels, torch.from_numpy(test).permute(0, 3, 1, 2))
    assert found["train"].labels.tolist() == [0, 1, 2, 0]
    assert found["test"].labels.tolist() == [0, 1]


def jpegs(*sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    from PIL import Image

    contents = []
    for size in sizes:
        file = io.BytesIO()
        Image.new("RGB", size, (200, 10, 30)).save(file, "JPEG", quality=95)
        contents.append(file.getvalue())
    offset = np.cumsum([0, *map(len, contents)]).astype(np.uint32)
    return {"jpeg": np.frombuffer(b"".join(contents), np.uint8), "offset": offset, "label": classes(len(sizes))}


def test_jpeg_bytes_in_an_npz_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **jpegs((8, 6), (8, 6)))
    found = read_npz(tmp_path / "a.npz")
    assert found.pixels.shape == (2, 3, 6, 8)
    assert (found.pixels.float().mean((0, 2, 3)) - torch.tensor([200.0, 10.0, 30.0])).abs().max() < 3


def broken(**changes: Any) -> dict[str, np.ndarray]:
    return {**jpegs((8, 6), (8, 6)), **changes}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": classes()}, "no images in it; found: labels; allowed names: images, image, img, x, data"),
        ({"images": pictures()}, "no labels in it; found: images; allowed names: labels, label, fine_label, y"),
        ({"images": pictures(), "labels": classes(3)}, "4 images but labels of shape (3,)"),
        ({"images": pictures() / 255, "labels": classes()}, "images are float64 with 3 axes; allowed: uint8 with 3"),
        ({"images": pictures()[0], "labels": classes()}, "images are uint8 with 2 axes; allowed: uint8 with 3"),
        ({"images": pictures(), "labels": classes() + 0.5}, "labels are float64; allowed: whole numbers"),
        (jpegs((8, 6), (6, 8)), "images must be of one size and mode, got 6 x 8 x 3, 8 x 6 x 3"),
        (broken(jpeg=jpegs((8, 6))["jpeg"]), "offset should rise from 0 to"),
        ({"images": np.array(["a"] * 4), "labels": classes()}, "images are <U1 with 1 axes; allowed: uint8 with 3"),
        ({"images": np.uint8(1), "labels": np.array(0)}, "images are uint8 with 0 axes; allowed: uint8 with 3"),
        (broken(offset=np.array(["a", "b", "c"])), "offset should rise from 0 to"),
        (broken(jpeg=np.zeros_like(jpegs((8, 6), (8, 6))["jpeg"])), "a damaged JPEG image"),
    ],
)
def test_wrong_npz_files_are_said_in_one_line(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        read_npz(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", **jpegs((8, 6), (8, 6)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError) as error:
        read_npz(tmp_path / "a.npz")
    assert str(error.value).startswith(f"{tmp_path / 'a.npz'}: ")
    assert str(error.value).endswith("pip install 'comingle[data]'")


def test_files_that_are_no_npz_are_said(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(DataError, match=r"a\.npz: no such file"):
        read_npz(path)
    np.savez(path, images=pictures(60), labels=classes(60))
    content = path.read_bytes()
    np.save(tmp_path / "b.npy", pictures())
    np.savez(tmp_path / "c.npz", images=np.array([{}], dtype=object), labels=classes(1))
    for wrong in (content[: len(content) // 2], b"", b"no archive", (tmp_path / "b.npy").read_bytes()):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match="not a readable npz file"):
            read_npz(path)
    with pytest.raises(DataError, match="not a readable npz file"):
        read_npz(tmp_path / "c.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_archives_are_said_wherever_the_damage_is(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "a.npz"
    save(path, images=pictures(9), labels=classes(9))
    found = list(filter(None, every := damage(path, read_npz, 5)))  # dates and the like are nothing to us
    assert len(found) > len(every) / 2
    assert all(said.startswith(f"{path}: ") and "\n" not in said for said in found)


def test_a_folder_is_searched_under_mnists_own_names(tmp_path: Path) -> None:
    assert not has_images("mnist", tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pictures(4))
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", classes(4))
    write_idx(tmp_path / "t10k-images.idx3-ubyte", pictures(2, seed=1))
    with pytest.raises(DataError, match=r"no labels beside it; looked for mnist-test-labels-ubyte"):
        read_images("mnist", tmp_path)
    write_idx(tmp_path / "t10k-labels.idx1-ubyte", classes(2))
    assert has_images("mnist", tmp_path)
    found = read_images("mnist", tmp_path)
    assert {split: len(images) for split, images in found.items()} == {"train": 4, "test": 2}
    assert torch.equal(found["test"].pixels, torch.from_numpy(pictures(2, seed=1)))


def test_an_empty_or_missing_folder_is_said(tmp_path: Path) -> None:
    message = r"no train images of cifar100; looked for cifar100-train-images-ubyte\[.gz\|.xz\], cifar100-train.npz or"
    with pytest.raises(DataError, match=message):
        read_images("cifar100", tmp_path)
    with pytest.raises(DataError, match="absent: no such folder; it should contain the images of mnist"):
        read_images("mnist", tmp_path / "absent")


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like CIFAR-100 on the hub: parquet with columns img, fine_label and coarse_label."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=["apple", "bee", "can"]),
            "coarse_label": datasets.Value("int64"),
        }
    )
    for split, count in (("train", 4), ("test", 2)):
        rows = {
            "img": [Image.fromarray(picture) for picture in pictures(count, shape=(6, 5, 3))],
            "fine_label": classes(count).tolist(),
            "coarse_label": [9] * count,
        }
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def test_a_data_set_of_the_hub_gives_its_images(hub_folder: Path) -> None:
    found = read_images("cifar100", f"hub:{hub_folder}")
    assert torch.equal(found["train"].pixels, torch.from_numpy(pictures(4, shape=(6, 5, 3))).permute(0, 3, 1, 2))
    assert found["train"].labels.tolist() == [0, 1, 2, 0]
    assert found["test"].labels.tolist() == [0, 1]


def test_a_data_set_of_the_hub_without_a_split_or_images_is_said(hub_folder: Path) -> None:
    (hub_folder / "test.parquet").unlink()
    with pytest.raises(DataError, match="no split 'test'; found: train"):
        read_images("cifar100", f"hub:{hub_folder}")
    text = hub_folder.parent / "text"
    text.mkdir()
    (text / "train.jsonl").write_text(json.dumps({"text": "a", "label": 0}) + "\n")
    with pytest.raises(DataError, match="no column images or image or img or x or data; found: text, label"):
        read_images("mnist", f"hub:{text}")


# ---------------------------------------------------------------- domains


@pytest.mark.parametrize("named", [True, False])
def test_images_in_domains(tmp_path: Path, named: bool) -> None:
    numbers = np.array([1, 0, 1, 2])
    names = np.array(["art", "cartoon", "photo"])
    domains = {"domain": names[numbers]} if named else {"domain": numbers, "domains": names}
    assert not has_images("pacs", tmp_path)
    np.savez(tmp_path / "pacs32.npz", images=pictures(4, shape=(3, 8, 8)), label=classes(), **domains)
    assert has_images("pacs", tmp_path)
    found = read_domains("pacs", tmp_path, largest=4)
    assert found.domains is not None
    assert found.domains.tolist() == [1, 0, 1, 2]
    assert found.domain_names == ("art", "cartoon", "photo")
    assert torch.equal(found.pixels, torch.from_numpy(pictures(4, shape=(3, 8, 8))))  # a file's are never scaled


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ({}, "'domain'"),
        ({"domain": np.zeros(3, int)}, "4 images but domains of shape (3,); one is needed per image"),
        (
            {"domain": np.array([0, 1, 2, 0]), "domains": np.array(["art", "photo"])},
            "domains go from 0 to 2; allowed: 0 to 1, those with names",
        ),
        ({"domain": np.zeros(4)}, "domains are float64; allowed: whole numbers, or names"),
        (
            {"domain": np.zeros(4, int), "domains": np.array("art")},
            "domains has 0 axes; allowed: 1, a name for each number in domain",
        ),
    ],
)
def test_wrong_domains_are_said_in_one_line(tmp_path: Path, domains: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "pacs.npz"
    np.savez(path, images=pictures(4, shape=(3, 8, 8)), label=classes(), **domains)
    with pytest.raises(DataError) as error:
        read_domains("pacs", tmp_path, largest=64)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_missing_domains_are_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no images of pacs; looked for pacs.npz, pacs32.npz, pacs64.npz"):
        read_domains("pacs", tmp_path, largest=64)
    with pytest.raises(DataError, match="absent: no such folder; it should contain the images of pacs"):
        read_domains("pacs", tmp_path / "absent", largest=64)


def test_domains_of_the_hub_are_scaled_to_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flwrlabs/pacs has them: one split with columns image, domain (text) and label."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repository").mkdir()
    big = np.full((10, 12, 3), 200, dtype=np.uint8)
    rows = {
        "image": [Image.fromarray(big), Image.fromarray(big // 4), Image.fromarray(big[:4, :4])],
        "domain": ["sketch", "photo", "sketch"],
        "label": [2, 0, 1],
    }
    features = datasets.Features(
        {"image": datasets.Image(), "domain": datasets.Value("string"), "label": datasets.Value("int64")}
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "repository" / "train.parquet")
    found = read_domains("pacs", f"hub:{tmp_path / 'repository'}", largest=4)
    assert found.pixels.shape == (3, 3, 4, 4)
    assert found.pixels.float().mean((1, 2, 3)).tolist() == [200, 50, 200]
    assert found.labels.tolist() == [2, 0, 1]
    assert found.domains is not None
    assert [found.domain_names[number] for number in found.domains] == ["sketch", "photo", "sketch"]


@pytest.fixture(scope="module")
def real(shared_data: Path) -> dict[str, dict[str, Images]]:
    return {name: read_images(name, shared_data / "images") for name in ("mnist", "cifar10")}


def test_real_mnist_is_whole(real: dict[str, dict[str, Images]]) -> None:
    train, test = real["mnist"]["train"], real["mnist"]["test"]
    assert train.pixels.shape == (60000, 28, 28)
    # The published class counts of MNIST, and its well-known mean brightness.
    assert train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    brightness = train.pixels.sum(dtype=torch.int64).item() / train.pixels.numel() / 255
    assert brightness == pytest.approx(0.1307, abs=5e-5)


def test_real_cifar_is_what_its_readme_says(real: dict[str, dict[str, Images]]) -> None:
    train, test = real["cifar10"]["train"], real["cifar10"]["test"]
    assert train.pixels.shape == (8000, 3, 32, 32)
    assert train.labels.bincount().tolist() == [800] * 10
    assert test.labels.bincount().tolist() == [200] * 10
    mean = train.pixels.double().mean((0, 2, 3)) / 255
    assert (mean - torch.tensor([0.4914, 0.4822, 0.4465])).abs().max() < 0.005
