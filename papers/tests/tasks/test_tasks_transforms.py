from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comingle.utils.seeds import generator
from comingle_papers.tasks import image_tasks


def pictures(count: int = 3, *, height: int = 8, width: int = 8) -> Tensor:
    return torch.rand(count, 2, height, width, generator=generator("pictures"), dtype=torch.float64)


def test_a_quarter_turn_is_counter_clockwise_and_exact() -> None:
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert image_tasks.rotate_quarters(image, 1)[0, 0].tolist() == [[2, 4], [1, 3]]
    assert torch.equal(image_tasks.rotate_quarters(pictures(), 4), pictures())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, -1, 5])
def test_turning_freely_by_a_multiple_of_90_is_a_quarter_turn(turns: int) -> None:
    freely = image_tasks.rotate_freely(pictures(), 90 * turns)
    torch.testing.assert_close(freely, image_tasks.rotate_quarters(pictures(), turns), rtol=0, atol=1e-12)
    assert torch.equal(image_tasks.rotate(pictures(), 90 * turns), image_tasks.rotate_quarters(pictures(), turns))


def naive_rotation(image: Tensor, degrees: float) -> Tensor:
    """Pixel by pixel: where it comes from, in pixels from the centre, x to the right and y up."""
    height, width = image.shape
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    cos, sin = float(angle.cos()), float(angle.sin())
    turned = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            x, y = column - (width - 1) / 2, (height - 1) / 2 - row
            from_x, from_y = cos * x + sin * y, -sin * x + cos * y  # turned back, clockwise
            at_column, at_row = from_x + (width - 1) / 2, (height - 1) / 2 - from_y
            for r in range(height):
                for c in range(width):
                    weight = max(0.0, 1 - abs(at_row - r)) * max(0.0, 1 - abs(at_column - c))
                    turned[row, column] += weight * image[r, c]
    return turned


@pytest.mark.parametrize(("degrees", "size"), [(30, (6, 6)), (120.5, (6, 6)), (-45, (5, 7)), (90, (4, 7))])
def test_turning_freely_equals_bilinear_interpolation_pixel_by_pixel(degrees: float, size: tuple[int, int]) -> None:
    images = pictures(2, height=size[0], width=size[1])
    turned = image_tasks.rotate(images, degrees)
    for n in range(2):
        for c in range(2):
            torch.testing.assert_close(turned[n, c], naive_rotation(images[n, c], degrees), rtol=0, atol=1e-10)


def test_a_turn_by_45_degrees_leaves_black_corners() -> None:
    turned = image_tasks.rotate(torch.ones(1, 1, 9, 9), 45)
    assert turned[0, 0, 0, 0] == 0
    assert turned[0, 0, 4, 4] == 1


def test_flips_are_per_image_and_half_of_them() -> None:
    images = pictures(2000)
    flipped = image_tasks.flip_some(images, generator("flip"))
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert ((flipped == images).flatten(1).all(1) ^ mirrored).all()
    assert 900 < mirrored.sum() < 1100
    assert torch.equal(flipped, image_tasks.flip_some(images, generator("flip")))
    assert torch.equal(image_tasks.flip_some(images, generator("flip"), probability=1.0), images.flip(-1))


def test_a_vertical_flip_of_a_turned_image_is_a_turned_flip() -> None:
    upright = pictures(200)
    for turns in range(4):
        turned = image_tasks.rotate_quarters(upright, turns)
        flipped = image_tasks.flip_some(turned, generator("flip"), vertically=[turns % 2 == 1] * 200)
        expected = image_tasks.rotate_quarters(image_tasks.flip_some(upright, generator("flip")), turns)
        assert torch.equal(flipped, expected)


@pytest.mark.parametrize("fill", [0.0, (-1.5, 2.5)])
def test_crops_are_shifted_images_on_the_fill(fill: float | tuple[float, ...]) -> None:
    images = pictures(500, height=6, width=5)
    cropped = image_tasks.crop_randomly(images, generator("crop"), padding=2, fill=fill)
    values = (fill, fill) if isinstance(fill, float) else fill
    padded = torch.empty(500, 2, 10, 9, dtype=torch.float64)
    for channel, value in enumerate(values):
        padded[:, channel] = value
    padded[:, :, 2:8, 2:7] = images
    corners = set()
    for n in range(500):
        matches = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(cropped[n], padded[n, :, top : top + 6, left : left + 5])
        ]
        assert len(matches) == 1
        corners.add(matches[0])
    assert len(corners) == 25  # every shift occurs


def test_normalising_is_per_channel() -> None:
    images = pictures()
    normalised = image_tasks.normalise(images, (0.25, 0.5), (0.5, 2.0))
    torch.testing.assert_close(normalised[:, 0], (images[:, 0] - 0.25) * 2)
    torch.testing.assert_close(normalised[:, 1], (images[:, 1] - 0.5) / 2)
