"""Every command and every Python example that README and docs show is run, and every recipe is read."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from documents import DOCS, PAGES, README, REPOSITORY, RESEARCH, blocks, read, table_at
from PIL import Image
from typer.testing import CliRunner

from comingle.cli import CoreCommands, app
from comingle.config import parse_recipe

# What a command gets on top where it would need the pretrained model, or minutes.
TINY = {
    "base": "random:llama?layers=1",
    "data.max_train_tokens": 300,
    "data.max_valid_tokens": 100,
    "data.max_test_tokens": 100,
    "training.rounds": 1,
    "training.local_steps": 1,
    "training.batch_size": 1,
    "training.context": 16,
    "runtime.threads": 1,
}
NOT_OF_CHATS = {key for key in TINY if key.startswith("data.")} | {"training.local_steps", "training.context"}
SMALL_THEORY = {
    "quadratic": {"instances": 2, "mismatches": [0], "steps": 8},
    "linear": {"instances": 1, "samples": 8, "losses": ["squared"], "decays": [1.0], "steps": 4},
}
RESULTS = RESEARCH / "results.md"
FASTEST_COLUMN = {"comigs": "ag-news", "floral": "linear"}


def commands(page: Path) -> list[tuple[str, ...]]:
    """A page's command lines that begin with ``comingle``."""
    whole = [block.replace("\\\n", " ") for block in shown(page, "bash")]  # a command may go on in the next line
    lines = [line for block in whole for line in block.splitlines() if line.startswith("comingle ")]
    return [tuple(shlex.split(line, comments=True)[1:]) for line in lines]


def verbs() -> set[str]:
    """The core's, and those that this project's own plug-in adds."""
    points = tomllib.loads((REPOSITORY / "papers" / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    return set(CoreCommands.core_functions) | set(points["comingle.verbs"])


def shown(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return blocks(read(page), language)


def shortened(words: tuple[str, ...]) -> list[str]:
    """The same command on toy models and little text."""
    verb, extra = words[0], []
    # They need the pretrained model, another process, a run of more than one round, a package index, lm-eval, or data
    # of a benchmark.
    alone = ("demo", "server", "client", "join", "audit", "bundle", "evaluate", "live")
    if (
        verb in alone
        or any(name in word for word in words for name in ("fed_aya", "fed-aya", "finance"))
        or any("run-*" in word for word in words)  # the model that a client's federation has left
        or words[1:2] in (("ada",), ("ben",))  # a client's state folder
        or words[:2] == ("leave", "runs/federation")  # a server's folder
        or "--push" in words  # to the hub
        or (verb == "serve" and "--make-keys" not in words)
        or (verb == "federate" and "--set" not in words)
    ):
        extra = ["--help"]
    elif verb in ("run", "compare", "data", "cost", "advise"):
        given = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--set"}
        fitting = TINY if "photos.yaml" not in words else {"training.rounds": 1, "runtime.threads": 1}
        chats = "chats.yaml" in words
        tiny = {k: v for k, v in fitting.items() if k not in given and not (chats and k in NOT_OF_CHATS)}
        extra = [part for key, value in tiny.items() for part in ("--set", f"{key}={value}")]
        extra += ["--rounds", "2"] if verb == "advise" else []
        extra += ["--out", "runs/shared"] if verb == "run" and "--processes" in words else []  # another page has run it
    elif verb == "report":
        extra = ["--force", *([] if "--no-tokens" in words else ["--tokens", "4", "--users", "ada"])]
    elif verb == "plot":
        extra = ["--force", *([] if "--figure" in words else ["--figure", "scores"])]
    elif verb == "theory":
        extra = ["theory.yaml"]
    elif verb == "reproduce" and "smoke" in words:
        extra = ["--columns", FASTEST_COLUMN[words[1].partition("/")[0]]]
    elif verb == "reproduce" and len(words) > 1 and ("--measured" not in words or "--data" in words):
        extra = [] if "--dry-run" in words else ["--dry-run"]
    return [*words, *extra]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the recipes that pages name in their first line, and text for their users."""
    for page in PAGES:
        for block in shown(page, "yaml"):
            if named := re.match(r"# (\w+\.yaml)\n", block):
                (tmp_path / named[1]).write_text(block)
    (net,) = [block for block in shown("samples.md", "python") if block.startswith("# net.py\n")]
    (tmp_path / "net.py").write_text(net)
    (tmp_path / "theory.yaml").write_text(yaml.safe_dump(SMALL_THEORY))
    texts = tmp_path / "texts"
    (texts / "ada").mkdir(parents=True)
    prose = [f"Line {i} of a text that is private, as {i * i} other lines are.\n\n" for i in range(60)]
    for name in ("ada/one.txt", "ben.txt", "dora-old.txt", "dora-new.txt"):
        (texts / name).write_text("".join(prose))
    (texts / "cleo.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in prose))
    for number, image in enumerate(
        f"{user}/{kind}/{i}.png" for user in ("ada", "bob") for kind in ("cat", "dog") for i in range(10)
    ):
        (tmp_path / "photos" / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (6 * number, 0, 0)).save(tmp_path / "photos" / image)
    (tmp_path / "chats").mkdir()
    for name in ("ada", "ben"):
        rows = [{"prompt": f"{name} asks {i}", "response": f"{i * i}"} for i in range(12)]
        (tmp_path / "chats" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in re.findall(r"`([\w/]+\.jsonl\.xz)`", table_at(read("results.md"), "| path | rows |")):
        (tmp_path / "FOLDER" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "FOLDER" / path).touch()  # enough for --dry-run
    shutil.copytree(REPOSITORY / "papers" / "measured", tmp_path / "papers" / "measured")
    (tmp_path / "examples").mkdir()
    shutil.copy(REPOSITORY / "examples" / "own_method.py", tmp_path / "examples")
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    threads, logger = torch.get_num_threads(), logging.getLogger("comingle")
    level = logger.level
    yield tmp_path
    torch.set_num_threads(threads)
    logger.setLevel(level)


def runs(words: tuple[str, ...]) -> None:
    """A command, in its short form, succeeds and says something."""
    if words[0] == "run" and "--processes" in words:  # which start the command line of their program once more
        ended = subprocess.run([sys.executable, "-m", "comingle", *shortened(words)], capture_output=True, text=True)
        assert ended.returncode == 0, (words, ended.stderr)
        return
    done = CliRunner().invoke(app, shortened(words))
    assert done.exit_code == 0, (words, done.output, done.exception)
    assert done.stdout.strip(), words


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_the_commands_that_results_come_from_are_planned() -> None:
    """Each takes minutes to hours: ``--dry-run`` reads its recipe and lists its runs."""
    found = commands(RESULTS)
    assert len(found) > 20
    for words in found:
        runs(words)


@pytest.mark.usefixtures("place")
def test_the_commands_of_the_first_page_run() -> None:
    found = commands(README)
    assert len(found) >= 5
    for words in found:
        runs(words)


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(place: Path) -> None:
    """Page after page as a reader meets them; what stands on two pages is run once, but for what needs --resume."""
    found = list(dict.fromkeys(words for page in PAGES if page != RESULTS for words in commands(page)))
    later = ("show", "report", "plot", "export", "status")  # of runs that an earlier page has made
    found.sort(key=lambda words: words[0] in later)
    assert {words[0] for words in found} == verbs()
    for words in found:
        runs(words)
    folders = [place / "runs" / name for name in ("friends-comigs-1g1s-seed0", "short", "compare-friends")]
    assert all(folder.is_dir() for folder in folders)
    written = {path.name for path in folders[0].iterdir()}
    listed = {name.rstrip("/") for name in re.findall(r"^\| `([\w.]+/?)`", read("running.md"), re.MULTILINE)}
    made = {"recipe.yaml", "events.jsonl", "metrics.json", "checkpoints"}
    assert made <= {name for name in written if not name.startswith(".")} <= listed  # some are there at times
    assert {path.name for path in folders[2].glob("table.*")} == {"table.md", "table.json"}


def warned(text: str) -> list[str]:
    """What is said in lines besides how long evaluations take: most of the time, of toys."""
    return [line for line in text.splitlines() if not line.startswith("evaluation will take ")]


EXAMPLES = """
import json, sys
for code in json.load(sys.stdin):
    exec(code, {})
"""


@pytest.mark.slow
def test_the_python_examples_run_as_they_are_printed(tmp_path: Path) -> None:
    """Those of a page one after the other, both pages in one process: importing takes longest."""
    pages = [shown(README, "python"), shown(DOCS / "python.md", "python")]
    assert [len(found) for found in pages] == [1, 11]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # one: best for a toy
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES],
        input=json.dumps(["".join(found) for found in pages]),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    of_toys = "little test data", "routers have stayed uniform"
    told = [line for line in warned(done.stderr) if not any(words in line for words in of_toys)]
    assert (done.returncode, told) == (0, [])
    assert re.search(r"^ada: test perplexity [\d.]+ with CoMiGS, [\d.]+ alone\n", done.stdout)
    assert re.search(r"^fedavg [\d.]+$", done.stdout, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert len(pages[0][0].splitlines()) <= 25


def test_no_other_page_has_python_examples_that_nobody_runs() -> None:
    """Those in own-method.md are pieces of files: see ``test_docs_readme.py``; the one in serving.md asks a server;
    that in scale.md is run by ``tests/training/storage/test_store_crowds.py``, and that in install.md by
    ``tests/dist/test_dist_device.py``.
    """
    assert {page.name for page in PAGES if shown(page, "python")} == {
        "README.md",
        "install.md",
        "python.md",
        "own-method.md",
        "samples.md",
        "conversations.md",
        "federation.md",
        "serving.md",
        "scale.md",
    }


def test_every_yaml_is_a_recipe_or_a_piece_of_one() -> None:
    found = [yaml.safe_load(block) for page in PAGES for block in shown(page, "yaml") if page.name != "federation.md"]
    data = [parse_recipe({"data": {"task": "mnist"}, **content}).data for content in found]
    held_out = [getattr(one, "held_out", "") for one in data]
    assert len(held_out) > 5
    assert "mixture" in held_out


@pytest.mark.slow
def test_a_federation_is_run_and_its_files_are_read_as_its_page_says(place: Path) -> None:
    """Of real processes: a server, and three users."""
    pytest.importorskip("flwr")
    from comingle.federation.files import load_plan
    from comingle.federation.participant import load_participant

    page = DOCS / "federation.md"
    coordinator, with_conversations, participant, rounds, _by_user = shown(page, "yaml")
    (place / "continuous.yaml").write_text(f"{coordinator}\n{rounds}", encoding="utf-8")
    assert load_plan(place / "continuous.yaml", continuous=True).rounds is not None
    (place / "chats.yaml").write_text(with_conversations, encoding="utf-8")
    (place / "federation.yaml").write_text(coordinator, encoding="utf-8")
    (place / "participant.yaml").write_text(participant, encoding="utf-8")
    assert load_plan(place / "federation.yaml").users == ("ada", "ben", "cem")
    assert load_plan(place / "chats.yaml").users == ("north", "south", "west")
    assert load_participant(place / "participant.yaml").state == str(place)
    words = commands(page)[0]
    assert words[0] == "federate"
    runs((*words, *(part for key, value in TINY.items() for part in ("--set", f"{key}={value}"))))
    for code in shown(page, "python"):  # the user's model, and what was sent
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=place, capture_output=True, text=True)
        assert (done.returncode, warned(done.stderr)) == (0, [])
        assert done.stdout.strip()


@pytest.mark.slow
def test_conversations_become_personal_models_as_their_page_says(place: Path) -> None:
    page = DOCS / "conversations.md"
    for words in commands(page):
        runs(words)
    code = "\n".join(shown(page, "python"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=place, capture_output=True, text=True)
    assert (done.returncode, warned(done.stderr)) == (0, [])
    assert done.stdout.strip()
