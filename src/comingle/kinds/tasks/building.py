"""Users' copies of a small net that is trained whole, with adaptors where a method mixes them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from comingle.adapters.clustered import adaptor_size, floral
from comingle.data.samples import UserSamples, check, pool_samples
from comingle.data.tasks import Task, make_task
from comingle.engines.client import Clients, batch_size
from comingle.engines.training import Training
from comingle.errors import DataError, RecipeError
from comingle.kinds.base import always_there, later
from comingle.kinds.language import ADAPTOR_SETS, NETS
from comingle.kinds.tasks.feed import SampleFeed
from comingle.kinds.tasks.section import TaskSection
from comingle.methods.base import Method
from comingle.models.gated import gated_pair
from comingle.models.hardware import require_room, resolve_device, resolve_dtype
from comingle.models.nets import make_net
from comingle.models.stacked import StackedModel, stack
from comingle.recipes import Recipe
from comingle.trees import ADAPTOR, BASE, STATISTICS


def prepare_task(section: TaskSection, seed: int) -> Task:
    """The users and samples of a recipe's task."""
    return make_task(section.name, **section.model_dump(exclude={"name"}, exclude_unset=True), seed=seed)


def build_nets(recipe: Recipe, task: Task, method: Method, training: Training, *, unread: bool = False) -> Clients:
    """Everybody's copy of the task's net, with adaptors where the method mixes them.

    ``unread`` leaves the users' samples where they are until something asks for them.

    Raises:
        RecipeError: a base that is no net, a method for language models, fewer components than true clusters for
            optimal routing, or batches that batch norm cannot take.
        DataError: users whose samples cannot share the task.
    """
    users = list(task.users)
    if not unread:
        _check_users(task)
    check_on_nets(method)
    _check_clusters(task, method)
    training = always_there(method, training)
    device = resolve_device(recipe.runtime.device)
    dtype = torch.float32 if recipe.runtime.dtype == "auto" else resolve_dtype(recipe.runtime.dtype, device)
    pooled = later(UserSamples, "everyone", lambda: pool_samples(users)) if unread else None
    trainers = [pooled or pool_samples(users)] if method.placement.pooled else users
    model = _model(recipe, task, method, len(trainers), device, dtype)
    size = batch_size(method, training, len(users))
    least = _least_batch(model, training, size)
    augment = task.augmented if task.augment and not method.placement.pooled else None
    feed = partial(SampleFeed, trainers, training, size, device=device, dtype=dtype, augment=augment, least=least)
    source = feed if unread else feed()
    return Clients(model, method, training, trainers=trainers, users=users, feed=source, reads=not unread)


def net_name(recipe: Recipe, task: Task) -> str:
    """Which net is trained.

    Raises:
        RecipeError: a base is named that is no net.
    """
    if "base" not in recipe.model_fields_set:
        return task.net
    if not recipe.base.startswith(NETS):
        raise RecipeError(f"base: got {recipe.base!r} for data.task; allowed: {NETS}NAME, or none for the task's own")
    return recipe.base.removeprefix(NETS)


def _model(
    recipe: Recipe, task: Task, method: Method, users: int, device: torch.device, dtype: torch.dtype
) -> StackedModel:
    name, mixture = net_name(recipe, task), method.placement.mixture
    many = mixture.clusters if mixture is not None and mixture.of == "models" else method.server.server_models
    many = 2 if method.placement.gated else many

    def net(number: int) -> nn.Module:
        return make_net(name, task.input_shape, task.classes, seed=recipe.seed + SEED_STEP * number)

    first = net(0)
    require_room(f"method {method.name}", many, sum(p.numel() for p in first.parameters()))
    nets = [first, *(net(number) for number in range(1, many))]
    if mixture is not None and mixture.of == "adaptors":
        settings = recipe.floral.model_dump()
        if settings["rank"] is None and settings["budget"] is None:
            settings["budget"] = 0.01
        sizes = {key: settings[key] for key in ("rank", "budget", "conv", "lora", "bias", "norm")}
        require_room(f"method {method.name}", mixture.clusters, adaptor_size(nets[0], **sizes), ADAPTOR_SETS)
        nets = [floral(nets[0], num_clusters=mixture.clusters, copy=False, generator=torch.Generator(), **settings)]
    if method.placement.gated:
        nets = [gated_pair(*nets, inputs=math.prod(task.input_shape), seed=recipe.seed)]
    classes = task.loss == "cross_entropy"
    return stack(nets, name=NETS + name, users=users, mixture=mixture, device=device, dtype=dtype, classes=classes)


NET_ROLES = frozenset({BASE, ADAPTOR})
"""What nets have to be trained and shared, besides routers."""

SEED_STEP = 1_000_003
"""Between the seeds of an ensemble's nets, so that runs with other seeds share none."""


def check_on_nets(method: Method) -> None:
    """Whether a method is for nets.

    Raises:
        RecipeError: it is for language models alone.
    """
    if method.placement.gated:  # its experts and its router are nets
        return
    if method.trains and not method.client.trained & NET_ROLES:
        raise RecipeError(f"method {method.name}: trains nothing of a net; it is for language models")
    if method.shared and not method.shared & NET_ROLES:
        raise RecipeError(f"method {method.name}: shares nothing of a net; it is for language models")
    if method.placement.copies > 1 or any(part.language_only for part in method.client.parts):
        raise RecipeError(f"method {method.name}: needs a language model; data.task has nets that are trained whole")


def _check_users(task: Task) -> None:
    """Tasks may come from elsewhere than a recipe."""
    check(task.users, classes=task.classes if task.loss == "cross_entropy" else None)
    first = task.users[0]
    if (got := tuple(first.train.inputs.shape[1:])) != tuple(task.input_shape):
        raise DataError(f"user {first.name!r}: inputs have shape {got}; allowed: the task's, {tuple(task.input_shape)}")


def _check_clusters(task: Task, method: Method) -> None:
    """More components than true clusters are left without users, fewer would make two clusters one."""
    true = max((user.cluster for user in task.users if user.cluster is not None), default=-1) + 1
    if (
        method.placement.mixture is not None
        and method.placement.mixture.optimal
        and (got := method.placement.mixture.clusters) < true
    ):
        raise RecipeError(f"method {method.name}: clusters is {got}; allowed: from {true}, the task's true clusters")


def _least_batch(model: StackedModel, training: Training, size: int) -> int:
    """How many samples a batch has at least: batch norm needs two, and sees a batch as a whole."""
    if STATISTICS not in model.layout.roles:
        return 1
    if size < LEAST_FOR_NORM:
        raise RecipeError(f"training.batch_size: got {size}; {model.name} has batch norm, which needs {LEAST_FOR_NORM}")
    if training.micro_batch is not None and training.micro_batch < size:
        raise RecipeError(
            f"runtime.micro_batch: got {training.micro_batch}; {model.name} has batch norm, which needs whole "
            f"batches; allowed: from {size}, or none"
        )
    return LEAST_FOR_NORM


LEAST_FOR_NORM = 2
"""Batch norm has no variance of one sample."""
