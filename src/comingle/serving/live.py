"""``comingle live``: one process that trains the users' models on new documents, and serves them all the while.

The folder has three parts::

    incoming/NAME.jsonl     documents that no run has trained on yet, one per line
    texts/NAME/0002.jsonl   the documents that the run 0002 trains on
    runs/0002, 0002.yaml    a run and its recipe; each run continues from the one before (``continue_from``)

A document is acknowledged when it is on disk. When enough documents have arrived, those of each user become its data
for the next run, in which only these users take part; the others keep their data and models. After the run the server
answers from the new models. A process that is killed repeats at most the round that it was in.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile

from comingle.config import Recipe, load_recipe
from comingle.config.files import read_text
from comingle.models.base import Base
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.runs.api import load, run
from comingle.runs.given import NOTHING
from comingle.runs.results import Run
from comingle.runs.session import build, check_and_set_up, prepare
from comingle.serving.access import UVICORN_OPTIONS, ApiError, Keys, Limits, read_keys, url_of
from comingle.serving.api import GracefulServer, Service, make_app
from comingle.serving.engine import Engine
from comingle.serving.models import answers_messages
from comingle.serving.schemas import model_not_found
from comingle.training.events import Event
from comingle.utils.errors import ComingleError, DataError, RecipeError
from comingle.utils.inputs import recorded_date
from comingle.utils.names import as_folder, name_problem
from comingle.utils.records import JsonObject, logger, write_bytes, write_json, write_text

KINDS = {"text": "text", "conversations": "messages"}
"""Kinds of data that can be trained live, and the key of a document's content."""

CHECK_SECONDS = 0.5
"""Time between two checks whether a run is due."""

MAX_NAME_BYTES = 200
"""Largest length of a user's name in file names."""

NICENESS = 10
"""Niceness of the threads that train; on a busy processor they get a tenth of the time of those that answer."""

MAX_FILE_BYTES = 50_000_000
"""Largest size of an uploaded file."""

RETRY_SECONDS = 60.0
"""Time after which a run that failed is resumed."""


@dataclass(frozen=True, kw_only=True)
class When:
    """Condition under which a run starts.

    Args:
        users: Number of users that must have enough new documents.
        new_tokens: Number of new tokens with which a user has enough.
        at_most_every: Least number of seconds between the starts of two runs.
    """

    users: int = 1
    new_tokens: int = 500
    at_most_every: float = 0.0


class DocumentStore:
    """The documents of all users on disk; safe to use from several threads."""

    def __init__(self, folder: Path, content_key: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Open the store; remove an incomplete last line that a killed process has left, which was not acknowledged.

        Args:
            folder: Folder of the live run.
            content_key: Key of a document's content, "text" or "messages".
            tokenizer: Counts the tokens of documents.
        """
        self._incoming, self._texts = folder / "incoming", folder / "texts"
        self.content_key, self._tokenizer, self._lock = content_key, tokenizer, threading.Lock()
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._texts.mkdir(exist_ok=True, mode=0o700)
        self.pending: dict[str, int] = {}
        """Number of tokens, by user, of the documents that no run has trained on yet."""
        for path in sorted(self._incoming.glob("*.jsonl")):
            complete, newline, _torn = path.read_bytes().rpartition(b"\n")
            write_bytes(path, complete + newline, private=True)
            documents = list(_documents(path))
            if documents:
                self.pending[documents[0]["user"]] = sum(self._count_tokens(document) for document in documents)

    def add(self, user: str, contents: Sequence[object]) -> tuple[list[str], int]:
        """Store documents of a user; when this returns, they are on disk.

        Args:
            user: Name of the user.
            contents: Text of each document, or its messages.

        Returns:
            The id of each document, and the number of their tokens.

        Raises:
            DataError: A document has the wrong form or no content.
        """
        documents: list[JsonObject] = []
        for content in contents:
            _check_content(content, self.content_key)
            received = {"id": secrets.token_hex(8), "user": user, "created": int(time.time())}
            documents.append({**received, self.content_key: content})
        num_tokens = sum(self._count_tokens(document) for document in documents)
        lines = "".join(f"{json.dumps(document, ensure_ascii=False)}\n" for document in documents)
        with self._lock, open(self._path(user), "ab", opener=_open_private) as file:
            size_before = file.tell()
            try:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:  # such as a full disk: later documents must not follow half a line
                os.truncate(self._path(user), size_before)
                raise
            self.pending[user] = self.pending.get(user, 0) + num_tokens
        return [document["id"] for document in documents], num_tokens

    def find(self, user: str, document_id: str) -> tuple[JsonObject, int] | None:
        """Return a document of a user, and the number of the run that trains on it; 0 if it still waits.

        Returns:
            None if there is no such document.
        """
        with self._lock:
            paths = [self._path(user), *sorted((self._texts / as_folder(user)).glob("*.jsonl"), reverse=True)]
            for path in paths:
                for document in _documents(path):
                    if document["id"] == document_id:
                        return document, 0 if path == self._path(user) else int(path.stem)
        return None

    def collect(self, users: Sequence[str], number: int) -> dict[str, Path]:
        """Move the new documents of users to the files that a run trains on; return the file of each user.

        If a process was killed while it moved them, some documents are in both files. Each id is written once.

        Args:
            users: Names of the users.
            number: Number of the run.
        """
        files: dict[str, Path] = {}
        with self._lock:
            for user in users:
                target = self._texts / as_folder(user) / f"{number:04d}.jsonl"
                target.parent.mkdir(exist_ok=True, mode=0o700)
                source = self._path(user)
                documents = {document["id"]: document for file in (target, source) for document in _documents(file)}
                lines = [json.dumps(document, ensure_ascii=False) for document in documents.values()]
                write_bytes(target, "\n".join([*lines, ""]).encode(), private=True)
                source.unlink(missing_ok=True)
                self.pending.pop(user, None)
                files[user] = target
        return files

    def recover(self, last_planned: int) -> None:
        """Return documents to those that wait, if a process was killed before the run for them was planned.

        Args:
            last_planned: Number of the last run that has a recipe.
        """
        for path in sorted(self._texts.glob("*/*.jsonl")):
            if int(path.stem) > last_planned:
                user = next(_documents(path))["user"]
                self.put_back({user: path})

    def put_back(self, files: Mapping[str, Path]) -> None:
        """Return the documents of a run that cannot start, so that they wait for further ones.

        Args:
            files: The file of each user, from :meth:`collect`.
        """
        with self._lock:
            for user, path in files.items():
                source = self._path(user)
                documents = {document["id"]: document for file in (path, source) for document in _documents(file)}
                lines = [json.dumps(document, ensure_ascii=False) for document in documents.values()]
                write_bytes(source, "\n".join([*lines, ""]).encode(), private=True)
                path.unlink()
                self.pending[user] = sum(self._count_tokens(document) for document in documents.values())

    def _path(self, user: str) -> Path:
        return self._incoming / f"{as_folder(user)}.jsonl"

    def _count_tokens(self, document: JsonObject) -> int:
        """Return the number of tokens of a document's text, or of its messages."""
        content = document[self.content_key]
        text = content if isinstance(content, str) else "\n".join(message["content"] for message in content)
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _documents(path: Path) -> Iterator[JsonObject]:
    """Yield the documents of a file; none if it does not exist."""
    if path.exists():
        for line in path.read_bytes().split(b"\n"):  # not `splitlines`: texts may contain other line separators
            if line:
                yield json.loads(line)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read if it is created now."""
    return os.open(path, flags, 0o600)


def _check_content(content: object, key: str) -> None:
    """Raise a :class:`DataError` if the content of a document is neither a text nor messages, as its kind requires.

    Args:
        content: The content.
        key: "text" or "messages".
    """
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{key}: got half a surrogate pair; allowed: valid Unicode") from None
    if key == "text":
        if not isinstance(content, str) or not content.strip():
            raise DataError("text: got no text; allowed: a text that is not empty")
        return
    are_messages = isinstance(content, list) and content != []
    for message in content if isinstance(content, list) else ():
        has_text = isinstance(message, dict) and all(isinstance(message.get(part), str) for part in ("role", "content"))
        are_messages = are_messages and has_text
    if not are_messages:
        raise DataError('messages: got no messages; allowed: a list of {"role": ROLE, "content": TEXT}')


class StoppedError(ComingleError):
    """The process is to end; the current run is resumed at the next start."""


class LiveTrainer:
    """Trains in a thread: starts a run whenever enough documents have arrived, and publishes its models."""

    def __init__(self, recipe: Recipe, folder: Path, when: When, say: Callable[[str], None]) -> None:
        """Open the folder, and load the models of its last finished run; untrained models if there is none.

        Args:
            recipe: The recipe, whose users have text to begin with.
            folder: Folder of the live run; created if it is new.
            when: Condition under which a run starts.
            say: Called with each line to show to the operator.

        Raises:
            ComingleError: The recipe, the base or the data cannot be used.
        """
        _check_live(recipe)
        self.folder, self.when, self.say = folder, when, say
        self.publish: Callable[[Mapping[str, PersonalModel]], None] = lambda models: None
        """Called with the models of all users after each run."""
        self.recipe = recipe.with_changes({"data.seed": recipe.data_seed, "checkpoints.every": 1})
        self._runs = folder / "runs"
        self._runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stopping = threading.Event()
        self._last_start = -math.inf  # on the monotonic clock
        self._too_little: dict[str, int] = {}  # tokens that did not suffice for a run, by user
        self.state: JsonObject = {"state": "waiting", "run": None, "round": 0}
        """State of the trainer, for the API."""
        self._base: Base | None = None
        self.models = self._load_models()
        assert self._base is not None
        assert self._base.tokenizer is not None
        self.store = DocumentStore(folder, KINDS[recipe.data.kind], self._base.tokenizer)
        self.store.recover(self._last_planned())
        self._thread = threading.Thread(target=self._train_forever, name="comingle-live", daemon=True)

    @property
    def base(self) -> Base:
        """The base of all models."""
        assert self._base is not None
        return self._base

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def is_served(self, number: int) -> bool:
        """Return whether a run has ended and its models answer."""
        return number <= self._served

    # ------------------------------------------------------------ runs

    def _load_models(self) -> dict[str, PersonalModel]:
        """Return the models of the last finished run, or untrained models; set ``_base`` and ``_served`` to match.

        ``_served`` is the number of that run, 0 for untrained models. In a new folder, write the recipe of the first
        run, which :meth:`_train_forever` then trains.
        """
        last = self._last_planned()
        for number in range(last, 0, -1):
            if (self._runs / f"{number:04d}" / "metrics.json").exists():
                finished = load(self._runs / f"{number:04d}")
                models = _models_of(finished)
                self._base, self._served = next(iter(models.values())).model.base, number
                return models
        self._served = 0
        recipe = self.recipe
        if not last:
            recipe = recipe.with_changes({"data.replay": 0.0})  # there is nothing to replay yet
            write_text(self._runs / "0001.yaml", recipe.as_yaml())
        method = check_and_set_up(recipe)
        run_data = prepare(recipe, method=method)
        self._base = run_data.base
        federation = build(recipe, run_data, method=method)
        return _models_of(Run(folder=None, recipe=recipe, metrics={}, federation=federation))

    def _last_planned(self) -> int:
        """Return the number of the last run that has a recipe; 0 if there is none."""
        return max((int(path.stem) for path in self._runs.glob("*.yaml")), default=0)

    def _paths(self, number: int) -> JsonObject:
        """Return the data source of each user in a run; empty for the number 0."""
        if number == 0:
            return {}
        content = load_recipe(self._runs / f"{number:04d}.yaml").data.model_dump(mode="json", exclude_unset=True)
        return dict(content["users"])

    def _train_forever(self) -> None:
        """Run what is planned, and plan a run whenever one is due, until the process ends."""
        # Threads of the operators that this thread calls inherit its priority, so answers come first.
        with suppress(AttributeError, OSError):  # not on Windows
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stopping.is_set():
            number = self._last_planned()
            try:
                if number > self._served:
                    self._train(number)
                elif not self._plan(number + 1):
                    self._stopping.wait(CHECK_SECONDS)
            except StoppedError:
                return
            except ComingleError as error:  # such as a full disk; the models so far answer
                self.say(f"run {number:04d}: {error}; trying again in {RETRY_SECONDS:.0f} s")
                self.state = {"state": "failed", "run": f"{number:04d}", "round": 0}
                self._stopping.wait(RETRY_SECONDS)

    def _plan(self, number: int) -> bool:
        """Write the recipe of the next run if one is due, and return whether it is.

        Args:
            number: Number of the run.
        """
        if time.monotonic() - self._last_start < self.when.at_most_every:
            return False
        ready = []
        for user, tokens in dict(self.store.pending).items():
            if tokens >= self.when.new_tokens and tokens > self._too_little.get(user, 0):
                ready.append(user)
        if len(ready) < self.when.users:
            return False
        files = self.store.collect(ready, number)
        changes: dict[str, Any] = {
            "data.users": {**self._paths(number - 1), **{user: {"path": str(path)} for user, path in files.items()}},
            "continue_from.run": str(self._runs / f"{number - 1:04d}"),
            "seed": self.recipe.seed + number,
        }
        if set(ready) != set(changes["data.users"]):  # the others keep their models
            changes["training.participation"] = [ready] * self.recipe.training.rounds
        recipe = self.recipe.with_changes(changes)
        try:
            method = check_and_set_up(recipe)
            build(recipe, prepare(recipe, base=self._base, method=method), method=method)  # checks the splits
        except ComingleError as error:
            if not isinstance(error, DataError):
                self.store.put_back(files)
                raise
            # Too little text for a split, for example.
            self.say(f"run {number:04d}: waits for more text ({error})")
            self.store.put_back(files)
            named = [user for user in files if user in str(error)] or list(files)  # the others are tried again without
            self._too_little.update({user: self.store.pending[user] for user in named})
            return False
        for user in files:
            self._too_little.pop(user, None)
        write_text(self._runs / f"{number:04d}.yaml", recipe.as_yaml())
        return True

    def _train(self, number: int) -> None:
        """Train or resume a planned run, and publish its models.

        Args:
            number: Number of the run.

        Raises:
            StoppedError: The process is to end.
        """
        self._last_start = time.monotonic()
        folder = self._runs / f"{number:04d}"
        recipe, resumes = load_recipe(folder.with_suffix(".yaml")), folder.exists()
        method = check_and_set_up(recipe)
        given = replace(NOTHING, date=recorded_date(folder)) if resumes else NOTHING
        run_data = prepare(recipe, base=self._base, given=given, method=method)
        self.state = {"state": "training", "run": f"{number:04d}", "round": 0}
        self.say(f"run {number:04d}: {'resumed' if resumes else 'started'}")
        finished = run(recipe, out=folder, run_data=run_data, resume=resumes, observers=[self._observe])
        self.models = _models_of(finished)
        self.publish(self.models)
        self._served = number
        self.state = {"state": "waiting", "run": f"{number:04d}", "round": finished.metrics["rounds"]}
        measure = finished.metrics["measure"]
        mean = finished.metrics[f"mean_test_{measure}"]
        self.say(f"run {number:04d}: mean test {measure} {mean:.4g}; its models answer from now on")

    def _observe(self, event: Event) -> None:
        """Note the round, and end the run if the process is to end.

        Raises:
            StoppedError: The process is to end.
        """
        if event["event"] == "round":
            self.state["round"] = event["round"]
        if self._stopping.is_set():
            raise StoppedError("stopped; the same command continues")


def _models_of(finished: Run) -> dict[str, PersonalModel]:
    """Return the personal model of each user of a run."""
    return {name: cast(PersonalModel, finished.user(name)) for name in finished.users}


def _check_live(recipe: Recipe) -> None:
    """Check that a recipe can be trained live.

    Raises:
        RecipeError: Its users do not have text or conversations in files of their own, a setting has a value for each
            user, or the recipe has privacy or continues a run.
    """
    if recipe.data.kind not in KINDS:
        raise RecipeError(f"data.kind: got {recipe.data.kind}; allowed with comingle live: {', '.join(KINDS)}")
    if not recipe.data.names:
        raise RecipeError("data.users: got none; allowed with comingle live: each user's text to begin with")
    if problem := name_problem(recipe.data.names):
        raise RecipeError(f"data.users: {problem}")
    by_user = list(recipe.values_of_users())
    if by_user:
        raise RecipeError(f"{by_user[0]}: got a value for each user; allowed with comingle live: one for all")
    if recipe.privacy is not None and recipe.privacy.mechanism != "none":
        raise RecipeError(f"privacy.mechanism: got {recipe.privacy.mechanism}; allowed with comingle live: none")
    if recipe.continue_from is not None:
        raise RecipeError("continue_from: got a run; allowed with comingle live: null")


# ---------------------------------------------------------------- over HTTP


class NewDocuments(BaseModel):
    """Body of a request that adds documents: one ``text`` or ``messages``, or several ``documents`` of this form."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None

    def contents(self, key: str) -> list[object]:
        """Return the content of each document.

        Args:
            key: "text" or "messages", the form that the recipe's kind of data has.

        Raises:
            DataError: There is no content, or it has another form.
        """
        given = self.documents if self.documents is not None else [self.model_dump(exclude_none=True)]
        if not given or not all(set(document) == {key} for document in given):
            raise DataError(f"got another form; allowed: {key}, or documents with {key} each")
        return [document[key] for document in given]


class FineTuningJob(BaseModel):
    """Body of a request for a fine-tuning job, of which other keys are ignored."""

    model: str
    training_file: str


class WatchedKeys(Keys):
    """Keys from a file that an operator may change while the server runs, to add or remove users."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            DataError: It cannot be used.
        """
        self._path, self._changed_at = path, 0
        super().__init__([], {})
        self._read()

    def users_of(self, key: str) -> tuple[str, ...]:
        """Return the users whose models a key opens, by the file as it is now."""
        try:
            self._read()
        except (
            ComingleError,
            OSError,
            UnicodeError,
        ) as error:  # the operator is editing the file: the last keys remain valid
            logger.warning("%s", error)
        return super().users_of(key)

    def _read(self) -> None:
        """Replace names and keys by those in the file if it has changed since it was read.

        Raises:
            DataError: The file cannot be used; names and keys stay as they were.
        """
        if not self._path.exists():  # all access is withdrawn
            self._changed_at = 0
            super().__init__([], {})
            return
        changed_at = self._path.stat().st_mtime_ns
        if changed_at == self._changed_at:
            return
        text = self._path.read_text(encoding="utf-8")
        if not text.strip():  # all access is withdrawn
            self._changed_at = changed_at
            super().__init__([], {})
            return
        content = read_text(text, str(self._path))
        names = [str(name) for name in content] if isinstance(content, Mapping) else []
        if problem := name_problem(names):
            raise DataError(f"--keys {self._path}: {problem}")
        super().__init__(names, read_keys(self._path, names))
        self._changed_at = changed_at


class LiveApi:
    """Handlers of requests that bring documents, added to the API of ``comingle serve``."""

    def __init__(self, trainer: LiveTrainer, service: Service, files: Path) -> None:
        """Create the handlers.

        Args:
            trainer: Trains on the documents.
            service: Knows who may ask.
            files: Folder of uploaded files.
        """
        self.trainer, self.service, self._files = trainer, service, files
        files.mkdir(exist_ok=True, mode=0o700)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.post("/v1/users/{name}/documents")(self.add_documents)
        app.get("/v1/live")(self.state)
        app.post("/v1/files")(self.upload)
        app.post("/v1/fine_tuning/jobs")(self.create_job)
        app.get("/v1/fine_tuning/jobs/{job_id}")(self.job)

    def _check_user(self, request: Request, name: str) -> None:
        """Refuse a request for a user that its key does not open; without keys any valid name may be new.

        Raises:
            ApiError: The request is refused.
        """
        keys = self.service.keys
        if keys.required and name not in self.service.accessible_users(request):
            raise model_not_found(name)
        if problem := name_problem([name]):
            raise ApiError(400, f"user: {problem}")
        if len(as_folder(name).encode()) > MAX_NAME_BYTES:
            raise ApiError(400, f"user: got a name of {len(name)} characters; allowed: up to {MAX_NAME_BYTES} bytes")

    async def add_documents(self, request: Request, name: str) -> JsonObject:
        """Store documents of a user; the answer says that they are on disk."""
        self._check_user(request, name)
        body = await self.service.read_body(request, NewDocuments)
        ids, num_tokens = await self._add(name, partial(body.contents, self._key))
        pending = self.trainer.store.pending.get(name, 0)
        return {"object": "list", "ids": ids, "tokens": num_tokens, "waiting_tokens": pending}

    async def state(self, request: Request) -> JsonObject:
        """Return what the trainer does, and the waiting tokens of the users that the request's key opens."""
        names = self.service.accessible_users(request)
        pending = self.trainer.store.pending
        waiting = {name: pending.get(name, 0) for name in (names if self.service.keys.required else pending)}
        return {**self.trainer.state, "waiting_tokens": waiting}

    async def upload(self, request: Request) -> JsonObject:
        """Store a JSONL file for a fine-tuning job, as OpenAI's API does."""
        # The users whose jobs may read the file; without keys any user's job may.
        owners = self.service.accessible_users(request) if self.service.keys.required else ()
        async with request.form(max_files=1) as form:
            file, purpose = form.get("file"), form.get("purpose") or "fine-tune"
            if isinstance(file, UploadFile) and (file.size or 0) > MAX_FILE_BYTES:
                raise ApiError(400, f"file too large; allowed: {MAX_FILE_BYTES:,} bytes", param="file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "got no file; allowed: multipart/form-data with file and purpose", param="file")
            content = await file.read()
        file_id = f"file-{secrets.token_hex(12)}"
        write_json(self._files / f"{file_id}.json", {"owners": owners, "content": content.decode("utf-8", "replace")})
        return {
            "id": file_id,
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": file.filename,
            "purpose": purpose,
            "status": "processed",
        }

    async def create_job(self, request: Request) -> JsonObject:
        """Add the documents of an uploaded file to those of a user, the ``model`` of the job."""
        body = await self.service.read_body(request, FineTuningJob)
        self._check_user(request, body.model)
        path = self._files / f"{body.training_file}.json"
        is_id = body.training_file.removeprefix("file-").isalnum() and len(body.training_file) < 40
        stored = json.loads(path.read_text(encoding="utf-8")) if is_id and path.exists() else None
        if stored is None or (self.service.keys.required and body.model not in stored["owners"]):
            raise ApiError(404, f"no file {body.training_file!r:.60}", param="training_file")

        def contents() -> list[object]:
            found = []
            for number, line in enumerate(stored["content"].split("\n"), start=1):
                if not line.strip():
                    continue
                try:
                    found.append(json.loads(line)[self._key])
                except (ValueError, KeyError, TypeError):
                    raise DataError(f"line {number}: allowed: JSON with {self._key}") from None
            return found

        try:
            claimed = path.rename(path.with_suffix(".used"))  # of two jobs at once only one gets the file
        except FileNotFoundError:
            raise ApiError(404, f"no file {body.training_file!r:.60}", param="training_file") from None
        try:
            ids, _num_tokens = await self._add(body.model, contents)
        except ApiError:
            claimed.rename(path)
            raise
        claimed.unlink()
        return self._describe_job(body.model, ids[0])

    async def job(self, request: Request, job_id: str) -> JsonObject:
        """Return the state of a fine-tuning job: "queued", "running" or "succeeded"."""
        user, _, document_id = job_id.removeprefix("ftjob-").rpartition("-")
        self._check_user(request, user)
        if await asyncio.to_thread(self.trainer.store.find, user, document_id) is None:
            raise ApiError(404, f"no job {job_id!r:.60}")
        return self._describe_job(user, document_id)

    def _describe_job(self, user: str, document_id: str) -> JsonObject:
        """Return a job in the form of OpenAI's API. Its id has the user and the first document of the file."""
        found = self.trainer.store.find(user, document_id)
        assert found is not None
        document, run_number = found
        status = "queued"
        if run_number:
            status = "succeeded" if self.trainer.is_served(run_number) else "running"
        return {
            "id": f"ftjob-{user}-{document_id}",
            "object": "fine_tuning.job",
            "model": user,
            "fine_tuned_model": user if status == "succeeded" else None,
            "created_at": document["created"],
            "status": status,
        }

    @property
    def _key(self) -> str:
        """Key of a document's content."""
        return self.trainer.store.content_key

    async def _add(self, user: str, contents: Callable[[], list[object]]) -> tuple[list[str], int]:
        """Store documents in a thread, since the disk may be slow.

        Args:
            user: Name of the user.
            contents: Returns the contents of the documents.

        Raises:
            ApiError: A document has the wrong form, or there is none.
        """

        def add() -> tuple[list[str], int]:
            found = contents()
            if not found:
                raise DataError("got no documents; allowed: at least one")
            return self.trainer.store.add(user, found)

        try:
            return await asyncio.to_thread(add)
        except DataError as error:
            raise ApiError(400, str(error)) from None


def serve_live(
    trainer: LiveTrainer,
    sock: socket.socket,
    *,
    keys: Path | None,
    limits: Limits,
    ready: Callable[[str], None],
) -> None:
    """Train and answer requests until the process receives a signal to stop.

    Args:
        trainer: The trainer, which is started and stopped here.
        sock: The socket to listen on.
        keys: File with a key for each user, which is read again when it changes; None if requests need no key.
        limits: Limits on requests.
        ready: Called once with the server's URL.
    """
    engine = Engine(trainer.models, rows=limits.rows)
    access = Keys(engine.models, keys=None) if keys is None else WatchedKeys(keys)
    app = make_app(engine, access, limits, answers=answers_messages(trainer.recipe, trainer.base))
    service: Service = app.state.service
    LiveApi(trainer, service, trainer.folder / "files").add_to(app)

    def publish(models: Mapping[str, PersonalModel]) -> None:
        service.replace_engine(Engine(models, rows=limits.rows))

    trainer.publish = publish
    trainer.start()
    server = GracefulServer(uvicorn.Config(app, **UVICORN_OPTIONS), service)
    ready(url_of(sock))
    try:
        server.run(sockets=[sock])
    finally:
        trainer.stop()
