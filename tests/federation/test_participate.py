"""The loop that carries out the tasks of a process's clients."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("flwr")

from comingle.federation.flower.client import CallQueue, participate
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
