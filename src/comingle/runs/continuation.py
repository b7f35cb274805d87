"""Start a run from the users' models at the end of another run (``continue_from``).

Users of both runs keep their tensors, and the server keeps its state. New users have initial local tensors and download
the shared ones. Users who are not in the new recipe are dropped.

With ``evaluation.model: local`` a run does not exchange the tensors of its last round. Users then keep their
own tensors, and their next upload includes that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from comingle.config import Recipe, load_recipe
from comingle.config.settings import MEMORY, TrainingSection
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import Progress, digest_of_checkpoint, read_progress, read_state, rows_of_names
from comingle.training.server import VERSION
from comingle.training.state import STEP_STATE
from comingle.utils.errors import RecipeError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import Inputs, read_inputs
from comingle.utils.records import JsonObject, is_server, read_events
from comingle.utils.trees import Tree

WHERE = "continue_from.run"

_ALLOWED = "allowed: the ranks, experts and method settings of the earlier run (continue_from)"
"""End of errors of tensors that do not fit."""


def start_from_run(federation: InProcess, recipe: Recipe, inputs: Inputs) -> JsonObject:
    """Copy the last state of the run in ``continue_from`` to a federation before its first round.

    Moments and step counts are copied only with ``continue_from.moments``.

    Args:
        federation: The federation, changed in place. In a run of several processes, the shard of this process.
        recipe: The recipe of the new run.
        inputs: Record of the base and the data that the new run reads.

    Returns:
        Changes since the earlier run, for the start event: its folder ``run``, the digest of its
        ``checkpoint``, its number of ``rounds``, and the names of the users who are in both runs (``kept``), in both
        with changed data (``changed``), only in this one (``new``) and only in the earlier one (``dropped``).
        ``ancestors`` has folder, checkpoint and rounds of the runs that the earlier one continued, oldest first.

    Raises:
        RecipeError: The recipe cannot continue the run, because it has another method, for example.
        RunError: The run has no checkpoint, or it is damaged.
    """
    section = recipe.continue_from
    assert section is not None
    run, clients = Path(section.run), federation.clients
    checkpoint, progress = _newest_checkpoint(run)
    earlier_inputs, earlier_recipe = read_inputs(run), load_recipe(run)
    _check_same_model(run, recipe, earlier_recipe, inputs, earlier_inputs)
    _check_no_privacy_budget(federation, earlier_recipe)
    if section.moments:
        _check_constant_rates(recipe.training)

    users_state, server_state = read_state(checkpoint, progress, clients.model.layout)
    earlier_names = progress.trainers
    new_tensors = clients.state.tensors()
    not_copied = {"versions"} if section.moments else {"versions", *STEP_STATE}
    for name, old_tensor in users_state.items():
        where = f"{checkpoint}: tensor {name!r}"
        if name in not_copied:
            continue
        if name not in new_tensors:  # other settings of the method keep other tensors
            raise RecipeError(f"{where} is not kept with this recipe; {_ALLOWED}")
        copy_rows(old_tensor, new_tensors[name], earlier_names, clients.names, where)
    # Versions count from 0 again: users without the newest shared tensors have -1 and download them.
    was_newest = users_state["versions"] == int(server_state[VERSION])
    new_tensors["versions"].fill_(-1)
    versions = was_newest.long() - 1  # 0 for users with the newest shared tensors, else -1
    copy_rows(versions, new_tensors["versions"], earlier_names, clients.names, "versions")
    clients.update_masks()  # LoRA ranks, which methods may change in training, are in the state
    _restore_server(federation, server_state, earlier_names, checkpoint)

    names = clients.population_names
    old_users, new_users = set(earlier_names), set(names)
    kept = [name for name in names if name in old_users]
    return {
        "run": str(run.resolve()),
        "checkpoint": digest_of_checkpoint(checkpoint),
        "rounds": progress.round,
        "ancestors": _ancestors(run),
        "kept": kept,
        "changed": [name for name in kept if _has_changed_data(name, inputs, earlier_inputs)],
        "new": [name for name in names if name not in old_users],
        "dropped": [name for name in earlier_names if name not in new_users],
    }


def _newest_checkpoint(run: Path) -> tuple[Path, Progress]:
    """Return the newest checkpoint of a run and its progress.

    Raises:
        RecipeError: The folder is not a run that can be continued.
    """
    if is_server(run):
        raise RecipeError(f"{WHERE}: got {run}, a federation's server; allowed: a folder of `comingle run`")
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise RecipeError(f"{WHERE}: got {run}, which has no checkpoint; allowed: the folder of a run that has trained")
    progress = read_progress(checkpoints[-1])
    if progress.population:
        raise RecipeError(f"{WHERE}: got {run}, a run with runtime.store: disk; allowed: a run with users in memory")
    return checkpoints[-1], progress


def _check_same_model(run: Path, recipe: Recipe, earlier: Recipe, inputs: Inputs, earlier_inputs: Inputs) -> None:
    """Check that the new run trains the same kind of model: the same method and base.

    Raises:
        RecipeError: One of them differs, or users of the new run are not in memory.
    """
    if recipe.runtime.store != MEMORY:
        raise RecipeError(f"continue_from: got runtime.store: {recipe.runtime.store}; allowed: {MEMORY}")
    compared = {
        "method": (recipe.method.name, earlier.method.name),
        "data.kind": (inputs.kind, earlier_inputs.kind),
        "base": (inputs.base, earlier_inputs.base),
    }
    for key, (value, earlier_value) in compared.items():
        if value != earlier_value:
            raise RecipeError(f"{key}: got {value!r}; allowed: as in {run}, {earlier_value!r} (continue_from)")


def _check_no_privacy_budget(federation: InProcess, earlier: Recipe) -> None:
    """Refuse differential privacy, whose budget would have to include what the earlier run has spent.

    Raises:
        RecipeError: One of the two runs has it.
    """
    has_budget = {
        "privacy.mechanism": bool(federation.server.mechanisms.state),
        "privacy.mechanism of the earlier run": earlier.privacy is not None and earlier.privacy.mechanism != "none",
    }
    for key, is_private in has_budget.items():
        if is_private:
            raise RecipeError(f"{key}: got differential privacy; allowed with continue_from: none")


def _check_constant_rates(training: TrainingSection) -> None:
    """Refuse to continue the step counts of a cosine schedule, which ended with the earlier run.

    Raises:
        RecipeError: A schedule is not constant.
    """
    for key, optimizer in (("experts", training.experts), ("router", training.router)):
        if optimizer.schedule != "constant":
            raise RecipeError(
                f"training.{key}.schedule: got {optimizer.schedule!r} with continue_from.moments: true; allowed: "
                "constant, or continue_from.moments: false, which begins the schedule again"
            )


def copy_rows(old: Tensor, new: Tensor, old_names: Sequence[str], new_names: Sequence[str], where: str) -> None:
    """Copy the rows of those users that two tensors have in common.

    A method may train several copies of each user's model. Then row ``copy * users + i`` belongs to one copy of user
    ``i``; both tensors must have the same number of copies per user.

    Args:
        old: Tensor to copy from.
        new: Tensor to copy to.
        old_names: Names of the users of ``old``, in order.
        new_names: Names of the users of ``new``, in order.
        where: Name of the tensor, for the error.

    Raises:
        RecipeError: Rows have different shapes, for example as LoRA ranks differ.
    """
    num_copies = len(new) // len(new_names)
    if len(old) != num_copies * len(old_names) or old.shape[1:] != new.shape[1:]:
        raise RecipeError(
            f"{where} has shape {tuple(old.shape)} for {len(old_names)} users, here {tuple(new.shape)} for "
            f"{len(new_names)}; {_ALLOWED}"
        )
    old_users = set(old_names)
    common_names = [name for name in new_names if name in old_users]
    old_rows = rows_of_names(old_names, common_names, num_copies)
    new[rows_of_names(new_names, common_names, num_copies)] = old[old_rows].to(new.device, new.dtype)


def _restore_server(federation: InProcess, state: Tree, earlier_names: Sequence[str], checkpoint: Path) -> None:
    """Give the server the tensors that its method kept in the earlier run; new users have initial rows.

    Args:
        federation: The federation, changed in place.
        state: State of the earlier run's server.
        earlier_names: Names of the earlier run's users, in the order of their rows.
        checkpoint: Checkpoint with this state, for the error.

    Raises:
        RecipeError: A tensor has another shape.
    """
    server = federation.server
    kept: dict[str, Tensor] = {}
    for name, initial in server.kept.items():
        where = f"{checkpoint}: tensor {'server/' + name!r}"
        if name not in state:
            raise RecipeError(f"{where} is missing; {_ALLOWED}")
        if name in server.by_user:
            kept[name] = initial.clone()
            copy_rows(state[name], kept[name], earlier_names, server.users, where)
            continue
        if state[name].shape != initial.shape:
            raise RecipeError(f"{where} has shape {tuple(state[name].shape)}, here {tuple(initial.shape)}; {_ALLOWED}")
        kept[name] = state[name].to(initial.device, initial.dtype)
    server.kept = kept


def _ancestors(run: Path) -> list[JsonObject]:
    """Return folder, checkpoint and rounds of each run that a run continues, directly or indirectly, oldest first."""
    for event in read_events(run):
        if event["event"] == "start" and "continues" in event:
            parent = event["continues"]
            return [*parent["ancestors"], {key: parent[key] for key in ("run", "checkpoint", "rounds")}]
    return []


def _has_changed_data(name: str, inputs: Inputs, earlier_inputs: Inputs) -> bool:
    """Return whether a user's data differs between two runs."""
    if name not in inputs.users or name not in earlier_inputs.users:  # pooled data has one trainer for all users
        return inputs.users != earlier_inputs.users
    return inputs.users[name].digests != earlier_inputs.users[name].digests
