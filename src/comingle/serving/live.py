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
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile

from comingle.config import Recipe, load_recipe
from comingle.data.conversations.messages import Columns, messages_of
from comingle.data.conversations.section import ConversationsSection
from comingle.models.base import Base
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.runs.api import load, recipe_for_one_user, run
from comingle.runs.continuation import check_endless, users_without_budget
from comingle.runs.given import NOTHING
from comingle.runs.results import Run
from comingle.runs.session import build, check_and_set_up, prepare
from comingle.serving.access import UVICORN_OPTIONS, ApiError, Keys, Limits, WatchedKeys, prefer_answers, url_of
from comingle.serving.api import GracefulServer, Service, make_app
from comingle.serving.engine import Engine
from comingle.serving.models import answers_messages, enable_native_passes
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

    def add(self, user: str, contents: Sequence[object], *, file_id: str | None = None) -> tuple[list[str], int]:
        """Store documents of a user; when this returns, they are on disk.

        Args:
            user: Name of the user.
            contents: Text of each document, or its messages.
            file_id: Id of the uploaded file that they come from; None if they come from none.

        Returns:
            The id of each document, and the number of their tokens.

        Raises:
            DataError: A document has the wrong form or no content.
        """
        documents: list[JsonObject] = []
        for content in contents:
            _check_content(content, self.content_key)
            received = {"id": secrets.token_hex(8), "user": user, "created": int(time.time())}
            if file_id is not None:
                received["file"] = file_id
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
        for document, run_number in reversed(self.documents(user)):
            if document["id"] == document_id:
                return document, run_number
        return None

    def documents(self, user: str) -> list[tuple[JsonObject, int]]:
        """Return the documents of a user, the oldest first, each with the number of its run; 0 if it still waits."""
        with self._lock:
            return [
                (document, 0 if path == self._path(user) else int(path.stem))
                for path in self._paths(user)
                for document in _documents(path)
            ]

    def delete(self, user: str, is_meant: Callable[[JsonObject], bool]) -> list[tuple[str, int]]:
        """Delete documents of a user; when this returns, they are not on disk.

        Args:
            user: Name of the user.
            is_meant: Returns whether a document is to be deleted.

        Returns:
            The id of each deleted document, and the number of the run that trains on it; 0 if it still waited.
        """
        deleted: list[tuple[str, int]] = []
        with self._lock:
            for path in self._paths(user):
                documents = list(_documents(path))
                kept = [document for document in documents if not is_meant(document)]
                if len(kept) == len(documents):
                    continue
                waits = path == self._path(user)
                deleted += [(each["id"], 0 if waits else int(path.stem)) for each in documents if is_meant(each)]
                _write_documents(path, kept)
                if waits:
                    self.pending[user] = sum(map(self._count_tokens, kept))
                    if not kept:
                        del self.pending[user]
        return deleted

    def users(self) -> list[str]:
        """Return the users who have documents, in alphabetical order."""
        with self._lock:
            paths = [*self._incoming.glob("*.jsonl"), *self._texts.glob("*/*.jsonl")]
            return sorted({document["user"] for path in paths for document in islice(_documents(path), 1)})

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
                _write_documents(target, documents.values())
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
                _write_documents(source, documents.values())
                path.unlink(missing_ok=True)
                self.pending[user] = sum(self._count_tokens(document) for document in documents.values())

    def _path(self, user: str) -> Path:
        return self._incoming / f"{as_folder(user)}.jsonl"

    def _paths(self, user: str) -> list[Path]:
        """Return the files of a user, the oldest first; the last one, with the documents that wait, may not exist."""
        return [*self.trained_files(user), self._path(user)]

    def trained_files(self, user: str) -> list[Path]:
        """Return the files of a user that runs train on, the oldest first."""
        return sorted((self._texts / as_folder(user)).glob("*.jsonl"))

    def _count_tokens(self, document: JsonObject) -> int:
        """Return the number of tokens of a document's text, or of its messages."""
        text = document[self.content_key]
        if self.content_key == "messages":
            try:
                text = "\n".join(message["content"] for message in messages_of(document, Columns()))
            except ValueError:  # received by an earlier version, which did not check it
                return 0
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _documents(path: Path) -> Iterator[JsonObject]:
    """Yield the documents of a file; none if it does not exist."""
    if path.exists():
        for line in path.read_bytes().split(b"\n"):  # not `splitlines`: texts may contain other line separators
            if line:
                yield json.loads(line)


def _write_documents(path: Path, documents: Iterable[JsonObject]) -> None:
    """Replace the documents of a file; without any there is no file."""
    lines = [json.dumps(document, ensure_ascii=False) for document in documents]
    if lines:
        write_bytes(path, "\n".join([*lines, ""]).encode(), private=True)
    else:
        path.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read if it is created now."""
    return os.open(path, flags, 0o600)


def _check_content(content: object, key: str) -> None:
    """Raise a :class:`DataError` if the content of a document is not a text or a conversation, as its kind requires.

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
    try:
        messages_of({key: content}, Columns())  # as a run reads it, which would refuse all documents of the user
    except ValueError as error:
        raise DataError(f"messages: {error}") from None


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
        self._shown_refused: frozenset[str] = frozenset()
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
                self.state = {**self.state, "run": f"{number:04d}", "round": finished.metrics["rounds"]}
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

    def _sources(self, number: int) -> JsonObject:
        """Return the data source of each user in a run; empty for the number 0."""
        if number == 0:
            return {}
        content = load_recipe(self._runs / f"{number:04d}.yaml").data.model_dump(mode="json", exclude_unset=True)
        return dict(content["users"])

    def _train_forever(self) -> None:
        """Run what is planned, and plan a run whenever one is due, until the process ends."""
        prefer_answers()
        while not self._stopping.is_set():
            number = self._last_planned()
            try:
                if number > self._served:
                    self._train(number)
                elif not self._plan(number + 1):
                    self._stopping.wait(CHECK_SECONDS)
            except StoppedError:
                return
            except Exception as error:  # such as a full disk or too little memory; the models so far answer
                reason = str(error)
                if not isinstance(error, ComingleError):
                    reason = f"{type(error).__name__}: {error}"
                    logger.exception("run %04d", number)
                self.say(f"run {number:04d}: {reason}; trying again in {RETRY_SECONDS:.0f} s")
                # Not the message, which may name another user.
                self.state = {"state": "failed", "run": f"{number:04d}", "round": 0, "error": type(error).__name__}
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
        refused = users_without_budget(self._runs / f"{number - 1:04d}", self.recipe) if ready else frozenset[str]()
        self._show_refused(refused & set(ready))
        ready = [user for user in ready if user not in refused]
        if not ready or len(ready) < min(self.when.users, len(self.models) - len(refused)):
            return False
        earlier_sources = self._sources(number - 1)
        files = self.store.collect(ready, number)
        sources = {**earlier_sources, **{user: {"path": str(path)} for user, path in files.items()}}
        try:
            recipe = self._recipe_of(number, sources, ready)
            try:
                self._check(recipe)
            except DataError as error:  # too little text for a split, for example
                lacking = [user for user, source in sources.items() if not self._suffices(user, source)]
                waiting = [user for user in files if user in lacking]
                if waiting or not lacking:
                    self.say(f"run {number:04d}: waits for more text ({error})")
                    self.store.put_back(files)
                    # The others are tried again without.
                    self._too_little.update({user: self.store.pending[user] for user in waiting or files})
                    return False
                recipe = self._recipe_of(number, self._with_earlier_text(sources, lacking), ready)
                self._check(recipe)
        except Exception:
            self.store.put_back(files)
            raise
        for user in files:
            self._too_little.pop(user, None)
        write_text(self._runs / f"{number:04d}.yaml", recipe.as_yaml())
        return True

    def _show_refused(self, refused: frozenset[str]) -> None:
        """Show once that new documents of users are not trained on, as their privacy budget is spent."""
        if refused - self._shown_refused:
            self._shown_refused |= refused
            names = ", ".join(sorted(refused))
            self.say(f"{names}: the privacy budget is spent; no further run trains on new documents")

    def _recipe_of(self, number: int, sources: JsonObject, participants: Sequence[str]) -> Recipe:
        """Return the recipe of a run that continues the last one.

        Args:
            number: Number of the run.
            sources: Data source of each user.
            participants: Users with new documents; the others keep their models.
        """
        changes: dict[str, Any] = {
            "data.users": sources,
            "continue_from.run": str(self._runs / f"{number - 1:04d}"),
            "seed": self.recipe.seed + number,
        }
        if set(participants) != set(sources):
            changes["training.participation"] = [list(participants)] * self.recipe.training.rounds
        return self.recipe.with_changes(changes)

    def _check(self, recipe: Recipe) -> None:
        """Raise an error if a run cannot start from a recipe: its data does not suffice for the splits, for example."""
        method = check_and_set_up(recipe)
        build(recipe, prepare(recipe, base=self._base, method=method), method=method)

    def _suffices(self, user: str, source: object) -> bool:
        """Return whether the data of a source can be used for a user."""
        recipe = recipe_for_one_user(self.recipe, lambda values: values[0])
        try:
            self._check(recipe.with_changes({"data.users": {user: source}}))
        except DataError:
            return False
        return True

    def _with_earlier_text(self, sources: JsonObject, users: Collection[str]) -> JsonObject:
        """Return data sources in which users who have deleted too many documents have earlier text.

        A user whose earlier text does not suffice either is left out.

        Args:
            sources: Data source of each user.
            users: Names of the users whose source does not suffice.
        """
        replaced = dict(sources)
        first = self.recipe.data.model_dump(mode="json", exclude_unset=True)["users"]
        for user in users:
            earlier: list[object] = [{"path": str(path)} for path in reversed(self.store.trained_files(user))]
            usable = [source for source in [*earlier, first.get(user)] if source and self._suffices(user, source)]
            if usable:
                replaced[user] = usable[0]
            else:
                del replaced[user]
                self.say(f"{user}: is left out of further runs, as too little text is left")
        return replaced

    def delete(self, user: str, is_meant: Callable[[JsonObject], bool]) -> list[tuple[str, int]]:
        """Delete documents of a user, on which later runs then do not train; arguments as in the store.

        A run that trains now ends with the documents that it has read. If it is interrupted, it is planned again.
        """
        runs = [run_number for document, run_number in self.store.documents(user) if run_number and is_meant(document)]
        if runs and max(*runs, self._last_planned()) > self._served:
            write_text(self._stale_mark(self._served + 1), "")
        self._too_little.pop(user, None)
        return self.store.delete(user, is_meant)

    def _stale_mark(self, number: int) -> Path:
        """Return the file that says that documents were deleted after a run was planned."""
        return self._runs / f"{number:04d}.stale"

    def _plan_again(self, number: int) -> None:
        """Discard a planned run, so that its documents wait again."""
        shutil.rmtree(self._runs / f"{number:04d}", ignore_errors=True)
        if number > 1:  # the first run is on the recipe's own text
            (self._runs / f"{number:04d}.yaml").unlink()
            self.store.recover(number - 1)
        self._stale_mark(number).unlink()

    def _train(self, number: int) -> None:
        """Train or resume a planned run, and publish its models.

        Args:
            number: Number of the run.

        Raises:
            StoppedError: The process is to end.
        """
        if self._stale_mark(number).exists():
            self._plan_again(number)
            return
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
        self._stale_mark(number).unlink(missing_ok=True)
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
            user, noise is to be computed for one run, or the recipe continues a run.
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
    check_endless(recipe)
    if isinstance(recipe.data, ConversationsSection) and recipe.data.columns != Columns():
        raise RecipeError(
            f"data: got columns {recipe.data.columns.description}; allowed with comingle live: 'messages'"
        )
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
        for claimed in files.glob("*.used"):  # by a process that was killed before it had answered
            claimed.rename(claimed.with_suffix(".json"))

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        # `path`: names may contain a slash, which arrives decoded.
        app.post("/v1/users/{name:path}/documents")(self.add_documents)
        app.get("/v1/users/{name:path}/documents")(self.list_documents)
        app.delete("/v1/users/{name:path}/documents/{document_id}")(self.delete_document)
        app.get("/v1/live")(self.state)
        app.post("/v1/files")(self.upload)
        app.get("/v1/files")(self.list_files)
        app.delete("/v1/files/{file_id}")(self.delete_file)
        app.post("/v1/fine_tuning/jobs")(self.create_job)
        app.get("/v1/fine_tuning/jobs/{job_id:path}")(self.job)
        self.service.health_details = lambda: {"training": self.trainer.state["state"]}

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

    async def list_documents(self, request: Request, name: str) -> JsonObject:
        """List the documents of a user, the oldest first, each with its content and the run that trains on it."""
        self._check_user(request, name)
        documents = await asyncio.to_thread(self.trainer.store.documents, name)
        return {
            "object": "list",
            "data": [
                {
                    "id": document["id"],
                    "object": "document",
                    "created_at": document["created"],
                    "run": f"{run_number:04d}" if run_number else None,
                    self._key: document[self._key],
                }
                for document, run_number in documents
            ],
        }

    async def delete_document(self, request: Request, name: str, document_id: str) -> JsonObject:
        """Delete a document of a user; the answer says which run has trained on it.

        Args:
            request: The HTTP request.
            name: Name of the user.
            document_id: Id of the document.
        """
        self._check_user(request, name)
        deleted = await asyncio.to_thread(self.trainer.delete, name, lambda document: document["id"] == document_id)
        if not deleted:
            raise ApiError(404, f"no document {document_id!r:.60}", param="document_id")
        return {"id": document_id, "object": "document", "deleted": True, **_what_remains(deleted)}

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
        stored: JsonObject = {
            "owners": owners,
            "filename": file.filename,
            "purpose": purpose,
            "created": int(time.time()),
            "content": content.decode("utf-8", "replace"),
        }
        path = self._files / f"file-{secrets.token_hex(12)}.json"
        write_json(path, stored)
        return _describe_file(path.stem, stored)

    def _uploads(self, request: Request) -> dict[str, JsonObject]:
        """Return the uploaded files that no job has used yet, and that the request's key may see, by id."""
        names = set(self.service.accessible_users(request))
        uploads: dict[str, JsonObject] = {}
        for path in sorted(self._files.glob("*.json")):
            with suppress(FileNotFoundError):  # a job uses it now
                stored = json.loads(path.read_text(encoding="utf-8"))
                if not self.service.keys.required or names.intersection(stored["owners"]):
                    uploads[path.stem] = stored
        return uploads

    async def list_files(self, request: Request) -> JsonObject:
        """List the uploaded files that no job has used yet, as OpenAI's API does."""
        uploads = await asyncio.to_thread(self._uploads, request)
        data = [_describe_file(file_id, stored) for file_id, stored in uploads.items()]
        return {"object": "list", "data": data, "has_more": False}

    async def delete_file(self, request: Request, file_id: str) -> JsonObject:
        """Delete an uploaded file, or the documents that a job has added from it."""
        names = self.service.accessible_users(request)

        def delete() -> list[tuple[str, int]] | None:
            if file_id in self._uploads(request):
                (self._files / f"{file_id}.json").unlink()
                return []
            users = names if self.service.keys.required else self.trainer.store.users()
            deleted: list[tuple[str, int]] = []
            for user in users:
                deleted += self.trainer.delete(user, lambda document: document.get("file") == file_id)
            return deleted or None

        deleted = await asyncio.to_thread(delete)
        if deleted is None:
            raise ApiError(404, f"no file {file_id!r:.60}", param="file_id")
        return {"id": file_id, "object": "file", "deleted": True, **_what_remains(deleted)}

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
            ids, _num_tokens = await self._add(body.model, contents, file_id=body.training_file)
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

    async def _add(
        self, user: str, contents: Callable[[], list[object]], *, file_id: str | None = None
    ) -> tuple[list[str], int]:
        """Store documents in a thread, since the disk may be slow.

        Args:
            user: Name of the user.
            contents: Returns the contents of the documents.
            file_id: Id of the uploaded file that they come from; None if they come from none.

        Raises:
            ApiError: A document has the wrong form, or there is none.
        """

        def add() -> tuple[list[str], int]:
            found = contents()
            if not found:
                raise DataError("got no documents; allowed: at least one")
            return self.trainer.store.add(user, found, file_id=file_id)

        try:
            return await asyncio.to_thread(add)
        except DataError as error:
            raise ApiError(400, str(error)) from None


def _describe_file(file_id: str, stored: JsonObject) -> JsonObject:
    """Return an uploaded file in the form of OpenAI's API."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": len(stored["content"].encode()),
        "created_at": stored.get("created", 0),
        "filename": stored.get("filename"),
        "purpose": stored.get("purpose", "fine-tune"),
        "status": "processed",
    }


def _what_remains(deleted: Sequence[tuple[str, int]]) -> JsonObject:
    """Return which runs have trained on deleted documents, and what this means, for an answer.

    Args:
        deleted: Id of each document, and the number of its run; 0 if it waited.
    """
    runs = sorted({f"{run_number:04d}" for _id, run_number in deleted if run_number})
    if not runs:
        return {"runs": [], "note": "no model was trained on it"}
    note = "no later run trains on it; models already trained keep what they learned (see comingle leave)"
    return {"runs": runs, "note": note}


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

    def engine_of(models: Mapping[str, PersonalModel]) -> Engine:
        return Engine(models, rows=limits.rows, prompt_tokens=limits.prompt_tokens, prefix_bytes=limits.prefix_bytes)

    if trainer.recipe.runtime.compile is not False:
        enable_native_passes(trainer.base)
    engine = engine_of(trainer.models)
    access = Keys(engine.models, keys=None) if keys is None else WatchedKeys(keys)
    app = make_app(engine, access, limits, answers=answers_messages(trainer.recipe, trainer.base))
    service: Service = app.state.service
    LiveApi(trainer, service, trainer.folder / "files").add_to(app)

    def publish(models: Mapping[str, PersonalModel]) -> None:
        service.replace_engine(engine_of(models))

    trainer.publish = publish
    trainer.start()
    server = GracefulServer(uvicorn.Config(app, **UVICORN_OPTIONS), service)
    ready(url_of(sock))
    try:
        server.run(sockets=[sock])
    finally:
        trainer.stop()
