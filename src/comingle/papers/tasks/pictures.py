"""Pictures as arrays: JPEG bytes one after another, scaling, and many of one size as one array."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comingle.data.row_files import describe
from comingle.utils.errors import DataError, list_names


def decode(jpeg: np.ndarray, offset: np.ndarray, path: Path) -> np.ndarray:
    """The images of a file of JPEG bytes, all of one size: number i lies from ``offset[i]`` to ``offset[i + 1]``.

    Raises:
        DataError: places that do not fit the bytes, a damaged image, several sizes, or no Pillow.
    """
    if (
        offset.ndim != 1
        or offset.dtype.kind not in "iu"
        or len(offset) < 2
        or int(offset[-1]) != len(jpeg)
        or bool((np.diff(offset.astype(int)) < 0).any())
    ):
        raise DataError(f"{path}: offset should rise from 0 to {len(jpeg)}, the length of jpeg; truncated or damaged")
    _import_pillow()
    content = jpeg.tobytes()
    places = zip(offset[:-1].tolist(), offset[1:].tolist(), strict=True)
    try:
        images = [_open_image(content[start:stop]) for start, stop in places]
    except Exception as error:  # Pillow's readers raise what they come across
        raise DataError(f"{path}: a damaged JPEG image: {describe(error)}") from error
    return stack(images, str(path))


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs the package pillow: pip install 'comingle[data]'") from error
    return Image


def _open_image(content: bytes) -> np.ndarray:
    with _import_pillow().open(io.BytesIO(content)) as image:
        return np.asarray(image)


def scale(image: Any, largest: int) -> Any:
    """A picture of Pillow, as a square (Lanczos) where one of its sides is longer than that."""
    resampling = _import_pillow().Resampling.LANCZOS
    return image.resize((largest, largest), resampling) if max(image.size) > largest else image


def stack(images: Sequence[np.ndarray], where: str) -> np.ndarray:
    """All in one array, the first axis counts them.

    Raises:
        DataError: they are none, or of several sizes or modes.
    """
    shapes = dict.fromkeys(image.shape for image in images)
    if len(shapes) != 1:
        got = list_names(" x ".join(map(str, shape)) for shape in shapes) or "none"
        raise DataError(f"{where}: images must be of one size and mode, got {got}")
    return np.stack(images)
