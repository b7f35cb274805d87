"""Noise: its distribution, its streams, and the key."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from comingle.privacy.noise import add_noise, gaussian, load_or_create_key, uniform
from comingle.utils.errors import RunError


def test_it_is_gaussian() -> None:
    drawn = gaussian((401, 251), "key", "a test")
    assert drawn.shape == (401, 251)
    assert kstest(drawn.flatten().numpy(), "norm").pvalue > 0.001
    assert abs(float(np.corrcoef(drawn[:-1].flatten(), drawn[1:].flatten())[0, 1])) < 0.02
    assert kstest(uniform(10_000, "key"), "uniform").pvalue > 0.001


def test_every_stream_is_its_own() -> None:
    """No key, user, round, purpose, tensor or sum shares one."""
    tree = {"a": torch.zeros(50, dtype=torch.float64), "b": torch.zeros(50, dtype=torch.float64)}
    other = {**tree, "b": tree["b"] + 1e-9}
    calls = [
        ("k1", "ann", 1),
        ("k2", "ann", 1),
        ("k1", "bob", 1),
        ("k1", "ann", 2),
        ("k1", "ann1", 1),
        ("k1", "ann", 11),
    ]
    drawn = [
        add_noise(what, 1.0, key, *parts)[name] for key, *parts in calls for what in (tree, other) for name in tree
    ]
    whole = torch.stack(drawn)
    close = torch.corrcoef(whole).fill_diagonal_(0).abs()
    assert float(close.max()) < 0.6  # 24 streams of 50 numbers: five deviations
    again = add_noise(tree, 1.0, "k1", "ann", 1)
    assert torch.equal(again["a"], whole[0])


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    key = load_or_create_key(tmp_path)
    assert load_or_create_key(tmp_path) == key
    assert len(key) == 64
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("short")
    with pytest.raises(RunError, match=r"privacy\.key: damaged"):
        load_or_create_key(tmp_path)
    assert load_or_create_key(Path(str(tmp_path.joinpath("other").mkdir() or tmp_path / "other"))) != key
