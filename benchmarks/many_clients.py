"""Memory and time of a federation of many client processes on one machine; prints one JSON line.

    python benchmarks/many_clients.py --base BASE --clients 100 --killed 10

Half of the clients are drawn for each round. Once all have joined, some clients are killed with SIGKILL in the first
round and started again. Memory is PSS: shared pages are divided among the processes that share them.

A server and all clients run as typed commands. With ``--fork`` each client is forked from a process that has imported
PyTorch and comingle, as a machine with many users would start them; such clients share the pages of these imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import yaml

from comingle.federation.flower.processes import free_port
from device import Monitor, _pss, _text, _tree

CHARACTERS = 6_000
MIN_FREE_BYTES = 2 << 30
"""The benchmark gives up when the machine has less memory than this."""
LIMIT_SECONDS = 3000.0


def main() -> None:
    """Run the federation and print its figures."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        federation = Federation(Path(scratch), asked)
        stack.callback(federation.stop)
        figures = federation.run()
    print(json.dumps({"benchmark": "many_clients", "clients": asked.clients, **figures}), flush=True)


class Federation:
    """Processes of a server and its clients, in a temporary folder."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        """Write the server's file and the clients' files."""
        self.folder, self.asked, self.port = folder, asked, free_port()
        self.names = [f"user{number:03d}" for number in range(asked.clients)]
        self.clients: dict[str, subprocess.Popen[bytes] | _ForkedCommand] = {}
        self.server: subprocess.Popen[bytes] | None = None
        text = "\n".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        for number, name in enumerate(self.names):
            (folder / f"{name}.txt").write_text(text[number * CHARACTERS : (number + 1) * CHARACTERS])
            own: dict[str, Any] = {"name": name, "data": str(folder / f"{name}.txt"), "state": str(folder / name)}
            own |= {"server": f"127.0.0.1:{self.port}", "base": asked.base, "max_threads": 1}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
        plan = {
            "participants": self.names,
            "network": {"min_participants": asked.clients, "join_timeout": 1200, "round_timeout": 1200},
            "base": asked.base,
            "method": "comigs-1g1s",
            "training": {
                "rounds": 3,
                "local_steps": asked.steps,
                "batch_size": 2,
                "context": 64,
                "participation": 0.5,
            },
            "evaluation": {"every": 3, "first": False},
        }
        (folder / "federation.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))

    def run(self) -> dict[str, Any]:
        """Run the federation to its end, and return its figures."""
        began = time.monotonic()
        arguments = ["server", self.folder / "federation.yaml", "--out", self.folder / "run", "--port", self.port]
        self.server = self._start("server", arguments)
        with Monitor(self.server.pid) as server_monitor:
            for name in self.names:
                self.start_client(name)
            self._wait(lambda: _text(self.folder, "server").count("has joined") >= self.asked.clients)
            joined = time.monotonic()
            idle_clients = {name: _pss(psutil.Process(process.pid)) for name, process in self.clients.items()}
            server_processes = len(_tree(self.server.pid))
            for name in self.names[: self.asked.killed]:
                self.clients[name].kill()
                self.clients[name].wait()
            for name in self.names[: self.asked.killed]:
                self.start_client(name)
            self._wait(lambda: self.server is not None and self.server.poll() is not None)
            ended = time.monotonic()
            server_peak = server_monitor.reset_peak()
        if self.server.returncode:
            raise SystemExit(f"many_clients: the server failed\n{_text(self.folder, 'server')}")
        events = [json.loads(line) for line in (self.folder / "run" / "events.jsonl").read_text().splitlines()]
        rounds = [event for event in events if event["event"] == "round"]
        return {
            "killed_and_restarted": self.asked.killed,
            "join_seconds": round(joined - began, 1),
            "rounds_seconds": round(ended - joined, 1),
            "rounds": len(rounds),
            "client_mib_mean": round(sum(idle_clients.values()) / len(idle_clients) / 2**20),
            "all_clients_mib": round(sum(idle_clients.values()) / 2**20),
            "server_processes": server_processes,
            "server_peak_mib": server_peak,
        }

    def start_client(self, name: str) -> None:
        """Start a client; what it prints is added to its log."""
        if psutil.virtual_memory().available < MIN_FREE_BYTES:
            raise SystemExit(f"many_clients: the machine has no memory for client {len(self.clients) + 1}")
        arguments = ["client", self.folder / f"{name}.yaml"]
        if self.asked.fork:
            self.clients[name] = _ForkedCommand(arguments, self.folder / f"{name}.log")
        else:
            self.clients[name] = self._start(name, arguments)
        time.sleep(self.asked.pause)

    def stop(self) -> None:
        """End all processes."""
        for process in [*self.clients.values(), *([self.server] if self.server else [])]:
            process.terminate()
        for process in self.clients.values():
            process.wait(60)

    def _start(self, name: str, arguments: list[object]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            line = [sys.executable, "-m", "comingle", *map(str, arguments)]
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait(self, happened: Any) -> None:
        """Wait until something has happened; give up if a client or the server has failed."""
        until = time.monotonic() + LIMIT_SECONDS
        while not happened():
            failed = [name for name, process in self.clients.items() if process.poll() not in (None, 0)]
            if failed or time.monotonic() > until:
                logs = "\n".join(_text(self.folder, name)[-2000:] for name in [*failed[:2], "server"])
                raise SystemExit(f"many_clients: {', '.join(failed) or 'took too long'}\n{logs}")
            time.sleep(0.5)


class _ForkedCommand:
    """A ``comingle`` command in a process that Python's fork server has forked, used like a ``Popen``."""

    def __init__(self, arguments: list[object], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["comingle.cli", "comingle.federation.client"])
        self._process = context.Process(target=_run_command, args=([*map(str, arguments)], log))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the process."""
        self._process.join(timeout)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode


def _run_command(arguments: list[str], log: Path) -> None:
    """Run a ``comingle`` command in this process; what it prints is added to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["comingle", *arguments]
    runpy.run_module("comingle", run_name="__main__")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--killed", type=int, default=10)
    parser.add_argument("--fork", action="store_true", help="Fork the clients from one process.")
    parser.add_argument("--steps", type=int, default=2, help="Local steps in a round.")
    parser.add_argument("--pause", type=float, default=0.5, help="Seconds between the starts of two clients.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
