"""Scores of users' models on tasks of lm-eval, the Language Model Evaluation Harness of EleutherAI."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from comingle.models.hardware import torch_defaults
from comingle.models.personal import PersonalModel
from comingle.utils.errors import ComingleError, DataError, did_you_mean, list_names
from comingle.utils.records import JsonObject


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks that models are scored on, and how.

    Args:
        folder: Folder with task files (YAML) of lm-eval; None for the tasks that lm-eval itself has, whose data is on
            the Hugging Face hub.
        names: Names of tasks, groups or tags; all tasks of the folder if empty.
        limit: Number of first documents of each task to use; None for all.
        batch_size: Number of texts in one pass.
        chat: Whether to put each document into the chat template of the tokenizer.
    """

    folder: Path | None
    names: tuple[str, ...] = ()
    limit: int | None = None
    batch_size: int = 8
    chat: bool = False


@torch_defaults()
def score_on_tasks(personal: PersonalModel, tasks: Tasks, *, progress: bool = True) -> JsonObject:
    """Score a user's model as it is, without an export, on tasks of lm-eval.

    Args:
        personal: The user's model.
        tasks: The tasks.
        progress: Show progress bars.

    Returns:
        For each task and group its metrics, such as ``{"arithmetic": {"acc": 0.5, "acc_stderr": 0.1}}``, under
        ``results``; ``versions`` of the tasks, and ``n-samples``, the numbers of documents.

    Raises:
        ComingleError: lm-eval is not installed, or a task cannot be loaded.
        DataError: The base has no tokenizer.
    """
    manager, names = find_tasks(tasks)
    base = personal.model.base
    if base.tokenizer is None:
        raise DataError(f"base model {base.name}: has no tokenizer, which tasks of text need")
    with personal.generating() as network, _few_messages(progress=progress):
        model = import_module("lm_eval.models.huggingface").HFLM(
            pretrained=network,
            backend="causal",
            tokenizer=base.tokenizer,
            batch_size=tasks.batch_size,
            add_bos_token=base.begin is not None,
        )
        try:
            scores = import_module("lm_eval.evaluator").simple_evaluate(
                model,
                tasks=names,
                task_manager=manager,
                limit=tasks.limit,
                apply_chat_template=tasks.chat,
                log_samples=False,
            )
        except (OSError, ValueError, TypeError, KeyError) as error:  # a file of a task, or its data
            reason = str(error).splitlines()[0] if str(error) else "no details"
            raise ComingleError(f"tasks {', '.join(names)}: {type(error).__name__}: {reason}") from error
    assert scores is not None  # it is None only in other processes than the first
    return {
        "results": {name: _plain_metrics(metrics) for name, metrics in scores["results"].items()},
        "versions": dict(scores["versions"]),
        "n-samples": {name: dict(numbers) for name, numbers in scores["n-samples"].items()},
        "lm_eval": version("lm_eval"),
    }


@cache
def find_tasks(tasks: Tasks) -> tuple[Any, list[str]]:
    """Return the task manager of lm-eval, and the names of the tasks; files are read once, not for each user.

    Raises:
        ComingleError: lm-eval is not installed, the folder has no tasks, or there is no such task.
    """
    try:
        with _few_messages():
            tasks_of_harness = import_module("lm_eval.tasks")
    except ImportError as error:
        raise ComingleError(f"comingle evaluate needs {error.name}: pip install 'comingle[evaluate]'") from None
    folder = tasks.folder
    if folder is not None and not folder.is_dir():
        raise ComingleError(f"--tasks: got {folder}; allowed: a folder with task files (*.yaml) of lm-eval")
    manager = tasks_of_harness.TaskManager(include_path=folder, include_defaults=folder is None)
    if folder is None and not tasks.names:
        raise ComingleError("--tasks: got none; give a folder with task files of lm-eval, or names with --task")
    if not tasks.names and not manager.all_subtasks:
        raise ComingleError(f"--tasks {folder}: no task; allowed: a folder with task files (*.yaml) of lm-eval")
    for name in tasks.names:
        if name not in manager.all_tasks:
            known = manager.all_tasks
            allowed = f"; allowed: {list_names(known)}" if folder is not None else ""
            raise ComingleError(f"--task {name}: unknown{allowed}.{did_you_mean(name, known)}")
    return manager, list(tasks.names) or list(manager.all_subtasks)


def _plain_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics of a task under plain names: ``"acc_stderr,none"`` becomes ``"acc_stderr"``.

    The part after the comma names a filter of answers; it stays unless it is "none".
    """
    plain = {}
    for key, value in metrics.items():
        metric, _, answer_filter = key.partition(",")
        if isinstance(value, (int, float)) and answer_filter:  # others are the alias and the number of documents
            plain[metric if answer_filter == "none" else f"{metric}_{answer_filter}"] = float(value)
    return plain


@contextmanager
def _few_messages(*, progress: bool = True) -> Iterator[None]:
    """Show only errors of lm-eval, which warns about a model that is passed in memory and about missing options.

    Args:
        progress: Show progress bars, too.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    silence = nullcontext() if progress else redirect_stderr(StringIO())  # its bars have no option
    try:
        with silence:
            yield
    finally:
        logger.setLevel(level)
