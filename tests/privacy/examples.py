"""Federations whose steps hide single examples, for the tests of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comingle.methods.base import Phase
from comingle.privacy.mechanisms import padded
from comingle.training.backends.local import InProcess
from comingle.training.steps import PrivateSteps
from comingle.utils.trees import Tree, restrict

USERS = ("ann", "bob")
TRAINED = (
    "fedavg", "ffa-lora", "fdlora", "fedavg-moe", "fedavg-moe-tr", "pfedmoe", "comigs-tr", "comigs", "comigs-1g1s",
    "comigs-2g", "comigs-1gxs", "fedavg+", "fedit", "fedlora", "flexlora", "fedmerge", "fedmerge-fixed",
    "fedprox", "ditto", "sdflora", "feddpa",
)  # fmt: skip
"""All methods that share something and can hide examples; a language model has all of them."""
SGD = {"name": "sgd", "learning_rate": 1.0, "schedule": "constant", "weight_decay": 0.0}
HIDDEN = {"mechanism": "example", "noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp"}


def hidden(federate: Any, method: Any = "fedavg", **settings: Any) -> InProcess:
    """Two users with seven windows each; settings without a dot are of privacy."""
    users = settings.pop("users", USERS)
    dotted = {key: settings.pop(key) for key in list(settings) if "." in key}
    changes = {f"privacy.{key}": value for key, value in {**HIDDEN, **settings}.items()} | dotted
    return federate(method, users=users, base="random:llama?layers=1&dim=32", dtype="float64", changes=changes)


def stirred(federation: InProcess) -> InProcess:
    """Everything that users train is somewhere else than at its start, where half of the gradients are zero."""
    rows = federation.clients.state.rows
    rows += 0.3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3), dtype=rows.dtype)
    federation.clients.update_masks()
    return federation


def noised_of(federation: InProcess) -> PrivateSteps:
    """How its users take steps."""
    private = federation.clients.steps.private
    assert private is not None
    return private


def shared_phase(federation: InProcess) -> Phase:
    """The phase that trains what is shared."""
    clients = federation.clients
    return next(phase for phase in clients.phases if noised_of(federation).applies(phase, clients.model.layout))


def shared_part(federation: InProcess) -> Tree:
    """The tensors of the model that a noised pass has, of every user."""
    clients = federation.clients
    layout = clients.model.layout
    return restrict(layout.views(clients.state.rows), layout, layout.roles - noised_of(federation).local_roles(layout))


def sums_of(federation: InProcess, numbers: list[list[int]]) -> tuple[Tree, Tensor]:
    """The sums of clipped gradients over these examples of each user, and of losses, without noise."""
    clients, noised = federation.clients, noised_of(federation)
    layout = clients.model.layout
    cohort = clients.cohort(list(range(len(numbers))), 0)
    tensors = restrict(clients.model.tensors(cohort.state.rows), layout, layout.roles - noised.local_roles(layout))
    part = padded([torch.tensor(one, dtype=torch.int64) for one in numbers], 1)
    leaves = noised.noised_names(shared_phase(federation), layout)
    bound = float(clients.plan.privacy.first_bound)
    return noised.clipped_sums(clients.model, clients.batch_source, tensors, leaves, cohort, part, bound)
