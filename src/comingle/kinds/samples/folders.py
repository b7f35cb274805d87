"""A folder of images with one subfolder a class, whole or in splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from comingle.data.rows import describe, list_names
from comingle.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {"train": ("train",), "valid": ("valid", "val", "validation"), "test": ("test",)}


@dataclass(frozen=True, kw_only=True)
class Look:
    """How images are read: scaled to (height, width) where that is given, in grey or in colours."""

    size: tuple[int, int] | None
    grey: bool


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Images ``(n, h, w, c)`` and the name of the class of each; classes without images count too."""

    pixels: UInt8[Tensor, "n h w c"]
    labels: tuple[str, ...]
    classes: tuple[str, ...]


def find_splits(folder: Path) -> dict[str, Path]:
    """The folder's own splits, if it has train and test; else all of it as "train"."""
    found = {
        split: folder / name for split, names in SPLIT_FOLDERS.items() for name in names if (folder / name).is_dir()
    }
    return found if {"train", "test"} <= found.keys() else {"train": folder}


def class_folders(folder: Path) -> list[Path]:
    """The subfolders, one for each class."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_folder(folder: Path, look: Look) -> Pictures:
    """All images of a folder, class after class, each by the name of its subfolder.

    Raises:
        DataError: no subfolders or no images in it, one that cannot be read, or several sizes.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold a subfolder of images for each class")
    if not (classes := class_folders(folder)):
        raise DataError(f"{folder}: no folders in it; allowed: a subfolder of images for each class")
    files = [path for of_class in classes for path in _images_of(of_class)]
    if not files:
        raise DataError(
            f"{folder}: no images in {list_names(c.name for c in classes)}; looked for {' '.join(SUFFIXES)}"
        )
    pixels = _read_all(files, look)
    labels = tuple(path.relative_to(folder).parts[0] for path in files)
    return Pictures(pixels=pixels, labels=labels, classes=tuple(path.name for path in classes))


def _images_of(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def _read_all(files: Sequence[Path], look: Look) -> UInt8[Tensor, "n h w c"]:
    first = _read_one(files[0], look)
    pixels = torch.empty(len(files), *first.shape, dtype=torch.uint8)
    for number, path in enumerate(files):
        image = _read_one(path, look)
        if image.shape != first.shape:
            sizes = [f"{one.shape[1]} x {one.shape[0]}" for one in (image, first)]
            raise DataError(
                f"{path}: an image of {sizes[0]}, but {files[0]} has {sizes[1]}; give data.image_size to scale all"
            )
        pixels[number] = torch.from_numpy(image)
    return pixels


def _read_one(path: Path, look: Look) -> np.ndarray:
    """``(h, w, 1)`` or ``(h, w, 3)``, upright."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError("images need Pillow: pip install 'comingle[data]'") from error
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("L" if look.grey else "RGB")
            if look.size is not None:
                upright = upright.resize((look.size[1], look.size[0]), Image.Resampling.BILINEAR)
            pixels = np.array(upright)
    except Exception as error:  # Pillow's readers raise what they come across
        raise DataError(f"{path}: not a readable image: {describe(error)}") from error
    return pixels[:, :, None] if look.grey else pixels
