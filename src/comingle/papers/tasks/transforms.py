"""Turning, flipping and cropping images, as tensors ``(n, channels, height, width)``.

Random ones act on each sample by itself, without a loop; what they draw comes from the given generator, on the
generator's device, so that a CPU generator gives the same images on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

CROP_PADDING = 4
"""Pixels on every side that a crop may shift by, as is usual for CIFAR."""


def rotate_quarters(images: Float[Tensor, "n c h w"], turns: int) -> Float[Tensor, "n c _ _"]:
    """Counter-clockwise by ``turns`` times 90 degrees, exactly: no pixel changes its value."""
    return torch.rot90(images, turns, (-2, -1))


def rotate_freely(images: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    """Counter-clockwise about the centre, bilinear, zeros where nothing was."""
    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # A grid says where each output pixel comes from, so this is the inverse rotation. Both axes run from -1 to 1
    # whatever their length, hence the ratios; y points down.
    inverse = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
    theta = torch.tensor(inverse, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def rotate(images: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    """Counter-clockwise by any angle; exact where a multiple of 90 degrees keeps the shape."""
    turns, rest = divmod(degrees, 90)
    if rest == 0 and (turns % 2 == 0 or images.shape[-1] == images.shape[-2]):
        return rotate_quarters(images, int(turns))
    return rotate_freely(images, degrees)


def flip_some(
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    *,
    probability: float = 0.5,
    vertically: Sequence[bool] | None = None,
) -> Float[Tensor, "n c h w"]:
    """Mirror each image with this probability, left to right, or top to bottom where ``vertically`` says so.

    An image that was turned by 90 degrees and is then flipped vertically is what flipping it horizontally and then
    turning it would have given.
    """
    draws = torch.rand(len(images), generator=generator, device=generator.device)
    mirrored = images.flip(-1)
    if vertically is not None:
        upright = torch.tensor([not v for v in vertically], device=images.device)
        mirrored = torch.where(upright[:, None, None, None], mirrored, images.flip(-2))
    chosen = (draws < probability).to(images.device)
    return torch.where(chosen[:, None, None, None], mirrored, images)


def crop_randomly(
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    *,
    padding: int = CROP_PADDING,
    fill: Sequence[float] | float = 0.0,
) -> Float[Tensor, "n c h w"]:
    """Shift each image by up to ``padding`` pixels in each direction: pad with ``fill``, cut out the old size.

    ``fill`` is one value, or one for each channel: black is not zero once images are normalised.
    """
    count, channels, height, width = images.shape
    corners = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=generator.device)
    top, left = corners.to(images.device)
    rows = top + torch.arange(height, device=images.device)  # (n, h)
    columns = left + torch.arange(width, device=images.device)  # (n, w)
    padded = _pad(images, padding, fill)
    # Two thin gathers: rows of all columns, then columns.
    tall = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[-1]))
    return tall.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


def _pad(images: Float[Tensor, "n c h w"], padding: int, fill: Sequence[float] | float) -> Float[Tensor, "n c _ _"]:
    count, channels, height, width = images.shape
    padded = images.new_empty(count, channels, height + 2 * padding, width + 2 * padding)
    padded[:] = images.new_tensor(fill).view(-1, 1, 1)
    padded[:, :, padding : padding + height, padding : padding + width] = images
    return padded


def normalise(
    images: Float[Tensor, "n c h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "n c h w"]:
    """``(images - mean) / std`` for each channel."""
    return (images - images.new_tensor(mean).view(-1, 1, 1)) / images.new_tensor(std).view(-1, 1, 1)
