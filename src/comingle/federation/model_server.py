"""The personal models of a client process, served on this machine while the clients take part in a federation.

The server is that of ``comingle serve``: an OpenAI-compatible API with a chat page. It reads the base model that
training holds in memory. It adds a copy of each user's adapters, and keys and values of the answer in progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from comingle.serving.access import GRACE_SECONDS, UVICORN_OPTIONS, ApiError, Keys, Limits, listen, url_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from comingle.federation.client_store import ClientStore
    from comingle.models.model import Model
    from comingle.models.personal import PersonalModel
    from comingle.serving.engine import Engine

LIMITS = Limits(rows=1)
"""Limits on requests. There is one answer at a time, because each has keys and values of its own in memory."""

RETRY_SECONDS = 10
"""When to retry a request that came before the first model."""


class LightServer(uvicorn.Server):
    """A server whose main loop wakes once a second when it is idle; that of uvicorn wakes ten times."""

    async def main_loop(self) -> None:
        """Renew the date in responses once a second, until ``should_exit`` is set."""
        while not self.should_exit:
            await self.on_tick(0)  # uvicorn renews the date at ticks whose number is a multiple of 10
            await asyncio.sleep(1.0)


class ModelServer:
    """Server of the personal models of the users of a client process, for programs on this machine.

    Until the first model is published, requests are refused with status 503. A newer model of a user answers requests
    that arrive after it; answers in progress are completed by the older one.
    """

    def __init__(self, port: int, say: Callable[[str], None]) -> None:
        """Start to listen in a thread.

        Args:
            port: Port on the loopback interface; 0 selects a free one.
            say: Called with each line to show to the users.

        Raises:
            RunError: The port is in use.
        """
        self._say = say
        self._app: FastAPI | None = None  # None until the first model is published
        self._served: RunModels | None = None  # the run whose models are served
        self._next: RunModels | None = None  # the run that follows it, until it is served
        self._users_refused: set[str] = set()  # users who were shown why their models are not served
        self._socket = listen("127.0.0.1", port)
        self.url = url_of(self._socket)
        """Address of the chat page."""
        self._server = LightServer(uvicorn.Config(self._respond, interface="asgi3", lifespan="off", **UVICORN_OPTIONS))
        self._starter = ThreadPoolExecutor(1, "model server")  # starts threads with the priority of this one
        self._starter.submit(threading.get_native_id).result()
        arguments = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="model server", daemon=True)
        self._thread.start()

    def publish(self, store: ClientStore, name: str) -> None:
        """Serve the current model of a user from the next request on, or show why it is not served.

        Called by the thread that trains, after each task that has changed the user's model. All served users must take
        part in the same federation, as one model in memory computes the personal models of all. When a run follows the
        served one, the models of both answer without a pause between them.

        Args:
            store: What the client has of the run: the user's data, model and progress.
            name: Name of the user.
        """
        from comingle.training.kinds.base import kind_of

        if not kind_of(store.recipe).needs_base:
            self._show_refusal(name, f"{store.clients.model.name} does not generate text")
            return
        served = self._served
        if served is not None and served.digest == store.public.digest:
            self._publish_newer(served.add(store, name))
        elif served is not None and served.is_followed_by(store, self._served_users() - {name}):
            self._publish_next(store, name)
        elif self._served_users() - {name}:
            self._show_refusal(name, "takes part in another federation than the users who are served")
        else:
            self._end_app()
            served = RunModels(store)
            self._app = self._starter.submit(self._make_app, store, served.add(store, name)).result()
            self._served = served
            self._say(f"{self.url}  chat page · {self.url}/v1  OpenAI-compatible API")

    def _publish_newer(self, personal: PersonalModel) -> None:
        """Replace or add a user's model of the run whose models are served."""
        assert self._app is not None
        service = self._app.state.service

        def replace_model() -> None:
            service.engine.replace(personal)

        service.worker.call(replace_model).result()  # runs in the engine's thread; waits for its end
        if service.metrics is not None:
            service.metrics.model_updates.inc()

    def _publish_next(self, store: ClientStore, name: str) -> None:
        """Serve the models of the run that follows the served one, when all its served users have published theirs.

        Until then, requests are answered by the earlier models, and none is refused.

        Args:
            store: The user's part of the next run.
            name: Name of the user.
        """
        assert self._app is not None
        if self._next is None or self._next.digest != store.public.digest:
            self._next = RunModels(store)
        self._next.add(store, name)
        is_awaited = self._served_users() & set(store.public.users) - set(self._next.personal)
        if is_awaited:
            return
        service = self._app.state.service
        service.replace_engine(_make_engine(self._next.personal))
        if service.metrics is not None:
            service.metrics.model_updates.inc(len(self._next.personal))
        self._served, self._next = self._next, None

    def _served_users(self) -> set[str]:
        """Return the users whose models are served."""
        if self._app is None:
            return set()
        return set(self._app.state.service.engine.models)

    def _show_refusal(self, name: str, reason: str) -> None:
        """Show once why the model of a user is not served."""
        if name not in self._users_refused:
            self._say(f"{name}: --serve: {reason}; its model is not served")
            self._users_refused.add(name)

    def _end_app(self) -> None:
        """Refuse requests from now on, and end the thread that generates answers."""
        if self._app is not None:
            app, self._app = self._app, None
            app.state.service.worker.close()

    def close(self) -> None:
        """End the server. An answer in progress is completed unless it takes too long; then it ends with an error."""
        self._server.should_exit = True
        self._thread.join(GRACE_SECONDS)
        if self._thread.is_alive() and self._app is not None:
            self._app.state.service.end_answers()
        self._thread.join()
        self._socket.close()
        self._end_app()
        self._starter.shutdown()

    @staticmethod
    def _make_app(store: ClientStore, personal: PersonalModel) -> FastAPI:
        """Return the API, which serves any program on this machine, with its first model.

        Args:
            store: What the client has of the run: the user's data, model and progress.
            personal: The user's model, to which :meth:`publish` adds or which it replaces later.
        """
        from comingle.models.hardware import return_freed_memory
        from comingle.serving.api import make_app
        from comingle.serving.models import answers_messages, enable_native_passes

        if store.recipe.runtime.compile is not False:
            enable_native_passes(personal.model.base)
        engine = _make_engine({personal.name: personal})
        without_keys = Keys(engine.models, keys=None)  # API keys are not required
        answers = answers_messages(store.recipe, personal.model.base)
        return make_app(engine, without_keys, LIMITS, answers=answers, when_idle=return_freed_memory)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the API, or refuse it if there is no model yet."""
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        error = ApiError(503, "no model yet: the client waits for the server", retry_after=RETRY_SECONDS)
        await error.response()(scope, receive, send)


class RunModels:
    """The models of a run: those of the users of this process that were published, and one that computes them all."""

    def __init__(self, store: ClientStore) -> None:
        """Create the models of a run without a user's.

        Args:
            store: A user's part of the run.
        """
        self.digest = store.public.digest
        """Digest of recipe and users, which identifies a run."""
        self.personal: dict[str, PersonalModel] = {}
        """Models by user, as published last."""
        self._folder = store.folder.name
        self._base = store.own_data.base
        self._model = model_of_all_users(store)

    def add(self, store: ClientStore, name: str) -> PersonalModel:
        """Add or replace a user's model, and return it; arguments as of :meth:`ModelServer.publish`."""
        self.personal[name] = personal_model(store, self._model, name)
        return self.personal[name]

    def is_followed_by(self, store: ClientStore, others: Set[str]) -> bool:
        """Return whether the models of another run can take the place of these ones.

        They can if it continues this run, or if it has the same base in memory and the other served users take part in
        it, as when the runs of a continuous federation begin again because a user has left.

        Args:
            store: A user's part of the other run.
            others: The other users who are served.
        """
        from comingle.federation.client_store import run_folder

        section = store.recipe.continue_from
        if section is not None and run_folder(store.folder.parent, section.run).name == self._folder:
            return True
        base = store.own_data.base
        has_same_base = base is not None and self._base is not None and base.model is self._base.model
        return has_same_base and others <= set(store.public.users)


def _make_engine(models_by_user: Mapping[str, PersonalModel]) -> Engine:
    """Return an object that generates text with the models of some users.

    It generates a single text at a time (``LIMITS.rows``), because each text has a cache of keys and values in memory,
    in addition to the model in training; further requests wait.

    Args:
        models_by_user: Each user's model, over one base model for all, by the user's name.
    """
    from comingle.serving.engine import Engine

    return Engine(models_by_user, rows=LIMITS.rows)


def model_of_all_users(store: ClientStore) -> Model:
    """Return a model that can compute the personal model of each user of a run, such as the one in training.

    It shares the base's weights with the model in training, but not its modules, so both can be used at the same time.
    """
    from comingle.federation.public import remote_data
    from comingle.training.kinds.base import kind_of

    data_of_all_users = remote_data(store.public, store.recipe, store.own_data.base)
    return kind_of(store.recipe).model(store.recipe, data_of_all_users, store.clients.plan)


def personal_model(store: ClientStore, model: Model, name: str) -> PersonalModel:
    """Return the current model of a user, with a copy of its tensors, to serve it while training goes on.

    With ``evaluation.guard`` there are several models: that of the run's method, one that the user has trained alone,
    and the shared one. The result is the one that was the best on the user's validation data.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        model: Model of all users of the run, from :func:`model_of_all_users`.
        name: Name of the user.
    """
    from comingle.training.checkpoints import personal_tensors
    from comingle.training.client import finetuned, settled
    from comingle.training.kinds.base import kind_of

    clients = store.clients if store.guard is None else store.guard.served_clients
    shared = None if store.guard is None else store.guard.served_rows
    only_user = 0  # this client group has a single user
    if shared is not None:
        tensors = clients.model.layout.views(shared[[only_user]])
    else:
        row = clients.row_of[only_user]  # in the matrix of tensors; if a method trains two copies, of the last one
        # Compute tensors that depend on trained ones, such as the weights of an ensemble; fine-tune if the method does.
        with settled(clients), finetuned(clients):
            tensors = personal_tensors(clients.model.layout, clients.state, row)
    tensors = {slot: tensor.to(model.dtype, copy=True) for slot, tensor in tensors.items()}
    user_index = store.public.users.index(name)
    return cast("PersonalModel", kind_of(store.recipe).personal(name, model, tensors, user_index))
