"""FLoRAL's tables and figures: its numbers as printed, its settings at every scale, and what is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comingle.models.nets import make_net
from comingle.utils.errors import RecipeError
from comingle_papers.reproduce.plan import Cell, Plan, RunSelection, count_samples, net_size, plan
from comingle_papers.reproduce.published import load_experiment, parse_printed
from comingle_papers.reproduce.runner import RUNS, draw, run_cells, scores
from comingle_papers.reproduce.tables import build_table, markdown, remarks
from comingle_papers.tasks.kind import TaskSection, make_task

IMAGES = ("mnist", "cifar10", "cifar100")


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMINGLE_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images, as far as their names tell."""
    (tmp_path / "images").mkdir()
    for name in IMAGES:
        (tmp_path / "images" / f"{name}.npz").touch()
    return tmp_path


def planned(name: str, scale: str = "paper", **wanted: Any) -> Plan:
    return plan(f"floral/{name}", RunSelection(scale=scale, **wanted))


def cells_of(found: Plan, column: str, seed: int = 0) -> dict[str, Cell]:
    return {cell.row: cell for cell in found.cells if cell.column == column and cell.seed == seed}


def rows_of(name: str) -> dict[str, Any]:
    return load_experiment(f"floral/{name}")[1].rows


# ---------------------------------------------------------------- the numbers


def read_paper(shared_data: Path) -> str:
    source = shared_data.parent / "papers" / "floral.md"
    if not source.is_file():
        pytest.skip(f"PAPER ABSENT: {source} does not exist")
    return source.read_text(encoding="utf-8")


def entries(cells: Sequence[str]) -> list[tuple[float, float]]:
    """Cells as ``91.5 0.6``; in our copy some zeros became letters."""
    pairs = [cell.replace("o.", "0.").split() for cell in cells]
    return [(float(mean), float(std)) for mean, std in pairs]


def test_table_1_has_the_numbers_of_the_paper(shared_data: Path) -> None:
    text = read_paper(shared_data)
    lines = [line.split("\t") for line in text[text.index("\tπ^*") : text.index("Table 1: ")].splitlines()]
    paper = [line for line in lines if len(line) == 12 and re.match(r"\d", line[2])]
    rows = list(rows_of("table1").values())
    names = {"fedavg": "FedAvg", "local-adaptor": "Local Adaptor"}
    assert len(paper) == len(rows) == 8
    for line, row in zip(paper, rows, strict=True):
        assert row.label == line[0].strip() + (", optimal routing" if line[1] == "1" else "")
        assert row.method == names.get(row.method, row.method) or line[0] == names[row.method]
        assert row.method.endswith("-optimal") == (line[1] == "1")
        assert [parse_printed(cell) for cell in row.paper or []] == entries(line[2:])


def test_tables_4_and_5_have_the_numbers_of_the_paper(shared_data: Path) -> None:
    text = read_paper(shared_data)
    part = text[text.index("Table 4: Ablation of ConvLoRAs") : text.index("G.2 SYNTHETIC MLP")]
    lines = [line.split("\t") for line in part.splitlines() if "\t" in line]
    four = {line[0]: line[1:4] for line in lines if re.match(r"\d", line[1])}
    assert {row.label: row.paper for row in rows_of("table4").values()} == four
    # Table 5 stands beside Table 4: kinds in one column, bias or not in the next, then both shifts of CIFAR-10.
    five = [[cell for cell in line if re.fullmatch(r"\d\d\.\d", cell)][-2:] for line in lines]
    five = [numbers for line, numbers in zip(lines, five, strict=True) if {"×", "X", "1"} & set(line[4:])]
    assert [(row.paper or [])[:2] for row in rows_of("table5").values()] == five
    assert {(row.paper or [])[2] for row in rows_of("table5").values()} == {None}


def test_what_is_missing_from_our_copy_is_said() -> None:
    assert [row.paper for row in rows_of("table2").values()] == [None] * 6
    two = build_table(planned("table2", columns=["mnist-r"], seeds=[0]), {("1-half", "mnist-r"): [80.0]})
    assert any(one.startswith("The paper's numbers of this table are missing") for one in remarks(two))
    assert "| method | MNIST-R |\n|---|---|\n| 1%, C half the true number | 80.0 |\n" in markdown(two)
    assert "higher is better.\n" in markdown(two)  # and nothing of ranks
    found = {("fedavg", "linear"): [5.0], ("floral", "linear"): [4e-5]}
    three = build_table(planned("table3", columns=["linear"], methods=["fedavg", "floral"], seeds=[0]), found)
    text = markdown(three)
    assert "| method | Synthetic linear | public code |\n" in text
    assert "| FedAvg | 5 #2 | 3.5 (3.84) #2 |\n" in text
    assert "| FLoRAL | 4e-05 #1 | 4.37e-05 (4.51e-06) #1 (a) |\n" in text
    assert "over 2 rows; the public code's order is reproduced." in text
    assert (
        "- The paper's numbers of this table are missing from our copy; beside ours stand those of its public" in text
    )


def test_the_order_of_a_column_is_compared_with_the_paper_s() -> None:
    found = planned("table1", columns=["mnist-ls"], seeds=[0])
    rows = rows_of("table1")
    ours = {(row, "mnist-ls"): [parse_printed((rows[row].paper or [])[1])[0]] for row in rows}
    (column,) = build_table(found, ours)["columns"]
    assert column["order"]["tau"] == pytest.approx(1.0)
    assert column["cells"]["ensemble-optimal"]["ours"]["rank"] == 1
    assert column["cells"]["fedavg"]["ours"]["rank"] == 8
    # The public code's adaptors tell the order of 8 rows: 28 pairs, of which one swap of neighbours turns one round.
    ours["fedavg", "mnist-ls"], ours["local-adaptor", "mnist-ls"] = [84.5], [25.8]
    (column,) = build_table(found, ours)["columns"]
    assert column["order"]["tau"] == pytest.approx((27 - 1) / 28)
    assert column["order"]["swapped"] == (("local-adaptor", "fedavg"),)


# ---------------------------------------------------------------- the settings


@pytest.mark.slow
def test_the_paper_scale_has_the_published_settings() -> None:
    assert planned("table1").columns == tuple(load_experiment("floral/table1")[1].column_names)  # the hub has them
    expected = {  # clusters, batch, client rate, router rate, rounds, share of users, share of the samples
        "mnist-r": (4, 32, 0.1, 0.1, 500, 0.1, 1),
        "mnist-ls-reduced": (4, 32, 0.1, 0.3, 1500, 0.1, 0.05),
        "cifar10-ls": (4, 64, 0.03, 0.1, 500, 1, 1),
        "cifar10-r-reduced": (4, 64, 0.03, 0.3, 1500, 1, 0.05),
        "cifar100": (10, 64, 0.001, 0.1, 500, 0.25, 1),
        "cifar100-reduced": (10, 64, 0.001, 0.3, 1500, 0.25, 0.05),
    }
    for column, settings in expected.items():
        recipe = cells_of(planned("table1", columns=[column]), column)["floral-1"].recipe
        data: Any = recipe.data
        training, task = recipe.training, data.task
        assert task is not None
        assert (
            recipe.method.settings["clusters"],
            training.batch_size,
            training.experts.learning_rate,
            training.router.learning_rate,
            training.rounds,
            training.participation,
            task.fraction,
        ) == settings
        assert (task.users, task.path, task.shift) == (
            None,
            None,
            {"r": "rotate", "l": "labels"}.get(column[-1:]) or task.shift,
        )
        for optimizer in (training.experts, training.router):
            assert (optimizer.name, optimizer.momentum, optimizer.schedule, optimizer.weight_decay) == (
                "sgd",
                0,
                "constant",
                0,
            )
        assert (training.weighting, training.local_epochs, recipe.evaluation.model) == ("samples", 1, "exchanged")
        for row, cell in cells_of(planned("table1", columns=[column]), column).items():  # the public code's Adam
            found = cell.recipe.method.settings.get("server_adam_rate")
            assert found == (0.001 if column.startswith("cifar100") else None), row
    synthetic = planned("table3")
    for column, settings in {"linear": (2, 4, 0.2, 0.1, 2000), "mlp": (4, 8, 0.03, 0.1, 2000)}.items():
        cell = cells_of(synthetic, column)["floral-code"]
        training, method = cell.recipe.training, cell.recipe.method.settings
        assert (
            method["clusters"],
            training.batch_size,
            training.experts.learning_rate,
            training.router.learning_rate,
            training.rounds,
        ) == settings
        assert method["adaptor_server_rate"] == training.experts.learning_rate  # the public code's bug
        assert "adaptor_server_rate" not in cells_of(synthetic, column)["floral"].recipe.method.settings


def test_rows_have_their_budgets_and_forms() -> None:
    one = cells_of(planned("table1", columns=["cifar10-r"]), "cifar10-r")
    budgets = {row: cell.recipe.floral.budget for row, cell in one.items()}
    assert budgets == {
        "fedavg": None, "local-adaptor": 0.01, "ensemble": None, "ensemble-optimal": None, "floral-1": 0.01,
        "floral-1-optimal": 0.01, "floral-10": 0.1, "floral-10-optimal": 0.1,
    }  # fmt: skip
    four = cells_of(planned("table4", columns=["cifar10-r"]), "cifar10-r")
    assert [cell.recipe.floral.conv for cell in four.values()] == ["balanced-2d", "in", "out", "none"]
    five = cells_of(planned("table5", columns=["cifar10-r"]), "cifar10-r")
    told = {row: (c.recipe.floral.conv, c.recipe.floral.lora, c.recipe.floral.bias) for row, c in five.items()}
    assert told["conv-bias"] == ("balanced-2d", False, True)
    assert told["lora"] == ("none", True, False)
    assert told["bias"] == ("none", False, True)
    assert five["none"].recipe.method.name == "fedavg"
    two = cells_of(planned("table2"), "cifar100")
    assert [cell.recipe.method.settings["clusters"] for cell in two.values()] == [5, 10, 20] * 2


def test_no_batch_of_the_net_with_batch_norm_is_a_single_sample() -> None:
    """The public code has batches of 5 there; of 97 samples batches of 8 leave 1, which has no variance."""
    cell = cells_of(planned("figure2", columns=["mlp-norm"]), "mlp-norm")["fedavg"]
    assert cell.recipe.training.batch_size == 5
    assert [97 % size for size in (5, 8)] == [2, 1]


def test_figure_2_has_batch_norm_in_both_nets() -> None:
    for column, net, floral in (
        ("mlp-norm", "net:mlp-norm", ("rank", 1)),
        ("cifar100-norm", "net:vgg8-norm", ("budget", 0.1)),
    ):
        cells = cells_of(planned("figure2"), column)
        assert {cell.recipe.base for cell in cells.values()} == {net}
        told = {row: (c.recipe.floral.norm, c.recipe.floral.batch_nora) for row, c in cells.items()}
        assert told["without"] == (False, False)
        assert told["plain"] == told["plain-optimal"] == (True, False)
        assert told["nora"] == told["nora-optimal"] == (True, True)
        assert getattr(cells["nora"].recipe.floral, floral[0]) == floral[1]
        assert {cell.recipe.training.weighting for cell in cells.values()} == {"samples"}


def test_runs_are_shared_by_tables_and_figures() -> None:
    one, six = planned("table1", "cpu"), planned("figure6", "cpu")
    assert {cell.folder for cell in six.cells} < {cell.folder for cell in one.cells}
    assert {cell.folder for cell in planned("figure10", "cpu").cells} == {
        cell.folder for cell in planned("table4", "cpu").cells
    }
    four, five = (cells_of(planned(name, "cpu"), "cifar10-r") for name in ("table4", "table5"))
    assert four["none"].folder == five["lora-bias"].folder
    assert four["balanced-2d"].folder == five["both-bias"].folder
    assert five["both-bias"].folder == cells_of(one, "cifar10-r")["floral-10-optimal"].folder
    assert five["none"].folder == cells_of(one, "cifar10-r")["fedavg"].folder
    assert load_experiment("floral/figure3")[1].notes == []


def test_the_cpu_scale_has_fewer_seeds_where_a_run_is_long() -> None:
    found = planned("table1", "cpu")
    seeds = {
        column: [cell.seed for cell in found.cells if (cell.column, cell.row) == (column, "fedavg")]
        for column in found.columns
    }
    assert seeds["mnist-ls"] == [0, 1, 2]
    assert seeds["cifar10-r-reduced"] == [0]
    assert found.jobs >= 1
    asked = planned("table1", "cpu", columns=["cifar10-r"], seeds=[3, 4])
    assert asked.seeds == (3, 4)


def test_figure_7_runs_at_scale_cpu_where_the_folder_has_cifar100(tmp_path: Path) -> None:
    """Nothing is read from the hub for it, so that other columns of Table 1 run without a network."""
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(RecipeError, match="has no cifar100, and this scale does not use the hub"):
        planned("figure7", "cpu", data=tmp_path)
    table = planned("table1", "cpu", columns=["cifar10-r", "cifar100"], data=tmp_path)
    assert (table.columns, list(table.left_out)) == (("cifar10-r",), ["cifar100"])
    for split in ("train", "test"):
        (images / f"cifar100-{split}.npz").touch()
    found = planned("figure7", "cpu", data=tmp_path)
    assert found.columns == ("cifar100", "cifar100-reduced")
    assert {(cell.recipe.training.rounds, cell.seed) for cell in found.cells} == {(20, 0), (150, 0)}
    assert {cell.recipe.training.experts.learning_rate for cell in found.cells} == {0.1}
    assert not any("server_adam_rate" in cell.recipe.method.settings for cell in found.cells)  # scale paper has it


def test_images_come_from_the_folder_or_the_hub(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def paths(found: Plan) -> set[str | None]:
        sections: list[Any] = [cell.recipe.data for cell in found.cells]
        return {data.task.path for data in sections if data.task is not None}

    assert paths(planned("table4", data=folder)) == {str(folder / "images")}
    assert paths(planned("table4")) == {None}  # which the task reads as the hub's
    assert not caplog.messages
    (folder / "images" / "cifar100.npz").unlink()
    assert paths(planned("table4", data=folder)) == {str(folder / "images"), None}
    assert caplog.messages == [f"cifar100-reduced: {folder}/images has no cifar100, so the hub's are read"]
    small = planned("table4", "smoke", data=folder)
    assert small.left_out == {
        "cifar100-reduced": f"{folder}/images has no cifar100, and this scale does not use the hub"
    }
    assert planned("table3", "smoke").left_out == {}
    with pytest.raises(
        Exception, match="mnist-r: there is no folder; give --data FOLDER, and this scale does not use the hub"
    ):
        planned("table1", "smoke", columns=["mnist-r"])


# ---------------------------------------------------------------- estimates


def test_the_size_of_nets_counted_by_hand() -> None:
    assert net_size("linear") == (10 * 3, 10 * 3 + 3)
    assert net_size("mlp") == (10 * 20 + 20, 10 * 20 + 20 + 20 + 1)
    assert net_size("mnist-cluster", "mnist") == net_size("mnist")
    assert net_size("mnist") == (784 * 200 + 200 * 10, 784 * 200 + 200 + 200 * 10 + 10)
    convolutions = 28 * 28 * 32 * 3 * 25 + 12 * 12 * 64 * 32 * 9
    assert net_size("cifar10")[0] == convolutions + 1024 * 64 + 64 * 10
    net = make_net("vgg8", (3, 32, 32), 100, seed=0)
    assert net_size("cifar100")[1] == sum(parameter.numel() for parameter in net.parameters())


def test_the_samples_counted_are_those_of_the_task() -> None:
    for task in (TaskSection(name="linear"), TaskSection(name="mlp", users=8, fraction=0.05, test_samples=5)):
        made = make_task(**task.model_dump(exclude_unset=True), seed=0)
        users, train, test = count_samples(task)
        assert users == len(made.users)
        assert {(len(user.train), len(user.test)) for user in made.users} == {(train, test)}
    assert count_samples(TaskSection(name="mnist")) == (300, 200, 34)
    assert count_samples(TaskSection(name="mnist", fraction=0.05)) == (300, 10, 34)
    assert count_samples(TaskSection(name="cifar10", fraction=0.05)) == (20, 125, 500)


def test_estimates_grow_with_rounds_models_and_users() -> None:
    cells = cells_of(planned("table1", "cpu", columns=["mnist-r"]), "mnist-r")
    assert cells["ensemble"].work == pytest.approx(4 * cells["fedavg"].work)

    def weight(**changes: Any) -> float:
        named = {key.replace("_", ".", 1): value for key, value in changes.items()}
        (cell,) = planned("table1", "cpu", columns=["mnist-r"], methods=["fedavg"], seeds=[0], changes=named).cells
        return cell.work

    assert weight(training_rounds=240, evaluation_every=20) > 1.8 * weight(training_rounds=120, evaluation_every=20)
    assert weight(training_participation=0.2) > 1.5 * weight(training_participation=0.1)
    assert weight(training_participation=[["user-1", "user-2"]]) < weight(training_participation=0.1)


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_curves_and_mixtures_are_drawn_from_runs(tmp_path: Path) -> None:
    found = planned("table3", "smoke", columns=["linear"], methods=["fedavg", "floral-plain", "floral-optimal"])
    plot = load_experiment("floral/figure3")[1].plot
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    losses = scores(outcomes, found.cells, "mean_test_loss")
    assert losses.keys() == {(cell.row, "linear") for cell in found.cells}
    shown = Plan(**{**vars(found), "experiment": found.experiment.model_copy(update={"plot": plot})})
    paths = draw(shown, outcomes, tmp_path)
    stems = ("table3-linear", "table3-linear-floral-plain-mixtures")  # optimal routing learns nothing
    assert [path.name for path in paths] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    curves, mixtures = (path.read_text(encoding="utf-8") for path in paths[1::2])
    assert all(f">{word}<" in curves for word in ("test loss", "user-5", "FLoRAL, optimal routing", "mean over users"))
    assert all(f">{word}<" in mixtures for word in ("cluster 0", "cluster 1", "adaptor set", "round 3"))


def test_finished_runs_of_tasks_leave_no_copies_of_their_nets(tmp_path: Path) -> None:
    (cell,) = planned("table3", "smoke", columns=["linear"], methods=["fedavg"]).cells
    saved: list[bool] = []
    folder = tmp_path / RUNS / cell.folder

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "evaluation":
            saved.append((folder / "checkpoints" / "round-0002").is_dir())

    (outcome,) = run_cells([cell], tmp_path, observers=lambda cell, clients: [look])
    assert (saved, outcome.folder) == ([False, False, False, True], folder)  # before the first round, and after each
    assert not (folder / "checkpoints").exists()
    (again,) = run_cells([cell], tmp_path)
    assert not again.ran


def test_accuracies_are_in_per_cent(tmp_path: Path) -> None:
    (cell,) = planned("table3", "smoke", columns=["linear"], methods=["fedavg"]).cells
    (outcome,) = run_cells([cell], tmp_path)
    path = outcome.folder / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mean_test_accuracy": 0.875}))
    assert scores({cell.folder: outcome}, [cell], "mean_test_accuracy") == {("fedavg", "linear"): [87.5]}


@pytest.mark.slow
def test_vgg_with_batch_norm_runs_on_images_in_every_form(tmp_path: Path) -> None:
    draw, labels = np.random.default_rng(0), np.arange(400) % 100
    pixels = draw.integers(0, 255, (400, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    images = {"x_train": pixels, "y_train": labels, "x_test": pixels[:200], "y_test": labels[:200]}
    np.savez(tmp_path / "images" / "cifar100.npz", **images)
    rows, small = ["plain", "nora"], {"data.task.users": 10, "training.participation": 1.0}
    found = planned("figure2", "smoke", columns=["cifar100-norm"], methods=rows, data=tmp_path, changes=small)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    losses = scores(outcomes, found.cells, "mean_test_loss")
    assert len({losses[row, "cifar100-norm"][0] for row in rows}) == 2  # each form is another


def run_all(found: Plan, out: Path) -> None:
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, out)}
    accuracies = scores(outcomes, found.cells, "mean_test_accuracy")
    assert accuracies.keys() == {(cell.row, cell.column) for cell in found.cells}
    assert all(0 <= value[0] <= 100 for value in accuracies.values())


def test_real_images_are_learned_from(shared_data: Path, tmp_path: Path) -> None:
    run_all(planned("table1", "smoke", columns=["mnist-ls"], methods=["floral-10"], data=shared_data), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table1", "table2", "table4", "table5"])
def test_every_row_runs_on_real_images(name: str, shared_data: Path, tmp_path: Path) -> None:
    found = planned(name, "smoke", data=shared_data)
    assert set(found.left_out) <= {"cifar100", "cifar100-reduced"}
    run_all(found, tmp_path)
