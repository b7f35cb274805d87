"""Experiments of papers as YAML, and the sources of their data.

A recipe is merged from overlays, which are partial recipes: study, data set, column, scale, row. A later one wins key
by key. The paper's numbers are kept as printed, ``46.36 (0.16)``, or per seed, ``7.9 / 1.8 / 0.80``.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from comingle.config.files import read_yaml
from comingle.config.hints import first_problem
from comingle.config.settings import Section
from comingle.utils.errors import RecipeError, did_you_mean
from comingle.utils.names import FOLDER_VARIABLE
from comingle.utils.records import expand_home
from comingle_papers.recipes import published_recipes
from comingle_papers.tasks.images import has_images

Model = TypeVar("Model", bound=BaseModel)

STUDY = "study"
_NO_EXPERIMENT = (STUDY, "theory")
"""Names of YAML files in a paper's folder that are no tables and no figures."""
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_PRINTED = re.compile(rf"({_NUMBER})(?: \(({_NUMBER})\))?|{_NUMBER}(?: / {_NUMBER})+")
"""A number with or without its deviation, ``46.36 (0.16)``, or a number per seed, ``7.9 / 1.8 / 0.80``."""


class Overlay(Section):
    """A partial recipe, with settings for those methods that accept them."""

    recipe: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class DataSet(Section):
    """A data set: its source on the hub and its place in a local folder, both as a recipe's section ``data``.

    ``tokens`` are the paper's numbers, one per user for each split; conversations have none. A data set with a ``task``
    (a recipe's ``data.task``) or ``questions`` (``data.questions``) has neither users, sources nor tokens. A task's
    ``images`` are in the local folder's ``images`` or on the hub.
    """

    label: str
    users: list[str] = Field(default_factory=list)
    hub: dict[str, Any] = Field(default_factory=dict)
    local: dict[str, Any] = Field(default_factory=dict)
    tokens: dict[Literal["train", "valid", "test"], list[int]] = Field(default_factory=dict)
    task: dict[str, Any] | None = None
    images: str = ""
    questions: dict[str, Any] | None = None
    note: str = ""

    @model_validator(mode="after")
    def _check_one_kind(self) -> DataSet:
        """Check that a data set has the keys of one kind: text, a task (of images or synthetic), or questions.

        Text needs ``users``, ``hub``, ``local`` and ``tokens``, conversations the same without ``tokens``. The other
        kinds have their own key alone; questions also need a name.

        Raises:
            ValueError: Keys are missing or belong to several kinds, or the questions have no name.
        """
        has_tokens = bool(self.tokens) or self.has_conversations  # conversations need none
        text_values = [self.users, self.hub, self.local, has_tokens]
        has_task, has_questions = self.task is not None, self.questions is not None
        if has_task and has_questions:
            is_one_kind = False
        elif has_task or has_questions:
            is_one_kind = not any(text_values)
        else:
            is_one_kind = all(text_values)
        if not is_one_kind:
            raise ValueError("give users, hub, local and tokens of text, or a task alone, or questions alone")
        if self.questions is not None and "name" not in self.questions:
            raise ValueError("questions without a name; give one, as {name: xnli}")
        return self

    @property
    def has_conversations(self) -> bool:
        """True if users have conversations instead of text."""
        return self.hub.get("kind") == "conversations"


class Column(Overlay):
    """A data set with the paper's base model for it; in an experiment, a column of the study (``of``) with changes.

    ``values`` replace ``$NAME`` in rows.
    """

    label: str = ""
    of: str = ""
    data: str = ""
    base: str = ""
    values: dict[str, Any] = Field(default_factory=dict)


class Row(Overlay):
    """A method with the number that the paper printed for each column; ``~`` where it printed none.

    ``base`` is the base model, where it is not the column's. The row is not run in the columns ``without``. ``count``
    is the quantity that a table of costs counts: a task's users, clusters or sampled users in per cent, the models'
    parameters in multiples of ResNet-9's, or the cost added to the base's forward pass in per cent.
    """

    method: str
    count: Literal["users", "clusters", "participation", "parameters", "forward"] | None = None
    label: str = ""
    base: str = ""
    without: list[str] = Field(default_factory=list)
    paper: list[str | None] | None = None

    @field_validator("paper", mode="before")
    @classmethod
    def _check_printed(cls, paper: object) -> Any:
        """Convert the cells of ``paper`` to strings, and check that each is a number as "46.36 (0.16)", or None.

        Raises:
            ValueError: A cell is no printed number.
        """
        if not isinstance(paper, list):
            return paper  # pydantic reports the wrong type
        cells = [None if cell is None else str(cell) for cell in paper]
        for cell in cells:
            if cell is not None and not _PRINTED.fullmatch(cell):
                raise ValueError(f"{cell!r} is not a printed number; write 46.36, or 46.36 (0.16) with its deviation")
        return cells


class ScaledColumn(Overlay):
    """A scale's changes to a slow column: ``seeds`` replaces the seeds, ``without`` leaves out rows.

    A ``local`` column is left out where the folder lacks its images; it is not read from the hub.
    """

    seeds: list[int] | None = None
    local: bool = False
    without: list[str] = Field(default_factory=list)


class Scale(Overlay):
    """The size of an experiment's runs.

    ``{data}`` in ``base`` is the folder with local text. ``bases`` maps published base models to stand-ins.

    ``text: demo`` gives every user one of the study's demo texts; ``local`` takes nothing from the hub. ``only``
    restricts columns and ``columns`` changes them. ``jobs: cores`` runs one job per core, for base models so small that
    a run cannot use two cores.
    """

    about: str = ""
    seeds: list[int] = Field(default=[0])
    base: str | None = None
    bases: dict[str, str] = Field(default_factory=dict)
    text: Literal["real", "local", "demo"] = "real"
    jobs: Literal["one", "cores"] = "one"
    only: list[str] | None = None
    columns: dict[str, ScaledColumn] = Field(default_factory=dict)

    def stand_in(self, base: str) -> str:
        """Return the base model that is trained in place of a published one; by default the published one."""
        return self.bases.get(base, base)


class Note(Section):
    """A remark on some of the paper's cells; without rows and columns, on all of them."""

    text: str
    rows: list[str] = Field(default_factory=list)
    columns: list[str] = Field(default_factory=list)


class Plot(Section):
    """Figure of a table's runs.

    ``x`` and ``series`` name the two settings of a sweep. Curves show ``measure``, by default the metric that compares
    models. ``mixtures`` also draws the routers of users who mix adapters, as users x clusters over rounds. ``usage``
    lists what results are plotted against, one row of panels each: how many values the server stores (server), a user
    sends (communicate), a user stores and trains (client). Rows with equal labels up to a comma are points of one line.
    ``tokens`` colours the study's prompts by their experts at these layers: each prompt in every user's model, or only
    in its ``own``.
    """

    kind: Literal["curves", "scores", "sweep", "usage", "tokens"]
    measure: str = ""
    mixtures: bool = False
    x: str = ""
    series: str = ""
    usage: list[Literal["server", "communicate", "client"]] = Field(default_factory=list)
    tokens: list[Literal["first", "middle", "last"]] = Field(default_factory=list)
    own: bool = False

    @model_validator(mode="after")
    def _check_kind_of_plot(self) -> Plot:
        """Check that the list ``usage`` is given exactly for plots of kind "usage", and ``tokens`` for "tokens".

        Raises:
            ValueError: A plot of such a kind lacks its list, or a plot of another kind has it.
        """
        for kind, values in (("usage", self.usage), ("tokens", self.tokens)):
            is_of_kind = self.kind == kind
            has_list = bool(values)
            if is_of_kind != has_list:
                raise ValueError(f"kind: {kind} and a list {kind}: give both or neither")
        return self


class Experiment(Section):
    """A table or a figure: columns x rows, with the paper's numbers.

    ``reference`` names the source of the rows' ``paper`` numbers, where that is not the paper. A figure that is
    ``like`` a table (only in YAML) inherits the table's keys except numbers and notes.
    """

    title: str
    source: str
    kind: Literal["runs", "cost"] = "runs"
    reference: str = "paper"
    metric: str = "mean_test_perplexity"
    better: Literal["lower", "higher"] = "lower"
    columns: list[str] | dict[str, Column]
    rows: dict[str, Row]
    scales: dict[str, Scale] = Field(default_factory=dict)
    notes: list[Note] = Field(default_factory=list)
    plot: Plot | None = None

    @property
    def column_names(self) -> list[str]:
        """The columns in the paper's order."""
        return list(self.columns)

    @model_validator(mode="after")
    def _check_rows_and_notes(self) -> Experiment:
        """Check that rows fit the kind of the table and its columns, and that notes refer to existing rows and columns.

        Raises:
            ValueError: A row does not fit, or a note refers to an unknown row or column.
        """
        is_table_of_costs = self.kind == "cost"  # each row has a quantity to count (`count`)
        for name, row in self.rows.items():
            has_count = row.count is not None
            if has_count != is_table_of_costs:
                raise ValueError(f"row {name!r}: give count in tables of kind cost, and in no others")
            if row.paper is not None and len(row.paper) != len(self.columns):
                raise ValueError(f"row {name!r} has {len(row.paper)} numbers for {len(self.columns)} columns")
        for note in self.notes:
            for name in [*note.rows, *note.columns]:
                if name not in self.rows and name not in self.columns:
                    raise ValueError(f"a note is on {name!r}, which is no row and no column")
        return self


class Study(Overlay):
    """Settings shared by the experiments of a paper; ``prompts`` are texts to show, by data set and kind."""

    title: str
    source: str
    demo: list[str] = Field(default_factory=list)
    prompts: dict[str, dict[str, str]] = Field(default_factory=dict)
    data: dict[str, DataSet]
    columns: dict[str, Column]
    scales: dict[str, Scale]


def parse_printed(cell: str) -> tuple[float, float | None]:
    """Return mean and standard deviation of a cell of a paper's table; the deviation is None if the paper has none.

    Args:
        cell: ``46.36``, ``46.36 (0.16)`` with its standard deviation, or ``7.9 / 1.8 / 0.80`` with a number per seed.
    """
    if " / " in cell:
        numbers_of_seeds = [float(number) for number in cell.split(" / ")]
        return statistics.fmean(numbers_of_seeds), statistics.stdev(numbers_of_seeds)
    match = _PRINTED.fullmatch(cell)
    assert match, cell
    mean, deviation = match[1], match[2]
    return float(mean), None if deviation is None else float(deviation)


def list_experiments() -> dict[str, Experiment]:
    """Return every published table and figure that comes with comingle, by name, as ``comigs/table1``."""
    folders = sorted(path.parent for path in published_recipes().glob(f"*/{STUDY}.yaml"))
    experiments: dict[str, Experiment] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.yaml"), key=_sort_key):
            if _is_experiment(path):
                name = f"{folder.name}/{path.stem}"
                experiments[name] = _read_model(path, Experiment)
    return experiments


def load_experiment(name: str) -> tuple[Study, Experiment]:
    """Load a published table or figure and the study that it belongs to.

    Args:
        name: Such as ``comigs/table1``.

    Raises:
        RecipeError: There is no experiment of that name.
    """
    folder, _, stem = name.partition("/")
    path = published_recipes() / folder / f"{stem}.yaml"
    if not (path.is_file() and _is_experiment(path)):
        known = list(list_experiments())
        raise RecipeError(
            f"reproduce: no table or figure {name!r}.{did_you_mean(name, known)} Allowed: {', '.join(known)}"
        )
    study = _read_model(path.parent / f"{STUDY}.yaml", Study)
    return study, _read_model(path, Experiment)


def _is_experiment(path: Path) -> bool:
    """Return whether a YAML file describes a table or figure of a paper.

    Such files lie beside ``study.yaml``, which holds what all tables of a paper share. Other files in such a folder are
    ``study.yaml`` itself and ``theory.yaml``.
    """
    has_study = (path.parent / f"{STUDY}.yaml").is_file()
    return has_study and path.stem not in _NO_EXPERIMENT


def _sort_key(path: Path) -> tuple[str, int]:
    """Return a key that puts tables before figures and "table10" after "table9"."""
    letters = re.sub(r"\d", "", path.stem)
    digits = re.sub(r"\D", "", path.stem)
    if letters == "table":
        letters = ""  # comes first
    return letters, int(digits or 0)


@cache
def _read_model(path: Path, model: type[Model]) -> Model:
    """Read a YAML file into a pydantic model.

    Args:
        path: The YAML file.
        model: The class of the result.

    Raises:
        RecipeError: A value is invalid; the first one is reported.
    """
    try:
        return model.model_validate(_read_content(path))
    except ValidationError as error:
        raise RecipeError(f"{path}: {first_problem(error, model)}") from None


def _read_content(path: Path) -> Any:
    """Read the YAML file of a study or an experiment.

    If it has a key ``like``, the name of another file of the folder, it inherits that file's metric (and whether lower
    is better), columns, scales and rows, the rows without the paper's numbers. Its own keys win.
    """
    content = read_yaml(path)
    like = content.pop("like", None) if isinstance(content, dict) else None
    if like is None:
        return content
    other = _read_content(path.parent / f"{like}.yaml")
    inherited = {key: other[key] for key in ("metric", "better", "columns", "scales") if key in other}
    inherited["rows"] = {
        name: {key: value for key, value in row.items() if key != "paper"} for name, row in other["rows"].items()
    }
    return {**inherited, **content}


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge partial recipes: mappings key by key; of other values the last wins.

    ``merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})`` is ``{"a": {"b": 1, "c": 3}}``.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if not isinstance(value, Mapping):
                merged[key] = value
            elif isinstance(merged.get(key), dict):
                merged[key] = merge(merged[key], value)
            else:
                merged[key] = merge(value)  # a copy
    return merged


IMAGES = "images"
SPLITS = ("train", "valid", "test")
ASSUMED_FOLDER = Path("{data}")
"""Placeholder for a folder with local text that holds everything needed, where its actual path does not matter."""


def data_folder(given: Path | None) -> Path | None:
    """Return the folder with local text and images: the given one, else ``$COMINGLE_DATA``, else None.

    Args:
        given: The folder of ``--data``; None without the option. ``ASSUMED_FOLDER``, which stands for a folder with all
            data when only the names of runs are wanted, is returned unchecked.

    Raises:
        RecipeError: The folder does not exist.
    """
    if given == ASSUMED_FOLDER:
        return ASSUMED_FOLDER
    if given is not None:
        name, source = str(given), "--data"
    else:
        name, source = os.environ.get(FOLDER_VARIABLE, ""), FOLDER_VARIABLE
    if not name:
        return None
    folder = expand_home(name).resolve()
    if not folder.is_dir():
        raise RecipeError(f"{source} {name}: no such folder; papers/docs/results.md says how the data is laid out")
    return folder


def with_placeholder(content: object, folder: Path | None) -> Any:
    """Replace the folder of local data by ``{data}`` in all paths of a recipe.

    A run is named by a digest of its recipe, which so becomes the same on every machine. With the folder
    ``/home/ann/text`` the path ``/home/ann/text/en.txt`` becomes ``{data}/en.txt``.

    Args:
        content: Part of a recipe: a value, or nested mappings and lists of values.
        folder: The folder with local text and base models; None replaces nothing.
    """
    if isinstance(content, Mapping):
        return {key: with_placeholder(value, folder) for key, value in content.items()}
    if isinstance(content, list):
        return [with_placeholder(value, folder) for value in content]
    if folder is None or not isinstance(content, str) or not Path(content).is_relative_to(folder):
        return content
    parts = Path(content).relative_to(folder).parts
    return str(PurePosixPath("{data}", *parts))


def resolve_inside(path: str, folder: Path | None) -> str:
    """Resolve the path of a base model in the folder, so that equal models have equal paths.

    Args:
        path: A path or name of a base model; anything outside of the folder is returned unchanged.
        folder: The folder, if there is one.
    """
    expanded = expand_home(path)
    if folder is None or not expanded.is_dir():
        return path
    resolved = expanded.resolve()
    return str(resolved) if resolved.is_relative_to(folder) else path


def find_absent(data: DataSet, scale: Scale, folder: Path | None) -> str:
    """Return why the data of an experiment cannot be read, for a message; an empty string if it can.

    - Text is read from the folder if there is one, else from the Hugging Face hub.
    - Images and questions are read from the folder, or from the hub if the folder lacks them.
    - Synthetic samples are generated.

    The hub is used only for experiments at scales with ``text: real``.

    Args:
        data: The data set, which is one of these kinds.
        scale: Settings for the size of the experiment's runs; ``scale.text`` is "demo" if they read short texts that
            come with comingle in place of the data set.
        folder: Folder of ``--data``, with local text and images; None without it. :data:`ASSUMED_FOLDER` stands for a
            folder with all data.
    """
    uses_demo_text = scale.text == "demo"
    if uses_demo_text or folder == ASSUMED_FOLDER:
        return ""
    is_text = data.task is None and data.questions is None
    if is_text and folder is not None:
        absent = [path for path in _local_paths(data) if not (folder / path).exists()]
        return f"{folder / absent[0]} does not exist" if absent else ""
    is_synthetic = data.task is not None and not data.images
    may_use_hub = scale.text == "real"
    if is_synthetic or may_use_hub:
        return ""
    lacking = "there is no folder; give --data FOLDER" if folder is None else describe_lacking(data, folder)
    return f"{lacking}, and this scale does not use the hub" if lacking else ""


def _find_in_folder(data: DataSet, folder: Path | None) -> Path | None:
    """Return the path of a data set's images or questions in the folder; None where they come from the hub.

    Args:
        data: The data set.
        folder: The folder with local data; None if there is none. ``ASSUMED_FOLDER`` counts as a folder with all data.
    """
    if folder is None:
        return None
    if data.questions is not None:
        path = folder / data.questions["name"]
        exists = path.is_dir()
    else:
        path = folder / IMAGES
        exists = has_images(data.images, path)
    return path if exists or folder == ASSUMED_FOLDER else None


def describe_lacking(data: DataSet, folder: Path) -> str:
    """Return a message if the folder lacks a data set's images or questions, such as "/data/images has no mnist".

    The message is empty if the folder has them, or if the data set is text.

    Args:
        data: The data set.
        folder: The folder with local data.
    """
    has_images_or_questions = data.images or data.questions
    if not has_images_or_questions or _find_in_folder(data, folder) is not None:
        return ""
    if data.questions is not None:
        return f"{folder / data.questions['name']} does not exist"
    return f"{folder / IMAGES} has no {data.images}"


def _local_paths(data: DataSet) -> list[str]:
    """Return the paths of a data set's local text, relative to the folder."""
    if "users" in data.local:
        sources = data.local["users"].values()  # paths, or mappings with a path
        return [source if isinstance(source, str) else source["path"] for source in sources]
    path = data.local["dataset"]["path"]
    return [path] if isinstance(path, str) else list(path)


def data_section(study: Study, data: DataSet, folder: Path | None, *, demo: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe's section ``data`` for a data set of a paper, and the users' names.

    The data comes from the folder if there is one, else from the hub; images and questions that the folder lacks come
    from the hub, too. Text has the paper's numbers of tokens, such as ``"max_test_tokens": [5000, 8000]``.

    Args:
        study: The settings that all experiments of the paper share, with the demo texts.
        data: The data set.
        folder: The folder with local text and images, if there is one.
        demo: Whether users of text get the study's demo texts instead.

    Returns:
        The section, and the users' names in the order of the lists of token numbers; no names for tasks and questions.
    """
    if data.task is not None:
        return {"task": _with_local_path(data.task, data, folder)}, []
    if data.questions is not None:
        return {"questions": _with_local_path(data.questions, data, folder)}, []
    if demo:
        section = {"users": dict(zip(data.users, study.demo, strict=True))}
        if "held_out" in data.local:  # which users' text the validation and test text is taken from
            section["held_out"] = data.local["held_out"]
        return section, data.users
    section = dict(data.hub) if folder is None else _anchor_paths(data.local, folder)
    users = section["users"] if "users" in section else section["dataset"]["users"]
    if not data.has_conversations:  # papers give no numbers of tokens for conversations
        for split in SPLITS:
            section[f"max_{split}_tokens"] = data.tokens[split]
    return section, list(users)


def _with_local_path(settings: Mapping[str, Any], data: DataSet, folder: Path | None) -> dict[str, Any]:
    """Return the settings of a data set, with the ``path`` of its images or questions if the folder has them.

    Without a path a run downloads them from the hub.

    Args:
        settings: The section ``data.task`` (of images or synthetic) or ``data.questions`` of a recipe.
        data: The data set.
        folder: The folder with local data, if there is one.
    """
    section = dict(settings)
    has_images_or_questions = data.images or data.questions  # not a synthetic task
    path = _find_in_folder(data, folder) if has_images_or_questions else None
    if path is not None:
        section["path"] = str(path)
    return section


def _anchor_paths(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a data set's ``local`` section, with the folder put before its relative paths.

    Args:
        local: A section ``data``: either ``users``, with a path or a mapping with ``path`` for each, or ``dataset``
            with one path or a list.
        folder: The folder with local text.
    """
    if "users" in local:
        anchored_users = {}
        for name, source in local["users"].items():
            settings = {"path": source} if isinstance(source, str) else source
            anchored_users[name] = {**settings, "path": str(folder / settings["path"])}
        return {**local, "users": anchored_users}
    path = local["dataset"]["path"]
    anchored_path = str(folder / path) if isinstance(path, str) else [str(folder / part) for part in path]
    return {**local, "dataset": {**local["dataset"], "path": anchored_path}}


def limits_by_name(data: Mapping[str, object], names: Sequence[str]) -> dict[str, Any]:
    """Replace lists of token limits by mappings: ``"max_test_tokens": [5, 8]`` by ``{"ann": 5, "ben": 8}``.

    Args:
        data: A recipe's section ``data``.
        names: The users' names, in the order of the lists.
    """
    section = dict(data)
    for key, limits in data.items():
        if key.endswith("_tokens") and isinstance(limits, list):
            section[key] = dict(zip(names, limits, strict=True))
    return section
