"""Token views and HTML pages of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from comingle.models.hardware import torch_defaults
from comingle.reports.runs import baseline_comparison, read_entries
from comingle.runs.comparison import Comparison
from comingle.runs.results import Run
from comingle.training.backends.launched import require_single_process
from comingle.utils.errors import DataError, RunError, require_user
from comingle.utils.files import check_target, require_packages
from comingle.utils.records import PARTICIPANTS, write_text

if TYPE_CHECKING:
    from comingle.models.personal import PersonalModel
    from comingle.reports.page import TokenView
    from comingle.reports.runs import Entry


MAX_USERS = 6
"""Number of users in a token view by default; it shows texts x users."""


def route_texts(
    entries: Sequence[Entry], given: Sequence[str] | None, users: Sequence[str] | None, length: int
) -> list[TokenView]:
    """Return a token view for every entry with routers, from its finished run with the lowest seed.

    A token view shows the experts to which each user's model routes the tokens of some texts.

    Args:
        entries: The runs of each method, as entries whose ``runs`` differ only in their seeds; ``first`` is the run
            with the lowest seed.
        given: Text files or texts to route. None: the users' test texts.
        users: Names of users. None: the first few.
        length: The number of tokens to route of each text.

    Raises:
        DataError: A text is empty or unreadable, or there is no such user.
        RunError: A run cannot be opened.
    """
    from comingle.runs.api import load

    chosen = choose_users(entries[0].first.users, users)  # all runs have the same users
    texts = [read_text(text, number) for number, text in enumerate(given or (), start=1)]
    views = []
    for entry in entries:
        # In a federation over a network the server has no users' models and texts to show.
        with_models = [run for run in entry.runs if not (run.folder / PARTICIPANTS).exists()]
        finished = [run for run in with_models if run.metrics is not None]
        if entry.first.has_routers and finished:
            opened = load(finished[0].folder)
            label = entry.label if len(entry.runs) == 1 else f"{entry.label}, seed {finished[0].seed}"
            views.append(view_of(opened, label, texts, chosen, length))
    return views


def choose_users(known: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the users named in ``wanted``, or the first :data:`MAX_USERS` without it.

    Raises:
        DataError: There is no such user.
    """
    if wanted is None:
        return list(known)[:MAX_USERS]
    return [require_user(name, known, "users: ") for name in wanted]


def read_text(given: str, number: int) -> tuple[str, str]:
    """Return a name and a text: the content of a file, or ``given`` itself if it is not the path of a file.

    Args:
        given: A text, or the path of a file.
        number: The number in the name of a text without a file, "text 1" for example.

    Raises:
        DataError: The text is empty, or the file is not UTF-8.
    """
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long for a file's name, or with a NUL in it
        is_file = False
    try:
        name = Path(given).name if is_file else f"text {number}"
        text = Path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text {given!r}: cannot be read as UTF-8 text ({type(error).__name__})") from None
    if not text.strip():
        raise DataError(f"text {given!r}: is empty; give a text or a text file")
    return name, text


def view_of(run: Run, label: str, texts: Sequence[tuple[str, str]], users: Sequence[str], length: int) -> TokenView:
    """Return a token view of a run: the gates of every text under the models of all these users.

    Args:
        run: The run.
        label: The label of the run.
        texts: Pairs of a name and a text. If there are none, the users' test texts are routed.
        users: Names of users.
        length: The number of tokens to route of each text.

    Returns:
        The view, whose ``gates[text][user]`` has the shape (layers, tokens, experts of the user).
    """
    import torch

    from comingle.reports.page import Text, TokenView
    from comingle.training.kinds.base import kind_of

    kind, clients = kind_of(run.recipe), run.federation.clients
    streams: list[tuple[str, str | None, Any]] = []  # name of the text, user whose text it is, token ids
    models = [generating_model(run, name) for name in users]
    if texts:
        tokenizer = models[0].model.base.tokenizer  # all users have the same base model
        assert tokenizer is not None
        for name, text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            streams.append((name, None, torch.tensor(ids[:length], dtype=torch.int64)))
    else:
        streams = [(u.name, u.name, kind.sample(u)[:length]) for u in clients.users if u.name in users]
        streams.sort(key=lambda stream: users.index(stream[0]))  # in the order of `users`
    context = clients.plan.training.context
    # For each text, how each user's model routes it.
    routes = [[model.route(ids, context=context) for model in models] for _name, _owner, ids in streams]
    return TokenView(
        label=label,
        users=tuple(users),
        experts=tuple(routing.experts for routing in routes[0]),  # of each user; the same for all texts
        texts=tuple(
            Text(name=name, owner=owner, tokens=routes_of_text[0].tokens)  # the tokens are the same for all users
            for (name, owner, _ids), routes_of_text in zip(streams, routes, strict=True)
        ),
        gates=tuple(tuple(routing.gates.numpy() for routing in routes_of_text) for routes_of_text in routes),
        in_distribution=run.recipe.data.in_distribution,
    )


def generating_model(run: Run, name: str) -> PersonalModel:
    """Return the personal language model of a user.

    Raises:
        DataError: There is no such user, or the users' models are nets.
    """
    from comingle.training.kinds.base import kind_of

    personal = run.user(name)
    if not kind_of(run.recipe).needs_base:
        net = run.federation.clients.model.name
        raise DataError(
            f"user {name!r}: got the net {net}, which generates no text; allowed: a language model. "
            f"In Python, run.user({name!r}).model is the net"
        )
    return cast("PersonalModel", personal)


AnyRun: TypeAlias = str | Path | Run | Comparison
"""A run or a comparison, or the folder of one."""
One = TypeVar("One")


@torch_defaults()
def report(
    runs: AnyRun | Sequence[AnyRun],
    *,
    out: str | Path | None = None,
    text: str | Sequence[str] | None = None,
    users: str | Sequence[str] | None = None,
    tokens: int = 120,
    against: str | None = None,
    token_view: bool = True,
    force: bool = False,
) -> Path:
    """Write one self-contained HTML page about runs, as ``comingle report``, and return its path.

    Unless ``text`` is given or ``token_view`` is false, the page holds the beginning of each user's test text, which
    may be private.

    Args:
        runs: Runs, comparisons, or folders of these; each needs a folder.
        out: The file to write; by default ``report.html`` in the first folder.
        text: Text files, or texts, to route; by default the users' test texts.
        users: The users in the token view; by default the first six.
        tokens: The number of tokens to route of each text.
        against: The baseline with which methods are compared, or several with commas between, of which the best one is
            used; by default ``local``.
        token_view: Whether to route texts; else no model is loaded, and no text is on the page.
        force: Whether to replace the file.

    Raises:
        ComingleError: A run has no folder or cannot be read, the runs are of different users, there is no such user or
            baseline, or the page cannot be written.
    """
    require_single_process("report")
    require_packages("comingle.report")
    from comingle.reports.page import render_page

    folders = [_folder_of(run) for run in _as_list(runs)]
    if not folders:
        raise RunError("runs: got none; give a run, a comparison or a folder")
    if tokens < 1:
        raise RunError(f"tokens: got {tokens}; allowed: whole numbers from 1; token_view=False leaves them out")
    path = folders[0] / "report.html" if out is None else Path(out)
    entries = read_entries(folders)
    check_target(path, force=force, option="out", replace="force=True")
    baseline_comparison(entries, against)  # only to refuse a wrong baseline before models are loaded
    texts = None if text is None else _as_list(text)
    views = route_texts(entries, texts, None if users is None else _as_list(users), tokens) if token_view else []
    page = render_page(entries, views, baseline=against)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _as_list(given: One | Sequence[One]) -> list[One]:
    """Return a sequence as a list, and anything else as a list of one; a text counts as one."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [*given]
    return [cast("One", given)]


def _folder_of(run: AnyRun) -> Path:
    """Return the folder of a run or comparison, given by itself or by its folder.

    Raises:
        RunError: The run or comparison was made without ``out``.
    """
    if not isinstance(run, Run | Comparison):
        return Path(run)
    if run.folder is None:
        raise RunError(f"{run!r}: has no folder to read; pass out=FOLDER to comingle.run or comingle.compare")
    return run.folder
