"""The month of ``month.py`` over real processes: a continuous server, and a client for each user that serves its model.

    python examples/living/clients.py
    python examples/living/clients.py --base smollm2-135m --texts posts.jsonl.xz

All processes run on this machine and talk over TLS, each client with a key of its own. Text arrives as new files in the
clients' folders. Each client serves its user's model (``comingle client --serve``), which is asked for short answers
all the time. The fourth user joins with ``comingle server --add-user``.

For the one who leaves, the operator stops the server, runs ``comingle leave --mode exact`` and starts the server again.
The others then train again without this user, in as many rounds as before, and go on with the last part. Their models
answer all the while. The leaver's client is refused, and ``comingle leave`` deletes its copies of text. At the end the
same table as that of ``month.py`` is printed.
"""

import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import yaml
from month import (
    PARTS,
    STARTING,
    Files,
    Scores,
    argument_parser,
    print_results,
    recipe_of,
    score,
    texts_by_user,
    train_references,
    users_by_part,
    write_parts,
)

import comingle
from comingle.federation.flower.processes import free_port

HOST = "127.0.0.1"
PROGRAM = (sys.executable, "-m", "comingle")
WAIT_SECONDS = 600
"""Longest wait for a run or a client."""
PAUSE_SECONDS = 0.5
"""Time between an answer and the next request to the same model."""
IDLE_SECONDS = 20
"""Time in which answers are timed after the last run, when nothing is trained."""


def file_name(user: str) -> str:
    """Return the name of a user's files, as ``comingle server --make-certificates`` writes them."""
    return quote(user, safe=" ")


class Answer(NamedTuple):
    """An answer of a served model, and when it was requested."""

    began: float
    """Time of the request, by a monotonic clock."""
    seconds: float
    """Time until the answer was complete."""
    text: str


class Requester(threading.Thread):
    """Requests the most probable short answer of a served model, one after another, until it is stopped."""

    def __init__(self, name: str, port: int) -> None:
        """Start the thread.

        Args:
            name: The user.
            port: Port at which the user's client serves its model.
        """
        super().__init__(daemon=True)
        self.url, self.user = f"http://{HOST}:{port}/v1/completions", name
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        """Failed requests since the first answer; before it, the client starts and waits for the server."""
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Request answers."""
        body = {"model": self.user, "prompt": "The first thing is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        while not self._stopped.wait(PAUSE_SECONDS):
            began = time.monotonic()
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    text = json.load(response)["choices"][0]["text"]
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                if self.answers:
                    self.failures.append(f"{type(error).__name__}: {error}")
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
            else:
                self.answers.append(Answer(began, time.monotonic() - began, text))

    def stop(self) -> None:
        """Wait for the answer in progress, and request no other."""
        self._stopped.set()
        self.join()


class Month:
    """The processes of a month, and the files that they read."""

    def __init__(self, folder: Path, recipe: dict, files: Files) -> None:
        """Write the server's file and the keys.

        Args:
            folder: Folder of all files.
            recipe: The recipe without data.
            files: Files by user and part.
        """
        self.folder, self.files, self.port, self._began = folder, files, free_port(), time.monotonic()
        self.runs = folder / "runs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.requesters: dict[str, Requester] = {}
        self.last_part = (math.inf, math.inf)
        """Times, by a monotonic clock, when the last part of the text arrived, and when its run had ended."""
        self._base = recipe["base"]
        self._plan, self._keys = folder / "federation.yaml", folder / "keys"
        when = {"users": len(files), "new_tokens": 200}  # when there is new text of all users
        starting = list(files)[:STARTING]
        plan = {**recipe, "participants": starting, "rounds": {"when": when}}
        self._plan.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
        self.command("--make-certificates", self._keys, "--host", HOST)

    def command(self, *options: object) -> None:
        """Run ``comingle server FILE`` with options that change files, and wait for its end."""
        subprocess.run([*PROGRAM, "server", str(self._plan), *map(str, options)], check=True, stdout=subprocess.DEVNULL)

    def set_rounds(self, rounds: int) -> None:
        """Change the number of rounds of the next runs in the server's file."""
        content = yaml.safe_load(self._plan.read_text(encoding="utf-8"))
        content["training"]["rounds"] = rounds
        draft = self.folder / "draft"  # so that the server reads a whole file
        draft.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        draft.replace(self._plan)

    def start(self, name: str, *arguments: object) -> None:
        """Start a process, whose lines are written to a file.

        Args:
            name: Name of the process.
            arguments: Arguments of ``comingle``.
        """
        command = [*PROGRAM, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log(name).open("a", encoding="utf-8") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def start_server(self) -> None:
        """Start the continuous server, or start it again."""
        options = [
            "--out",
            self.runs,
            "--continuous",
            "--host",
            HOST,
            "--port",
            self.port,
            "--certificates",
            self._keys,
        ]
        self.start("server", "server", self._plan, *options)

    def start_client(self, name: str) -> None:
        """Start the client of a user, and request answers of its model from now on."""
        own_file, port = self.folder / f"{file_name(name)}.yaml", free_port()
        settings = {
            "name": name,
            "data": {split: str(self.data_folder(name, split)) for split in ("train", "valid", "test")},
            "state": str(self.state_folder(name)),
            "server": f"{HOST}:{self.port}",
            "certificates": str(self._keys / "ca.pem"),
            "key": str(self._keys / "users" / f"{file_name(name)}.key"),
        }
        if Path(self._base).exists():  # clients open no path that a server names
            settings["base"] = str(Path(self._base).resolve())
        own_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        self.start(name, "client", own_file, "--serve", port)
        self.requesters[name] = Requester(name, port)

    def add_user(self, name: str) -> None:
        """Let a user join the running federation."""
        self.command("--add-user", name, "--certificates", self._keys)

    def let_leave(self, name: str) -> None:
        """Let a user leave exactly: its runs and its key are deleted, and the server starts again without it."""
        self.requesters[name].stop()
        server = self.processes["server"]
        server.terminate()
        server.wait(60)
        self.leave(self.runs, name, "--mode", "exact", "--certificates", self._keys)
        self.command("--remove-user", name)
        self.start_server()

    def leave(self, folder: Path, name: str, *options: object) -> None:
        """Run ``comingle leave``, and print its last lines."""
        command = [*PROGRAM, "leave", folder, "--user", name, *options, "--yes"]
        done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
        print(done.stdout.strip(), flush=True)

    def certificate(self) -> dict:
        """Return the server's certificate of the user who has left."""
        (certificate,) = json.loads((self.runs / "left.json").read_text(encoding="utf-8"))["left"]
        return certificate

    def add_text(self, name: str, part: int) -> None:
        """Add a part of a user's text to the folders that its client reads."""
        for split, path in self.files[name][part].items():
            arrived = self.data_folder(name, split) / f"part{part + 1}.txt"
            arrived.parent.mkdir(parents=True, exist_ok=True)
            draft = self.folder / "draft"  # so that the client reads a whole file
            draft.write_text(Path(path).read_text(encoding="utf-8"), encoding="utf-8")
            draft.replace(arrived)

    def wait_for_run(self, number: int, names: list[str]) -> None:
        """Wait until a run has ended.

        Args:
            number: Number of the run, from 1.
            names: Its users.
        """
        self.wait_until(lambda: self.has_ended(number), f"run {number}", ["server", *names])
        print(f"run {number}: {', '.join(names)} ({time.monotonic() - self._began:.0f} s)", flush=True)

    def has_ended(self, number: int) -> bool:
        """Return whether a run has ended and the clients have saved their models."""
        run = self.runs / f"{number:04d}"
        if not (run / "metrics.json").exists():
            return False
        return "ending" not in json.loads((run / "federation.json").read_text(encoding="utf-8"))

    def scores(self, number: int, names: list[str], parts: list[int]) -> Scores:
        """Return the scores of the models that clients have saved at the end of a run.

        Args:
            number: Number of the run, from 1.
            names: The users.
            parts: Numbers of the parts whose held-out text is read.
        """
        run = json.loads((self.runs / f"{number:04d}" / "federation.json").read_text(encoding="utf-8"))["run"]
        scores: Scores = {}
        for name in names:
            scores |= score(comingle.load(self.state_folder(name) / f"run-{run}" / "model"), self.files, parts)
        return scores

    def wait_until(self, has_happened: Callable[[], bool], what: str, needed: list[str]) -> None:
        """Wait, and end with the last lines of a process that has ended early.

        Args:
            has_happened: Whether the wait is over.
            what: What is awaited, for the error.
            needed: Processes without which it cannot happen.
        """
        until = time.monotonic() + WAIT_SECONDS
        while not has_happened():
            ended = [name for name in needed if self.processes[name].poll() is not None]
            if ended or time.monotonic() > until:
                logs = "\n".join(f"{name}: {self.log(name).read_text()[-2000:]}" for name in ended or needed)
                raise SystemExit(f"{what}: {'ended: ' + ', '.join(ended) if ended else 'too late'}\n{logs}")
            time.sleep(0.5)

    def wait_for_refusal(self, name: str) -> None:
        """Wait until the client of a user who has left has ended, print why, and delete its copies of text."""
        self.wait_until(lambda: self.processes[name].poll() is not None, f"refusal of {name}", ["server"])
        print(f"{name} left; its client ended: {self.log(name).read_text(encoding='utf-8').strip().splitlines()[-1]}")
        self.leave(self.state_folder(name), name)

    def end(self) -> None:
        """Stop the requests, then all processes."""
        for requester in self.requesters.values():
            requester.stop()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def log(self, name: str) -> Path:
        """Return the file with the lines of a process."""
        return self.folder / f"{file_name(name)}.log"

    def state_folder(self, name: str) -> Path:
        """Return the folder of the state of a user's client."""
        return self.folder / "clients" / file_name(name) / "state"

    def data_folder(self, name: str, split: str) -> Path:
        """Return the folder in which text of a split arrives."""
        return self.folder / "clients" / file_name(name) / split


def run_month(month: Month, present: list[list[str]], rounds: int) -> tuple[Scores, Scores]:
    """Run the month of all processes; return the scores of the last models, and those of each part when it was new.

    Args:
        month: The month, before its first process.
        present: Users of each part.
        rounds: Rounds for each part.
    """
    when_new: Scores = {}
    earlier: list[str] = []
    runs = 0  # that have ended
    for part, names in enumerate(present):
        newcomers = [name for name in names if name not in earlier]
        for name in earlier:
            if name not in names:
                month.set_rounds(part * rounds)  # as many as the deleted runs had
                month.let_leave(name)
                month.wait_for_run(1, names)
                month.wait_for_refusal(name)
                month.set_rounds(rounds)
                runs = 1
        for name in newcomers:
            month.add_text(name, part)
        arrived = time.monotonic()
        if part == 0:
            month.start_server()
        for name in newcomers:
            if part > 0:
                month.add_user(name)
            month.start_client(name)
        for name in earlier:
            if name in names:
                month.add_text(name, part)
        runs += 1
        month.wait_for_run(runs, names)
        month.last_part = arrived, time.monotonic()
        if part == PARTS - 1:
            time.sleep(IDLE_SECONDS)  # before the scores, which need the processor
        when_new |= month.scores(runs, names, [part])
        earlier = names
    return month.scores(runs, earlier, list(range(PARTS))), when_new


def print_answers(month: Month) -> int:
    """Print how many answers each user got and how long they took; return the number of failed requests."""
    for name, requester in month.requesters.items():
        seconds = sorted(answer.seconds for answer in requester.answers)
        print(
            f"{name}: {len(seconds)} answers, {len(requester.failures)} failed; "
            f"median {statistics.median(seconds):.2f} s, 95% within {percentile(seconds):.2f} s, "
            f"all within {seconds[-1]:.2f} s"
        )
        for failure in requester.failures[:3]:
            print(f"  {failure}")
        print_last_part(month, requester.answers)
    return sum(len(requester.failures) for requester in month.requesters.values())


def print_last_part(month: Month, answers: Sequence[Answer]) -> None:
    """Print how long a user's answers took while the last part was trained and afterwards, and when they changed."""
    arrived, ended = month.last_part
    before = [answer.text for answer in answers if answer.began < arrived]
    training = [answer for answer in answers if arrived <= answer.began < ended]
    idle = [answer for answer in answers if ended <= answer.began < ended + IDLE_SECONDS]
    if not (before and training and idle):  # the user has left
        return
    p95, idle_p95 = (percentile([answer.seconds for answer in some]) for some in (training, idle))
    others = [answer for answer in training + idle if answer.text != before[-1]]
    change = f"first other answer {others[0].began - arrived:.1f} s after the text" if others else "the same answer"
    print(
        f"  last part: 95% within {p95:.3f} s while it was trained, {idle_p95:.3f} s afterwards "
        f"(ratio {p95 / idle_p95:.2f}); {change}"
    )


def percentile(seconds: Sequence[float]) -> float:
    """Return the time within which 95% of some answers were complete."""
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def main() -> None:
    """Run the month, and train alone and at once; print the answers and the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--keep", type=Path, help="New folder for all files, which are deleted otherwise.")
    arguments = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as exit_stack:
        folder = arguments.keep or Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "texts").mkdir(parents=True)
        files = write_parts(texts_by_user(arguments), folder / "texts", arguments.documents)
        present, recipe = users_by_part(files), recipe_of(arguments)
        month = Month(folder, recipe, files)
        try:
            together, when_new = run_month(month, present, arguments.rounds)
        finally:
            month.end()
        certificate = month.certificate()
        print(f"certificate: {certificate['rounds_trained_again']} rounds, model {certificate['tensors_after']}")
        num_failed = print_answers(month)
        print(f"everyone was served throughout: {'no' if num_failed else 'yes'} ({time.monotonic() - began:.0f} s)")
        ways = {"together": together, **train_references(recipe, files, folder, present)}
        print(f"\nperplexity on held-out text, after {PARTS} parts ({time.monotonic() - began:.0f} s)")
        print_results(ways, when_new, present)
    if num_failed:
        raise SystemExit(f"{num_failed} requests failed")


if __name__ == "__main__":
    main()
