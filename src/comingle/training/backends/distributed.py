"""A backend whose users are sharded over processes.

Floating-point sums depend on the order of their terms; integer sums do not. So each term is rounded to a common grid
(as in pre-rounded reproducible summation: Demmel and Nguyen 2015, "Parallel Reproducible Summation", section 3) and
added as a 64-bit integer.

Every process runs the same rounds. Messages equal those of a run in one process: uploads are joined in the order of the
users, so that the server computes bitwise the same result, and downloads are scattered. If the server needs only sums,
each process sends one sum and no uploads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from comingle.protocol.messages import (
    LOSS,
    Download,
    Upload,
    expand,
    join_uploads,
    no_uploads,
    validation_reply,
    validation_report,
)
from comingle.protocol.wire import packed_bytes
from comingle.training.backends.base import RoundPlan
from comingle.training.backends.local import InProcess, RoundReport
from comingle.training.backends.ranks import Ranks
from comingle.training.batch_sources import AnyScore
from comingle.training.checkpoints import (
    OF_SERVER,
    SERVER,
    Progress,
    finish_checkpoint,
    folder_and_draft,
    named_tensors,
    prune_checkpoints,
    shard_file,
    write_errors,
    write_tensors,
)
from comingle.training.client import LocalRound
from comingle.training.evaluation import amounts_of, merged, period
from comingle.utils.errors import DivergenceError
from comingle.utils.files import checksum_line, list_checkpoints
from comingle.utils.records import JsonMapping, JsonObject
from comingle.utils.trees import Tree, restrict

_SUM_BITS = 61
"""Bits of a sum, without its sign and the carry of terms that are rounded up."""

_MAX_POWER = 1000
"""Largest power of two in one multiplication; float64 overflows at 2^1024."""

_CHUNK_ENTRIES = 2**22
"""Number of entries that are converted to float64 at a time."""


def weighted_terms(t: Float[Tensor, "users ..."], weights: Float[Tensor, "users ..."]) -> Float[Tensor, "users ..."]:
    """Return the terms ``weight_u t_u`` of the weighted sum over users u, in float64.

    The weights are rounded to the dtype of ``t``, as float64 holds the product of two float32 numbers exactly.

    Args:
        t: A tensor of all users.
        weights: Weight of each user, or of each user and component of a mixture ``(users, clusters)``.
    """
    factors = weights.to(t).double()
    return t.double() * factors.view(*factors.shape, *[1] * (t.dim() - factors.dim()))


def largest_terms(tensors: Tree, weights: Tree) -> Float[Tensor, " tensors"]:
    """Return the largest magnitude of the terms of each tensor; 0 without users."""
    return torch.stack([_largest_term(t, weights[name]) for name, t in tensors.items()])


def _largest_term(t: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    """Return the largest magnitude of ``weight_u t_u`` in float64; 0 without users."""
    maxima = [
        weighted_terms(chunk, chunk_weights).abs().max()
        for chunk, chunk_weights in _chunks(t, weights)
        if chunk.numel()
    ]
    return torch.stack(maxima).max().cpu() if maxima else torch.zeros((), dtype=torch.float64)


def shifts_of(largest: Float[Tensor, " tensors"], num_users: int) -> list[int]:
    """Return the exponent s for each tensor with which ``sum_u round(term_u 2^s)`` fits into a 64-bit integer.

    A larger exponent loses less by rounding, so s is the largest with which a sum has at most 61 bits (``_SUM_BITS``).
    A rounded term is wrong by at most half a unit, so the error of a sum is at most
    ``num_users 2^(log2(num_users) - 61)`` times its largest term.

    Args:
        largest: Largest magnitude of the terms of each tensor, over all processes.
        num_users: Number of users of all processes.

    Raises:
        DivergenceError: A term is not finite.
    """
    if not bool(largest.isfinite().all()):
        raise DivergenceError("the sum of the users' uploads is not finite; try a smaller learning rate")
    term_bits = _SUM_BITS - math.ceil(math.log2(max(num_users, 2)))  # bits of a term
    # frexp returns a fraction below 1 and the exponent e with term = fraction 2^e, so that term < 2^e.
    return [term_bits - math.frexp(term)[1] if term else 0 for term in largest.tolist()]


def integer_sums(tensors: Tree, weights: Tree, shifts: Sequence[int]) -> Int64[Tensor, " entries"]:
    """Return ``sum_u round(weight_u t_u 2^shift)`` over the users of this process, for all tensors, concatenated.

    Integers add up to the same total in any order of users and processes.

    Args:
        tensors: Tensors ``(users, *shape)``.
        weights: Weights of the users, by tensor name.
        shifts: Exponent of each tensor; see :func:`shifts_of`.
    """
    sums = []
    for (name, t), shift in zip(tensors.items(), shifts, strict=True):
        sums.append(_integer_sum(t, weights[name], shift).flatten())
    return torch.cat(sums)


def _integer_sum(t: Tensor, weights: Tensor, shift: int) -> Int64[Tensor, ...]:
    """Return ``sum_u round(weight_u t_u 2^shift)`` of one tensor, an integer sum that depends on no order of users.

    Args:
        t: Tensor ``(users, *shape)``.
        weights: Weights of the users.
        shift: Exponent of the tensor; see :func:`shifts_of`.
    """
    total = torch.zeros(t.shape[1:], dtype=torch.int64, device=t.device)
    # Only one chunk of users at a time is in float64, which takes more memory.
    for chunk, chunk_weights in _chunks(t, weights):
        total += _times_power_of_two(weighted_terms(chunk, chunk_weights), shift).round().long().sum(0)
    return total


def _times_power_of_two(t: Float[Tensor, "*shape"], shift: int) -> Float[Tensor, "*shape"]:
    """Return ``t 2^shift`` for a float64 tensor, exactly where float64 can represent the result.

    ``2^shift`` alone may overflow or underflow although the product does not, so it is split into two factors if it is
    very large or small.
    """
    first_shift = min(max(shift, -_MAX_POWER), _MAX_POWER)
    t = t * 2.0**first_shift
    return t if first_shift == shift else t * 2.0 ** (shift - first_shift)


def sums_of(integers: Int64[Tensor, " entries"], like: Tree, shifts: Sequence[int]) -> Tree:
    """Return ``integer 2^-shift`` for the concatenated integer sums, as named tensors in their own dtypes.

    Args:
        integers: Result of :func:`integer_sums`, added up over processes.
        like: Tensors ``(users, *shape)`` with the names, shapes and dtypes.
        shifts: Exponent of each tensor, by which it was scaled.
    """
    parts = integers.split([math.prod(t.shape[1:]) for t in like.values()])
    sums = Tree()
    for (name, t), part, shift in zip(like.items(), parts, shifts, strict=True):
        sums[name] = _times_power_of_two(part.double(), -shift).to(t.dtype).view(t.shape[1:])
    return sums


def reduced(
    tensors: Tree,
    weights: Tree,
    num_users: int,
    *,
    reduce_max: Callable[[Tensor], Tensor],
    reduce_sum: Callable[[Tensor], Tensor],
) -> Tree:
    """Return ``sum_u weight_u t_u`` over the users of all processes, bitwise equal however users are distributed.

    All processes round the terms to one grid and add them as integers, whose sum does not depend on the order.

    Args:
        tensors: Tensors of the users of this process ``(users, *shape)``.
        weights: Weights of the users, by tensor name.
        num_users: Number of users of all processes.
        reduce_max: Reduces a tensor to its maximum over processes.
        reduce_sum: Reduces a tensor to its sum over processes.
    """
    largest_over_processes = reduce_max(largest_terms(tensors, weights))
    # For each tensor the exponent s of its grid: a term becomes the integer nearest to ``term 2^s``.
    shifts = shifts_of(largest_over_processes, num_users)
    sums_of_all_processes = reduce_sum(integer_sums(tensors, weights, shifts))
    return sums_of(sums_of_all_processes, tensors, shifts)


def _chunks(t: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return a tensor and its weights in chunks of users with about ``_CHUNK_ENTRIES`` entries of the tensor each."""
    users_per_chunk = max(1, _CHUNK_ENTRIES // max(1, t[:1].numel()))
    return list(zip(t.split(users_per_chunk), weights.split(users_per_chunk), strict=True))


_REPORT_PREFIX = "report/"
"""Prefix of the names of reports among the tensors that processes exchange."""


@dataclass(kw_only=True)
class Sharded(InProcess):
    """The users of one of several processes, and in the first process the server.

    Every process calls each method, in the same order. In other processes only the version of the server's state is
    current.

    Attributes:
        ranks: The processes of the run.
        first: Number of the first trainer of this process among all.
        ordered: Whether processes send uploads, which the server sums in the order of the users, instead of sums.
        shards: Number of trainers of each process.
    """

    ranks: Ranks
    first: int
    ordered: bool = False
    shards: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leads = self.ranks.leads

    def merge_users(self, work: Callable[[], JsonMapping]) -> JsonObject:
        """Merge the mappings of all processes in the first one; in others return their own."""
        return merged(self.ranks.gather(work))

    # ---------------------------------------------------------------- rounds

    def _resolve_eval_interval(self) -> int:
        """Return the number of rounds between evaluations.

        It is computed in the first process from the amounts of training and test data in all processes.
        """
        clients = self.clients
        amounts_by_rank = self.ranks.gather(lambda: amounts_of(clients))

        def resolve() -> int:
            """Return the interval from the sums of the amounts over processes; runs in the first process."""
            amounts = [sum(amount_by_rank) for amount_by_rank in zip(*amounts_by_rank, strict=True)]
            self._amounts = amounts
            return period(clients.plan, amounts, len(clients.population_names))

        return self.ranks.share(resolve)

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round that belong to this process, as numbers that count its own users from 0.

        Returns:
            The numbers; None if the privacy budget is spent, which ends the run in all processes.
        """
        # The first process selects the participants of all processes and sends them to the others.
        participants = self.ranks.share(partial(super().select_participants, plan))
        if participants is None:
            self.clients.stopped_after = plan.number  # counted from 0, so this many rounds are done
            return None
        trainers_here = range(self.first, self.first + len(self.clients.trainers))
        return [number - self.first for number in participants if number in trainers_here]

    def _take_local_steps(self, plan: RoundPlan, participants: Sequence[int]) -> LocalRound:
        """Have the participants of this process take their local steps; a failure ends all processes."""
        return self.ranks.each(partial(super()._take_local_steps, plan, participants))

    def _report_round(self, local_round: LocalRound) -> RoundReport:
        """Return the report of the users of all processes; processes other than the first report only their own."""
        report_own_users = super()._report_round
        parts = [RoundReport(**part) for part in self.ranks.gather(lambda: asdict(report_own_users(local_round)))]
        suspects_of_first_rejection = next((part.suspect_optimizers for part in parts if part.rejected), [])
        return RoundReport(
            losses={name: loss for part in parts for name, loss in part.losses.items()},
            rejected={name: reason for part in parts for name, reason in part.rejected.items()},
            steps={name: steps for part in parts for name, steps in part.steps.items()},
            suspect_optimizers=suspects_of_first_rejection,
            tokens=sum(part.tokens for part in parts),
            seconds=max(part.seconds for part in parts),
        )

    def _require_losses(self, report: RoundReport) -> None:
        """Check in the first process that at least one participant of all was not rejected."""
        self.ranks.share(partial(super()._require_losses, report))

    def _score(self, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
        """Return test scores and validation losses of the users of this process."""
        return self.ranks.each(partial(super()._score, done))

    def _make_final_models(self) -> None:
        self.ranks.each(super()._make_final_models)

    def _score_final_models(self) -> Sequence[AnyScore]:
        return self.ranks.each(super()._score_final_models)

    # ---------------------------------------------------------------- the run folder

    def open_folder(self, folder: Path, *, resume: bool) -> bool:
        """Open the users' store in a run folder; return whether the run must be restored from a checkpoint.

        The first process opens the store before the others, as it deletes old files.
        """
        found = self.ranks.share(lambda: resume and bool(list_checkpoints(folder)))
        store = self.clients.state
        self.ranks.share(lambda: store.open(folder, anew=not found))  # in the first process
        self.ranks.each(lambda: None if self.leads else store.open(folder, anew=not found))
        return found

    def _load_or_create_key(self, folder: Path | None, *, resume: bool) -> str:
        return self.ranks.share(partial(super()._load_or_create_key, folder, resume=resume))

    def write_record(self, path: Path, content: Mapping[str, object]) -> None:
        """Write a JSON file in the first process."""
        self.ranks.share(partial(super().write_record, path, content))

    def save(self, folder: Path, progress: Progress, *, keep: int) -> None:
        """Write the checkpoint of a round, each process the part of its users, and delete old checkpoints.

        Raises:
            RunError: The disk of a process cannot be written to; older checkpoints stay.
        """
        clients, server, ranks = self.clients, self.server, self.ranks
        progress = replace(progress, shards=self.shards)  # number of trainers in the file of each process

        def make_draft() -> tuple[str, str]:
            """Make the folder in which the checkpoint is written; return its final path and that of the draft."""
            final, draft = folder_and_draft(folder, progress.round)
            with write_errors(final, draft):
                draft.mkdir(parents=True)
            return str(final), str(draft)

        final, draft = (Path(path) for path in ranks.share(make_draft))

        def write_users_here() -> str:
            """Write the users of this process; return the lines of its files in the file of checksums."""

            def write_rows() -> list[str]:
                """Write users that are in memory, and return the name of the file."""
                file = shard_file(ranks.rank, len(progress.shards))
                no_server: Tree = {}  # the server's state is a file of its own
                write_tensors(draft / file, named_tensors(clients.model.layout, clients.state, no_server))
                return [file]

            with write_errors(final, None):
                files = clients.state.save(draft, list_checkpoints(folder), write_rows)
                return "".join(checksum_line(draft / name).decode() for name in files)

        try:
            checksums_by_rank = ranks.gather(write_users_here)
        except BaseException:
            if self.leads:  # after all processes have stopped writing
                shutil.rmtree(draft, ignore_errors=True)
            raise
        lines = "".join(checksums_by_rank).encode().splitlines(keepends=True)

        def complete() -> None:
            """Write the server's state, and rename the draft."""
            with write_errors(final, draft):
                server_tensors = {OF_SERVER + name: t for name, t in server.state.items()}
                write_tensors(draft / SERVER, server_tensors)
                finish_checkpoint(draft, final, progress, lines)

        ranks.share(complete)
        ranks.share(partial(prune_checkpoints, folder, keep))

    def _find_checkpoint(self, folder: Path, fingerprint: str) -> tuple[Path, Progress]:
        return self.ranks.each(partial(super()._find_checkpoint, folder, fingerprint))

    def _load_state(self, checkpoint: Path, progress: Progress) -> Tree:
        """Restore the users of this process; return the server's state, which is empty except in the first process."""
        self.ranks.each(partial(self._load_users, checkpoint, progress))
        return self.ranks.each(lambda: self._load_server(checkpoint, progress) if self.leads else {})

    def _restore_server(self, kept: Tree, trainers: Sequence[str]) -> None:
        """Restore the server in the first process, and the version of its state in all."""
        if self.leads:
            super()._restore_server(kept, trainers)
        self._share_version()

    def _share_version(self) -> None:
        """Set the version of the server's state in all processes to that of the first one."""
        self.server.version = self.ranks.share(lambda: self.server.version)

    # ---------------------------------------------------------------- downloads

    def download(self, members: Sequence[int]) -> None:
        """Send the current version of the shared tensors to those users that have not downloaded it yet.

        The first process makes the download of all of them. Tensors that are equal for all users are broadcast; the
        others are sent to the process of each user, with a header that says how to put the message together.
        """
        if not self.clients.shares:
            return
        stale = self.clients.stale(self.server.version, members)
        stale_names_by_rank = self.ranks.gather(lambda: [self.clients.names[member] for member in stale])
        common: Tree = {}  # filled in the first process
        header, own_tensors = self.ranks.scatter(lambda: self._split_download(stale_names_by_rank, common))
        if not header["answered"]:  # no process has a stale user
            return
        tensors = own_tensors | self.ranks.broadcast(common)
        users = tuple(header["users"])
        if not users:
            self.ranks.each(lambda: None)  # every process takes part, to agree on failures
            return
        message = Download(
            version=header["version"],
            users=users,
            tensors={
                name: tensors[name].expand(len(users), *tensors[name].shape[1:]) for name in header["tensor_names"]
            },
            ranks=torch.tensor(header["ranks"], dtype=torch.int64),
            senders=tuple(header["senders"]),
        )
        self.ranks.each(lambda: self.clients.receive(message))

    def _split_download(
        self, stale_names_by_rank: Sequence[Sequence[str]], common: Tree
    ) -> list[tuple[dict[str, Any], Tree]]:
        """Make the download of all stale users, and split it by process.

        Args:
            stale_names_by_rank: Names of the stale users of each process.
            common: Filled with the tensors that are equal for all users, with one row each.

        Returns:
            For each process the header of its message, and the tensors ``(users, *shape)`` that are not common. Keys of
            the header: "answered" (False if no user is stale; then the only key), "version" and "senders" of the
            message, "tensor_names" in its order, "users" of the process and their "ranks".
        """
        names_by_rank = [self.server.with_download(names) for names in stale_names_by_rank]
        all_names = [name for names in names_by_rank for name in names]
        if not all_names:
            return [({"answered": False}, {})] * len(names_by_rank)
        message = self.server.download(all_names)
        self.clock.download_bytes += sum(packed_bytes(message))
        # A stride of 0 means one tensor expanded to all users.
        common.update({name: t[:1] for name, t in message.tensors.items() if t.stride(0) == 0})
        header = {"answered": True, "version": message.version, "senders": list(message.senders)}
        header["tensor_names"] = list(message.tensors)
        parts, start = [], 0
        for names in names_by_rank:
            span = slice(start, start := start + len(names))
            own_tensors = {name: t[span] for name, t in message.tensors.items() if name not in common and names}
            parts.append((header | {"users": names, "ranks": message.ranks[span].tolist()}, own_tensors))
        return parts

    # ---------------------------------------------------------------- uploads

    def upload(self, members: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Make the upload of the users of this process, and count the bytes of all; :meth:`aggregate` sends it."""
        self._upload_of_round = self.ranks.each(lambda: self._make_upload(members, round_number, losses))
        own_upload = self._upload_of_round
        if self.server.sums is not None:  # the messages of a secure sum have other sizes
            names_by_rank = self.ranks.gather(lambda: list(own_upload.users))
            names = [name for names in names_by_rank for name in names]
            if self.leads and names:
                self._count_sum_bytes(names, round_number)
            return
        bytes_by_rank = self.ranks.gather(lambda: sum(packed_bytes(own_upload)) if own_upload.users else 0)
        if self.leads:
            self.clock.upload_bytes += sum(bytes_by_rank)

    def _make_upload(self, members: Sequence[int], round_number: int, losses: dict[int, float]) -> Upload:
        """Return the upload of users of this process.

        Args:
            members: Numbers of the users; may be empty.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        if not members:
            return no_uploads(round_number)
        reports = {LOSS: torch.tensor([losses[member] for member in members])}
        return self.clients.upload(members, round_number, reports)

    def aggregate(self) -> str:
        """Aggregate the uploads of the round.

        If the server needs only weighted sums, each process sends the sum over its users, and their uploads without
        tensors. Otherwise, and with :attr:`ordered`, each process sends all uploads of its users. With peer-to-peer
        methods, users then download the models that their peers have uploaded.

        Returns:
            Reason why a secure sum failed, for example too few users; empty if it succeeded or the run has none.
        """
        assert self._upload_of_round is not None
        own_upload, self._upload_of_round = self._upload_of_round, None
        sends_sums = self.server.needs_only_sums and not self.ordered
        joined = self._gather_uploads(replace(own_upload, tensors={}) if sends_sums else own_upload)
        # Names of all users that have uploaded; without any there are no sums.
        users = self.ranks.share(lambda: [] if joined is None else list(joined.users)) if sends_sums else []
        if users:
            sums = self._weighted_sums(own_upload, joined, users)
            reason = self.ranks.share(lambda: self._aggregate_sums(sums, joined))
        else:
            reason = self.ranks.share(lambda: self._aggregate_all(joined))
        self._share_version()
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(own_upload.users))
            self.server.clear_uploads()
        return reason

    def _aggregate_all(self, uploads: Upload | None) -> str:
        """Aggregate the uploads of all users; only the first process calls this.

        Args:
            uploads: The uploads of all users, joined in one message.

        Returns:
            Why a secure sum failed, such as too few users; an empty string if aggregation succeeded.
        """
        assert uploads is not None  # only the other processes have None
        if self.server.sums is not None:
            return self._aggregate_secure_sum(self.server.sums, uploads)
        self.server.aggregate(uploads)
        return ""

    def _aggregate_sums(self, sums: Tree, joined: Upload | None) -> str:
        """Aggregate the weighted sums of all uploads; return an empty string, as there always is a sum.

        Args:
            sums: The weighted sums, by tensor name.
            joined: The uploads of all processes without tensors.
        """
        assert joined is not None
        self.server.aggregate_weighted(sums, joined)
        return ""

    def _gather_uploads(self, own_upload: Upload) -> Upload | None:
        """Return the joined uploads of all processes in process 0, and None in other processes.

        Args:
            own_upload: The upload of this process, without users if none of them takes part in the round.
        """
        tensors: Tree = {}
        if own_upload.users:
            tensors.update(own_upload.tensors)
            tensors.update({_REPORT_PREFIX + name: report for name, report in own_upload.reports.items()})
            tensors["ranks"] = own_upload.ranks  # the users' LoRA ranks
        tensors_by_process = self.ranks.collect(tensors)
        users_by_process = self.ranks.gather(lambda: list(own_upload.users))
        is_process_0 = self.leads
        if not is_process_0:
            return None
        uploads = [
            _upload_from_tensors(own_upload.round, users, tensors_of_process)
            for users, tensors_of_process in zip(users_by_process, tensors_by_process, strict=True)
            if users
        ]
        if not uploads:
            return no_uploads(own_upload.round)
        return join_uploads(uploads)

    def _weighted_sums(self, own_upload: Upload, joined: Upload | None, users: Sequence[str]) -> Tree:
        """Return the weighted sums of all uploads by tensor name; they are complete only in the first process.

        Args:
            own_upload: The upload of the users of this process.
            joined: The uploads of all processes without tensors, in the first process.
            users: Names of all users that have uploaded.
        """
        layout = self.clients.model.layout
        # The shared tensors with no rows, for their names and for a process without uploads.
        no_users = restrict(layout.views(self.clients.state.rows[:0]), layout, self.server.method.shared)
        names = list(no_users)
        tensors = expand(own_upload.tensors, self.server.uploads) if own_upload.users else no_users
        counts = self.ranks.gather(lambda: len(own_upload.users))
        key_of_tensor, weights = self.ranks.scatter(lambda: self._split_weights(names, joined, counts))
        weights_of_tensor = {name: weights[key_of_tensor[name]] for name in names}
        tensors = {name: tensors[name] for name in names}  # in the same order in all processes
        return reduced(
            tensors, weights_of_tensor, len(users), reduce_max=self.ranks.largest, reduce_sum=self.ranks.total
        )

    def _split_weights(
        self, names: Sequence[str], joined: Upload | None, counts: Sequence[int]
    ) -> list[tuple[dict[str, str], Tree]]:
        """Return the factors of the uploads in the weighted sum over users, for the users of each process.

        Most tensors have the same weights. To send these only once, the weights have keys, which tensors refer to.

        Args:
            names: Names of the shared tensors.
            joined: The uploads of all processes, with reports but without tensors; not None in the first process, which
                alone calls this.
            counts: Number of users of each process.

        Returns:
            For each process the key of the weights of each tensor, by tensor name, and the weights of its users by key.
        """
        assert joined is not None
        weights = self.server.coefficients(names, joined)  # tensors with the same weights share one object
        key_of_tensor = {name: str(id(t)) for name, t in weights.items()}
        parts_by_key = {str(id(t)): t.cpu().split(list(counts)) for t in weights.values()}
        return [
            (key_of_tensor, {key: parts[rank] for key, parts in parts_by_key.items()}) for rank in range(len(counts))
        ]

    # ---------------------------------------------------------------- the best round

    def report_losses(self, done: int, losses: dict[str, float]) -> float:
        """Report validation losses to the server; users of all processes store their models if the mean is lowest."""
        losses_by_rank = self.ranks.gather(lambda: losses)
        mean, is_lowest = self.ranks.share(lambda: self._judge_losses(losses_by_rank, done))
        receivers = list(losses) or [self.clients.names[0]]  # a process without losses stores its users' models too
        self.clients.receive_verdict(validation_reply(receivers, done, lowest=is_lowest))
        return mean

    def _judge_losses(self, losses_by_rank: Sequence[dict[str, float]], done: int) -> tuple[float, bool]:
        """Return the mean of all validation losses and whether it is the lowest so far, and count message bytes.

        Args:
            losses_by_rank: Validation losses of the users of each process, by name.
            done: Number of rounds that are done.
        """
        losses = {name: loss for losses_of_rank in losses_by_rank for name, loss in losses_of_rank.items()}
        lowest_before, report = self.server.lowest_loss, validation_report(losses, done)
        self.clock.upload_bytes += sum(packed_bytes(report))
        self.clock.download_bytes += sum(packed_bytes(self.server.judge(report)))
        return fmean(losses.values()), self.server.lowest_loss < lowest_before


def _upload_from_tensors(done: int, users: Sequence[str], tree: Tree) -> Upload:
    """Return the upload whose tensors, reports and ranks are in one tree; see :meth:`Sharded._gather_uploads`."""
    reports = {name.removeprefix(_REPORT_PREFIX): t for name, t in tree.items() if name.startswith(_REPORT_PREFIX)}
    tensors = {name: t for name, t in tree.items() if name != "ranks" and not name.startswith(_REPORT_PREFIX)}
    return Upload(round=done, users=tuple(users), tensors=tensors, ranks=tree["ranks"], reports=reports)
