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
from comingle.runs.distributed import read_users_of_process, run_sharded
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.given import Given
from comingle.runs.progress import loading, reporting
from comingle.runs.session import (
    check_and_set_up,
    default_method_note,
    prepare,
    run_in,
    warn_unread,
    within_memory,
)
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
"""Time between two checks whether the processes have ended."""

_GRACE_SECONDS = 10.0
"""Time that processes have to notice that another one has ended."""

_INTERRUPT_SECONDS = 2.0
"""Time that processes have to end after Ctrl-C, which the terminal sends to them, before they are sent SIGINT."""

_SIGNAL_SECONDS = 5.0
"""Time that processes have to end after each signal that is sent to them."""

_INTERRUPTED, _BUG = 130, 1
"""Exit codes of a process: after Ctrl-C, and of Python after an error that is not the user's."""


def launch(count: int, folder: Path) -> None:
    """Run the current command line in ``count`` processes on this machine, wait until they end, and report failures.

    Each process trains a part of the users (:func:`train_here`). If one fails, the others are stopped.

    Args:
        count: Number of processes.
        folder: The run folder, for the message of an error.

    Raises:
        RunError: A process was killed. The message says which, and how to resume the run in ``folder``.
        KeyboardInterrupt: The processes were interrupted.
        SystemExit: A process failed and has printed the reason.
    """
    # The children watch this pipe. The system closes it when this process ends, even if it is killed, and they then end
    # too.
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="comingle-") as temporary_folder:
        rendezvous_file = Path(temporary_folder) / "meeting"
        children = [_start_process(rank, count, rendezvous_file, read_end) for rank in range(count)]
        os.close(read_end)
        try:
            _wait_for_processes(children)
        except KeyboardInterrupt:
            _stop_processes(children, signal.SIGINT)
            raise
        finally:
            ended_by_itself = [child.poll() is not None for child in children]
            _stop_processes(children, signal.SIGTERM)
            os.close(write_end)
    # A process that had to be stopped is not the cause of the failure: it was waiting for a process that had failed.
    # Its exit code would be that of the signal, so LOST replaces it.
    codes = [
        child.returncode if has_ended else LOST for child, has_ended in zip(children, ended_by_itself, strict=True)
    ]
    _raise_failure(codes, folder)


def _start_process(rank: int, count: int, rendezvous_file: Path, parent_pipe: int) -> subprocess.Popen[bytes]:
    """Start the current command line again as one of several processes, with environment variables as of torchrun.

    Args:
        rank: Number of the process, from 0.
        count: Number of processes.
        rendezvous_file: File through which the processes find each other; passed as the variable :data:`MEETING`.
        parent_pipe: Read end of a pipe whose write end closes when this process ends; the new process then ends, too.
            Its file descriptor is passed as the variable :data:`PARENT`.
    """
    ranks = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    environment = {**os.environ, **{key: str(value) for key, value in ranks.items()}}
    environment |= {MEETING: str(rendezvous_file), PARENT: str(parent_pipe)}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no traffic leaves this machine
    command = [sys.executable, "-m", "comingle", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, pass_fds=(parent_pipe,))


def _wait_for_processes(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, or until the grace period after the first failure is over.

    In that period the others notice the failure and end by themselves.
    """
    deadline = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if deadline == float("inf") and any(child.returncode for child in children):
            deadline = time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)


def _stop_processes(children: Sequence[subprocess.Popen[bytes]], first_signal: signal.Signals) -> None:
    """Stop the processes that still run: with the given signal, then with SIGTERM, then with SIGKILL.

    After each signal they have some seconds to end before the next, stronger one.

    Args:
        children: The processes. No signal is sent to those that have ended.
        first_signal: The first signal, SIGINT or SIGTERM.
    """
    if first_signal is signal.SIGINT:
        # On Ctrl-C the terminal has already sent SIGINT to all processes, so they first have time to end.
        _wait_until_ended(children, _INTERRUPT_SECONDS)
    for next_signal in (first_signal, signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.poll() is None:
                child.send_signal(next_signal)
        _wait_until_ended(children, _SIGNAL_SECONDS)


def _wait_until_ended(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _raise_failure(codes: Sequence[int], folder: Path) -> None:
    """Raise the error that explains the processes' exit codes; do nothing if all processes have succeeded.

    Args:
        codes: Exit codes by rank: 0 for success; negative for a process that was killed by a signal; 130 after Ctrl-C;
            :data:`LOST` for a process that ended because another one had; 1 for a bug; others for a mistake of the
            user.
        folder: The run folder, whose newest checkpoint the message names.

    Raises:
        RunError: A process was killed by a signal, or all that failed lost their connection.
        KeyboardInterrupt: A process was interrupted.
        SystemExit: A process failed and has printed the reason.
    """
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
        raise SystemExit(_BUG if _BUG in failed else failed[0])  # a bug must not look like a mistake of the user
    if any(codes):  # all that failed have LOST, so none of them is the cause
        raise RunError(f"{folder}: the processes lost their connection; run the same command with --resume to continue")


T = TypeVar("T")


def warn_overlaps(run_data: RunData) -> None:
    """Warn of users whose validation or test text also occurs in their training text.

    Print a line for each of the first few such users, and one with the number of the others.
    """
    overlaps = run_data.overlaps()  # one per such user, with numbers of repeated and of all held-out documents
    noun = run_data.documents  # "documents" or "conversations"
    lines = [
        f"user {overlap.user}: {overlap.valid} of {overlap.valid_documents} validation and "
        f"{overlap.test} of {overlap.test_documents} test {noun} are {REPEATED}"
        for overlap in overlaps[:MAX_LISTED_USERS]
    ]
    if more := len(overlaps) - len(lines):
        lines.append(f"the same is true of {noun} of {more} more users")
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
    """Train the users of a recipe in this process; if it is one of several, only its part of the users.

    All processes of a run call it. The first one has the server, writes the run folder and prints progress.

    Args:
        place: Rank of this process and number of processes; None if it is the only one.
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
        SystemExit: Another process has ended, and the command that started all of them reports it.
    """
    is_first = place is None or place.leads
    try:
        # ``ranks`` is the group of all processes of the run; None for a single process.
        with nullcontext() if place is None else joined(place) as ranks:
            # Each process must do all these steps. ``ranks.run_in_all`` raises in all processes if one of them fails,
            # as the others would wait for it forever.
            in_each_process = _call if ranks is None else ranks.run_in_all
            recipe = in_each_process(lambda: read_recipe(path, sets, seed))
            folder = out or default_folder(path, recipe.method.name, recipe.seed)
            if ranks is not None and ranks.has_opened(folder):  # torchrun has restarted failed processes of this run
                resume, force = True, False
            recipe = in_each_process(partial(with_bos_of_run, folder, recipe, resume=resume))
            size, resumed = 1 if place is None else place.size, folder if resume else None
            notes: list[str] = []
            recipe = in_each_process(partial(within_memory, recipe, notes.append, resumed=resumed, processes=size))
            in_each_process(lambda: check_folder(folder, recipe, resume=resume, force=force) if is_first else None)
            with reporting(quiet=quiet or not is_first) as reporter:

                def progress_observers(clients: Clients) -> list[Observer]:
                    return [reporter.watch(clients)]

                for note in filter(None, (*notes, default_method_note(recipe))):
                    reporter.say(note)
                with reporter.waiting(loading(recipe)):
                    # A resumed run keeps the date of its start, which templates of conversations may contain.
                    given = Given(date=recorded_date(folder) if resume else "")
                    method = in_each_process(lambda: check_and_set_up(recipe))
                    if ranks is None:
                        run_data = prepare(recipe, given=given, method=method)
                    else:  # the processes share the reading of the data among them
                        run_data = read_users_of_process(recipe, ranks, method, given)
                    warn_overlaps(run_data)
                if is_first:
                    warn_unread(recipe, method)
                train = run_in if ranks is None else partial(run_sharded, ranks=ranks)
                run = train(
                    folder, recipe, run_data, resume=resume, force=force, method=method, observers=progress_observers
                )
        return (folder, run) if is_first else None
    except RankLostError:  # another process has ended
        has_parent = PARENT in os.environ  # `comingle run --processes` has started all processes
        if has_parent:
            raise SystemExit(LOST) from None  # the parent reports which process has ended, and why
        raise


def _call(work: Callable[[], T]) -> T:
    return work()


_EXCERPT_CHARACTERS, _CONVERSATION_CHARACTERS = 160, 1200
"""Largest lengths of the excerpt of a document or turn, and of a conversation."""


_CONVERSATION_COLUMNS = ("train", "valid", "test", "mean tokens", "max tokens", "max answer")


_NUM_EXTREMES = 3
"""Number of users with the least data, and with the most data, that get a row if not all users do."""


_LEGEND = "first conversations as the model sees them; [[tokens with a loss]], \\n is a newline"


LISTED_USERS = 24
"""Largest number of users that get a row each."""


def choose_rows(
    counts: Mapping[str, Sequence[int]], by: int, *, all_users: bool = False
) -> list[tuple[str, list[str]]]:
    """Return the rows of a table of users' counts: one per user, or a summary of many users.

    Up to 24 users (:data:`LISTED_USERS`) have one row each. For more, the rows are the minimum, median and maximum of
    each column, then the three users with the smallest counts and the three with the largest counts in column ``by``.

    Args:
        counts: Each user's counts, one per column, by the user's name.
        by: Number of the column, from 0, whose counts decide which users are listed.
        all_users: Return a row for each user, however many there are.

    Returns:
        A pair (name, cells) for each row.
    """
    rows = {name: [f"{number:,}" for number in numbers] for name, numbers in counts.items()}
    if all_users or len(rows) <= LISTED_USERS:
        return list(rows.items())
    sorted_columns = [sorted(column) for column in zip(*counts.values(), strict=True)]
    summary_rows = []
    for word, position in {"least": 0, "median": (len(rows) - 1) // 2, "most": -1}.items():
        summary_rows.append((f"{word} of {len(rows):,}", [f"{column[position]:,}" for column in sorted_columns]))
    order = sorted(rows, key=lambda name: counts[name][by])
    return summary_rows + [(name, rows[name]) for name in (*order[:_NUM_EXTREMES], *order[-_NUM_EXTREMES:])]


def preview(recipe: Recipe, run_data: RunData, *, all_users: bool) -> list[RenderableType]:
    """Return the parts that ``comingle data`` prints: a table of the users' amounts of data, then excerpts.

    Args:
        recipe: The recipe.
        run_data: Its data.
        all_users: List all users, not only 24.
    """
    stays_in_file = run_data.users.sizes is not None  # a large population, of which only the sizes are in memory
    if stays_in_file:
        return _preview_population(f"{recipe.base}: {run_data.kind.name}", run_data, all_users)
    for user_class, preview_users in _PREVIEWS.items():  # for text, conversations and samples
        if issubclass(run_data.kind.user, user_class):
            return preview_users(recipe, run_data, all_users)
    title = f"{recipe.base}: {run_data.kind.name}"  # a kind of data that a plugin has registered
    return [_count_table(title, run_data, all_users)]


def _preview_population(title: str, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of the amounts of data of users that are stored in a file, and excerpts of the listed users' data.

    Of more than 24 users only the three with the least and the three with the most training data are listed, below the
    minimum, median and maximum of each column. The rows are those that :func:`choose_rows` would return, but they are
    made from an array, as there may be millions of users.

    Args:
        title: Title of the table.
        run_data: The data.
        all_users: List all users.
    """
    users, sizes = run_data.users, run_data.users.sizes
    assert sizes is not None
    table = Table("user", title=words(title, "table.title"), title_justify="left", box=None)
    has_text = issubclass(run_data.kind.user, UserData)
    unit = "tokens" if has_text else run_data.kind.name
    skip_reason = "too little text" if has_text else f"too few {run_data.kind.name}"
    for split in SPLITS:
        table.add_column(f"{split} {unit}", justify="right")
    listed: Sequence[int] = range(len(users))  # indices of the users who have a row
    if len(users) > LISTED_USERS and not all_users:
        for word, rank in {"least": 0, "median": (len(users) - 1) // 2, "most": len(users) - 1}.items():
            cells = [f"{np.partition(sizes[:, column], rank)[rank]:,}" for column in range(len(SPLITS))]
            table.add_row(f"{word} of {len(users):,}", *cells)
        order = np.argsort(sizes[:, 0], kind="stable")  # by amount of training data
        listed = [int(index) for index in (*order[:_NUM_EXTREMES], *order[-_NUM_EXTREMES:])]
    for index in listed:
        table.add_row(words(users.names[index]), *(f"{size:,}" for size in sizes[index].tolist()))
    with_excerpts = listed if len(listed) <= LISTED_USERS else ()
    lines = []
    for index in with_excerpts:
        lines += excerpt_lines(users.names[index], _excerpts_of_user(run_data, users[index]))
    return [table, *skipped_lines(run_data, skip_reason, all_users), *lines]


def _excerpts_of_user(run_data: RunData, user: Any) -> dict[str, str | Text]:
    """Return an excerpt of a user's training data and one of the test data.

    An excerpt is the beginning of a text, or the first conversation.

    Args:
        run_data: The data, with the base, whose tokenizer decodes tokens.
        user: A user with tokens (:class:`UserData`) or with conversations (:class:`UserAnswers`).

    Returns:
        The excerpts by split, ``train`` and ``test``, without empty splits; nothing if the base has no tokenizer.
    """
    if run_data.base is None or run_data.base.tokenizer is None:
        return {}
    decode: Any = run_data.base.tokenizer.decode
    excerpts: dict[str, str | Text] = {}
    for split, tokens_or_conversations in {"train": user.train, "test": user.test}.items():
        if not len(tokens_or_conversations):
            continue
        if isinstance(tokens_or_conversations, Tensor):
            tokens = tokens_or_conversations[:_EXCERPT_CHARACTERS]  # enough, as a token has a character or more
            excerpts[split] = shorten(decode(tokens.tolist()))
        else:
            excerpts[split] = _render_conversation(tokens_or_conversations, decode)
    return excerpts


def _render_conversation(conversations: Answers, decode: Callable[[list[int]], str]) -> Text:
    """Return the first conversation of a split as the model sees it, in the base's chat template, on one line.

    Tokens with a loss, by default those of responses, are in double brackets and coloured. Long turns are cut in the
    middle.

    Args:
        conversations: A user's conversations of one split.
        decode: Converts tokens to text.
    """
    row = conversations.windows[0]  # (window,): tokens without a loss are encoded as negative numbers
    tokens = conversations.tokens(0).tolist()  # all tokens as they are, without padding
    rendered = Text()
    for has_loss, positions in groupby(range(len(tokens)), key=lambda position: bool(row[position] >= 0)):
        text = decode([tokens[position] for position in positions])
        if len(text) > _EXCERPT_CHARACTERS:
            half = _EXCERPT_CHARACTERS // 2
            text = f"{text[:half]} ... {text[-half:]}"
        line = printable(text.replace("\n", "\\n"))
        rendered.append(f"[[{line}]]" if has_loss else line, style="bold green" if has_loss else "")
    rendered.truncate(_CONVERSATION_CHARACTERS)
    return rendered


def _preview_text(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of documents and tokens, skipped users, and the beginnings of the listed users' documents.

    Args:
        recipe: The recipe.
        run_data: Its data.
        all_users: List all users; otherwise many users are summarised.
    """
    summaries = [summarise(text, user) for text, user in zip(run_data.texts, run_data.users, strict=True)]
    title = words(f"{recipe.base}: documents and tokens", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for split in SPLITS:
        table.add_column(f"{split} docs", justify="right")
        table.add_column(f"{split} tokens", justify="right")
    counts = {}
    for summary in summaries:
        counts_of_splits = [(summary["documents"][split], summary["tokens"][split]) for split in SPLITS]
        counts[summary["user"]] = [count for pair in counts_of_splits for count in pair]
    rows = choose_rows(counts, by=1, all_users=all_users)  # by tokens to train on
    for name, cells in rows:
        table.add_row(words(name), *cells)
    listed = {name for name, _ in rows}
    shown = [summary for summary in summaries if summary["user"] in listed]
    lines = [line for summary in shown for line in excerpt_lines(summary["user"], summary["samples"])]
    return [table, *skipped_lines(run_data, "too little text", all_users), *lines]


def _preview_conversations(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of numbers and lengths of conversations, skipped users, and the listed users' first conversations.

    Conversations are shown only if the kind of data has documents (``run_data.texts``).

    Args:
        recipe: The recipe.
        run_data: Its data.
        all_users: List all users; otherwise many users are summarised.
    """
    title = words(f"{recipe.base}: {run_data.kind.name}", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for name in _CONVERSATION_COLUMNS:
        table.add_column(name, justify="right")
    counts = {user.name: _conversation_counts(user) for user in run_data.users}
    rows = choose_rows(counts, by=0, all_users=all_users)  # by conversations to train on
    for name, cells in rows:
        table.add_row(words(name), *cells)
    listed = dict(rows)
    shown = [user for user in run_data.users if user.name in listed] if run_data.texts else []
    lines = [line for user in shown for line in excerpt_lines(user.name, _excerpts_of_user(run_data, user))]
    legend = [words(_LEGEND)] if lines else []
    return [table, *skipped_lines(run_data, "too few conversations", all_users), *legend, *lines]


def _conversation_counts(user: UserAnswers) -> list[int]:
    """Return a user's counts for the columns :data:`_CONVERSATION_COLUMNS`.

    These are the numbers of conversations in the train, valid and test split, the mean and largest number of tokens of
    a conversation, and the number of tokens of the longest response in any split.
    """
    splits = (user.train, user.valid, user.test)
    lengths = [len(split.tokens(index)) for split in splits for index in range(len(split))]
    lengths = lengths or [0]  # a user without conversations has a mean and a largest length of 0
    longest_response = user.test.limit  # of all splits, so it is the same number in each of them
    return [*map(len, splits), round(sum(lengths) / len(lengths)), max(lengths), longest_response]


def _preview_samples(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of each user's number of samples in each split and of each class.

    The table has a column with the users' true clusters if the data has them. The title names the net, the shape of a
    sample and, if they have names, the classes.

    Args:
        recipe: The recipe.
        run_data: Its data.
        all_users: List all users; otherwise many users are summarised.
    """
    population = run_data.common  # for samples, the users with the shape of an input and the classes
    shape = " x ".join(str(size) for size in population.input_shape)
    title = f"{NETS}{net_name(recipe, population)}: samples of {shape}"
    if population.labels:
        title += f", classes {list_names(population.labels)}"
    return [_count_table(title, run_data, all_users, classes=population.labels)]


_MAX_CLASS_COLUMNS = 12
"""Largest number of classes with a column each."""


def _count_table(title: str, run_data: RunData, all_users: bool, *, classes: Sequence[str] = ()) -> Table:
    """Return a table of the users' numbers of samples in each split and of each class.

    The table also has the users' clusters if they are known.

    Args:
        title: Title of the table.
        run_data: The data.
        all_users: List all users; otherwise many users are summarised (:func:`choose_rows`), without clusters.
        classes: Names of the classes. A class has a column with its samples in all splits, unless there are too many
            classes.
    """
    classes = classes if len(classes) <= _MAX_CLASS_COLUMNS else ()
    clusters = {user.name: getattr(user, "cluster", None) for user in run_data.users}
    has_clusters = any(cluster is not None for cluster in clusters.values())
    table = Table("user", *(["cluster"] if has_clusters else []), title=words(title), title_justify="left", box=None)
    for name in (*SPLITS, *classes):
        table.add_column(words(name), justify="right")

    def counts_of(user: Any) -> list[int]:
        """Return a user's number of samples in each split, then that of each class."""
        splits = [getattr(user, split) for split in SPLITS]
        of_class = [sum(int((split.targets == index).sum()) for split in splits) for index in range(len(classes))]
        return [*map(len, splits), *of_class]

    counts = {user.name: counts_of(user) for user in run_data.users}
    for name, cells in choose_rows(counts, by=0, all_users=all_users):
        cluster = clusters.get(name)
        cluster_cells = ["-" if cluster is None else str(cluster)] if has_clusters else []
        table.add_row(words(name), *cluster_cells, *cells)
    return table


_PREVIEWS: Mapping[type, Callable[[Recipe, RunData, bool], list[RenderableType]]] = {
    UserData: _preview_text,
    UserAnswers: _preview_conversations,
    UserSamples: _preview_samples,
}


def skipped_lines(run_data: RunData, reason: str, all_users: bool) -> list[RenderableType]:
    """Return a line with the number of users skipped for lack of data, and a line for each of the first 24 of them.

    Args:
        run_data: The data. ``run_data.skipped`` has, for each skipped user, a text on the data that the user lacks.
        reason: The reason for which users were skipped, such as "too little text".
        all_users: Return a line for every skipped user.

    Returns:
        The lines; none if no user was skipped.
    """
    if not run_data.skipped:
        return []
    listed = islice(run_data.skipped.items(), None if all_users else LISTED_USERS)
    heading = f"skipped users with {reason}: {len(run_data.skipped):,}"
    return [words(heading), *(words(f"  {name}: {detail}") for name, detail in listed)]


def excerpt_lines(name: str, excerpts: Mapping[str, str | Text]) -> list[RenderableType]:
    """Return a line ``NAME SPLIT: excerpt`` for each of a user's excerpts.

    Args:
        name: Name of the user.
        excerpts: Excerpts by split. Control characters are escaped in strings; a rich ``Text`` has been escaped.
    """
    lines = []
    for split, excerpt in excerpts.items():
        prefix = Text.assemble(words(name, "bold"), " ", (f"{split}:", "dim"), " ")
        safe_excerpt = excerpt if isinstance(excerpt, Text) else Text(printable(excerpt, keep="\n\t"))
        lines.append(prefix + safe_excerpt)
    return lines


class Summary(TypedDict):
    """Documents, characters and tokens of a user by split, and the beginnings of a train and of a test document."""

    user: str
    documents: dict[str, int]
    characters: dict[str, int]
    tokens: dict[str, int]
    samples: dict[str, str]


def summarise(text: UserText, data: UserData) -> Summary:
    """Return a user's numbers of documents, characters and tokens in each split, and beginnings of two documents.

    Args:
        text: The user's documents in each split, in full.
        data: The user's tokens in each split, after ``data.max_train_tokens`` and so on have limited their number.

    Returns:
        ``user``, the name; ``documents``, ``characters`` and ``tokens``, each a count by split; ``samples``, the
        beginning of the first document of ``train`` and of ``test``, with white space collapsed, if there is one.
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
    return line if len(line) <= _EXCERPT_CHARACTERS else line[: _EXCERPT_CHARACTERS - 1] + "…"
