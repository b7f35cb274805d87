"""A client on a small device: the packages that it needs, for which processors there are wheels, and other systems."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.dist.like_windows import open_as_windows
from tests.federation.test_federate import assert_equal, nothing_is_left, recipe_of
from tests.federation.test_out_there import MAIN, SECONDS, Place, command

from comingle.federation.flower.client_app import DIGEST, build_bundle
from comingle.runs import api
from comingle.utils.records import to_disk

__all__ = ["nothing_is_left"]  # around each of these tests

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UNUSED = {"scipy"}
"""Dependencies that docs/install.md removes from a small device."""
NEEDED = [r for r in PROJECT["dependencies"] if Requirement(r).name not in UNUSED]
NEEDED += PROJECT["optional-dependencies"]["device"]
(FLOWER,) = (r for r in PROJECT["optional-dependencies"]["flower"] if Requirement(r).name == "flwr")


def with_dependencies(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions of this environment that some requirements need, by name."""
    found: dict[str, Distribution] = {}
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_asked and name not in found:
            found[name] = distribution(name)
            left += [Requirement(text) for text in found[name].requires or ()]
    return found


def link(package: Distribution, folder: Path) -> None:
    """Link what a distribution has installed; packages of a namespace one by one."""
    paths = [path for path in package.files or () if path.parts[0] not in ("..", "__pycache__")]
    files = {str(path) for path in paths}
    for path in paths:
        is_namespace = len(path.parts) > 2 and f"{path.parts[0]}/__init__.py" not in files
        entry = Path(*path.parts[: 2 if is_namespace and not path.parts[0].endswith("-info") else 1])
        target = folder / entry
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.symlink_to(package.locate_file(entry))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the packages of the extra ``device``, flwr itself, and nothing else."""
    folder = tmp_path_factory.mktemp("device")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in (*with_dependencies(NEEDED).values(), distribution("flwr"), distribution("comingle")):
        link(package, packages)
    for path in packages.glob("*comingle*.pth"):
        path.unlink()  # another checkout may be installed
    (packages / "this.pth").write_text(f"{REPOSITORY / 'src'}\n")
    return folder / "bin" / "python"


def check_clients(folder: Path, start: Sequence[object]) -> None:
    """Clients that are started like this take part in a federation, which ends with the tensors of a simulation."""
    recipe = recipe_of(folder, "comigs-1g1s")
    api.run(recipe, out=folder / "together")
    here = Place.of(folder, recipe)
    with (
        command(folder, "server", *here.server()) as server,
        command(folder, "ann", *here.client("ann", here.port), start=start) as ann,
        command(folder, "bob", *here.client("bob", here.port), start=start) as bob,
    ):
        assert server.wait(SECONDS) == 0
        assert [process.wait(60) for process in (ann, bob)] == [0, 0]
    assert_equal(folder / "together", folder / "apart")


@pytest.mark.slow
def test_a_client_takes_part_with_the_packages_of_the_extra(device: Path, tmp_path: Path) -> None:
    check_clients(tmp_path, ("env", "--unset=PYTHONPATH", device, "-c", MAIN))


@pytest.mark.slow
def test_the_packages_of_the_extra_are_no_more_than_it_needs(device: Path) -> None:
    """Without any one of them the client does not start; the other commands say which extra has the rest."""
    hidden = "import sys; sys.modules[sys.argv[1]] = None; import comingle.federation.client_command"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    modules = {"grpcio": "grpc", "protobuf": "google.protobuf", "pycryptodome": "Crypto"}
    for text in PROJECT["optional-dependencies"]["device"]:
        name = Requirement(text).name
        done = subprocess.run([device, "-c", hidden, modules.get(name, name)], env=environment, capture_output=True)
        assert b"ModuleNotFoundError" in done.stderr, name
    whole = subprocess.run([device, "-m", "comingle", "server"], env=environment, capture_output=True, text=True)
    assert whole.returncode == 2
    assert whole.stderr.startswith("comingle: alembic is not installed")
    assert "comingle[flower]" in whole.stderr


LOADED = """\
import sys
import comingle.cli, comingle.federation.client_command
from comingle.models.pretrained import import_lean
import_lean()
import comingle.federation.client, comingle.methods.user_files
print(*(name for name in sys.modules if name.partition(".")[0] not in ("comingle", "__main__")))
"""
"""Prints the modules of other packages that a client loads."""


@pytest.mark.slow
def test_a_client_takes_part_without_what_windows_lacks(tmp_path: Path) -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    (tmp_path / "modules.txt").write_text(loaded)
    like_windows = (sys.executable, Path(__file__).with_name("like_windows.py"), tmp_path / "modules.txt")
    check_clients(tmp_path, (*like_windows, MAIN))


def test_windows_flushes_files_only_and_has_the_same_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", open_as_windows)
    with pytest.raises(PermissionError):
        to_disk(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    to_disk(tmp_path)
    assert hashlib.sha256(build_bundle()).hexdigest() == DIGEST


@pytest.mark.slow
def test_the_page_lists_the_packages_and_prints_their_sizes(device: Path) -> None:
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = subprocess.run([device, "-c", script], capture_output=True, text=True, check=True).stdout
    sizes = {name: float(size) for size, name in map(str.split, printed.splitlines())}
    listed = re.findall(r"\| ([\w-]+) \| ([\d.]+) (?=\|)", page)
    assert len(listed) == 33
    assert {name for name, _ in listed} <= sizes.keys()
    assert next(iter(sizes)) == "torch"
    assert sizes.pop("total") == pytest.approx(sum(sizes.values()), abs=5)
    (command,) = re.findall(r"pip install --no-deps \"(.*)\"", page)
    assert command == FLOWER


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The newest pip, which downloads no wheel whose dependencies an index lists; skipped without an index."""
    python = tmp_path_factory.mktemp("pip") / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "0", "install", "--quiet"]
    subprocess.run([*command, "--upgrade", "pip"], check=True)  # succeeds without an index, too
    look_up = ["--dry-run", "--ignore-installed", "--no-deps", FLOWER]
    done = subprocess.run([*command, *look_up], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    return command


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["torch and flwr", "the rest"])
def test_all_has_wheels_for_64_bit_arm(alone: bool, pip: list[str], tmp_path: Path) -> None:
    """Or is pure Python. flwr is installed alone, and pip would ask for torch's GPU libraries of this processor."""
    torch, *others = with_dependencies(["torch"])
    packages = ["torch", FLOWER] if alone else [*others, *PROJECT["dependencies"], *NEEDED]
    packages = [text for text in packages if alone or Requirement(text).name != torch]
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux2014", "manylinux_2_28")]
    options = ["--dry-run", "--target", tmp_path / "none", "--report", tmp_path / "report.json", "--python-version=3.11"]
    options += ["--only-binary=:all:", *platforms, *(["--no-deps"] if alone else [])]
    done = subprocess.run([*pip, *options, *packages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "report.json").read_text())["install"]
    wheels = {one["metadata"]["name"]: one["download_info"]["url"] for one in chosen}
    assert len(wheels) >= len({Requirement(text).name for text in packages})
    assert all(url.endswith(("_aarch64.whl", "-none-any.whl")) for url in wheels.values()), wheels
    assert wheels["torch" if alone else "numpy"].endswith("_aarch64.whl")
