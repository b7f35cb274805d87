"""The example scripts in notebooks: cell by cell, as somebody types them into Jupyter."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tests.examples.test_examples import EXAMPLES, environment

TABLE = "run.to_pandas()"
WATCHED = "comingle.run(recipe, users=texts, method=near, progress=True)"

NO_WIDGETS = "IProgress not found"
"""What tqdm says of a notebook without ipywidgets where a program imports transformers itself, in two lines."""

TOLD = {
    "own_data.py": (TABLE, r"^ada +[\d,]+ training tokens, test perplexity +[\d.]+$"),
    "own_conversations.py": (TABLE, r"^cem: test perplexity of responses [\d.]+$"),
    "own_model.py": (TABLE, r"^ada's own model names \d+ of 20 new pictures$"),
    "own_method.py": (WATCHED, r"^  near, seed 1: mean test perplexity [\d.]+$"),
    "own_models.py": (WATCHED.replace("near", "chosen"), r"^  chosen, seed 0: mean test perplexity [\d.]+$"),
    "quickstart.py": ("together.to_pandas()", r"^ada's model goes on: '"),
}


def cells(script: str) -> list[str]:
    """A cell for each statement of a script; those of ``main`` and of what runs it are cells too, and not functions."""
    tree = ast.parse(script)
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            found += [ast.unparse(part) for part in node.body[1:]]  # without its docstring
        elif isinstance(node, ast.If):
            found += [said for part in node.body if (said := ast.unparse(part)) != "main()"]
        else:
            found.append(ast.unparse(node))
    return found


def executed(sources: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What stands below each cell."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in book.cells]


def test_every_example_is_here() -> None:
    assert TOLD.keys() == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_an_example_runs_in_a_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing on stderr, and what is shown at its end as a notebook shows it: a table, or progress in one line."""
    more, line = TOLD[name]
    outputs = executed([*cells((EXAMPLES / name).read_text(encoding="utf-8")), more], tmp_path, monkeypatch)
    flat = [output for below in outputs for output in below]
    assert [output for output in flat if output.output_type == "error"] == []
    said = "".join(output.text for output in flat if output.get("name") == "stderr")
    said = re.sub(r"^evaluation will take .*\n", "", said, flags=re.MULTILINE)  # longer than training, of toys
    assert not said or NO_WIDGETS in said
    assert said.count("\n") <= 2
    printed = "".join(output.text for output in flat if output.output_type == "stream")
    assert re.search(line, printed, re.MULTILINE)
    *before, shown = outputs[-1]
    if more.endswith("to_pandas()"):
        assert "ada" in shown.data["text/html"]
    else:
        (progress,) = before
        assert progress.output_type == "display_data"
        assert "done after" in str(progress.data)
        assert re.match(r"Run\((near|chosen) on random:llama", shown.data["text/plain"])
