"""Users' copies of a small net that is trained whole, with adaptors where a method mixes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from comingle.config import Recipe
from comingle.config.settings import Training
from comingle.data.populations import Crowd, listed
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import UserSamples, check, pool_samples
from comingle.engines.client import Clients
from comingle.engines.users import batch_size
from comingle.kinds.base import always_there, later
from comingle.kinds.language import ADAPTOR_SETS, NETS
from comingle.kinds.samples.feed import SampleFeed
from comingle.kinds.samples.nets import check_net, net_maker, net_name
from comingle.methods.base import Method
from comingle.models.floral.wrapper import adaptor_size, floral
from comingle.models.hardware import require_room, resolve_device, resolve_dtype
from comingle.models.stacked import StackedModel, gated_pair, stack
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.trees import ADAPTOR, BASE


def build_nets(
    recipe: Recipe,
    population: Population,
    method: Method,
    training: Training,
    *,
    unread: bool = False,
    here: Sequence[int] | None = None,
    reads: bool = True,
) -> Clients:
    """Everybody's copy of the net, with adaptors where the method mixes them.

    ``unread`` leaves the users' samples where they are until something asks for them; ``here`` are the numbers of those
    whose samples are on this machine. With ``reads`` somebody must have validation data where it is needed.

    Raises:
        RecipeError: a base that is no net, a method for language models, fewer components than true clusters for
            optimal routing, or batches that batch norm cannot take.
        DataError: users whose samples cannot share a net.
    """
    training = always_there(method, training)
    everybody, numbers = population, range(len(population.users)) if here is None else here
    if here is not None:
        some = population.users
        some = some.part(here) if isinstance(some, Crowd) and isinstance(here, range) else [some[n] for n in numbers]
        population = replace(population, users=some)
    users = listed(population.users)
    if not unread:
        _check_users(population)
    model = net_model(recipe, everybody, method)
    model = model if here is None else model.only(numbers)
    pooled = later(UserSamples, "everyone", lambda: pool_samples(users)) if unread else None
    trainers = [pooled or pool_samples(users)] if method.placement.pooled else users
    size = batch_size(method, training, len(users))
    least = _least_batch(model, training, size)
    augment = None if method.placement.pooled else population.augmentation
    like = {"device": model.device, "dtype": model.dtype}
    feed = partial(SampleFeed, trainers, training, size, loss=population.measure, augment=augment, least=least, **like)
    source = feed if unread else feed()
    return Clients(model, method, training, trainers=trainers, users=users, feed=source, reads=reads and not unread)


def net_model(recipe: Recipe, population: Population, method: Method) -> StackedModel:
    """The net as everybody trains it.

    Raises:
        RecipeError: as :func:`build_nets`.
    """
    check_on_nets(method)
    _check_clusters(population, method)
    device = resolve_device(recipe.runtime.device)
    dtype = torch.float32 if recipe.runtime.dtype == "auto" else resolve_dtype(recipe.runtime.dtype, device)
    if dtype == torch.float16:
        raise RecipeError("runtime.dtype: float16 is for language models; nets take auto, bfloat16, float32 or float64")
    users = 1 if method.placement.pooled else len(population.users)
    name, mixture = net_name(recipe, population), method.placement.mixture
    make = net_maker(recipe, population)
    many = mixture.clusters if mixture is not None and mixture.of == "models" else method.server.server_models
    many = 2 if method.placement.gated else many
    first = make(recipe.seed)
    batchwise = check_net(first, name, population)
    require_room(f"method {method.name}", many, sum(p.numel() for p in first.parameters()))
    nets = [first, *(make(recipe.seed + SEED_STEP * number) for number in range(1, many))]
    if mixture is not None and mixture.of == "adaptors":
        settings = recipe.floral.model_dump()
        if settings["rank"] is None and settings["budget"] is None:
            settings["budget"] = 0.01
        sizes = {key: settings[key] for key in ("rank", "budget", "conv", "lora", "bias", "norm")}
        require_room(f"method {method.name}", mixture.clusters, adaptor_size(nets[0], **sizes), ADAPTOR_SETS)
        settings |= {"num_clusters": mixture.clusters, "per_layer": mixture.per_layer}
        nets = [floral(nets[0], copy=False, generator=torch.Generator(), **settings)]
    if method.placement.gated:
        nets = [gated_pair(*nets, inputs=math.prod(population.input_shape), seed=recipe.seed)]
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = recipe.training.rounds >= COMPILE_FROM
    like = {
        "device": device,
        "dtype": dtype,
        "loss": population.measure,
        "compiled": bool(compiled),
        "batchwise": batchwise,
    }
    return stack(nets, name=NETS + name, users=users, mixture=mixture, **like)


COMPILE_FROM = 20
"""``compile: auto`` has compiled code for convolutions from so many rounds on: making it takes some seconds, once for a
machine. Users do not count: whoever is alone on a machine has the same code as all together in one process."""


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
    if method.shared and not {role.partition(".")[0] for role in method.shared} & NET_ROLES:
        raise RecipeError(f"method {method.name}: shares nothing of a net; it is for language models")
    if any(part.language_only for part in method.client.parts):
        raise RecipeError(
            f"method {method.name}: needs a language model; users with samples have nets that are trained whole"
        )


def _check_users(population: Population) -> None:
    """Users may come from elsewhere than a recipe."""
    check(population.users, classes=population.classes if population.measure.classes else None)
    first = population.users[0]
    if (got := tuple(first.train.inputs.shape[1:])) != tuple(population.input_shape):
        raise DataError(
            f"user {first.name!r}: inputs have shape {got}; allowed: the net's, {tuple(population.input_shape)}"
        )


def _check_clusters(population: Population, method: Method) -> None:
    """More components than true clusters are left without users, fewer would make two clusters one."""
    mixture = method.placement.mixture
    if mixture is None or not mixture.optimal:
        return
    true = max((user.cluster for user in population.users if user.cluster is not None), default=-1) + 1
    if (got := mixture.clusters) < true:
        raise RecipeError(f"method {method.name}: clusters is {got}; allowed: from {true}, the true clusters")


def _least_batch(model: StackedModel, training: Training, size: int) -> int:
    """How many samples a batch has at least: batch norm needs two, and sees a batch as a whole."""
    if not model.batchwise:
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
