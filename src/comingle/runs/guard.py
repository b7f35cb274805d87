"""Serve every user the best of several models by the loss on its own validation data (``evaluation.guard``).

The candidates are

- ``personal``: the model of the run's method;
- ``local``: the same tensors, trained by the user alone with the same settings, in as many rounds. Nothing is uploaded
  or averaged (:meth:`comingle.methods.base.Method.alone`), and no round is selected;
- ``shared``: the downloaded tensors without training of the user's own, if they are a whole model.

In a federation over the network each client has all three (:class:`ClientGuard`), and sends nothing of them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import MEMORY, EvaluationSection
from comingle.methods.base import Method, uses_downloads
from comingle.models.routers import ZERO_SHARE_LOGIT
from comingle.protocol.messages import Download
from comingle.reports.comparisons import interval
from comingle.training.backends.local import InProcess, federate
from comingle.training.checkpoints import (
    Clock,
    load_checkpoint,
    progress_of,
    prune_checkpoints,
    read_progress,
    read_state,
    save_checkpoint,
)
from comingle.training.client import Clients, Tick, finetuned, finish, settle, settled, train
from comingle.training.cohort import Models
from comingle.training.evaluation import measured
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, kind_of
from comingle.training.settings import RunPlan, participants
from comingle.training.state import State
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import SERVED, JsonMapping, JsonObject, read_choices, read_metrics, write_json
from comingle.utils.trees import CLIENT_ROUTER

PERSONAL, LOCAL, SHARED = "personal", "local", "shared"
"""Names of the candidates; ``LOCAL`` is also the folder, in a run folder, of the checkpoints of local models.

``SHARED`` is one too on a client's machine.
"""


def is_guarded(evaluation: EvaluationSection, method: Method) -> bool:
    """Return whether a run has a guard: it also trains each user alone, and serves the better of both models.

    The recipe asks for it by ``evaluation.guard: local``. Methods are exempt if they train nothing, share nothing (the
    run's models are then trained alone already), or train a single model on the data of all users.

    Args:
        evaluation: Section ``evaluation`` of the recipe.
        method: The method of the run.
    """
    return evaluation.guard == LOCAL and method.trains and bool(method.shared) and not method.placement.pooled


def plan_alone(plan: RunPlan) -> RunPlan:
    """Return the plan of users who train alone in a run; only uploads are protected, and they upload nothing."""
    alone = replace(plan, method=plan.method.alone(), privacy=None, aggregation=None, sums=None, users=())
    return alone.updated("evaluation", select="last")


def build_local(federation: InProcess, recipe: Recipe, run_data: RunData) -> InProcess | None:
    """Return the users of a federation as they train alone, before their first round; None without a guard.

    Args:
        federation: The federation of the run.
        recipe: The recipe of the run.
        run_data: The base model and the users' data.

    Raises:
        RecipeError: The users are on disk or in several processes.
    """
    plan = federation.clients.plan
    if not is_guarded(plan.evaluation, plan.method):
        return None
    where = f"evaluation.guard: got {recipe.evaluation.guard}"
    if plan.runtime.store != MEMORY:
        raise RecipeError(f"{where} with runtime.store: {plan.runtime.store}; allowed: memory, or guard: null")
    if type(federation) is not InProcess:
        raise RecipeError(f"{where} in several processes; allowed: one process, or guard: null")
    names = federation.clients.population_names
    return federate(run_data.kind.clients(recipe.for_users(names), run_data, plan_alone(plan)))


def continue_local(clients: Clients, run: Path, *, moments: bool) -> None:
    """Copy the local models of an earlier run, if it has any, to users who train alone, by name.

    Args:
        clients: The users as they train alone, before their first round; changed in place.
        run: Folder of the earlier run, or of the earlier run on a client's machine.
        moments: Whether the optimisers' moments and step counts are copied too.

    Raises:
        RecipeError: A tensor has another shape.
        RunError: The checkpoint is damaged.
    """
    from comingle.runs.continuation import copy_users_state

    checkpoints = list_checkpoints(run / LOCAL)
    if not checkpoints:
        return
    progress = read_progress(checkpoints[-1])
    users_state, _server_state = read_state(checkpoints[-1], progress, clients.model.layout)
    copy_users_state(clients, users_state, progress.trainers, checkpoints[-1], moments=moments)


def served_in(recipe: Recipe) -> JsonMapping:
    """Return which model each user is served by the run in ``continue_from``; empty without one or without a guard."""
    if recipe.continue_from is None:
        return {}
    try:
        return read_metrics(Path(recipe.continue_from.run)).get("served", {})
    except RunError:  # the run was interrupted, or its folder is gone
        return {}


def train_local(
    local: InProcess, federation: InProcess, recipe: Recipe, folder: Path | None, observe: Observer, *, resume: bool
) -> None:
    """Train the users alone, each in the rounds in which it takes part in the federation, and write checkpoints.

    Args:
        local: The users as they train alone, before their first round.
        federation: The federation after its last round.
        recipe: The recipe of the run.
        folder: The run folder; None writes nothing.
        observe: Called with an event "step" for each local step of a cohort.
        resume: Whether to resume from the newest checkpoint in the folder.
    """
    clients, done, rounds = local.clients, 0, federation.clients.rounds_done
    clients.stopped_after = federation.clients.stopped_after
    target = None if folder is None else folder / LOCAL
    if target is not None and resume and list_checkpoints(target):
        done = local.restore(target, recipe.fingerprint).round
    names = clients.population_names
    for round_number in range(done, rounds):
        event: JsonObject = {"event": "step", "advance": 0, "round": round_number + 1, "alone": True}
        members = participants(clients.plan, round_number, names)
        if members:
            train(clients, members, round_number, lambda event=event: observe(event))
        is_last = round_number + 1 == rounds
        if is_last:
            finish(clients)
            settle(clients)
        if target is not None and (is_last or (round_number + 1) % recipe.checkpoints.every == 0):
            progress = progress_of(round_number + 1, recipe.fingerprint, names)
            local.save(target, progress, keep=recipe.checkpoints.keep)


# -------------------------------------------------------------------- candidates


def downloads_whole_model(clients: Clients) -> bool:
    """Return whether the tensors that users download are a whole model: no user trains others, or it can do without."""
    method = clients.method
    if not clients.shares or method.server.peer_to_peer:
        return False
    if any(uses_downloads(hook) or hook.resizes for hook in method.client.parts):
        return False
    placement, layout = method.placement, clients.model.layout
    if _mixes_own_model(method):
        return placement.generalists > 0
    is_local = layout.mask(method.client.trained) & ~layout.mask(method.received)
    return not bool(is_local.any())


def _mixes_own_model(method: Method) -> bool:
    """Return whether a user mixes the predictions of downloaded models with those of models of its own."""
    mixture = method.placement.mixture
    return mixture is not None and mixture.trains_independently and method.placement.most_specialists > 0


def shared_models(federation: InProcess) -> Models:
    """Return the models that users download, by number of the user, without training of their own.

    Args:
        federation: The federation after its last round, which is unchanged.
    """
    clients, clock = federation.clients, federation.clock
    try:
        federation.clock = Clock()  # its bytes are not counted
        rows = shared_rows(clients, lambda: federation.download(range(len(clients.trainers))))
    finally:
        federation.clock = clock
    return models_of_rows(clients, rows)


def shared_rows(clients: Clients, receive: Callable[[], None]) -> Tensor:
    """Return the parameters ``(users, columns)`` of users who have a download, and have trained nothing of their own.

    Args:
        clients: The users, whose state is unchanged.
        receive: Writes the download into the users' state.
    """
    state = clients.state
    try:
        clients.state = clients.begin(range(clients.num_rows))
        receive()
        return without_own_models(clients, clients.state.rows)
    finally:
        clients.state = state


def models_of_rows(clients: Clients, rows: Tensor) -> Models:
    """Return models to score with other parameters ``(users, columns)`` than those of the users' state."""
    return Models(parameters_of=lambda numbers: rows[list(numbers)], owners=clients.models.owners)


def without_own_models(clients: Clients, rows: Tensor) -> Tensor:
    """Return parameters in which models of a user's own have a mixture weight of 0, if it mixes them with others.

    Args:
        clients: The users.
        rows: Parameters ``(users, columns)``.
    """
    placement = clients.method.placement
    mixture = placement.mixture
    if mixture is None or not mixture.trains_independently:
        return rows
    rows = rows.clone()
    logits = clients.model.layout.views(rows)[CLIENT_ROUTER]  # (users, models): downloaded models come first
    logits[:, placement.generalists : mixture.clusters] = ZERO_SHARE_LOGIT  # the softmax of this logit is exactly 0
    return rows


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Models of all users that may be served.

    Args:
        clients: The users.
        models: The models.
        rows: Number of each user's model in ``models``.
    """

    clients: Clients
    models: Models
    rows: Sequence[int]


@contextmanager
def candidates_of(
    clients: Clients, local: Clients, shared: Models | None, *, done: int | None = None
) -> Iterator[dict[str, Candidate]]:
    """Return the candidates by name, in the order in which equal ones are preferred; fine-tuned in the block.

    Args:
        clients: The users as they take part in the federation.
        local: The users as they have trained alone.
        shared: The models that users download; None if these are no whole models.
        done: Number of rounds after which the users have these models, for methods that fine-tune before they are
            scored; None for the round that the final models come from.
    """
    numbers = range(len(clients.users))
    with finetuned(clients, done, numbers), finetuned(local, done, numbers):
        found: dict[str, Candidate] = {}
        for name, each in ((PERSONAL, clients), (LOCAL, local)):
            found[name] = Candidate(clients=each, models=each.models, rows=each.row_of)
        if shared is not None:  # the first copy of a user's model is the downloaded one
            found[SHARED] = Candidate(clients=clients, models=shared, rows=numbers)
        yield found


# -------------------------------------------------------------------- choice


def choose_served(
    federation: InProcess,
    local: InProcess,
    recipe: Recipe,
    *,
    users: JsonMapping,
    since: str | None,
    earlier: JsonMapping,
) -> JsonObject:
    """Return which candidate each user is served: that with the lowest mean validation loss, by name of the user.

    Args:
        federation: The federation after its last round.
        local: The users as they have trained alone.
        recipe: The recipe of the run.
        users: Metrics of the evaluated users by name, with the test measures of their personal models.
        since: Name of this run.
        earlier: Result of this function in the run that this one continues.

    Returns:
        For each user the served ``model``, the name of the run ``since`` which it is of this kind, and for each
        candidate the mean loss on the user's validation data and its difference to that of ``personal``, with a 95%
        interval. Users without validation data are served ``personal``. Test measures of the served model follow, if
        the run scores the user.
    """
    has_shared_model = federation.server.version > 0 and downloads_whole_model(federation.clients)
    shared = shared_models(federation) if has_shared_model else None
    with candidates_of(federation.clients, local.clients, shared) as candidates:
        served = compare_candidates(candidates, recipe)
        add_test_scores(served, candidates, users)
    for name, entry in served.items():
        before = earlier.get(name, {})
        entry["since"] = before["since"] if before.get("model") == entry["model"] else since
    return served


def compare_candidates(candidates: dict[str, Candidate], recipe: Recipe) -> JsonObject:
    """Return for each user the candidate with the lowest mean validation loss, and the losses of all.

    Args:
        candidates: The candidates by name.
        recipe: The recipe of the run.
    """
    users = candidates[PERSONAL].clients.users
    validated = [number for number in range(len(users)) if len(users[number].valid)]
    losses = {name: _losses_by_sequence(recipe, each, validated) for name, each in candidates.items()}
    served: JsonObject = {name: {"model": PERSONAL, "candidates": {}} for name in users.names}
    for position, number in enumerate(validated):
        by_candidate = _compare({name: of_users[position] for name, of_users in losses.items()})
        best = min(by_candidate, key=lambda name: by_candidate[name]["valid_loss"])  # the first of equal ones
        served[users[number].name] = {"model": best, "candidates": by_candidate}
    return served


def add_test_scores(served: JsonObject, candidates: dict[str, Candidate], users: JsonMapping) -> None:
    """Add the test measures of the served model to each user that the run scores.

    Args:
        served: Result of :func:`compare_candidates`, changed in place.
        candidates: The candidates by name.
        users: Metrics of the scored users by name, with the test measures of their personal models.
    """
    clients = candidates[PERSONAL].clients
    for name, candidate in candidates.items():
        scored = [number for number in clients.scored if served[clients.users[number].name]["model"] == name]
        if name == PERSONAL:
            tests = [test_scores_of(users[clients.users[number].name]) for number in scored]
        else:
            tests = _score_tests(candidate, scored)
        for number, test in zip(scored, tests, strict=True):
            served[clients.users[number].name].update(test)


Sequences = Float64[Tensor, "sequences 2"]
"""Sum of the losses of each sequence in nats, and the number of its losses."""


def _losses_by_sequence(recipe: Recipe, candidate: Candidate, numbers: Sequence[int]) -> list[Sequences]:
    """Return the validation losses of some users under a candidate: of each window, conversation or sample.

    Args:
        recipe: The recipe of the run.
        candidate: The models.
        numbers: Numbers of the users.
    """
    clients, rows = candidate.clients, [candidate.rows[number] for number in numbers]
    splits = [clients.users[number].valid for number in numbers]
    recorded: dict[int, list[tuple[float, int]]] = {row: [] for row in rows}
    if not kind_of(recipe).needs_base:  # samples are scored one by one
        for row, split in zip(rows, splits, strict=True):
            single = [split.select(torch.tensor([index])) for index in range(len(split))]
            scores = clients.scorer.score(candidate.models, single, [row] * len(single))
            recorded[row] = [(score.mean_loss, 1) for score in scores]
    elif rows:

        def predict(rows_of_slots: Sequence[int], windows: Tensor) -> Tensor:
            """Return the losses of windows, and record their sums."""
            losses = clients.scorer.predict(candidate.models, rows_of_slots, windows)
            counts = (windows[..., 1:] >= 0).sum(-1)  # others are padding, or inputs without a loss
            sums = losses.double().sum(-1)
            for row, sums_of_slot, counts_of_slot in zip(rows_of_slots, sums.tolist(), counts.tolist(), strict=True):
                recorded[row] += [pair for pair in zip(sums_of_slot, counts_of_slot, strict=True) if pair[1]]
            return losses

        with torch.no_grad():
            clients.batch_source.score(predict, splits, rows, clients.pass_size, None)
    return [torch.tensor(recorded[row], dtype=torch.float64) for row in rows]


def _compare(losses: dict[str, Sequences]) -> dict[str, JsonObject]:
    """Return the mean loss of each candidate on a user's sequences, and the difference of others to ``personal``.

    Sequences have different numbers of losses, so the mean is a ratio of sums; its interval is that of a ratio
    estimator (Cochran 1977, section 6.4), with Student's t.

    Args:
        losses: Losses of the same sequences under each candidate.
    """
    counts = losses[PERSONAL][:, 1]
    compared: dict[str, JsonObject] = {}
    for name, sequences in losses.items():
        mean = float(sequences[:, 0].sum() / counts.sum())
        compared[name] = {"valid_loss": mean if math.isfinite(mean) else math.inf}
        if name == PERSONAL:
            continue
        differences = sequences[:, 0] - losses[PERSONAL][:, 0]
        difference = float(differences.sum() / counts.sum())
        residuals = (differences - difference * counts) / counts.mean()  # their mean is 0
        ends = interval(residuals.tolist()) if math.isfinite(difference) else None
        compared[name]["difference"] = difference
        compared[name]["interval"] = None if ends is None else [difference + end for end in ends]
    return compared


def test_scores_of(metrics_of_user: JsonMapping) -> dict[str, float]:
    """Return the test measures among the metrics of a user, such as ``{"test_loss": 2.1}``; not the amount of data."""
    return {
        key: value for key, value in metrics_of_user.items() if key.startswith("test_") and isinstance(value, float)
    }


def _score_tests(candidate: Candidate, numbers: Sequence[int]) -> list[dict[str, float]]:
    """Return the test measures of some users under a candidate.

    Args:
        candidate: The models.
        numbers: Numbers of the users.
    """
    if not numbers:
        return []
    clients, rows = candidate.clients, [candidate.rows[number] for number in numbers]
    splits = [clients.users[number].test for number in numbers]
    return [measured(score) for score in clients.scorer.examine(candidate.models, splits, rows)]


# -------------------------------------------------------------------- a client of a federation


def saved_shared_models(clients: Clients, folder: Path) -> Models | None:
    """Return the shared model that a client has saved as the one to serve; None without one.

    Args:
        clients: The user of the run.
        folder: Folder of the user's model.

    Raises:
        RunError: The checkpoint is damaged.
    """
    checkpoints = list_checkpoints(folder / SHARED)
    if not checkpoints:
        return None
    state, _no_server = load_checkpoint(checkpoints[-1], clients.model.layout, state_of_download(clients), {})
    return models_of_rows(clients, state.rows)


def state_of_download(clients: Clients) -> State:
    """Return a state for a download, with initial values; without moments and tensors that hooks keep."""
    return replace(clients.begin(range(clients.num_rows)).without_moments(), kept={})


@dataclass(kw_only=True)
class ClientGuard:
    """The models of a client's user beside the personal one, and which of them is served; nothing of it is sent.

    The state after each of the last tasks is in the folder of the run: the local model in :data:`LOCAL`, the newest
    download in :data:`SHARED`, and the choices in :data:`comingle.utils.records.SERVED`.

    Args:
        run: Folder of the run on the user's machine.
        recipe: The user's own recipe.
        clients: The client group of the user, which has no other.
        local: The same user as it trains alone.
        fingerprint: Digest of the federation's recipe, for checkpoints.
        shared: The newest download, as the state of a user who has trained nothing; None before the first one.
        choices: Choices of the last tasks, as from :func:`read_choices`.
    """

    run: Path
    recipe: Recipe
    clients: Clients
    local: Clients
    fingerprint: str
    shared: State | None = None
    choices: list[JsonObject] = field(default_factory=list)
    _start: State = field(init=False)

    def __post_init__(self) -> None:
        """Keep the local model before the first task."""
        self._start = self.local.state.copy(compact=True)

    @property
    def name(self) -> str:
        """Name of the user."""
        return self.clients.users[0].name

    @property
    def model(self) -> str:
        """Name of the candidate that is served: that of the last choice."""
        return self.choices[-1]["served"][self.name]["model"] if self.choices else PERSONAL

    @property
    def served_clients(self) -> Clients:
        """The client group whose model is served, unless it is the shared one."""
        return self.local if self.model == LOCAL else self.clients

    @property
    def served_rows(self) -> Tensor | None:
        """Parameters of the shared model ``(users, columns)`` if it is served."""
        return self.shared.rows if self.model == SHARED and self.shared is not None else None

    # ---------------------------------------------------------------- tasks

    def receive(self, download: Download) -> None:
        """Keep a download without training of the user's own, if it is a whole model."""
        if download.version > 0 and downloads_whole_model(self.clients):
            rows = shared_rows(self.clients, lambda: self.clients.receive(download))
            self.shared = replace(state_of_download(self.clients), rows=rows)

    def train(self, round_number: int, tick: Tick) -> None:
        """Take the local steps of a round on the local model.

        Args:
            round_number: The round, from 0.
            tick: Called after each local step.
        """
        self.local.steps.most_steps = self.clients.steps.most_steps
        train(self.local, [0], round_number, tick)

    def choose(self, task: int, rounds: int, *, done: int | None) -> None:
        """Compare the candidates, and serve the best from now on.

        Args:
            task: Number of the task.
            rounds: Number of rounds that are done, for the record.
            done: The same for :func:`candidates_of`; None if the personal model is that of the chosen round.
        """
        with settled(self.local), self._candidates(done) as candidates:
            served = compare_candidates(candidates, self.recipe)
        before = self.choices[-1]["served"].get(self.name, {}) if self.choices else {}
        for entry in served.values():
            if before.get("model") == entry["model"]:
                entry["since"], entry["since_round"] = before["since"], before["since_round"]
            else:
                entry["since"], entry["since_round"] = self.run.name, rounds
        self.choices.append({"task": task, "round": rounds, "served": served})

    def _candidates(self, done: int | None) -> AbstractContextManager[dict[str, Candidate]]:
        """Return the context of :func:`candidates_of`."""
        shared = None if self.shared is None else models_of_rows(self.clients, self.shared.rows)
        return candidates_of(self.clients, self.local, shared, done=done)

    def end(self, task: int, rounds: int, *, done: int | None) -> None:
        """Make the final local model, and compare the final models unless the task before has compared them.

        Args:
            task: Number of the task.
            rounds: Number of rounds that are done.
            done: As of :meth:`choose`.
        """
        if rounds > 0:
            finish(self.local)
            settle(self.local)
        was_compared = bool(self.choices) and self.choices[-1]["task"] == task - 1 > 0
        if not was_compared or self.local.method.client.finishing:
            self.choose(task, rounds, done=done)

    def final_choice(self, users: JsonMapping, *, done: int | None) -> JsonObject:
        """Return the last choice with the test measures of the served model, as :func:`choose_served` does.

        Args:
            users: Metrics of the personal model, by name of the user.
            done: As of :meth:`choose`.
        """
        served = {name: dict(entry) for name, entry in self.choices[-1]["served"].items()}
        with self._candidates(done) as candidates:
            add_test_scores(served, candidates, users)
        return served

    # ---------------------------------------------------------------- the folder

    def continue_from(self, earlier: Path, *, moments: bool) -> None:
        """Start from the local model of an earlier run, and from what was served at its end.

        Args:
            earlier: Folder of the earlier run on the user's machine.
            moments: Whether the optimisers' moments and step counts are copied too.

        Raises:
            RecipeError: A tensor has another shape.
            RunError: The stored state is damaged.
        """
        continue_local(self.local, earlier, moments=moments)
        self._start = self.local.state.copy(compact=True)
        self.choices = [{**choice, "task": 0, "round": 0} for choice in read_choices(earlier)[-1:]]

    def save(self, task: int) -> None:
        """Store the state after a task; call it before the checkpoint is written that completes the task.

        Args:
            task: Number of the task; 0 for the state before the first one.

        Raises:
            RunError: The disk cannot be written to.
        """
        progress = progress_of(task, self.fingerprint, [self.name])
        for name, state in ((LOCAL, self.local.state), (SHARED, self.shared)):
            if state is not None:
                save_checkpoint(self.run / name, self.local.model.layout, state, {}, progress)
        if self.choices:
            write_json(self.run / SERVED, {"choices": self.choices})

    def prune(self, task: int, keep: int) -> None:
        """Delete states and choices to which the client cannot revert any more.

        Args:
            task: Number of the last task.
            keep: Number of tasks that can be reverted.
        """
        for name in (LOCAL, SHARED):
            prune_checkpoints(self.run / name, keep + 1)  # the newest may be of a task that was not completed
        recent = [choice for choice in self.choices if choice["task"] > task - keep]
        older = self.choices[: len(self.choices) - len(recent)]
        self.choices = [*older[-1:], *recent]

    def restore(self, task: int) -> None:
        """Load the state after a task, and delete those of later tasks.

        Args:
            task: Number of the task; 0 for the state before the first one.

        Raises:
            RunError: The stored state is damaged.
        """
        layout = self.local.model.layout
        found: dict[str, Path] = {}  # checkpoints of this task
        for name in (LOCAL, SHARED):
            for folder in list_checkpoints(self.run / name):
                number = read_progress(folder).round
                if number > task:
                    shutil.rmtree(folder)
                elif number == task:
                    found[name] = folder
        if LOCAL in found:
            self.local.state, _no_server = load_checkpoint(found[LOCAL], layout, self._start, {})
        elif task == 0:
            self.local.state = self._start.copy()
        else:
            raise RunError(f"{self.run / LOCAL}: no state after task {task}; delete {self.run} to restart this run")
        self.local.update_masks()
        self.shared = None
        if SHARED in found:
            self.shared, _no_server = load_checkpoint(found[SHARED], layout, state_of_download(self.clients), {})
        choices = read_choices(self.run) or self.choices
        self.choices = [choice for choice in choices if choice["task"] <= task]
        if len(self.choices) < len(choices):
            write_json(self.run / SERVED, {"choices": self.choices})
