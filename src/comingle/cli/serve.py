"""``comingle serve``: everybody's models behind one OpenAI-compatible API, and a page to chat with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.serving.keys import Limits, check_host, read_keys
from comingle.utils.errors import ComingleError

if TYPE_CHECKING:
    from comingle.serving.models import People

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or with --method a comparison's.")]
Method = Annotated[str | None, typer.Option("--method", help="Which run of a comparison's folder.")]


def serve(
    run: RunPath,
    method: Method = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any but this machine's needs --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="Lines of USER: KEY; each key opens one model.")
    ] = None,
    make_keys: Annotated[
        Path | None, typer.Option("--make-keys", metavar="FILE", help="Write a key for every user, and end.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Answers that are written at once.")] = Limits.rows,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait for a row.")] = Limits.queue,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Requests of each user's in a minute.")] = Limits.rate,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="New tokens of an answer.")
    ] = Limits.max_tokens,
) -> None:
    """Serve everybody's models at once, over one base, as an OpenAI-compatible API; a page to chat is at /."""
    require_app("serve")
    from comingle.serving.api import listen
    from comingle.serving.api import serve as answer
    from comingle.serving.keys import make_keys as write_keys
    from comingle.serving.models import find_run, names_in

    names = names_in(find_run(run, method))
    if make_keys is not None:
        from comingle.cli.options import console
        from comingle.utils.terminal import words

        write_keys(make_keys, names)
        console.print(words(f"{make_keys}  a key for each of {len(names)} users; --keys {make_keys} uses them"))
        return
    given = None if keys is None else read_keys(keys, names)
    check_host(host, given)
    with listen(host, port) as place:
        people = opened(run, method)
        limits = Limits(max_tokens=max_tokens, rate=rate, rows=rows, queue=queue)
        answer(people.models, place, keys=given, limits=limits, answers=people.answers, ready=say)


def opened(run: Path, method: str | None) -> People:
    """Everybody's models of a run."""
    from comingle.cli.options import status
    from comingle.serving.models import open_people

    with status("loading the base and everybody's adapters"):
        return open_people(run, method)


def say(url: str) -> None:
    """Where the server is."""
    from comingle.cli.options import console
    from comingle.utils.terminal import words

    console.print(words(f"{url}  a page to chat · {url}/v1  OpenAI-compatible; Ctrl-C ends it"))


def require_app(verb: str) -> None:
    """Whether what serves is installed.

    Raises:
        ComingleError: it is not.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"comingle {verb} needs {error.name}: pip install 'comingle[app]'") from None
