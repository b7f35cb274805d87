"""Users' models of a run, loaded for serving."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from comingle.config import Recipe, load_recipe
from comingle.models import decoding
from comingle.models.adapted import AdaptedModel
from comingle.models.base import Base
from comingle.models.folders import digest_folder
from comingle.models.hardware import free_bytes, resolve_device
from comingle.models.kernels import expert_mlp
from comingle.models.loading import ALIASES, adapter_folder, load_base
from comingle.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_peft, weight_shape
from comingle.models.personal import PersonalModel
from comingle.models.quantised import PACKED
from comingle.runs.api import load_on_demand
from comingle.runs.given import base_settings
from comingle.serving.access import ApiError, Limits
from comingle.serving.engine import Engine, Piece, Request
from comingle.serving.rows import LoraModel, reorder_weights
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import DataError, RunError, did_you_mean, list_names, require_user
from comingle.utils.files import cache_folder, list_checkpoints
from comingle.utils.inputs import read_inputs
from comingle.utils.names import HUB_PREFIX
from comingle.utils.records import expand_home, read_metrics
from comingle.utils.trees import Tree


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
    """The models of a run's users, or of an adapter.

    Args:
        models: Models by user, in memory or :class:`StoredModels`.
        base: The base, which is the same for all users.
        answers: Whether they answer messages rather than continue a text: they were trained on conversations, or their
            base has a chat template.
        batch_key: Equal for models that can be in one batch.
    """

    models: Mapping[str, PersonalModel]
    base: Base
    answers: bool
    batch_key: object = field(default_factory=object)

    def cache_bytes(self, megabytes: int | None = None) -> int | None:
        """Return how many bytes of adapters an engine keeps in memory; None if the models are in memory anyway.

        Args:
            megabytes: The size in MB; None for a quarter of the free memory, at most 4 GB.
        """
        if not isinstance(self.models, StoredModels):
            return None
        if megabytes is not None:
            return megabytes * 10**6
        return min(4 * 10**9, free_bytes(self.base.device) // 4)


def open_models(run: Path, method: str | None = None, weights: str | None = None) -> UserModels:
    """Open the users' models of a finished run; they stay on disk if each can be read from there.

    Args:
        run: The folder of the run, or of a comparison.
        method: Method of the run in a comparison; None if the comparison has only one method.
        weights: "8bit" to pack the base's weights; None to pack only those of a run with ``quantise: 8bit``.

    Raises:
        RunError: There is no finished run, or there are several and ``method`` is None, or weights cannot be packed.
        DataError: The models generate no text.
        BaseModelError: The base is missing or has changed.
    """
    run_folder = find_run(run, method)
    opened = _open_run(run_folder, _packed_base(run_folder, weights))
    _prepare_base(opened.base, may_compile=load_recipe(run_folder).runtime.compile is not False)
    return opened


def _open_run(run_folder: Path, base: Base | None) -> UserModels:
    """Open the models of a run.

    Args:
        run_folder: The run folder.
        base: The base in memory, which the run must have; None to load the run's.
    """
    finished_run, is_stored = load_on_demand(run_folder, base)
    recipe, model = finished_run.recipe, finished_run.federation.clients.model
    if not kind_of(recipe).needs_base:
        raise DataError(f"{run_folder}: {model.name} does not generate text")

    has_equal_users = isinstance(model, AdaptedModel) and _has_equal_users(model)

    def read(name: str) -> PersonalModel:
        personal = cast(PersonalModel, finished_run.user(name))
        if has_equal_users:
            return replace(personal, row=0)  # the index of any user, of this or another run
        return personal

    models: Mapping[str, PersonalModel]
    models = StoredModels(finished_run.users, read) if is_stored else {name: read(name) for name in finished_run.users}
    run_base = cast(Base, cast(Any, model).base)
    opened = UserModels(models=models, base=run_base, answers=answers_messages(recipe, run_base))
    if has_equal_users:
        slots = tuple((slot.name, slot.shape, slot.roles) for slot in model.layout.slots)
        settings = (recipe.method.model_dump_json(), recipe.adapters.model_dump_json())
        return replace(opened, batch_key=(slots, settings, run_base.adds_bos))
    return opened


WEIGHTS = "8bit"
"""Value of ``--weights`` and of ``quantise`` with which the base's weights are packed."""


def _packed_base(run_folder: Path, weights: str | None) -> Base | None:
    """Return the base of a run with packed weights, if the operator or the run asks for 8 bits; else None.

    Args:
        run_folder: The run folder.
        weights: "8bit", or None for the weights of the run.

    Raises:
        RunError: The operator asks for packed weights, and they are not supported here.
    """
    if weights not in (None, WEIGHTS):
        raise RunError(f"--weights: got {weights!r}; allowed: {WEIGHTS}")
    if weights is None and not (run_folder / "recipe.yaml").is_file():
        return None  # the caller raises the error when it reads the folder
    recipe = load_recipe(run_folder)
    if weights is None and recipe.quantise != WEIGHTS:
        return None
    runtime = recipe.runtime
    is_packable = kind_of(recipe).needs_base and recipe.quantise in ("none", WEIGHTS)
    may_compile = resolve_device(runtime.device).type == "cpu" and runtime.compile is not False
    if is_packable and may_compile and expert_mlp.enable(cache_folder() / "native"):
        settings: dict[str, Any] = {**base_settings(recipe)}
        return load_base(recipe.base, quantise=PACKED, **settings)
    if weights is None:
        return None
    raise RunError(
        f"--weights: got {weights} for {run_folder}; allowed: on a CPU with a C++ compiler, for runs of language "
        "models without quantise: 4bit and without runtime.compile: false. Omit --weights"
    )


def _has_equal_users(model: AdaptedModel) -> bool:
    """Return whether all users of a model have the same experts, rank and scale."""
    by_user = (model.adapters.present, model.ranks, model.scales)
    return all(bool((values == values[:1]).all()) for values in by_user)


def _prepare_base(base: Base, *, may_compile: bool) -> None:
    """Make a base ready for batches of few rows.

    Args:
        base: The base, whose weights are reordered in place.
        may_compile: Whether to use C++ kernels. They take seconds to compile, which is too long for a small base.
    """
    if may_compile and enable_native_passes(base):
        expert_mlp.enable(cache_folder() / "native")
    reorder_weights(base.model)  # column-major, which is faster for a few texts at a time


def enable_native_passes(base: Base) -> bool:
    """Generate text with native passes from now on, if the base is large or packed; return whether this succeeded.

    Args:
        base: The base of all texts.
    """
    is_large = base.model.num_parameters() >= MIN_COMPILED_PARAMETERS
    if not (is_large or base.quantised == PACKED) or not expert_mlp.fits(base.device, base.dtype):
        return False
    return decoding.enable(cache_folder() / "native")


# ------------------------------------------------------------ adapters of other tools


def _open_adapter(folder: Path, name: str, base: Base) -> UserModels:
    """Open a PEFT adapter, from an export or from another tool.

    Args:
        folder: Its folder.
        name: Name of its model.
        base: The base, which the adapter must have.

    Raises:
        ComingleError: It is no LoRA of the base.
    """
    config = _adapter_config(folder)
    base_name = str(config.get("base_model_name_or_path") or "")
    if base_name and not _is_base(base_name, base):
        raise RunError(
            f"{folder}: got an adapter of the base {base_name!r}; allowed here: adapters of {base.name!r}"
            f" (base_model_name_or_path in {ADAPTER_CONFIG})"
        )
    prefix = f"{base.model.base_model_prefix}."
    network: Any = base.model.base_model

    def read(_name: str) -> PersonalModel:
        adapter = read_peft(folder)
        tensors = Tree()
        for linear_name, (a, b) in sorted(adapter.factors.items()):
            try:
                linear = network.get_submodule(linear_name.removeprefix(prefix))
                fits = weight_shape(linear) == (b.shape[0], a.shape[1])
            except AttributeError:
                fits = False
            if not fits or not linear_name.startswith(prefix):
                got = f"{linear_name!r} with {a.shape[1]} inputs and {b.shape[0]} outputs"
                raise RunError(f"{folder}: got {got}; allowed: linears of the layers of {base.name!r}")
            own_name = linear_name.removeprefix(prefix)
            tensors[f"{own_name}.a"] = a.unsqueeze(0).to(base.device, base.dtype)
            tensors[f"{own_name}.b"] = (adapter.scale * b).mT.contiguous().unsqueeze(0).to(base.device, base.dtype)
        return PersonalModel(name=name, model=cast(Any, LoraModel(base=base)), tensors=tensors, row=0)

    shapes = tuple((key, tuple(t.shape)) for key, t in read(name).tensors.items())
    answers = bool(getattr(base.tokenizer, "chat_template", None))
    return UserModels(models=StoredModels([name], read), base=base, answers=answers, batch_key=shapes)


def _adapter_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a PEFT adapter.

    Raises:
        RunError: It cannot be read.
    """
    try:
        return dict(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder / ADAPTER_CONFIG}: cannot be read: {type(error).__name__}") from None


def _is_base(name: str, base: Base) -> bool:
    """Return whether a name in an adapter's configuration means a base: the same name, or a folder with its weights.

    Args:
        name: Name on the Hub, alias, or path.
        base: The base.
    """
    alias = ALIASES.get(base.name)
    own_path = expand_home(base.name)
    if name == base.name or (alias is not None and name == alias.repository):
        return True
    path = expand_home(name)
    if path.is_dir():
        return (path / "config.json").is_file() and digest_folder(path) == base.digest
    return own_path.exists() and path.name == own_path.resolve().name  # an export on another machine


# ------------------------------------------------------------ several runs and adapters


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run, a comparison, a user's state of a federation, or a PEFT adapter.

    Args:
        path: Its folder.
        name: Name of its model, or of its users' models as ``NAME/USER``; None for the users' own names.
        method: Method of the run in a comparison.
    """

    path: Path
    name: str | None = None
    method: str | None = None

    @classmethod
    def of(cls, text: str, method: str | None = None) -> Source:
        """Return the source of an argument ``PATH`` or ``NAME=PATH``; ``hub:OWNER/NAME`` is a PEFT adapter on the hub.

        Raises:
            BaseModelError: The hub cannot be reached, or has no such adapter.
        """
        before, equals, after = text.partition("=")
        name, path = (before, after) if equals and not Path(text).exists() else (None, text)
        if path.startswith(HUB_PREFIX):
            on_hub = path.removeprefix(HUB_PREFIX)
            _owner, _slash, adapter_name = on_hub.rpartition("/")
            return cls(path=adapter_folder(on_hub, "serve"), name=name or adapter_name, method=method)
        return cls(path=Path(path), name=name, method=method)

    @property
    def is_adapter(self) -> bool:
        """True for a PEFT adapter."""
        return (self.path / ADAPTER_CONFIG).is_file()

    @property
    def run_folder(self) -> Path:
        """The folder of the run, which changes when a client of a federation has taken part in a newer one.

        Raises:
            RunError: There is no such folder, or it has several runs.
        """
        if not self.path.is_dir():
            allowed = "a run, a user's state folder of a federation, or a PEFT adapter"
            raise RunError(f"{self.path}: no such folder; allowed: {allowed}")
        return find_run(self.path, self.method)

    @property
    def version(self) -> tuple[object, ...]:
        """Times and numbers of files, which change when there is a newer checkpoint or adapter."""
        if self.is_adapter:
            files = [self.path / ADAPTER_CONFIG, self.path / ADAPTER_WEIGHTS]
        else:
            run_folder = self.run_folder
            files = [run_folder / "metrics.json", *list_checkpoints(run_folder)[-1:]]
        versions: list[object] = []
        for file in files:
            with suppress(FileNotFoundError):
                versions += [str(file), file.stat().st_mtime_ns, file.stat().st_ino]
        return tuple(versions)

    def names(self) -> list[str]:
        """Return the names of the models, without loading them."""
        if self.is_adapter:
            return [self._name_of_adapter]
        users = users_in(self.run_folder)
        return [self._served_name(user, len(users)) for user in users]

    def open(self, base: Base | None) -> UserModels:
        """Open the models.

        Args:
            base: The base in memory, which they must have; None to load theirs.

        Raises:
            ComingleError: They cannot be opened, or have another base.
        """
        if self.is_adapter:
            if base is None:
                base = load_base(str(_adapter_config(self.path).get("base_model_name_or_path") or ""))
            return _open_adapter(self.path, self._name_of_adapter, base)
        opened = _open_run(self.run_folder, base)
        if self.name is None:
            return opened
        names = {self._served_name(user, len(opened.models)): user for user in opened.models}
        if isinstance(opened.models, StoredModels):
            users = opened.models
            models = StoredModels(list(names), lambda name: replace(users[names[name]], name=name))
            return replace(opened, models=models)
        return replace(opened, models={name: replace(opened.models[user], name=name) for name, user in names.items()})

    @property
    def _name_of_adapter(self) -> str:
        return self.path.resolve().name if self.name is None else self.name

    def _served_name(self, user: str, num_users: int) -> str:
        """Return the name of a user's model."""
        if self.name is None:
            return user
        return self.name if num_users == 1 else f"{self.name}/{user}"


def names_of(sources: Sequence[Source]) -> list[str]:
    """Return the names of all models of several sources.

    Raises:
        RunError: Two have the same name.
    """
    source_of: dict[str, Source] = {}
    for source in sources:
        for name in source.names():
            if name in source_of:
                raise _taken(name, source, source_of[name])
            source_of[name] = source
    return list(source_of)


def _taken(name: str, source: Source, other: Source) -> RunError:
    """Return the error for a name that two sources have."""
    return RunError(f"{source.path}: has {name!r}, as {other.path}; give another name with NAME={source.path}")


class EnginePool:
    """Engines of models with tensors of different shapes over one base, which take turns.

    It has the methods of :class:`Engine`. Users of one engine share its batches.
    """

    def __init__(self, limits: Limits, *, cache_bytes: int | None) -> None:
        """Create a pool without models.

        Args:
            limits: Limits of the server, such as the number of texts that are generated at the same time.
            cache_bytes: Size of all adapters in memory that stay on disk, besides those of rows; None for the default.
        """
        self._limits, self._cache_bytes = limits, cache_bytes
        self.waiting: deque[Request] = deque()
        self._engines: dict[object, Engine] = {}  # by the key of their models
        self._retired: list[Engine] = []  # without users, until their answers are complete
        self._opened: dict[Source, UserModels] = {}
        self._key_of: dict[str, object] = {}  # the engine's key, by user
        self._answers: dict[str, bool] = {}

    # ------------------------------------------------------------ models

    @property
    def models(self) -> Collection[str]:
        """Names of the models."""
        return self._key_of.keys()

    @property
    def sources(self) -> Collection[Source]:
        """The sources of the models."""
        return self._opened.keys()

    def source_of(self, name: str) -> Source | None:
        """Return the source with this name, or with a model of this name; None if there is none."""
        for source, opened in list(self._opened.items()):
            if name == source.name or name in opened.models:
                return source
        return None

    @property
    def base(self) -> Base | None:
        """The base of all models; None without models."""
        return next((engine.base for engine in self._engines.values()), None)

    def answers(self, name: str) -> bool:
        """Return whether a model answers messages rather than continues a text."""
        return self._answers.get(name, False)

    def _check_names(self, source: Source, opened: UserModels) -> None:
        """Raise an error if another source has one of the names.

        Args:
            source: The source of models to add.
            opened: Its models.
        """
        for other, others in self._opened.items():
            for name in opened.models:
                if other != source and name in others.models:
                    raise _taken(name, source, other)

    def add(self, source: Source, opened: UserModels) -> None:
        """Add models, or replace those of the same source. Not to be called during :meth:`step`.

        Texts that are being generated are completed with the old models.

        Args:
            source: The source.
            opened: Its models.

        Raises:
            RunError: Another source has a model of this name.
        """
        self._check_names(source, opened)
        if source in self._opened:
            self.remove(source)
        engine = self._engines.get(opened.batch_key)
        if engine is None:
            engine = self._engines[opened.batch_key] = Engine(
                opened.models,
                rows=self._limits.rows,
                cache_bytes=opened.cache_bytes(),
                prompt_tokens=self._limits.prompt_tokens,
                prefix_bytes=self._limits.prefix_bytes,
            )
        else:
            engine.models.maps.append(cast(Any, opened.models))
        self._opened[source] = opened
        self._key_of.update(dict.fromkeys(opened.models, opened.batch_key))
        self._answers.update(dict.fromkeys(opened.models, opened.answers))
        self._share_cache()

    def remove(self, source: Source) -> None:
        """Remove a source's models; texts that are being generated are completed. Not to be called during a step."""
        opened = self._opened.pop(source)
        engine = self._engines[opened.batch_key]
        engine.models.maps = [models for models in engine.models.maps if models is not opened.models]
        for request in [request for request in engine.waiting if request.name in opened.models]:
            engine.waiting.remove(request)
            self.waiting.appendleft(request)
        for name in opened.models:
            engine.forget(name)
            self._key_of.pop(name)
            self._answers.pop(name)
        if not engine.models:
            self._retired.append(self._engines.pop(opened.batch_key))
        self._share_cache()

    def _share_cache(self) -> None:
        """Divide the memory for adapters that stay on disk, and for prefixes of prompts, among the engines."""
        for engine in self._engines.values():
            engine.prefixes.max_bytes = self._limits.prefix_bytes // len(self._engines)
        caches = [engine.row_adapters.user_tensors for engine in self._engines.values()]
        stored = [cache for cache in caches if cache.max_bytes is not None]
        for cache in stored:
            total = self._cache_bytes
            if total is None:
                total = max(opened.cache_bytes() or 0 for opened in self._opened.values())
            cache.max_bytes = total // len(stored)

    def engine_of(self, name: str) -> Engine:
        """Return the engine of a user's model.

        Raises:
            DataError: There is no such user.
        """
        require_user(name, self._key_of)
        return self._engines[self._key_of[name]]

    # ------------------------------------------------------------ what an engine does

    @property
    def _all_engines(self) -> list[Engine]:
        return [*self._engines.values(), *self._retired]

    @property
    def num_running(self) -> int:
        """Number of texts that are being generated, or about to be."""
        return sum(engine.num_running + len(engine.waiting) for engine in self._all_engines)

    @property
    def num_free_rows(self) -> int:
        """Number of further texts that could be generated."""
        return max(0, self._limits.rows - self.num_running)

    @property
    def num_prefix_bytes(self) -> int:
        """Size of the caches of prompts' prefixes."""
        return sum(engine.num_prefix_bytes for engine in self._all_engines)

    @property
    def num_adapter_bytes(self) -> int:
        """Size of the adapters in memory that may be evicted, besides those of rows."""
        return sum(engine.num_adapter_bytes for engine in self._all_engines)

    @property
    def busy(self) -> bool:
        """True if any text is being generated or waits."""
        return bool(self.waiting) or any(engine.busy for engine in self._all_engines)

    def step(self) -> None:
        """Do one step of every engine that has texts, after giving them waiting requests."""
        self._distribute()
        for engine in self._all_engines:
            if engine.busy:
                engine.step()
                if not engine.busy and len(self._engines) > 1:
                    engine.release()  # others need the memory
        self._retired = [engine for engine in self._retired if engine.busy]

    def _distribute(self) -> None:
        """Give waiting requests to their engines while rows are free, and read the adapters of the next ones ahead."""
        ahead = 0
        for request in tuple(self.waiting):
            if request.name not in self._key_of:  # unloaded meanwhile
                self.waiting.remove(request)
                request.on_piece(Piece(text="", error=ApiError(404, f"the model {request.name!r} was unloaded")))
                continue
            engine = self.engine_of(request.name)
            if self.num_free_rows and engine.num_free_rows > len(engine.waiting):
                self.waiting.remove(request)
                engine.waiting.append(request)
                continue
            engine.row_adapters.user_tensors.prefetch([request.name])
            ahead += 1
            if ahead == self._limits.rows:
                return

    def fail_all(self, error: Exception) -> None:
        """End all texts and waiting requests with an error."""
        for request in self.waiting:
            request.on_piece(Piece(text="", error=error))
        self.waiting.clear()
        for engine in self._all_engines:
            engine.fail_all(error)


def open_pool(
    sources: Sequence[Source], limits: Limits, *, megabytes: int | None = None, weights: str | None = None
) -> EnginePool:
    """Open the models of several sources on one base.

    Args:
        sources: The sources; the first one decides which base it is.
        limits: Limits of the server.
        megabytes: Size of the adapters in memory in MB; None for the default.
        weights: As in :func:`open_models`, for the first source if that is a run.

    Raises:
        ComingleError: A source cannot be opened or has another base, or two have a model of the same name.
    """
    pool = EnginePool(limits, cache_bytes=None if megabytes is None else megabytes * 10**6)
    for source in sources:
        base = pool.base
        if base is None and not source.is_adapter:
            base = _packed_base(source.run_folder, weights)
        opened = source.open(base)
        if pool.base is None:
            recipe = None if source.is_adapter else load_recipe(source.run_folder)
            _prepare_base(opened.base, may_compile=recipe is None or recipe.runtime.compile is not False)
        pool.add(source, opened)
    return pool


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
