"""Command line: one function per command, with heavy imports inside the functions.

Other packages add commands through the entry points ``comingle.verbs``. Their modules are imported when a command is
called.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import getdoc
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from comingle.cli import options
from comingle.training.backends.launched import find_place
from comingle.utils import registry
from comingle.utils.errors import PluginError, RecipeError

# isort: split
from comingle import __version__
from comingle.cli.compare import compare, demo
from comingle.cli.federation import bundle, client, federate, server, status
from comingle.cli.plan import advise, cost, data, methods
from comingle.cli.run import audit, evaluate, export, join, leave, run
from comingle.cli.serve import chat, live, serve
from comingle.cli.show import plot, report, show
from comingle.training.backends.launched import interrupt_on_sigterm, should_print_errors
from comingle.utils.errors import ComingleError, UnknownMethodError, lacks_memory, require_docstrings
from comingle.utils.terminal import printable

GROUP = "comingle.verbs"

MULTI_PROCESS_COMMAND = "run"
"""The only command that a launcher may start in several processes."""


class CommandGroup(TyperGroup):
    """The command ``comingle``: comingle's own subcommands, then those of plugins. Each is built when it is called.

    Attributes:
        core_functions: The function of each of comingle's own subcommands, by the subcommand's name.
    """

    core_functions: ClassVar[Mapping[str, Callable[..., None]]] = {}

    def __init__(self, **settings: Any) -> None:
        """Create the group of all subcommands; each is built when it is called, as building all of them is slow.

        Args:
            settings: Settings of typer.
        """
        super().__init__(**settings)
        self._only_help_texts = False
        for name in (*self.core_functions, *registry.find_plugins(GROUP)):
            self.commands.setdefault(name, TyperCommand(name))  # a placeholder: click suggests names from this list

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page, with one line per subcommand.

        Meanwhile :meth:`get_command` returns only names and help texts, as building all subcommands is slow.
        """
        self._only_help_texts = True
        super().format_help(ctx, formatter)
        self._only_help_texts = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the called subcommand, the subcommand, and its arguments.

        Raises:
            RecipeError: A launcher such as torchrun has started several processes of a subcommand other than ``run``.
        """
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except Exception as error:
            has_hint = "Did you mean" in getattr(error, "message", "")
            if has_hint:  # typer's hint; click 8.4 would add another one with ``error.possibilities``
                vars(error).update(possibilities=None)
            raise
        was_started_by_launcher = find_place() is not None
        if was_started_by_launcher and name != MULTI_PROCESS_COMMAND:
            raise RecipeError(
                f"{name}: runs in one process; only `comingle {MULTI_PROCESS_COMMAND}` can run in several"
            )
        return name, command, rest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the subcommand of this name, which is comingle's own or a plugin's; None if there is none.

        A plugin that cannot be loaded, or that has the name of one of comingle's own subcommands, becomes a subcommand
        that raises this error when called.
        """
        plugin = registry.find_plugins(GROUP).get(cmd_name)
        function = self.core_functions.get(cmd_name)
        if plugin is not None:
            try:
                if function is not None:
                    raise registry.name_conflict(plugin)
                function = _load_plugin_function(plugin, cmd_name)
            except PluginError as error:
                return _build_broken_command(cmd_name, error)
        if function is None:
            return None
        if self._only_help_texts:  # while the list of all subcommands is printed
            return TyperCommand(cmd_name, help=getdoc(function))
        return _build_command(cmd_name, function)


class _Command(TyperCommand):
    """A command that answers the unknown option ``--method fedavg`` with the hint ``--set method=fedavg``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read options and arguments of a command line; hint at ``--set method=NAME`` if ``--method`` is unknown."""
        given_args = list(args)  # click removes from ``args`` what it has read
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            options = {option for parameter in self.params for option in parameter.opts}
            takes_method_from_recipe = "--set" in options and "--methods" not in options  # as ``comingle run``
            unknown_option = getattr(error, "option_name", "")  # only NoSuchOption of click has it
            if unknown_option == "--method" and takes_method_from_recipe:
                hint = f"--set method={_value_after('--method', given_args)}"
                vars(error).update(possibilities=[hint])  # click prints it as "Did you mean ...?"
            raise


def _load_plugin_function(plugin: registry.Plugin, name: str) -> Callable[..., object]:
    """Return the function of a plugin's subcommand.

    Raises:
        PluginError: The plugin cannot be loaded, or is not a function.
    """
    function = plugin.load()
    if not callable(function):
        raise PluginError(f"{GROUP}: {name!r} is {type(function).__name__}; allowed: a function for typer")
    return function


def _value_after(option: str, args: Sequence[str]) -> str:
    """Return the value of an option in the arguments of a command; "NAME" if it has none.

    Args:
        option: The option, such as "--method".
        args: Arguments such as ``["--method", "fedavg"]`` or ``["--method=fedavg"]``.
    """
    for position, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        is_last = position + 1 == len(args)
        if arg == option and not is_last:
            return args[position + 1]
    return "NAME"


def _build_command(name: str, function: Callable[..., object], **settings: Any) -> Any:
    """Return the click command of a function, with the option ``--plugin`` added and with help for its arguments.

    Args:
        name: Name of the command.
        function: The function, with options declared as for typer. Its docstring is the help text.
        settings: Settings for typer, which replace those made here, such as the help text.
    """
    single_app = typer.Typer(add_completion=False)  # typer builds commands of apps only
    all_settings: dict[str, Any] = {"cls": _Command, "help": _join_lines(getdoc(function) or "")}
    all_settings.update(settings)
    single_app.command(name, **all_settings)(function)
    command = typer.main.get_command(single_app)
    has_plugin_option = any("--plugin" in parameter.opts for parameter in command.params)
    if not has_plugin_option:
        command.params.append(_plugin_option())
    declared_parameters = get_params_from_function(function)
    for parameter in command.params:  # typer before 0.21 with click 8.5 drops the help of arguments
        if isinstance(parameter, TyperArgument) and not parameter.help:
            parameter.help = declared_parameters[parameter.name].default.help
    return command


def _plugin_option() -> Any:
    """Return the option ``--plugin``, which loads a user's own methods before a command reads its other options."""

    def load_files(context: Any, paths: list[Path] | None) -> None:
        """Load the files; typer calls it as the option's callback."""
        is_shell_completion = context.resilient_parsing  # the shell asks for completions; no command will run
        if not paths or is_shell_completion:
            return
        from comingle.methods.user_files import load_file

        for path in paths:
            load_file(path)

    option = typer.Option(
        None,
        "--plugin",
        metavar="<file>",
        help="Load your own methods from a Python file (repeatable).",
        expose_value=False,
        is_eager=True,
        callback=load_files,
        show_default=False,
    )

    def command(plugin: list[Path] | None = option) -> None: ...

    # The option is taken from a command that typer builds, as its option class takes other arguments in each version.
    single_app = typer.Typer(add_completion=False)
    single_app.command()(command)
    parameters = typer.main.get_command(single_app).params
    return next(parameter for parameter in parameters if "--plugin" in parameter.opts)


def _join_lines(text: str) -> str:
    """Join the lines of each paragraph, for terminals of any width; paragraphs with lists or indents are unchanged."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        has_list_or_indent = "\n-" in paragraph or "\n " in paragraph
        paragraphs.append(paragraph if has_list_or_indent else paragraph.replace("\n", " "))
    return "\n\n".join(paragraphs)


def _build_broken_command(name: str, error: PluginError) -> object:
    """Return the command of a plugin that cannot be loaded: called with any arguments, it raises ``error``."""

    def raise_error() -> None:
        raise error

    accept_any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _build_command(
        name, raise_error, help=str(error), add_help_option=False, context_settings=accept_any_arguments
    )


COMMANDS = (
    demo, run, compare, advise, methods, data, cost, show, report, plot, export, evaluate, join, leave, audit,
    chat, serve, live, federate, server, client, status, bundle,
)  # fmt: skip


class CoreCommands(CommandGroup):
    """The core's commands, in the order in which they are listed."""

    core_functions = MappingProxyType({verb.__name__: verb for verb in COMMANDS})


app = typer.Typer(
    name="comingle",
    cls=CoreCommands,
    help="Fine-tune one small language model with many users, each on private text; every user gets a personal model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_given: bool) -> bool:
    """Print the version and exit if ``--version`` is given; the option's callback."""
    if is_given:
        typer.echo(f"comingle {__version__}")
        raise typer.Exit
    return is_given


@app.callback(invoke_without_command=False)
def _options(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is loaded, and from where."),
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    """Set up logging of warnings, and with ``--verbose`` also of comingle's informative messages.

    The callback of ``--version`` has already handled that option.
    """
    logging.basicConfig(level=logging.WARNING)
    formatter = _JsonFormatter() if options.logs_json() else _Formatter("%(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.getLogger("comingle").setLevel(logging.INFO if verbose else logging.WARNING)


class _Formatter(logging.Formatter):
    """Formatter that marks warnings and escapes control characters, as messages contain names and paths."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "warning: " if record.levelno == logging.WARNING else ""
        return prefix + printable(super().format(record), keep="\n\t")


_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "is_an_event"}
"""Attributes of every log record, and the mark of events."""


class _JsonFormatter(logging.Formatter):
    """Formatter that writes a record as one JSON object, with the fields of ``extra`` and without users' names."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return options.json_line(record.levelname.lower(), record.getMessage(), **fields)


def _print_error_line(line: str, level: str) -> None:
    """Print a line of ``comingle`` to standard error, as JSON if logs are JSON.

    Args:
        line: The line, without the program's name.
        level: Its level in JSON.
    """
    as_json = os.environ.get(options.LOG_VARIABLE) == "json"
    print(options.json_line(level, line) if as_json else f"comingle: {line}", file=sys.stderr)


_RESUME_HINTS = {
    **dict.fromkeys(("client", "live", "server"), "; run the same command again to continue"),
    **dict.fromkeys(
        ("compare", "demo", "federate", "reproduce", "run"),
        "; run the same command with --resume to continue from the last checkpoint",
    ),
}
"""Hint on how to continue an interrupted command, for commands that can continue."""

_SERVICES = ("serve", "live", "server", "client")
"""Commands that run until they are stopped: exit code 0 after SIGTERM, with which service managers stop them."""

_SIGTERM_CODE = 128 + signal.SIGTERM
"""Exit code of other commands after SIGTERM, as in a shell."""


def _called_command() -> str:
    """Return the name of the called command; empty if there is none."""
    return next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")


def _handle_sigterm(command: str) -> AbstractContextManager[threading.Event]:
    """Return a context in which SIGTERM interrupts a command that has something to save or to end, such as processes.

    In processes that a launcher has started, SIGTERM ends the process at once: it may wait for another one.

    Args:
        command: Name of the command.
    """
    has_launcher = "RANK" in os.environ
    if has_launcher or command not in (*_SERVICES, "run", "federate"):
        return nullcontext(threading.Event())  # the event is never set
    return interrupt_on_sigterm()


def _replace_unknown_characters() -> None:
    """Print ``?`` for characters that the output encoding lacks instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Run the command line, and turn errors into messages and exit codes.

    Exit codes: 2 for an error that the user can correct, with one line of text; 130 for an interrupt; after SIGTERM 0
    for services and 143 for runs; 1 if the output goes to a pipe whose reader has closed it. Other errors are bugs and
    print a traceback.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read when tokenizers is imported
    _replace_unknown_characters()
    command = _called_command()
    with _handle_sigterm(command) as got_sigterm:
        try:
            require_docstrings()  # before torch is imported, which takes seconds without its cached bytecode
            app()
        except BrokenPipeError:  # the reader has closed the pipe, as in `comingle methods | head -1`
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, sys.stdout.fileno())  # otherwise the flush at exit fails, too
            raise SystemExit(1) from None
        except (KeyboardInterrupt, SystemExit) as stop:
            was_interrupted = isinstance(stop, KeyboardInterrupt) or stop.code == 130  # typer converts interrupts
            if not was_interrupted:
                raise
            _exit_after_interrupt(command, by_sigterm=got_sigterm.is_set())
        except Exception as error:
            _exit_after_error(error)


def _exit_after_interrupt(command: str, *, by_sigterm: bool) -> NoReturn:
    """Print one line, and exit with the code of an interrupted command.

    Args:
        command: Name of the command.
        by_sigterm: Whether the process got SIGTERM; otherwise Ctrl-C.
    """
    if should_print_errors(interrupted=True):  # of several processes only the first
        if not by_sigterm:
            print(file=sys.stderr)  # the terminal shows "^C" on the current line
        cause = "stopped by SIGTERM" if by_sigterm else "stopped"
        _print_error_line(f"{cause}{_RESUME_HINTS.get(command, '')}", "info")
    if not by_sigterm:
        raise SystemExit(130) from None
    raise SystemExit(0 if command in _SERVICES else _SIGTERM_CODE) from None


def _exit_after_error(error: Exception) -> NoReturn:
    """Print the problems that the user can correct, and exit with code 2; raise other errors, which are bugs."""
    message = _message_to_user(error)
    if message is None:
        raise error
    if should_print_errors():  # of several processes with the same error only the first
        problems = [message]
        if isinstance(error, RecipeError) and len(error.problems) > 1:
            problems = list(error.problems)
        for problem in problems:
            _print_error_line(printable(problem), "error")
    raise SystemExit(2) from None


def _message_to_user(error: Exception) -> str | None:
    """Return the line to print for an error that a user can correct; None for a bug."""
    if isinstance(error, UnknownMethodError):
        return f"{error}; load your own method with --plugin FILE"
    if isinstance(error, ComingleError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # raised by the system, not by a library
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if not names:
            return error.strerror
        return f"{' to '.join(names)}: {error.strerror}"  # "a to b: ..." if a file is moved
    if lacks_memory(error):
        return f"out of memory ({str(error) or 'no details'}); `comingle cost` estimates what a recipe needs"
    return None
