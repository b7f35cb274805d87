"""Folders of images with one subfolder per class, with or without splits."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from comingle.data.row_files import describe_cause
from comingle.data.samples.samples import SPLITS
from comingle.utils.errors import DataError, list_names

SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""

_SPLIT_NAMES = {
    "train": ("train", "training", "trn"),
    "valid": ("valid", "val", "validation", "validate", "dev", "development", "eval", "evaluation"),
    "test": ("test", "testing", "tst"),
}
"""Names of folders that denote a split."""
_SPLIT_OF = {name: split for split, names in _SPLIT_NAMES.items() for name in names}

_SYSTEM_FOLDERS = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"}
"""Folders that archives, file systems and network drives create; some hold thumbnails. Hidden ones are skipped too."""
_SYSTEM_FILES = {"thumbs.db", "ehthumbs.db", "desktop.ini"}


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """Conversion of images on reading.

    Args:
        size: Height and width to scale to; None to keep the size.
        grey: Convert to greyscale instead of RGB.
    """

    size: tuple[int, int] | None
    grey: bool


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of a folder.

    Args:
        pixels: Pixel values.
        labels: Class of each image.
        classes: Names of all classes, including those without images.
        unread: Number of files that are not images or not in a class's folder, by suffix.
    """

    pixels: UInt8[Tensor, "n h w c"]
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    unread: Counter[str] = field(default_factory=Counter)


MAX_LISTED = 5
"""Largest number of broken files in a message."""


class BrokenImagesError(DataError):
    """Image files that are truncated or damaged.

    Args:
        files: The files, at least one.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Build the message from the paths of the damaged files; there is at least one."""
        self.files = tuple(files)
        first, *others = map(str, self.files)
        message = f"{first}: not a readable image (truncated or damaged); replace or remove it"
        if others:
            max_others = MAX_LISTED - 1  # besides the first
            listed = ", ".join(others[:max_others])
            if len(others) > max_others:
                listed += f" and {len(others) - max_others} more"
            message += f". {len(self.files)} such files; the others: {listed}"
        super().__init__(message)


# -------------------------------------------------------------------- folders


def split_named(name: str) -> str | None:
    """Return the split that a folder's name denotes, such as ``Training``, ``val`` or ``test_set``; else None."""
    letters = re.sub(r"[^a-z]", "", name.casefold())
    word = re.sub("(set|data|images)$", "", letters)
    return _SPLIT_OF.get(word)


def find_splits(folder: Path, key: str) -> dict[str, Path]:
    """Return the subfolder of each split if there are a train and a held-out split; else ``{"train": folder}``.

    Without a test split, the validation split is used as the test split.

    Args:
        folder: Folder of a user, with subfolders for splits or for classes.
        key: Recipe key that names the folder, for error messages.

    Raises:
        DataError: Two subfolders denote the same split.
    """
    folder_by_split: dict[str, Path] = {}
    for subfolder in class_folders(folder):
        split = split_named(subfolder.name)
        if split is None:
            continue
        if split in folder_by_split:
            both = f"{folder_by_split[split].name} and {subfolder.name}"
            raise DataError(f"{folder}: {both} both name the {split} split; {_advice_to_name_splits(key)}")
        folder_by_split[split] = subfolder
    has_held_out = "valid" in folder_by_split or "test" in folder_by_split
    if "train" not in folder_by_split or not has_held_out:
        return {"train": folder}
    if "test" not in folder_by_split:  # test on the validation split
        folder_by_split["test"] = folder_by_split.pop("valid")
    return {split: folder_by_split[split] for split in SPLITS if split in folder_by_split}


def _advice_to_name_splits(key: str) -> str:
    """Return the advice to name the folder of each split in the recipe, under this key."""
    return f"give {key} as {{train: FOLDER, test: FOLDER}}"


def class_folders(folder: Path) -> list[Path]:
    """List the subfolders, one per class, without hidden and system folders."""
    return sorted(path for path in list_visible(folder) if path.is_dir())


def list_visible(folder: Path) -> list[Path]:
    """List the entries of a folder, without hidden and system ones."""
    names = _SYSTEM_FOLDERS | _SYSTEM_FILES
    return [path for path in folder.iterdir() if not path.name.startswith(".") and path.name.casefold() not in names]


def _files_below(folder: Path, parents: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield files at any depth, without hidden and system ones; follow links to folders, but no cycles.

    Args:
        folder: Path of the folder.
        parents: Real paths of the folders between the first call's folder and this one, to detect cycles of links.
    """
    real_path = os.path.realpath(folder)
    if real_path in parents:
        return
    for path in list_visible(folder):
        if path.is_dir():
            yield from _files_below(path, parents | {real_path})
        elif path.is_file():
            yield path


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_folder(folder: Path, image_format: ImageFormat, key: str) -> Images:
    """Read all images of a folder, class by class; the class is the name of the subfolder.

    Args:
        folder: Path of the folder.
        image_format: Size and colours.
        key: Recipe key that names the folder, for error messages.

    Raises:
        DataError: There are no subfolders or no images, images are one level deeper, an image cannot be read, or sizes
            differ.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold a subfolder of images for each class")
    subfolders = class_folders(folder)
    if not subfolders:
        raise DataError(f"{folder}: no subfolders; allowed: a subfolder of images for each class")
    classes = tuple(subfolder.name for subfolder in subfolders)

    images: list[Path] = []
    labels: list[str] = []  # class of each image
    images_by_subfolder: dict[Path, list[Path]] = {}
    unread = [path for path in list_visible(folder) if path.is_file()]  # outside of the classes
    for subfolder in subfolders:
        files = sorted(_files_below(subfolder))
        images_by_subfolder[subfolder] = [file for file in files if _is_image(file)]
        images += images_by_subfolder[subfolder]
        labels += [subfolder.name] * len(images_by_subfolder[subfolder])
        unread += [file for file in files if not _is_image(file)]
    if not images:
        raise DataError(f"{folder}: no images in {list_names(classes)}; looked for {' '.join(SUFFIXES)}")
    _check_depth(folder, images_by_subfolder, key)
    num_unread = Counter(path.suffix.lower() or path.name for path in unread)
    pixels = read_images(images, image_format)
    return Images(pixels=pixels, labels=tuple(labels), classes=classes, unread=num_unread)


def _check_depth(folder: Path, images_by_subfolder: dict[Path, list[Path]], key: str) -> None:
    """Check that images are directly in the class folders: ``folder/cat/1.png``, not ``folder/train/cat/1.png``.

    Args:
        folder: Path of the folder.
        images_by_subfolder: Images at any depth below each subfolder.
        key: Recipe key that names the folder.

    Raises:
        DataError: All images are one or more levels deeper, or those below a folder with the name of a split are.
    """
    subfolders_with_images = [subfolder for subfolder, images in images_by_subfolder.items() if images]
    deep_folders: list[Path] = []  # subfolders with images only in subfolders of their own
    for subfolder in subfolders_with_images:
        if all(image.parent != subfolder for image in images_by_subfolder[subfolder]):
            deep_folders.append(subfolder)
    all_are_deep = len(deep_folders) == len(subfolders_with_images)
    a_split_is_deep = any(split_named(path.name) for path in deep_folders)
    if not all_are_deep and not a_split_is_deep:
        return

    names = [path.name for path in deep_folders]
    inner_folders: set[str] = set()
    for deep_folder in deep_folders:
        inner_folders |= {image.relative_to(deep_folder).parts[0] for image in images_by_subfolder[deep_folder]}
    inner_names = sorted(inner_folders)
    if len(deep_folders) == 1:
        advice = f"give {key} as {deep_folders[0]}"
    elif any(split_named(name) for name in [*names, *inner_names]):
        advice = _advice_to_name_splits(key)
    else:
        advice = "put each class's images into one folder"
    verb = "holds" if len(names) == 1 else "hold"
    raise DataError(f"{folder}: {_listed(names)} {verb} {_listed(inner_names)}, but no images; {advice}")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else list_names(names)


# -------------------------------------------------------------------- images


def read_images(files: Sequence[Path], image_format: ImageFormat) -> UInt8[Tensor, "n h w c"]:
    """Read images of equal size into one tensor.

    Args:
        files: The images, at least one.
        image_format: Size and colours to convert to.

    Raises:
        BrokenImagesError: Images are truncated or damaged; the error has all of them.
        DataError: An image cannot be read for another reason, or has another size than the first.
    """
    first: np.ndarray | None = None
    pixels = torch.empty(0, dtype=torch.uint8)
    broken: list[Path] = []
    for number, path in enumerate(files):
        try:
            image = _read_image(path, image_format)
        except BrokenImagesError as error:  # read the other files too, to name all broken files at once
            broken += error.files
            continue
        if broken:  # the images are not needed: an error will be raised
            continue
        if first is None:
            first = image
            pixels = torch.empty(len(files), *image.shape, dtype=torch.uint8)
        if image.shape != first.shape:
            size = f"{image.shape[1]} x {image.shape[0]}"  # width x height
            first_size = f"{first.shape[1]} x {first.shape[0]}"
            raise DataError(
                f"{path}: got an image of {size}, but {files[0]} has {first_size}; set data.image_size to scale all"
            )
        pixels[number] = torch.from_numpy(image)
    if broken:
        raise BrokenImagesError(broken)
    return pixels


def _read_image(path: Path, image_format: ImageFormat) -> np.ndarray:
    """Return an image as bytes of shape ``(h, w, 1)`` or ``(h, w, 3)``, rotated as its EXIF data says.

    Raises:
        BrokenImagesError: The file is truncated, damaged or no image.
        DataError: The file cannot be opened, is too large, or the package pillow is missing.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(f"{path}: reading images needs the package pillow: pip install 'comingle[data]'") from error
    mode = "L" if image_format.grey else "RGB"
    try:
        with Image.open(path) as image:
            # The rotated copy lacks the file's format and tags, which determine the range of the pixels.
            upright = ImageOps.exif_transpose(image)
            converted = _convert_to_8_bits(upright, file=image).convert(mode)
            if image_format.size is not None:
                height, width = image_format.size
                converted = converted.resize((width, height), Image.Resampling.BILINEAR)
            pixels = np.array(converted)
    except DataError:
        raise
    except (MemoryError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image: {describe_cause(error)}") from error
    except Exception as error:  # Pillow's readers raise unrelated exceptions
        if isinstance(error, OSError) and error.errno is not None:  # such as a missing permission
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        raise BrokenImagesError([path]) from error
    return pixels[:, :, None] if image_format.grey else pixels


_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""TIFF tags "bits per sample" and "photometric interpretation", and the latter's value WhiteIsZero."""
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
"""Modes of Pillow images with transparency."""


def _convert_to_8_bits(image: Any, file: Any) -> Any:
    """Scale a 16-bit image to 8 bits, which Pillow would clip at 255, and blend a transparent one with white.

    Args:
        image: Upright Pillow image.
        file: Pillow image as opened, with the file's format and tags.

    Returns:
        The converted image; other images unchanged.

    Raises:
        DataError: The range of pixel values is unknown.
    """
    from PIL import Image

    has_32_bits = image.mode in ("I", "F")  # integers or real numbers
    has_16_bit_values = image.mode == "I" and file.format in ("PNG", "PPM")  # Pillow reads these as 32 bits
    if has_32_bits and not has_16_bit_values:
        kind = "32-bit integers" if image.mode == "I" else "real numbers"
        raise DataError(
            f"{file.filename}: got an image of {kind} ({image.mode}) with unknown range; convert it to 8 or 16 bits, "
            "or give an .npz file of real numbers"
        )
    has_integers = image.mode.startswith("I")  # "I", or "I;16" and its variants
    if has_integers:
        tiff_tags = getattr(file, "tag_v2", {})  # empty for other formats
        bits_of_channels = tiff_tags.get(_BITS, (16,))
        white = 2 ** bits_of_channels[0] - 1
        values = np.array(image).astype(np.float64) / white
        if tiff_tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            values = 1 - values
        return Image.fromarray(np.rint(values.clip(0, 1) * 255).astype(np.uint8))
    if "transparency" in image.info or image.mode in _WITH_ALPHA:
        colours = image.convert("RGBA")
        _red, _green, _blue, alpha_range = colours.getextrema()
        lowest_alpha, _highest_alpha = alpha_range
        if lowest_alpha < 255:  # some pixels are transparent
            return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return image
