"""Questions in many languages: their tokens, which are asked of whom, and what is said of files that hold none."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from comingle.data.conversations.encoding import (
    Question,
    UserAnswers,
    build_answers,
    check_validation_questions,
    encode,
    pool_answers,
)
from comingle.data.streaming import ListedRows
from comingle.models.chat_templates import Encoded
from comingle.models.random_bases import EOS, byte_tokenizer
from comingle.models.scoring import PAD, hide, inputs_of
from comingle.utils.errors import DataError, RecipeError
from comingle_papers.questions import (
    LABELS,
    QUESTIONS,
    build_prompt,
    choose_languages,
    stream_questions,
    user_of,
)


def parted(one: Encoded) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt and the answer of a question."""
    ((start, stop),) = one.responses
    return one.tokens[:start], one.tokens[start:stop]


TWO = [Question(prompt="a b", answer="c"), Question(prompt="d", answer="c b a")]


def xnli_rows(languages: Sequence[str] = ("en", "de", "th"), count: int = 12) -> list[dict[str, Any]]:
    return [
        {"id": i, "lang": who, "premise": f"{who} {i}", "hypothesis": "x" * i, "label": LABELS[i % 3]}
        for who in languages
        for i in range(count)
    ]


def xquad_rows() -> list[dict[str, Any]]:
    """Three paragraphs of two questions in each of two languages."""
    return [
        {
            "lang": who,
            "context": f"{who} text {i}",
            "qas": [{"id": f"q{i}{j}", "question": f"{who}?", "answer": f"{who} {i}{j}"} for j in range(2)],
        }
        for who in ("en", "el")
        for i in range(3)
    ]


def write(path: Path, rows: Sequence[Any]) -> Path:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "xnli_dev.jsonl.xz", xnli_rows())
    write(tmp_path / "xquad.jsonl", xquad_rows())
    return tmp_path


def make(name: str, path: str | Path | None, **settings: Any) -> tuple[UserAnswers, ...]:
    given = {"languages": ["en", "de"] if name == "xnli" else ["en", "el"], "context": 400, "seed": 0, **settings}
    return read(name, byte_tokenizer(), path=path, **given)


def read(
    name: str,
    tokenizer: Any,
    *,
    languages: list[str] | None = None,
    train_on_prompts: bool = False,
    train: int | None = None,
    valid: int = 0,
    test: int | None = None,
    **settings: Any,
) -> tuple[UserAnswers, ...]:
    """A user for each language, as a run reads them."""
    wanted, counts = choose_languages(name, languages), {"train": train, "valid": valid, "test": test}
    asked = stream_questions(name, wanted, ListedRows(), lambda: tokenizer, **counts, **settings)
    return tuple(
        user_of(name, who, encoded, parts, tokenizer, train_on_prompts=train_on_prompts)
        for who, encoded, parts in asked
    )


def asked(user: UserAnswers, split: str) -> list[str]:
    """What the user is asked in a split, as text."""
    part, tokenizer = getattr(user, split), byte_tokenizer()
    return [str(tokenizer.decode(part.prompt(number).tolist())) for number in range(len(part))]


def problem(kind: type[Exception], name: str, path: str | Path | None, **settings: Any) -> str:
    with pytest.raises(kind) as found:
        make(name, path, **settings)
    message = str(found.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- tokens


def test_a_window_hides_the_prompt_and_shows_the_answer(word_tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = encode(TWO, word_tokenizer)
    assert (first.tokens, first.responses, first.references) == ((1, 2, 3, 5), ((2, 4),), ("c",))
    assert (second.tokens, second.responses) == ((4, 3, 2, 1, 5), ((1, 5),))
    answers = build_answers([first, second], limit=4, measures=("loss",), ends=(5,))
    assert answers.windows.tolist() == [[-3, -4, 3, 5, PAD], [-6, 3, 2, 1, 5]]
    assert [answers.tokens(i).tolist() for i in range(2)] == [[1, 2, 3, 5], [4, 3, 2, 1, 5]]
    assert [answers.prompt(i).tolist() for i in range(2)] == [[1, 2], [4]]
    assert inputs_of(answers.windows).tolist() == [[1, 2, 3, 5], [4, 3, 2, 1]]
    shown = build_answers([first, second], limit=4, measures=("loss",), ends=(5,), loss_on_all=True)
    assert shown.windows.tolist() == [[1, 2, 3, 5, PAD], [4, 3, 2, 1, 5]]
    assert shown.prompt(0).tolist() == [1, 2]


def test_hiding_is_undone_by_hiding_and_never_looks_like_padding() -> None:
    tokens = torch.arange(50_000)
    assert int(hide(tokens).max()) < PAD
    assert torch.equal(hide(hide(tokens)), tokens)
    assert inputs_of(torch.tensor([[PAD, -2, -3, 7, 9]])).tolist() == [[0, 0, 1, 7]]


def test_texts_begin_as_the_tokenizer_begins_them(make_word_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = make_word_tokenizer(eos_token="<eos>", bos_token="<bos>")
    assert parted(encode(TWO, tokenizer)[0])[0] == (1, 2)  # <bos> exists, but no text begins with it
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 6)])
    assert [parted(one)[0] for one in encode(TWO, tokenizer)] == [(6, 1, 2), (6, 4)]
    assert [parted(one)[1] for one in encode(TWO, tokenizer)] == [(3, 5), (3, 2, 1, 5)]


def test_special_tokens_in_a_question_are_text() -> None:
    (found,) = encode([Question(prompt="<|eos|>", answer="<|bos|>")], byte_tokenizer())
    assert parted(found) == (tuple(b"<|eos|>"), (*b"<|bos|>", EOS))


def test_answers_need_an_end(make_word_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    with pytest.raises(DataError, match="tokenizer has no end-of-text token"):
        encode(TWO, make_word_tokenizer())


# ---------------------------------------------------------------- who is asked what


def test_everybody_is_asked_the_same_in_a_language_of_their_own(folder: Path) -> None:
    en, de = make("xnli", folder, train=5, valid=2, test=4)
    assert (en.name, de.name) == ("en", "de")
    everything = []
    for split, count in (("train", 5), ("valid", 2), ("test", 4)):
        mine, theirs = asked(en, split), asked(de, split)
        assert len(mine) == count
        assert [text.replace("Premise: en", "Premise: de") for text in mine] == theirs
        assert getattr(en, split).references == getattr(de, split).references
        everything += mine
    assert len(set(everything)) == 11
    number = int(asked(en, "train")[0].split("Premise: en ")[1].split("\n")[0])
    assert asked(en, "train")[0] == build_prompt(
        QUESTIONS["xnli"].instruction, f"Premise: en {number}\nHypothesis: {'x' * number}"
    )
    assert en.train.references[0] == LABELS[number % 3]
    assert en.train.measures == ("accuracy", "rouge1", "loss")


def test_which_questions_follow_from_the_seed_alone(folder: Path) -> None:
    settings: dict[str, Any] = {"train": 5, "test": 4}
    (en, de), other = make("xnli", folder, **settings), make("xnli", folder, **settings, seed=1)
    de_first, alone = (
        make("xnli", folder, **settings, languages=["de", "en"]),
        make("xnli", folder, **settings, languages=["en"]),
    )
    assert asked(en, "test") == asked(de_first[1], "test") == asked(alone[0], "test")
    assert asked(de, "test") == asked(de_first[0], "test")
    assert asked(en, "train") != asked(other[0], "train")


def test_what_is_too_long_in_one_language_is_left_out_for_all(folder: Path) -> None:
    rows = xnli_rows(("en", "de"))
    rows[12 + 3]["premise"] = "z" * 400  # in German
    path = write(folder / "long.jsonl", rows)
    en, de = make("xnli", path, train=1, test=10)
    for user in (en, de):
        assert len(asked(user, "train") + asked(user, "test")) == 11
        assert not any(" 3\n" in text or "zzz" in text for text in asked(user, "train") + asked(user, "test"))
    assert problem(DataError, "xnli", path, train=2, test=10) == (
        "xnli: 11 of 12 questions have at most 400 tokens (training.context) in each of en, de; "
        "train 2, valid 0 and test 10 need 12"
    )
    longest = max(len(user.test.tokens(i)) for user in (en, de) for i in range(10))
    exact, short = (make("xnli", path, train=1, test=1, context=context) for context in (longest, longest - 1))
    assert sum(map(len, (exact[0].train, exact[0].test))) == 2
    assert len(short) == 2
    assert "0 of 12 questions" in problem(DataError, "xnli", path, train=1, test=1, context=20)


def test_the_rest_is_tested_on_where_that_is_published(folder: Path) -> None:
    en, el = make("xquad", folder, train=2, valid=1)
    assert [len(part) for part in (en.train, en.valid, en.test)] == [2, 1, 3]
    assert [who.test.measures for who in (en, el)] == [("rouge1", "loss")] * 2
    answer = el.train.references[0]
    paragraph = answer.split()[1][0]
    assert asked(el, "train")[0] == build_prompt(
        QUESTIONS["xquad"].instruction, f"Text: el text {paragraph}\nQuestion: el?"
    )
    assert "train 6, valid 0 and test the rest need 7" in problem(DataError, "xquad", folder, train=6)


def test_a_user_may_say_as_many_tokens_as_its_longest_answer(folder: Path) -> None:
    rows = xquad_rows()
    for row in rows[3:]:
        row["qas"][0]["answer"] = "ελ" * 5  # two bytes a letter
    path = write(folder / "greek.jsonl", rows)
    en, el = make("xquad", path, train=2)
    assert (en.train.limit, el.test.limit) == (len("en 00") + 1, 2 * 10 + 1)


def test_prompts_are_shown_in_training_alone(folder: Path) -> None:
    (en, _), (plain, _) = (make("xnli", folder, train=5, valid=2, test=4, train_on_prompts=on) for on in (True, False))
    assert int((en.train.windows < PAD).sum()) == 0 < int((plain.train.windows < PAD).sum())
    assert torch.equal(inputs_of(en.train.windows), inputs_of(plain.train.windows))
    assert torch.equal(en.test.windows, plain.test.windows)
    assert torch.equal(en.valid.windows, plain.valid.windows)


def test_the_pool_holds_everything(folder: Path) -> None:
    users = make("xnli", folder, train=5, valid=1, test=4)
    pooled = pool_answers(users)
    assert pooled.name == "everyone"
    assert [len(part) for part in (pooled.train, pooled.valid, pooled.test)] == [10, 2, 8]
    assert asked(pooled, "test") == asked(users[0], "test") + asked(users[1], "test")
    assert pooled.test.references == users[0].test.references + users[1].test.references


def test_validation_is_asked_for_where_it_is_needed(folder: Path) -> None:
    (en, _) = make("xnli", folder, train=5, test=4)
    check_validation_questions(en, needs_validation=False)
    with pytest.raises(DataError, match=r"^user 'en': valid .*0 questions.*data\.questions\.valid"):
        check_validation_questions(en, needs_validation=True)


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("name", ["xnli.jsonl", "xnli.jsonl.gz", "xnli_dev.jsonl.xz"])
def test_files_may_be_compressed_and_named_themselves(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, xnli_rows())
    settings: dict[str, Any] = {"train": 5, "test": 4}
    assert asked(make("xnli", path, **settings)[0], "test") == asked(make("xnli", tmp_path, **settings)[0], "test")


def test_the_folder_of_data_is_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "xnli").mkdir()
    (folder / "xnli_dev.jsonl.xz").rename(folder / "xnli" / "xnli_dev.jsonl.xz")
    monkeypatch.setenv("COMINGLE_DATA", str(folder))
    assert len(make("xnli", None, train=5, test=4)) == 2


def hub_folder(folder: Path, configs: dict[str, list[dict[str, Any]]]) -> str:
    """A folder laid out like a data set of the hub with these configurations."""
    listed = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: validation\n    path: {name}.jsonl\n" for name in configs
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n", encoding="utf-8")
    for name, rows in configs.items():
        write(folder / f"{name}.jsonl", rows)
    return f"hub:{folder}"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="PACKAGE ABSENT: pip install datasets", exc_type=ImportError)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("hub_cache")
def test_xnli_of_the_hub_has_numbers_for_labels(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    names = ("premise", "hypothesis", "label")
    rows = {
        who: [{n: LABELS.index(r[n]) if n == "label" else r[n] for n in names} for r in xnli_rows((who,))]
        for who in ("en", "de")
    }
    path = hub_folder(tmp_path / "set", rows)
    local = write(tmp_path / "xnli.jsonl", xnli_rows())
    hub, here = make("xnli", path, train=5, test=4), make("xnli", local, train=5, test=4)
    assert [user.name for user in hub] == ["en", "de"]
    for one, other in zip(hub, here, strict=True):
        assert asked(one, "test") == asked(other, "test")
        assert one.test.references == other.test.references


@pytest.mark.usefixtures("hub_cache")
def test_xquad_of_the_hub_has_the_columns_of_squad(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows: dict[str, list[dict[str, Any]]] = {"xquad.en": [], "xquad.el": []}
    for row in xquad_rows():
        for one in row["qas"]:
            answers = {"text": [one["answer"]], "answer_start": [0]}
            kept = {"id": one["id"], "context": row["context"], "question": one["question"], "answers": answers}
            rows[f"xquad.{row['lang']}"].append(kept)
    path = hub_folder(tmp_path / "set", rows)
    local = write(tmp_path / "xquad.jsonl", xquad_rows())
    hub, here = make("xquad", path, train=2), make("xquad", local, train=2)
    for one, other in zip(hub, here, strict=True):
        assert asked(one, "test") == asked(other, "test")
        assert one.test.references == other.test.references


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("xnlii", {}, "no questions 'xnlii'. Did you mean 'xnli'? Allowed: xnli, xquad"),
        ("xnli", {"languages": ["en", "ro"]}, "xnli: no language 'ro'; allowed: ar, bg, de, el, en, es, fr, hi, ru"),
        ("xquad", {"languages": ["fr"]}, "xquad: no language 'fr'; allowed: ar, de, el, en, es, hi, ro, ru, th, tr"),
        (
            "xnli",
            {"languages": ["en", "en"]},
            "xnli: language 'en' twice; allowed: each once, since it is the name of a user",
        ),
    ],
)
def test_what_there_is_not_is_refused(folder: Path, name: str, settings: dict[str, Any], said: str) -> None:
    assert problem(RecipeError, name, folder, **settings).startswith(said)


def test_sources_without_questions_are_refused(folder: Path) -> None:
    assert problem(DataError, "xnli", folder / "none").startswith(f"{folder / 'none'}: no such file or folder; without")
    (folder / "empty").mkdir()
    assert problem(DataError, "xnli", folder / "empty").endswith("no file xnli*.jsonl in it (.xz and .gz allowed)")
    assert "no row in language 'fr'" in problem(DataError, "xnli", folder, languages=["en", "fr"])
    (folder / "torn.jsonl").write_text('{"id": 1, "la')
    assert "torn.jsonl: line 1: not JSON: " in problem(DataError, "xnli", folder / "torn.jsonl")
    (folder / "torn.xz").write_bytes(lzma.compress(b"{}\n" * 99)[:40])
    assert "torn.xz: cannot be read as UTF-8 text with JSON" in problem(DataError, "xnli", folder / "torn.xz")
    list_rows = write(folder / "list.jsonl", [[1, 2]])
    assert "list.jsonl: row 1" in (said := problem(DataError, "xnli", list_rows))
    assert "JSON number" in said
    other = problem(DataError, "xquad", folder / "xnli_dev.jsonl.xz", languages=["en"])
    assert other.endswith("xnli_dev.jsonl.xz: line 1 is not a row of xquad: context is None; allowed: text")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "maybe"}, "label is 'maybe'; allowed: entailment, neutral, contradiction, or their numbers 0 to 2"),
        ({"label": -1}, "label is -1; allowed: entailment"),
        ({"label": True}, "label is True; allowed: entailment"),
        ({"label": ["neutral"]}, "label is ['neutral']; allowed: entailment"),
        ({"label": ""}, "label is ''; allowed: entailment"),
        ({"premise": None}, "premise is None; allowed: text"),
        ({"hypothesis": 3}, "hypothesis is 3; allowed: text"),
        ({"premise": "\ud800"}, "'utf-8' codec can't encode character"),
        ({"id": None}, "no id; allowed: a name or number, the same in all languages"),
        ({"id": 0}, "id '0' occurs twice; allowed: once per language"),
    ],
)
def test_a_wrong_row_of_xnli_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = xnli_rows(["en", "de"])
    rows[1] |= change
    path = write(tmp_path / "xnli.jsonl", rows)
    assert problem(DataError, "xnli", path).startswith(f"{path}: line 2 is not a row of xnli: {said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": ""}, "answer is ''; allowed: text"),
        ({"answer": " \n"}, "answer is ' \\n'; allowed: text"),
        ({"answer": None}, "answer is None; allowed: text"),
        ({"answer": ["a"]}, "answer is ['a']; allowed: text"),
        ({"question": None}, "question is None; allowed: text"),
        ({"id": None}, "no id; allowed"),
    ],
)
def test_a_wrong_question_of_xquad_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = xquad_rows()
    rows[2]["qas"][1] |= change
    path = write(tmp_path / "xquad.jsonl", rows)
    assert problem(DataError, "xquad", path).startswith(f"{path}: line 3 is not a row of xquad: {said}")


@pytest.mark.parametrize("answers", [None, [], {"text": []}, {"text": None}, {"text": [""]}])
def test_a_question_of_the_hub_without_an_answer_is_named(tmp_path: Path, answers: Any) -> None:
    row = {"id": "a", "lang": "en", "context": "c", "question": "q", "answers": answers}
    path = write(tmp_path / "xquad.jsonl", [row])
    said = problem(DataError, "xquad", path)
    assert said.startswith(f"{path}: line 1 is not a row of xquad: answer is ")
    paragraph = write(tmp_path / "xquad.jsonl", [{"lang": "en", "context": "c", "qas": "q"}])
    assert "line 1 is not a row of xquad: qas is 'q'; allowed: a list of" in problem(DataError, "xquad", paragraph)


def test_rows_of_other_languages_are_nobodys_business(tmp_path: Path) -> None:
    rows: list[Any] = [*xnli_rows(["en", "de"]), {"lang": "fr"}, {"lang": ["en"]}, {}]
    path = write(tmp_path / "xnli.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n\n"))  # nor are blank lines
    assert len(make("xnli", path, train=4, test=3)[0].train) == 4


def test_questions_that_no_two_languages_share_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "xnli.jsonl", [row | {"id": f"{row['lang']}{row['id']}"} for row in xnli_rows()])
    assert problem(DataError, "xnli", path) == (
        "xnli: no question occurs in all of en, de; allowed: one id in all languages"
    )


def test_damaged_compressed_questions_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "xnli.jsonl.gz", xnli_rows())
    content = path.read_bytes()
    for place in range(len(content) // 3, len(content), 9):  # behind the header, some of which nobody reads
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        assert problem(DataError, "xnli", path, train=4, test=3).startswith(f"{path}: ")


def test_where_to_put_questions_is_said_when_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise DataError("hub:somebody/something: no connection")

    monkeypatch.setattr("comingle_papers.questions.iterate_values", unreachable)
    monkeypatch.setenv("COMINGLE_DATA", str(tmp_path))
    said = "no connection; without the hub, give data.questions.path or the folder $COMINGLE_DATA/xquad"
    assert problem(DataError, "xquad", None).endswith(said)
    assert problem(DataError, "xquad", "hub:somebody/something").endswith("no connection")


# ---------------------------------------------------------------- the real ones


def test_the_published_numbers_of_questions_are_there(
    shared_data: Path, gpt2_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings: dict[str, Any] = {"context": 512, "seed": 0}
    en, sw = read("xnli", gpt2_tokenizer, path=shared_data / "xnli", languages=["en", "sw"], **settings)
    assert [len(part) for part in (en.train, en.valid, en.test, sw.train)] == [300, 0, 200, 300]
    assert set(Counter(en.train.references)) == set(LABELS)
    assert max(Counter(en.train.references).values()) < 130
    assert en.test.references == sw.test.references
    en, es = read("xquad", gpt2_tokenizer, path=shared_data / "xquad", languages=["en", "es"], **settings)
    assert len(en.train) == 600
    assert 300 < len(en.test) == len(es.test) <= 590
    for user in (en, es):
        for number in range(0, 300, 25):
            text = str(gpt2_tokenizer.decode(user.test.tokens(number).tolist()))
            prompt, answer = text.split("### Response:\n")
            assert answer == f"{user.test.references[number]}<|endoftext|>"
            assert user.test.references[number] in prompt
