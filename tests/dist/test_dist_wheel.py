"""The wheel as users get it: built, looked into, installed where there is nothing else, and run.

Marked slow: it downloads the build tools and every dependency (PyTorch in the version that constraints.txt pins), as
`pip install comingle` does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
SMOKE = {
    "base": "random:llama?layers=1&dim=32",
    "data.max_train_tokens": 4000,
    "data.max_valid_tokens": 500,
    "data.max_test_tokens": 500,
    "training.rounds": 1,
    "training.local_steps": 1,
    "training.context": 32,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    ran(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY, at=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel of comingle-papers."""
    folder = tmp_path_factory.mktemp("papers")
    ran(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY / "papers", at=folder)
    return folder


@pytest.fixture(scope="module")
def scripts(wheel: Path, papers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with both wheels and what they require: no extra, nothing of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    ran(sys.executable, "-m", "venv", folder, at=folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    ran(*pip, "-c", REPOSITORY / "constraints.txt", wheel, *papers.glob("*.whl"), at=folder)
    return folder / "bin"


def ran(*command: object, at: Path) -> str:
    """What a command prints that succeeds; it sees no path of this process."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "COMINGLE_NO_TYPECHECK"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([str(word) for word in command], cwd=at, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_have_what_they_should_and_nothing_else(built: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        packed = set(content.namelist())
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    code = {path for path in tracked("src") if path != ".gitignore"}
    recipes = {f"comingle/shipped_recipes/{path}" for path in tracked("recipes")}
    assert {name for name in packed if ".dist-info/" not in name} == code | recipes
    assert "comingle/py.typed" in packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "recipes/demo.yaml"} <= source
    allowed = set(tracked(".")) | {"PKG-INFO"}
    assert sorted(source - allowed) == []


def test_the_papers_have_their_recipes_and_measured_runs(papers: Path) -> None:
    (wheel,) = papers.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if ".dist-info/" not in name}
    recipes = {f"comingle_papers/shipped_recipes/{path}" for path in tracked("papers/recipes")}
    measured = {f"comingle_papers/shipped_measured/{path}" for path in tracked("papers/measured")}
    assert packed == set(tracked("papers/src")) | recipes | measured


def test_the_index_would_take_all(built: Path, papers: Path) -> None:
    ran(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), *papers.iterdir(), at=built)


def tracked(folder: str) -> list[str]:
    """The files of a folder that git knows of."""
    return ran("git", "ls-files", "--cached", at=REPOSITORY / folder).splitlines()


def test_what_is_installed_fits_together(scripts: Path, tmp_path: Path) -> None:
    assert "No broken requirements" in ran(scripts / "python", "-m", "pip", "check", at=tmp_path)
    where = ran(scripts / "python", "-c", "import comingle; print(comingle.__file__)", at=tmp_path)
    assert Path(where.strip()).is_relative_to(scripts.parent)


def test_the_demo_runs_at_smoke_size(scripts: Path, tmp_path: Path) -> None:
    changes = [word for key, value in SMOKE.items() for word in ("--set", f"{key}={value}")]
    shown = ran(scripts / "comingle", "demo", "--quiet", "--out", tmp_path / "demo", *changes, at=tmp_path)
    assert all(method in shown for method in ("pretrained", "local", "fedavg", "comigs-1g1s"))
    assert (tmp_path / "demo" / "table.json").is_file()


def test_the_commands_of_the_papers_are_there(scripts: Path, tmp_path: Path) -> None:
    shown = ran(scripts / "comingle", "reproduce", at=tmp_path)
    assert "comigs/table3" in shown


def test_the_quickstart_runs(scripts: Path, tmp_path: Path) -> None:
    quickstart = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert quickstart is not None
    (tmp_path / "quickstart.py").write_text(quickstart[1], encoding="utf-8")
    shown = ran(scripts / "python", "quickstart.py", at=tmp_path)
    assert re.search(r"test perplexity \d+\.\d", shown)
