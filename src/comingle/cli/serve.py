"""``comingle serve`` and ``comingle chat``: models as an OpenAI-compatible API, on a web page or in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import (
    Out,
    Quiet,
    RecipePath,
    Sets,
    console,
    finite,
    hide_names,
    line_printer,
    logs_json,
    read_recipe,
)
from comingle.serving.access import Limits, check_host, read_keys
from comingle.utils.errors import ComingleError, RecipeError, list_names, require_user

if TYPE_CHECKING:
    from comingle.serving.answers import Chat
    from comingle.serving.engine import Engine
    from comingle.serving.models import EnginePool, Source, UserModels


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or with --method a comparison's.")]
Host = Annotated[str, typer.Option("--host", help="Listen on this address; --keys is required unless it is local.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Listen on this port; 0 selects a free one.")]
MakeKeys = Annotated[
    Path | None, typer.Option("--make-keys", metavar="FILE", help="Write a key for each user, and exit.")
]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Generate up to N answers at once.")]
Rate = Annotated[int, typer.Option("--rate", min=1, help="Accept N requests per user and minute.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Generate up to N tokens per answer.")]
AdapterMemory = Annotated[
    int | None,
    typer.Option(
        "--adapter-memory",
        min=1,
        metavar="MB",
        help="Keep this much of users' adapters in memory (default: a quarter).",
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option("--prompt-tokens", min=1, help="Read up to N tokens of prompts between two tokens of other answers."),
]
PrefixMemory = Annotated[
    int,
    typer.Option("--prefix-memory", min=0, metavar="MiB", help="Keep this much of prompts that were read; 0: none."),
]
DEFAULT_PREFIX_MEMORY = Limits.prefix_bytes >> 20
Method = Annotated[str | None, typer.Option("--method", help="Use this method's run of a comparison.")]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="8bit", help="Pack the base's weights: faster on a CPU, less memory.")
]


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, users' state folders, PEFT adapters on one base; or NAME=PATH."),
    ],
    method: Method = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="Require keys, in lines USER: KEY; read again when it changes."),
    ] = None,
    make_keys: MakeKeys = None,
    rows: Rows = Limits.rows,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Queue up to N further requests.")] = Limits.queue,
    rate: Rate = Limits.rate,
    max_tokens: MaxTokens = Limits.max_tokens,
    adapter_memory: AdapterMemory = None,
    tokens_per_day: Annotated[
        int | None, typer.Option("--tokens-per-day", min=1, help="Read and generate N tokens per user and day.")
    ] = None,
    prompt_tokens: PromptTokens = None,
    prefix_memory: PrefixMemory = DEFAULT_PREFIX_MEMORY,
    operator_key: Annotated[
        Path | None,
        typer.Option(
            "--operator-key", metavar="FILE", help="Load and unload models over HTTP with this key; made if missing."
        ),
    ] = None,
    weights: Weights = None,
) -> None:
    """Serve all users' models over one base as an OpenAI-compatible API, with a chat page at /."""
    require_serving_packages("serve")
    from comingle.serving.access import listen, read_operator_key
    from comingle.serving.access import make_keys as write_keys
    from comingle.serving.api import serve as serve_models
    from comingle.serving.models import Source, names_of

    sources = [Source.of(run, method) for run in runs]
    names = names_of(sources)
    hide_names(names)
    if make_keys is not None:
        from comingle.utils.terminal import literal_text

        write_keys(make_keys, names)
        console.print(literal_text(f"{make_keys}  keys of {list_names(names)}; --keys {make_keys} uses them"))
        return
    check_host(host, None if keys is None else read_keys(keys, names))  # raises if others could connect without a key
    secret = None if operator_key is None else read_operator_key(operator_key, "--operator-key")
    with listen(host, port) as sock:  # before the models are loaded, so that a port in use is reported at once
        limits = Limits(
            max_tokens=max_tokens,
            rate=rate,
            rows=rows,
            queue=queue,
            tokens_per_day=tokens_per_day,
            prompt_tokens=prompt_tokens,
            prefix_bytes=prefix_memory << 20,
        )
        pool = _load_pool(sources, limits, megabytes=adapter_memory, weights=weights)
        serve_models(pool, sock, keys=keys, limits=limits, ready=print_addresses, operator_key=secret)


def _load_pool(
    sources: Sequence[Source], limits: Limits, *, megabytes: int | None = None, weights: str | None = None
) -> EnginePool:
    """Load the base and all models of several sources, and show that they are being loaded.

    Args:
        sources: The sources.
        limits: Limits of the server.
        megabytes: Size of the adapters in memory in MB; None for the default.
        weights: "8bit" to pack the base's weights; None as in the run.
    """
    from comingle.cli.options import status
    from comingle.serving.models import open_pool

    with status("loading the base model and all adapters"):
        return open_pool(sources, limits, megabytes=megabytes, weights=weights)


def live(
    recipe: RecipePath,
    sets: Sets = None,
    out: Out = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="Require keys, in lines USER: KEY; read again when it changes."),
    ] = None,
    make_keys: MakeKeys = None,
    users: Annotated[int, typer.Option("--users", min=1, help="Train when N users have enough new text.")] = 1,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="N new tokens of a user are enough.")] = 500,
    at_most_every: Annotated[
        float, typer.Option("--at-most-every", min=0, metavar="SECONDS", help="Start runs at least this far apart.")
    ] = 0.0,
    rows: Rows = Limits.rows,
    rate: Rate = Limits.rate,
    max_tokens: MaxTokens = Limits.max_tokens,
    quiet: Quiet = False,
) -> None:
    """Train on new text as it arrives, and serve all users' models meanwhile, in one process.

    Documents come in over HTTP: POST /v1/users/NAME/documents, or /v1/files and /v1/fine_tuning/jobs of the OpenAI
    API. The same command continues after an interruption.
    """
    require_serving_packages("live")
    loaded_recipe = read_recipe(recipe, sets)
    if make_keys is not None:
        from comingle.serving.access import make_keys as write_keys

        write_keys(make_keys, loaded_recipe.data.names)
        console.print(f"{make_keys}  keys of {list_names(loaded_recipe.data.names)}")
        return
    check_host(host, {} if keys is not None else None)
    from comingle.serving.access import listen
    from comingle.serving.live import LiveTrainer, When, serve_live
    from comingle.utils.files import locked

    folder = out or Path("runs") / f"{recipe.stem}-live"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    when = When(users=users, new_tokens=new_tokens, at_most_every=at_most_every)
    limits = Limits(max_tokens=max_tokens, rate=rate, rows=rows)
    with locked(folder), listen(host, port) as sock:
        trainer = LiveTrainer(loaded_recipe, folder, when, line_printer(quiet=quiet))
        serve_live(trainer, sock, keys=keys, limits=limits, ready=print_addresses)


def load_all_models(run: Path, method: str | None, weights: str | None = None) -> UserModels:
    """Load the base and all users' models of a run, and show that they are being loaded.

    Args:
        run: Folder of a run, or of a comparison of several methods.
        method: The method whose run is loaded if ``run`` is a comparison; None if there is only one.
        weights: "8bit" to pack the base's weights; None as in the run.
    """
    from comingle.cli.options import status
    from comingle.serving.models import open_models

    with status("loading the base model and all adapters"):
        return open_models(run, method, weights)


def print_addresses(url: str) -> None:
    """Print the addresses of the chat page and of the API of the server at ``url``."""
    if logs_json():
        line_printer(quiet=False)(f"{url}  OpenAI-compatible API")
        return
    from comingle.utils.terminal import literal_text

    console.print(literal_text(f"{url}  chat page · {url}/v1  OpenAI-compatible API; Ctrl-C stops the server"))


def require_serving_packages(command: str) -> None:
    """Check that the packages for serving, FastAPI and uvicorn, are installed.

    Args:
        command: Name of the command that needs them, for the message.

    Raises:
        ComingleError: A package is missing. The message says how to install it.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"comingle {command} needs {error.name}: pip install 'comingle[app]'") from None


HELP = '''/user NAME   continue the conversation with another user's model
/route [N]   colour the last answer by expert: the mean of all layers, or layer N
/compare [TEXT]  answers of pretrained, local and this model to a text (default: your last), side by side
/clear       start a new conversation
/help        show this list
/quit        quit (also Ctrl-D)
A line that ends with \\ continues on the next one; """ starts and ends a text of several lines.'''

PRETRAINED = "\x00pretrained"
"""Name of the pretrained model among the users' models; no user can have it."""


def chat(
    run: RunPath,
    user: Annotated[
        str | None, typer.Option("--user", help="Chat with this user's model (default: the first's).")
    ] = None,
    method: Method = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="RUN", help="Take local models for /compare from RUN.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Generate up to N tokens per answer.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0, max=2, callback=finite, help="Sample at this temperature; 0: most likely token."
        ),
    ] = 0.7,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Use this seed for sampling."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue texts, even with a chat template.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Open the page of `comingle serve` in a browser.")] = False,
    weights: Weights = None,
) -> None:
    """Chat with a user's model: it answers if it was trained on conversations, and continues texts otherwise."""
    if web:
        _show_page(run, method, weights)
        return
    from comingle.serving.answers import Chat
    from comingle.serving.engine import Engine
    from comingle.serving.models import find_run, users_in
    from comingle.serving.rows import without_adapters

    folder = find_run(run, method)
    names = users_in(folder)
    user = names[0] if user is None else require_user(user, names)
    loaded = load_all_models(run, method, weights)
    # The base, which is the same for all users.
    pretrained = replace(without_adapters(loaded.models[user]), name=PRETRAINED)
    engine = Engine(loaded.models, rows=1, cache_bytes=loaded.cache_bytes())  # one answer at a time
    engine.replace(pretrained)
    conversation = Chat(
        engine=engine,
        user=user,
        plain=plain or not loaded.answers,  # ``answers``: whether the models answer messages
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    session = _Session(conversation, names, _local_run(run, folder, against))
    session.run()


def _local_run(run: Path, folder: Path, against: Path | None) -> Path | None:
    """Return the run of the method ``local`` whose models ``/compare`` shows; None if there is none.

    Args:
        run: The folder given on the command line: a run, or a comparison with several runs.
        folder: The run whose models the chat uses. In a comparison, ``local-seed0`` belongs to ``fedavg-seed0``.
        against: The folder given by ``--against``, which takes precedence; None if it is not given.
    """
    if against is not None:
        return against
    is_in_comparison = folder != run
    if not is_in_comparison:
        return None
    seed = folder.name.rpartition("-")[2]
    local_run = folder.parent / f"local-{seed}"
    has_finished = (local_run / "metrics.json").exists()
    if local_run == folder or not has_finished:
        return None
    return local_run


class _Session:
    """Interactive chat in the terminal.

    Args:
        conversation: The conversation with a user's model.
        user_names: Names of all users of the run.
        local_run: Run folder of local models, for ``/compare``; None if there is none.
    """

    def __init__(self, conversation: Chat, user_names: list[str], local_run: Path | None) -> None:
        """Prepare a chat in the terminal; :meth:`run` starts it.

        Args:
            conversation: The conversation with a user's model.
            user_names: Names of all users of the run, for ``/user``.
            local_run: Run folder of local models, for ``/compare``; None if there is none.
        """
        self.conversation = conversation
        self.user_names = user_names
        self.local_run = local_run
        self.console = console
        self.last_text = ""  # the last text that the user typed
        self.engine_by_run: dict[Path, Engine] = {}  # engines of other runs, loaded when ``/compare`` needs them

    def run(self) -> None:
        """Read texts and commands until the user quits; an error or Ctrl-C ends one answer, not the session."""
        if isinstance(sys.stdin, TextIOWrapper):  # invalid UTF-8 is reported instead of ending the chat
            sys.stdin.reconfigure(errors="surrogateescape")
        mode = "continues your texts" if self._continues_texts else "answers"
        self._print(f"{self.conversation.user}'s model {mode}; /help lists commands, Ctrl-D quits", "dim")
        for text in _read_texts(self._read_line):
            try:
                if text.strip() in ("/quit", "/exit"):
                    return
                if text.startswith("/"):
                    self._run_command(text)
                else:
                    self._send(text)
            except ComingleError as error:
                self._print(str(error), "yellow")
            except KeyboardInterrupt:
                self._print("\n(stopped)", "dim")

    @property
    def _continues_texts(self) -> bool:
        """True if the model continues texts; otherwise it answers messages."""
        return self.conversation.plain

    def _read_line(self, *, continues_text: bool) -> str:
        """Read a line of the user's input; in terminals print a prompt before it.

        Args:
            continues_text: Whether the line continues a text of several lines, which has another prompt.
        """
        if not self.console.is_terminal:
            return input()
        return input("… " if continues_text else f"{self.conversation.user}> ")

    def _print(self, text: str, style: str = "") -> None:
        """Print a line in a style of rich, without control characters and without wrapping it."""
        from rich.text import Text

        from comingle.utils.terminal import printable

        self.console.print(Text(printable(text, keep="\n"), style=style), highlight=False, soft_wrap=True)

    def _send(self, text: str) -> None:
        """Send a text to the model, and print the answer as it is generated."""
        from comingle.utils.terminal import printable

        def print_part(part: str) -> None:
            self.console.file.write(printable(part, keep="\n\t"))
            self.console.file.flush()

        self.conversation.say(text, print_part)
        self.last_text = text
        self.console.file.write("\n")

    def _run_command(self, text: str) -> None:
        """Run a command that begins with a slash.

        Raises:
            RecipeError: There is no such command, or its argument is wrong.
        """
        from comingle.utils.errors import did_you_mean

        command, _, argument = text.strip().partition(" ")
        function_by_command = {
            "/user": self._switch,
            "/route": self._show_route,
            "/compare": self._show_comparison,
            "/clear": self._clear,
        }
        if command == "/help":
            self._print(HELP)
        elif command in function_by_command:
            run_command = function_by_command[command]
            run_command(argument.strip())
        else:
            hint = did_you_mean(command, [*function_by_command, "/help", "/quit"])
            raise RecipeError(f"no command {command!r}; /help lists them.{hint}")

    def _switch(self, name: str) -> None:
        """Continue the conversation with another user's model; the command ``/user``.

        Raises:
            RecipeError: The name is empty.
            DataError: There is no such user.
        """
        if not name:
            raise RecipeError(f"/user: give a name; allowed: {', '.join(self.user_names)}")
        require_user(name, self.user_names)
        self.conversation.switch(name)
        self._print(f"switched to {name}'s model", "dim")

    def _clear(self, _: str) -> None:
        """Start a new conversation; the command ``/clear``, whose argument is not used."""
        self.conversation.clear()
        self._print("new conversation", "dim")

    def _show_route(self, layer: str) -> None:
        """Print the last answer with each token in the colour of its top expert, and each expert's share of the tokens.

        Args:
            layer: Number of a layer, from 1; empty for the mean gates of all layers.

        Raises:
            RecipeError: There is no such layer.
            DataError: There is no answer yet, or the model has no router.
        """
        from rich.text import Text

        from comingle.reports.canvas import expert_colour
        from comingle.utils.terminal import printable

        routing = self.conversation.route()
        gates = routing.gates.float()  # (layers, tokens, experts)
        num_layers = len(gates)
        if layer == "":
            shown_gates, layer_text = gates.mean(0), "mean of all layers"
        elif layer.isdecimal() and 1 <= int(layer) <= num_layers:
            shown_gates, layer_text = gates[int(layer) - 1], f"layer {layer}"
        else:
            raise RecipeError(f"/route: got {layer!r}; allowed: layers 1 to {num_layers}")
        top_experts = shown_gates.argmax(-1).tolist()
        styles = [f"#ffffff on {expert_colour(name).dark}" for name in routing.experts]
        coloured_tokens = Text()
        for token, expert in zip(routing.tokens, top_experts, strict=True):
            coloured_tokens.append(printable(token, keep="\n"), style=styles[expert])
        self.console.print(coloured_tokens, highlight=False)

        legend = Text(f"{layer_text}: ", style="dim")
        num_tokens = max(1, len(top_experts))  # an answer may be empty
        for expert, name in enumerate(routing.experts):
            share = top_experts.count(expert) / num_tokens
            legend.append(f"{name} {share:.0%}", style=styles[expert])
            legend.append("  ")
        self.console.print(legend, highlight=False)

    def _show_comparison(self, text: str) -> None:
        """Print the answers of several models to a text side by side; they are not added to the conversation.

        The models are the pretrained base, the user's local model if there is a run of local models, and the user's
        model of this run.

        Args:
            text: The text to answer; empty for the last one that the user typed.
        """
        from rich.table import Table

        text = text or self.last_text
        if not text:
            raise RecipeError("/compare: give a text, for example /compare Once upon a time")
        if text == self.last_text and not self._continues_texts:
            self._print("comparing on your last text, appended to the conversation", "dim")
        user, engine = self.conversation.user, self.conversation.engine
        # Pairs of an engine and the name of a model in it, by heading of the table.
        engine_and_name: dict[str, Any] = {"pretrained": (engine, PRETRAINED)}
        if self.local_run is not None:
            engine_and_name["local"] = (self._engine_of_run(self.local_run), user)
        engine_and_name[user] = (engine, user)
        answer_by_heading = self.conversation.compare(engine_and_name, text)
        table = Table(*answer_by_heading, expand=True)
        table.add_row(*answer_by_heading.values())
        self.console.print(table)
        if self.local_run is None:
            self._print("no local models here; add those of another run with --against RUN", "dim")

    def _engine_of_run(self, run: Path) -> Engine:
        """Return an engine with the local models of another run, for ``/compare``; load them in the first call."""
        from comingle.serving.engine import Engine

        if run not in self.engine_by_run:
            loaded = load_all_models(run, method=None)
            self.engine_by_run[run] = Engine(loaded.models, rows=1, cache_bytes=loaded.cache_bytes())
        return self.engine_by_run[run]


def _read_texts(read_line: Callable[..., str]) -> Iterator[str]:
    """Yield typed texts until the input ends: a line, lines joined by a backslash, or a block between triple quotes.

    Ctrl-C discards an unfinished text. Empty texts are skipped.

    Args:
        read_line: Reads a line; its argument ``continues_text`` is whether the line continues a text.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history, if the system has it)
    while True:
        try:
            text = read_line(continues_text=False)
            if text.strip().startswith('"""'):
                text = text.strip().removeprefix('"""')
                while not text.endswith('"""'):
                    text = f"{text}\n{read_line(continues_text=True)}"
                text = text.removesuffix('"""').strip("\n")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{read_line(continues_text=True)}"
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        if text.strip():
            yield text


def _show_page(run: Path, method: str | None, weights: str | None) -> None:
    """Serve a run's models on a free port of this machine until Ctrl-C, and open the chat page in a browser.

    Args:
        run: Folder of a run, or of a comparison of several methods.
        method: The method whose run is served if ``run`` is a comparison; None if there is only one.
        weights: "8bit" to pack the base's weights; None as in the run.
    """
    require_serving_packages("chat --web")
    import webbrowser

    from comingle.serving.access import Limits, listen
    from comingle.serving.api import serve as serve_models
    from comingle.serving.models import Source

    def open_page(url: str) -> None:
        print_addresses(url)
        webbrowser.open(url)

    with listen("127.0.0.1", 0) as sock:  # port 0: the system selects a free one
        limits = Limits()
        pool = _load_pool([Source(path=run, method=method)], limits, weights=weights)
        serve_models(pool, sock, keys=None, limits=limits, ready=open_page)  # only programs here can connect
