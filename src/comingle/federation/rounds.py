"""The rounds of a federation over the network, with secure sums.

A user tells its own numbers; by which names they go the server knows itself, and how many there must be.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from comingle.federation.checks import check_upload, validation_loss
from comingle.federation.coordinator import AN_EVENT, Coordinator
from comingle.federation.messages import Answer, counts_samples
from comingle.privacy import secure_client
from comingle.privacy.secure_server import SumCollector
from comingle.protocol.messages import LOSS, Download, Upload, expand, join_uploads, no_uploads, validation_report
from comingle.protocol.wire import pack, unpack
from comingle.training.evaluation import evaluation_event, metrics_of, mixtures_event
from comingle.training.privacy import terms_of
from comingle.training.rounds import Due, due_in
from comingle.training.settings import counts_exchanged
from comingle.utils.errors import MessageError, NoSumError, RunError
from comingle.utils.records import Metrics

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
    server.pass_over(number, server.numbers(users))
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


def sum_up(coordinator: Coordinator, answers: Mapping[str, Answer], done: int) -> list[str]:
    """Sum what users have trained in round ``done`` (from 1), of those who advertised; who is in the sum, if there is.

    Where too few are left the round ends without: nothing is revealed, the model stays, and that is told.
    """
    server = coordinator.server
    assert server.sums is not None
    terms = terms_of(coordinator.house.training, coordinator.run, done, server.size)
    work = _Sum(coordinator=coordinator, collection=SumCollector(terms=terms))
    try:
        total = work.total(answers, server.sums.largest(done))
    except NoSumError as error:
        logger.warning("%s", error, extra=AN_EVENT)
        coordinator.observe({"event": "no_sum", "round": done, "reason": str(error)})
        if work.revealing:  # users may have opened what the server has not understood
            server.charge([server.users.index(user) for user in work.collection.survivors])
        server.pass_over(done)
        return []
    survivors = work.collection.survivors
    if not is_enough(coordinator, survivors, answers, done):
        return []
    server.aggregate_sum(total, survivors, done)
    return survivors


@dataclass(kw_only=True)
class _Sum:
    """``revealing`` says whether users have been asked to open their shares."""

    coordinator: Coordinator
    collection: SumCollector
    revealing: bool = False

    def total(self, answers: Mapping[str, Answer], largest: int) -> np.ndarray:
        """All steps.

        Raises:
            NoSumError: too few users have answered in one.
        """
        server, terms, done = self.collection, self.collection.terms, self.collection.terms.round
        self._take(answers, lambda name, got: server.advertised(name, secure_client.read_keys(got, name, done)))
        server.require(server.roster, "have advertised")

        def share(name: str, got: Upload | Download) -> None:
            others = [other for other in server.roster if other != name]
            server.shared(name, secure_client.read_shares(got, name, done, others, sealed=True))

        self._ask("share", server.roster, lambda name: secure_client.roster_message(name, done, server.roster), share)
        server.require(server.sealed, "have shared")

        def add(name: str, got: Upload | Download) -> None:
            server.added(name, secure_client.read_masked(got, name, done, terms.entries, terms.word))

        self._ask("mask", server.sharers, lambda n: secure_client.sealed_message(n, done, server.sealed_for(n)), add)
        server.require(server.survivors, "have masked")
        survivors, self.revealing = list(server.survivors), True

        def opened(name: str, got: Upload | Download) -> None:
            server.unmasked(name, secure_client.read_shares(got, name, done, server.sharers, sealed=False))

        self._ask("unmask", survivors, lambda name: secure_client.survivors_message(name, done, survivors), opened)
        return server.total(largest)

    def _ask(
        self,
        step: str,
        names: Iterable[str],
        say: Callable[[str], Download],
        take: Callable[[str, Upload | Download], None],
    ) -> None:
        """Have users do a step, and take what they answer."""
        said = {name: pack(say(name)) for name in names}
        asked = dict.fromkeys(said, (step,))
        self._take(self.coordinator.ask(asked, self.collection.terms.round - 1, messages=said), take)

    def _take(self, answers: Mapping[str, Answer], take: Callable[[str, Upload | Download], None]) -> None:
        """Whatever is not as it must be is left out, in everybody's order."""
        for name in (one for one in self.coordinator.public.users if one in answers):
            answer = answers[name]
            try:
                if "left_out" in answer.told or not answer.messages:
                    raise MessageError(str(answer.told.get("left_out", "nothing for a sum in the answer")))
                take(name, unpack(answer.messages[0]))
            except MessageError as error:
                number = self.collection.terms.round
                logger.warning("user %r is left out of round %d: %s", name, number, error, extra=AN_EVENT)
                event = {"event": "rejected", "round": number, "user": name}
                self.coordinator.observe({**event, "reason": str(error)})


RoutingMetrics = Mapping[str, Mapping[str, Any]]
"""What users have told in their answers."""


def routing_event(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """What an evaluation's event says of those who tell it; nothing of numbers that cannot be theirs."""
    return _gates(coordinator, told) | _mixtures(coordinator, told)


def _gates(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """In each layer as many mean gates as the user has experts, in as many layers as most users say."""
    users, model = coordinator.public.users, coordinator.model
    if not model.routed:
        return {}
    names = {name: model.expert_names(users.index(name)) for name, one in told.items() if "gates" in one}
    fitting = {
        name: told[name]["gates"]
        for name, experts in names.items()
        if all(len(layer) == len(experts) for layer in told[name]["gates"])
    }
    layers = _usual([len(gates) for gates in fitting.values()])
    scores = {name: gates for name, gates in fitting.items() if len(gates) == layers > 0}
    return {"experts": {name: names[name] for name in scores}, "expert_scores": scores} if scores else {}


def _mixtures(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """Those that users tell; the weights by which the server merges models for its users are its own."""
    method, server = coordinator.house.method, coordinator.server
    merging = method.server.merging_weights(server.kept)
    if merging is not None:
        return mixtures_event(coordinator.public.users, merging.double().cpu(), method)
    mixture = method.placement.mixture
    size = method.server.server_models if mixture is None else mixture.clusters
    rows = {name: one["mixture"] for name, one in told.items() if len(one.get("mixture", ())) == size}
    return mixtures_event(list(rows), torch.tensor(list(rows.values()), dtype=torch.float64), method) if rows else {}


def _usual(sizes: Sequence[int]) -> int:
    """What is there most often, of equals the first; one user who says something else changes nothing."""
    return Counter(sizes).most_common(1)[0][0] if sizes else 0


Save = Callable[[int, bool], None]
"""Keeps the server's state after so many rounds, and whether no more follow though more were planned."""

END_SECONDS = 60.0
"""So long is waited for users to hear that all is over."""

Told = dict[str, Mapping[str, Any]]
"""What users have told in their answers."""


def run_tasks(coordinator: Coordinator, *, first_round: int = 0, stopped: bool = False, save: Save) -> Metrics:
    """Train from ``first_round`` (from 0) to the end; the run's metrics, of those who let them be known.

    A run that was ``stopped`` by its privacy budget has no more rounds.

    Raises:
        RunError: too few users answered in time.
    """
    training, method = coordinator.house.training, coordinator.house.method
    names, rounds = coordinator.public.users, first_round if stopped else training.rounds if method.trains else 0
    coordinator.clock.started = time.perf_counter()
    last: Told = {}
    if rounds and first_round == 0 and training.evaluate_first:
        last = _evaluate(coordinator, names, 0)
    for number in range(first_round, rounds):
        due = due_in(method, training, coordinator.shares, number)
        members = coordinator.server.invite(training, number, releases=due.exchanges)
        if members is None:  # one more would exceed the privacy budget
            logger.warning("the privacy budget is spent after round %d of %d", number, rounds)
            rounds, last = number, _evaluate_stopped(coordinator, number)
            save(number, True)
            break
        last = _play(coordinator, number, due, [names[i] for i in members]) or last
        save(number + 1, False)
    ended = rounds
    if training.select == "best":
        ended = coordinator.best_round
        again = ("evaluate",) if ended != rounds else ()
        answers = coordinator.ask(dict.fromkeys(names, ("choose", *again)), rounds)
        last = {name: answer.told for name, answer in answers.items()} if again else last
    receives = not stopped or counts_exchanged(method, training)
    told = last or _evaluate(coordinator, names, rounds, silent=first_round > 0, receives=receives)
    return _summarise(coordinator, told, rounds, ended)


def tell_end(coordinator: Coordinator, rounds: int) -> None:
    """Tell everybody who is there that all is over; after the server has written down what came of it."""
    coordinator.ask(dict.fromkeys(coordinator.public.users, ("end",)), rounds, seconds=END_SECONDS)


def _evaluate_stopped(coordinator: Coordinator, done: int) -> Told:
    """Have everybody evaluate, once, what a run ends with whose budget allows no further round."""
    exchanged = counts_exchanged(coordinator.house.method, coordinator.house.training)
    return _evaluate(coordinator, coordinator.public.users, done, finishes=exchanged, receives=exchanged)


def _play(coordinator: Coordinator, number: int, due: Due, members: Sequence[str]) -> Told:
    """One round; what users told of their models, if they were evaluated."""
    names, done = coordinator.public.users, number + 1
    local = ("evaluate",) if due.evaluates == "local" else ()
    summed = due.exchanges and coordinator.server.sums is not None
    work = ("receive", "train", *(("advertise" if summed else "upload",) if due.exchanges else ()), *local)
    steps: dict[str, Sequence[str]] = dict.fromkeys(members, work)
    if local:
        steps |= {name: ("receive", "evaluate") for name in names if name not in steps}
    answers = coordinator.ask(steps, number, about={"done": done})
    worked = {name: answers[name] for name in members if name in answers}
    _require_enough(coordinator, worked, members, done)
    senders = sum_up(coordinator, worked, done) if summed else []  # with its bytes told of in this round
    _tell(coordinator, worked, done)
    told = _evaluated(coordinator, answers, done) if local else {}
    if due.exchanges:
        senders = senders if summed else take_in(coordinator, worked, done)
        if (judged := coordinator.server.judged) is not None:
            coordinator.observe(judged.as_event(done))
        if (account := coordinator.server.account) is not None:
            coordinator.observe({"event": "privacy", "round": done, **account.spent})
        if coordinator.house.method.server.peer_to_peer:
            coordinator.ask(dict.fromkeys(senders, ("receive",)), number)
            coordinator.server.forget()
    if due.evaluates == "exchanged":
        told = _evaluate(coordinator, names, done, finishes=due.ends)
    return told


def _require_enough(coordinator: Coordinator, worked: Mapping[str, Answer], members: Sequence[str], done: int) -> None:
    needed = min(coordinator.patience.min_participants, len(members))
    if members and len(worked) < max(1, needed):
        raise RunError(
            f"round {done}: {len(worked)} of {len(members)} participants answered in "
            f"{coordinator.patience.round_timeout:g} s; needed: {max(1, needed)}"
        )


def _tell(coordinator: Coordinator, worked: Mapping[str, Answer], done: int) -> None:
    """Count the round, and its event."""
    clock, told = coordinator.clock, {name: answer.told for name, answer in worked.items()}
    sent, received = clock.upload_bytes - clock.told_upload_bytes, clock.download_bytes - clock.told_download_bytes
    clock.told_upload_bytes, clock.told_download_bytes = clock.upload_bytes, clock.download_bytes
    tokens = sum(int(one.get("tokens", 0)) for one in told.values())
    seconds = max((float(one.get("train_seconds", 0.0)) for one in told.values()), default=0.0)
    clock.train_seconds += seconds
    clock.tokens += tokens
    clock.user_rounds += len([one for one in told.values() if "left_out" not in one])
    coordinator.observe(
        {
            "event": "round",
            "round": done,
            "train_loss_nats": {name: one["train_loss"] for name, one in told.items() if "train_loss" in one},
            "upload_bytes": sent,
            "download_bytes": received,
            "tokens": tokens,
            "seconds": seconds,
        }
    )


def _evaluate(
    coordinator: Coordinator,
    names: Sequence[str],
    done: int,
    *,
    finishes: bool = False,
    silent: bool = False,
    receives: bool = True,
) -> Told:
    """Have everybody evaluate the model that it has now, behind whatever the server has for it.

    What is ``silent`` was told of, and its bytes counted, before the server was stopped.
    """
    steps = (*(("receive",) if receives else ()), *(("finish",) if finishes else ()), "evaluate")
    clock = coordinator.clock
    counted = clock.upload_bytes, clock.download_bytes
    answers = coordinator.ask(dict.fromkeys(names, steps), max(0, done - 1), about={"done": done})
    if silent:
        clock.upload_bytes, clock.download_bytes = counted
    return _evaluated(coordinator, answers, done, silent=silent)


def _evaluated(coordinator: Coordinator, answers: Mapping[str, Answer], done: int, *, silent: bool = False) -> Told:
    """Tell of an evaluation, and let the server judge the validation losses."""
    names = [name for name in coordinator.public.users if name in answers]
    told = {name: answers[name].told for name in names if answers[name].told.get("evaluated")}
    scores = {
        name: dict(one["score"]) for name, one in told.items() if f"test_{_measure(told)}" in one.get("score", {})
    }
    losses = {} if silent else validation_losses(coordinator, answers, done)  # which have decided already
    event = evaluation_event(scores, _measure(told), done=done, iterations=done * coordinator.local_steps)
    if losses:
        before, everyone = coordinator.server.lowest_loss, coordinator.public.users
        said = coordinator.server.judge(validation_report(losses, done), everyone)
        coordinator.verdicts |= dict(zip(everyone, said.split(), strict=True))
        if coordinator.server.lowest_loss < before:
            coordinator.best_round = done
        event["mean_valid_loss"] = fmean(losses.values())
    if not silent:
        coordinator.observe(event | routing_event(coordinator, told))
    return told


def _measure(told: Told) -> str:
    """By which scores are compared: what most users say, who say so whether they tell theirs or not."""
    return _most([str(one["measure"]) for one in told.values() if "measure" in one], "loss")


def _most(values: Sequence[str], otherwise: str) -> str:
    """What is there most often, of equals the first; one user who says something else changes nothing."""
    return Counter(values).most_common(1)[0][0] if values else otherwise


def _summarise(coordinator: Coordinator, told: Told, rounds: int, ended: int) -> Metrics:
    needed = {f"test_{_measure(told)}", "trainable_parameters"}
    users = {n: dict(one["metrics"]) for n, one in told.items() if _has(one.get("metrics", {}), needed)}
    unit = _most([str(one["unit"]) for one in coordinator.joined.values() if "unit" in one], "tokens")
    house = coordinator.house
    return metrics_of(
        users,
        coordinator.model,
        house.method,
        house.training,
        coordinator.clock,
        rounds=rounds,
        selected=ended,
        measure=_measure(told),
        unit=unit,
    )


def _has(metrics: Mapping[str, Any], names: Collection[str]) -> bool:
    return all(metrics.get(name) is not None for name in names)
