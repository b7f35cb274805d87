from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from comingle.utils.seeds import derive, generator


def test_a_seed_is_the_documented_function_of_its_parts():
    digest = hashlib.sha256(b'["train", 3, "anna"]').hexdigest()
    assert derive("train", 3, "anna") == int(digest[:16], 16) // 2


def test_seeds_keep_borders_order_and_types_apart():
    parts = [("a", "b"), ("ab",), ("b", "a"), ("a,b",), ('a", "b',), ("1",), (1,), (-1,), (1, 1), (11,), ("",), ()]
    assert len({derive(*part) for part in parts}) == len(parts)


def test_seeds_fit_into_63_bits_and_use_the_upper_half():
    seeds = [derive("seed", index) for index in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sum(seed >= 2**62 for seed in seeds) == pytest.approx(100, abs=35)


@pytest.mark.slow
def test_a_seed_is_the_same_in_another_process():
    code = "from comingle.utils.seeds import derive; print(derive('user', 7, 'é'))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive("user", 7, "é")


def test_a_part_of_another_type_is_refused():
    with pytest.raises(TypeError):
        derive("round", torch.tensor(3))  # type: ignore[arg-type]


def test_a_generator_does_not_depend_on_what_was_drawn_before():
    first = torch.randint(1000, (5,), generator=generator("train", 1, "anna"))
    torch.rand(17)
    again = torch.randint(1000, (5,), generator=generator("train", 1, "anna"))
    other = torch.randint(1000, (5,), generator=generator("train", 2, "anna"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
