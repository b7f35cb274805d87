"""The real ClientApp, with a worker whose answers may be changed before they are sent."""

import sys
from pathlib import Path

from comingle.federation.flower.client_app import make_client_app
from comingle.federation.flower.worker import User, call

WORKER = Path(__file__).with_name("faulty_worker.py")


def ask(user: User, request: bytes, timeout: float) -> bytes:
    return call(user.state, [sys.executable, str(WORKER), *user.options()], request, timeout=timeout)


app = make_client_app(ask)
