"""Train, valid and test splits of a user: by fractions, from given splits, or held out from a mixture of all users."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from jaxtyping import UInt64

from comingle.data.duplicates import SHINGLE_WORDS, hash_shingles, split_words
from comingle.data.streaming import DocumentLists, ListedDocuments
from comingle.utils.errors import DataError, NoTextError, did_you_mean, list_names
from comingle.utils.seeds import derive

# A longer line is a paragraph or a minified file, so a split may cut through it.
_LONG_LINE_CHARACTERS = 1000
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 120
"""Largest number of characters of an example of an overlapping document."""


@dataclass(frozen=True, kw_only=True)
class UserText:
    """Documents of one user by split."""

    name: str
    train: tuple[str, ...]
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()


OVERLAP_PHRASE = f"in the training text, entirely or by more than half of their {SHINGLE_WORDS}-word sequences"
"""Phrase for messages about an :class:`Overlap`, after "documents are"."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Numbers of a user's held-out documents that are entirely or mostly in its train documents."""

    user: str
    valid: int
    """Overlapping valid documents, out of ``valid_documents``."""
    valid_documents: int
    test: int
    """Overlapping test documents, out of ``test_documents``."""
    test_documents: int
    examples: tuple[str, ...]
    """Beginnings of up to three overlapping documents."""

    @property
    def total(self) -> int:
        """Number of held-out documents, valid and test together, that overlap with train."""
        return self.valid + self.test


def split_by_fractions(
    documents: Sequence[str], *, valid: float, test: float, seed: int, name: str, stable: bool = False
) -> UserText:
    """Shuffle the documents by (seed, name), then cut them into train, valid and test by characters.

    The splits get the fractions ``1 - valid - test``, ``valid`` and ``test`` of the characters, to within one line. A
    document across a border is cut at the nearest line end. It is cut at white space if it has no line ends, or if the
    line at the border has more than 1,000 characters. Nothing is lost or duplicated.

    Args:
        documents: Documents of the user.
        valid: Fraction of the validation split.
        test: Fraction of the test split.
        seed: Seed of the shuffle.
        name: Name of the user.
        stable: Whether to split in the order of the documents instead, by :func:`_split_stably`.

    Raises:
        DataError: There are no documents, or the fractions are negative or leave nothing to train on.
    """
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise DataError(
            f"user {name!r}: split fractions valid={valid}, test={test}: each must be >= 0 and their sum below 1"
        )
    if not any(documents):
        raise DataError(f"user {name!r}: no documents to split; at least one is needed")
    if stable:
        return _split_stably(documents, valid=valid, test=test, name=name)
    shuffled = _shuffle(documents, "split", seed, name)
    # In characters: train, valid from `valid_start` on, test from `test_start` on.
    num_characters = sum(map(len, shuffled))
    test_start = round(num_characters * (1 - test))
    valid_start = round(num_characters * (1 - test - valid))
    train_and_valid, test_documents = _cut(shuffled, test_start)
    train_documents, valid_documents = train_and_valid, list[str]()
    if valid:
        train_documents, valid_documents = _cut(train_and_valid, valid_start)
    return UserText(name=name, train=tuple(train_documents), valid=tuple(valid_documents), test=tuple(test_documents))


_PIECE_CHARACTERS, _PIECES = 200, 50
"""Least size of a piece in characters, and the number of pieces so far from which on pieces are longer."""


class StableSplits:
    """Splits that pieces of a user's data join in their order; each piece goes to the split that lacks most.

    The choice depends only on the pieces before, so appending data never moves earlier data. The first three pieces go
    to train, valid and test.

    Args:
        valid: Fraction of the validation split.
        test: Fraction of the test split.
    """

    def __init__(self, valid: float, test: float) -> None:
        """Start with empty splits; a fraction of 0 leaves a split out."""
        fractions = {"train": 1 - valid - test, "valid": valid, "test": test}
        self._fractions = {split: fraction for split, fraction in fractions.items() if fraction > 0}
        self._amounts = dict.fromkeys(self._fractions, 0)

    @property
    def total(self) -> int:
        """Amount of data so far."""
        return sum(self._amounts.values())

    def choose(self) -> str:
        """Return the split of the next piece."""
        return min(self._fractions, key=lambda split: self._amounts[split] / self._fractions[split])

    def add(self, split: str, amount: int) -> None:
        """Record that a piece of the user's data was put into a split, which determines where later pieces go.

        Args:
            split: The split of the piece, as :meth:`choose` has returned it.
            amount: Size of the piece.
        """
        self._amounts[split] += amount


def _split_stably(documents: Sequence[str], *, valid: float, test: float, name: str) -> UserText:
    """Split documents so that text that is appended, as lines or as documents, never moves earlier text.

    Documents are cut at line ends into pieces of at least 200 characters, or 2% of the text so far. Neighbouring
    pieces of a document in the same split stay together.

    Args:
        documents: Documents of the user.
        valid: Fraction of the validation split.
        test: Fraction of the test split.
        name: Name of the user.
    """
    splits = StableSplits(valid, test)
    by_split: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for document in documents:
        start, previous = 0, None
        while start < len(document):
            end = _piece_end(document, start, max(_PIECE_CHARACTERS, splits.total // _PIECES))
            split, piece = splits.choose(), document[start:end]
            if split == previous:
                by_split[split][-1] += piece
            else:
                by_split[split].append(piece)
            splits.add(split, len(piece))
            start, previous = end, split
    return UserText(name=name, **{split: tuple(pieces) for split, pieces in by_split.items()})


def _piece_end(document: str, start: int, characters: int) -> int:
    """Return where a piece of a document ends: after the line, or a space in a long line, at its smallest size.

    Args:
        document: The document.
        start: Where the piece starts.
        characters: Smallest number of characters of the piece.
    """
    least_end = start + characters
    line_start = document.rfind("\n", 0, least_end - 1) + 1
    line_end = document.find("\n", least_end - 1) + 1 or len(document)
    space = document.find(" ", max(least_end - 1, line_start + _LONG_LINE_CHARACTERS), line_end) + 1
    return space or line_end


def split_given(
    splits: Mapping[str, Sequence[str]],
    *,
    name: str,
    train: str = "train",
    valid: str | None = None,
    test: str = "test",
    valid_fraction: float = 0.0,
    seed: int = 0,
    stable: bool = False,
    advice: str = "",
) -> UserText:
    """Return a user whose documents are split already.

    If there is no validation split, ``valid_fraction`` of train becomes valid. With a fraction of 0, valid is empty, or
    an error if ``valid`` names a split that is missing in ``splits``.

    Args:
        splits: Documents by split.
        name: Name of the user.
        train: Name of the train split.
        valid: Name of the validation split, if there is one.
        test: Name of the test split.
        valid_fraction: Fraction of train's characters to use as validation split if there is no other.
        seed: Seed of the shuffle of train before valid is cut off.
        stable: Whether train is not shuffled, so that appended documents never move earlier ones.
        advice: What to do if a split is missing, for the error's message; if empty, :data:`GIVE_SPLITS`.

    Raises:
        NoTextError: A named split is missing and nothing replaces it; the message lists the existing splits.
    """
    needed = [train, test]
    if valid is not None and valid_fraction <= 0:  # with a fraction, a missing validation split is cut from train
        needed = [train, valid, test]
    for wanted in needed:
        if wanted not in splits:
            raise missing_split_error(name, wanted, splits, advice)
    train_documents, test_documents = splits[train], tuple(splits[test])
    if valid is not None and valid in splits:
        return UserText(name=name, train=tuple(train_documents), valid=tuple(splits[valid]), test=test_documents)
    if valid_fraction == 0:
        return UserText(name=name, train=tuple(train_documents), test=test_documents)
    train_and_valid = split_by_fractions(
        train_documents, valid=valid_fraction, test=0.0, seed=seed, name=name, stable=stable
    )
    return replace(train_and_valid, test=test_documents)


GIVE_SPLITS = "give train and test, and valid where a method needs it"
"""Advice for users whose splits are given one by one."""


def column_advice(column: str | None) -> str:
    """Return advice for a data set whose rows lack a split, to follow a list of the splits that they have.

    Args:
        column: Column with the split of each row (the recipe's ``data.dataset.split``); None if the recipe names none.
    """
    names = "name the splits in data.split.train_name, valid_name and test_name"
    if column is not None:
        return f"these are the values of column {column!r}; {names}"
    return f"set data.dataset.split to the column that names each row's split, or {names}"


def missing_split_error(name: str, wanted: str, existing: Collection[str], advice: str = "") -> NoTextError:
    """Return the error for a user whose data lacks a split that the recipe requests.

    Args:
        name: Name of the user.
        wanted: Name of the requested split.
        existing: Splits that the user's data has.
        advice: What to do; by default to give the user's splits.
    """
    hint = did_you_mean(wanted, existing)
    found = ", ".join(existing) or "none"
    return NoTextError(f"user {name!r}: no split {wanted!r}; found: {found}; {advice or GIVE_SPLITS}.{hint}")


def mix_held_out(users: Sequence[UserText], *, seed: int) -> list[UserText]:
    """Replace every user's valid and test documents by uniform mixtures of all users' documents; keep train.

    This is the out-of-distribution task of CoMiGS (section 4.1.1: "their validation and test sets consist of a uniform
    mixture of all categories"; table 4 has equal counts). Each user shuffles its documents by (seed, split, name),
    takes as many characters as the smallest split has, and cuts them into equal shares, one for each mixture. Shares of
    different users are interleaved, so that a prefix of a mixture is uniform too. The order of the users has no effect.

    Raises:
        DataError: A user has no documents in a split that others have, or two users have the same name.
    """
    num_users_named = Counter(user.name for user in users)
    repeated = [name for name, count in num_users_named.items() if count > 1]
    if repeated:
        raise DataError(f"data.held_out: mixture: two users are named {repeated[0]!r}; names must be unique")

    def new_lists(_user_name: str) -> DocumentLists:
        """Return empty lists for the documents of a user, in memory; streamed data sets have theirs in files."""
        return ListedDocuments()

    mixture = Mixture(new_lists, seed)
    for user in users:
        mixture.add(user)
    return list(mixture.texts())


HELD_OUT = ("valid", "test")
"""Splits that are mixed."""


class Mixture:
    """Builder of mixed held-out splits, as :func:`mix_held_out` describes them, to which users are added one by one.

    The held-out documents of each user are cut into as many shares as there are users, one for each mixture. The stores
    of these shares decide whether documents stay in memory.

    Args:
        make_lists: Returns an empty store of document lists, given its name: "own" or a split.
        seed: Seed of the order of documents.
    """

    def __init__(self, make_lists: Callable[[str], DocumentLists], seed: int):
        """Create a builder without users; call :meth:`add` for each user, and then :meth:`texts`.

        Args:
            make_lists: Returns an empty store of document lists, in memory or in files, given its name: "own" for the
                documents before mixing, or a split for the shares of the mixtures.
            seed: Seed of the order of documents.
        """
        self.make_lists, self.seed = make_lists, seed
        self._user_names: list[str] = []
        self._unmixed = make_lists("own")
        """Documents before mixing: train, valid and test of the first user, then of the second, and so on."""
        self._sizes: dict[str, list[int]] = {split: [] for split in HELD_OUT}
        """Number of characters of each user, by split."""
        self._shares: dict[str, DocumentLists] = {}
        """By split, lists of documents: each user's shares for the mixtures of all users."""

    def add(self, text: UserText) -> None:
        """Store a user's documents, and count the characters of its valid and test splits."""
        self._user_names.append(text.name)
        for documents in (text.train, text.valid, text.test):
            self._unmixed.add(documents)
        self._sizes["valid"].append(sum(map(len, text.valid)))
        self._sizes["test"].append(sum(map(len, text.test)))

    def texts(self) -> Iterator[UserText]:
        """Yield the users in the order in which they were added, with mixtures as valid and test.

        For each held-out split, the documents of each of the U users are cut into U shares. The mixture of a user
        consists of one share of every user.

        Raises:
            DataError: A user has no documents in a split that others have.
        """
        self._unmixed.finish()
        user_names = self._user_names
        sorted_users = sorted(range(len(user_names)), key=user_names.__getitem__)  # user numbers, sorted by name
        for split in HELD_OUT:
            self._cut_split(split, sorted_users)
        position_of_user = {user: position for position, user in enumerate(sorted_users)}
        for user, name in enumerate(user_names):
            mixed: dict[str, tuple[str, ...]] = {}
            for split, shares in self._shares.items():
                mixed[split] = self._mixture_of(shares, position_of_user[user], sorted_users)
            yield UserText(name=name, train=tuple(self._unmixed_documents(user, "train")), **mixed)

    def _cut_split(self, split: str, sorted_users: Sequence[int]) -> None:
        """Cut every user's documents of a split into one share per mixture, and store the shares in ``_shares[split]``.

        If no user has documents in the split, nothing is stored, and the users of :meth:`texts` have none in it.

        Args:
            split: Name of the split, "valid" or "test".
            sorted_users: Numbers of the users, sorted by name.

        Raises:
            DataError: A user has no documents in the split, and others have.
        """
        size_by_name = dict(zip(self._user_names, self._sizes[split], strict=True))
        quota = mixture_quota(size_by_name, split)  # characters that each user contributes
        if quota == 0:
            return
        shares = self.make_lists(split)
        for contributor in sorted_users:
            documents = self._unmixed_documents(contributor, split)
            name, num_mixtures = self._user_names[contributor], len(sorted_users)
            for share in cut_shares(documents, quota, num_mixtures, split, self.seed, name):
                shares.add(share)
        shares.finish()
        self._shares[split] = shares

    def _unmixed_documents(self, user: int, split: str) -> Sequence[str]:
        """Return the documents of a user, given by number, in a split, before they are mixed."""
        splits = ("train", "valid", "test")  # each user has added one list per split, in this order
        return self._unmixed[len(splits) * user + splits.index(split)]

    def _mixture_of(self, shares: DocumentLists, position: int, sorted_users: Sequence[int]) -> tuple[str, ...]:
        """Return the text that replaces a user's split: one share of each user's documents, interleaved.

        Args:
            shares: Lists of documents. The first U are the first user's shares for the mixtures of all U users, the
                next U are the second user's, and so on, in the order of ``sorted_users``.
            position: Position in ``sorted_users`` of the user whose mixture is returned.
            sorted_users: Numbers of the users, sorted by name.
        """
        num_users = len(sorted_users)
        share_by_contributor: dict[str, Sequence[str]] = {}
        for contributor_position, contributor in enumerate(sorted_users):
            share = shares[num_users * contributor_position + position]
            share_by_contributor[self._user_names[contributor]] = share
        return interleave(share_by_contributor)

    def remove(self) -> None:
        """Delete the files in which the document lists are stored; call it after the last user was read."""
        for lists in (self._unmixed, *self._shares.values()):
            lists.remove()


def find_overlap(user: UserText) -> Overlap:
    """Count a user's held-out documents that are entirely or mostly in the user's train documents.

    A document is entirely in train if it equals a train document except for case and white space. It is mostly in train
    if more than half of its shingles (runs of 13 words) are.
    """
    words_of_train = [split_words(document) for document in user.train]
    train_texts = {" ".join(words) for words in words_of_train}
    hashes, _document_indices = hash_shingles(words_of_train)
    train_shingles = np.unique(hashes)
    valid = _documents_in_train(user.valid, train_texts, train_shingles)
    test = _documents_in_train(user.test, train_texts, train_shingles)
    first_documents = (valid + test)[:_EXAMPLES]
    examples = tuple(" ".join(document.split())[:_EXAMPLE_CHARACTERS] for document in first_documents)
    return Overlap(
        user=user.name,
        valid=len(valid),
        valid_documents=len(user.valid),
        test=len(test),
        test_documents=len(user.test),
        examples=examples,
    )


def _documents_in_train(
    documents: Sequence[str], train_texts: set[str], train_shingles: UInt64[np.ndarray, " known"]
) -> list[str]:
    """Return the held-out documents that are also in train: entirely, or by more than half of their shingles.

    Args:
        documents: Held-out documents.
        train_texts: Train documents, with words joined by single spaces.
        train_shingles: Hashes of the train documents' shingles, which are all runs of 13 words.
    """
    words_of_documents = [split_words(document) for document in documents]
    hashes, document_of_hash = hash_shingles(words_of_documents)
    is_in_train = np.isin(hashes, train_shingles)
    num_shingles = np.bincount(document_of_hash, minlength=len(documents))  # of each document
    num_in_train = np.bincount(document_of_hash[is_in_train], minlength=len(documents))
    found: list[str] = []
    for number, document in enumerate(documents):
        is_mostly_in_train = 2 * num_in_train[number] > num_shingles[number]
        is_entirely_in_train = " ".join(words_of_documents[number]) in train_texts
        if is_mostly_in_train or is_entirely_in_train:
            found.append(document)
    return found


def mixture_quota(sizes: Mapping[str, int], split: str) -> int:
    """Return how many characters each user contributes to the mixtures of a split: the minimum of ``sizes``.

    A mixture is a user's held-out text with an equal share of every user's text. The result is 0 if all sizes are 0.

    Args:
        sizes: Number of characters of each user in the split, by name.
        split: Name of the split, for error messages.

    Raises:
        DataError: Some users have no documents, and others have some.
    """
    quota = min(sizes.values(), default=0)
    if quota == 0 and any(sizes.values()):
        empty = list_names(name for name, size in sizes.items() if size == 0)
        raise DataError(f"data.held_out: mixture: no {split} documents of {empty}; every user needs some")
    return quota


def cut_shares(
    documents: Sequence[str], quota: int, num_mixtures: int, split: str, seed: int, name: str
) -> list[list[str]]:
    """Cut a user's held-out documents into shares of equal size, one for each mixture (:func:`mix_held_out`).

    Shuffles the documents and cuts their first ``quota`` characters into consecutive shares. Cuts are between two lines
    if possible, so sizes are equal to within a line. The text beyond the quota is not used.

    Args:
        documents: Documents of the user in the split.
        quota: Number of characters that the user contributes to all mixtures together.
        num_mixtures: Number of mixtures, which is the number of users.
        split: Name of the split, "valid" or "test".
        seed: Seed of the shuffle.
        name: Name of the user.

    Returns:
        The shares, each a list of documents, in the order of the text. Documents at a cut are divided.
    """
    shuffled = _shuffle(documents, "mix", split, seed, name)
    rest, _beyond_quota = _cut(shuffled, quota)
    shares: list[list[str]] = []
    # From the last share to the first. With a quota of 90 and 3 mixtures, the shares begin at characters 60, 30 and 0.
    for index in reversed(range(num_mixtures)):
        rest, share = _cut(rest, quota * index // num_mixtures)
        shares.insert(0, share)
    return shares


def interleave(shares: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the documents of all shares in an order in which every prefix has about as much text of each share.

    Documents are sorted by the number of characters before them in their share, then by the name of the contributor.

    Args:
        shares: Documents by name of the contributor.
    """
    sortable: list[tuple[int, str, str]] = []
    for contributor, documents in shares.items():
        characters_before = 0
        for document in documents:
            sortable.append((characters_before, contributor, document))
            characters_before += len(document)
    return tuple(document for _characters_before, _contributor, document in sorted(sortable))


def _shuffle(documents: Sequence[str], *purpose: str | int) -> list[str]:
    """Return the documents in a random order, which is the same for the same documents and purpose.

    Args:
        documents: The documents.
        *purpose: Words and numbers that seed the shuffle, such as what it is for, the recipe's seed and the user.
    """
    shuffled = list(documents)
    random.Random(derive(*purpose)).shuffle(shuffled)
    return shuffled


def _cut(documents: Sequence[str], characters: int) -> tuple[list[str], list[str]]:
    """Cut a list of documents after about this many characters; a document at the border may be cut in two.

    Returns:
        The documents before and after the cut, without empty parts of the document at the border.
    """
    ends = list(accumulate(map(len, documents)))  # end of each document, if all were one text
    border = bisect_right(ends, characters)  # index of the document at the border
    if border == len(documents):
        return list(documents), []
    document = documents[border]
    document_start = ends[border] - len(document)
    cut_point = _cut_point(document, characters - document_start)
    head, tail = document[:cut_point], document[cut_point:]
    before, after = list(documents[:border]), list(documents[border + 1 :])
    if head:
        before.append(head)
    if tail:
        after.insert(0, tail)
    return before, after


def _cut_point(document: str, position: int) -> int:
    """Return where to cut a document near a position: between two lines, or else between two words.

    The line in which the position lies goes to one side as a whole: the cut is before or after it, whichever is nearer
    to the position. But if the line is longer than 1,000 characters or the only one of the document, it is cut at the
    space nearest to the position, or exactly at the position if it has no space.

    Args:
        document: The document.
        position: Number of characters that the first part should have.

    Returns:
        Number of characters that the first part gets.
    """
    line_start = document.rfind("\n", 0, position) + 1
    line_end = document.find("\n", position) + 1 or len(document)
    is_only_line = line_start == 0 and line_end == len(document)
    is_long = line_end - line_start > _LONG_LINE_CHARACTERS
    if position == line_start:
        return line_start
    if not (is_only_line or is_long):
        start_is_nearer = position - line_start <= line_end - position
        return line_start if start_is_nearer else line_end
    after_last_space = document.rfind(" ", line_start, position) + 1  # 0 if there is no space
    after_next_space = document.find(" ", position, line_end) + 1
    cut_points = [cut_point for cut_point in (after_last_space, after_next_space) if cut_point > line_start]
    return min(cut_points, key=lambda cut_point: abs(cut_point - position), default=position)
