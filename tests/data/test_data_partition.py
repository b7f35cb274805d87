from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from comingle.config import parse_recipe
from comingle.data.conversations import reading as conversations_reading
from comingle.data.sources import read_dataset, read_documents
from comingle.data.splits import UserText, mix_held_out, split_by_fractions, split_given
from comingle.data.text import reading as text_reading
from comingle.utils.errors import DataError, NoTextError


def characters(documents) -> int:
    return sum(map(len, documents))


def make_lines(seed: int, documents: int) -> list[str]:
    """Documents of 0 or 2 to 40 numbered lines, each line different and at most 60 characters long."""
    source = random.Random(seed)
    return [
        "".join(
            f"{document}.{line} " + "x" * source.randrange(50) + "\n"
            for line in range(source.choice([0, *range(2, 41)]))
        )
        for document in range(documents)
    ]


@pytest.mark.parametrize("fractions", [(0.1, 0.1), (0.0, 0.2), (0.25, 0.0), (0.01, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("documents", [make_lines(0, 300), make_lines(1, 7)])
def test_fractions_are_hit_within_a_line_and_no_line_is_lost_or_cut(documents: list[str], fractions):
    valid, test = fractions
    user = split_by_fractions(documents, valid=valid, test=test, seed=0, name="anna")
    total = characters(documents)
    assert characters(user.train) == pytest.approx(total * (1 - valid - test), abs=61)
    assert characters(user.valid) == pytest.approx(total * valid, abs=61)
    assert characters(user.test) == pytest.approx(total * test, abs=61)
    parts = user.train + user.valid + user.test
    assert Counter(line for part in parts for line in part.splitlines(keepends=True)) == Counter(
        line for document in documents for line in document.splitlines(keepends=True)
    )


def test_a_fraction_of_zero_gives_no_documents():
    user = split_by_fractions(make_lines(0, 50), valid=0.0, test=0.3, seed=0, name="anna")
    assert user.valid == ()
    assert split_by_fractions(make_lines(0, 50), valid=0.3, test=0.0, seed=0, name="anna").test == ()
    # The border is moved to the end of the first line; valid must not get what lies between.
    user = split_by_fractions(["w " * 20 + "\n" + "x " * 15], valid=0.0, test=0.5, seed=0, name="anna")
    assert (user.train, user.valid, user.test) == (("w " * 20 + "\n",), (), ("x " * 15,))


def test_at_most_two_documents_are_cut():
    documents = [document for document in make_lines(0, 100) if document]
    user = split_by_fractions(documents, valid=0.3, test=0.3, seed=0, name="anna")
    whole = Counter(documents)
    pieces = [document for document in user.train + user.valid + user.test if document not in whole]
    assert len(pieces) <= 4
    assert len(user.train + user.valid + user.test) <= len(documents) + 2


def test_one_file_with_one_document_is_split_at_line_ends():
    document = "".join(f"line number {index:04}\n" for index in range(1000))
    user = split_by_fractions([document], valid=0.1, test=0.2, seed=3, name="anna")
    assert [len(part) for part in (user.train, user.valid, user.test)] == [1, 1, 1]
    assert [part[0].count("\n") for part in (user.train, user.valid, user.test)] == [700, 100, 200]
    assert user.train[0] + user.valid[0] + user.test[0] == document


def test_one_line_is_split_at_white_space():
    document = " ".join(f"word{index:04}" for index in range(1000))
    user = split_by_fractions([document], valid=0.1, test=0.2, seed=3, name="anna")
    assert [len(part[0].split()) for part in (user.train, user.valid, user.test)] == [700, 100, 200]
    assert user.train[0] + user.valid[0] + user.test[0] == document


def test_a_long_line_among_short_ones_is_cut_inside():
    document = "head\n" + "word " * 2000 + "\ntail\n"
    user = split_by_fractions([document], valid=0.0, test=0.5, seed=0, name="anna")
    assert characters(user.test) == pytest.approx(len(document) / 2, abs=5)
    assert user.train[0].endswith("word ")


def test_text_without_any_white_space_is_cut_where_the_fraction_says():
    user = split_by_fractions(["語" * 1000], valid=0.1, test=0.1, seed=0, name="anna")
    assert [characters(part) for part in (user.train, user.valid, user.test)] == [800, 100, 100]


def test_a_split_depends_on_the_seed_and_the_name_and_on_nothing_else():
    documents = make_lines(0, 60)
    options = {"valid": 0.2, "test": 0.2}
    first = split_by_fractions(documents, seed=0, name="anna", **options)
    random.seed(5)
    assert split_by_fractions(documents, seed=0, name="anna", **options) == first
    assert split_by_fractions(documents, seed=1, name="anna", **options).test != first.test
    assert split_by_fractions(documents, seed=0, name="ben", **options).test != first.test


@pytest.mark.parametrize(("valid", "test"), [(-0.1, 0.1), (0.5, 0.5), (0.1, float("nan")), (0.0, 1.0)])
def test_impossible_fractions_are_refused(valid: float, test: float):
    with pytest.raises(DataError, match=rf"^user 'anna': .*valid={valid}, test={test}\b"):
        split_by_fractions(["text"], valid=valid, test=test, seed=0, name="anna")


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_no_documents_cannot_be_split(documents: list[str]):
    with pytest.raises(DataError, match=r"^user 'anna': no documents"):
        split_by_fractions(documents, valid=0.1, test=0.1, seed=0, name="anna")


GIVEN = {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}


def test_given_splits_are_taken_by_name():
    user = split_given(GIVEN, name="anna", valid="validation")
    assert user == UserText(name="anna", train=("a", "b"), valid=("c",), test=("d",))
    swapped = split_given(GIVEN, name="anna", train="test", valid="train", test="validation")
    assert swapped == UserText(name="anna", train=("d",), valid=("a", "b"), test=("c",))


def test_a_valid_split_that_is_not_named_stays_empty():
    assert split_given(GIVEN, name="anna") == UserText(name="anna", train=("a", "b"), test=("d",))


@pytest.mark.parametrize("valid", [None, "dev"])
def test_a_missing_valid_split_is_carved_from_train(valid: str | None):
    documents = make_lines(0, 50)
    user = split_given({"train": documents, "test": ["t"]}, name="anna", valid=valid, valid_fraction=0.2, seed=4)
    carved = split_by_fractions(documents, valid=0.2, test=0.0, seed=4, name="anna")
    assert (user.train, user.valid, user.test) == (carved.train, carved.valid, ("t",))
    assert characters(user.valid) == pytest.approx(0.2 * characters(documents), abs=61)


def test_a_valid_split_that_exists_is_not_carved():
    assert split_given(GIVEN, name="anna", valid="validation", valid_fraction=0.5).train == ("a", "b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid": "valid"}, r"'valid'; found: train, validation, test; .* Did you mean 'validation'"),
        ({"test": "tests"}, r"'tests'; found: train, validation, test; .* Did you mean 'test'"),
        ({"train": "x"}, r"'x'; found: train, validation, test; [^?]*$"),
    ],
)
def test_a_missing_split_gets_the_splits_found(options: dict, message: str):
    with pytest.raises(NoTextError, match=f"^user 'anna': .*{message}"):
        split_given(GIVEN, name="anna", **options)


def make_categories(sizes: dict[str, int]) -> list[UserText]:
    """Users whose held-out documents are lines of 40 characters that begin with the user's name."""
    return [
        UserText(
            name=name,
            train=(f"train of {name}",),
            valid=tuple(f"{name} valid {index:04}".ljust(39) + "\n" for index in range(size)),
            test=tuple(f"{name} test {index:04}".ljust(39) + "\n" for index in range(2 * size)),
        )
        for name, size in sizes.items()
    ]


def shares(documents, names) -> dict[str, int]:
    return {name: sum(len(text) for text in documents if text.startswith(name)) for name in names}


def test_a_mixture_has_equal_parts_of_every_user_and_no_text_twice():
    users = make_categories({"anna": 100, "ben": 130, "carl": 360, "dora": 101})
    mixed = mix_held_out(users, seed=0)
    assert [user.name for user in mixed] == ["anna", "ben", "carl", "dora"]
    assert [user.train for user in mixed] == [user.train for user in users]
    names = ["anna", "ben", "carl", "dora"]
    for user in mixed:  # the smallest part is anna's 4,000 (8,000) characters, a quarter of it for each user
        assert shares(user.valid, names) == dict.fromkeys(names, 1000)
        assert shares(user.test, names) == dict.fromkeys(names, 2000)
    handed = Counter(document for user in mixed for document in user.valid + user.test)
    assert set(handed.values()) == {1}
    assert set(handed) <= {document for user in users for document in user.valid + user.test}


def test_every_prefix_of_a_mixture_is_uniform():
    mixed = mix_held_out(make_categories({"anna": 100, "ben": 130, "carl": 360}), seed=0)
    for length in range(1, len(mixed[0].test) + 1):
        counted = shares(mixed[0].test[:length], ["anna", "ben", "carl"])
        assert max(counted.values()) - min(counted.values()) <= 40


def test_a_mixture_depends_on_the_seed_but_not_on_the_order_of_users():
    users = make_categories({"anna": 50, "ben": 60})
    mixed = mix_held_out(users, seed=0)
    assert mix_held_out(users[::-1], seed=0) == mixed[::-1]
    assert mix_held_out(users, seed=1)[0].test != mixed[0].test


def test_one_user_mixes_with_nobody():
    user = make_categories({"anna": 20})[0]
    mixed = mix_held_out([user], seed=0)[0]
    assert Counter(mixed.test) == Counter(user.test)


def test_a_split_that_nobody_has_stays_empty():
    users = [UserText(name=name, train=("t",), test=(f"{name} " * 30,)) for name in ("anna", "ben")]
    assert [user.valid for user in mix_held_out(users, seed=0)] == [(), ()]


def test_a_user_without_held_out_text_cannot_be_mixed():
    users = [*make_categories({"anna": 5, "ben": 5}), UserText(name="carl", train=("t",), test=("text",))]
    with pytest.raises(DataError, match=r"^data.held_out: mixture: .*valid.*carl"):
        mix_held_out(users, seed=0)


def test_users_of_one_name_cannot_be_mixed():
    with pytest.raises(DataError, match=r"^data.held_out: mixture: .*'anna'"):
        mix_held_out(make_categories({"anna": 5}) * 2, seed=0)


def test_ag_news_mixes_uniformly(shared_data):
    grouped = read_dataset(shared_data / "ag_news" / "ag_news.jsonl.xz", user="category", split="split")
    users = [split_given(splits, name=name, valid_fraction=0.1) for name, splits in grouped.items()]
    smallest = min(characters(user.test) for user in users)
    category = {document: user.name for user in users for document in user.test}
    mixed = mix_held_out(users, seed=0)
    for user in mixed:
        counted = Counter()
        for document in user.test:
            counted[category.get(document, "cut")] += len(document)
        assert counted.pop("cut", 0) < 8 * 1200
        assert all(count == pytest.approx(smallest / 4, rel=0.02) for count in counted.values())
        assert len(counted) == 4


def test_a_book_is_split_without_loss(shared_data):
    documents = read_documents(shared_data / "slim4" / "books.jsonl.xz")
    user = split_by_fractions(documents, valid=0.05, test=0.1, seed=0, name="books")
    total = characters(documents)
    assert characters(user.train + user.valid + user.test) == total
    assert characters(user.test) / total == pytest.approx(0.1, abs=0.001)
    assert characters(user.valid) / total == pytest.approx(0.05, abs=0.001)


# ------------------------------------------------------------ data.split.stable


def place_of(splits: object) -> dict[str, str]:
    """Return the split of each word; the words of all texts differ."""
    return {
        word: split for split in ("train", "valid", "test") for text in getattr(splits, split) for word in text.split()
    }


def unique_text(source: random.Random, name: str) -> str:
    """Lines of different words, of which some are longer than 1,000 characters."""
    lines = []
    for line in range(source.choice([1, 3, 30])):
        words = [f"{name}.{line}.{word}{'x' * source.randrange(9)}" for word in range(source.choice([2, 9, 60, 200]))]
        lines.append(" ".join(words))
    return "\n".join(lines)


@pytest.mark.parametrize("fractions", [(0.1, 0.1), (0.0, 0.2), (0.25, 0.0)])
@pytest.mark.parametrize("seed", range(12))
def test_appended_text_never_moves_earlier_text_between_stable_splits(seed: int, fractions: tuple[float, float]):
    """Neither appended documents do, nor words or lines at the end of the last one; seeds have no effect."""
    source, (valid, test) = random.Random(seed), fractions
    documents = [unique_text(source, f"{number}") for number in range(source.choice([1, 2, 40]))]
    before: dict[str, str] = {}
    for append in range(6):
        splits = split_by_fractions(documents, valid=valid, test=test, seed=append, name="anna", stable=True)
        parts = [text for split in ("train", "valid", "test") for text in getattr(splits, split)]
        assert Counter("".join(parts)) == Counter("".join(documents))
        after = place_of(splits)
        assert {word: after[word] for word in before} == before
        before = after
        documents[-1] += source.choice("\n ") + unique_text(source, f"more{append}")
        documents += [unique_text(source, f"new{append}.{number}") for number in range(source.choice([0, 1, 20]))]


@pytest.mark.parametrize("documents", [make_lines(0, 300), make_lines(1, 7), ["".join(make_lines(2, 40))]])
def test_stable_splits_have_their_fractions_within_a_piece(documents: list[str]):
    splits = split_by_fractions(documents, valid=0.1, test=0.2, seed=0, name="anna", stable=True)
    total = characters(documents)
    piece = max(200, total / 50) + 61
    assert characters(splits.valid) == pytest.approx(total * 0.1, abs=piece)
    assert characters(splits.test) == pytest.approx(total * 0.2, abs=piece)
    assert splits.valid
    assert splits.test


def test_stable_splits_cut_validation_text_from_growing_training_text():
    rows = [f"row {number} of many" for number in range(50)]
    shorter, longer = (
        split_given({"train": rows[:end], "test": ["t"]}, name="anna", valid_fraction=0.2, seed=end, stable=True)
        for end in (30, 50)
    )
    assert set(shorter.train) <= set(longer.train)
    assert set(shorter.valid) <= set(longer.valid)
    assert shorter.valid


@pytest.mark.parametrize("kind", ["text", "conversations"])
@pytest.mark.parametrize("source", ["path", "dataset"])
def test_test_data_of_a_run_is_not_trained_on_in_the_next_one(kind: str, source: str, tmp_path: Path):
    """Runs of a chain have different seeds, and files that grow."""

    def row_of(number: int) -> dict[str, object]:
        question, response = f"what is {number}?", f"it is {number}, as ever"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        return {"user": "ada", "text": response} if kind == "text" else {"user": "ada", "messages": messages}

    def read(rows: int, seed: int, stable: bool) -> dict[str, set[str]]:
        file = tmp_path / "ada.jsonl"
        file.write_text("".join(f"{json.dumps(row_of(number))}\n" for number in range(rows)))
        data = {"users": {"ada": str(file)}} if source == "path" else {"dataset": {"path": str(file), "user": "user"}}
        recipe = parse_recipe({"data": {"kind": kind, **data, "split": {"stable": stable}}})
        if kind == "text":
            (user,) = text_reading.read_users(recipe.data, seed)
            found = {split: set(getattr(user, split)) for split in ("train", "valid", "test")}
        else:
            (chats,) = conversations_reading.read_users(recipe.data, seed)
            found = {
                split: {messages[-1]["content"] for _place, messages in getattr(chats, split)}
                for split in ("train", "valid", "test")
            }
        assert found["valid"]
        assert found["test"]
        return found

    first, second = read(100, seed=0, stable=True), read(150, seed=1, stable=True)
    for split in ("train", "valid", "test"):
        assert first[split] < second[split]
    assert read(100, seed=0, stable=False)["test"] & read(150, seed=1, stable=False)["train"]


def test_a_recipe_without_stable_splits_keeps_its_fingerprint():
    content = {"data": {"users": {"ada": "ada.txt"}}}
    recipe = parse_recipe(content)
    assert "stable" not in recipe.result_content["data"]["split"]
    assert recipe.with_changes({"data.split.stable": True}).fingerprint != recipe.fingerprint
