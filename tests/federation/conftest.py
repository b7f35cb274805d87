"""The tests of federations run the command line within their process, too; several of them share one base."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import comingle as comingle
from tests.federation.tiny import one_base

from comingle.federation import server_session


@pytest.fixture(autouse=True, scope="session")
def apps_of_tests() -> Iterator[None]:
    """Processes of federations do not import from the current folder; tests have apps of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def shared_base() -> Iterator[None]:
    """All users of a module's tests have the same base in memory."""
    with one_base():
        yield


@pytest.fixture
def asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is asked again at once, and not after seconds."""
    monkeypatch.setattr(server_session, "RETRY_SECONDS", 0.02)
