"""Federations of mixtures and of nets, built to be counted: without weights, and with no more users than need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from comingle.config import Recipe
from comingle.data.populations import names_of
from comingle.data.samples.reading import Population
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.base import Base
from comingle.models.floral.model import FloralModel, roles
from comingle.models.floral.wrapper import floral
from comingle.models.floral_language import MixedLanguageModel
from comingle.models.loading import backbone, lm_head
from comingle.models.lora import init_zero, lora_scale
from comingle.models.model import share_weights
from comingle.models.stacked import StackedModel
from comingle.runs.session import training_settings
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients
from comingle.training.kinds.base import check_on_language
from comingle.training.kinds.nets import SampleFeed, build_nets
from comingle.utils.trees import ADAPTOR, ROUTER, Layout, Slot


def bare_nets(recipe: Recipe, population: Population, everybody: Sequence[str] | None = None) -> InProcess:
    """The federation of users of nets with the first of them, but for a pooled one: they differ in their samples alone.

    ``everybody`` has the names of all, where others are in other processes.

    Raises:
        RecipeError: as :func:`comingle.training.kinds.nets.build_nets`.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    training = training_settings(recipe, names_of(population.users) if everybody is None else everybody)
    if method.placement.pooled:
        return federate(build_nets(recipe, population, method, training))
    clusters = max(1, len({user.cluster for user in population.users}))  # with fewer there would be other clusters
    first = build_nets(recipe, replace(population, users=population.users[:clusters]), method, training)
    feed, users = cast(SampleFeed, first.feed), list(population.users[: first.portions.users])
    if len(users) <= clusters:
        return federate(first)
    model = cast(StackedModel, first.model).for_users(len(users))
    return federate(Clients(model, method, training, trainers=users, users=users, feed=feed.of(users)))


def bare_mixture(recipe: Recipe, base: Base, method: Method, users: int) -> MixedLanguageModel:
    """What :func:`comingle.models.floral_language.mix_language_model` makes, over a base that has shapes only.

    Raises:
        RecipeError: a mixture of whole models, or ranks of each user's own.
    """
    check_on_language(recipe, method)
    mixture, rank = method.placement.mixture, recipe.adapters.rank
    assert mixture is not None
    assert isinstance(rank, int)
    network = share_weights(base.model)
    net = floral(
        backbone(network),
        num_clusters=mixture.clusters,
        rank=rank,
        alpha=lora_scale(recipe.adapters.alpha, rank),
        bias=False,
        norm=False,
        per_layer=mixture.per_layer,
        copy=False,
        generator=torch.Generator(),
    )
    return MixedLanguageModel(
        name=base.name,
        net=net,
        layout=Layout(slots=tuple(_slots(net))),
        users=users,
        device=base.device,
        dtype=base.dtype,
        mixture=mixture,
        base=base,
        head=lm_head(base),
        embedding=network.get_input_embeddings(),
    )


def _slots(net: FloralModel) -> list[Slot]:
    """Adaptors, then the router: what users have of their own over a frozen base."""
    shapes, slots = {name: tuple(p.shape) for name, p in net.named_parameters()}, []
    for wanted, copies in ((ADAPTOR, net.num_clusters), (ROUTER, 1)):
        names = [name for name, role in roles(net).items() if role == wanted]
        slots += [Slot(name=n, shape=shapes[n], roles=(wanted,) * copies, init=init_zero) for n in names]
    return slots
