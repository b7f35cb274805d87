from __future__ import annotations

import random

import numpy as np
import pytest

from comingle.data.demo import drop_near_duplicates
from comingle.data.duplicates import hash_shingles, split_words
from comingle.data.sources import read_documents
from comingle.data.splits import Overlap, UserText, find_overlap, split_by_fractions


def words(start: int, count: int) -> str:
    return " ".join(f"w{index}" for index in range(start, start + count))


def test_overlap_counts_copies_and_near_copies():
    train = (words(0, 100), "Short, but the SAME.", words(1000, 100))
    user = UserText(
        name="anna",
        train=train,
        valid=("short,  but\nthe same.", "short, but another."),
        test=(words(0, 100).upper(), words(50, 80), words(70, 80), words(5000, 60), words(1010, 90) + " end"),
    )
    # words(50, 80) has 68 shingles, 38 of them in train; words(70, 80) has 18 of 68.
    assert find_overlap(user) == Overlap(
        user="anna",
        valid=1,
        valid_documents=2,
        test=3,
        test_documents=5,
        examples=("short, but the same.", words(0, 100).upper()[:120], words(50, 80)[:120]),
    )
    assert find_overlap(user).total == 4


@pytest.mark.parametrize(("shared", "overlaps"), [(6, 0), (7, 1)])
def test_overlap_begins_above_half_of_the_shingles(shared: int, overlaps: int):
    held_out = words(0, 24)  # 12 shingles
    user = UserText(name="anna", train=(words(0, shared + 12),), test=(held_out,))
    assert find_overlap(user).test == overlaps


def test_a_shingle_across_two_train_documents_does_not_count():
    user = UserText(name="anna", train=(words(0, 12), words(12, 12)), test=(words(0, 24),))
    assert find_overlap(user).total == 0


def test_a_user_without_held_out_documents_has_no_overlap():
    overlap = find_overlap(UserText(name="anna", train=("text",)))
    assert (overlap.total, overlap.valid_documents, overlap.test_documents, overlap.examples) == (0, 0, 0, ())
    assert find_overlap(UserText(name="anna", train=(), test=(words(0, 20),))).total == 0


def test_hashes_equal_a_plain_loop_over_shingles():
    source = random.Random(0)
    documents = [[f"w{source.randrange(4)}" for _ in range(length)] for length in (0, 12, 13, 40, 3, 200)]
    hashes, owner = hash_shingles(documents)
    expected = [
        (number, tuple(document[start : start + 13]))
        for number, document in enumerate(documents)
        for start in range(len(document) - 12)
    ]
    assert owner.tolist() == [number for number, _ in expected]
    by_hash = {int(value): shingle for value, (_, shingle) in zip(hashes, expected, strict=True)}
    assert [by_hash[int(value)] for value in hashes] == [shingle for _, shingle in expected]
    assert len(np.unique(hashes)) == len({shingle for _, shingle in expected})


def test_no_documents_have_no_shingles():
    assert [part.tolist() for part in hash_shingles([])] == [[], []]


def test_of_several_versions_the_longest_stays_in_its_place():
    long, other = words(0, 60), words(500, 30)
    assert drop_near_duplicates([words(10, 30), other, long, long.upper(), " ", "tiny", "Tiny"]) == [
        other,
        long.upper(),
        "Tiny",
    ]


def test_after_dropping_no_part_repeats_the_rest():
    source = random.Random(1)
    documents = [words(source.randrange(1500), source.randrange(5, 60)) for _ in range(150)]
    kept = drop_near_duplicates(documents)
    assert 10 < len(kept) < 150
    for index, document in enumerate(kept):
        rest = tuple(kept[:index] + kept[index + 1 :])
        assert find_overlap(UserText(name="anna", train=rest, test=(document,))).total == 0


@pytest.mark.slow
def test_after_dropping_no_part_of_a_document_cut_in_two_repeats_the_rest():
    source = random.Random(2)
    own = [words(5000 + 100 * number, source.randrange(1, 60)) for number in range(60)]
    # A quarter begins, and a quarter ends, with what others have too; one says a sentence twice.
    shared = words(0, 20)
    documents = [f"{shared} {one}" for one in own[:15]] + [f"{one} {shared}" for one in own[15:30]] + own[30:]
    documents.append(f"{words(3000, 15)} {words(4000, 60)} {words(3000, 15)}")
    kept = drop_near_duplicates(documents)
    assert set(own[30:]) <= set(kept)
    assert documents[-1] not in kept
    for index, document in enumerate(kept):
        rest = kept[:index] + kept[index + 1 :]
        for at in range(1, len(document.split())):
            halves = " ".join(document.split()[:at]), " ".join(document.split()[at:])
            for held_out, trained in (halves, halves[::-1]):
                user = UserText(name="anna", train=(*rest, trained), test=(held_out,))
                assert find_overlap(user).total == 0


def test_real_text_overlaps_only_where_it_was_copied(shared_data):
    documents = read_documents(shared_data / "slim4" / "stackexchange.jsonl.xz")
    user = split_by_fractions(documents, valid=0.1, test=0.1, seed=0, name="stackexchange")
    assert sum(len(split_words(document)) for document in documents) > 1_000_000
    before = find_overlap(user)
    assert before.total <= 0.01 * (before.valid_documents + before.test_documents)
    copied = UserText(name=user.name, train=user.train, valid=user.valid, test=user.test + user.train[:7])
    assert find_overlap(copied).test == before.test + 7
