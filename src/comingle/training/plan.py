"""Differentially private steps, and the privacy settings of client and server.

Rows of a pass are examples: what a user shares is repeated for each of its examples, so that one backward pass gives
every example's gradient by itself, as it gives every user's elsewhere. The model of that pass has what is shared and
nothing that a user trains without noise: else the released gradient would be a function of what the same text has
made of specialists and routers, which no account covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import KEY, AggregationSection, Terms
from comingle.methods.base import Method, Phase
from comingle.models.model import Model
from comingle.privacy.accounting import Work, most_releases
from comingle.privacy.base import PrivacyMechanism, PrivateStep, overrides
from comingle.privacy.mechanisms import (
    calibrate,
    check_delta,
    make_mechanisms,
    release_of,
    sharing,
)
from comingle.privacy.noise import clipped, digest, kept_key, new_key
from comingle.privacy.secure_sum import Sums
from comingle.training.batch_sources import Feed
from comingle.training.cohort_state import Members
from comingle.training.settings import Portions, RunPlan, exchanged_after, participants, selected
from comingle.utils.errors import RecipeError, list_names
from comingle.utils.trees import Layout, Tree, restrict


def client_mechanisms(plan: RunPlan) -> tuple[PrivacyMechanism, ...]:
    """Return the privacy mechanisms of a client."""
    return make_mechanisms(plan.privacy, sums=plan.sums, participation=plan.participation, key=_key(plan))


def server_mechanisms(plan: RunPlan, users: Sequence[str]) -> tuple[PrivacyMechanism, ...]:
    """Return the privacy mechanisms of a server of these users."""
    return make_mechanisms(
        plan.privacy,
        plan.aggregation,
        sums=plan.sums,
        participation=plan.participation,
        users=users,
        key=_key(plan),
    )


def work_of(plan: RunPlan, name: str, *, examples: int, iterations: int) -> Work:
    """What a user with so many examples, and so many local iterations in a round, does in a whole run."""
    steps = [phase.steps * -(-iterations // phase.every) for phase in sharing(plan.method)]
    rounds = _rounds_of_users(plan.participation, plan.seed, plan.training.rounds, plan.users)[name]
    return Work(examples=examples, batch=plan.training.batch_size, steps=sum(steps), rounds=rounds)


@lru_cache(maxsize=16)
def _rounds_of_users(
    participation: float | tuple[tuple[int, ...], ...], seed: int, rounds: int, users: tuple[str, ...]
) -> Counter[str]:
    """Return the number of rounds in which each user takes part."""
    taking_part = (selected(participation, seed, number, users) for number in range(rounds))
    return Counter(users[user] for chosen in taking_part for user in chosen)


def terms_of(plan: RunPlan, run: str, done: int, size: int) -> Terms:
    """What all know of the sum of round ``done`` (from 1) of so many numbers; who is asked is drawn from the seed."""
    assert plan.sums is not None
    names = plan.sums.users
    asked = tuple(names[user] for user in participants(plan, done - 1, names))
    return plan.sums.terms(run, done, size, asked)


def with_sums(plan: RunPlan, users: Sequence[str]) -> RunPlan:
    """The settings with how uploads are summed, where the server sees sums alone; ``users`` are all of the federation.

    Raises:
        RecipeError: a round has too few users for a sum, or the grid is too coarse for the noise.
    """
    privacy = plan.privacy
    if privacy is None or privacy.secure_aggregation is None:
        return plan
    weighted = plan.training.weighting != "uniform" and not privacy.noisy
    sums = Sums(privacy=privacy, participation=plan.participation, users=tuple(users), weighted=weighted)
    sums.check()
    return replace(plan, sums=sums)


def keep_key(folder: Path, *mechanisms: PrivacyMechanism, anew: bool = False, begun: bool = False) -> None:
    """Give mechanisms the key that is kept in a folder; make one where there is none.

    Args:
        folder: Of the run.
        mechanisms: Of the client, the server or both.
        anew: Replace the key. With one key for two runs both would draw the same users.
        begun: The run has drawn from the key before. With another key a round that is repeated would have other noise,
            which is a second release.

    Raises:
        RunError: The key is damaged, or is gone.
    """
    if anew:
        (folder / KEY).unlink(missing_ok=True)
    for mechanism in mechanisms:
        if mechanism.needs_key:
            mechanism.key = kept_key(folder, begun=begun)


def key_of(*mechanisms: PrivacyMechanism) -> str:
    """Return the key of the first mechanism, or an empty string."""
    return next((mechanism.key for mechanism in mechanisms), "")


def set_key(key: str, *mechanisms: PrivacyMechanism) -> None:
    """Give mechanisms the key that another process of the run has."""
    for mechanism in mechanisms:
        mechanism.key = key


def _key(plan: RunPlan) -> str:
    """A new key until a kept one takes its place; in simulations that ask for it, the seed."""
    reproducible = plan.privacy is not None and plan.privacy.noise == "reproducible"
    return f"seed {plan.seed}" if reproducible else new_key()


def with_noise(plan: RunPlan, users: Sequence[str]) -> RunPlan:
    """The settings with a noise multiplier: given, or the least with which the planned rounds spend epsilon.

    Raises:
        RecipeError: the package that computes it is not installed, or no noise is enough.
    """
    privacy = plan.privacy
    if privacy is not None and privacy.protects == "example":
        return replace(plan, users=tuple(users))
    if privacy is None or not privacy.noisy or privacy.noise_multiplier is not None:
        return plan
    count = planned_releases(plan, users)
    multiplier = calibrate(privacy, plan.participation, len(users), count)
    return replace(plan, privacy=privacy.model_copy(update={"noise_multiplier": multiplier}))


def planned_releases(plan: RunPlan, users: Sequence[str]) -> int:
    """In how many rounds of a whole run something is revealed of the user of whom most is."""
    privacy = plan.privacy
    assert privacy is not None
    rounds, shares = plan.training.rounds if plan.method.trains else 0, bool(plan.method.shared)
    exchanging = [n for n in range(rounds) if exchanged_after(plan, shares, n + 1)]
    known = privacy.model_copy(update={"noise_multiplier": privacy.noise_multiplier or 1.0})
    if release_of(known, plan.participation, len(users)).sampled:
        return len(exchanging)
    return most_releases([participants(plan, number, users) for number in exchanging])


TUNING = "tuning"
"""Label of the phases that finetune: their batches have a random stream of their own, and nothing of them is sent."""


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """Local steps on what users share, of which a privacy mechanism makes the gradients.

    Args:
        mechanism: Has the hook ``client_gradients``.
        plan: Has the method, which says what is shared.
    """

    mechanism: PrivacyMechanism
    plan: RunPlan

    def applies(self, phase: Phase, layout: Layout) -> bool:
        """Whether a phase trains something that is sent."""
        return phase.label != TUNING and bool(self.leaves(phase, layout))

    def leaves(self, phase: Phase, layout: Layout) -> list[str]:
        """The tensors of which a phase trains entries that are shared."""
        shared, roles = self.plan.method.shared, phase.roles
        both = ((slot.name, zip(slot.chosen(shared), slot.chosen(roles), strict=True)) for slot in layout.slots)
        return [name for name, entries in both if any(sent and moves for sent, moves in entries)]

    def alone(self, phase: Phase, layout: Layout, *, everything: bool) -> list[str]:
        """The tensors of which a phase trains entries that are a user's own, or all that it trains."""
        slots, shared, reached = layout.touching(phase.reached).slots, self.plan.method.shared, phase.reached
        both = ((slot.name, zip(slot.chosen(shared), slot.chosen(reached), strict=True)) for slot in slots)
        return [name for name, entries in both if everything or any(moves and not sent for sent, moves in entries)]

    def own(self, layout: Layout) -> frozenset[str]:
        """The roles that are trained without noise."""
        return (layout.roles & self.plan.method.client.trained) - self.plan.method.shared

    def works(self, feed: Feed) -> dict[str, Work]:
        """What each of the feed's trainers does."""
        return {trainer.name: self.work(feed, number) for number, trainer in enumerate(feed.trainers)}

    def work(self, feed: Feed, trainer: int) -> Work:
        """What one of them does.

        Raises:
            RecipeError: it has so many examples that delta would allow one of them to be published.
        """
        name, count = feed.trainers[trainer].name, feed.examples(trainer)
        if self.plan.privacy is not None:
            check_delta(self.plan.privacy, name, count)
        return work_of(self.plan, name, examples=count, iterations=feed.steps(trainer))

    # ---------------------------------------------------------------- a step

    def step(
        self,
        model: Model,
        feed: Feed,
        portions: Portions,
        cohort: Members,
        phase: Phase,
        place: Sequence[int],
        at: Sequence[int],
        plain: tuple[Float[Tensor, " users"], Tree] | None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Losses, and gradients of all that a phase trains: noised ones of what the users ``at`` share.

        All others, and the losses, are the ``plain`` ones, where there are any.
        """
        losses, own = plain or (torch.zeros(len(cohort.rows)), Tree())
        if not at:
            return losses, own
        some = cohort if len(at) == len(cohort.rows) else cohort.only(at)
        found, shared = self.gradients(model, feed, portions, some, phase, place)
        if plain is None:
            losses[list(at)] = found
        return losses, self.joined(model.layout, phase, own, shared, at, len(cohort.rows))

    def gradients(
        self, model: Model, feed: Feed, portions: Portions, cohort: Members, phase: Phase, place: Sequence[int]
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Of each user the mean loss, estimated from its batch, and the noised gradient of what it shares.

        Tensors are cut to their shared entries. ``place`` says which step of the round this is.
        """
        layout, rows, number = model.layout, cohort.part.rows, cohort.round_number
        kept = layout.roles - self.own(layout)
        works = [self.work(feed, owner) for owner in cohort.owners]
        stamps = [digest({n: t[i] for n, t in self._shared(layout, rows).items()}) for i in range(len(rows))]
        streams = [(name, number, phase.purpose, *place, s) for name, s in zip(cohort.names, stamps, strict=True)]
        tensors, leaves = restrict(model.tensors(rows), layout, kept), self.leaves(phase, layout)

        def sums(part: Int[Tensor, "u n"], bound: float) -> tuple[Tree, Float[Tensor, " u"]]:
            return self.clipped_sums(model, feed, tensors, leaves, cohort, part, bound)

        step = PrivateStep(works=works, streams=streams, batch=portions.sequences, clipped_sums=sums)
        with model.randomness(self.mechanism.key, cohort.names[0], number, *place):  # masks of a known seed hide nobody
            means, found = self.mechanism.client_gradients(step)
        return means.float(), {name: t.to(rows.dtype) for name, t in found.items()}

    def clipped_sums(
        self,
        model: Model,
        feed: Feed,
        tensors: Tree,
        leaves: Sequence[str],
        cohort: Members,
        part: Int[Tensor, "u n"],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Return sums of each user's clipped gradients, float64, and of its losses over examples of these numbers."""
        drawn = feed.numbered(cohort.owners, part, cohort.round_number).to(cohort.part.rows.device)
        return self.sums_over(model, feed, tensors, leaves, cohort.owners, drawn, bound)

    def sums_over(
        self,
        model: Model,
        feed: Feed,
        tensors: Tree,
        leaves: Sequence[str],
        owners: Sequence[int],
        drawn: Int[Tensor, "u n ..."],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Return the same over examples that were drawn: one pass, whose rows they are, the first user's first."""
        users, count = drawn.shape[:2]
        who = [owner for owner in owners for _ in range(count)]
        wide = {n: t.detach().repeat_interleave(count, 0) for n, t in tensors.items()}
        for name in leaves:
            wide[name].requires_grad_()
        rows = drawn.flatten(0, 1).unsqueeze(1)
        batch: Any = feed.read("train", who, rows)
        losses = model.without(self.own(model.layout)).losses_of_each(wide, who, batch)
        means = losses.flatten(1).sum(1) / feed.counted(rows).clamp(min=1)
        found = torch.autograd.grad(means.sum(), [wide[n] for n in leaves], materialize_grads=True)
        changes = clipped(dict(zip(leaves, found, strict=True)), bound)
        sums = {n: t.view(users, count, *t.shape[1:]).sum(1) for n, t in changes.items()}
        return sums, means.detach().double().view(users, count).sum(1).cpu()

    def _shared(self, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
        return restrict(layout.views(rows), layout, self.plan.method.shared)

    def joined(self, layout: Layout, phase: Phase, plain: Tree, noised: Tree, at: Sequence[int], users: int) -> Tree:
        """``plain`` gradients with ``noised`` ones, cut to shared entries, in their place for users ``at``."""
        whole = Tree()
        for slot in layout.touching(phase.reached).slots:
            if slot.name not in noised:
                whole[slot.name] = plain[slot.name]
                continue
            made = noised[slot.name]
            full = plain.get(slot.name)
            full = made.new_zeros(users, *slot.shape) if full is None else full.clone()
            keep = [i for i, shared in enumerate(slot.chosen(self.plan.method.shared)) if shared]
            if len(keep) == len(slot.roles):
                full[list(at)] = made
            else:
                full[torch.tensor(at).unsqueeze(1), torch.tensor(keep)] = made
            whole[slot.name] = full
        return whole


def private_steps(mechanisms: Sequence[PrivacyMechanism], model: Model, plan: RunPlan) -> PrivateSteps | None:
    """Return the local steps of a mechanism that protects single examples, if a run has one.

    Raises:
        RecipeError: What is shared is no model by itself, or examples of a batch have statistics in common.
    """
    mechanism = next((one for one in mechanisms if overrides(one, "client_gradients")), None)
    if mechanism is None:
        return None
    where = f"privacy: method {plan.method.name}"
    if model.batchwise:
        raise RecipeError(
            f"{where}: statistics of batch norm are of all examples of a batch together; allowed: a net with "
            "group norm, as net:resnet9-group"
        )
    steps = PrivateSteps(mechanism=mechanism, plan=plan)
    try:
        model.without(steps.own(model.layout))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return steps


def make_plan(recipe: Recipe, method: Method, names: Sequence[str]) -> RunPlan:
    """Return the plan of a recipe for its users, with noise and sums as its privacy asks for.

    Args:
        recipe: The recipe.
        method: Its method.
        names: Names of all users, in order.

    Raises:
        RecipeError: ``participation`` names somebody who is not a user, or no noise is enough.
    """
    participation: Any = recipe.training.participation
    if isinstance(participation, list):
        for name in (n for members in participation for n in members):
            if name not in names:
                raise RecipeError(f"training.participation: no user {name!r}; there are: {list_names(names)}")
        participation = tuple(tuple(names.index(n) for n in members) for members in participation)
    plan = RunPlan(
        method=method,
        training=recipe.training,
        evaluation=recipe.evaluation,
        checkpoints=recipe.checkpoints,
        runtime=recipe.runtime,
        privacy=recipe.privacy,
        aggregation=aggregation_of(recipe),
        seed=recipe.seed,
        participation=participation,
        test_limit=test_limit_of(recipe),
    )
    return with_sums(with_noise(plan, names), names)


def test_limit_of(recipe: Recipe) -> str:
    """Return the recipe key that limits each user's test data; empty where the kind of data has none."""
    return "data.max_test_tokens" if hasattr(recipe.data, "max_test_tokens") else ""


def aggregation_of(recipe: Recipe) -> AggregationSection | None:
    """The recipe's rule; None where it is the mean."""
    return None if recipe.aggregation.is_mean else recipe.aggregation
