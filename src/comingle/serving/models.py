"""Users' models of a run, loaded for serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from comingle.config import Recipe, load_recipe
from comingle.models.base import Base
from comingle.models.hardware import free_bytes
from comingle.models.kernels import expert_mlp
from comingle.models.personal import PersonalModel
from comingle.runs.api import load_on_demand
from comingle.serving.rows import reorder_weights
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import DataError, RunError, did_you_mean, list_names
from comingle.utils.files import cache_folder
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_metrics


def find_run(folder: Path, method: str | None = None, seed: int | None = None) -> Path:
    """Return the folder of a run, given the folder of the run itself, of a comparison, or of a federation's user.

    A comparison contains several runs, a user's state folder a run for each federation, ``run-*/model``.

    Args:
        folder: The folder of the run, of the comparison or of the user's state.
        method: Method of the run to find in a comparison; None if the comparison has only one method.
        seed: Seed of the run to find in a comparison; None for the lowest.

    Raises:
        RunError: The comparison has several methods and ``method`` is None, no run has this method and seed, or the
            user has models of several federations.
    """
    is_run = (folder / "recipe.yaml").exists()
    if is_run or not folder.is_dir():
        return _single_run(folder, method, seed)
    run_folders = [metrics_file.parent for metrics_file in sorted(folder.glob("*/metrics.json"))]
    models = [metrics_file.parent for metrics_file in folder.glob("run-*/model/metrics.json")]
    if not run_folders and models:
        models.sort(key=lambda model: model.stat().st_mtime)
        if len(models) > 1:
            choices = list_names(map(str, reversed(models)))
            raise RunError(f"{folder}: has models of {len(models)} federations; name one, the latest first: {choices}")
        return _single_run(models[0], method, seed)
    if not run_folders:
        return folder  # the caller raises the error when it reads the folder
    runs_by_label: dict[str, dict[int, Path]] = {}  # folders by seed, by label, such as "fedavg"
    for run_folder in run_folders:
        recipe = load_recipe(run_folder)
        runs_by_label.setdefault(_label(recipe, run_folder), {})[recipe.seed] = run_folder
    labels = list(runs_by_label)
    if method is None and len(labels) > 1:
        raise RunError(f"{folder}: is a comparison; say which run with --method: {', '.join(labels)}")
    label = labels[0] if method is None else method
    if label not in runs_by_label:
        raise RunError(f"{folder}: no run of {label!r}; allowed: {', '.join(labels)}.{did_you_mean(label, labels)}")
    runs_by_seed = runs_by_label[label]
    if seed is None:
        return runs_by_seed[min(runs_by_seed)]
    if seed not in runs_by_seed:
        raise RunError(f"--seed: got {seed}; allowed for {label}: {', '.join(map(str, sorted(runs_by_seed)))}")
    return runs_by_seed[seed]


def _label(recipe: Recipe, run_folder: Path) -> str:
    """Return the value of the option ``--method`` that selects a run of a comparison.

    It is the method's name, such as "fedprox". A comparison of settings has folders such as "fedprox-mu=0.1-seed0";
    then it is "fedprox:mu=0.1".

    Args:
        recipe: The run's recipe.
        run_folder: The run's folder.
    """
    method = recipe.method.name
    method_and_settings, _, _seed = run_folder.name.rpartition("-seed")
    if method_and_settings.startswith(f"{method}-") and "=" in method_and_settings:
        settings = method_and_settings.removeprefix(f"{method}-")
        return f"{method}:{settings}"
    return method


def _single_run(folder: Path, method: str | None, seed: int | None) -> Path:
    """Return the folder of a single run.

    Raises:
        RunError: ``method`` or ``seed`` is given, but is not that of the run.
    """
    if method is None and seed is None:
        return folder
    recipe = load_recipe(folder)
    if method not in (None, recipe.method.name):
        raise RunError(f"{folder}: is a single run, with --method {recipe.method.name}; omit --method")
    if seed not in (None, recipe.seed):
        raise RunError(f"{folder}: is a single run, with --seed {recipe.seed}; omit --seed")
    return folder


DIALOGUE_KINDS = ("conversations", "questions")
"""Kinds of data in which messages are answered."""
MIN_COMPILED_PARAMETERS = 10_000_000
"""Number of parameters from which a base is worth compiled code, which takes seconds once per machine."""


class StoredModels(Mapping[str, PersonalModel]):
    """Users' models of a run, each read from disk on every access."""

    def __init__(self, names: list[str], read: Callable[[str], PersonalModel]) -> None:
        """Create the mapping without reading a model.

        Args:
            names: The users.
            read: Returns the model of a user.
        """
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> PersonalModel:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


@dataclass(frozen=True, kw_only=True)
class UserModels:
    """The users' models of a run.

    Args:
        models: Models by user, in memory or :class:`StoredModels`.
        answers: Whether they answer messages rather than continue a text: they were trained on conversations, or their
            base has a chat template.
    """

    models: Mapping[str, PersonalModel]
    answers: bool

    def cache_bytes(self, megabytes: int | None = None) -> int | None:
        """Return how many bytes of adapters an engine keeps in memory; None if the models are in memory anyway.

        Args:
            megabytes: The size in MB; None for a quarter of the free memory, at most 4 GB.
        """
        if not isinstance(self.models, StoredModels):
            return None
        if megabytes is not None:
            return megabytes * 10**6
        device = next(iter(self.models.values())).model.device
        return min(4 * 10**9, free_bytes(device) // 4)


def open_models(run: Path, method: str | None = None) -> UserModels:
    """Open the users' models of a finished run; they stay on disk if each can be read from there.

    Args:
        run: The folder of the run, or of a comparison.
        method: Method of the run in a comparison; None if the comparison has only one method.

    Raises:
        RunError: There is no finished run, or there are several and ``method`` is None.
        DataError: The models generate no text.
        BaseModelError: The base is missing or has changed.
    """
    run_folder = find_run(run, method)
    finished_run, is_stored = load_on_demand(run_folder, {})
    if not kind_of(finished_run.recipe).needs_base:
        raise DataError(f"{run_folder}: {finished_run.federation.clients.model.name} does not generate text")

    def read(name: str) -> PersonalModel:
        return cast(PersonalModel, finished_run.user(name))

    models: Mapping[str, PersonalModel]
    models = StoredModels(finished_run.users, read) if is_stored else {name: read(name) for name in finished_run.users}
    base = next(iter(models.values())).model.base  # the same for all users
    # C++ kernels take seconds to compile, which is too long for a small base.
    may_compile = finished_run.recipe.runtime.compile is not False
    is_large = base.model.num_parameters() >= MIN_COMPILED_PARAMETERS
    if may_compile and is_large and expert_mlp.fits(base.device, base.dtype):
        expert_mlp.enable(cache_folder() / "native")
    reorder_weights(base.model)  # column-major, which is faster for a few texts at a time
    return UserModels(models=models, answers=answers_messages(finished_run.recipe, base))


def answers_messages(recipe: Recipe, base: Base) -> bool:
    """Return whether models answer messages rather than continue a text.

    They do if they were trained on conversations, or if their base has a chat template.
    """
    return kind_of(recipe).name in DIALOGUE_KINDS or bool(getattr(base.tokenizer, "chat_template", None))


def users_in(run: Path) -> list[str]:
    """Return the users of a run, without loading their models.

    A run whose users are stored on disk has no list of all users. Then only the users in ``metrics.json`` are returned;
    they are a sample if the recipe sets ``evaluation.users``.

    Raises:
        RunError: The run is not finished.
    """
    evaluated_users = list(read_metrics(run)["users"])
    all_users = list(read_inputs(run).users)
    return all_users if all_users else evaluated_users
