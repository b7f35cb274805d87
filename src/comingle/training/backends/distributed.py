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
    validation_report,
    verdict,
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
from comingle.training.events import JsonMapping, JsonObject
from comingle.utils.errors import DivergenceError
from comingle.utils.files import line_of, list_checkpoints
from comingle.utils.trees import Tree, restrict

_BITS = 61
"""Bits of a sum, without its sign and the carry of terms that are rounded up."""

_POWER = 1000
"""Largest power of two in one multiplication; float64 overflows at 2^1024."""

_AT_ONCE = 2**22
"""Number of entries that are converted to float64 at a time."""


def terms(t: Float[Tensor, "users ..."], weights: Float[Tensor, "users ..."]) -> Float[Tensor, "users ..."]:
    """Return ``weight_u t_u`` in float64, in which products of float32 are exact; weights may be per component."""
    factors = weights.to(t).double()
    return t.double() * factors.view(*factors.shape, *[1] * (t.dim() - factors.dim()))


def largest_terms(tensors: Tree, weights: Tree) -> Float[Tensor, " tensors"]:
    """Return the largest magnitude of the terms of each tensor; 0 without users."""
    return torch.stack([_largest(t, weights[name]) for name, t in tensors.items()])


def _largest(t: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    found = [terms(some, of).abs().max() for some, of in _chunks(t, weights) if some.numel()]
    return torch.stack(found).max().cpu() if found else torch.zeros((), dtype=torch.float64)


def shifts_of(largest: Float[Tensor, " tensors"], users: int) -> list[int]:
    """Return the power of two that scales the terms of each tensor so that the sum over all users fits into 64 bits.

    Rounding a term adds at most half a unit, so the error of a sum is at most ``users 2^(log2(users) - 61)`` times its
    largest term.

    Raises:
        DivergenceError: A term is not finite.
    """
    if not bool(largest.isfinite().all()):
        raise DivergenceError("the sum of the users' uploads is not finite; try a smaller learning rate")
    room = _BITS - math.ceil(math.log2(max(users, 2)))
    return [room - math.frexp(value)[1] if value else 0 for value in largest.tolist()]


def whole_sums(tensors: Tree, weights: Tree, shifts: Sequence[int]) -> Int64[Tensor, " entries"]:
    """Return ``sum_u round(weight_u t_u 2^shift)`` over the users of this process, for all tensors, concatenated.

    Args:
        tensors: Tensors ``(users, *shape)``.
        weights: Weights of the users, by tensor name.
        shifts: Power of two of each tensor.
    """
    return torch.cat(
        [_whole(t, weights[name], shift).flatten() for (name, t), shift in zip(tensors.items(), shifts, strict=True)]
    )


def _whole(t: Tensor, weights: Tensor, shift: int) -> Int64[Tensor, ...]:
    total = torch.zeros(t.shape[1:], dtype=torch.int64, device=t.device)
    for some, of in _chunks(t, weights):
        total += _scaled(terms(some, of), shift).round().long().sum(0)
    return total


def _scaled(t: Float[Tensor, "*shape"], shift: int) -> Float[Tensor, "*shape"]:
    """Return ``t 2^shift``, exactly where float64 can represent it."""
    first = min(max(shift, -_POWER), _POWER)
    t = t * 2.0**first
    return t if first == shift else t * 2.0 ** (shift - first)


def sums_of(whole: Int64[Tensor, " entries"], like: Tree, shifts: Sequence[int]) -> Tree:
    """Return concatenated integer sums as named tensors.

    Args:
        whole: Result of :func:`whole_sums`.
        like: Tensors ``(users, *shape)`` with the names, shapes and dtypes.
        shifts: Power of two of each tensor.
    """
    parts = whole.split([t[:0].new_empty(t.shape[1:]).numel() for t in like.values()])
    named = zip(like.items(), parts, shifts, strict=True)
    return {name: _scaled(part.double(), -shift).to(t.dtype).view(t.shape[1:]) for (name, t), part, shift in named}


def reduced(
    tensors: Tree,
    weights: Tree,
    users: int,
    *,
    largest: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
) -> Tree:
    """Return ``sum_u weight_u t_u`` over the users of all processes, independent of their order.

    Args:
        tensors: Tensors of the users of this process ``(users, *shape)``.
        weights: Weights of the users, by tensor name.
        users: Number of users of all processes.
        largest: Reduces a tensor to its maximum over processes.
        total: Reduces a tensor to its sum over processes.
    """
    shifts = shifts_of(largest(largest_terms(tensors, weights)), users)
    return sums_of(total(whole_sums(tensors, weights, shifts)), tensors, shifts)


def _chunks(t: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, _AT_ONCE // max(1, t[:1].numel()))
    return list(zip(t.split(size), weights.split(size), strict=True))


_REPORT = "report/"


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
        clients = self.clients
        parts = self.ranks.gather(lambda: amounts_of(clients))

        def resolve() -> int:
            return period(clients.plan, [*map(sum, zip(*parts, strict=True))], len(clients.population_names))

        return self.ranks.share(resolve)

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round that belong to this process."""
        participants = self.ranks.share(partial(super().select_participants, plan))
        if participants is None:
            self.clients.stopped_after = plan.number
            return None
        here = range(len(self.clients.trainers))
        return [number - self.first for number in participants if number - self.first in here]

    def _train(self, plan: RoundPlan, participants: Sequence[int]) -> LocalRound:
        return self.ranks.each(partial(super()._train, plan, participants))

    def _report_round(self, work: LocalRound) -> RoundReport:
        """Return the report of all users in the first process, in others that of their own users."""
        own = super()._report_round
        parts = [RoundReport(**part) for part in self.ranks.gather(lambda: asdict(own(work)))]
        return RoundReport(
            losses={name: loss for part in parts for name, loss in part.losses.items()},
            rejected={name: reason for part in parts for name, reason in part.rejected.items()},
            suspects=next((part.suspects for part in parts if part.rejected), []),
            tokens=sum(part.tokens for part in parts),
            seconds=max(part.seconds for part in parts),
        )

    def _require_losses(self, report: RoundReport) -> None:
        self.ranks.share(partial(super()._require_losses, report))

    def _score(self, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
        return self.ranks.each(partial(super()._score, done))

    def _finish(self) -> None:
        self.ranks.each(super()._finish)

    def _score_chosen(self) -> Sequence[AnyScore]:
        return self.ranks.each(super()._score_chosen)

    # ---------------------------------------------------------------- the run folder

    def open_folder(self, folder: Path, *, resume: bool) -> bool:
        """Open the users' store in a run folder, in the first process first; return whether to restore it."""
        found = self.ranks.share(lambda: resume and bool(list_checkpoints(folder)))
        store = self.clients.state
        self.ranks.share(lambda: store.open(folder, anew=not found))
        self.ranks.each(lambda: None if self.leads else store.open(folder, anew=not found))
        return found

    def _read_key(self, folder: Path | None, *, resume: bool) -> str:
        return self.ranks.share(partial(super()._read_key, folder, resume=resume))

    def write_record(self, path: Path, content: Mapping[str, object]) -> None:
        """Write a JSON file in the first process."""
        self.ranks.share(partial(super().write_record, path, content))

    def save(self, folder: Path, progress: Progress, *, keep: int) -> None:
        """Write the checkpoint of a round, each process the part of its users, and delete old checkpoints.

        Raises:
            RunError: The disk of a process cannot be written to; older checkpoints stay.
        """
        clients, server, ranks = self.clients, self.server, self.ranks
        progress = replace(progress, shards=self.shards)

        def begin() -> tuple[str, str]:
            final, draft = folder_and_draft(folder, progress.round)
            with write_errors(final, draft):
                draft.mkdir(parents=True)
            return str(final), str(draft)

        final, draft = (Path(place) for place in ranks.share(begin))

        def write() -> str:
            def write_rows() -> list[str]:
                file = shard_file(ranks.rank, len(progress.shards))
                write_tensors(draft / file, named_tensors(clients.model.layout, clients.state, {}))
                return [file]

            with write_errors(final, None):
                files = clients.state.save(draft, list_checkpoints(folder), write_rows)
                return "".join(line_of(draft / name).decode() for name in files)

        try:
            lines = [line for text in ranks.gather(write) for line in text.encode().splitlines(keepends=True)]
        except BaseException:
            if self.leads:  # after all processes have stopped writing
                shutil.rmtree(draft, ignore_errors=True)
            raise

        def end() -> None:
            with write_errors(final, draft):
                kept = {OF_SERVER + name: t for name, t in server.state.items()}
                write_tensors(draft / SERVER, kept)
                finish_checkpoint(draft, final, progress, lines)

        ranks.share(end)
        ranks.share(partial(prune_checkpoints, folder, keep))

    def _find_checkpoint(self, folder: Path, fingerprint: str) -> tuple[Path, Progress]:
        return self.ranks.each(partial(super()._find_checkpoint, folder, fingerprint))

    def _load(self, checkpoint: Path, progress: Progress) -> Tree:
        self.ranks.each(partial(self._load_users, checkpoint, progress))
        return self.ranks.each(lambda: self._load_server(checkpoint, progress) if self.leads else {})

    def _restore_server(self, kept: Tree, trainers: Sequence[str]) -> None:
        if self.leads:
            super()._restore_server(kept, trainers)
        self._share_version()

    def _share_version(self) -> None:
        self.server.version = self.ranks.share(lambda: self.server.version)

    # ---------------------------------------------------------------- downloads

    def download(self, members: Sequence[int]) -> None:
        """Send the current server version to stale users."""
        if not self.clients.shares:
            return
        stale = self.clients.stale(self.server.version, members)
        asked = self.ranks.gather(lambda: [self.clients.names[member] for member in stale])
        common: Tree = {}
        told, own = self.ranks.scatter(lambda: self._answers(asked, common))
        if not told["answered"]:
            return
        tensors = own | self.ranks.broadcast(common)
        if users := tuple(told["users"]):
            message = Download(
                version=told["version"],
                users=users,
                tensors={name: tensors[name].expand(len(users), *tensors[name].shape[1:]) for name in told["order"]},
                ranks=torch.tensor(told["ranks"], dtype=torch.int64),
                senders=tuple(told["senders"]),
            )
            self.ranks.each(lambda: self.clients.receive(message))
        else:
            self.ranks.each(lambda: None)

    def _answers(self, asked: Sequence[Sequence[str]], common: Tree) -> list[tuple[dict[str, Any], Tree]]:
        """Return the part of the download of each process; tensors that all have in common go to ``common``."""
        names = [self.server.with_download(some) for some in asked]
        flat = [name for some in names for name in some]
        if not flat:
            return [({"answered": False}, {})] * len(asked)
        message = self.server.download(flat)
        self.clock.download_bytes += sum(packed_bytes(message))
        common.update({name: t[:1] for name, t in message.tensors.items() if t.stride(0) == 0})
        about = {"answered": True, "version": message.version, "senders": list(message.senders)}
        about["order"] = list(message.tensors)
        answers, start = [], 0
        for some in names:
            span = slice(start, start := start + len(some))
            own = {name: t[span] for name, t in message.tensors.items() if name not in common and some}
            answers.append((about | {"users": some, "ranks": message.ranks[span].tolist()}, own))
        return answers

    # ---------------------------------------------------------------- uploads

    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """Upload the shared tensors and training losses of users."""
        self._sent = self.ranks.each(lambda: self._make_upload(members, done, losses))
        sent, summed = self._sent, self.server.sums is not None
        told = self.ranks.gather(lambda: list(sent.users) if summed else sum(packed_bytes(sent)) if sent.users else 0)
        if summed and self.leads:
            names = [name for some in told for name in some]
            self._count_sum(names, done) if names else None
        elif self.leads:
            self.clock.upload_bytes += sum(told)

    def _make_upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> Upload:
        if not members:
            return no_uploads(done)
        said = {LOSS: torch.tensor([losses[member] for member in members])}
        return self.clients.upload(members, done, said)

    def aggregate(self) -> str:
        """Aggregate the uploads of the round; return why there is no sum, or an empty string."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        adds = self.server.needs_only_sums and not self.ordered
        whole = self._gather_uploads(replace(sent, tensors={}) if adds else sent)
        if adds and (users := self.ranks.share(lambda: [] if whole is None else list(whole.users))):
            sums = self._sums(sent, whole, users)
            why = self.ranks.share(lambda: self._step(sums, whole))
        else:
            why = self.ranks.share(lambda: self._take(whole))
        self._share_version()
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(sent.users))
            self.server.clear_uploads()
        return why

    def _take(self, whole: Upload | None) -> str:
        assert whole is not None
        if self.server.sums is not None:
            return self._sum(self.server.sums, whole)
        self.server.aggregate(whole)
        return ""

    def _step(self, sums: Tree, whole: Upload | None) -> str:
        assert whole is not None
        self.server.aggregate_weighted(sums, whole)
        return ""

    def _gather_uploads(self, sent: Upload) -> Upload | None:
        """Return the uploads of all processes as one, in the first process."""
        tensors = sent.tensors | {_REPORT + n: t for n, t in sent.reports.items()} | {"ranks": sent.ranks}
        found = self.ranks.collect(tensors if sent.users else {})
        users = self.ranks.gather(lambda: list(sent.users))
        if not self.leads:
            return None
        uploads = [_upload(sent.round, names, tree) for names, tree in zip(users, found, strict=True) if names]
        return join_uploads(uploads) if uploads else no_uploads(sent.round)

    def _sums(self, sent: Upload, whole: Upload | None, users: Sequence[str]) -> Tree:
        """Return the weighted sums of all uploads, in the first process."""
        layout = self.clients.model.layout
        like = restrict(layout.views(self.clients.state.rows[:0]), layout, self.server.method.shared)
        own = expand(sent.tensors, self.server.uploads) if sent.users else like
        counts = self.ranks.gather(lambda: len(sent.users))
        of_tensor, weights = self.ranks.scatter(lambda: self._weights(list(like), whole, counts))
        of_each = {name: weights[of_tensor[name]] for name in like}
        own = {name: own[name] for name in like}
        return reduced(own, of_each, len(users), largest=self.ranks.largest, total=self.ranks.total)

    def _weights(self, names: Sequence[str], whole: Upload | None, counts: Sequence[int]) -> list[tuple[Any, Tree]]:
        """Return the weights of the users of each process; tensors with equal weights share them."""
        assert whole is not None
        found = self.server.coefficients(names, whole)
        unlike = {str(id(t)): t.cpu().split(list(counts)) for t in found.values()}
        keys = {name: str(id(t)) for name, t in found.items()}
        return [(keys, {key: parts[rank] for key, parts in unlike.items()}) for rank in range(len(counts))]

    # ---------------------------------------------------------------- the best round

    def report_losses(self, done: int, losses: dict[str, float]) -> float:
        """Report validation losses after round ``done``; store all models if the mean, which is returned, is lowest."""
        parts = self.ranks.gather(lambda: losses)
        mean, lowest = self.ranks.share(lambda: self._judged(parts, done))
        self.clients.receive_verdict(verdict(list(losses) or [self.clients.names[0]], done, lowest=lowest))
        return mean

    def _judged(self, parts: Sequence[dict[str, float]], done: int) -> tuple[float, bool]:
        losses = {name: loss for part in parts for name, loss in part.items()}
        before, message = self.server.lowest_loss, validation_report(losses, done)
        self.clock.upload_bytes += sum(packed_bytes(message))
        self.clock.download_bytes += sum(packed_bytes(self.server.judge(message)))
        return fmean(losses.values()), self.server.lowest_loss < before


def _upload(done: int, users: Sequence[str], tree: Tree) -> Upload:
    reports = {name.removeprefix(_REPORT): t for name, t in tree.items() if name.startswith(_REPORT)}
    tensors = {name: t for name, t in tree.items() if name != "ranks" and not name.startswith(_REPORT)}
    return Upload(round=done, users=tuple(users), tensors=tensors, ranks=tree["ranks"], reports=reports)
