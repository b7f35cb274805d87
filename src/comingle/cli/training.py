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
from itertools import groupby
from operator import itemgetter
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
from comingle.data.splits import OVERLAP_PHRASE, UserText
from comingle.data.streaming import MAX_LISTED_USERS
from comingle.data.text.streams import UserData
from comingle.reports.formatting import Table
from comingle.runs.continuation import check_earlier_run
from comingle.runs.distributed import read_users_of_process, run_sharded
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.given import Given
from comingle.runs.progress import loading, reporting
from comingle.runs.session import (
    check_and_set_up,
    choose_settings,
    default_method_note,
    prepare,
    run_in,
    warn_unread,
)
from comingle.training.backends.launched import LOST, MEETING, PARENT, Place
from comingle.training.backends.ranks import Ranks, joined
from comingle.training.kinds.base import NETS, RunData
from comingle.training.kinds.nets import net_name
from comingle.utils.errors import RankLostError, RunError, list_names
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import recorded_date
from comingle.utils.terminal import errors, literal_text, printable

if TYPE_CHECKING:
    from comingle.runs.results import Run
    from comingle.training.client import Clients
    from comingle.training.events import Observer


_POLL_SECONDS = 0.05
"""Time between two checks whether the processes have ended."""

_GRACE_SECONDS = 10.0
"""Time that processes have to notice that another one has ended."""

_INTERRUPT_SECONDS = 2.0
"""Time that processes have to end after Ctrl-C, for which the terminal sends SIGINT, before SIGINT is sent again."""

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
    # The system closes the write end when this process ends, even if it is killed. The children watch the read end, and
    # then end too.
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="comingle-") as temporary_folder:
        rendezvous_file = Path(temporary_folder) / "meeting"
        children = [_start_process(rank, count, rendezvous_file, read_end) for rank in range(count)]
        os.close(read_end)
        try:
            _wait_for_processes(children)
        except KeyboardInterrupt:
            _stop_processes(children, first_signal=signal.SIGINT)
            raise
        finally:
            ended_before_stop = [child for child in children if child.poll() is not None]
            _stop_processes(children, first_signal=signal.SIGTERM)
            os.close(write_end)
    exit_codes = []
    for child in children:
        # A process that had to be stopped was waiting for one that had failed, so LOST replaces its exit code.
        exit_codes.append(child.returncode if child in ended_before_stop else LOST)
    _raise_failure(exit_codes, folder)


def _start_process(rank: int, count: int, rendezvous_file: Path, parent_pipe: int) -> subprocess.Popen[bytes]:
    """Start the current command line again as one of several processes, with the environment variables of torchrun.

    Args:
        rank: Number of the process, from 0.
        count: Number of processes.
        rendezvous_file: File through which the processes find each other.
        parent_pipe: Read end of a pipe. When its write end closes, the new process ends.
    """
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        # Names of comingle's own environment variables.
        MEETING: str(rendezvous_file),
        PARENT: str(parent_pipe),
    }
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no traffic leaves this machine
    command = [sys.executable, "-m", "comingle", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, pass_fds=(parent_pipe,))


def _wait_for_processes(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, but after the first failure only :data:`_GRACE_SECONDS` longer.

    In that time the others notice the failure and end by themselves.
    """
    deadline: float | None = None
    while any(child.poll() is None for child in children):
        if deadline is None:
            has_failure = any(child.returncode for child in children)
            if has_failure:
                deadline = time.monotonic() + _GRACE_SECONDS
        elif time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _stop_processes(children: Sequence[subprocess.Popen[bytes]], *, first_signal: signal.Signals) -> None:
    """Stop the processes that still run: with ``first_signal``, then with SIGTERM, then with SIGKILL.

    After each signal they have :data:`_SIGNAL_SECONDS` to end.

    Args:
        children: The processes that :func:`launch` has started.
        first_signal: SIGINT after Ctrl-C, else SIGTERM.
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
    """Wait until all processes have ended, but at most a number of seconds."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _raise_failure(exit_codes: Sequence[int], folder: Path) -> None:
    """Raise the error that explains the processes' exit codes; do nothing if all processes have succeeded.

    Args:
        exit_codes: Exit codes by rank: 0 for success, -9 for a process that was killed by signal 9, 130 after Ctrl-C,
            :data:`LOST` for a process that ended because another one had, 1 for a bug, 2 for a mistake of the user.
        folder: The run folder, whose newest checkpoint the message names.

    Raises:
        RunError: A process was killed by a signal, or all that failed lost their connection.
        KeyboardInterrupt: A process was interrupted.
        SystemExit: A process failed and has printed the reason.
    """
    for rank, code in enumerate(exit_codes):
        if code < 0:
            signal_name = signal.Signals(-code).name
            cause = signal_name
            if signal_name == "SIGKILL":
                cause += ", possibly for lack of memory"
            checkpoints = list_checkpoints(folder)
            newest = checkpoints[-1].name if checkpoints else "the beginning"
            raise RunError(
                f"process {rank} of {len(exit_codes)} was killed by {cause}; run the same command with --resume to "
                f"continue from {newest}"
            )
    if _INTERRUPTED in exit_codes:
        raise KeyboardInterrupt
    failures = [code for code in exit_codes if code not in (0, LOST)]
    if _BUG in failures:  # must not look like a mistake of the user
        raise SystemExit(_BUG)
    if failures:
        raise SystemExit(failures[0])
    if LOST in exit_codes:  # no process has another exit code, so the cause is unknown
        raise RunError(f"{folder}: the processes lost their connection; run the same command with --resume to continue")


T = TypeVar("T")


def warn_overlaps(run_data: RunData) -> None:
    """Warn of users whose validation or test text also occurs in their training text.

    Print a line for each of the first :data:`MAX_LISTED_USERS` such users, and one with the number of further ones.
    """
    overlaps = run_data.overlaps()  # one for each such user
    documents = run_data.documents  # the word "documents" or "conversations"
    lines = []
    for overlap in overlaps[:MAX_LISTED_USERS]:
        lines.append(
            f"user {overlap.user}: {overlap.valid} of {overlap.valid_documents} validation and "
            f"{overlap.test} of {overlap.test_documents} test {documents} are {OVERLAP_PHRASE}"
        )
    num_others = len(overlaps) - len(lines)
    if num_others:
        lines.append(f"the same is true of {documents} of {num_others} more users")
    for line in lines:
        errors.print(Text.assemble(("warning: ", "yellow"), literal_text(line)), highlight=False, soft_wrap=True)


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
        SystemExit: Another process has ended; ``comingle run --processes``, which started both, reports it.
    """
    try:
        process_group = nullcontext() if place is None else joined(place)
        with process_group as ranks:  # None for a single process
            return _train_with(ranks, path, sets, seed, out, resume=resume, force=force, quiet=quiet)
    except RankLostError:  # another process has ended
        was_started_by_comingle = PARENT in os.environ  # by `comingle run --processes`
        if was_started_by_comingle:
            raise SystemExit(LOST) from None  # the parent reports which process has ended, and why
        raise


def _train_with(
    ranks: Ranks | None,
    path: Path,
    sets: list[str] | None,
    seed: int | None,
    out: Path | None,
    *,
    resume: bool,
    force: bool,
    quiet: bool,
) -> tuple[Path, Run] | None:
    """Train the users of a recipe, together with the other processes of the run.

    Args:
        ranks: The connected processes of the run; None if this is the only one.
        path: A recipe file or a run folder.
        sets: Values of ``--set``.
        seed: Value of ``--seed``.
        out: The run folder; None for the default.
        resume: Resume an interrupted run.
        force: Replace an existing run.
        quiet: Do not print progress.

    Returns:
        The run folder and the run in the first process; None in others.
    """
    is_first = ranks is None or ranks.place.is_first_process
    num_processes = 1 if ranks is None else ranks.place.size
    # ``run_in_all`` raises an error of one process in all of them; else the others would wait for it forever.
    run_step = _run_in_this_process if ranks is None else ranks.run_in_all
    recipe = run_step(lambda: read_recipe(path, sets, seed))
    folder = out or default_folder(path, recipe.method.name, recipe.seed)
    if ranks is not None and ranks.has_opened(folder):  # torchrun has restarted failed processes of this run
        resume, force = True, False
    # The default of data.add_bos_token has changed; a run that began with the old default keeps it.
    recipe = run_step(partial(with_bos_of_run, folder, recipe, resume=resume))
    notes: list[str] = []  # on settings that the recipe leaves open
    resumed_folder = folder if resume else None
    recipe = run_step(partial(choose_settings, recipe, notes.append, resumed=resumed_folder, processes=num_processes))
    run_step(lambda: check_folder(folder, recipe, resume=resume, force=force) if is_first else None)
    if not resume:
        run_step(partial(check_earlier_run, recipe))
    notes.append(default_method_note(recipe))  # empty if the recipe names its method

    with reporting(quiet=quiet or not is_first) as reporter:

        def progress_observers(clients: Clients) -> list[Observer]:
            return [reporter.watch(clients)]

        for note in notes:
            if note:
                reporter.say(note)
        with reporter.waiting(loading(recipe)):
            # A resumed run keeps the date of its start, which chat templates may write into conversations.
            given = Given(date=recorded_date(folder) if resume else "")
            method = run_step(lambda: check_and_set_up(recipe))
            if ranks is None:
                run_data = prepare(recipe, given=given, method=method)
            else:  # the processes share the reading of the data among them
                run_data = read_users_of_process(recipe, ranks, method, given)
            warn_overlaps(run_data)
        if is_first:
            warn_unread(recipe, method)
        train = run_in if ranks is None else partial(run_sharded, ranks=ranks)
        run = train(folder, recipe, run_data, resume=resume, force=force, method=method, observers=progress_observers)
    return (folder, run) if is_first else None


def _run_in_this_process(work: Callable[[], T]) -> T:
    """Return the result of ``work``; takes the place of ``Ranks.run_in_all`` if there are no other processes."""
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
    counts_by_user: Mapping[str, Sequence[int]], sort_column: int, *, all_users: bool = False
) -> list[tuple[str, list[str]]]:
    """Return the rows of a table of users' counts: one per user, or a summary of many users.

    For more than :data:`LISTED_USERS` users, the first rows have the minimum, median and maximum of each column. Then
    follow the three users with the smallest and the three with the largest counts in one column.

    Args:
        counts_by_user: Each user's counts, such as its numbers of documents and tokens, one per column.
        sort_column: Number of the column, from 0, whose counts decide which users are listed.
        all_users: Return a row for each user, however many there are.

    Returns:
        The first cell and the other cells of each row, such as ``("ann", ["1,200", "40"])``.
    """
    row_by_user = {}
    for user, counts in counts_by_user.items():
        row_by_user[user] = [f"{count:,}" for count in counts]
    num_users = len(row_by_user)
    if all_users or num_users <= LISTED_USERS:
        return list(row_by_user.items())
    sorted_columns = [sorted(column) for column in zip(*counts_by_user.values(), strict=True)]
    rows = []
    for word, rank in _summary_ranks(num_users).items():
        rows.append((f"{word} of {num_users:,}", [f"{column[rank]:,}" for column in sorted_columns]))
    least_to_most = sorted(row_by_user, key=lambda user: counts_by_user[user][sort_column])
    for user in least_to_most[:_NUM_EXTREMES] + least_to_most[-_NUM_EXTREMES:]:
        rows.append((user, row_by_user[user]))
    return rows


def _summary_ranks(num_users: int) -> dict[str, int]:
    """Return the ranks, from 0, of the counts in a summary: ``{"least": 0, "median": 14, "most": 29}`` of 30 users."""
    return {"least": 0, "median": (num_users - 1) // 2, "most": num_users - 1}


def preview(recipe: Recipe, run_data: RunData, *, all_users: bool) -> list[RenderableType]:
    """Return the parts that ``comingle data`` prints: a table of the users' amounts of data, then excerpts.

    Args:
        recipe: The recipe, whose base or net the title names.
        run_data: The data of the recipe's users.
        all_users: List all users, also more than 24.
    """
    title = f"{recipe.base}: {run_data.kind.name}"
    is_in_file = run_data.users.sizes is not None  # of a large population only the sizes are in memory
    if is_in_file:
        return _preview_population(title, run_data, all_users)
    for user_class, preview_users in _PREVIEWS.items():  # for text, conversations and samples
        if issubclass(run_data.kind.user, user_class):
            return preview_users(recipe, run_data, all_users)
    return [_count_table(title, run_data, all_users)]  # a kind of data that a plugin has registered


def _preview_population(title: str, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of the amounts of data of users that are stored in a file, and excerpts of the listed users' data.

    The rows are those of :func:`choose_rows`, for users whose sizes are in an array, as there may be millions.

    Args:
        title: Title of the table.
        run_data: The data of users that are stored in a file.
        all_users: List all users.
    """
    users = run_data.users
    sizes = users.sizes  # (users, splits)
    assert sizes is not None
    is_text = issubclass(run_data.kind.user, UserData)
    unit = "tokens" if is_text else run_data.kind.name
    table = Table("user", title=literal_text(title, "table.title"), title_justify="left", box=None)
    for split in SPLITS:
        table.add_column(f"{split} {unit}", justify="right")

    if all_users or len(users) <= LISTED_USERS:
        listed: Sequence[int] = range(len(users))
    else:
        for word, rank in _summary_ranks(len(users)).items():
            cells = []
            for column in range(len(SPLITS)):
                partitioned = np.partition(sizes[:, column], rank)  # sorts only as far as the element at ``rank``
                cells.append(f"{partitioned[rank]:,}")
            table.add_row(f"{word} of {len(users):,}", *cells)
        train_sizes = sizes[:, 0]
        least_to_most = np.argsort(train_sizes, kind="stable")
        listed = [*least_to_most[:_NUM_EXTREMES].tolist(), *least_to_most[-_NUM_EXTREMES:].tolist()]
    for index in listed:
        table.add_row(literal_text(users.names[index]), *(f"{size:,}" for size in sizes[index].tolist()))

    lines = []
    if len(listed) <= LISTED_USERS:
        for index in listed:
            lines += excerpt_lines(users.names[index], _excerpts_of_user(run_data, users[index]))
    skip_reason = "too little text" if is_text else f"too few {run_data.kind.name}"
    return [table, *skipped_lines(run_data, skip_reason, all_users), *lines]


def _excerpts_of_user(run_data: RunData, user: Any) -> dict[str, str | Text]:
    """Return the beginning of a user's text, or its first conversation, in the splits ``train`` and ``test``.

    Empty splits are left out, and both if the base has no tokenizer.

    Args:
        run_data: The data, with the base.
        user: A user with tokens (:class:`UserData`) or with conversations (:class:`UserAnswers`).
    """
    if run_data.base is None or run_data.base.tokenizer is None:
        return {}
    decode: Any = run_data.base.tokenizer.decode
    excerpts: dict[str, str | Text] = {}
    for split in ("train", "test"):
        tokens_or_conversations = getattr(user, split)
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
    window = conversations.windows[0]  # tokens without a loss are encoded as negative numbers
    tokens = conversations.tokens(0).tolist()  # all tokens as they are, without padding
    have_loss = [bool(window[position] >= 0) for position in range(len(tokens))]
    rendered = Text()
    for has_loss, pairs in groupby(zip(tokens, have_loss, strict=True), key=itemgetter(1)):
        text = decode([token for token, _ in pairs])  # of a turn, or of what is between two turns with a loss
        if len(text) > _EXCERPT_CHARACTERS:
            half = _EXCERPT_CHARACTERS // 2
            text = f"{text[:half]} ... {text[-half:]}"
        line = printable(text.replace("\n", "\\n"))
        if has_loss:
            rendered.append(f"[[{line}]]", style="bold green")
        else:
            rendered.append(line, style="")
    rendered.truncate(_CONVERSATION_CHARACTERS)
    return rendered


def _preview_text(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of documents and tokens, skipped users, and the beginnings of the listed users' documents.

    Args:
        recipe: The recipe, whose base the title names.
        run_data: The data of the recipe's users.
        all_users: List all users; otherwise many users are summarised.
    """
    title = literal_text(f"{recipe.base}: documents and tokens", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for split in SPLITS:
        table.add_column(f"{split} docs", justify="right")
        table.add_column(f"{split} tokens", justify="right")
    summaries = [summarise(text, user) for text, user in zip(run_data.texts, run_data.users, strict=True)]
    counts_by_user: dict[str, list[int]] = {}
    for summary in summaries:
        counts = []
        for split in SPLITS:
            counts += [summary["documents"][split], summary["tokens"][split]]
        counts_by_user[summary["user"]] = counts
    train_tokens_column = 1
    rows = choose_rows(counts_by_user, train_tokens_column, all_users=all_users)
    for name, cells in rows:
        table.add_row(literal_text(name), *cells)

    listed = {name for name, _ in rows}
    lines = []
    for summary in summaries:
        if summary["user"] in listed:
            lines += excerpt_lines(summary["user"], summary["samples"])
    return [table, *skipped_lines(run_data, "too little text", all_users), *lines]


def _preview_conversations(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of numbers and lengths of conversations, skipped users, and the listed users' first conversations.

    Args:
        recipe: The recipe, whose base the title names.
        run_data: The data of the recipe's users.
        all_users: List all users; otherwise many users are summarised.
    """
    title = literal_text(f"{recipe.base}: {run_data.kind.name}", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for name in _CONVERSATION_COLUMNS:
        table.add_column(name, justify="right")
    counts_by_user = {user.name: _conversation_counts(user) for user in run_data.users}
    train_column = 0
    rows = choose_rows(counts_by_user, train_column, all_users=all_users)
    for name, cells in rows:
        table.add_row(literal_text(name), *cells)

    listed = {name for name, _ in rows}
    lines: list[RenderableType] = []
    if run_data.texts:  # no excerpts for a kind without texts, such as questions
        for user in run_data.users:
            if user.name in listed:
                lines += excerpt_lines(user.name, _excerpts_of_user(run_data, user))
    if lines:
        lines.insert(0, literal_text(_LEGEND))
    return [table, *skipped_lines(run_data, "too few conversations", all_users), *lines]


def _conversation_counts(user: UserAnswers) -> list[int]:
    """Return a row of the table that ``comingle data`` prints of users' conversations: ``[20, 2, 5, 140, 512, 96]``.

    These are the numbers of conversations in train, valid and test, the mean and the largest number of tokens of a
    conversation, and the number of tokens of the longest response.
    """
    splits = (user.train, user.valid, user.test)
    num_tokens = []  # of each conversation
    for split in splits:
        num_tokens += [len(split.tokens(index)) for index in range(len(split))]
    if not num_tokens:  # a user without conversations
        num_tokens = [0]
    mean_tokens = round(sum(num_tokens) / len(num_tokens))
    longest_response = user.test.limit  # tokens of the longest response in any split; all splits have this number
    return [len(user.train), len(user.valid), len(user.test), mean_tokens, max(num_tokens), longest_response]


def _preview_samples(recipe: Recipe, run_data: RunData, all_users: bool) -> list[RenderableType]:
    """Return a table of each user's number of samples in each split and of each class.

    The table has a column with the users' true clusters if the data has them. The title names the net, the shape of a
    sample and, if they have names, the classes.

    Args:
        recipe: The recipe, whose net the title names.
        run_data: The data of the recipe's users.
        all_users: List all users; otherwise many users are summarised.
    """
    population = run_data.common  # has the shape of an input and the names of the classes
    shape = " x ".join(str(size) for size in population.input_shape)
    title = f"{NETS}{net_name(recipe, population)}: samples of {shape}"
    if population.labels:
        title += f", classes {list_names(population.labels)}"
    return [_count_table(title, run_data, all_users, classes=population.labels)]


_MAX_CLASS_COLUMNS = 12
"""Largest number of classes with a column each."""


def _count_table(title: str, run_data: RunData, all_users: bool, *, classes: Sequence[str] = ()) -> Table:
    """Return a table of the users' numbers of samples in each split and of each class, and of their true clusters.

    Args:
        title: Title of the table.
        run_data: The data of the users in the table.
        all_users: List all users; otherwise many users are summarised (:func:`choose_rows`), without clusters.
        classes: Names of the classes; more than :data:`_MAX_CLASS_COLUMNS` have no columns.
    """
    if len(classes) > _MAX_CLASS_COLUMNS:
        classes = ()
    cluster_by_user = {user.name: getattr(user, "cluster", None) for user in run_data.users}
    has_clusters = any(cluster is not None for cluster in cluster_by_user.values())
    first_headings = ["user", "cluster"] if has_clusters else ["user"]
    table = Table(*first_headings, title=literal_text(title), title_justify="left", box=None)
    for name in (*SPLITS, *classes):
        table.add_column(literal_text(name), justify="right")

    counts_by_user: dict[str, list[int]] = {}
    for user in run_data.users:
        samples_of_splits = [getattr(user, split) for split in SPLITS]
        counts = [len(samples) for samples in samples_of_splits]
        for class_index in range(len(classes)):
            counts.append(sum(int((samples.targets == class_index).sum()) for samples in samples_of_splits))
        counts_by_user[user.name] = counts
    train_column = 0
    for name, cells in choose_rows(counts_by_user, train_column, all_users=all_users):
        if has_clusters:
            cluster = cluster_by_user.get(name)  # None for the rows of the summary
            cells = ["-" if cluster is None else str(cluster), *cells]
        table.add_row(literal_text(name), *cells)
    return table


_PREVIEWS: Mapping[type, Callable[[Recipe, RunData, bool], list[RenderableType]]] = {
    UserData: _preview_text,
    UserAnswers: _preview_conversations,
    UserSamples: _preview_samples,
}


def skipped_lines(run_data: RunData, reason: str, all_users: bool) -> list[RenderableType]:
    """Return a line with the number of users skipped for lack of data, and a line for each of the first 24.

    Args:
        run_data: The data; ``run_data.skipped`` has a text such as "no test text" for each skipped user.
        reason: The reason for which users were skipped, such as "too little text".
        all_users: Return a line for every skipped user.

    Returns:
        The lines; none if no user was skipped.
    """
    skipped = list(run_data.skipped.items())
    if not skipped:
        return []
    lines: list[RenderableType] = [literal_text(f"skipped users with {reason}: {len(skipped):,}")]
    listed = skipped if all_users else skipped[:LISTED_USERS]
    for name, detail in listed:
        lines.append(literal_text(f"  {name}: {detail}"))
    return lines


def excerpt_lines(name: str, excerpts: Mapping[str, str | Text]) -> list[RenderableType]:
    """Return a line ``NAME SPLIT: excerpt`` for each of a user's excerpts.

    Args:
        name: Name of the user.
        excerpts: Excerpts by split; control characters are escaped in strings, and have been escaped in a ``Text``.
    """
    lines = []
    for split, excerpt in excerpts.items():
        prefix = Text.assemble(literal_text(name, "bold"), " ", (f"{split}:", "dim"), " ")
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
        data: The user's tokens in each split, perhaps cut to a limit such as ``data.max_train_tokens``.
    """
    summary: Summary = {"user": text.name, "documents": {}, "characters": {}, "tokens": {}, "samples": {}}
    for split in SPLITS:
        documents = getattr(text, split)
        summary["documents"][split] = len(documents)
        summary["characters"][split] = sum(len(document) for document in documents)
        summary["tokens"][split] = len(getattr(data, split))
        if documents and split in ("train", "test"):
            summary["samples"][split] = shorten(documents[0])
    return summary


def shorten(document: str) -> str:
    """Return the beginning of a document on one line, with an ellipsis if it is cut, as an excerpt for a preview."""
    line = " ".join(document.split())
    if len(line) <= _EXCERPT_CHARACTERS:
        return line
    return line[: _EXCERPT_CHARACTERS - 1] + "…"
