"""What the server takes from answers: uploads that are as they must be, and losses that decide which round is best."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from comingle.federation.checking import check_upload, validation_loss
from comingle.federation.claims import counts_samples
from comingle.federation.coordinator import AN_EVENT, Coordinator
from comingle.federation.tasks import Answer
from comingle.protocol.messages import LOSS, Upload, expand, join_uploads, no_uploads
from comingle.protocol.wire import unpack
from comingle.utils.errors import MessageError, RunError

logger = logging.getLogger("comingle")


def take_in(coordinator: Coordinator, answers: Mapping[str, Answer], number: int) -> list[str]:
    """Aggregate the uploads of a round (from 1) that are as they must be; whose they are.

    Where they are fewer than ``network.min_participants`` nobody gets to see what would be made of them.

    Raises:
        RunError: none is.
    """
    found = {name: _upload(coordinator, name, answer, number) for name, answer in answers.items()}
    uploads = {name: upload for name in coordinator.public.users if (upload := found.get(name)) is not None}
    if answers and not uploads:
        raise RunError(f"round {number}: nobody's upload can be used")
    if not is_enough(coordinator, list(uploads), answers, number):
        return []
    _aggregate(coordinator, join_uploads(list(uploads.values())) if uploads else no_uploads(number))
    return list(uploads)


def is_enough(coordinator: Coordinator, users: Sequence[str], answers: Mapping[str, Answer], number: int) -> bool:
    """Whether uploads of these users, of all who answered, are as many as ``network.min_participants``.

    Else the round (from 1) changes nothing, which is told; what users' own noise hides was sent, and counts.
    """
    needed, server = min(coordinator.patience.min_participants, len(answers)), coordinator.server
    if len(users) >= needed:
        return True
    why = f"round {number}: {len(users)} uploads can be used; needed: {needed} (network.min_participants)"
    logger.warning("%s; the model stays as it was", why, extra=AN_EVENT)
    coordinator.observe({"event": "no_sum", "round": number, "reason": f"{why}; the model stays as it was"})
    if server.guard is not None and server.guard.privacy.mechanism == "local":
        server.guard.charge(server.numbers(users))
    server.pass_over(number)
    return False


def _aggregate(coordinator: Coordinator, upload: Upload) -> None:
    """Have the server take in a round's uploads; what it makes of them is looked at before it is kept or sent.

    Raises:
        RunError: it is nothing to go on with. The checkpoint of the round before stays the newest.
    """
    server = coordinator.server
    try:
        server.aggregate(upload)
        broken = [name for name, t in server.kept.items() if not bool(t.isfinite().all())]
        why = f"{broken[0]!r} is not finite" if broken else ""
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        why = " ".join(str(error).split())
    if why:
        sizes = [
            max((float(t[i].abs().max()) for t in upload.tensors.values()), default=0.0)
            for i in range(len(upload.users))
        ]
        size, user = max(zip(sizes, upload.users, strict=True))
        told = f"what the server makes of uploads cannot be used: {why}; the largest number, {size:.3g}, is of {user!r}"
        raise RunError(f"round {upload.round}: {told}; the same command goes on from the round before")


def _upload(coordinator: Coordinator, name: str, answer: Answer, number: int) -> Upload | None:
    try:
        if "left_out" in answer.told or not answer.messages:
            raise MessageError(str(answer.told.get("left_out", "no upload in the answer")))
        message = unpack(answer.messages[0])
        if not isinstance(message, Upload):
            raise MessageError("a download where an upload belongs")
        check_upload(
            replace(message, tensors=expand(message.tensors, coordinator.server.uploads)),
            coordinator.model.layout,
            coordinator.house.method,
            user=name,
            number=number,
            rank=coordinator.largest_rank(name),
            weighted=coordinator.server.weighted,
            adaptive=coordinator.server.adaptive,
            **({"most": coordinator.patience.max_samples} if counts_samples(coordinator.house.recipe) else {}),
        )
    except MessageError as error:
        logger.warning("user %r is left out of round %d: %s", name, number, error, extra=AN_EVENT)
        coordinator.observe({"event": "rejected", "round": number, "user": name, "reason": str(error)})
        return None
    message.reports.pop(LOSS, None)  # which not everybody tells
    return message


def validation_losses(coordinator: Coordinator, answers: Mapping[str, Answer], done: int) -> dict[str, float]:
    """What users report of their models after ``done`` rounds, where that decides which round's are kept."""
    losses: dict[str, float] = {}
    if coordinator.house.training.select != "best":
        return losses
    for name in coordinator.public.users:
        for data in answers[name].messages[-1:] if name in answers else ():  # behind an upload, if there is one
            try:
                loss = validation_loss(unpack(data), user=name, done=done)
            except MessageError as error:
                logger.warning("user %r: %s", name, error)
                continue
            if loss is not None:
                losses[name] = loss
    return losses
