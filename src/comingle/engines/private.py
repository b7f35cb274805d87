"""What each half has of privacy, made from the settings of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from comingle.config.settings import KEY, Terms, Training
from comingle.engines.training import exchanged_after, participants
from comingle.methods.base import Method
from comingle.privacy.accounting import calibrate, most_releases, release_of
from comingle.privacy.checks import sharing
from comingle.privacy.guard import Guard, Ledger, Shield
from comingle.privacy.noise import Examples, Work, kept_key, new_key
from comingle.privacy.secure_sum import Sums


def shield_of(training: Training) -> Shield | None:
    """What users do to their uploads."""
    if training.privacy is None or training.privacy.of_examples:
        return None
    return Shield(privacy=training.privacy, key=_key(training), sums=training.sums)


def examples_of(training: Training) -> Examples | None:
    """What users do to gradients of single examples."""
    privacy = training.privacy
    return Examples(privacy=privacy, key=_key(training)) if privacy is not None and privacy.of_examples else None


def work_of(training: Training, method: Method, name: str, *, examples: int, iterations: int) -> Work:
    """What a user with so many examples, and so many local iterations in a round, does in a whole run."""
    steps = [phase.steps * -(-iterations // phase.every) for phase in sharing(method)]
    rounds = _turns(training)[name]
    return Work(examples=examples, batch=training.batch_size, steps=sum(steps), rounds=rounds)


@lru_cache(maxsize=16)
def _turns(training: Training) -> Counter[str]:
    """In how many rounds each user takes part."""
    rounds = (participants(training, number, training.users) for number in range(training.rounds))
    return Counter(training.users[user] for members in rounds for user in members)


def guard_of(training: Training, users: Sequence[str]) -> Guard | None:
    """What the server does to them."""
    privacy = training.privacy
    if privacy is None or not privacy.noisy:
        return None
    if privacy.of_examples:
        return Ledger(privacy=privacy, participation=training.participation, users=tuple(users), key="", works=dict)
    return Guard(privacy=privacy, participation=training.participation, users=tuple(users), key=_key(training))


def terms_of(training: Training, run: str, done: int, size: int) -> Terms:
    """What all know of the sum of round ``done`` (from 1) of so many numbers; who is asked is drawn from the seed."""
    assert training.sums is not None
    names = training.sums.users
    asked = tuple(names[user] for user in participants(training, done - 1, names))
    return training.sums.terms(run, done, size, asked)


def with_sums(training: Training, users: Sequence[str]) -> Training:
    """The settings with how uploads are summed, where the server sees sums alone; ``users`` are all of the federation.

    Raises:
        RecipeError: a round has too few users for a sum, or the grid is too coarse for the noise.
    """
    privacy = training.privacy
    if privacy is None or privacy.secure_aggregation is None:
        return training
    weighted = training.weighting != "uniform" and not privacy.noisy
    sums = Sums(privacy=privacy, participation=training.participation, users=tuple(users), weighted=weighted)
    sums.check()
    return replace(training, sums=sums)


def keep_key(folder: Path, *halves: Shield | Examples | Guard | None, anew: bool = False, begun: bool = False) -> None:
    """Have these go on with the key in a folder, which is made where there is none.

    A run that begins ``anew`` where another was has another: with one key both would draw the same users. One that has
    ``begun`` would draw other noise in a round that it plays again, which is a second release.

    Raises:
        RunError: the key is damaged, or is gone.
    """
    if anew:
        (folder / KEY).unlink(missing_ok=True)
    for half in halves:
        if half is not None and half.privacy.noisy and half.privacy.noise == "secret":
            half.key = kept_key(folder, begun=begun)


def key_of(*halves: Shield | Examples | Guard | None) -> str:
    """The key that they have in common; none where nobody has one."""
    return next((half.key for half in halves if half is not None), "")


def set_key(key: str, *halves: Shield | Examples | Guard | None) -> None:
    """Have these go on with a key that another process of the run has kept."""
    for half in halves:
        if half is not None:
            half.key = key


def _key(training: Training) -> str:
    """One that nobody knows until a kept one takes its place; in simulations that ask for it, the seed's."""
    assert training.privacy is not None
    return f"seed {training.seed}" if training.privacy.noise == "reproducible" else new_key()


def with_noise(training: Training, method: Method, users: Sequence[str]) -> Training:
    """The settings with a noise multiplier: given, or the least with which the planned rounds spend epsilon.

    Raises:
        RecipeError: the package that computes it is not installed, or no noise is enough.
    """
    privacy = training.privacy
    if privacy is not None and privacy.of_examples:
        return replace(training, users=tuple(users))
    if privacy is None or not privacy.noisy or privacy.noise_multiplier is not None:
        return training
    count = planned_releases(training, method, users)
    multiplier = calibrate(privacy, training.participation, len(users), count)
    return replace(training, privacy=replace(privacy, noise_multiplier=multiplier))


def planned_releases(training: Training, method: Method, users: Sequence[str]) -> int:
    """In how many rounds of a whole run something is revealed of the user of whom most is."""
    privacy = training.privacy
    assert privacy is not None
    rounds = training.rounds if method.trains else 0
    exchanging = [n for n in range(rounds) if exchanged_after(method, training, bool(method.shared), n + 1)]
    known = replace(privacy, noise_multiplier=privacy.noise_multiplier or 1.0)
    if release_of(known, training.participation, len(users)).sampled:
        return len(exchanging)
    return most_releases([participants(training, number, users) for number in exchanging])
