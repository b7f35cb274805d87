"""Runs on conversations: losses beside a plain loop over conversations, scores, resuming, and the command line."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from comingle.config import Recipe, parse_recipe
from comingle.methods import REGISTRY
from comingle.models.base import Base
from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel
from comingle.models.random_bases import BOS, EOS, PAD
from comingle.runs import api
from comingle.runs.results import Run
from comingle.runs.session import prepare
from comingle.serving.answers import Prompts
from comingle.training.kinds.base import DataRequest, RunData, kind_of
from comingle.utils.errors import DataError, RunError
from comingle.utils.files import list_checkpoints

BASE = "random:llama?layers=1&dim=32"
CHATML = (
    "{% for message in messages %}{{ '<|bos|>' + message['role'] + '\n' + message['content'] + '<|pad|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)
Turns = Sequence[tuple[str, str]]


def chat(name: str, number: int) -> Turns:
    """One, two or three turns."""
    turns = [("user", f"{name} asks {number}"), ("assistant", "yes" if number % 2 else "no")]
    return [*turns, *[("user", "and?"), ("assistant", f"{number} times")] * (number % 3)]


def rows_of(name: str, count: int = 9) -> list[dict[str, Any]]:
    chats = [chat(name, number) for number in range(count)]
    return [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in chats]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe_of(folder: Path, method: Any = "fedavg", *, users: Sequence[str] = ("ada", "ben"), **changes: Any) -> Recipe:
    for name in users:
        write(folder / f"{name}.jsonl", rows_of(name))
    content = {
        "base": BASE,
        "method": method,
        "data": {
            "kind": "conversations",
            "users": {name: str(folder / f"{name}.jsonl") for name in users},
            "split": {"valid": 0.2, "test": 0.3},
        },
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "batch_size": 2, "context": 128},
        "checkpoints": {"every": 1, "keep": 9},
        "runtime": {"dtype": "float64", "device": "cpu", "threads": 1, "compile": False},
    }
    return parse_recipe(content).with_changes(changes)


@pytest.fixture
def chatml() -> Base:
    """A base with a chat template, in which a response does not end with the end of text."""
    base = load_base(BASE, dtype="float64", device="cpu")
    assert base.tokenizer is not None
    base.tokenizer.chat_template = CHATML
    return base


def by_hand(turns: Turns, *, template: bool) -> tuple[list[int], list[bool]]:
    """Tokens up to the last response, and which of them are of responses."""
    ids: list[int] = []
    learnt: list[bool] = []
    for role, text in turns:
        gap = ([*b"\n"] if template else [*b"\n\n"]) if ids else []
        head = [BOS, *f"{role}\n".encode()] if template else [*f"### {role.capitalize()}:\n".encode()]
        end = [PAD] if template else [EOS] if role == "assistant" else []
        ids += gap + head + [*text.encode(), *end]
        learnt += [False] * (len(gap) + len(head)) + [role == "assistant"] * (len(text.encode()) + len(end))
    return ids, learnt


def naive(run: Run, name: str, test: Sequence[Turns], *, template: bool) -> tuple[float, int]:
    """The losses of responses summed in a plain loop, one conversation after the other, and of how many tokens."""
    personal = run.user(name)
    assert isinstance(personal, PersonalModel)
    total, count = 0.0, 0
    with personal.generating() as network, torch.no_grad():
        for turns in test:
            ids, learnt = by_hand(turns, template=template)
            logits = network(input_ids=torch.tensor([ids])).logits[0].double()
            for place in range(1, len(ids)):
                if learnt[place]:
                    total += float(F.cross_entropy(logits[place - 1], torch.tensor(ids[place])))
                    count += 1
    return total, count


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "floral"])
def test_scores_are_those_of_a_loop_over_conversations(
    tmp_path: Path, chatml: Base, template: bool, method: str
) -> None:
    recipe = recipe_of(tmp_path, {"name": "floral", "clusters": 2} if method == "floral" else method)
    base = chatml if template else load_base(BASE, dtype="float64", device="cpu")
    run_data = prepare(recipe, base=base)
    run = api.run(recipe, run_data=run_data)
    for user in run_data.users:
        said = {tuple(user.test.tokens(i).tolist()) for i in range(len(user.test))}
        test = [turns for i in range(9) if tuple(by_hand(turns := chat(user.name, i), template=template)[0]) in said]
        assert len(test) == len(user.test) == 3
        total, count = naive(run, user.name, test, template=template)
        found = run.metrics["users"][user.name]
        assert found["test_loss_nats"] == pytest.approx(total / count, rel=1e-9)
        assert found["test_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
    assert (run.metrics["measure"], run.metrics["unit"]) == ("perplexity", "samples")


@pytest.mark.parametrize("on", ["responses", "all"])
def test_the_loss_of_training_is_on_what_the_recipe_says(tmp_path: Path, on: str) -> None:
    users = prepare(recipe_of(tmp_path, **{"data.loss_on": on})).users
    for user in users:
        for part, every in ((user.train, on == "all"), (user.valid, False), (user.test, False)):
            hand = {
                tuple(ids): learnt for ids, learnt in (by_hand(chat(user.name, i), template=False) for i in range(9))
            }
            for number in range(len(part)):
                row = part.windows[number]
                learnt = hand[tuple(part.tokens(number).tolist())]
                expected = [every or one for one in learnt] + [False] * (len(row) - len(learnt))
                assert (row >= 0).tolist() == expected


def test_every_response_is_asked_for_after_the_true_earlier_turns(tmp_path: Path, chatml: Base) -> None:
    recipe = recipe_of(tmp_path, **{"data.scores": ["exact_match", "rouge1"]})
    run_data = prepare(recipe, base=chatml)
    run = api.run(recipe, run_data=run_data)
    clients = run.federation.clients
    for user in run_data.users:
        asked = 0
        for number in range(len(user.test)):
            tokens = user.test.tokens(number).tolist()
            turns = next(t for i in range(9) if by_hand(t := chat(user.name, i), template=True)[0] == tokens)
            for place in range(1, len(turns), 2):
                expected = by_hand(turns[:place], template=True)[0] + [*b"\n", BOS, *b"assistant\n"]
                assert user.test.prompt(asked).tolist() == expected
                assert user.test.references[asked] == turns[place][1]
                asked += 1
        assert asked == len(user.test.references)
        found = run.metrics["users"][user.name]
        assert list(found)[:4] == ["test_exact_match", "test_rouge1", "test_perplexity", "test_loss_nats"]
    assert run.metrics["measure"] == "exact_match"
    assert clients.batch_source.unit == "samples"


def test_a_model_that_has_learnt_its_labels_is_accurate(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        users=["ada"],
        **{
            "method": "local",
            "data.scores": ["accuracy"],
            "data.labels": ["Yes!", "no"],
            "training.rounds": 60,
            "adapters.rank": 8,
            "training.experts.learning_rate": 0.05,
        },
    )
    rows = [{"prompt": "is it?", "response": "yes"}] * 9
    write(tmp_path / "ada.jsonl", rows)
    assert api.run(recipe).metrics["mean_test_accuracy"] == 1


@pytest.mark.parametrize("method", sorted(REGISTRY))
@pytest.mark.sampled(6)
def test_methods_of_text_run(tmp_path: Path, method: str) -> None:
    from comingle.training.kinds.base import check_recipe
    from comingle.utils.errors import RecipeError

    recipe = recipe_of(tmp_path, method, **{"runtime.dtype": "float32", "training.rounds": 1})
    text = recipe.with_changes({"data": {"users": {"ada": "x", "ben": "y"}}})
    try:
        check_recipe(text)
    except RecipeError:
        pytest.skip("not for text")
    assert math.isfinite(api.run(recipe).metrics["mean_test_perplexity"])


@pytest.mark.parametrize("method", [{"name": "comigs", "specialists": 2}, "fedamole"], ids=str)
def test_a_users_balance_does_not_depend_on_others_conversations(method: Any) -> None:
    users = {n: [{"prompt": f"{n} {i % 3}", "response": f"{n} {i % 5}"} for i in range(c)] for n, c in COUNTS.items()}
    content = {
        "base": "random:gpt2?layers=1&dim=32&ctx=128", "method": method,
        "training": {"rounds": 2, "batch_size": 4, "context": 64, "balance_weight": 0.05},
    }  # fmt: skip
    data = {"given": True, "split": {"valid": 0.2, "test": 0.2}}
    found = []
    for at_once in (None, 1):
        runtime = {"dtype": "float64", "users_per_step": at_once}
        run = api.run({**content, "runtime": runtime}, users=users, data=data)
        found.append([user["test_loss_nats"] for user in run.metrics["users"].values()])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


COUNTS = {"ada": 20, "cy": 11}


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "comigs-1g1s", **dict[str, Any]({"training.rounds": 3}))
    whole = api.run(recipe, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "metrics.json").unlink()
    for folder in list_checkpoints(tmp_path / "cut")[1:]:
        shutil.rmtree(folder)
    rest = api.run(recipe, out=tmp_path / "cut", resume=True)
    assert torch.equal(rest.federation.clients.state.rows, whole.federation.clients.state.rows)
    assert rest.metrics["users"] == whole.metrics["users"]


def test_a_finished_run_opens_and_notices_changed_conversations(tmp_path: Path) -> None:
    run = api.run(recipe_of(tmp_path), out=tmp_path / "out")
    opened = api.load(tmp_path / "out")
    asked = [{"role": "user", "content": "ada asks 3"}]
    spoken = [one.user("ada").generate(asked, max_new_tokens=5) for one in (run, opened)]
    assert spoken[0] == spoken[1]
    write(tmp_path / "ada.jsonl", rows_of("eve"))
    with pytest.raises(RunError, match=r"/out: user 'ada': .*data"):
        len(api.load(tmp_path / "out").federation.clients.users[0].test)


@pytest.mark.parametrize("place", ["recipe", "section", "keys"])
def test_rows_with_columns_by_other_names_are_handed_over(tmp_path: Path, place: str) -> None:
    rows = [{"q": f"What is {n}?", "context": "", "a": f"{n}."} for n in range(9)]
    plain = [{"prompt": row["q"], "response": row["a"]} for row in rows]
    options = recipe_of(tmp_path).model_dump(mode="json", exclude_unset=True)
    split = options.pop("data")["split"]
    named = {"prompt": ["q", "context"], "response": "a"}
    changes: dict[str, Any] = {}
    if place == "recipe":
        options["data"] = {"split": split, **named}
    elif place == "section":
        changes = {"data": {"split": split, **named}}
    else:
        options["data"], changes = {"split": split}, {f"data.{key}": value for key, value in named.items()}
    run = api.run(options, users={"ada": rows}, **changes)
    expected = api.run({**options, "data": {"split": split}}, users={"ada": plain})
    assert run.recipe.data.kind == "conversations"
    assert run.metrics["users"] == expected.metrics["users"]


def test_programs_hand_over_rows_data_sets_and_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    recipe = recipe_of(tmp_path, users=["ada", "ben", "cy"])
    files = prepare(recipe)
    given = recipe.with_changes(
        {"data": {"kind": "conversations", "given": True, "split": {"valid": 0.2, "test": 0.3}}}
    )
    kind, base = kind_of(given), files.base
    assert base is not None
    held = {
        "ada": rows_of("ada"),
        "ben": datasets.Dataset.from_list(rows_of("ben")),
        "cy": tmp_path / "cy.jsonl",
    }
    assert [kind.accepts(data, {}) for data in held.values()] == [True, True, False]  # a path may be of any kind
    assert kind.accepts([{"prompt": "a", "response": "b"}], {})
    assert kind.accepts([{"q": "a", "context": "", "a": "b"}], {"prompt": ["q", "context"], "response": "a"})
    assert not kind.accepts([{"prompt": "a", "response": "b"}], {"prompt": "q"})
    assert kind.accepts([{"prompt": "a", "response": "b"}], {"prompt": 3, "response": []})  # which are refused later
    assert not kind.accepts(["text"], {})
    assert not kind.accepts([{"text": "a"}], {})

    def adopted(users: dict[str, Any]) -> RunData:
        return kind.read(DataRequest(recipe=given, load_base=lambda: base, validates=False, given=users))

    found = adopted(held)
    assert found.digests == files.digests
    splits = {"train": rows_of("ada"), "test": rows_of("eve", 2)}
    (ada,) = adopted({"ada": splits}).users
    assert (len(ada.train), len(ada.valid), len(ada.test)) == (7, 2, 2)
    with pytest.raises(DataError, match=r"user 'ada': row 1: .*empty"):
        adopted({"ada": [{"prompt": "a", "response": " "}]})


@pytest.mark.slow
def test_the_command_line_from_files_to_a_report(comingle: Any, tmp_path: Path, chatml: Base) -> None:
    assert chatml.tokenizer is not None
    chatml.model.save_pretrained(tmp_path / "base")
    chatml.tokenizer.save_pretrained(tmp_path / "base")
    recipe = recipe_of(tmp_path, **{"runtime.dtype": "float32", "evaluation.every": 1, "method": "comigs-1g1s"})
    content = {**yaml.safe_load(recipe.as_yaml()), "base": str(tmp_path / "base")}
    content["data"] = {"kind": "conversations", "users": {"ada": "ada.jsonl", "ben": "ben.jsonl"}}
    path = tmp_path / "chats.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = comingle("data", path)
    assert found.code == 0, found.err
    assert "conversations" in found.out
    assert "<|bos|>assistant\\n[[no<|pad|>]]\\n<|bos|>user\\nand?<|pad|>" in "".join(found.out.splitlines())
    assert comingle("cost", path).code == 0
    found = comingle("run", path, "--out", tmp_path / "out")
    assert found.code == 0, found.err
    found = comingle("show", tmp_path / "out")
    assert found.code == 0, found.err
    found = comingle("report", tmp_path / "out", "--out", tmp_path / "report.html", "--tokens")
    found = found if found.code == 0 else comingle("report", tmp_path / "out", "--out", tmp_path / "report.html")
    assert found.code == 0, found.err


DATED = "{{ '<|bos|>Now: ' + strftime_now('%d %b %Y %H:%M:%S') + '\n' }}" + CHATML


@pytest.mark.slow
def test_the_date_in_a_template_is_that_of_the_run(tmp_path: Path, chatml: Base) -> None:
    """Seconds stand for days: a run goes on, opens and speaks with the date that it began with."""
    assert chatml.tokenizer is not None
    chatml.tokenizer.chat_template = DATED
    base, recipe = (chatml.model, chatml.tokenizer), recipe_of(tmp_path)
    first = api.run(recipe, base=base, out=tmp_path / "run")
    date = datetime.fromisoformat(json.loads((tmp_path / "run" / "inputs.json").read_text())["settings"]["date"])
    assert 0 <= (datetime.now() - date).total_seconds() < 300
    time.sleep(1.1)
    shutil.rmtree(list_checkpoints(tmp_path / "run")[-1])
    (tmp_path / "run" / "metrics.json").unlink()
    again = api.run(recipe, base=base, out=tmp_path / "run", resume=True)
    assert again.metrics["users"] == first.metrics["users"]
    model = api.load(tmp_path / "run", base=base).user("ada")
    assert isinstance(model, PersonalModel)
    assert model.model.base.date == date
    head = f"Now: {date:%d %b %Y %H:%M:%S}\n".encode()
    prompts = Prompts(model.model.base)
    test = first.federation.clients.users[0].test
    for tokens in (prompts.of_messages([{"role": "user", "content": "a"}]), test.prompt(0).tolist()):
        assert bytes(token for token in tokens if token < 256).startswith(head)


def test_runs_without_a_dated_template_record_no_date(tmp_path: Path, chatml: Base) -> None:
    api.run(recipe_of(tmp_path), base=(chatml.model, chatml.tokenizer), out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())["settings"] == {}
