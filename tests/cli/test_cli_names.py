"""Names, paths and texts are printed as they are: never as markup, never as commands to the terminal."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from comingle.cli.training import warn_overlaps
from comingle.data.populations import as_users
from comingle.data.splits import UserText
from comingle.reports.tables import render_run
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND as TEXT
from comingle.utils.terminal import Terminal, literal_text, printable

MARKUP = "[/red]x"
RED = "\x1b[31mred\x07\x9b2J"
SHOWN = r"\x1b[31mred\x07\x9b2J"
COMMANDS = [*map(chr, range(32)), "\x7f", "\x9b", "\u202e"]


def harmless(text: str) -> bool:
    return not any(sign in text for sign in COMMANDS if sign != "\n")


def test_characters_that_a_terminal_obeys_become_escapes() -> None:
    assert printable(RED) == SHOWN
    assert printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("a\nb\u2028c\u202ed\udc80") == r"a\nb\u2028c\u202ed\udc80"
    assert printable("grüße 你好 हिन्दी שלום 👩‍👩‍👧") == "grüße 你好 हिन्दी שלום 👩‍👩‍👧"
    assert printable(printable(RED)) == printable(RED)
    assert literal_text(MARKUP).plain == MARKUP


def test_a_console_obeys_nothing_that_it_prints() -> None:
    """Whatever way a text takes to it: as words, in a table, in its title, in a column's head, as rich's own text."""
    ours = Terminal(width=100, color_system="truecolor", force_terminal=True)
    table = Table(f"{MARKUP}{RED}", title=f"{MARKUP}{RED}", caption=f"{MARKUP}{RED}")
    table.add_row(f"{MARKUP}{RED} :llama:")
    with ours.capture() as captured:
        ours.print(f"{MARKUP}{RED}", table, style="bold", highlight=False)
    plain = captured.get()
    assert "\x1b[31m" not in plain
    assert "\x1b[1m" in plain  # our own style
    assert plain.count("[/red]x") == 5
    assert plain.count(r"\x1b[31mred") == plain.count(r"\x07\x9b2J") == 5
    assert ":llama:" in plain


@pytest.fixture
def marked(recipe_file: Path) -> Path:
    """A recipe one of whose users is called like markup."""
    content = yaml.safe_load(recipe_file.read_text())
    content["data"]["users"] = {"ann": "texts/ann.txt", MARKUP: "texts/bob.txt"}
    content["training"]["rounds"] = 1
    recipe_file.write_text(yaml.safe_dump(content))
    return recipe_file


@pytest.mark.slow
def test_a_user_called_like_markup_is_called_so_everywhere(comingle: Any, marked: Path, tmp_path: Path) -> None:
    place = tmp_path / "[bold]runs[/]"
    for command in (
        ("data", marked),
        ("cost", marked),
        ("run", marked, "--out", place / "one"),
        ("show", place / "one"),
        ("compare", marked, "--methods", "pretrained,local", "--seeds", "0", "--out", place / "both"),
        ("show", place / "both"),
        ("report", place / "both", "--no-tokens"),
        ("plot", place / "both", "--figure", "curves"),
    ):
        answer = comingle(*command)
        assert (answer.code, answer.err) == (0, ""), command
        assert command[0] in {"report", "plot"} or MARKUP in answer.out, command
        assert command[0] in {"data", "cost", "show"} or "[bold]runs[/]" in answer.out, command


def test_folders_and_mistakes_do_not_command_the_terminal(
    comingle: Any, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / RED
    answer = comingle("run", recipe_file, "--set", "method=pretrained", "--out", folder)
    assert answer.code == 0
    assert SHOWN in answer.out.replace("\n", "")
    assert harmless(answer.out)
    for wrong in (
        ("run", recipe_file, "--out", folder),
        ("run", tmp_path / f"{RED}\n.yaml"),
        ("show", f"{folder}-none"),
        ("run", recipe_file, "--set", f"data.users.{RED}=1"),
        ("compare", recipe_file, "--methods", RED),
    ):
        answer = comingle(*wrong)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
        assert harmless(answer.err)


def test_results_of_strangers_do_not_command_the_terminal(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    """A run folder may come from somebody else."""
    run = tmp_path / "run"
    assert comingle("run", recipe_file, "--set", "method=pretrained", "--out", run).code == 0
    for name in ("metrics.json", "events.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace('"ann"', json.dumps(f"{MARKUP}{RED}")).replace("random:llama", "[/]b"))
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    evaluation = next(line for line in events if '"event": "evaluation"' in line)
    (run / "events.jsonl").write_text("".join([*events, evaluation]))  # two, for the table of rounds
    answer = comingle("show", run)
    assert answer.code == 0, answer.err
    assert answer.out.count(f"{MARKUP}{SHOWN}") == 2
    assert harmless(answer.out)
    theirs = Console(width=160, color_system=None)  # as anybody may print our tables, in a notebook for one
    with theirs.capture() as captured:
        theirs.print(render_run(json.loads((run / "metrics.json").read_text())))
    assert f"{MARKUP}{SHOWN}" in captured.get()
    assert "[/]b" in captured.get()


def test_warnings_are_printed_as_they_are(
    comingle: Any, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = UserText(name=f"{MARKUP}{RED}", train=("same",), valid=("same",), test=("other",))
    warn_overlaps(RunData(kind=TEXT, base=None, texts=(text,), users=as_users(())))
    said = capsys.readouterr().err
    assert said.startswith(f"warning: user {MARKUP}{SHOWN}: 1 of 1 validation and 0 of 1 test documents")
    assert said.count("\n") == 1
    many = tuple(replace(text, name=f"user-{number}") for number in range(25))
    warn_overlaps(RunData(kind=TEXT, base=None, texts=many, users=as_users(())))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11
    assert said[-1].startswith("warning: ")
    assert said[-1].endswith("15 more users")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    comingle("methods")
    record = logging.LogRecord("comingle", logging.WARNING, "", 0, "user %s is left out", (RED,), None)
    assert handler.format(record) == f"warning: user {SHOWN} is left out"
