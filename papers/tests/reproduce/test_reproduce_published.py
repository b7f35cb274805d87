"""The published tables and figures: numbers as printed, methods that exist, valid recipes at every scale."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe
from comingle.methods import REGISTRY, settings_of
from comingle.utils.errors import RecipeError
from comingle_papers.recipes import published_recipes
from comingle_papers.reproduce.plan import Plan, RunSelection, plan
from comingle_papers.reproduce.published import (
    ASSUMED_FOLDER,
    DataSet,
    Experiment,
    Row,
    Study,
    list_experiments,
    load_experiment,
    merge,
    parse_printed,
)

EXPERIMENTS = list_experiments()
COMIGS = {name: one for name, one in EXPERIMENTS.items() if name.startswith("comigs/")}
TABLES = [name for name, one in COMIGS.items() if "/table" in name and any(row.paper for row in one.rows.values())]
NATURAL = ("users/shakespeare", "users/stackexchange")
PLANS = [(name, scale) for name in EXPERIMENTS for scale in load_experiment(name)[0].scales]
PLANS.remove(("floral/figure7", "cpu"))  # CIFAR-100 alone, which that scale takes from a folder


def planned(name: str, scale: str = "paper", **wanted: Any) -> Plan:
    small = "random:llama" if scale == "cpu" and name in (*COMIGS, "field/2026", *NATURAL) else None
    if name in NATURAL:  # which no scale takes from the hub
        wanted["data"] = wanted.get("data") or ASSUMED_FOLDER
    return plan(name, RunSelection(**{"scale": scale, "base": small, **wanted}))


def data_of(recipe: Recipe) -> Any:
    """The section ``data``, whose class depends on its kind."""
    return recipe.data


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMINGLE_DATA", raising=False)


# ---------------------------------------------------------------- the files


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    tables = [f"comigs/table{i}" for i in (1, 2, 3, 5, 6)]
    figures = [f"comigs/figure{i}" for i in range(3, 20)]
    of_floral = [*(f"floral/table{i}" for i in range(1, 7)), *(f"floral/figure{i}" for i in range(2, 11))]
    of_fedmerge = [*(f"fedmerge/table{i}" for i in range(1, 6)), *(f"fedmerge/figure{i}" for i in range(3, 8))]
    assert list(EXPERIMENTS) == [
        *tables,
        *figures,
        "comigs/hetlora",
        "comigs/languages",
        "comigs/leak",
        "comigs/stacking",
        *of_fedmerge,
        "fedmerge/pruning",
        "field/2026",
        *of_floral,
        *NATURAL,
    ]
    for name, one in EXPERIMENTS.items():
        assert ("figure" in name or name == "comigs/hetlora") == (one.plot is not None), name


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.sampled(8)
def test_every_method_exists(name: str) -> None:
    assert {row.method for row in EXPERIMENTS[name].rows.values()} <= REGISTRY.keys()
    assert planned(name, "paper").missing == ()


@pytest.mark.parametrize(("name", "scale"), PLANS)
@pytest.mark.sampled(28)
def test_every_cell_is_a_valid_recipe(name: str, scale: str, tmp_path: Path) -> None:
    of_images = not name.startswith(("comigs/", "field/", "users/"))
    if of_images and scale == "smoke":  # which asks whether images and questions are there, and reads none
        for folder in ("images", "xnli", "xquad"):
            (tmp_path / folder).mkdir()
        for images in ("mnist", "cifar10", "cifar100", "pacs"):
            (tmp_path / "images" / f"{images}.npz").touch()
    one = EXPERIMENTS[name]
    found = planned(name, scale, data=tmp_path if of_images else None)
    shrunk = one.scales[scale].columns if scale in one.scales else {}
    without = {(row, column) for row in one.rows for column in one.rows[row].without}
    without |= {(row, column) for column, scaled in shrunk.items() for row in scaled.without}
    cells = [(row, column, seed) for seed in found.seeds for column in found.columns for row in found.rows]
    cells = [cell for cell in cells if cell[:2] not in without]
    seeds = {column: {cell.seed for cell in found.cells if cell.column == column} for column in found.columns}
    assert [(c.row, c.column, c.seed) for c in found.cells] == [cell for cell in cells if cell[2] in seeds[cell[1]]]
    assert set(found.columns) | set(found.left_out) == set(one.column_names)
    for cell in found.cells:
        assert cell.recipe.seed == cell.seed
        assert cell.recipe.method.name == one.rows[cell.row].method
        assert cell.work > 0
    if scale == "paper":
        stand_ins = {column for column in one.column_names if column.endswith("-mnist")}
        assert set(found.left_out) == stand_ins
        assert found.seeds == ((0,) if one.kind == "cost" else (0, 1, 2))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.sampled(8)
def test_what_is_left_out_is_there(name: str) -> None:
    study, one = load_experiment(name)
    for row in one.rows.values():
        assert set(row.without) <= study.columns.keys() | set(one.column_names)
    for scale in one.scales.values():
        for column in scale.columns.values():
            assert set(column.without) <= one.rows.keys()


@pytest.mark.parametrize("name", [name for name in TABLES if EXPERIMENTS[name].reference != "earlier version"])
def test_numbers_are_those_of_the_paper(name: str, shared_data: Path) -> None:
    source = shared_data.parent / "papers" / "comigs.md"
    if not source.is_file():
        pytest.skip(f"PAPER ABSENT: {source} does not exist")
    paper = source.read_text(encoding="utf-8")
    table = int(re.sub(r"\D", "", name))
    text = paper[paper.index(f"Table {table}: ") :][:4000]
    lines = {re.sub(r"[^a-z0-9]", "", line.split("\t")[0].lower()): line for line in text.splitlines() if "\t" in line}
    elsewhere = [note for note in EXPERIMENTS[name].notes if "HTML version" in note.text]
    absent = {(row, column) for note in elsewhere for row in note.rows for column in note.columns}
    assert not absent or name == "comigs/table5"
    for row_name, row in EXPERIMENTS[name].rows.items():
        for column, cell in zip(EXPERIMENTS[name].column_names, row.paper or [], strict=True):
            if cell is None:
                continue
            if (row_name, column) in absent:
                assert cell not in lines[row_name.replace("-", "")], (row_name, column)
                continue
            mean, std = parse_printed(cell)
            shown = f"{mean:.2f}" if std is None else f"{mean:.2f} ({std:.2f})"
            assert shown in text, (row_name, column, cell)
            if name in ("comigs/table1", "comigs/table5") and column != "multilingual":
                assert shown in lines[row_name.replace("-", "")], (row_name, column)


def test_both_orders_of_languages_differ_in_who_has_how_many_experts_alone() -> None:
    """Table 2 names no language. The same users train on the same text, and others of them have four experts."""
    experts = {}
    for cell in planned("comigs/languages", "cpu", methods=["comigs-1gxs"], seeds=[0]).cells:
        users, counts = data_of(cell.recipe).users, cell.recipe.method.settings["specialists"]
        experts[cell.column] = dict(zip(users, counts, strict=True))
    french_and_italian = {"de": 1, "nl": 1, "fr": 3, "it": 3}
    assert experts["multilingual-2244"] == {"de": 1, "fr": 1, "it": 3, "nl": 3}
    assert experts["other-2244"] == french_and_italian
    assert experts["other-4422"] == {user: 4 - count for user, count in french_and_italian.items()}
    assert experts["multilingual-4422"] == {"de": 3, "fr": 3, "it": 1, "nl": 1}
    paper = {cell.column: data_of(cell.recipe) for cell in planned("comigs/languages", methods=["comigs-1gxs"]).cells}
    assert list(paper["other-2244"].users) == ["de", "nl", "fr", "it"]  # Table 4's numbers go by place
    assert paper["other-2244"].max_train_tokens == {"de": 557662, "nl": 407498, "fr": 556796, "it": 451584}
    assert paper["multilingual-2244"].max_train_tokens == {"de": 557662, "fr": 407498, "it": 556796, "nl": 451584}


def test_the_leak_stands_beside_the_numbers_of_table_5() -> None:
    """Its columns are Table 5's, clean and with the leak, and a control of which the paper has no number."""
    leak, table = EXPERIMENTS["comigs/leak"], EXPERIMENTS["comigs/table5"]
    variants = [column + kind for column in table.column_names for kind in ("", "-leak", "-control")]
    assert leak.column_names == variants
    assert leak.rows.keys() == table.rows.keys() - {"pretrained"}
    for name, row in leak.rows.items():
        assert row.paper == [cell for one in table.rows[name].paper or [] for cell in (one, one, None)]


def test_clean_leak_and_control_differ_in_what_they_are_named_for_alone() -> None:
    cells = {(cell.row, cell.column): cell for cell in planned("comigs/leak", "cpu", seeds=[0]).cells}
    table = {(cell.row, cell.column): cell for cell in planned("comigs/table5", "cpu", seeds=[0]).cells}
    turns = {row.method for row in EXPERIMENTS["comigs/leak"].rows.values()} & {
        name for name in REGISTRY if "accumulate_gradients" in settings_of(name)
    }
    assert turns == {"local-moe-tr", "fedavg-moe-tr", "comigs-tr", "comigs-2s", "comigs-2g", "comigs-1g1s"}
    for (row, column), cell in cells.items():
        data_set = column.partition("-leak")[0].partition("-control")[0]
        clean = table[row, data_set]
        changes = {
            "-leak": {"method.accumulate_gradients": True} if row in turns else {},
            "-control": {"data.train_on_valid": True},
        }.get(column.removeprefix(data_set), {})
        assert cell.recipe.result_content == clean.recipe.with_changes(changes).result_content
        assert (cell.folder == clean.folder) == (not changes)


def test_the_first_row_of_every_table_spot_checked_by_hand() -> None:
    numbers = {name: next(iter(EXPERIMENTS[name].rows.values())).paper for name in TABLES}
    assert numbers["comigs/table1"] == ["156.12", "37.19", "90.65", "30.4", "29.37"]
    assert (numbers["comigs/table2"] or [])[:3] == ["46.48 (0.16)", "47.24 (0.09)", "22.10 (0.17)"]
    assert (numbers["comigs/table6"] or [])[0] == "33.69 (0.21)"
    assert set(TABLES) == {f"comigs/table{i}" for i in (1, 2, 3, 5, 6)}


# ---------------------------------------------------------------- what the paper says about its experiments


def test_the_paper_scale_has_the_published_settings() -> None:
    recipes = {cell.column: cell.recipe for cell in planned("comigs/table1", seeds=[0], methods=["comigs-1g1s"]).cells}
    rounds = {"multilingual": 20, "slimpajama": 50, "ag-news": 20, "common-corpus-llama": 20, "ag-news-llama": 10}
    assert {column: recipe.training.rounds for column, recipe in recipes.items()} == rounds
    for column, recipe in recipes.items():
        training, adapters = recipe.training, recipe.adapters
        assert (training.local_steps, training.batch_size, training.context) == (10, 64, 128)
        assert (training.experts.learning_rate, training.experts.schedule) == (2e-3, "cosine")
        assert (training.router.learning_rate, training.router.schedule) == (2e-3, "constant")
        assert (adapters.rank, adapters.alpha, training.balance_weight) == (8, 16, 0.01)
        assert recipe.method.settings == {"router_every": 30, "router_steps": 10}
        llama = "llama" in column
        assert recipe.base == ("meta-llama/Llama-3.2-1B" if llama else "openai-community/gpt2")
        assert data_of(recipe).held_out == ("mixture" if "ag-news" in column else "own")
    assert data_of(recipes["multilingual"]).max_train_tokens == {"de": 557662, "fr": 407498, "it": 556796, "nl": 451584}
    assert data_of(recipes["ag-news"]).max_test_tokens == {
        "World": 48167,
        "Sports": 47721,
        "Business": 48344,
        "Sci/Tech": 49377,
    }


def test_ranks_match_full_and_active_parameters() -> None:
    cells = planned("comigs/table2", seeds=[0], columns=["ag-news-4222"]).cells
    by_row = {cell.row: cell.recipe for cell in cells}
    # Section 4.3: "to match the full parameter count of CoMiGS-1GXS with (4,2,2,2) LoRA experts (rank 8), LoRA modules
    # of ranks (32,16,16,16)"; "to match the active parameter count, ... rank 16".
    assert by_row["comigs-1gxs"].method.settings["specialists"] == [3, 1, 1, 1]
    assert by_row["comigs-1gxs"].adapters.rank == 8
    for method in ("hetlora", "flexlora"):
        assert by_row[f"{method}-full"].adapters.rank == [32, 16, 16, 16]
        assert by_row[f"{method}-active"].adapters.rank == 16


def test_cells_that_compute_the_same_are_run_once() -> None:
    cells = planned("comigs/table2", seeds=[0]).cells
    folders = {(cell.column, cell.row): cell.folder for cell in cells}
    assert folders["multilingual-2244", "hetlora-active"] == folders["multilingual-4422", "hetlora-active"]
    assert folders["multilingual-2244", "hetlora-full"] != folders["multilingual-4422", "hetlora-full"]
    one = {(c.row, c.column): c.folder for c in planned("comigs/table1", seeds=[0]).cells}
    five = {(c.row, c.column): c.folder for c in planned("comigs/table5", seeds=[0]).cells}
    assert one["pcl", "slimpajama"] == five["pcl", "slimpajama"]


def test_quantities_follow_the_figures() -> None:
    cpu = data_of(planned("comigs/figure5", "cpu", seeds=[0]).cells[0].recipe)
    assert cpu.max_train_tokens == {"de": 8000, "fr": 32000, "it": 32000, "nl": 8000}
    paper = data_of(planned("comigs/figure11", seeds=[0]).cells[0].recipe).max_train_tokens
    assert isinstance(paper, dict)
    assert [4 * paper[n] for n in ("RedPajamaStackExchange", "RedPajamaGithub")] == [
        paper[n] for n in ("RedPajamaArXiv", "RedPajamaBook")
    ]


# ---------------------------------------------------------------- options


def test_rows_columns_seeds_and_base_can_be_chosen() -> None:
    found = planned("comigs/table2", "smoke", methods=["hetlora"], columns=["ag-news-2444"], seeds=[3, 4], base="x/y")
    assert [(c.row, c.seed, c.recipe.base) for c in found.cells] == [
        (row, seed, "x/y") for seed in (3, 4) for row in ("hetlora-active", "hetlora-full")
    ]
    changed = planned("comigs/table1", "smoke", methods=["local"], changes={"training.rounds": 7})
    assert {cell.recipe.training.rounds for cell in changed.cells} == {7}


def test_local_text_is_named_by_option_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ag_news/ag_news", "wiki_ner/wiki_ner"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.jsonl.xz").touch()
    given = planned("comigs/table1", "cpu", base=None, data=tmp_path)
    assert given.columns == ("multilingual", "ag-news")
    assert given.left_out["slimpajama"] == f"{tmp_path}/slim4/stackexchange.jsonl.xz does not exist"
    recipe = given.cells[0].recipe
    assert recipe.base == f"{tmp_path}/models/stories260K"
    assert data_of(recipe).dataset.path == f"{tmp_path}/wiki_ner/wiki_ner.jsonl.xz"
    monkeypatch.setenv("COMINGLE_DATA", str(tmp_path))
    assert planned("comigs/table1", "cpu", base=None).cells == given.cells


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"scale": "cup"}, "--scale 'cup': unknown. Did you mean 'cpu'? Allowed: paper, cpu, cpu-smollm2, smoke"),
        ({"methods": ["fedavq"]}, "--methods: no 'fedavq' in it. Did you mean 'fedavg'? Allowed: pretrained,"),
        ({"columns": ["agnews"]}, "--columns: no 'agnews' in it. Did you mean 'ag-news'? Allowed: multilingual,"),
        ({"data": Path("nowhere/at/all")}, "--data nowhere/at/all: no such folder"),
        ({"scale": "cpu"}, "nothing to run; multilingual: scale cpu takes its base from a folder; give --data FOLDER"),
        ({"changes": {"training.rnds": 1}}, "unknown key 'training.rnds'. Did you mean 'rounds'?"),
    ],
)
def test_mistakes_are_said(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan("comigs/table1", RunSelection(**wanted))
    assert message in str(error.value)


def test_an_unknown_table_is_said() -> None:
    with pytest.raises(RecipeError, match=r"'comigs/table4'. Did you mean 'comigs/table\d'\? Allowed"):
        load_experiment("comigs/table4")
    with pytest.raises(RecipeError, match="no table or figure 'table1'"):
        load_experiment("table1")


# ---------------------------------------------------------------- the format


def test_methods_to_come_are_listed_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy: a name that is taken out and put back would stand last, and the registry's order is the tables'.
    others = {name: make for name, make in REGISTRY.items() if name != "fdlora"}
    monkeypatch.setattr("comingle_papers.reproduce.plan.REGISTRY", others)
    found = planned("comigs/table1", "smoke")
    assert found.missing == ("fdlora",)
    assert "fdlora" not in {cell.row for cell in found.cells}


def test_printed_numbers() -> None:
    assert parse_printed("46.36 (0.16)") == (46.36, 0.16)
    assert parse_printed("156.12") == (156.12, None)
    assert parse_printed("2.6e-12") == (2.6e-12, None)
    assert parse_printed("1e-2 / 3e-2 / 2e-2") == (pytest.approx(0.02), pytest.approx(0.01))
    for odd in ("46,36", "1 / 2 (0.1)", "1 /2", "e-3"):
        with pytest.raises(ValueError, match=f"'{re.escape(odd)}' "):
            Row(method="local", paper=[odd])


def test_a_data_set_is_of_text_or_of_a_task() -> None:
    with pytest.raises(ValueError, match="give users, hub, local and tokens of text, or a task alone"):
        DataSet(label="x", users=["a"], task={"name": "linear"})
    with pytest.raises(ValueError, match="or a task alone"):
        DataSet(label="x", users=["a"], hub={"users": {}})
    with pytest.raises(ValueError, match="or questions alone"):
        DataSet(label="x", task={"name": "linear"}, questions={"name": "xnli"})
    with pytest.raises(ValueError, match=r"questions without a name; give one, as \{name: xnli\}"):
        DataSet(label="x", questions={"train": 3})


def test_rows_and_notes_fit_the_columns() -> None:
    base: dict[str, Any] = {"title": "t", "source": "s", "columns": ["a", "b"]}
    with pytest.raises(ValueError, match="row 'x' has 1 numbers for 2 columns"):
        Experiment(**base, rows={"x": Row(method="local", paper=["1"])})
    note = {"text": "odd", "rows": ["z"], "columns": ["a"]}
    with pytest.raises(ValueError, match="a note is on 'z'"):
        Experiment.model_validate({**base, "rows": {"x": {"method": "local"}}, "notes": [note]})


def test_later_overlays_win_key_by_key() -> None:
    first, second = {"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert merge(first, second) == {"a": {"b": 1, "c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert first == {"a": {"b": 1, "c": [1]}, "d": 1}


def test_only_tables_and_figures_beside_a_study_are_experiments() -> None:
    shipped = {path.parent.name: path for path in published_recipes().glob("*/study.yaml")}
    assert {name.partition("/")[0] for name in EXPERIMENTS} == shipped.keys()
    study, _ = load_experiment("comigs/table1")
    assert isinstance(study, Study)
    assert {len(data.users) for data in study.data.values()} == {len(study.demo)} == {4}
    for data in study.data.values():
        assert {len(numbers) for numbers in data.tokens.values()} == {4}
