"""How much work a run is: for estimates of time, in units that are comparable among runs of one base."""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import cast

import torch
from torch import Tensor, nn

from comingle.config import Recipe
from comingle.config.settings import AUTO, SHORTEST
from comingle.data.conversations.section import ConversationsSection
from comingle.data.text.section import TextSection
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.nets import make_net
from comingle.papers.questions.section import QuestionsDataSection
from comingle.papers.questions.sets import QUESTIONS
from comingle.papers.tasks.section import TaskDataSection, TaskSection
from comingle.papers.tasks.settings import REDUCED_MINIMUM, TASKS
from comingle.papers.tasks.synthetic import DIMENSION, OUTPUTS
from comingle.training.kinds.base import NETS

_IMAGES = {"mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
"""Train and test images of the data sets, as on the hub."""
_STEP, _PARAMETER = 2e7, 20
"""What a step costs beside its samples, in multiply-adds: by itself, and for each parameter of each user that takes it
(copies, gradients, means)."""


def weigh(recipe: Recipe) -> float:
    """Tokens through a language model, or multiply-adds of a net; a trained one counts three times."""
    method = make(recipe.method.name, **recipe.method.settings)
    weighed = {"task": _weigh_task, "questions": _weigh_questions, "text": _weigh_text, "conversations": _weigh_chats}
    return weighed[recipe.data.kind](recipe, method)


def _period(recipe: Recipe) -> int:
    """Rounds from one evaluation to the next, at least."""
    return SHORTEST if recipe.evaluation.every == AUTO else recipe.evaluation.every


def _weigh_text(recipe: Recipe, method: Method) -> float:
    training = recipe.training
    users, limit = 4, cast(TextSection, recipe.data).max_test_tokens
    scored = (sum(limit.values()) if isinstance(limit, dict) else (limit or 50_000) * users) / 3
    batch = training.batch_size * training.context * users
    steps = training.rounds * training.local_steps * sum(p.steps / p.every / p.turns for p in method.client.phases)
    return steps * batch + scored * (1 + training.rounds // _period(recipe) * method.trains)


def _weigh_chats(recipe: Recipe, method: Method) -> float:
    """As if every conversation filled the context, and all were training data."""
    rows = cast(ConversationsSection, recipe.data).dataset
    training, users = recipe.training, len(rows.users) if rows is not None and isinstance(rows.users, list) else 4
    most = (rows.max_conversations if rows is not None else None) or 1_000
    rounds = training.rounds if method.trains else 0
    return users * most * training.context * (rounds * training.local_epochs + rounds // _period(recipe) + 1)


def _weigh_questions(recipe: Recipe, method: Method) -> float:
    """As if every question filled the context.

    To score one takes about as long as to train on it: it is read twice and answered token by token.
    """
    asked = cast(QuestionsDataSection, recipe.data).questions
    setting, training = QUESTIONS[asked.name], recipe.training
    users, train = len(asked.languages or setting.languages), asked.train or setting.train
    rounds = training.rounds if method.trains else 0
    evaluations = max(1, ceil(rounds / _period(recipe)) + (rounds > 0 and recipe.evaluation.first))
    passed = rounds * training.local_epochs * train + evaluations * (asked.test or setting.test or train)
    return users * training.context * passed


def _weigh_task(recipe: Recipe, method: Method) -> float:
    task = cast(TaskDataSection, recipe.data).task
    training, (users, train, test) = recipe.training, count_samples(task)
    part = training.participation
    members = sum(map(len, part)) / len(part) if isinstance(part, list) else users * part
    net = recipe.base.removeprefix(NETS) if recipe.base.startswith(NETS) else ""
    per_sample, parameters = net_size(task.name, net)
    mixture = method.placement.mixture
    passes = (
        mixture.clusters
        if mixture is not None and (mixture.of == "models" or mixture.at in ("losses", "samples"))
        else 1
    )
    steps = training.local_epochs * ceil(train / training.batch_size)
    operations = 3 * training.local_epochs * train * per_sample + steps * _PARAMETER * parameters
    scored = users * test * per_sample
    rounds = training.rounds if method.trains else 0
    return passes * (rounds * (steps * _STEP + members * operations) + scored * (1 + rounds // _period(recipe)))


def count_samples(task: TaskSection) -> tuple[int, int, int]:
    """Users, and the train and test samples of each, as near as can be told without reading any image."""
    setting = TASKS[task.name]
    users = task.users or setting.users
    images = _IMAGES.get(task.name)
    train, test = (setting.train, setting.test) if images is None else (ceil(n / users) for n in images)
    return users, min(train, max(REDUCED_MINIMUM, round(task.fraction * train))), task.test_samples or test


@cache
@torch.no_grad()
def net_size(task: str, net: str = "") -> tuple[int, int]:
    """Multiply-adds of one sample, and parameters, of a net on a task, by default of the task's own."""
    setting = TASKS[task]
    shape = (DIMENSION,) if not setting.hub else (3, 32, 32) if setting.coloured else (1, 28, 28)
    outputs = setting.classes if setting.hub else {str(kind): size for kind, size in OUTPUTS.items()}[task]
    sizes: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):  # every output channel is used once at each place
            sizes.append(module.weight.numel() * output.numel() // len(module.weight))

    built = make_net(net or setting.net, shape, outputs, seed=0).eval()
    for module in built.modules():
        module.register_forward_hook(count)
    built(torch.zeros(1, *shape))
    return sum(sizes), sum(parameter.numel() for parameter in built.parameters())
