"""Privacy mechanisms: the hooks that client and server call in a round.

A run has a list of mechanisms, on its clients and on its server. In a round

1. a mechanism that protects single examples computes the gradients of the shared tensors (``client_gradients``),
2. each may clip, noise or mask what users upload (``client_update``),
3. the server passes the uploads through ``server_sum`` of each, and its method aggregates the result,
4. ``account`` counts what was revealed (:class:`comingle.privacy.accounting.Account`), and ``admit`` decides on the
   next round's participants.

Before a run, ``supports`` refuses methods and settings that a mechanism does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.sections import Recipe
from comingle.methods.base import Cohort, Method
from comingle.methods.server import Received, Server
from comingle.privacy.accounting import Account, Work
from comingle.utils.trees import Layout, Tree

REFERENCE = "reference/"
"""Prefix of the user's copies of downloaded tensors, from which its change is measured."""
CLIP_NORM = "clip_norm"
"""Key of the clip norm in downloads, if it is adaptive, and in a user's state."""
WITHIN = "within"
"""Key of the report whether a user's change was within an adaptive clip norm: 1 or 0."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Uploads of a cohort before they are sent: changes since the most recent download, float64.

    Args:
        changes: Tensors ``(users, *shape)``.
        bounds: Clip norm of each user.
        names: Names of the users.
        ranks: LoRA rank of each user.
        counts: Amount of training data of each user.
        round_number: Number of the round that the uploads end, from 1.
        reports: Numbers to send with the tensors.
        masked: Upload to send instead of download plus change, for mechanisms that send no model tensors.
    """

    changes: Tree
    bounds: Float[Tensor, " users"]
    names: Sequence[str]
    ranks: Int[Tensor, " users"]
    counts: Sequence[int]
    round_number: int
    reports: Tree = field(default_factory=dict)
    masked: Tree | None = None


@dataclass(frozen=True, kw_only=True)
class PrivateStep:
    """One optimiser step of a cohort on its shared tensors.

    Args:
        works: Each user's amount of work, which determines its sampling rate.
        streams: Each user's key of the random streams of this step.
        batch: Examples of a user in one pass.
        clipped_sums: Maps indices of examples ``(users, n)``, padded with ``PAD``, and a clip norm to the float64 sums
            of clipped gradients and of losses.
    """

    works: Sequence[Work]
    streams: Sequence[tuple[str | int, ...]]
    batch: int
    clipped_sums: Callable[[Int[Tensor, "users n"], float], tuple[Tree, Float[Tensor, " users"]]]


@dataclass(frozen=True, kw_only=True)
class ServerRound:
    """A round on the server.

    Args:
        round_index: Number of the round, from 0.
        names: Users whose uploads arrived.
        server: Server of the method.
        kept: State of the server: tensors by name.
    """

    round_index: int
    names: Sequence[str]
    server: Server
    kept: Tree

    @property
    def model(self) -> Tree:
        """The model that all users download, for servers that have one."""
        return one_model(self.server, self.kept)


def one_model(server: Server, kept: Tree) -> Tree:
    """Return the model that all users download, for servers with a single model.

    Args:
        server: Server of the method.
        kept: State of the server.
    """
    # Tensors of shape (users, models, *shape). All users download the same, so ask for user 0; the models axis has size
    # 1, as it is longer only for servers that send several models.
    download = server.download(kept, [0])
    return {name: t[0, 0] for name, t in download.items()}


def mean_as_upload(model: Tree, change: Tree, roles: Mapping[str, frozenset[str]]) -> Received:
    """Return the model plus a mean change as the only upload of a round, so that the server's mean is this model.

    Args:
        model: The model before the round.
        change: Mean change, float64.
        roles: Roles of each tensor.
    """
    changed = {name: (t.double() + change[name].to(t.device)).to(t.dtype) for name, t in model.items()}
    return Received(
        users=[],
        tensors={name: t.unsqueeze(0) for name, t in changed.items()},
        weights=torch.ones(1, dtype=torch.float64),
        ranks=torch.zeros(1, dtype=torch.int64),  # 0: the upload is not cut to the LoRA rank of a user
        scales=torch.ones(1),
        roles=roles,
    )


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """Result of a robust rule on the uploads of a round, for the run's events.

    Args:
        rule: Name of the rule, such as "krum".
        counted: How much of each user's upload counts, from 0 (left out) to 1; empty if there were too few uploads.
        reason: Why the rule was not applied; empty if it was.
    """

    rule: str
    counted: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def left_out(self) -> list[str]:
        """Users whose uploads had no effect, such as those that a rule took for outliers."""
        return [name for name, share in self.counted.items() if share == 0]

    def as_event(self, done: int) -> dict[str, object]:
        """Return the result as an event for the run's log, ``events.jsonl``.

        Args:
            done: Number of the round, from 1.
        """
        event = {"event": "aggregation", "round": done, "rule": self.rule}
        if self.counted:
            return {**event, "left_out": self.left_out, "counted": self.counted}
        return {**event, "reason": self.reason}  # why the rule was not applied


@dataclass(kw_only=True)
class PrivacyMechanism:
    """Hooks of a privacy mechanism, on a client or on the server; a hook that is not overridden changes nothing.

    Args:
        key: Secret from which noise and sampling are drawn. A client's is never the server's.
    """

    key: str = ""
    account: Account | None = field(init=False, default=None)
    """Account of what has been revealed so far, for mechanisms with noise."""
    rule_result: RuleResult | None = field(init=False, default=None)
    """Result of a robust rule on the most recent round's uploads, for the run's events; None without such a rule."""

    # ---------------------------------------------------------------- before a run

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Check that the mechanism can protect runs of a method with these settings; by default it can.

        Args:
            method: The federated method of the run.
            recipe: Settings of the run.

        Raises:
            RecipeError: The mechanism does not cover them; the message gives the reason.
        """

    def check_server(self, method: Method, layout: Layout, users: int) -> None:
        """Check that the mechanism can protect the shared tensors of this many users; by default it can.

        Args:
            method: The federated method of the run.
            layout: Layout of the model's tensors.
            users: Number of users.

        Raises:
            RecipeError: The mechanism does not cover them; the message gives the reason.
        """

    def check_rounds(self, sizes: Collection[int], *, same_ranks: bool) -> None:
        """Check that rounds have enough users for the mechanism, and that it allows their LoRA ranks.

        Args:
            sizes: All numbers of users that a round may have.
            same_ranks: Whether all users have the same LoRA rank.

        Raises:
            RecipeError: A check fails.
        """

    # ---------------------------------------------------------------- on a client

    @property
    def needs_key(self) -> bool:
        """True if the mechanism draws noise from :attr:`key`, which the run folder then stores.

        A resumed run so repeats a round with the same noise.
        """
        return False

    def client_gradients(self, step: PrivateStep) -> tuple[Float[Tensor, " users"], Tree]:
        """Return each user's mean loss and the noisy gradients of its shared tensors for one optimiser step.

        Only called if the mechanism adds noise to gradients (DP-SGD).

        Args:
            step: The users' amounts of work, keys of their random streams, and a function that returns the sums of
                clipped gradients of given examples.

        Returns:
            Losses ``(users,)`` and gradients ``(users, *shape)``, float64.
        """
        raise NotImplementedError

    def client_update(self, update: Update) -> Update:
        """Protect the uploads of some users before they are sent, for example clip them and add noise.

        Args:
            update: The users' uploads; by default they are sent unchanged.
        """
        return update

    # ---------------------------------------------------------------- on the server

    def admit(self, selected: Sequence[int], round_index: int, *, releases: bool) -> list[int] | None:
        """Return the participants of a round among the selected users; None if no budget is left, which ends the run.

        Args:
            selected: Indices of the selected users.
            round_index: Number of the round, from 0.
            releases: Whether anything is uploaded in the round; a round without uploads costs no budget.
        """
        return list(selected)

    def download(self, users: int) -> Tree:
        """Return tensors ``(users, 1)`` that users download with their models, such as an adaptive clip norm."""
        return {}

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Change the uploads of a round before the server aggregates them, for example add noise to their mean.

        Args:
            received: The participants' uploads.
            server_round: Number of the round, the method's server, and its tensors before the round.

        Returns:
            The uploads to aggregate; None to skip the round, which leaves the server's model as it is.
        """
        return received

    def skip_round(self, received: Sequence[int]) -> None:
        """End a round on the server without aggregation, as too few users have uploaded.

        Args:
            received: Indices of the users whose uploads have arrived.
        """
        self.rule_result = None  # no robust rule was applied

    def warn(self, num_shared: int, rounds: int) -> str | None:
        """Return a warning if the mechanism leaves the run no chance to learn, such as too much noise; else None.

        Args:
            num_shared: Number of parameters that a user shares.
            rounds: Rounds of the run.
        """
        return None

    # ---------------------------------------------------------------- state and results

    @property
    def state(self) -> Tree:
        """Tensors that the server's checkpoint stores for the mechanism, by name."""
        return {}

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of the state whose tensors have one row per user, which a resumed run sorts by its order of users."""
        return frozenset()

    def restore(self, state: Tree) -> None:
        """Continue from a checkpoint, when a run is resumed; by default there is nothing to restore.

        Args:
            state: Tensors of the checkpoint by name: those of :attr:`state`, and others that belong to the server.
        """

    @property
    def metrics(self) -> dict[str, object]:
        """Metrics of a run: the privacy spent, and the settings behind it."""
        return {}


def overrides(mechanism: PrivacyMechanism, hook: str) -> bool:
    """Return whether a mechanism overrides a hook, a method of :class:`PrivacyMechanism`, and so has an effect there.

    Args:
        mechanism: The mechanism.
        hook: Name of the method, such as "download".
    """
    return getattr(type(mechanism), hook) is not getattr(PrivacyMechanism, hook)


def change_updates(mechanisms: Sequence[PrivacyMechanism]) -> bool:
    """Return whether any of the mechanisms changes what users upload."""
    return any(overrides(mechanism, "client_update") for mechanism in mechanisms)


def start_references(shared: Tree, clip_norm: float) -> Tree:
    """Return users' state before the first download: copies of their shared tensors, and their clip norms.

    A user's change is measured from these copies ("references").

    Args:
        shared: Shared tensors, ``(users, *shape)``.
        clip_norm: Clip norm of all users.
    """
    state = {REFERENCE + name: t.clone() for name, t in shared.items()}
    any_tensor = next(iter(shared.values()))
    num_users = len(any_tensor)
    state[CLIP_NORM] = torch.full((num_users,), clip_norm, dtype=torch.float64, device=any_tensor.device)
    return state


def keep_references(kept: Tree, shared: Tree, clip_norms: Float[Tensor, " users"] | None) -> None:
    """Copy downloaded tensors to the users' state, where they stay during local steps.

    Users upload the difference of their trained tensors from these copies (the references), clipped and with noise.

    Args:
        kept: State of the users: tensors by name, with a row per user, changed in place.
        shared: Downloaded tensors, ``(users, *shape)``.
        clip_norms: New clip norm of each user, to be stored too; None to keep the old ones.
    """
    for name, t in shared.items():
        kept[REFERENCE + name].copy_(t)
    if clip_norms is not None:
        kept[CLIP_NORM].copy_(clip_norms)


def split_clip_norms(tensors: Tree) -> tuple[Tensor | None, Tree]:
    """Split a download into the users' clip norms and the model's tensors.

    A server with an adaptive clip norm sends the new one with the model.

    Args:
        tensors: Tensors of a download.

    Returns:
        The clip norms ``(users,)``, or None if the download has none, and the other tensors.
    """
    if CLIP_NORM not in tensors:
        return None, tensors
    clip_norms = tensors[CLIP_NORM][:, 0]  # sent as (users, 1)
    without_clip_norms = {name: t for name, t in tensors.items() if name != CLIP_NORM}
    return clip_norms, without_clip_norms


def protect_uploads(
    mechanisms: Sequence[PrivacyMechanism], tensors: Tree, cohort: Cohort, counts: Sequence[int], round_number: int
) -> tuple[Tree, Tree]:
    """Pass a cohort's uploads through all mechanisms.

    Args:
        mechanisms: Mechanisms of the run, in order.
        tensors: Shared tensors ``(users, *shape)`` after the local steps.
        cohort: The users; their state has the most recent download.
        counts: Amount of training data of each user.
        round_number: Number of the round, from 1.

    Returns:
        The users' uploads and their reports. Uploads are the most recent download plus the change, or
        integers that the protocol of secure sums masks.
    """
    references = {name: cohort.kept[REFERENCE + name] for name in tensors}
    update = Update(
        changes={name: t.double() - references[name].double() for name, t in tensors.items()},
        bounds=cohort.kept[CLIP_NORM],
        names=cohort.names,
        ranks=cohort.ranks,
        counts=counts,
        round_number=round_number,
    )
    for mechanism in mechanisms:
        update = mechanism.client_update(update)
    if update.masked is not None:  # integers, to which masks are added before they are sent
        return update.masked, update.reports
    uploads: Tree = {}
    for name, change in update.changes.items():
        uploads[name] = (references[name].double() + change).to(tensors[name].dtype)
    return uploads, update.reports
