"""The rounds of a federation whose users are elsewhere: the same as in one process, asked for in tasks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from comingle.federation.coordinator import Coordinator
from comingle.federation.routing import routing_event
from comingle.federation.summing import sum_up
from comingle.federation.taking import take_in, validation_losses
from comingle.federation.tasks import Answer
from comingle.protocol.messages import validation_report
from comingle.training.evaluation import evaluation_event, metrics_of
from comingle.training.rounds import Due, due_in
from comingle.training.settings import counts_exchanged
from comingle.utils.errors import RunError
from comingle.utils.records import Metrics

logger = logging.getLogger("comingle")

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
        if coordinator.server.guard is not None:
            coordinator.observe({"event": "privacy", "round": done, **coordinator.server.guard.spent})
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
