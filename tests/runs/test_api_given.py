"""What a program hands over gives the same run as what a recipe names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import comingle
from comingle.config import Recipe, load_recipe
from comingle.config.settings import OptimizerSection
from comingle.data.sources import read_documents
from comingle.methods import REGISTRY, make
from comingle.methods.base import Method
from comingle.methods.baselines import fedavg
from comingle.models.loading import given_base, load_base
from comingle.runs.given import NOTHING, given_of, recipe_with
from comingle.runs.results import Run
from comingle.training.kinds.base import kind_of_users
from comingle.utils.errors import BaseModelError, ComingleError, DataError, PluginError, RecipeError, RunError

NAMES = ("ann", "bob", "cem")
BASE = "random:llama?layers=1&dim=32"
OFTEN_OTHER = ("wall_seconds", "peak_memory_bytes", "tokens_per_second", "base")


@pytest.fixture
def project(recipe_file: Path) -> Path:
    """A recipe of a tiny run with its users' files beside it."""
    content = yaml.safe_load(recipe_file.read_text())
    content["base"] = BASE
    content["training"] |= {"rounds": 2, "local_steps": 1}
    recipe_file.write_text(yaml.safe_dump(content))
    return recipe_file


@pytest.fixture
def options(project: Path) -> dict[str, Any]:
    """The same recipe as a mapping that names no users."""
    content = yaml.safe_load(project.read_text())
    del content["data"]["users"]
    return content


@pytest.fixture
def texts(project: Path) -> dict[str, list[str]]:
    return {name: read_documents(project.parent / "texts" / f"{name}.txt") for name in NAMES}


def computed(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.metrics.items() if key not in OFTEN_OTHER}


def rows(run: Any) -> torch.Tensor:
    return run.federation.clients.state.rows


def refused(kind: type[ComingleError], action: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- users


def test_texts_in_hand_give_the_run_that_files_give(
    project: Path, options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    from_files = comingle.run(project, out=tmp_path / "files")
    for given in (texts, {name: project.parent / "texts" / f"{name}.txt" for name in NAMES}):
        in_hand = comingle.run(options, users=given)
        assert computed(in_hand) == computed(from_files)
        assert torch.equal(rows(in_hand), rows(from_files))
    assert in_hand.events[-1] == from_files.events[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "project"]


def test_a_recipe_may_be_a_file_an_object_or_a_mapping_and_keeps_its_options(
    project: Path, options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
    runs = [
        comingle.run(one, users=texts) for one in (options, tmp_path / "options.yaml", project, load_recipe(project))
    ]
    assert len({json.dumps(computed(run)) for run in runs}) == 1
    assert {run.recipe.fingerprint for run in runs} == {runs[0].recipe.fingerprint}
    assert runs[0].metrics["users"]["ann"]["test_tokens"] == 59  # of data.max_test_tokens, the first is not predicted


def test_options_of_the_data_may_stand_beside_the_users(options: dict[str, Any], texts: dict[str, list[str]]) -> None:
    data = options.pop("data")
    done = comingle.run(options | {"data": data}, users=texts)
    assert computed(comingle.run(options, users=texts, data=data)) == computed(done)
    assert computed(comingle.run(done.recipe, users=texts, data=data)) == computed(done)
    message = refused(RecipeError, lambda: comingle.run(options, users=texts, data={"spilt": {}}))
    assert "data.spilt" in message


def test_tables_and_splits_are_text_too(options: dict[str, Any], texts: dict[str, list[str]]) -> None:
    datasets = pytest.importorskip("datasets")
    plain = comingle.run(options, users=texts)
    tables = {name: datasets.Dataset.from_dict({"text": text, "id": range(len(text))}) for name, text in texts.items()}
    assert computed(comingle.run(options, users=tables)) == computed(plain)
    long = {name: [f"{name} {i} " * 20 for i in range(30)] for name in NAMES}
    parts = {name: {"train": text[:20], "valid": text[20:25], "test": text[25:]} for name, text in long.items()}
    named = {name: {"train": p["train"], "validation": p["valid"], "test": p["test"]} for name, p in parts.items()}
    of_tables = {
        name: datasets.DatasetDict({split: datasets.Dataset.from_dict({"body": d}) for split, d in p.items()})
        for name, p in named.items()
    }
    assert computed(comingle.run(options, users=parts)) == computed(comingle.run(options, users=of_tables))


def test_a_run_goes_on_with_the_same_texts_alone(
    options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    done = comingle.run(options, users=texts, out=tmp_path / "run")
    again = comingle.run(options, users=texts, out=tmp_path / "run", resume=True)
    assert computed(again) == computed(done)
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["data"]["given"] is True
    changed = texts | {"bob": [*texts["bob"], "one more"]}
    message = refused(RunError, lambda: comingle.run(options, users=changed, out=tmp_path / "run", resume=True))
    assert "user 'bob': the train data changed since the run began" in message
    assert "pass users={...} again" in refused(DataError, lambda: comingle.run(tmp_path / "run"))


def as_rows(texts: list[str]) -> list[dict[str, str]]:
    return [{"prompt": f"{number}?", "response": text[:8].strip() or "-"} for number, text in enumerate(texts)]


@pytest.mark.parametrize("kind", ["text", "conversations"])
@pytest.mark.slow
def test_a_run_opens_without_its_data_and_scores_with_it(
    comingle_command: Any, options: dict[str, Any], texts: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    other = ["something else"] * 30
    if kind == "conversations":
        options["data"] = {"split": {"valid": 0.2, "test": 0.2}}
        options["training"] = {"rounds": 1, "batch_size": 2, "context": 64}
        texts, other = {name: as_rows(texts[name][0].split()[:12]) for name in NAMES}, as_rows(other)
    done = comingle.run(options, users=texts, out=tmp_path / "run")
    opened = comingle.load(tmp_path / "run")
    assert opened.user("ann").generate("a", max_new_tokens=3) == done.user("ann").generate("a", max_new_tokens=3)  # type: ignore[union-attr]
    assert "pass users={...} again" in refused(DataError, opened.federation.clients.evaluate)
    whole = comingle.load(tmp_path / "run", users=texts)
    scores = [score.measures["perplexity"] for score in whole.federation.clients.evaluate()]
    assert scores == [done.metrics["users"][name]["test_perplexity"] for name in NAMES]
    wrong = comingle.load(tmp_path / "run", users=texts | {"ann": other})
    assert "user 'ann'" in refused(RunError, wrong.federation.clients.evaluate)
    # The command line has no data to give: it says so, and counts without.
    for verb, *words in (("run", "--out", tmp_path / "again"), ("cost",), ("data",)):
        found = comingle_command(verb, tmp_path / "run", *words)
        assert found.code == 2
        assert "users={...}" in found.err
    assert "3 users: user 1, user 2, user 3" in comingle_command("cost", tmp_path / "run", "--users", "3").out


def test_a_handed_base_cannot_be_counted(comingle_command: Any, texts: dict[str, Any], tmp_path: Path) -> None:
    base = load_base(BASE, dtype="float32", device="cpu")
    training = {"rounds": 1, "local_steps": 1, "context": 16}
    comingle.run(users=texts, base=(base.model, base.tokenizer), training=training, out=tmp_path / "run")  # type: ignore[arg-type]
    found = comingle_command("cost", tmp_path / "run", "--users", "3")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "base: a program passed it" in found.err


@pytest.mark.parametrize(
    ("users", "wanted"),
    [
        ({}, "got an empty dict"),
        ({"ann": 3}, "text: a list of texts"),
        ({"ann": [3]}, "'ann' is list of int"),
        ({"ann": {"trian": ["a"]}}, "'ann' is dict with trian"),
        (
            {"ann": [{"text": "a", "split": "train"}]},
            "to use the column 'split', pass {train: [...], valid: [...], test",
        ),
        ({"": ["a"]}, "a user's name is empty"),
    ],
)
def test_users_of_no_kind_are_refused_in_one_line(users: dict[str, Any], wanted: str) -> None:
    assert wanted in refused(DataError, lambda: kind_of_users(users, {}))


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ([], "user 'ann': no text"),
        (["  "], "user 'ann': no text"),
        (["a", None], "user 'ann': document 2: got None; allowed: text"),
        (["a", 3], "user 'ann': document 2: got 3; allowed: text"),
        ("it is me", "give a list of documents"),
        ({"train": ["a"]}, "user 'ann': no split 'test'; found: train; give train and test"),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_one_line(options: dict[str, Any], data: Any, wanted: str) -> None:
    assert wanted in refused(DataError, lambda: comingle.run(options, users={"ann": data}))


def test_users_of_two_kinds_are_refused_with_who_is_of_which(monkeypatch: pytest.MonkeyPatch) -> None:
    from comingle_papers.questions import QuestionsKind

    monkeypatch.setattr(QuestionsKind, "accepts", lambda self, data, options: data == 3)
    message = refused(DataError, lambda: kind_of_users({"ann": ["a"], "bob": 3, "cem": ["b"]}, {}))
    assert message.startswith("users: ")
    assert message.endswith("; ann has text, bob has questions")


# ---------------------------------------------------------------- base


def test_a_loaded_base_gives_the_run_of_its_name_and_stays_as_it_is(
    options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    loaded = load_base(BASE, dtype="float32", device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    model.train()
    model.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held, modules = model.config.to_dict(), [type(module) for module in model.modules()]
    named = comingle.run(options, users=texts)
    given = comingle.run(options, users=texts, base=(model, tokenizer), out=tmp_path / "run")
    assert computed(given) == computed(named)
    assert torch.equal(rows(given), rows(named))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config.to_dict() == held
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shared = given.federation.clients.model.base.model  # type: ignore[attr-defined]
    assert shared.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()  # pyright: ignore[reportCallIssue]
    _opens_with_its_base_alone(tmp_path / "run", given, model, tokenizer)


def _opens_with_its_base_alone(folder: Path, run: Any, model: Any, tokenizer: Any) -> None:
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["base"] == "given"
    assert "pass base=(model, tokenizer) again" in refused(BaseModelError, lambda: comingle.load(folder))
    opened = comingle.load(folder, base=(model, tokenizer))
    assert opened.user("ann").generate("a", max_new_tokens=3) == run.user("ann").generate("a", max_new_tokens=3)  # type: ignore[union-attr]
    other = load_base(BASE, dtype="float32", device="cpu", seed=1)
    message = refused(RunError, lambda: comingle.load(folder, base=(other.model, other.tokenizer)))
    assert "the base changed since the run began" in message


def test_a_base_that_does_not_fit_is_refused_in_one_line(options: dict[str, Any], texts: dict[str, list[str]]) -> None:
    loaded = load_base(BASE, dtype="float32", device="cpu")

    def refuse(model: Any, **settings: str) -> str:
        return refused(BaseModelError, lambda: given_base(model, loaded.tokenizer, **settings))

    assert "base: got Linear" in refuse(torch.nn.Linear(2, 2))
    assert "runtime.dtype: got 'float64', but the base is in float32" in refuse(loaded.model, dtype="float64")
    assert "got LlamaModel" in refuse(loaded.model.model) or "expected a causal" in refuse(loaded.model.model)
    assert "weights in float8_e5m2; allowed" in refuse(
        load_base(BASE, dtype="float32", device="cpu").model.to(torch.float8_e5m2)  # pyright: ignore[reportArgumentType]
    )
    wrong = load_base(BASE, dtype="float32", device="cpu").model
    wrong.lm_head.weight.data[0, 0] = torch.nan
    assert "not finite" in refuse(wrong)
    assert "no tokenizer" in refused(DataError, lambda: comingle.run(options, users=texts, base=(loaded.model, None)))
    makes_nets = refused(BaseModelError, lambda: comingle.run(options, users=texts, base=torch.nn.Sequential))
    assert makes_nets.startswith("base: got a function")
    assert "(model, tokenizer)" in makes_nets
    assert "got Linear; allowed: a name, (model" in refused(
        BaseModelError, lambda: given_of(None, torch.nn.Linear(1, 1))
    )
    assert given_of(None, BASE) == NOTHING


def test_a_module_in_place_of_a_function_is_refused_with_a_way_out() -> None:
    class Small(torch.nn.Module):
        pass

    ends = {
        "; pass the class Small, or a function that makes one": Small(),
        "; pass a function that makes one": torch.nn.Sequential(),
        "a function that returns an nn.Module": 3,
    }
    for end, given in ends.items():
        assert refused(BaseModelError, lambda given=given: given_of(None, given)).endswith(end)


# ---------------------------------------------------------------- method


def mine(*, generalists: int = 2) -> Method:
    """FedAvg under another name."""
    method = fedavg()
    return replace(method, name="mine", placement=replace(method.placement, generalists=generalists))


@pytest.mark.slow
def test_a_method_in_hand_gives_the_run_of_a_registered_one(
    options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path
) -> None:
    registered = comingle.run(options, users=texts, method="fedavg")
    settings = "resolved_method_settings"  # those of the function, which has others than fedavg
    for given in (mine, mine(), {"name": mine, "generalists": 2}):
        run = comingle.run(options, users=texts, method=given)
        named = {"method": "fedavg", settings: registered.metrics[settings]}
        assert computed(run) | named == computed(registered)
        assert torch.equal(rows(run), rows(registered))
    assert "mine" not in REGISTRY
    assert comingle.run(options, users=texts, method=fedavg).recipe.method.name == "fedavg"
    assert comingle.run(options, users=texts, method=make("fedavg")).recipe.method.name == "fedavg"
    fewer = comingle.run(options, users=texts, method={"name": mine, "generalists": 1}, out=tmp_path / "run")
    assert fewer.metrics["trainable_parameters"] < registered.metrics["trainable_parameters"]
    message = refused(RunError, lambda: comingle.load(tmp_path / "run"))
    assert "no method 'mine' here" in message
    opened = comingle.load(tmp_path / "run", method=mine, users=texts)
    assert computed(opened) == computed(fewer)
    assert [score.measures["perplexity"] for score in opened.federation.clients.evaluate()] == [
        user["test_perplexity"] for user in fewer.metrics["users"].values()
    ]
    assert "allowed: the run's, 'mine'" in refused(RunError, lambda: comingle.load(tmp_path / "run", method="fedavg"))


def test_a_method_that_cannot_be_used_is_refused_in_one_line(
    options: dict[str, Any], texts: dict[str, list[str]]
) -> None:
    other = replace(mine(generalists=1), name="fedavg")
    assert "comingle.methods: 'fedavg'" in refused(
        PluginError, lambda: comingle.run(options, users=texts, method=other)
    )
    unknown = refused(RecipeError, lambda: comingle.run(options, users=texts, method={"name": mine, "generalist": 1}))
    assert "Did you mean 'generalists'?" in unknown
    assert "mapping without name" in refused(RecipeError, lambda: comingle.run(options, users=texts, method={"a": 1}))
    assert "mine" not in REGISTRY


# ---------------------------------------------------------------- results


def test_results_are_plain_records_and_tables(options: dict[str, Any], texts: dict[str, list[str]]) -> None:
    run = comingle.run(options, users=texts, method="local")
    records = run.records()
    assert [record["user"] for record in records] == list(NAMES)
    assert records[0]["test_perplexity"] == run.metrics["users"]["ann"]["test_perplexity"]
    assert [event["event"] for event in run.events][:2] == ["start", "evaluation"]
    assert run.events[-1]["event"] == "end"
    assert len(repr(run)) < 120
    pytest.importorskip("pandas")
    assert run.to_pandas().to_dict("records") == records


def test_a_table_without_pandas_is_one_line(
    options: dict[str, Any], texts: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = comingle.run(options, users=texts, method="pretrained")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert "pip install pandas" in refused(RunError, run.to_pandas)


def test_methods_compare_as_their_runs_do(options: dict[str, Any], texts: dict[str, list[str]], tmp_path: Path) -> None:
    compared = comingle.compare(options, ["local", mine], seeds=[0, 1], users=texts)
    single = comingle.run(options, users=texts, method="local", seed=1)
    assert list(compared.metrics) == [("local", 0), ("mine", 0), ("local", 1), ("mine", 1)]
    assert compared.metrics["local", 1]["users"] == single.metrics["users"]
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert {(r["method"], r["seed"], r["user"]) for r in compared.records()} == {
        (method, seed, user) for method, seed in compared.metrics for user in NAMES
    }
    assert "mine, seed 1: mean test perplexity" in repr(compared)
    (verdict,) = compared.against()
    assert (verdict["method"], verdict["seeds"]) == ("mine", [0, 1])
    assert verdict["verdict"] in ("better", "level", "worse")
    assert [one["method"] for one in compared.against("mine")] == ["local"]
    assert "not among the methods" in refused(RecipeError, lambda: compared.against("theirs"))
    written = comingle.compare(options, ["local"], seeds=[0], users=texts, out=tmp_path / "table")
    assert {path.name for path in (tmp_path / "table").iterdir()} == {"local-seed0", "table.md", "table.json"}
    assert written.against() == []
    assert written.metrics["local", 0]["users"] == compared.metrics["local", 0]["users"]
    assert "'local' twice" in refused(RecipeError, lambda: comingle.compare(options, ["local", "local"], users=texts))
    assert "methods: got none" in refused(RecipeError, lambda: comingle.compare(options, [], users=texts))


def test_a_mapping_keeps_the_rest_of_the_section_that_it_changes() -> None:
    training = {"rounds": 4, "context": 16, "experts": {"learning_rate": 0.02, "betas": [0.8, 0.9]}}
    data = {"users": {"ada": "demo:library"}, "max_train_tokens": 4000, "split": {"valid": 0.2}}
    recipe = {"data": data, "method": {"name": "comigs-1g1s", "router_every": 2}, "training": training}

    def changed(**changes: Any) -> Recipe:
        return recipe_with(recipe, NOTHING, base=None, method=None, changes=changes)

    read = changed(training={"rounds": 1, "experts": {"learning_rate": 0.5}})
    assert (read.training.rounds, read.training.context) == (1, 16)
    assert (read.training.experts.learning_rate, read.training.experts.betas) == (0.5, (0.8, 0.9))
    assert changed(training=None).training == Recipe.model_validate({"data": data}).training
    sgd = changed(training={"experts": {"name": "sgd"}}).training
    assert (sgd.context, sgd.experts.learning_rate) == (16, OptimizerSection().learning_rate)
    assert changed(method={"name": "fedavg"}).method.settings == {}
    kept = changed(data={"max_test_tokens": 500}).data.model_dump(exclude_unset=True)
    assert (kept["max_train_tokens"], kept["max_test_tokens"], list(kept["users"])) == (4000, 500, ["ada"])
    other = changed(data={"users": {"ben": "demo:reference"}}).data.model_dump(exclude_unset=True)
    assert (list(other["users"]), other.get("max_train_tokens")) == (["ben"], None)
    assert changed(**{"training.experts": {"learning_rate": 0.5}}).training.experts.betas == (0.8, 0.9)
