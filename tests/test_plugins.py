"""Plug-ins as they are installed: packages with entry points on the path of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from comingle.config import load_recipe
from comingle.config.settings import KINDS
from comingle.methods import REGISTRY, make, register, settings_of
from comingle.methods.base import Method
from comingle.methods.baselines import fedavg
from comingle.models import personal
from comingle.models.nets import NETS, make_net
from comingle.runs import api, session
from comingle.training.client import STORES, Store
from comingle.training.events import TRACKERS
from comingle.utils import registry
from comingle.utils.errors import PluginError, RecipeError

REPOSITORY = Path(__file__).parents[1]

HALFWAY = """
    from dataclasses import replace
    from comingle.methods.baselines import fedavg

    def halfway(*, slow: int = 0, share: float = 0.5, word: str = "so"):
        '''Half of everything: the plug-in's own words.

        Nothing more.
        '''
        return replace(fedavg(), name="halfway")

    def bare(*, needed):
        return fedavg()

    def none():
        return None

    number = 3
"""
NETWORK = """
    from math import prod
    from torch import nn

    def narrow(input_shape, outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 2), nn.ReLU(), nn.Linear(2, outputs))
"""
GREET = """
    import typer

    def greet(name: str = typer.Argument("you"), loud: bool = typer.Option(False, "--loud")) -> None:
        '''Say hello.'''
        print(f"hello {name}{'!' if loud else ''}")
"""

# Commands one after another in a fresh process, then the names of all modules that it has imported.
COMMANDS = """
import contextlib, io, json, sys
from comingle.cli import main

answers = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["comingle", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    answers.append((code, *(" ".join(said.getvalue().replace("│", " ").split()) for said in (out, err))))
print(json.dumps([answers, sorted(sys.modules)]))
"""

Answer = tuple[int, str, str]


class Site:
    """A folder like ``site-packages``, searched before any other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
        """A package with entry points by group, and modules."""
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, text in modules.items():
            (self.folder / f"{module}.py").write_text(dedent(text))

    def run(self, code: str, *arguments: str) -> str:
        """What a program prints in which these packages are installed."""
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commands(self, *commands: Sequence[object]) -> tuple[list[Answer], set[str]]:
        """Exit code, and words on stdout and stderr, of each command; and the modules that were imported."""
        words = json.dumps([[str(word) for word in command] for command in commands])
        answers, modules = json.loads(self.run(COMMANDS, words))
        return [(code, out, err) for code, out, err in answers], set(modules)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


# ---------------------------------------------------------------- methods and nets


@pytest.mark.slow
def test_an_installed_method_is_listed_found_and_run_as_the_cores_are(
    site: Site, recipe_file: Path, tmp_path: Path
) -> None:
    site.install("half-package", {"comingle.methods": {"halfway": "half_code:halfway"}}, half_code=HALFWAY)
    out, both = tmp_path / "run", tmp_path / "both"
    tiny = ["--set", "training.rounds=1", "--quiet"]
    run, anew = (["run", recipe_file, "--out", folder, *tiny] for folder in (out, tmp_path / "anew"))
    (listed, told, misspelt, ran, compared, *wrong), _ = site.commands(
        ["methods"],
        ["methods", "halfway"],
        ["methods", "halfwy"],
        [*run, "--set", "method={name: halfway, slow: -3, word: nothing}"],
        ["compare", recipe_file, "--methods", "local,halfway", "--seeds", "0", "--out", both, *tiny],
        [*anew, "--set", "method={name: halfway, slow: 0.5}"],
        [*anew, "--set", "method={name: halfway, slw: 1}"],
    )
    assert listed[0] == told[0] == ran[0] == compared[0] == 0, (ran, compared[0], compared[2])
    assert "halfway Half of everything: the plug-in's own words." in listed[1]
    assert "Nothing more." in told[1]
    assert told[1].endswith("Settings: slow: 0, share: 0.5, word: so")
    assert (misspelt[0], "Did you mean 'halfway'?" in misspelt[2]) == (2, True)
    assert json.loads((out / "metrics.json").read_text())["method"] == "halfway"
    assert [row["method"] for row in json.loads((both / "table.json").read_text())["methods"]] == ["local", "halfway"]
    assert [(code, err.partition(": ")[2]) for code, _, err in wrong] == [
        (2, "method halfway: slow is 0.5; allowed: whole numbers"),
        (2, "method halfway: no setting 'slw'. Did you mean 'slow'? Allowed: share, slow, word"),
    ]

    # It is FedAvg under another name, so the numbers are FedAvg's.
    plain = api.run(load_recipe(recipe_file).with_changes({"method": "fedavg", "training.rounds": 1}))
    assert json.loads((out / "metrics.json").read_text())["users"] == json.loads(json.dumps(plain.metrics["users"]))


@pytest.mark.slow
def test_an_installed_net_is_trained(site: Site, tmp_path: Path) -> None:
    site.install("net-package", {"comingle.nets": {"narrow": "net_code:narrow"}}, net_code=NETWORK)
    recipe = tmp_path / "net.yaml"
    recipe.write_text(
        "base: net:narrow\nmethod: fedavg\ndata: {task: {name: linear, users: 2, clusters: 1, test_samples: 5}}\n"
        "training: {rounds: 1}\nruntime: {device: cpu}\n"
    )
    out = tmp_path / "run"
    (ran, wrong), _ = site.commands(
        ["run", recipe, "--out", out, "--quiet"],
        ["run", recipe, "--out", tmp_path / "no", "--set", "base=net:narow"],
    )
    assert ran[0] == 0, ran
    assert json.loads((out / "metrics.json").read_text())["base"] == "net:narrow"
    assert (wrong[0], "base: no net 'narow'. Did you mean 'narrow'?" in wrong[2]) == (2, True)


@pytest.mark.slow
def test_a_plugin_that_cannot_be_used_is_one_line_where_its_name_is_asked_for(site: Site) -> None:
    points = {
        "fedavg": "half_code:halfway",
        "twice": "half_code:halfway",
        "absent": "half_code:nothing",
        "broken": "broken_code:any",
        "bare": "half_code:bare",
        "none": "half_code:none",
        "number": "half_code:number",
    }
    site.install("one", {"comingle.methods": points}, half_code=HALFWAY, broken_code="1 / 0")
    site.install("two", {"comingle.methods": {"twice": "half_code:halfway"}})
    code = f"""if True:
        from comingle.utils.errors import ComingleError
        from comingle.methods import make
        for name in {[*points, "local"]!r}:
            try:
                print(make(name).name)
            except ComingleError as error:
                print(error)
    """
    named = [
        ("comingle.methods: one 1.0", "'fedavg'"),
        ("comingle.methods: one 1.0 and two 1.0", "'twice'"),
        ("comingle.methods: 'absent' of one 1.0", "AttributeError"),
        ("comingle.methods: 'broken' of one 1.0", "ZeroDivisionError"),
        ("method bare: 'needed'", "default"),
        ("method none: ", "NoneType"),
        ("method: ", "int"),
        ("local", ""),
    ]
    for line, (place, value) in zip(site.run(code).splitlines(), named, strict=True):
        assert line.startswith(place)
        assert value in line
    (listed,), _ = site.commands(["methods"])
    assert listed[0] == 0
    assert "'broken' of one 1.0 cannot be imported" in listed[1]


def test_a_method_from_python_needs_no_package() -> None:
    def mine(*, slow: int = 0) -> Method:
        return fedavg()

    before = list(REGISTRY)
    name = "mine-of-the-test"
    register(name, mine)
    assert [one for one in REGISTRY if one != name] == before
    assert name in list(REGISTRY)
    assert settings_of(name) == settings_of(mine) == {"slow": 0}
    assert make(name, slow=-1).placement == make(mine).placement == fedavg().placement
    register(name, fedavg())  # again, and one that is made already
    made = fedavg()
    assert make(made) is made
    assert settings_of(name) == settings_of(made) == {}
    with pytest.raises(RecipeError, match=r"method fedavg: no setting 'slow'\. Allowed: no settings"):
        make(made, slow=1)
    with pytest.raises(PluginError, match=r"comingle\.methods: 'comigs'.*comingle"):
        register("comigs", mine)
    with pytest.raises(RecipeError, match=r"slow is True; allowed: whole numbers"):
        make(mine, slow=True)


def test_a_method_of_the_core_keeps_its_ranges_when_its_function_is_given() -> None:
    with pytest.raises(RecipeError, match="router_every is -1; allowed: whole numbers from 1"):
        make(REGISTRY["comigs"], router_every=-1)


def test_a_net_from_python_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    before = list(NETS)
    monkeypatch.setattr(NETS, "_registered", {})
    NETS.register("tiny-of-the-test", lambda shape, outputs: nn.Linear(shape[0], outputs))
    NETS.register("wrong-of-the-test", lambda shape, outputs: 3)
    assert sorted(NETS) == sorted([*before, "tiny-of-the-test", "wrong-of-the-test"])
    one, same = (make_net("tiny-of-the-test", (4,), 2, seed=5) for _ in range(2))
    assert [p.tolist() for p in one.parameters()] == [p.tolist() for p in same.parameters()]
    with pytest.raises(PluginError, match=r"net 'wrong-of-the-test': its function returned int; allowed: an nn.Module"):
        make_net("wrong-of-the-test", (4,), 2)


# ---------------------------------------------------------------- verbs


def test_an_installed_verb_stands_beside_the_cores_and_is_imported_when_it_is_called(site: Site) -> None:
    site.install("greeting", {"comingle.verbs": {"greet": "greet_code:greet"}}, greet_code=GREET)
    (overview, help_, called, wrong, misspelt), modules = site.commands(
        ["--help"], ["greet", "--help"], ["greet", "ada", "--loud"], ["greet", "--quiet"], ["gret"]
    )
    assert [overview[0], help_[0], called[0]] == [0, 0, 0]
    assert "greet Say hello." in overview[1]
    assert "--loud" in help_[1]
    assert called == (0, "hello ada!", "")
    assert (wrong[0], "No such option" in wrong[2]) == (2, True)
    assert (misspelt[0], "Did you mean 'greet'" in misspelt[2]) == (2, True), misspelt
    assert "greet_code" in modules
    assert "greet_code" not in site.commands(["show", "--help"], ["gret"])[1]


def test_a_verb_that_cannot_be_used_leaves_the_others_alone(site: Site) -> None:
    points = {"broken": "broken_code:any", "number": "half_code:number", "show": "half_code:number"}
    site.install("one", {"comingle.verbs": points}, broken_code="import no_module", half_code="number = 3")
    (overview, *wrong, fine), _ = site.commands(
        ["--help"], ["broken", "--any", "thing"], ["number"], ["show", "folder"], ["methods", "--help"]
    )
    said = "comingle.verbs: 'broken' of one 1.0 cannot be imported: ModuleNotFoundError: No module named 'no_module'"
    assert overview[0] == fine[0] == 0
    assert f"broken {said}" in overview[1]
    assert wrong == [
        (2, "", f"comingle: {said}"),
        (2, "", "comingle: comingle.verbs: 'number' is int; allowed: a function for typer"),
        (2, "", "comingle: comingle.verbs: one 1.0 offers 'show', a name that comingle itself has; uninstall it"),
    ]


def test_this_projects_own_verbs_are_plugins() -> None:
    own = {name: plugin.load().__module__ for name, plugin in registry.find_plugins("comingle.verbs").items()}
    ours: dict[str, Any] = dict.fromkeys(("reproduce", "theory"), "comingle_papers.cli")
    assert own.items() >= ours.items(), "install the checkout again: pip install -e ."


def test_every_implementation_that_is_named_can_be_imported() -> None:
    named = {
        **{f"method {name}": make for name, make in REGISTRY.items()},
        **{f"tracker {name}": tracker for name, tracker in TRACKERS.items()},
        **{f"kind {kind}": KINDS[kind] for kind in KINDS},
        "export": registry.load_object(personal._EXPORT),
        "fit": registry.load_object(session._FIT),
    }
    assert len(named) > 50
    assert [name for name, found in named.items() if not callable(found)] == []
    assert [name for name, store in STORES.items() if not isinstance(store, Store)] == []


def test_comingle_has_no_entry_points_to_itself() -> None:
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"].get(
        "entry-points", {}
    )
    values = [value for group in points.values() for value in group.values()]
    assert values == []
