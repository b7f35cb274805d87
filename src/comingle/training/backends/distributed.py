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
    decompress,
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
    convert_write_errors,
    finish_checkpoint,
    folder_and_draft,
    named_tensors,
    prune_checkpoints,
    shard_file,
    write_tensors,
)
from comingle.training.client import LocalRound, first_downloads
from comingle.training.evaluation import data_amounts, evaluation_interval, merged
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
    """Return ``weight_u t_u`` for each user u, in float64.

    The weights are first rounded to the dtype of ``t``; float64 holds the product of two float32 numbers exactly.

    Args:
        t: A tensor of all users.
        weights: Weight of each user ``(users,)``, or of each user and component of a mixture ``(users, clusters)``.
    """
    weights = weights.to(t).double()
    num_missing_dims = t.dim() - weights.dim()
    weights = weights.view(*weights.shape, *[1] * num_missing_dims)  # (users, 1, ..., 1), to broadcast over entries
    return t.double() * weights


def largest_terms(tensors: Tree, weights: Tree) -> Float[Tensor, " tensors"]:
    """Return for each tensor the largest magnitude of an entry in any user's weighted tensor; 0 without users.

    From it follows how far the weighted tensors can be scaled before they are rounded to integers and added.

    Args:
        tensors: Tensors ``(users, *shape)`` by name.
        weights: Weights of the users in the sum of each tensor.
    """
    return torch.stack([_largest_term(t, weights[name]) for name, t in tensors.items()])


def _largest_term(t: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    """Return the largest magnitude of an entry of ``weight_u t_u`` over users u, in float64; 0 without entries.

    It determines how far the terms can be scaled before they are rounded to integers (:func:`choose_shifts`).

    Args:
        t: Tensor ``(users, *shape)``.
        weights: Weights of the users.
    """
    largest_of_chunks: list[Tensor] = []
    for chunk, chunk_weights in _chunks(t, weights):
        if chunk.numel():
            largest_of_chunks.append(weighted_terms(chunk, chunk_weights).abs().max())
    if not largest_of_chunks:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(largest_of_chunks).max().cpu()


def choose_shifts(largest: Float[Tensor, " tensors"], num_users: int) -> list[int]:
    """Return for each tensor the largest exponent s with which ``sum_u round(term_u 2^s)`` fits into 61 bits.

    The larger s, the less is lost by rounding: each term is wrong by at most ``2^-s / 2``.

    Args:
        largest: Largest magnitude of the terms of each tensor, over all processes.
        num_users: Number of users of all processes, which is the number of terms.

    Raises:
        DivergenceError: A term is not finite.
    """
    if not bool(largest.isfinite().all()):
        raise DivergenceError("the sum of the users' uploads is not finite; try a smaller learning rate")
    bits_per_term = _SUM_BITS - math.ceil(math.log2(max(num_users, 2)))  # the sum of n terms has log2(n) more bits
    shifts: list[int] = []
    for largest_term in largest.tolist():
        if largest_term == 0:
            shifts.append(0)
            continue
        _, exponent = math.frexp(largest_term)  # largest_term < 2^exponent
        shifts.append(bits_per_term - exponent)
    return shifts


def integer_sums(tensors: Tree, weights: Tree, shifts: Sequence[int]) -> Int64[Tensor, " entries"]:
    """Return ``sum_u round(weight_u t_u 2^shift)`` over the users of this process, concatenated for all tensors.

    Integers are added, since a sum of floats would depend on how the users are divided among processes.

    Args:
        tensors: Tensors ``(users, *shape)`` by name.
        weights: Weights of the users, by tensor name.
        shifts: Exponent of each tensor; see :func:`choose_shifts`.
    """
    sums = []
    for (name, t), shift in zip(tensors.items(), shifts, strict=True):
        sums.append(_integer_sum(t, weights[name], shift).flatten())
    return torch.cat(sums)


def _integer_sum(t: Tensor, weights: Tensor, shift: int) -> Int64[Tensor, ...]:
    """Return ``sum_u round(weight_u t_u 2^shift)`` of one tensor over the users of this process.

    Integers are added, since a sum of floats would depend on how the users are divided among processes.

    Args:
        t: Tensor ``(users, *shape)``.
        weights: Weights of the users.
        shift: Exponent of the tensor; see :func:`choose_shifts`.
    """
    total = torch.zeros(t.shape[1:], dtype=torch.int64, device=t.device)
    for chunk, chunk_weights in _chunks(t, weights):  # a few users at a time, as float64 takes more memory
        scaled_terms = _times_power_of_two(weighted_terms(chunk, chunk_weights), shift)
        total += scaled_terms.round().long().sum(0)
    return total


def _times_power_of_two(t: Float[Tensor, "*shape"], shift: int) -> Float[Tensor, "*shape"]:
    """Return ``t 2^shift`` for a float64 tensor.

    A shift beyond 1000 is split into two, as ``2.0**1100`` would overflow although ``1e-200 * 2^1100`` does not.
    """
    first_shift = min(max(shift, -_MAX_POWER), _MAX_POWER)
    second_shift = shift - first_shift
    t = t * 2.0**first_shift
    if second_shift == 0:
        return t
    return t * 2.0**second_shift


def sums_from_integers(integers: Int64[Tensor, " entries"], like: Tree, shifts: Sequence[int]) -> Tree:
    """Return ``integer 2^-shift`` for each sum of :func:`integer_sums`, as tensors by name.

    Args:
        integers: Result of :func:`integer_sums`, added up over processes.
        like: Tensors ``(users, *shape)`` with the names, dtypes and (without users) shapes of the sums.
        shifts: Exponent of each tensor, by which it was scaled.
    """
    entries_per_tensor = [math.prod(t.shape[1:]) for t in like.values()]
    integers_of_tensors = integers.split(entries_per_tensor)
    sums = Tree()
    for (name, t), integers_of_tensor, shift in zip(like.items(), integers_of_tensors, shifts, strict=True):
        unscaled = _times_power_of_two(integers_of_tensor.double(), -shift)
        sums[name] = unscaled.to(t.dtype).view(t.shape[1:])
    return sums


def sum_over_processes(
    tensors: Tree,
    weights: Tree,
    num_users: int,
    *,
    reduce_max: Callable[[Tensor], Tensor],
    reduce_sum: Callable[[Tensor], Tensor],
) -> Tree:
    """Return ``sum_u weight_u t_u`` over the users u of all processes, with equal bits in any order of users.

    Terms are rounded to integers before they are added, as the sum of integers does not depend on their order.

    Args:
        tensors: Tensors ``(users, *shape)`` of the users of this process, by name.
        weights: Weights of these users, by tensor name.
        num_users: Number of users of all processes.
        reduce_max: Reduces a tensor to its maximum over processes.
        reduce_sum: Reduces a tensor to its sum over processes.
    """
    largest = reduce_max(largest_terms(tensors, weights))  # of each tensor, over all processes
    shifts = choose_shifts(largest, num_users)  # a term is rounded to the nearest integer of ``term 2^shift``
    integers = reduce_sum(integer_sums(tensors, weights, shifts))
    return sums_from_integers(integers, tensors, shifts)


def _chunks(t: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split a tensor and its weights along the users, as float64 copies of all users at once take too much memory.

    Args:
        t: A tensor ``(users, ...)``.
        weights: The users' weights ``(users, ...)``.

    Returns:
        Pairs of a part of the tensor, of about ``_CHUNK_ENTRIES`` entries, and the weights of the same users.
    """
    entries_per_user = max(1, t[:1].numel())
    users_per_chunk = max(1, _CHUNK_ENTRIES // entries_per_user)
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
        shards: Number of trainers of each process; checkpoints record it.
    """

    ranks: Ranks
    first: int
    ordered: bool = False
    shards: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note whether this process is the first one, which logs and writes results."""
        self.is_first_process = self.ranks.is_first_process

    def merge_users(self, work: Callable[[], JsonMapping]) -> JsonObject:
        """Merge the mappings of all processes in the first one; in others return their own."""
        return merged(self.ranks.gather(work))

    # ---------------------------------------------------------------- rounds

    def _resolve_eval_interval(self) -> int:
        """Return the number of rounds between evaluations, computed in the first process from the data of all users."""
        clients = self.clients
        # For each process [evaluated models, tokens trained per round, tokens scored], such as [[3, 900, 100], ...].
        amounts_by_rank = self.ranks.gather(lambda: data_amounts(clients))

        def interval_of_all() -> int:
            total_amounts = [sum(amounts) for amounts in zip(*amounts_by_rank, strict=True)]
            self._amounts = total_amounts  # for the warning about the time that evaluations take
            return evaluation_interval(clients.plan, total_amounts, len(clients.population_names))

        return self.ranks.run_in_first(interval_of_all)

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round that belong to this process.

        Returns:
            Their numbers among the users of this process, counted from 0; None if the privacy budget is spent.
        """
        select_in_first = partial(super().select_participants, plan)
        participants = self.ranks.run_in_first(select_in_first)  # numbers among the users of all processes
        if participants is None:
            self.clients.stopped_after = plan.number  # counted from 0, so this many rounds are done
            return None
        numbers_here = range(self.first, self.first + len(self.clients.trainers))
        return [number - self.first for number in participants if number in numbers_here]

    def _take_local_steps(self, plan: RoundPlan, participants: Sequence[int]) -> LocalRound:
        """Have the participants of this process take their local steps; a failure ends all processes."""
        return self.ranks.run_in_all(partial(super()._take_local_steps, plan, participants))

    def _report_round(self, local_round: LocalRound) -> RoundReport:
        """Return the report on the users of all processes in the first process, and on its own users in the others."""
        report_own_users = super()._report_round
        fields_by_rank = self.ranks.gather(lambda: asdict(report_own_users(local_round)))
        reports = [RoundReport(**fields) for fields in fields_by_rank]

        losses: dict[str, float] = {}
        rejected: dict[str, str] = {}
        steps: dict[str, int] = {}
        suspect_optimizers: list[str] = []  # which may have made the first rejected user diverge, for the error
        for report in reports:
            if report.rejected and not rejected:
                suspect_optimizers = report.suspect_optimizers
            losses.update(report.losses)
            rejected.update(report.rejected)
            steps.update(report.steps)
        return RoundReport(
            losses=losses,
            rejected=rejected,
            steps=steps,
            suspect_optimizers=suspect_optimizers,
            tokens=sum(report.tokens for report in reports),
            seconds=max(report.seconds for report in reports),
        )

    def _require_losses(self, report: RoundReport) -> None:
        """Check in the first process that at least one participant of all processes was not rejected."""
        self.ranks.run_in_first(partial(super()._require_losses, report))

    def _score(self, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
        """Return test scores and validation losses of the users of this process; a failure ends all processes."""
        return self.ranks.run_in_all(partial(super()._score, done))

    def _make_final_models(self) -> None:
        """Run the ``finish`` hooks for the users of this process; a failure ends all processes."""
        self.ranks.run_in_all(super()._make_final_models)

    def _score_final_models(self) -> Sequence[AnyScore]:
        """Return the test scores of the final models of this process's users; a failure ends all processes."""
        return self.ranks.run_in_all(super()._score_final_models)

    # ---------------------------------------------------------------- the run folder

    def open_folder(self, folder: Path, *, resume: bool) -> bool:
        """Prepare a run folder, and return whether it has a checkpoint to restore.

        With ``runtime.store: disk`` the users' tensors are written to files in this folder from now on.

        Args:
            folder: The run folder.
            resume: Whether to resume the run; if not, old files of its store are deleted.
        """
        store = self.clients.state
        has_checkpoint = self.ranks.run_in_first(lambda: resume and bool(list_checkpoints(folder)))

        def open_in_others() -> None:
            if not self.is_first_process:
                store.open(folder, new_run=not has_checkpoint)

        # The first process opens the store before the others, as it deletes old files.
        self.ranks.run_in_first(lambda: store.open(folder, new_run=not has_checkpoint))
        self.ranks.run_in_all(open_in_others)
        return has_checkpoint

    def _load_or_create_key(self, folder: Path | None, *, resume: bool) -> str:
        """Return the key of the privacy noise, which the first process reads or creates, in every process."""
        return self.ranks.run_in_first(partial(super()._load_or_create_key, folder, resume=resume))

    def write_record(self, path: Path, content: Mapping[str, object]) -> None:
        """Write a JSON file in the first process."""
        self.ranks.run_in_first(partial(super().write_record, path, content))

    def save(self, folder: Path, progress: Progress, *, keep: int) -> None:
        """Write the checkpoint of a round, and delete all but the newest ``keep``.

        Each process writes the file of its users, and the first one that of the server. Files are written to a draft,
        a folder that is renamed when it is complete, so that a checkpoint is never partial.

        Args:
            folder: The run folder.
            progress: Rounds, times and bytes so far.
            keep: Number of checkpoints to keep.

        Raises:
            RunError: The disk of a process cannot be written to; older checkpoints stay.
        """
        server, ranks = self.server, self.ranks
        progress = replace(progress, shards=self.shards)

        def make_draft() -> tuple[str, str]:
            """Make the draft, which is renamed once complete; return the final path and that of the draft."""
            final, draft = folder_and_draft(folder, progress.round)
            with convert_write_errors(final, draft):
                draft.mkdir(parents=True)
            return str(final), str(draft)

        final, draft = (Path(path) for path in ranks.run_in_first(make_draft))
        try:
            checksums_by_rank = ranks.gather(lambda: self._write_own_users(draft, final))
        except BaseException:
            if self.is_first_process:  # after all processes have stopped writing
                shutil.rmtree(draft, ignore_errors=True)
            raise
        checksum_lines = "".join(checksums_by_rank).encode().splitlines(keepends=True)

        def write_server_and_rename() -> None:
            """Write the server's state, and rename the draft."""
            with convert_write_errors(final, draft):
                server_tensors = {OF_SERVER + name: t for name, t in server.state.items()}
                write_tensors(draft / SERVER, server_tensors)
                finish_checkpoint(draft, final, progress, checksum_lines)

        ranks.run_in_first(write_server_and_rename)
        ranks.run_in_first(partial(prune_checkpoints, folder, keep))

    def _write_own_users(self, draft: Path, final: Path) -> str:
        """Write the users of this process into a checkpoint; return a line with the checksum of each of its files.

        Args:
            draft: Folder to write to; not deleted after an error, as other processes may still write to it.
            final: Final folder of the checkpoint, ``RUN/checkpoints/round-NNNN``.
        """
        clients, run = self.clients, final.parent.parent

        def write_users_in_memory() -> list[str]:
            """Write the tensors of users that are in memory, and return the name of the file."""
            file = shard_file(self.ranks.rank, len(self.shards))
            no_server: Tree = {}  # the server's state is a file of its own
            write_tensors(draft / file, named_tensors(clients.model.layout, clients.state, no_server))
            return [file]

        with convert_write_errors(final, None):
            # A store on disk writes its own files instead.
            files = clients.state.save(draft, list_checkpoints(run), write_users_in_memory)
            return "".join(checksum_line(draft / name).decode() for name in files)

    def _find_checkpoint(self, folder: Path, fingerprint: str) -> tuple[Path, Progress]:
        """Return the newest checkpoint and its progress; if it cannot be used, all processes end."""
        return self.ranks.run_in_all(partial(super()._find_checkpoint, folder, fingerprint))

    def _load_state(self, checkpoint: Path, progress: Progress) -> Tree:
        """Restore the users of this process; return the server's state, which is empty except in the first process."""

        def load_server_in_first() -> Tree:
            if not self.is_first_process:
                return {}
            return self._load_server(checkpoint, progress)

        self.ranks.run_in_all(partial(self._load_users, checkpoint, progress))
        return self.ranks.run_in_all(load_server_in_first)

    def _restore_server(self, server_state: Tree, names: Sequence[str]) -> None:
        """Restore the server in the first process; other processes only need the version of its state.

        By the version each process tells which of its users have not downloaded the newest state.

        Args:
            server_state: The server's state in the checkpoint.
            names: Names of all users, in the order of the state's rows.
        """
        if self.is_first_process:
            super()._restore_server(server_state, names)
        self._share_version()

    def _share_version(self) -> None:
        """Set the version of the server's state in all processes to that of the first one."""
        self.server.version = self.ranks.run_in_first(lambda: self.server.version)

    # ---------------------------------------------------------------- downloads

    def download(self, users: Sequence[int]) -> None:
        """Send the newest shared tensors to those users of this process that have older ones.

        The first process makes the downloads of all processes. It broadcasts tensors that are equal for all users, and
        sends the others to the process of each user.

        Args:
            users: Numbers of users of this process.
        """
        if not self.clients.shares:
            return
        stale = self.clients.stale(self.server.version, users)  # those that have older tensors
        stale_names = [self.clients.names[user] for user in stale]
        stale_names_by_process = self.ranks.gather(lambda: first_downloads(self.clients, stale_names))
        common: Tree = {}  # tensors that are equal for all users; filled in the first process
        header, own_tensors = self.ranks.scatter(lambda: self._split_download(stale_names_by_process, common))
        if not header["any_stale"]:
            return
        tensors = own_tensors | self.ranks.broadcast(common)
        receivers = tuple(header["users"])
        if not receivers:
            self.ranks.run_in_all(lambda: None)  # matches the call of the other processes below
            return
        message_tensors: Tree = {}
        for name in header["tensor_names"]:
            t = tensors[name]
            message_tensors[name] = t.expand(len(receivers), *t.shape[1:])  # a common tensor has one row for all users
        message = Download(
            version=header["version"],
            users=receivers,
            tensors=message_tensors,
            ranks=torch.tensor(header["ranks"], dtype=torch.int64),
            senders=tuple(header["senders"]),
        )
        self.ranks.run_in_all(lambda: self.clients.receive(message))

    def _split_download(
        self, stale_names_by_process: Sequence[Sequence[Sequence[str]]], common: Tree
    ) -> list[tuple[dict[str, Any], Tree]]:
        """Make the download of all stale users, and split it by process.

        Args:
            stale_names_by_process: Names of the users of each process whose shared tensors are out of date, in two
                lists: without the tensors that a user downloads once, and with them.
            common: Filled with the tensors that are equal for all users, with one row each.

        Returns:
            For each process a header with the fields of its message, and the tensors ``(users, *shape)`` that are not
            common. If no process has a stale user, the header is ``{"any_stale": False}``.
        """
        # With peer-to-peer methods the server has a download only for users that have uploaded in this round.
        names_by_process = [self.server.with_download([*first, *later]) for first, later in stale_names_by_process]
        all_names = [name for names in names_by_process for name in names]
        if not all_names:
            return [({"any_stale": False}, {})] * len(names_by_process)
        needs_once = any(first for first, _later in stale_names_by_process)
        message = self.server.download(all_names, once=needs_once)
        self.clock.download_bytes += sum(packed_bytes(message))
        for name, t in message.tensors.items():
            if t.stride(0) == 0:  # one tensor, expanded to all users
                common[name] = t[:1]

        headers_and_tensors: list[tuple[dict[str, Any], Tree]] = []
        start = 0
        for names in names_by_process:
            rows = slice(start, start + len(names))  # of this process in the message
            start += len(names)
            header = {
                "any_stale": True,
                "version": message.version,
                "senders": list(message.senders),
                "tensor_names": list(message.tensors),
                "users": names,
                "ranks": message.ranks[rows].tolist(),
            }
            own_tensors: Tree = {}
            if names:
                own_tensors = {name: t[rows] for name, t in message.tensors.items() if name not in common}
            headers_and_tensors.append((header, own_tensors))
        return headers_and_tensors

    # ---------------------------------------------------------------- uploads

    def upload(self, users: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Store the upload of this process's users for :meth:`aggregate`; count the upload bytes of all processes.

        Args:
            users: Numbers of the users; may be empty.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        own_upload = self.ranks.run_in_all(lambda: self._make_upload(users, round_number, losses))
        self._upload_of_round = own_upload
        has_secure_sum = self.server.sums is not None
        if has_secure_sum:  # count its masked messages, not the upload
            names_by_rank = self.ranks.gather(lambda: list(own_upload.users))
            names = [name for names in names_by_rank for name in names]
            if self.is_first_process and names:
                self._count_sum_bytes(names, round_number)
            return

        def count_own_bytes() -> int:
            if not own_upload.users:
                return 0
            return sum(packed_bytes(own_upload))

        bytes_by_rank = self.ranks.gather(count_own_bytes)
        if self.is_first_process:
            self.clock.upload_bytes += sum(bytes_by_rank)

    def _make_upload(self, users: Sequence[int], round_number: int, losses: dict[int, float]) -> Upload:
        """Return the upload of users of this process, with their training losses as reports.

        Args:
            users: Numbers of the users; may be empty.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        if not users:
            return no_uploads(round_number)
        reports = {LOSS: torch.tensor([losses[user] for user in users])}
        return self.clients.upload(users, round_number, reports, copies=self._copies_uploads)

    def aggregate(self) -> str:
        """Aggregate the uploads of the round.

        Each process sends its users' uploads to the first one; only their weighted sum if the server needs no more and
        :attr:`ordered` is not set. With peer-to-peer methods, users then download the models of their peers.

        Returns:
            Reason why a secure sum failed, for example too few users; empty if it succeeded or the run has none.
        """
        assert self._upload_of_round is not None
        own_upload = self._upload_of_round
        self._upload_of_round = None
        sends_sums = self.server.needs_only_sums and not self.ordered
        if sends_sums:
            reason = self._aggregate_weighted_sums(own_upload)
        else:
            uploads = self._gather_uploads(own_upload)
            reason = self.ranks.run_in_first(lambda: self._aggregate_all(uploads))
        self._share_version()
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(own_upload.users))
            self.server.clear_uploads()
        return reason

    def _aggregate_weighted_sums(self, own_upload: Upload) -> str:
        """Aggregate the uploads of all processes, of which each process sends only a weighted sum.

        Args:
            own_upload: The upload of the users of this process.

        Returns:
            An empty string, as :meth:`aggregate` does unless a secure sum failed.
        """
        joined = self._gather_uploads(replace(own_upload, tensors={}))  # losses and ranks of all users, without tensors

        def list_users() -> list[str]:
            assert joined is not None  # None in the other processes, which do not call this
            return list(joined.users)

        users = self.ranks.run_in_first(list_users)
        if not users:  # no tensors to sum; the server still counts the round
            return self.ranks.run_in_first(lambda: self._aggregate_all(joined))
        sums = self._weighted_sums(own_upload, joined, users)
        return self.ranks.run_in_first(lambda: self._aggregate_sums(sums, joined))

    def _aggregate_all(self, uploads: Upload | None) -> str:
        """Aggregate the uploads of all users; runs in the first process.

        Args:
            uploads: The uploads of all users, joined in one message.

        Returns:
            Why a secure sum failed, such as too few users; an empty string if aggregation succeeded.
        """
        assert uploads is not None  # None in the other processes
        if self.server.sums is not None:  # secure aggregation, in which the server sees only sums of uploads
            return self._aggregate_secure_sum(self.server.sums, uploads)
        self.server.aggregate(uploads)
        return ""

    def _aggregate_sums(self, sums: Tree, joined: Upload | None) -> str:
        """Aggregate uploads whose tensors the processes have already summed; runs in the first process.

        Args:
            sums: The weighted sums over all users, by tensor name.
            joined: The users, reports and LoRA ranks of all uploads, joined in one message without tensors.

        Returns:
            An empty string, as :meth:`_aggregate_all` does when aggregation succeeds; this cannot fail.
        """
        assert joined is not None  # None in the other processes
        self.server.aggregate_weighted(sums, joined)
        return ""

    def _gather_uploads(self, own_upload: Upload) -> Upload | None:
        """Return the joined uploads of all processes in the first process, and None in the others.

        Args:
            own_upload: The upload of this process, without users if none of them takes part in the round.
        """
        own_tensors: Tree = {}
        if own_upload.users:
            own_tensors.update(own_upload.tensors)
            own_tensors.update({_REPORT_PREFIX + name: report for name, report in own_upload.reports.items()})
            own_tensors["ranks"] = own_upload.ranks  # the users' LoRA ranks
        tensors_by_process = self.ranks.gather_tensors(own_tensors)
        users_by_process = self.ranks.gather(lambda: list(own_upload.users))
        if not self.is_first_process:
            return None
        uploads: list[Upload] = []
        for users, tensors in zip(users_by_process, tensors_by_process, strict=True):
            if users:
                uploads.append(_upload_from_tensors(own_upload.round, users, tensors))
        if not uploads:
            return no_uploads(own_upload.round)
        return join_uploads(uploads)

    def _weighted_sums(self, own_upload: Upload, joined: Upload | None, users: Sequence[str]) -> Tree:
        """Return the weighted sums of the uploads of all processes, by tensor name.

        Each process sums the uploads of its own users, so that only sums are sent. The result is complete only in the
        first process, which has the server and so computes the weights.

        Args:
            own_upload: The upload of the users of this process.
            joined: The users and reports of all uploads, without tensors, in the first process; None in the others.
            users: Names of all users that have uploaded.
        """
        layout = self.clients.model.layout
        no_rows = self.clients.state.rows[:0]
        empty_tensors = restrict(layout.views(no_rows), layout, self.server.method.shared)  # (0, *shape)
        names = list(empty_tensors)  # the same order in all processes
        tensors = decompress(own_upload.tensors, self.server.uploads) if own_upload.users else empty_tensors
        counts = self.ranks.gather(lambda: len(own_upload.users))
        # Tensors with the same weights have the same key, so that these weights are sent once.
        key_by_tensor, weights_by_key = self.ranks.scatter(lambda: self._split_weights(names, joined, counts))
        return sum_over_processes(
            {name: tensors[name] for name in names},
            {name: weights_by_key[key_by_tensor[name]] for name in names},
            num_users=len(users),
            reduce_max=self.ranks.reduce_max,
            reduce_sum=self.ranks.reduce_sum,
        )

    def _split_weights(
        self, names: Sequence[str], joined: Upload | None, counts: Sequence[int]
    ) -> list[tuple[dict[str, str], Tree]]:
        """Return the weights of the uploads in their sum, split by process; runs in the first process.

        Most tensors have the same weights, which are sent once, under a key.

        Args:
            names: Names of the shared tensors.
            joined: The uploads of all processes, with reports but without tensors.
            counts: Number of users of each process.

        Returns:
            For each process the key of each tensor, by tensor name, and the weights of its users, by key.
        """
        assert joined is not None  # None in the other processes
        weights_by_tensor = self.server.coefficients(names, joined)
        # Tensors with the same weights share one object, whose id is the key.
        key_by_tensor = {name: str(id(weights)) for name, weights in weights_by_tensor.items()}
        weights_by_key = {str(id(weights)): weights for weights in weights_by_tensor.values()}
        weights_of_ranks = {key: weights.cpu().split(list(counts)) for key, weights in weights_by_key.items()}
        messages: list[tuple[dict[str, str], Tree]] = []
        for rank in range(len(counts)):
            weights_of_rank = {key: by_rank[rank] for key, by_rank in weights_of_ranks.items()}
            messages.append((key_by_tensor, weights_of_rank))
        return messages

    # ---------------------------------------------------------------- the best round

    def report_losses(self, done: int, losses: dict[str, float]) -> float:
        """Report validation losses after a round; if their mean is the lowest so far, store all users' models as best.

        Called with ``evaluation.select: best``.

        Args:
            done: Number of rounds that are done.
            losses: Validation loss in nats of each user of this process, by name.

        Returns:
            The mean loss of the users of all processes.
        """
        losses_by_rank = self.ranks.gather(lambda: losses)
        mean, is_lowest = self.ranks.run_in_first(lambda: self._judge_losses(losses_by_rank, done))
        # The server's answer to any user makes this process store the models of all its users, also of those without
        # losses. So one receiver suffices if no user of this process has a loss.
        receivers = list(losses) or [self.clients.names[0]]
        self.clients.receive_verdict(validation_reply(receivers, done, lowest=is_lowest))
        return mean

    def _judge_losses(self, losses_by_rank: Sequence[dict[str, float]], done: int) -> tuple[float, bool]:
        """Return the mean of all validation losses and whether it is the lowest so far; count the bytes of messages.

        Args:
            losses_by_rank: Validation losses of the users of each process, by name.
            done: Number of rounds that are done.
        """
        losses: dict[str, float] = {}
        for losses_of_rank in losses_by_rank:
            losses.update(losses_of_rank)
        lowest_before = self.server.best.loss
        report = validation_report(losses, done)
        verdict = self.server.judge(report)  # a message that says whether it is the lowest; updates the lowest loss
        self.clock.upload_bytes += sum(packed_bytes(report))
        self.clock.download_bytes += sum(packed_bytes(verdict))
        is_lowest = self.server.best.loss < lowest_before
        return fmean(losses.values()), is_lowest


def _upload_from_tensors(round_number: int, users: Sequence[str], tree: Tree) -> Upload:
    """Return the upload of another process, which ``_gather_uploads`` has received as tensors by name.

    Args:
        round_number: The round, counted from 1.
        users: Names of the users.
        tree: The uploaded tensors, the reports as ``"report/NAME"``, and the users' LoRA ranks as ``"ranks"``.
    """
    tensors: Tree = {}
    reports: Tree = {}
    for name, t in tree.items():
        if name == "ranks":
            continue
        if name.startswith(_REPORT_PREFIX):
            reports[name.removeprefix(_REPORT_PREFIX)] = t
        else:
            tensors[name] = t
    return Upload(round=round_number, users=tuple(users), tensors=tensors, ranks=tree["ranks"], reports=reports)
