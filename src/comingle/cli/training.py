"""Training and data previews, shared by several commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from comingle.cli.options import default_folder, read_recipe
from comingle.config import Recipe
from comingle.data.conversations.encoding import Answers, UserAnswers
from comingle.data.samples.samples import SPLITS, UserSamples
from comingle.data.splits import REPEATED, UserText
from comingle.data.streaming import MAX_LISTED_USERS
from comingle.data.text.streams import UserData
from comingle.reports.formatting import Table
from comingle.runs.distributed import read_shared, run_sharded
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.given import Given
from comingle.runs.progress import LOADING, reporting
from comingle.runs.session import default_method_note, get_ready, prepare, run_in, warn_unread
from comingle.training.backends.launched import LOST, MEETING, PARENT, Place
from comingle.training.backends.ranks import joined
from comingle.training.kinds.base import NETS, RunData
from comingle.training.kinds.nets import net_name
from comingle.utils.errors import RankLostError, RunError, list_names
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import recorded_date
from comingle.utils.terminal import errors, printable, words

if TYPE_CHECKING:
    from comingle.runs.results import Run
    from comingle.training.client import Clients
    from comingle.training.events import Observer


_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
"""Time that processes have to notice that another one has ended."""

_SIGNAL_SECONDS, _END_SECONDS = 2.0, 5.0
_INTERRUPTED, _BUG = 130, 1


def launch(count: int, folder: Path) -> None:
    """Run the current command in ``count`` processes and wait for them.

    Raises:
        RunError: A process was killed. The message says which, and how to resume the run in ``folder``.
        KeyboardInterrupt: The processes were interrupted.
        SystemExit: A process failed and has printed the reason.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="comingle-") as place:
        children = [_start(rank, count, Path(place) / "meeting", reading) for rank in range(count)]
        os.close(reading)
        try:
            _wait(children)
        except KeyboardInterrupt:
            _end(children, signal.SIGINT)
            raise
        finally:
            ended = [child.poll() is not None for child in children]
            _end(children, signal.SIGTERM)
            os.close(writing)  # processes end when their pipe closes
    _raise_failure([child.returncode if done else LOST for child, done in zip(children, ended, strict=True)], folder)


def _start(rank: int, count: int, meeting: Path, pipe: int) -> subprocess.Popen[bytes]:
    """Start this command again as one of several processes.

    Args:
        rank: Number of the process, from 0.
        count: Number of processes.
        meeting: File through which the processes find each other.
        pipe: Read end of a pipe that closes when this process ends.
    """
    own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
    environment |= {MEETING: str(meeting), PARENT: str(pipe)}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no traffic leaves this machine
    command = [sys.executable, "-m", "comingle", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, pass_fds=(pipe,))


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, or until the grace period after the first failure is over."""
    deadline = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if deadline == float("inf") and any(child.returncode for child in children):
            deadline = time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)


def _end(children: Sequence[subprocess.Popen[bytes]], first: signal.Signals) -> None:
    """End the remaining processes with increasing force."""
    if first is signal.SIGINT:  # a terminal sends the signal to all processes already
        _wait_until_ended(children, _SIGNAL_SECONDS)
    for how in (first, signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.poll() is None:
                child.send_signal(how)
        _wait_until_ended(children, _END_SECONDS)


def _wait_until_ended(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _raise_failure(codes: Sequence[int], folder: Path) -> None:
    """Raise the error that explains the processes' exit codes, unless the processes have printed it."""
    for rank, code in enumerate(codes):
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", possibly for lack of memory" if name == "SIGKILL" else ""
            newest = list_checkpoints(folder)[-1:]
            where = newest[0].name if newest else "the beginning"
            hint = f"run the same command with --resume to continue from {where}"
            raise RunError(f"process {rank} of {len(codes)} was killed by {name}{memory}; {hint}")
    if _INTERRUPTED in codes:
        raise KeyboardInterrupt
    if failed := [code for code in codes if code not in (0, LOST)]:
        raise SystemExit(_BUG if _BUG in failed else failed[0])
    if any(codes):
        raise RunError(f"{folder}: the processes lost their connection; run the same command with --resume to continue")


T = TypeVar("T")


def warn_overlaps(run_data: RunData) -> None:
    """Warn about users whose held-out text also occurs in their training text."""
    overlaps = run_data.overlaps()
    lines = [
        f"user {overlap.user}: {overlap.valid} of {overlap.valid_documents} validation and "
        f"{overlap.test} of {overlap.test_documents} test {run_data.documents} are {REPEATED}"
        for overlap in overlaps[:MAX_LISTED_USERS]
    ]
    if more := len(overlaps) - len(lines):
        lines.append(f"the same is true of {run_data.documents} of {more} more users")
    for line in lines:
        errors.print(Text.assemble(("warning: ", "yellow"), words(line)), highlight=False, soft_wrap=True)


def train_here(
    place: Place | None,
    path: Path,
    sets: list[str] | None,
    seed: int | None,
    out: Path | None,
    *,
    resume: bool,
    force: bool,
    quiet: bool,
) -> tuple[Path, Run] | None:
    """Train the users of a recipe, or in one of several processes a part of them.

    Args:
        place: Rank and number of processes; None for a single process.
        path: A recipe file or a run folder.
        sets: Values of ``--set``.
        seed: Value of ``--seed``.
        out: The run folder; None for the default.
        resume: Resume an interrupted run.
        force: Replace an existing run.
        quiet: Do not print progress.

    Returns:
        The run folder and the run in the first process; None in others.

    Raises:
        ComingleError: The user can correct the problem.
    """
    leads = place is None or place.leads
    try:
        with nullcontext() if place is None else joined(place) as ranks:
            each = _call if ranks is None else ranks.each
            recipe = each(lambda: read_recipe(path, sets, seed))
            folder = out or default_folder(path, recipe.method.name, recipe.seed)
            if ranks is not None and ranks.has_opened(folder):
                resume, force = True, False
            recipe = each(partial(with_bos_of_run, folder, recipe, resume=resume))
            each(lambda: check_folder(folder, recipe, resume=resume, force=force) if leads else None)
            with reporting(quiet=quiet or not leads) as reporter:

                def watch(clients: Clients) -> list[Observer]:
                    return [reporter.watch(clients)]

                if note := default_method_note(recipe):
                    reporter.say(note)
                with reporter.waiting(LOADING):
                    given = Given(date=recorded_date(folder) if resume else "")
                    method = each(lambda: get_ready(recipe))
                    if ranks is None:
                        run_data = prepare(recipe, given=given, method=method)
                    else:
                        run_data = read_shared(recipe, ranks, method, given)
                    warn_overlaps(run_data)
                if leads:
                    warn_unread(recipe, method)
                run = run_in if ranks is None else partial(run_sharded, ranks=ranks)
                done = run(folder, recipe, run_data, resume=resume, force=force, method=method, observers=watch)
        return (folder, done) if leads else None
    except RankLostError:
        if PARENT in os.environ:
            raise SystemExit(LOST) from None  # the parent process reports which one has ended
        raise


def _call(work: Callable[[], T]) -> T:
    return work()


_SAMPLE_CHARACTERS, _CONVERSATION_CHARACTERS = 160, 1200


_SIZES = ("train", "valid", "test", "mean tokens", "max tokens", "max answer")


_ENDS = 3


_LEGEND = "first conversations as the model sees them; [[tokens with a loss]], \\n is a newline"


LISTED_USERS = 24
"""Largest number of users that get a row each."""


def choose_rows(
    counts: Mapping[str, Sequence[int]], by: int, *, all_users: bool = False
) -> list[tuple[str, list[str]]]:
    """Return the rows of a table: one per user, or a summary of many users.

    Up to 24 users have one row each. For more, the rows are the minimum, median and maximum of each column, and the
    users with the smallest and largest number.

    Args:
        counts: Numbers of each user, one per column.
        by: Column by which users are sorted.
        all_users: Return all users.
    """
    rows = {name: [f"{number:,}" for number in numbers] for name, numbers in counts.items()}
    if all_users or len(rows) <= LISTED_USERS:
        return list(rows.items())
    columns = [sorted(column) for column in zip(*counts.values(), strict=True)]
    ranks = {"least": 0, "median": (len(rows) - 1) // 2, "most": -1}
    summary_rows = [
        (f"{word} of {len(rows):,}", [f"{column[at]:,}" for column in columns]) for word, at in ranks.items()
    ]
    order = sorted(rows, key=lambda name: counts[name][by])
    return summary_rows + [(name, rows[name]) for name in (*order[:_ENDS], *order[-_ENDS:])]


def preview(recipe: Recipe, run_data: RunData, *, all_users: bool) -> list[RenderableType]:
    """Return tables and samples of the users' data.

    Args:
        recipe: The recipe.
        run_data: Its data.
        all_users: List all users, not only 24.
    """
    if run_data.users.sizes is not None:
        return _preview_population(f"{recipe.base}: {run_data.kind.name}", run_data, all_users)
    for holds, show in _PREVIEWS.items():
        if issubclass(run_data.kind.user, holds):
            return show(recipe, run_data, all_users)
    title = f"{recipe.base}: {run_data.kind.name}"
    return [_count_table(title, run_data, all_users)]


def _preview_population(title: str, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return the sizes of users that are stored in a file, with samples.

    Of many users only those with least and most data are listed.
    """
    users, sizes = run_data.users, run_data.users.sizes
    assert sizes is not None
    table = Table("user", title=words(title, "table.title"), title_justify="left", box=None)
    of_text = issubclass(run_data.kind.user, UserData)
    unit, why = ("tokens", "too little text") if of_text else (run_data.kind.name, f"too few {run_data.kind.name}")
    for split in SPLITS:
        table.add_column(f"{split} {unit}", justify="right")
    numbers: Sequence[int] = range(len(users))
    if len(users) > LISTED_USERS and not all_users:
        for word, at in {"least": 0, "median": (len(users) - 1) // 2, "most": len(users) - 1}.items():
            cells = [f"{np.partition(sizes[:, column], at)[at]:,}" for column in range(len(SPLITS))]
            table.add_row(f"{word} of {len(users):,}", *cells)
        order = np.argsort(sizes[:, 0], kind="stable")
        numbers = [int(number) for number in (*order[:_ENDS], *order[-_ENDS:])]
    for number in numbers:
        table.add_row(words(users.names[number]), *(f"{size:,}" for size in sizes[number].tolist()))
    shown = numbers if len(numbers) <= LISTED_USERS else ()
    lines = [
        line
        for number in shown
        for line in sample_lines(users.names[number], _samples_of_user(run_data, users[number]))
    ]
    return [table, *skipped_lines(run_data, why, all_users), *lines]


def _samples_of_user(run_data: RunData, user: Any) -> dict[str, str | Text]:
    """Return the beginning of a user's training and test text; conversations in the base's template."""
    if run_data.base is None or run_data.base.tokenizer is None:
        return {}
    heads = {split: part for split, part in {"train": user.train, "test": user.test}.items() if len(part)}
    decode: Any = run_data.base.tokenizer.decode
    return {
        split: shorten(decode(part[:_SAMPLE_CHARACTERS].tolist()))
        if isinstance(part, Tensor)
        else _conversation(part, decode)
        for split, part in heads.items()
    }


def _conversation(part: Answers, decode: Callable[[list[int]], str]) -> Text:
    """Return the first conversation in the base's template on one line, with brackets around trained tokens."""
    row, tokens = part.windows[0], part.tokens(0).tolist()
    shown = Text()
    for learnt, places in groupby(range(len(tokens)), key=lambda at: bool(row[at] >= 0)):
        text = decode([tokens[at] for at in places])
        if len(text) > _SAMPLE_CHARACTERS:
            half = _SAMPLE_CHARACTERS // 2
            text = f"{text[:half]} ... {text[-half:]}"
        line = printable(text.replace("\n", "\\n"))
        shown.append(f"[[{line}]]" if learnt else line, style="bold green" if learnt else "")
    shown.truncate(_CONVERSATION_CHARACTERS)
    return shown


def _preview_text(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of documents and tokens, skipped users, and beginnings of listed documents."""
    summaries = [summarise(text, user) for text, user in zip(run_data.texts, run_data.users, strict=True)]
    title = words(f"{recipe.base}: documents and tokens", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for split in SPLITS:
        table.add_column(f"{split} docs", justify="right")
        table.add_column(f"{split} tokens", justify="right")
    kinds = [(split, kind) for split in SPLITS for kind in ("documents", "tokens")]
    rows = choose_rows(
        {summary["user"]: [summary[k][s] for s, k in kinds] for summary in summaries}, by=1, all_users=all_users
    )
    for name, cells in rows:
        table.add_row(words(name), *cells)
    listed = {name for name, _ in rows}
    shown = [summary for summary in summaries if summary["user"] in listed]
    lines = [line for summary in shown for line in sample_lines(summary["user"], summary["samples"])]
    return [table, *skipped_lines(run_data, "too little text", all_users), *lines]


def _preview_conversations(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of numbers and lengths of conversations, skipped users, and sample conversations."""
    title = words(f"{recipe.base}: {run_data.kind.name}", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for name in _SIZES:
        table.add_column(name, justify="right")
    rows = choose_rows({user.name: _sizes(user) for user in run_data.users}, by=0, all_users=all_users)
    for name, cells in rows:
        table.add_row(words(name), *cells)
    listed = dict(rows)
    shown = [user for user in run_data.users if user.name in listed] if run_data.texts else []
    lines = [line for user in shown for line in sample_lines(user.name, _samples_of_user(run_data, user))]
    legend = [words(_LEGEND)] if lines else []
    return [table, *skipped_lines(run_data, "too few conversations", all_users), *legend, *lines]


def _sizes(user: UserAnswers) -> list[int]:
    parts = (user.train, user.valid, user.test)
    sizes = [len(part.tokens(number)) for part in parts for number in range(len(part))] or [0]
    return [*map(len, parts), round(sum(sizes) / len(sizes)), max(sizes), user.test.limit]


def _preview_samples(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of numbers of samples and true clusters, with the net in its title."""
    population = run_data.common
    shape = " x ".join(str(size) for size in population.input_shape)
    title = f"{NETS}{net_name(recipe, population)}: samples of {shape}"
    if population.labels:
        title += f", classes {list_names(population.labels)}"
    return [_count_table(title, run_data, all_users)]


def _count_table(title: str, run_data: RunData, all_users: bool) -> Table:
    """Return a table of the users' clusters and numbers of samples in each split."""
    table = Table("user", "cluster", title=words(title), title_justify="left", box=None)
    for split in SPLITS:
        table.add_column(split, justify="right")
    clusters = {user.name: getattr(user, "cluster", None) for user in run_data.users}
    counts = {user.name: [len(getattr(user, split)) for split in SPLITS] for user in run_data.users}
    for name, cells in choose_rows(counts, by=0, all_users=all_users):
        cluster = clusters.get(name)
        table.add_row(words(name), "-" if cluster is None else str(cluster), *cells)
    return table


_PREVIEWS: Mapping[type, Callable[[Recipe, RunData, bool], list[RenderableType]]] = {
    UserData: _preview_text,
    UserAnswers: _preview_conversations,
    UserSamples: _preview_samples,
}


def skipped_lines(run_data: RunData, why: str, all_users: bool) -> list[RenderableType]:
    """Return lines about skipped users.

    Args:
        run_data: The data.
        why: The common reason.
        all_users: List all of them.
    """
    if not run_data.skipped:
        return []
    shown = islice(run_data.skipped.items(), None if all_users else LISTED_USERS)
    heading = f"skipped users with {why}: {len(run_data.skipped):,}"
    return [words(heading), *(words(f"  {name}: {what}") for name, what in shown)]


def sample_lines(name: str, samples: Mapping[str, str | Text]) -> list[RenderableType]:
    """Return a line for the beginning of a document of each split."""
    return [
        Text.assemble(words(name, "bold"), " ", (f"{split}:", "dim"), " ")
        + (sample if isinstance(sample, Text) else Text(printable(sample, keep="\n\t")))
        for split, sample in samples.items()
    ]


class Summary(TypedDict):
    """Documents, characters and tokens of a user by split, and the beginnings of a train and of a test document."""

    user: str
    documents: dict[str, int]
    characters: dict[str, int]
    tokens: dict[str, int]
    samples: dict[str, str]


def summarise(text: UserText, data: UserData) -> Summary:
    """Return the numbers of documents, characters and tokens of every split, and beginnings of documents.

    Keys: ``user``; ``documents``, ``characters`` and ``tokens``, each a count for ``train``, ``valid`` and ``test``;
    ``samples``, at most one text for ``train`` and ``test``, with white space collapsed. Tokens are counted after
    limits, documents and characters before.
    """
    documents = {split: getattr(text, split) for split in SPLITS}
    return {
        "user": text.name,
        "documents": {split: len(documents[split]) for split in SPLITS},
        "characters": {split: sum(map(len, documents[split])) for split in SPLITS},
        "tokens": {split: len(getattr(data, split)) for split in SPLITS},
        "samples": {split: shorten(documents[split][0]) for split in ("train", "test") if documents[split]},
    }


def shorten(document: str) -> str:
    """Return the beginning of a document on one line."""
    line = " ".join(document.split())
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 1] + "…"
