"""Models on the Hugging Face hub, as local folders: the hub's own cache first, then a download, never a long wait."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from comingle.models.base import logger
from comingle.models.folders import is_complete, one_line
from comingle.utils.errors import BaseModelError

# Weights as safetensors, configuration, tokenizer; no pickles, no other frameworks' copies in subfolders.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]
_PROBE_SECONDS = 3.0


def hub_folder(repository: str) -> Path:
    """The folder that holds the hub's `repository`, from the hub's cache or downloaded into it.

    Raises:
        BaseModelError: not in the cache and out of reach (known within seconds), or not on the hub.
    """
    from huggingface_hub import constants

    if (cached := cached_folder(repository)) is not None:
        return cached
    if is_offline():
        raise BaseModelError(f"hub model {repository!r}: not in the hub cache, and HF_HUB_OFFLINE is set.")
    if not hub_answers(constants.ENDPOINT):
        raise BaseModelError(
            f"hub model {repository!r}: not in the hub cache, and the hub ({constants.ENDPOINT}) is out of reach."
        )
    return _download(repository)


def cached_folder(repository: str) -> Path | None:
    """Return a hub model's folder in the hub's cache, or None where it is not there or not complete."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else None
    return folder if folder is not None and is_complete(folder) else None


def is_offline() -> bool:
    """Return whether the environment forbids the hub's client to use the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


@cache
def hub_answers(endpoint: str) -> bool:
    """Whether `endpoint` answers at all within seconds; asked once per process.

    The hub's own client would retry for half a minute. The thread is for name lookups, which heed no timeout.
    """
    answers: list[bool] = []
    probe = threading.Thread(target=lambda: answers.append(_answers(endpoint)), daemon=True)
    probe.start()
    probe.join(_PROBE_SECONDS)
    return any(answers)


def _answers(endpoint: str) -> bool:
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "comingle"})
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code < 500
    except (OSError, http.client.HTTPException, ValueError) as error:
        # A certificate that Python does not know is still an answer; the hub's client brings its own certificates.
        return isinstance(getattr(error, "reason", error), ssl.SSLError)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logger.info("downloading %s from the hub", repository)
    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the client lets through its HTTP library's errors, which change between versions
        raise BaseModelError(
            f"hub model {repository!r}: {type(error).__name__} while downloading: {one_line(error)}"
        ) from error
