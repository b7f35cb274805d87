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
    import numpy as np

    from comingle.models.personal import PersonalModel
    from comingle.reports.page import TokenView
    from comingle.reports.runs import Entry


MAX_USERS = 6
"""Number of users in a token view by default; it shows texts x users."""


def route_texts(
    entries: Sequence[Entry], texts_or_paths: Sequence[str] | None, users: Sequence[str] | None, length: int
) -> list[TokenView]:
    """Return a token view for every entry with routers, from its finished run with the lowest seed.

    A token view shows the experts to which each user's model routes the tokens of some texts.

    Args:
        entries: The runs of each method, in the order of their seeds.
        texts_or_paths: Texts, or paths of text files, to route. None: the users' test texts.
        users: Names of users. None: the first few.
        length: The number of tokens to route of each text.

    Raises:
        DataError: A text is empty or unreadable, or there is no such user.
        RunError: A run cannot be opened.
    """
    from comingle.runs.api import load

    names_of_users = choose_users(entries[0].first.users, users)  # all runs have the same users
    texts = [read_text(text_or_path, number) for number, text_or_path in enumerate(texts_or_paths or (), start=1)]
    views: list[TokenView] = []
    for entry in entries:
        finished_runs = [run for run in entry.runs if run.metrics is not None and not _is_of_server(run.folder)]
        if not entry.first.has_routers or not finished_runs:
            continue
        shown = finished_runs[0]
        label = entry.label
        if len(entry.runs) > 1:
            label = f"{entry.label}, seed {shown.seed}"
        views.append(view_of(load(shown.folder), label, texts, names_of_users, length))
    return views


def _is_of_server(folder: Path) -> bool:
    """Return whether a run folder is that of a federation's server, which has no users' models and texts to show."""
    return (folder / PARTICIPANTS).exists()


def choose_users(known: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the names in ``wanted``, or the first :data:`MAX_USERS` of the known names if it is None.

    Raises:
        DataError: There is no such user.
    """
    if wanted is None:
        return list(known)[:MAX_USERS]
    return [require_user(name, known, "users: ") for name in wanted]


def read_text(text_or_path: str, number: int) -> tuple[str, str]:
    """Return a name and a text: those of the file with this path, or "text 1" and the text if there is no such file.

    Args:
        text_or_path: A text, or the path of a file.
        number: The number in the name "text 1".

    Raises:
        DataError: The text is empty, or the file is not UTF-8.
    """
    try:
        is_file = Path(text_or_path).is_file()
    except (OSError, ValueError):  # a text that cannot be a path: too long, or with a NUL in it
        is_file = False
    name = f"text {number}"
    text = text_or_path
    if is_file:
        path = Path(text_or_path)
        name = path.name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"text {text_or_path!r}: cannot be read as UTF-8 text ({type(error).__name__})") from None
    if not text.strip():
        raise DataError(f"text {text_or_path!r}: is empty; give a text or a text file")
    return name, text


def view_of(run: Run, label: str, texts: Sequence[tuple[str, str]], users: Sequence[str], length: int) -> TokenView:
    """Route texts with the users' models, and return the gates for a report page that shows how tokens are routed.

    A gate is the weight of an expert for a token. Each text is routed with the model of each user.

    Args:
        run: A finished run of a method with routers.
        label: The label of the run.
        texts: The name and the content of each text. If there are none, the users' test texts are routed.
        users: Names of users.
        length: The number of tokens to route of each text.

    Returns:
        The view, whose ``gates[text][user]`` has the shape (layers, tokens, experts of the user).
    """
    import torch

    from comingle.reports.page import Text, TokenView

    models = [generating_model(run, name) for name in users]
    tokenised_texts: list[tuple[str, str | None, Any]] = []  # name of the text, user whose test text it is, token ids
    if texts:
        tokenizer = models[0].model.base.tokenizer  # all users have the same base model
        assert tokenizer is not None
        for name, text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokenised_texts.append((name, None, torch.tensor(ids[:length], dtype=torch.int64)))
    else:
        for name in dict.fromkeys(users):  # each once
            tokenised_texts.append((name, name, _test_tokens(run, name)[:length]))
    context = run.federation.clients.plan.training.context
    shown_texts: list[Text] = []
    gates_of_texts: list[tuple[np.ndarray, ...]] = []
    experts_of_users: tuple[tuple[str, ...], ...] = ()
    for name, owner, ids in tokenised_texts:
        routings = [model.route(ids, context=context) for model in models]
        tokens = routings[0].tokens  # the same for all users
        shown_texts.append(Text(name=name, owner=owner, tokens=tokens))
        gates_of_texts.append(tuple(routing.gates.numpy() for routing in routings))
        experts_of_users = tuple(routing.experts for routing in routings)  # the same for all texts
    return TokenView(
        label=label,
        users=tuple(users),
        experts=experts_of_users,
        texts=tuple(shown_texts),
        gates=tuple(gates_of_texts),
        in_distribution=run.recipe.data.in_distribution,
    )


def _test_tokens(run: Run, name: str) -> Any:
    """Return token ids of a user's test data, whose routing is shown if no texts are given.

    Returns:
        A tensor of the token ids of the test text, or of the first conversation in the test set.
    """
    from comingle.data.conversations.encoding import Answers

    user_by_name = {user.name: user for user in run.federation.clients.users}
    test_set = user_by_name[name].test
    has_conversations = isinstance(test_set, Answers)
    return test_set.tokens(0) if has_conversations else test_set  # a test text is a tensor of token ids


def generating_model(run: Run, name: str) -> PersonalModel:
    """Return the personal language model of a user.

    Raises:
        DataError: There is no such user, or the users' models are nets.
    """
    from comingle.training.kinds.base import kind_of

    personal = run.user(name)
    has_language_model = kind_of(run.recipe).needs_base
    if not has_language_model:
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
        against: The baseline, such as ``"local"``; of several, such as ``"local,fedavg"``, the best one is used. By
            default ``local``.
        token_view: Whether to route texts. Without it no model is loaded, and no text is on the page.
        force: Whether to replace the file.

    Raises:
        ComingleError: A run has no folder or cannot be read, the runs are of different users, there is no such user or
            baseline, or the page cannot be written.
    """
    require_single_process("report")
    require_packages("comingle.report")
    from comingle.reports.page import render_page

    folders = [_require_folder(run) for run in _as_list(runs)]
    if not folders:
        raise RunError("runs: got none; give a run, a comparison or a folder")
    if tokens < 1:
        raise RunError(f"tokens: got {tokens}; allowed: whole numbers from 1; token_view=False leaves them out")
    path = folders[0] / "report.html" if out is None else Path(out)
    entries = read_entries(folders)
    check_target(path, force=force, option="out", replace="force=True")
    baseline_comparison(entries, against)  # only to refuse a wrong baseline before models are loaded
    views: list[TokenView] = []
    if token_view:
        texts = None if text is None else _as_list(text)
        names_of_users = None if users is None else _as_list(users)
        views = route_texts(entries, texts, names_of_users, tokens)
    page = render_page(entries, views, baseline=against)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _as_list(one_or_several: One | Sequence[One]) -> list[One]:
    """Return ``["a", "b"]`` for ``("a", "b")``, and ``["a"]`` for ``"a"``."""
    if isinstance(one_or_several, Sequence) and not isinstance(one_or_several, str):
        return [*one_or_several]
    return [cast("One", one_or_several)]


def _require_folder(run: AnyRun) -> Path:
    """Return the folder of a run or comparison; a path is returned as it is.

    Raises:
        RunError: The run or comparison was made without ``out``.
    """
    if not isinstance(run, Run | Comparison):
        return Path(run)
    if run.folder is None:
        raise RunError(f"{run!r}: has no folder to read; pass out=FOLDER to comingle.run or comingle.compare")
    return run.folder
