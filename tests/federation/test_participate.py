"""The loop that carries out the tasks of a process's clients."""

from __future__ import annotations

import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from comingle.federation.flower.client import CallQueue, FleetClient, Handle, participate
from comingle.federation.flower.client_app import User
from comingle.federation.flower.fleet_client import Server
from comingle.utils.errors import MessageError


def test_calls_of_other_threads_are_made_in_this_one() -> None:
    calls = CallQueue()

    def refuse() -> None:
        raise MessageError("no")

    with ThreadPoolExecutor() as threads:
        where = threads.submit(calls.call, threading.get_ident)
        refused = threads.submit(calls.call, refuse)
        for _ in range(2):
            calls.serve(5.0)
        assert where.result(5) == threading.get_ident()
        with pytest.raises(MessageError, match="no"):
            refused.result(5)


def test_the_first_request_of_a_server_is_shown_before_anything_is_loaded(tmp_path: Path) -> None:
    lines: list[str] = []

    def load() -> Handle:
        assert "127.0.0.1:9" in lines[-1]
        return lambda request, deadline: request

    client = FleetClient(
        User(name="ann", state=tmp_path), Server(address="127.0.0.1:9"), load, CallQueue(), lines.append
    )
    assert [client._answer(request, math.inf) for request in (b"1", b"2")] == [b"1", b"2"]
    assert len(lines) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_termination_that_a_destructor_has_swallowed_ends_the_loop() -> None:
    class Dies:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # the handler runs between two of these
                pass

    looked = []

    def until() -> bool:
        looked.append(1)
        if len(looked) == 1:
            Dies()
        return len(looked) > 50

    with pytest.raises(KeyboardInterrupt):
        participate([], CallQueue(), until)
    assert len(looked) < 5
