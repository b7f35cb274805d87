"""Serve every user the best of several models by the loss on its own validation data (``evaluation.guard``).

The candidates are

- ``personal``: the model of the run's method;
- ``local``: the same tensors, trained by the user alone with the same settings, in as many rounds. Nothing is uploaded
  or averaged (:meth:`comingle.methods.base.Method.alone`), and no round is selected;
- ``shared``: the downloaded tensors without training of the user's own, if they are a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import MEMORY, EvaluationSection
from comingle.methods.base import Method, uses_downloads
from comingle.models.routers import ZERO_SHARE_LOGIT
from comingle.reports.comparisons import interval
from comingle.training.backends.local import InProcess, federate
from comingle.training.checkpoints import Clock, progress_of, read_progress, read_state
from comingle.training.client import Clients, finetuned, finish, settle, train
from comingle.training.cohort import Models
from comingle.training.evaluation import measured
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, kind_of
from comingle.training.settings import participants
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import JsonMapping, JsonObject, read_metrics
from comingle.utils.trees import CLIENT_ROUTER

PERSONAL, LOCAL, SHARED = "personal", "local", "shared"
"""Names of the candidates; ``LOCAL`` is also the folder, in a run folder, of the checkpoints of local models."""


def is_guarded(evaluation: EvaluationSection, method: Method) -> bool:
    """Return whether a run has a guard: it also trains each user alone, and serves the better of both models.

    The recipe asks for it by ``evaluation.guard: local``. Methods are exempt if they train nothing, share nothing (the
    run's models are then trained alone already), or train a single model on the data of all users.

    Args:
        evaluation: Section ``evaluation`` of the recipe.
        method: The method of the run.
    """
    return evaluation.guard == LOCAL and method.trains and bool(method.shared) and not method.placement.pooled


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
    # Only uploads are protected, and a user alone uploads nothing.
    plan = replace(plan, method=plan.method.alone(), privacy=None, aggregation=None, sums=None, users=())
    plan = plan.updated("evaluation", select="last")
    names = federation.clients.population_names
    return federate(run_data.kind.clients(recipe.for_users(names), run_data, plan))


def continue_local(local: InProcess, recipe: Recipe) -> None:
    """Copy the local models of the run in ``continue_from``, if it has any, to users who train alone, by name.

    Args:
        local: The users as they train alone, before their first round; changed in place.
        recipe: The recipe of the run.

    Raises:
        RecipeError: A tensor has another shape.
        RunError: The checkpoint is damaged.
    """
    from comingle.runs.continuation import copy_users_state

    section, clients = recipe.continue_from, local.clients
    checkpoints = [] if section is None else list_checkpoints(Path(section.run) / LOCAL)
    if section is None or not checkpoints:
        return
    progress = read_progress(checkpoints[-1])
    users_state, _server_state = read_state(checkpoints[-1], progress, clients.model.layout)
    copy_users_state(clients, users_state, progress.trainers, checkpoints[-1], moments=section.moments)


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


def has_shared_model(federation: InProcess) -> bool:
    """Return whether the tensors that users download are a whole model: no user trains others, or it can do without."""
    clients, method = federation.clients, federation.clients.method
    if federation.server.version == 0 or not clients.shares or method.server.peer_to_peer:
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
    clients, state, clock = federation.clients, federation.clients.state, federation.clock
    try:
        clients.state, federation.clock = clients.begin(range(clients.num_rows)), Clock()  # its bytes are not counted
        federation.download(range(len(clients.trainers)))
        rows = without_own_models(clients, clients.state.rows)
    finally:
        clients.state, federation.clock = state, clock
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


def candidates_of(federation: InProcess, local: InProcess) -> dict[str, Candidate]:
    """Return the candidates by name, in the order in which equal ones are preferred.

    Args:
        federation: The federation after its last round.
        local: The users as they have trained alone.
    """
    found: dict[str, Candidate] = {}
    for name, each in ((PERSONAL, federation), (LOCAL, local)):
        found[name] = Candidate(clients=each.clients, models=each.clients.models, rows=each.clients.row_of)
    if has_shared_model(federation):
        clients = federation.clients
        # The first copy of a user's model is the downloaded one.
        found[SHARED] = Candidate(clients=clients, models=shared_models(federation), rows=range(len(clients.users)))
    return found


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
    clients = federation.clients
    numbers = range(len(clients.users))
    with ExitStack() as tuned:
        for each in (federation.clients, local.clients):  # for methods that fine-tune before they are scored
            tuned.enter_context(finetuned(each, trainers=numbers))
        candidates = candidates_of(federation, local)
        validated = [number for number in numbers if len(clients.users[number].valid)]
        losses = {name: _losses_by_sequence(recipe, each, validated) for name, each in candidates.items()}
        served: JsonObject = {clients.users[number].name: {"model": PERSONAL, "candidates": {}} for number in numbers}
        for position, number in enumerate(validated):
            by_candidate = _compare({name: of_users[position] for name, of_users in losses.items()})
            best = min(by_candidate, key=lambda name: by_candidate[name]["valid_loss"])  # the first of equal ones
            served[clients.users[number].name] = {"model": best, "candidates": by_candidate}
        for name, candidate in candidates.items():
            scored = [user for user in clients.scored if served[clients.users[user].name]["model"] == name]
            if name == PERSONAL:
                tests = [test_scores_of(users[clients.users[user].name]) for user in scored]
            else:
                tests = _score_tests(candidate, scored)
            for number, test in zip(scored, tests, strict=True):
                served[clients.users[number].name].update(test)
    for name, entry in served.items():
        before = earlier.get(name, {})
        entry["since"] = before["since"] if before.get("model") == entry["model"] else since
    return served


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
