"""A tiny real model, a tiny saved one, a cache that belongs to the test, and native code for two processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native_code import emulated, processor

from comingle.models.loading import is_hub_reachable, load_base
from comingle.models.random_bases import byte_tokenizer

__all__ = ["emulated", "processor"]


@pytest.fixture(scope="session")
def stories(shared_data: Path) -> Path:
    """stories260K, a Llama of 260,032 parameters that tells children's stories; skipped where there is none."""
    folder = shared_data / "models" / "stories260K"
    if not (folder / "config.json").is_file():
        pytest.skip(f"REAL DATA ABSENT: {folder} does not exist; set COMINGLE_TEST_DATA to the folder of real data")
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A random Llama as a folder: config.json, model.safetensors, tokenizer."""
    folder = tmp_path / "saved"
    load_base("random:llama", dtype="float32", device="cpu").model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's caches, or asks the network."""
    from huggingface_hub import constants

    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield tmp_path / "cache"
    is_hub_reachable.cache_clear()
