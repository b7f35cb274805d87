"""Conversations out of files, data sets and real rows; and what is wrong with one, in one line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from comingle.cli.training import warn_overlaps
from comingle.config import Recipe, parse_recipe
from comingle.data.conversations.reading import UserConversations, read_users
from comingle.data.row_files import BadRowsError
from comingle.models.random_bases import EOS
from comingle.runs.session import build, prepare
from comingle.training.kinds.conversations import section
from comingle.utils.errors import DataError, RecipeError

GOOD = {"prompt": "a", "response": "b"}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


LONG = "random:llama?layers=1&dim=32&ctx=2048"


def recipe_of(data: Mapping[str, Any], **changes: Any) -> Recipe:
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": "fedavg",
        "data": {"kind": "conversations", **data},
        "adapters": {"rank": 2},
        "training": {"rounds": 1, "batch_size": 4, "context": 64},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    return parse_recipe(content).with_changes(changes)


def read(data: Mapping[str, Any]) -> list[UserConversations]:
    return read_users(section(recipe_of(data)), 0)


def test_a_common_system_message_is_no_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = {"role": "system", "content": " ".join(f"rule{n}" for n in range(40))}
    rows = [
        {
            "messages": [
                system,
                {"role": "user", "content": f"{n} and {n}?"},
                {"role": "assistant", "content": f"{2 * n}"},
            ]
        }
        for n in range(20)
    ]
    data = {"users": {"ada": {"train": str(write(tmp_path / "a.jsonl", rows[:10])), "test": str(tmp_path / "b.jsonl")}}}
    write(tmp_path / "b.jsonl", rows[10:])
    recipe = recipe_of(data, base=LONG, **{"training.context": 1024})
    warn_overlaps(prepare(recipe))
    assert capsys.readouterr().err == ""
    write(tmp_path / "b.jsonl", rows[8:])
    warn_overlaps(prepare(recipe))
    assert re.search("user ada: .*0 of 1 .*2 of 12 test conversations", capsys.readouterr().err)


def said(user: UserConversations, split: str) -> list[list[str]]:
    return [[message["content"] for message in messages] for _, messages in getattr(user, split)]


def test_three_spellings_are_the_same_conversation(tmp_path: Path) -> None:
    turns = [("user", "human", "a"), ("assistant", "gpt", "b")]
    rows = {
        "one": {"messages": [{"role": role, "content": text} for role, _, text in turns]},
        "two": {"conversations": [{"from": who, "value": text} for _, who, text in turns]},
        "three": GOOD,
    }
    files = {name: str(write(tmp_path / f"{name}.jsonl", [row])) for name, row in rows.items()}
    found = read({"users": files, "split": {"valid": 0, "test": 0}})
    assert [messages for user in found for _, messages in user.train] == [
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    ] * 3


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_tables_have_prompts_and_responses_by_names_of_their_own(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"q": f"q{i}", "a": f"a{i}", "messages": "no"} for i in range(10)])
    path = tmp_path / f"ada.{suffix}"
    getattr(rows, f"to_{suffix}")(str(path))
    (ada,) = read({"users": {"ada": str(path)}, "prompt": "q", "response": "a", "split": {"valid": 0.2, "test": 0.1}})
    parts = [said(ada, split) for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [7, 2, 1]
    assert sorted(pair for part in parts for pair in part) == sorted([f"q{i}", f"a{i}"] for i in range(10))


ALPACA = [
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"instruction": "Count.", "input": None, "output": "One."},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_prompt_may_be_the_texts_of_several_columns(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / f"ada.{suffix}"
    write(path, ALPACA) if suffix == "jsonl" else datasets.Dataset.from_list(ALPACA).to_parquet(str(path))
    columns = {"prompt": ["instruction", "input"], "response": "output"}
    (ada,) = read({"users": {"ada": str(path)}, **columns, "split": {"valid": 0, "test": 0}})
    assert sorted(said(ada, "train")) == [["Add.\n\n1, 2", "3"], ["Count.", "One."], ["Say hello.", "Hello."]]


def test_a_field_of_the_prompt_that_no_row_has_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    rows = [{"q": "a", "meta": {"context": "b"}, "response": "c"}, {"q": "a", "meta": None, "response": "c"}]
    users = {"ada": str(write(tmp_path / "ada.jsonl", rows))}
    (ada,) = read({"users": users, "prompt": ["q", "meta.context"], "split": {"valid": 0, "test": 0}})
    assert sorted(said(ada, "train")) == [["a", "c"], ["a\n\nb", "c"]]
    with pytest.raises(DataError, match=r"line 1: .*'meta\.contxt'.*q, meta, response"):
        read({"users": users, "prompt": ["q", "meta.contxt"]})


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (
            {"instruction": "a", "output": "b"},
            r"'input'; found: instruction, output; allowed: 'instruction', 'input'",
        ),
        ({"instruction": None, "input": "a", "output": "b"}, "'instruction'; found: instruction, input, output"),
        ({"instruction": "a", "input": 3, "output": "b"}, "input.* 3;"),
    ],
)
def test_a_column_of_the_prompt_that_a_row_lacks_is_named(tmp_path: Path, row: Mapping[str, Any], wrong: str) -> None:
    path = write(tmp_path / "ada.jsonl", [*ALPACA, row])
    with pytest.raises(DataError, match=f"^user 'ada': {re.escape(str(path))}: line 4: .*{wrong}") as found:
        read({"users": {"ada": str(path)}, "prompt": ["instruction", "input"], "response": "output"})
    assert "\n" not in str(found.value)


def test_splits_given_as_files_are_kept_and_valid_is_cut_from_train(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "response": "a"} for i in range(12)]
    old, new = write(tmp_path / "old.jsonl", rows[:10]), write(tmp_path / "new.jsonl", rows[10:])
    (ada,) = read({"users": {"ada": {"train": str(old), "test": str(new)}}, "split": {"valid": 0.2}})
    assert said(ada, "test") == [["q10", "a"], ["q11", "a"]]
    assert (len(ada.train), len(ada.valid)) == (8, 2)
    (ada,) = read({"users": {"ada": {"train": str(old), "valid": str(new), "test": str(new)}}})
    assert (len(ada.train), said(ada, "valid")) == (10, said(ada, "test"))


def test_rows_are_grouped_by_a_column(tmp_path: Path) -> None:
    rows = [{"who": {"id": f"u{i % 3}"}, "part": "dev" if i % 4 == 0 else "main", **GOOD} for i in range(24)]
    path = write(tmp_path / "all.jsonl", rows)
    dataset = {"path": str(path), "user": "who.id", "split": "part"}
    split = {"given": True, "train_name": "main", "test_name": "dev", "valid": 0}
    found = read({"dataset": {**dataset, "users": ["u2", "u0"]}, "split": split})
    assert [(user.name, len(user.train), len(user.test)) for user in found] == [("u2", 6, 2), ("u0", 6, 2)]
    found = read({"dataset": {**dataset, "users": 2, "max_conversations": 1}, "split": split})
    assert [(user.name, len(user.train), len(user.test)) for user in found] == [("u0", 1, 1), ("u1", 1, 1)]
    with pytest.raises(DataError, match=r"all\.jsonl: .*'u9'.*u0, u1, u2"):
        read({"dataset": {**dataset, "users": ["u9"]}, "split": split})
    with pytest.raises(DataError, match=r"all\.jsonl: .*'whom'.*who, part, prompt, response"):
        read({"dataset": {**dataset, "user": "whom"}})


def chat(*roles: str, content: Any = "x") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role in roles]}


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"text": "a"}, "'prompt'; found: text; allowed: 'messages'.*'prompt' and 'response'.*'conversations'"),
        ({"prompt": "a", "response": " "}, "empty response"),
        ({"prompt": "a", "response": 3}, "response.* 3;"),
        (chat("user"), "no response"),
        (chat("assistant"), "only response"),
        (chat("user", "robot"), r"messages\[1\].*'robot'; allowed: system, user, assistant, tool, developer"),
        (chat("user", "assistant", content=None), r"messages\[0\]\.content.* None;"),
        ({"messages": "a"}, "messages.* 'a';.* role and content"),
        ({"messages": []}, "no response"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path: Path, row: Mapping[str, Any], wrong: str) -> None:
    path = write(tmp_path / "ada.jsonl", [GOOD, row])
    with pytest.raises(DataError, match=f"^user 'ada': {re.escape(str(path))}: line 2: .*{wrong}") as found:
        read({"users": {"ada": str(path)}})
    assert "\n" not in str(found.value)


def turn(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def one_chat(tmp_path: Path, row: Mapping[str, Any], **data: Any) -> list[dict[str, Any]]:
    path = write(tmp_path / "ada.jsonl", [row])
    (ada,) = read({"users": {"ada": str(path)}, "split": {"valid": 0, "test": 0}, **data})
    ((_, messages),) = ada.train
    return list(messages)


ASKED = [turn("user", "a"), turn("assistant", "b")]


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "trainable"])
@pytest.mark.parametrize("off", [0, 0.0, False])
def test_responses_are_left_out_of_the_loss(tmp_path: Path, key: str, off: Any) -> None:
    turns = [turn("user", "a", **{key: off}), turn("assistant", "WRONG", **{key: off}), *ASKED]
    turns[-1] = {**turns[-1], key: True}
    found = one_chat(tmp_path, {"messages": turns})
    assert [message.get("learn") for message in found] == [None, False, None, None]
    shared = {"from": "gpt", "value": "b", key: off}
    with pytest.raises(DataError, match=r"ada.jsonl: line 1: every response"):
        one_chat(tmp_path, {"conversations": [{"from": "human", "value": "a"}, shared]})
    for wrong, said in ((0.5, "0.5"), ("no", "'no'"), (2, "2")):
        with pytest.raises(DataError, match=rf"messages\[1\]\.{key}.* {said}; allowed: 0 or 1"):
            one_chat(tmp_path, {"messages": [turn("user", "a"), turn("assistant", "b", **{key: wrong})]})
    with pytest.raises(DataError, match=rf"messages\[0\]\.{key}.* 1 .*user.*data\.loss_on: all"):
        one_chat(tmp_path, {"messages": [turn("user", "a", **{key: 1}), ASKED[1]]})


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"system": "Arr.", "messages": ASKED}, [turn("system", "Arr."), *ASKED]),
        ({"system_prompt": "Arr.", "prompt": "a", "response": "b"}, [turn("system", "Arr."), *ASKED]),
        ({"system": "Arr.", "messages": [turn("system", "Arr."), *ASKED]}, [turn("system", "Arr."), *ASKED]),
        ({"system": None, "history": [], "messages": ASKED}, ASKED),
        (
            {"history": [["1?", "1"]], "prompt": "a", "response": "b", "system": "Arr."},
            [turn("system", "Arr."), turn("user", "1?"), turn("assistant", "1"), *ASKED],
        ),
        ({"history": ASKED, "messages": ASKED}, [*ASKED, *ASKED]),
        ({"messages": [turn("developer", "Arr."), *ASKED]}, [turn("system", "Arr."), *ASKED]),
        (
            {"messages": [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]), ASKED[1]]},
            [turn("user", "ac"), ASKED[1]],
        ),
        (
            {"messages": [ASKED[0], turn("assistant", "b", reasoning_content="why")]},
            [ASKED[0], turn("assistant", "<think>\nwhy\n</think>\n\nb")],
        ),
        ({"messages": [turn("assistant", "Hello."), *ASKED]}, [turn("assistant", "Hello."), *ASKED]),
    ],
)
def test_usual_rows_are_conversations(tmp_path: Path, row: Mapping[str, Any], wanted: list[dict[str, Any]]) -> None:
    assert one_chat(tmp_path, row) == wanted


def test_tools_and_their_calls_are_read(tmp_path: Path, caplog: Any) -> None:
    call = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    tool = turn("tool", "22", tool_call_id="7", name="weather")
    turns = [turn("user", "hi"), turn("assistant", None, tool_calls=[call]), tool, turn("assistant", "It is 22.")]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with caplog.at_level(logging.WARNING, logger="comingle"):
        for given in (tools, json.dumps(tools)):
            found = one_chat(tmp_path, {"messages": turns, "tools": given})
            assert found[0]["tools"] == tools
            assert found[1]["content"] == ""
            assert found[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
            assert found[2] == tool
    assert "1 row: tools" in caplog.text
    flat = turn("assistant", "I look.", tool_calls=[{"name": "weather", "arguments": {"city": "Bern"}}])
    found = one_chat(tmp_path, {"messages": [turns[0], flat]})
    assert found[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}


@pytest.mark.parametrize("content", ["I look.", "", None])
@pytest.mark.parametrize("call", [{"id": "1"}, {"id": "1", "function": {}}, {"function": {"name": ""}}])
def test_calls_that_name_no_function_carry_no_loss(
    tmp_path: Path, caplog: Any, content: str | None, call: Mapping[str, Any]
) -> None:
    turns = [ASKED[0], turn("assistant", content, tool_calls=[call]), turn("tool", "22"), turn("assistant", "22")]
    with caplog.at_level(logging.WARNING, logger="comingle"):
        found = one_chat(tmp_path, {"messages": turns})
    assert found[1] == {"role": "assistant", "content": content or "", "learn": False}
    assert found[3] == turns[3]
    (message,) = caplog.messages
    assert message.startswith("1 row: tool calls ")


def test_named_calls_beside_one_without_a_name_stay_in_the_context(tmp_path: Path) -> None:
    calls = [{"id": "1"}, {"name": "weather", "arguments": {}}]
    found = one_chat(tmp_path, {"messages": [ASKED[0], turn("assistant", "", tool_calls=calls), *ASKED]})
    assert [call["function"]["name"] for call in found[1]["tool_calls"]] == ["weather"]
    assert found[1]["learn"] is False


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"messages": [turn("system", "Two."), *ASKED], "system": "One."}, "two system messages.*'system'"),
        ({"messages": ASKED, "history": "a"}, "history.* 'a';"),
        ({"messages": ASKED, "tools": [{"description": "x"}]}, "tools.* "),
        ({"messages": [turn("user", "a", tool_calls=[{"name": "x"}]), ASKED[1]]}, r"messages\[0\]\.tool_calls "),
        ({"messages": [ASKED[0], turn("assistant", None, tool_calls=["x"])]}, r"messages\[1\]\.tool_calls "),
        ({"messages": [ASKED[0], turn("assistant", None, tool_calls=[{"id": "1"}])]}, "every response"),
        (
            {"messages": [turn("user", [{"type": "image_url"}]), ASKED[1]]},
            r"messages\[0\]\.content.* \[{'type'",
        ),
        (
            {"messages": [ASKED[0], turn("assistant", None, function_call={"name": "x"})]},
            r"messages\[1\]\.content.* None",
        ),
    ],
)
def test_a_row_that_says_more_than_can_be_used_is_named(tmp_path: Path, row: Mapping[str, Any], wrong: str) -> None:
    path = re.escape(str(tmp_path / "ada.jsonl"))
    with pytest.raises(DataError, match=f"^user 'ada': {path}: line 1: {wrong}"):
        one_chat(tmp_path, row)


def test_what_is_not_used_is_said_once(tmp_path: Path, caplog: Any) -> None:
    turns = [turn("user", "a", name="Ada"), turn("user", ""), turn("assistant", "b", audio={"id": 1}, refusal=None)]
    rows = [{"messages": turns, "source": "x", "note": ""}] * 3
    with caplog.at_level(logging.WARNING, logger="comingle"):
        read({"users": {"ada": str(write(tmp_path / "ada.jsonl", rows))}, "split": {"valid": 0, "test": 0}})
    first = f"(first: user 'ada': {tmp_path / 'ada.jsonl'}: line 1)"
    keys, columns, empty, twice = caplog.messages
    assert all(message.startswith("3 rows: ") and message.endswith(first) for message in caplog.messages)
    assert "audio, name" in keys
    assert "source" in columns
    assert "note" not in columns
    assert "empty message of the user" in empty
    assert "two" in twice


def test_a_response_that_is_no_label_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "ada.jsonl", [GOOD, {"prompt": "a", "response": "maybe"}])
    place = f"user 'ada': {re.escape(str(path))}: line 2: "
    with pytest.raises(DataError, match=f"^{place}.*'maybe'.*; allowed: b, c;"):
        read({"users": {"ada": str(path)}, "scores": ["accuracy"], "labels": ["b", "c"]})


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ({"scores": ["accuracy"]}, "scores: [accuracy] and labels"),
        ({"labels": ["a"]}, "scores: [accuracy] and labels"),
        ({"scores": ["rouge1", "rouge1"]}, "data: scores: 'rouge1'"),
        ({"loss_on": "prompts"}, "loss_on"),
        ({"prompt": []}, "data.prompt"),
        ({"prompt": 3}, "got 3"),
        ({"prompt": ["a", 3]}, "data.prompt.1: "),
        ({"prompt": ["a", "a"]}, "data: prompt: 'a'"),
        ({"held_out": "mixture"}, "held_out is not used for conversations"),
    ],
)
def test_a_wrong_section_is_refused(data: Mapping[str, Any], wrong: str) -> None:
    with pytest.raises(RecipeError) as found:
        recipe_of({"users": {"ada": "ada.jsonl"}, **data})
    assert wrong in str(found.value)


def test_what_a_template_refuses_names_user_file_and_row(tmp_path: Path) -> None:
    recipe = recipe_of({"users": {"ada": str(write(tmp_path / "ada.jsonl", [GOOD] * 4 + [chat("user", "assistant")]))}})
    run_data = prepare(recipe)
    assert run_data.base is not None and run_data.base.tokenizer is not None  # noqa: PT018
    run_data.base.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'x' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError) as found:
        prepare(recipe, base=run_data.base)
    said = str(found.value)
    assert said.startswith(f"user 'ada': {tmp_path / 'ada.jsonl'}: line 5: ")
    assert "roles must alternate" in said
    (ada,) = prepare(recipe.with_changes({"data.on_bad_row": "skip"}), base=run_data.base).users
    assert len(ada.train) + len(ada.valid) + len(ada.test) == 4


def test_a_template_that_writes_earlier_turns_anew_trains_each_response_by_itself(tmp_path: Path) -> None:
    turns = chat("user", "assistant", "user", "assistant")
    recipe = recipe_of({"users": {"ada": str(write(tmp_path / "ada.jsonl", [turns] * 10))}})
    run_data = prepare(recipe)
    assert run_data.base is not None and run_data.base.tokenizer is not None  # noqa: PT018
    run_data.base.tokenizer.chat_template = "{{ messages | length }}" + (
        "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    )
    (ada,) = prepare(recipe, base=run_data.base).users
    assert [len(ada.train), len(ada.valid), len(ada.test)] == [16, 2, 2]
    firsts = sorted({bytes(ada.train.tokens(number)[:1].tolist()) for number in range(len(ada.train))})
    assert firsts == [b"1", b"3"]
    with pytest.raises(DataError, match=r"^10 rows .*data\.loss_on: got all.*allowed: responses"):
        prepare(recipe.with_changes({"data.loss_on": "all"}), base=run_data.base)


def test_long_conversations_are_cut_at_whole_turns_or_left_out(tmp_path: Path, caplog: Any) -> None:
    turns = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b" * 9)] * 3]
    rows: list[Any] = [{"messages": turns}, {"prompt": "a", "response": "b" * 99}, *[GOOD] * 8]
    data = {"users": {"ada": str(write(tmp_path / "ada.jsonl", rows))}, "split": {"valid": 0, "test": 0.2}}
    with caplog.at_level(logging.WARNING, logger="comingle"):
        (ada,) = prepare(recipe_of(data, **{"training.context": 96})).users
    assert re.search(r"2 of 10 conversations .*96 .*training\.context.*1 cut .*1 left out", caplog.text)
    assert len(ada.train) + len(ada.test) == 9
    every = [part.tokens(i).tolist() for part in (ada.train, ada.test) for i in range(len(part))]
    whole = max(every, key=len)
    assert whole.count(EOS) == 2 and whole[-1] == EOS  # noqa: PT018
    (ada,) = prepare(recipe_of({**data, "too_long": "leave_out"}, **{"training.context": 96})).users
    assert len(ada.train) + len(ada.test) == 8


def test_users_with_too_little_are_refused_or_left_out(tmp_path: Path) -> None:
    few, many = write(tmp_path / "few.jsonl", [GOOD]), write(tmp_path / "many.jsonl", [GOOD] * 9)
    none = write(tmp_path / "none.jsonl", [])
    recipe = recipe_of({"users": {"few": str(few), "many": str(many)}})
    with pytest.raises(DataError, match=r"^user 'few' .*test.*training\.context.*data\.on_small_user: skip"):
        build(recipe, prepare(recipe))
    recipe = recipe_of({"users": {"few": str(few), "many": str(many), "none": str(none)}, "on_small_user": "skip"})
    run_data = prepare(recipe)
    assert [user.name for user in run_data.users] == ["many"]
    assert list(run_data.skipped) == ["few", "none"]
    assert run_data.skipped["few"].endswith(" in test")
    assert run_data.skipped["none"].endswith(" in train and test")
    with pytest.raises(DataError, match=r"^user 'none': no conversations"):
        prepare(recipe_of({"users": {"many": str(many), "none": str(none)}}))


# -------------------------------------------------------------------- real rows


def test_posts_of_real_users_are_responses(shared_data: Path) -> None:
    path = shared_data / "users" / "stackexchange_users.jsonl.xz"
    dataset = {"path": str(path), "user": "user", "users": 5}
    recipe = recipe_of(
        {"dataset": dataset, "prompt": "kind", "response": "text"}, **{"training.context": 2000, "base": LONG}
    )
    run_data = prepare(recipe.with_changes({"data.on_small_user": "skip"}))
    assert len(run_data.users) + len(run_data.skipped) == 5
    for user in run_data.users:
        assert len(user.train) and len(user.test)  # noqa: PT018
        assert all(
            b"### User:" in bytes(t for t in user.test.tokens(i).tolist() if t < 256) for i in range(len(user.test))
        )


def test_real_questions_are_conversations_too(shared_data: Path) -> None:
    path = shared_data / "xnli" / "xnli_dev.jsonl.xz"
    labels = ["entailment", "neutral", "contradiction"]
    dataset = {"path": str(path), "user": "lang", "users": ["en", "el"], "max_conversations": 30}
    recipe = recipe_of(
        {"dataset": dataset, "prompt": "premise", "response": "label", "scores": ["accuracy"], "labels": labels},
        **{"training.context": 512},
    )
    users = prepare(recipe).users
    assert [(user.name, len(user.train), len(user.valid), len(user.test)) for user in users] == [
        ("en", 24, 3, 3),
        ("el", 24, 3, 3),
    ]
    assert all(reference in labels for user in users for reference in user.test.references)


def test_real_paragraphs_are_read_from_xquad(shared_data: Path) -> None:
    path = shared_data / "xquad" / "xquad.jsonl.xz"
    dataset = {"path": str(path), "user": "lang", "users": ["zh", "ar"], "max_conversations": 10}
    found = read({"dataset": dataset, "prompt": "title", "response": "context"})
    assert [(user.name, len(user.train)) for user in found] == [("zh", 8), ("ar", 8)]


# -------------------------------------------------------------------- rows left out, limits, repetitions


def test_bad_rows_are_named_at_once_or_left_out(tmp_path: Path, caplog: Any) -> None:
    path = write(tmp_path / "ada.jsonl", [GOOD, {"prompt": "a"}, GOOD, {"messages": []}])
    path.write_text(path.read_text() + "{no json\n")
    data = {"users": {"ada": str(path)}, "split": {"valid": 0, "test": 0}}
    with pytest.raises(BadRowsError, match=r"^3 rows .*data\.on_bad_row: skip") as found:
        read(data)
    assert [problem.partition("jsonl: ")[2][:7] for problem in found.value.problems] == [
        "line 5:",
        "line 2:",
        "line 4:",
    ]
    (ada,) = read(data | {"on_bad_row": "skip"})
    assert len(ada.train) == 2
    assert re.match(rf"data\.on_bad_row: .*3 rows.*{path.name}: line 5", caplog.messages[0])


def test_conversations_that_a_template_refuses_are_bad_rows_too(tmp_path: Path) -> None:
    rows = [GOOD] * 4 + [chat("user", "assistant")] * 2
    recipe = recipe_of({"users": {"ada": str(write(tmp_path / "ada.jsonl", rows))}})
    base = prepare(recipe).base
    assert base is not None
    assert base.tokenizer is not None
    base.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'x' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    with pytest.raises(BadRowsError, match=r"^2 rows .*line 5, line 6: "):
        prepare(recipe, base=base)
    (ada,) = prepare(recipe.with_changes({"data.on_bad_row": "skip"}), base=base).users
    assert len(ada.train) + len(ada.valid) + len(ada.test) == 4


def test_the_first_conversations_are_kept_of_users_files(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "response": "a"} for i in range(9)]
    files = {name: str(write(tmp_path / f"{name}.jsonl", rows[i:])) for i, name in enumerate(("ada", "ben", "cem"))}
    split = {"valid": 0, "test": 0}
    counts = {
        user.name: len(user.train)
        for user in read(
            {
                "users": files | {"cem": {"path": files["cem"], "max_conversations": 4}},
                "split": split,
                "max_conversations": 2,
            }
        )
    }
    assert counts == {"ada": 2, "ben": 2, "cem": 4}
    found = read({"users": files, "split": split, "max_conversations": {"ben": 3}})
    assert [len(user.train) for user in found] == [9, 3, 7]
    with pytest.raises(RecipeError, match=r"max_conversations: .*'bem'.*ada, ben, cem"):
        recipe_of({"users": files, "max_conversations": {"bem": 3}})
    path = write(tmp_path / "all.jsonl", [row | {"who": "ab"[i % 2]} for i, row in enumerate(rows)])
    found = read({"dataset": {"path": str(path), "user": "who"}, "split": split, "max_conversations": {"a": 1}})
    assert [len(user.train) for user in found] == [1, 4]


def test_repeated_conversations_and_files_are_said(tmp_path: Path, caplog: Any) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "A ", "response": "b"}, {"prompt": "a", "response": "c"}]
    path = str(write(tmp_path / "ada.jsonl", rows))
    data = {"users": {"ada": path, "ben": path}, "split": {"valid": 0, "test": 0}}
    assert [len(user.train) for user in read(data)] == [3, 3]
    (message,) = caplog.messages
    assert message.startswith("data.users: ")
    assert message.endswith(": 'ada' and 'ben'")
    assert [len(user.train) for user in read(data | {"deduplicate": True})] == [2, 2]
    assert re.search("data.deduplicate: .*2 .*'ada'", caplog.text)


def test_a_folder_of_conversations_is_read_whole(tmp_path: Path) -> None:
    write(tmp_path / "monday.jsonl", [GOOD] * 3)
    write(tmp_path / "test_of_bot.json", [GOOD])
    (tmp_path / "b.csv").write_text("prompt,response\nc,d\n")
    (ada,) = read({"users": {"ada": str(tmp_path)}, "split": {"valid": 0, "test": 0}})
    assert len(ada.train) == 5
