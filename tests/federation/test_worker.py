"""The long-lived worker of a user: started when it is needed, asked many times, ends with whom it works for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import current_process
from pathlib import Path

import psutil
import pytest

from comingle.federation.flower import worker
from comingle.federation.flower import worker as calling
from comingle.federation.flower.worker import ADDRESS, FOLDER, ProcessId, WorkerError, call, connect, read_worker
from comingle.utils.errors import MessageError, RunError

WORKER = Path(__file__).with_name("toy") / "toy_worker.py"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "ada"
    yield folder
    if (folder / FOLDER / ADDRESS).exists() and (worker := read_worker(folder)).is_alive():
        os.kill(worker.pid, signal.SIGKILL)


def ask(state: Path, request: bytes, *, timeout: float = 30, owner: ProcessId | None = None) -> bytes:
    command = [sys.executable, str(WORKER), "--name", "ada", "--state", str(state)]
    return call(state, command, request, timeout=timeout, owner=owner or ProcessId.of(os.getpid()))


def test_the_same_process_answers_again(state: Path) -> None:
    first = ask(state, b"who")
    began = time.monotonic()
    assert ask(state, b"who") == first
    assert time.monotonic() - began < 0.5


def test_many_bytes_go_there_and_back(state: Path) -> None:
    data = os.urandom(30_000_000)
    assert ask(state, b"echo " + data) == data


def test_a_refusal_is_its_line(state: Path) -> None:
    with pytest.raises(MessageError, match=r"^refused, as was wished$"):
        ask(state, b"refuse")


def test_settings_that_are_wrong_are_said_and_may_be_mended(state: Path) -> None:
    state.mkdir()
    (state / "broken").touch()
    with pytest.raises(MessageError, match=r"^ada: broken settings$"):
        ask(state, b"who")
    (state / "broken").unlink()
    time.sleep(1.5)
    assert ask(state, b"who").startswith(b"ada ")


def test_a_worker_that_dies_in_the_middle_is_said_and_the_next_message_starts_another(state: Path) -> None:
    before = ask(state, b"who")
    with pytest.raises(WorkerError, match=r"ada: the worker ended "):
        ask(state, b"die-once")
    after = ask(state, b"die-once")
    assert after.startswith(b"ada ")
    assert after != before


def test_a_worker_that_is_too_slow_is_waited_for_no_longer(state: Path) -> None:
    ask(state, b"who")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r" 0.5 s$"):
        ask(state, b"sleep 3", timeout=0.5)
    assert time.monotonic() - began < 1.5


@pytest.mark.slow
def test_a_worker_that_takes_long_says_that_it_is_alive_and_one_that_hangs_is_killed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_SILENT_SECONDS", 8.0)
    first = ask(state, b"sleep 12")
    worker = read_worker(state)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r" 8 s; it was killed"):
        ask(state, b"who", timeout=60)
    assert not worker.is_alive()
    assert ask(state, b"who") != first


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_its_work_is_killed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_SILENT_SECONDS", 8.0)
    ask(state, b"who")
    worker = read_worker(state)
    stop = threading.Timer(2.0, os.kill, (worker.pid, signal.SIGSTOP))
    stop.start()
    with pytest.raises(WorkerError, match=r" 8 s; it was killed"):
        ask(state, b"sleep 50", timeout=60)
    assert not worker.is_alive()


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_the_users_processes(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the SuperNode, which may be started again in the middle of a task."""
    client = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv("COMINGLE_PARENT", str(client.pid))
    command = [sys.executable, str(WORKER), "--name", "ada", "--state", str(state)]
    call(state, command, b"who", timeout=30)
    worker = read_worker(state)
    client.kill()
    client.wait()
    end = time.monotonic() + 30
    while worker.is_alive():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_a_worker_whose_client_is_gone_before_it_listens_ends_too(state: Path) -> None:
    """It is then a child of the first process of the machine, which lives for ever."""
    client = subprocess.Popen(["true"])
    client.wait()
    command = [sys.executable, str(WORKER), "--name", "ada", "--state", str(state)]
    worker = subprocess.Popen(command, env={**os.environ, "COMINGLE_PARENT": str(client.pid)})
    assert worker.wait(60) == 0


def test_only_the_user_may_read_where_it_listens_and_nobody_without_the_key_is_answered(state: Path) -> None:
    ask(state, b"who")
    path = state / FOLDER / ADDRESS
    assert path.stat().st_mode & 0o077 == 0
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"key": "00" * 32}))
    assert connect(state) is None
    path.write_text(json.dumps(said))
    assert ask(state, b"who")


def test_of_two_workers_in_one_folder_the_second_ends(state: Path) -> None:
    who = ask(state, b"who")
    command = [sys.executable, str(WORKER), "--name", "ada", "--state", str(state)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert "/worker: in use by process" in second.stderr
    assert second.stderr.count("\n") == 1
    assert ask(state, b"who") == who


@pytest.mark.slow
def test_it_ends_when_nobody_is_left_to_work_for(state: Path) -> None:
    supernode = subprocess.Popen(["sleep", "600"])
    process = int(ask(state, b"who", owner=ProcessId.of(supernode.pid)).split()[1])
    supernode.kill()
    supernode.wait()
    end = time.monotonic() + 20
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_process_of_a_message_imports_no_torch() -> None:
    pytest.importorskip("flwr")
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    code = f"import sys, comingle.federation.flower.client_app; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder whose path is too long for a socket."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.usefixtures("long_temporary_folder")
def test_no_port_is_opened_when_the_temporary_folder_has_a_long_path(state: Path) -> None:
    assert ask(state, b"echo hello") == b"hello"
    process = psutil.Process(read_worker(state).pid)
    assert process.net_connections("inet") == []
    address = json.loads((state / FOLDER / ADDRESS).read_text())["address"]
    assert isinstance(address, str)
    assert Path(address).is_socket()
    assert Path(address).parent.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("long_temporary_folder")
def test_a_worker_without_a_private_channel_says_so_and_opens_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SHORT", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(current_process(), "_config", {})
    with pytest.raises(RunError, match=r"^worker: .*missing .*TMPDIR"):
        worker._listen()
    monkeypatch.setattr(worker, "FAMILY", None)
    with pytest.raises(RunError, match=r"^worker: .*named pipes"):
        worker._listen()
