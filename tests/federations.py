"""What a test does with a federation by hand, between the engine's public parts: a round, an exchange, a gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from safetensors.torch import save
from torch import Tensor

from comingle.data.populations import as_users
from comingle.data.samples.samples import UserSamples
from comingle.methods.base import Phase
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients, LocalRound, train
from comingle.training.kinds.nets import SampleBatchSource


def everyone(federation: InProcess) -> range:
    """All trainers, by number."""
    return range(len(federation.clients.trainers))


def exchange(
    federation: InProcess,
    members: Sequence[int] | None = None,
    done: int | None = None,
    *,
    losses: dict[int, float] | None = None,
    download: bool = True,
) -> None:
    """What these users share is sent and aggregated after round ``done`` (from 1), where the method shares anything.

    None is one round after the last exchange. With ``download`` everybody who is behind receives what came of it.
    """
    done = federation.server.version + 1 if done is None else done
    members = list(everyone(federation) if members is None else members)
    if federation.clients.shares:
        federation.upload(members, done, losses or dict.fromkeys(members, 0.0))
        federation.aggregate()
    if download:
        federation.download(everyone(federation))


def local_round(federation: InProcess, members: Sequence[int], number: int) -> LocalRound:
    """These users receive what the server has had for them, and train in round ``number`` (from 0)."""
    federation.download(members)
    return train(federation.clients, list(members), number)


def download_all(federation: InProcess) -> InProcess:
    """Everybody who is behind receives what the server has."""
    federation.download(everyone(federation))
    return federation


def crossing(federation: InProcess, members: Sequence[int]) -> tuple[int, int]:
    """Bytes that these users send, and then receive, in one more exchange."""
    up, down = federation.clock.upload_bytes, federation.clock.download_bytes
    exchange(federation, members, download=False)
    federation.download(members)
    return federation.clock.upload_bytes - up, federation.clock.download_bytes - down


def replace_user(clients: Clients, number: int, user: UserSamples) -> None:
    """Replace a user by one with other samples, before the first round."""
    users = list(clients.trainers)
    users[number] = user
    clients.users = clients.trainers = as_users(users)
    model = clients.model
    like = {"device": model.device, "dtype": model.dtype, "loss": model.loss}
    batch_source = SampleBatchSource(clients.trainers, clients.plan, clients.batch_size, **like)
    clients.steps = replace(clients.steps, source=batch_source)
    clients.scorer = replace(clients.scorer, steps=clients.steps)


def take_phase(clients: Clients, phase: Phase, round_number: int, step: int) -> None:
    """The optimiser steps of a phase for all rows, as the first of a round."""
    rows, method = list(range(len(clients.state.rows))), clients.method
    cohort = clients.cohort(rows, round_number, looks_back=method.client.looks_back)
    cohort.first_copies = clients.state.rows[cohort.owners] if method.client.looks_across else None
    clients.steps.take_phase(cohort, phase, step)
    clients.state.put(rows, cohort.state)


def message_bytes(tensors: Mapping[str, Tensor], header: Mapping[str, Any], reports: Mapping[str, Tensor]) -> int:
    """The length of a message as it is documented: 22 bytes, the header as JSON, the tensors as safetensors."""
    content = {name: t.contiguous() for name, t in tensors.items()}
    content |= {f"report/{name}": t.contiguous() for name, t in reports.items()}
    return 22 + len(json.dumps(dict(header), separators=(",", ":"))) + len(save(content))


def play_round(federation: InProcess, number: int, members: Sequence[int] | None = None) -> LocalRound:
    """Round ``number`` (from 0) as a run has it: these users download, train, upload; the server aggregates.

    Nobody has what came of it yet: ``federation.download(everyone(federation))`` hands it out.
    """
    members = list(everyone(federation) if members is None else members)
    federation.download(members)
    work = train(federation.clients, members, number)
    if federation.clients.method.exchanges(number + 1):
        exchange(federation, list(work.losses), number + 1, losses=work.losses, download=False)
    return work


def gradient_of(clients: Clients, members: Sequence[int], drawn: Tensor, phase: Phase) -> tuple[Tensor, dict]:
    """Losses of these users' rows on what was drawn, and the gradients of what the phase trains."""
    return clients.steps.gradient(clients.cohort(list(members), 0), drawn, phase)
