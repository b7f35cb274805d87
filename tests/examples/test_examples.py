"""Every example runs, in another folder, without a warning, and says what a person can judge."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import comingle
from comingle.methods.clustered import ChooseModel
from comingle.runs.folders import certificates_of
from comingle.utils.records import read_events, read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCES = Path(__file__).parents[2] / "src"


def environment() -> dict[str, str]:
    """Its own process finds these sources, uses one thread, and may not ask the hub for anything."""
    paths = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What an example prints that leaves nothing behind in its process, which therefore is that of the tests."""

    def run(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


def printed(name: str, folder: Path, *options: str, seconds: float = 300) -> str:
    """What an example prints in a process of its own."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def numbers(text: str, pattern: str) -> list[float]:
    """The number in each line that looks like this."""
    return [float(found) for found in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    told = printed("quickstart.py", tmp_path)
    rows = re.findall(r"^(ada|ben|cem) +([\d.]+) +([\d.]+) +([\d.]+)$", told, re.MULTILINE)
    assert [name for name, *_ in rows] == ["ada", "ben", "cem"]
    assert all(float(untrained) > float(together) for _, untrained, _, together in rows)
    assert "ada's model goes on: '" in told


def test_own_data(told: Callable[[str], str]) -> None:
    said = told("own_data.py")
    perplexities = numbers(said, r"^\w+ +[\d,]+ training tokens, test perplexity +([\d.]+)$")
    assert len(perplexities) in (3, 4)  # without datasets, and with
    assert max(perplexities) < 1.1 * min(perplexities)


@pytest.mark.slow
def test_own_method(tmp_path: Path) -> None:
    told = printed("own_method.py", tmp_path)
    lines = (EXAMPLES / "own_method.py").read_text().splitlines()
    assert len(lines) < 60
    assert set(re.findall(r"^  ([\w-]+), seed \d: mean test perplexity [\d.]+$", told, re.MULTILINE)) == {
        "fedavg",
        "near",
        "local",
    }
    near = numbers(told, r"near, seed 0: mean test perplexity ([\d.]+)")
    assert near != numbers(told, r"fedavg, seed 0: mean test perplexity ([\d.]+)")
    assert re.search(r"^Run\(near on random:llama", told, re.MULTILINE)


def test_own_models_are_those_of_ifca(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLES / "own_models.py"))
    monkeypatch.setattr(ChooseModel, "start", example["Choose"].start)
    texts = {n: [f"{i}, {i + s}, {i * s}" for i in range(60)] for n, s in {"ada": 1, "ben": 2, "cem": 7}.items()}
    training = {"rounds": 3, "local_steps": 2, "batch_size": 2, "context": 16, "experts": {"learning_rate": 0.02}}
    recipe = {"base": "random:llama?layers=1&dim=16&heads=2", "training": training, "runtime": {"compile": False}}
    methods = ({"name": example["chosen"], "models": 2}, {"name": "ifca", "models": 2})
    own, ifca = (comingle.run(recipe, users=texts, method=method).metrics for method in methods)
    for name, user in ifca["users"].items():
        assert own["users"][name]["test_loss_nats"] == pytest.approx(user["test_loss_nats"], rel=1e-5)


def test_own_conversations(told: Callable[[str], str]) -> None:
    said = told("own_conversations.py")
    assert len(numbers(said, r"^\w+: test perplexity of responses ([\d.]+)$")) == 3


def test_own_model(told: Callable[[str], str]) -> None:
    said = told("own_model.py")
    accuracies = numbers(said, r"^Run\(.* mean test accuracy ([\d.]+)\)$")
    assert len(accuracies) == 3
    assert max(accuracies) > 0.5
    assert re.search(r"names \d+ of 20 new pictures", said)


@pytest.mark.slow
def test_the_quickstart_is_a_notebook_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed as in Jupyter: progress is one line that changes, scores are tables."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    book = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    client.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    progress, result = shown[1]  # and no warning beside them
    assert progress.output_type == "display_data"
    assert "round 6" in str(progress.data) or "done after" in str(progress.data)
    assert result.data["text/plain"].startswith("Run(comigs-1g1s on random:llama")
    for number, words in ((2, ("test_perplexity", "ada")), (3, ("pretrained", "comigs-1g1s", "cem"))):
        (table,) = shown[number]
        assert all(word in table.data["text/html"] for word in words)
    assert shown[4][0].text.count("after round") == 4
    assert all(output.output_type != "error" for outputs in shown for output in outputs)


@pytest.mark.slow
def test_a_month_of_a_living_group(tmp_path: Path) -> None:
    """Every user and part has three scores; who has left is in no table, and the newcomer has all parts scored."""
    told = printed("living/month.py", tmp_path, "--documents", "30", "--rounds", "1", "--steps", "3")
    assert_month_is_scored(told)
    assert "training again without asyncio" in told


def assert_month_is_scored(told: str) -> None:
    """Assert that a month has three scores for every user and part, and three verdicts for every user."""
    users = ("unittest", "email", "multiprocessing")
    rows = re.findall(r"^(\w+) +(\d) +([\d.]+) +([\d.]+) +([\d.]+)$", told, re.MULTILINE)
    assert [name for name, *_ in rows] == [name for name in users for _ in range(4)]
    assert all(float(score) > 1 for _name, _part, *scores in rows for score in scores)
    for name in users:
        (verdicts,) = re.findall(rf"^{name}: newest part (.+)$", told, re.MULTILINE)
        assert len(re.findall(r"\((kept|missed): ", verdicts)) == 3


@pytest.mark.slow
def test_a_month_of_client_processes(tmp_path: Path) -> None:
    """Everyone is served throughout, all parts are trained, the fourth user joins, and one leaves without a trace."""
    pytest.importorskip("flwr")
    folder, month = tmp_path / "empty", tmp_path / "month"
    folder.mkdir()
    options = ("--documents", "30", "--rounds", "2", "--steps", "3", "--guard", "--keep", str(month))
    told = printed("living/clients.py", folder, *options, seconds=1800)
    assert_month_is_scored(told)
    starting, staying = ["unittest", "asyncio", "email"], ["unittest", "email", "multiprocessing"]
    trained = [(1, starting), (2, starting), (3, [*starting, "multiprocessing"]), (1, staying), (2, staying)]
    assert re.findall(r"^run (\d): ([\w, ]+) \(", told, re.MULTILINE) == [(str(n), ", ".join(u)) for n, u in trained]
    runs = sorted(path for path in (month / "runs").glob("[0-9]*") if path.is_dir())
    for run, num_rounds in zip(runs, (6, 2), strict=True):  # 6 in place of the three runs that were deleted
        assert set(read_metrics(run)["users"]) == set(staying)
        rounds = [event for event in read_events(run) if event["event"] == "round"]
        assert len(rounds) == num_rounds
        assert all(set(event["train_loss_nats"]) == set(staying) for event in rounds)
    answers = dict(re.findall(r"^(\w+): (\d+) answers, 0 failed", told, re.MULTILINE))
    assert set(answers) == {*starting, "multiprocessing"}
    assert all(int(number) > 10 for number in answers.values())
    timed = re.findall(r"^  last part: .* \(ratio [\d.]+\); (?:first other|the same) answer", told, re.MULTILINE)
    assert len(timed) == len(staying)
    assert "everyone was served throughout: yes" in told
    assert re.search("^asyncio left; its client ended: .*asyncio", told, re.MULTILINE)
    (certificate,) = certificates_of(month / "runs")
    assert (certificate["user"], certificate["mode"], certificate["rounds_trained_again"]) == ("asyncio", "exact", 6)
    assert f"certificate: 6 rounds, model {certificate['tensors_after']}" in told
    on_server = [month / "federation.yaml", *(month / "runs").rglob("*"), *(month / "keys").rglob("*")]
    naming = [path for path in on_server if path.is_file() and b"asyncio" in path.read_bytes()]
    assert naming == [month / "runs" / "left.json"]
    assert not list((month / "keys").rglob("asyncio*"))
    state = month / "clients" / "asyncio" / "state"
    assert not list(state.glob("run-*"))
    (of_user,) = certificates_of(state)
    assert len(of_user["copies"]) > 3
    assert of_user["not_deleted"] == []
    for user in staying:
        models = list((month / "clients" / user / "state").glob("run-*/model"))
        assert len(models) == 2
        assert all(set(read_metrics(model)["served"][user]["candidates"]) >= {"personal", "local"} for model in models)
    assert not [path.name for path in month.glob("*.log") if "Traceback" in path.read_text()]
