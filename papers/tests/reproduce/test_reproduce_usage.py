"""Accuracy against parameters: what is counted, checked by hand and against whole federations, and what is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection

from comingle.config import Recipe, parse_recipe
from comingle.data.populations import as_users
from comingle.data.samples.samples import Samples, UserSamples
from comingle.protocol.messages import COUNT
from comingle.runs.session import build, prepare
from comingle.utils.errors import RecipeError
from comingle.utils.records import read_metrics
from comingle_papers.reproduce.counted import Usage, count_usage, plan_usage, usage_figure
from comingle_papers.reproduce.plan import Plan, RunSelection, plan
from comingle_papers.reproduce.published import Experiment, Plot, load_experiment
from comingle_papers.reproduce.runner import draw, read_entries, run_cells
from comingle_papers.reproduce.tables import build_table, markdown
from comingle_papers.tasks.kind import Task, prepare_task

NET = 10 * 20 + 20 + 20 + 1
"""Parameters of the task mlp's net, 10-20-1."""
FEATURES = 10 * 20 + 20
"""Its feature extractor, all but the last layer."""
GATE = 10 * 2 + 2
USERS = 20

COUNTED = {
    "local": (0, 0, 0, NET),
    "fedavg": (NET, NET, NET, NET),
    "fedavg+": (NET, NET, NET, NET),
    "pfedmoe": (FEATURES, FEATURES, FEATURES, NET + FEATURES + GATE),
    "fedem": (4 * NET, 4 * NET, 4 * NET, 4 * NET + 4),
    "ifca": (4 * NET, NET + 1, 4 * NET, NET + 1),
    "fedmerge": (4 * NET + 4 * USERS, NET, NET, NET),
}
"""Server, sent, received and held, with four models where there are several; IFCA's users keep and send a choice."""


def recipe_of(method: str, net: str = "mlp", **settings: Any) -> Recipe:
    if method in ("fedem", "ifca", "fedmerge"):
        settings = {"models": 4, **settings}
    content = {
        "base": f"net:{net}",
        "method": {"name": method, **settings},
        "data": {"task": {"name": "mlp", "test_samples": 5}},
        "training": {"weighting": "samples", "rounds": 1},
        "runtime": {"device": "cpu", "threads": 1},
    }
    return parse_recipe(content)


@pytest.fixture(scope="module")
def task() -> Task:
    section = recipe_of("local").data.task
    assert section is not None
    return prepare_task(section, 0)


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("method", COUNTED)
def test_usage_is_that_counted_by_hand(method: str, task: Task) -> None:
    found = count_usage(recipe_of(method), task)
    assert (found.server, found.communicate, found.received, found.client) == COUNTED[method]


@pytest.mark.parametrize("method", ["fedmerge", "ifca", "fedem"])
def test_one_user_stands_for_a_whole_federation(method: str, task: Task) -> None:
    recipe = recipe_of(method)
    federation = build(recipe, prepare(recipe))
    clients, found = federation.clients, count_usage(recipe, task)
    assert found.server == sum(t.numel() for t in federation.server.kept.values())
    upload = clients.upload(range(USERS), 1, {})
    sent = [*upload.tensors.values(), *(t for name, t in upload.reports.items() if name != COUNT)]
    assert sum(t.numel() for t in sent) == USERS * found.communicate
    names = [user.name for user in clients.users]
    received = federation.server.download(names).tensors.values()
    assert sum(t.numel() for t in received) == USERS * found.received
    own = clients.mask.sum() + sum(t.numel() for t in clients.state.kept.values())
    assert own == USERS * found.client


def test_running_statistics_count_as_they_travel(task: Task) -> None:
    own = NET + 2 * 20 + 2 * 20  # scale and shift, then mean and variance
    assert count_usage(recipe_of("fedavg", "mlp-norm"), task) == Usage(
        server=own, communicate=own, received=own, client=own
    )


def test_participants_named_in_a_recipe_change_nothing(task: Task) -> None:
    some = recipe_of("fedmerge").with_changes({"training.participation": [["user-3"]]})
    assert count_usage(some, task) == count_usage(recipe_of("fedmerge"), task)


def test_nets_have_the_sizes_of_the_papers_table_1() -> None:
    images = Samples(inputs=torch.zeros(2, 3, 32, 32), targets=torch.zeros(2, dtype=torch.int64))
    user = UserSamples(name="one", train=images, valid=images, test=images)
    task = Task(
        users=as_users([user]),
        loss="cross_entropy",
        classes=7,
        clusters=1,
        augment=False,
        input_shape=(3, 32, 32),
        net="resnet9",
    )
    unit = count_usage(recipe_of("fedavg", "resnet9"), task).client
    for layers, ratio in {18: 2.27, 34: 4.32, 50: 4.82}.items():
        assert count_usage(recipe_of("local", f"resnet{layers}"), task).over(unit).client == pytest.approx(ratio, 0.01)


# ---------------------------------------------------------------- the figure, on tasks that need no images

ROWS = {
    "fedavg": {"method": "fedavg", "label": "FedAvg"},
    "fedavg-norm": {"method": "fedavg", "label": "FedAvg, larger", "base": "net:mlp-norm", "without": ["linear"]},
    "fedmerge-2": {"method": "fedmerge", "label": "FedMerge, 2 models", "settings": {"models": 2}},
    "fedmerge-3": {"method": "fedmerge", "label": "FedMerge, 3 models", "settings": {"models": 3}},
}


def published(**changes: Any) -> Experiment:
    content = {
        "title": "Loss against parameters",
        "source": "nowhere",
        "metric": "mean_test_loss",
        "columns": ["linear", "mlp"],
        "rows": ROWS,
        "plot": {"kind": "usage", "usage": ["server", "client"]},
    }
    return Experiment.model_validate({**content, **changes})


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans an experiment of our own on FLoRAL's synthetic tasks."""
    monkeypatch.delenv("COMINGLE_DATA", raising=False)
    study = load_experiment("floral/table3")[0]

    def make(one: Experiment | None = None, **wanted: Any) -> Plan:
        monkeypatch.setattr("comingle_papers.reproduce.plan.load_experiment", lambda name: (study, one or published()))
        return plan("floral/figure1", RunSelection(**{"scale": "smoke", **wanted}))

    return make


def test_usage_is_in_multiples_of_the_columns_net(planned: Any) -> None:
    linear, small = 10 * 3 + 3, 8  # parameters of the net, users at this scale
    used = plan_usage(planned())
    assert [key for key in used if key[1] == "linear"] == [(row, "linear") for row in ROWS if row != "fedavg-norm"]
    assert used["fedavg", "mlp"] == Usage(server=1, communicate=1, received=1, client=1)
    assert used["fedavg-norm", "mlp"].client == (NET + 80) / NET
    assert used["fedmerge-3", "mlp"].server == pytest.approx(3 + 3 * small / NET)
    assert used["fedmerge-3", "linear"].server == pytest.approx(3 + 3 * 6 / linear)
    assert used["fedmerge-3", "linear"].client == 1
    alone = plan_usage(planned(methods=["fedavg-norm"], columns=["mlp"]))  # the net is then the study's
    assert alone["fedavg-norm", "mlp"] == used["fedavg-norm", "mlp"]


@pytest.mark.slow
def test_every_row_and_column_is_one_point_of_its_methods_line(planned: Any, tmp_path: Path) -> None:
    found = planned()
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    entries, used = read_entries(found, outcomes), plan_usage(found)
    figure = usage_figure(found, entries, used)
    panels = [(kind, column) for kind in ("server", "client") for column in ("linear", "mlp")]
    for axis, (kind, column) in zip(figure.axes, panels, strict=True):
        marks = [np.asarray(c.get_offsets()) for c in axis.collections if isinstance(c, PathCollection)]
        rows = [row for row in ROWS if (row, column) in used]
        assert [len(mark) for mark in marks] == [len(rows) - 2, 2]
        points = [tuple(point) for mark in marks for point in mark]
        cells = {cell.row: outcomes[cell.folder].folder for cell in found.cells if cell.column == column}
        wanted = [(getattr(used[row, column], kind), read_metrics(cells[row])["mean_test_loss"]) for row in rows]
        assert points == [pytest.approx(point) for point in wanted]
    paths = draw(found, outcomes, tmp_path / "figure1")
    assert [path.name for path in paths] == ["figure1-usage.png", "figure1-usage.svg"]
    text = paths[1].read_text(encoding="utf-8")
    words = ("FedAvg", "FedMerge", "Synthetic MLP", "test loss", "kept by the server,", "multiples of mlp")
    assert [word for word in (*words, "held by a user,", "multiples of linear") if f">{word}<" not in text] == []
    assert ">FedMerge, 3 models<" not in text
    few = usage_figure(found, {key: entry for key, entry in entries.items() if key[0] == "fedavg"}, used)
    assert [label.get_text() for label in few.legends[0].get_texts()] == ["FedAvg"]
    kept = json.loads((tmp_path / "figure1" / "usage.json").read_text())
    assert kept["mlp"]["fedmerge-3"]["server"] == used["fedmerge-3", "mlp"].server
    told = (tmp_path / "figure1" / "usage.md").read_text()
    assert f"| Synthetic MLP | FedAvg, larger | {' | '.join([f'{(NET + 80) / NET:.2f}'] * 4)} |" in told
    table = markdown(build_table(found, {("fedavg-norm", "mlp"): [1.0]}))
    assert "| FedAvg, larger |  | 1 |" in table


# ---------------------------------------------------------------- rows with a net of their own, and rows left out


def test_rows_name_their_own_net_and_columns_without_them(planned: Any) -> None:
    cells = {(cell.row, cell.column): cell.recipe.base for cell in planned(base="net:mlp-norm").cells}
    assert ("fedavg-norm", "linear") not in cells
    assert cells["fedavg-norm", "mlp"] == cells["fedavg", "mlp"] == "net:mlp-norm"
    own = published(rows={**ROWS, "fedavg": {"method": "fedavg", "base": "net:mlp"}})
    assert {cell.recipe.base for cell in planned(own, base="net:mlp-norm", columns=["mlp"]).cells} == {
        "net:mlp",
        "net:mlp-norm",
    }


def test_a_scale_leaves_rows_out(planned: Any) -> None:
    small = published(scales={"smoke": {"columns": {"mlp": {"without": ["fedmerge-3"]}}}})
    cells = [(cell.row, cell.column) for cell in planned(small).cells]
    assert cells == [
        ("fedavg", "linear"),
        ("fedmerge-2", "linear"),
        ("fedmerge-3", "linear"),
        ("fedavg", "mlp"),
        ("fedavg-norm", "mlp"),
        ("fedmerge-2", "mlp"),
    ]
    with pytest.raises(RecipeError, match="nothing to run; mlp: no such row at scale smoke"):
        planned(small, methods=["fedmerge-3"], columns=["mlp"])


def test_a_scale_has_stand_ins_for_bases(planned: Any) -> None:
    """For the columns' and the rows' own, but not for the one asked for; the unit is the stand-in too."""
    small = published(scales={"smoke": {"bases": {"net:mlp": "net:mlp-norm", "net:mlp-norm": "net:mlp"}}})
    bases = {cell.row: cell.recipe.base for cell in planned(small, columns=["mlp"]).cells}
    assert bases == {row: "net:mlp" if row == "fedavg-norm" else "net:mlp-norm" for row in ROWS}
    asked = {cell.row: cell.recipe.base for cell in planned(small, columns=["mlp"], base="net:mlp").cells}
    assert set(asked.values()) == {"net:mlp"}
    alone = plan_usage(planned(small, methods=["fedavg-norm"], columns=["mlp"]))
    assert alone["fedavg-norm", "mlp"].client == NET / (NET + 80)


def test_at_scale_cpu_images_of_domains_have_group_norm() -> None:
    for name in ("table2", "table3", "figure4", "figure6"):
        found = plan(f"fedmerge/{name}", RunSelection(scale="cpu", columns=["domain"], data=Path("tests")))
        assert {cell.recipe.base for cell in found.cells} <= {"net:resnet9-group", "net:resnet18-group"}


def test_a_plot_of_usage_says_of_what() -> None:
    for content in ({"kind": "usage"}, {"kind": "curves", "usage": ["server"]}):
        with pytest.raises(ValueError, match="kind: usage and a list usage: give both or neither"):
            Plot.model_validate(content)


def test_the_published_figures_have_the_papers_nets_and_models() -> None:
    found = {number: plan(f"fedmerge/figure{number}", RunSelection(seeds=[0])) for number in (3, 4, 6)}
    for number in (3, 6):
        cells = [cell for cell in found[number].cells if cell.column == "cluster"]
        for method, others in (("fedem", {}), ("ifca", {}), ("fedmerge", {"weight_step": 0.01})):
            own = [cell.recipe.method.settings for cell in cells if cell.recipe.method.name == method]
            assert own == [{"models": count, **others} for count in (5, 10, 15, 20, 25, 30)]
    nets = [f"net:resnet{layers}" for layers in (9, 18, 34, 50, 101, 152)]
    for number, column in ((3, "personal"), (4, "domain"), (6, "domain")):
        cells = [cell for cell in found[number].cells if cell.column == column]
        for method in ("local", "fedavg", "fedavg+", "pfedmoe"):
            assert [cell.recipe.base for cell in cells if cell.recipe.method.name == method] == nets
    merged = [cell.recipe for cell in found[4].cells if cell.recipe.method.name == "fedmerge"]
    assert [recipe.base for recipe in merged] == nets[:-1]
    assert {recipe.method.settings["models"] for recipe in merged} == {15}
    assert not [cell for cell in found[6].cells if (cell.recipe.method.name, cell.column) == ("ifca", "domain")]
    kinds = [plot.usage for number in (3, 4, 6) if (plot := found[number].experiment.plot) is not None]
    assert kinds == [["server"], ["client"], ["server", "communicate", "client"]]


def test_the_published_models_are_those_of_the_best_round() -> None:
    """Section 4.1: the checkpoint with the minimum validation error is selected."""
    for number in (3, 4, 6):
        cells = plan(f"fedmerge/figure{number}", RunSelection(seeds=[0])).cells
        assert {cell.recipe.evaluation.select for cell in cells} == {"best"}


def test_figures_and_tables_share_runs() -> None:
    six = {cell.folder for cell in plan("fedmerge/figure6", RunSelection(seeds=[0])).cells}
    three = [cell for cell in plan("fedmerge/table3", RunSelection(seeds=[0])).cells if cell.row[:4] != "ifca"]
    assert {cell.folder for cell in three} <= six
    for name in ("table2", "figure3"):
        assert {cell.folder for cell in plan(f"fedmerge/{name}", RunSelection(seeds=[0])).cells} <= six
