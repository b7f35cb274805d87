"""Four demo users with text that is installed with Python and its packages; nothing is downloaded.

Each has a list of documents in a fixed order, without near-duplicates, of at most 400,000 characters. The documents
depend on the installed versions, so use demo users to try things out and not to compare machines.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from types import ModuleType

from comingle.data.duplicates import hash_shingles, split_words
from comingle.data.files import join_paragraphs, split_paragraphs
from comingle.utils.errors import DataError, did_you_mean

DEMO_PREFIX = "demo:"
"""Prefix of the names of texts that come with installed packages, such as licences."""

_USER_CHARACTERS = 400_000
_DOCUMENT_CHARACTERS = 20_000
# Shorter docstrings are mostly signatures or references to other docstrings.
_DOCSTRING_CHARACTERS = 200
# Importing scipy adds this section to docstrings of NumPy. Demo text must not depend on earlier imports.
_ADDED_BY_SCIPY = re.compile(r"\*\*Array API Standard Support\*\*\n.*?(?=^\S[^\n]*\n-+$)", re.DOTALL | re.MULTILINE)
_LICENCE_NAME = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)
_NO_TEXT_SUFFIXES = (".py", ".pyc", ".js", ".so", ".json")


def read_library() -> list[str]:
    """Return the source text of each module at the top level of the standard library, such as ``ast.py``."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return _limit_documents(
        {path.name: path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.py")}
    )


def read_reference() -> list[str]:
    """Return the topics of the language reference that ``help()`` prints."""
    from pydoc_data.topics import topics

    return _limit_documents(topics)


def read_numpy() -> list[str]:
    """Return the docstrings of NumPy's public functions, classes and methods, each after its name."""
    return _limit_documents({name: f"{name}\n\n{text}" for name, text in _numpy_docstrings()})


def read_licences() -> list[str]:
    """Return documents from the licences of Python and of the installed distributions, each paragraph only once.

    A document is a block of paragraphs, not a file, since the longest files are collections of licences that also exist
    as separate files.
    """
    texts: set[str] = set()
    for path in _licence_files():
        text = _read_or_none(path)
        if text:
            texts.add(text)
    known: set[str] = set()  # normalised paragraphs of the files so far
    blocks: list[str] = []
    for text in sorted(texts, key=lambda text: (len(text), text)):  # the shortest first, collections last
        paragraph_by_normalised: dict[str, str] = {}  # normalised: in folded case, with single spaces
        for paragraph in split_paragraphs(text):
            paragraph_by_normalised[" ".join(split_words(paragraph))] = paragraph
        new_paragraphs: list[str] = []
        for normalised, paragraph in paragraph_by_normalised.items():
            if normalised not in known:
                new_paragraphs.append(paragraph)
        blocks += join_paragraphs(new_paragraphs)
        known.update(paragraph_by_normalised)
    return _limit_documents({block: block for block in blocks})  # blocks have no names, so the text is the name


DEMO_USERS: Mapping[str, Callable[[], list[str]]] = {
    "library": read_library,
    "reference": read_reference,
    "numpy": read_numpy,
    "licences": read_licences,
}
"""Functions that read the documents of each demo user."""


def _limit_documents(documents: Mapping[str, str]) -> list[str]:
    """Choose the documents of a demo user, at most 400,000 characters in total.

    Clips each document to 20,000 characters, drops near-duplicates, and takes the first documents in a fixed
    pseudorandom order.

    Args:
        documents: Texts by name; the order depends on the names alone.

    Raises:
        DataError: There is no text, as on a Python without source files.
    """
    names = sorted(documents, key=_shuffle_key)
    clipped = [_clip(documents[name], _DOCUMENT_CHARACTERS) for name in names]
    distinct = drop_near_duplicates(clipped)
    chosen: list[str] = []
    num_characters = 0
    for document in distinct:
        num_characters += len(document)
        if num_characters > _USER_CHARACTERS:
            break
        chosen.append(document)
    if not chosen:
        raise DataError("demo users: this Python installation lacks the text that they read; use your own files")
    return chosen


def _shuffle_key(name: str) -> bytes:
    """Return a sort key for a fixed pseudorandom order."""
    return hashlib.sha256(name.encode("utf-8", errors="replace")).digest()


def drop_near_duplicates(documents: Sequence[str]) -> list[str]:
    """Drop near-duplicate documents, so that no test document has most of its text in train too.

    Documents are tested one after another, the shortest first, so that the longest of several versions is kept. A
    document is dropped if it equals another one that is not dropped so far. It is also dropped if more than half of the
    shingles (runs of 13 words) of a beginning or an end of it are repeated, in the documents not dropped so far or in
    itself. Beginnings and ends count because a split may cut a document in two, and either part may become test data.

    Returns:
        The documents that are kept, in their order.
    """
    words = [split_words(document) for document in documents]
    texts = [" ".join(words_of_document) for words_of_document in words]
    shingles: list[list[int]] = []  # of each document
    for words_of_document in words:
        hashes, _document_indices = hash_shingles([words_of_document])
        shingles.append(hashes.tolist())
    # Number of occurrences of each text and of each shingle in the documents that are not dropped so far.
    num_texts = Counter(texts)
    num_shingles = Counter(chain.from_iterable(shingles))
    kept: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: len(words[index])):
        text = texts[index]
        is_unique = num_texts[text] == 1
        is_repeated = [num_shingles[shingle] > 1 for shingle in shingles[index]]
        if text and is_unique and not _has_repeated_end(is_repeated):
            kept.append(index)
        else:  # uncount the dropped text, so that the last of several equal documents is kept
            num_texts[text] -= 1
            num_shingles.subtract(shingles[index])
    return [documents[index] for index in sorted(kept)]


def _has_repeated_end(is_repeated: Sequence[bool]) -> bool:
    """Return whether a document has a beginning or an end, of any length, of which more than half is repeated text.

    Such documents are left out of the demo data. Beginnings and ends count, and not only the whole document, because a
    split may cut a document in two, and either part may become test data.

    Args:
        is_repeated: For each shingle (run of 13 words) of the document, in order, whether it occurs elsewhere too. True
            for ``[False, True, True]``, for example, whose end ``[True, True]`` is repeated.
    """
    for flags in (is_repeated, is_repeated[::-1]):  # beginnings, then ends
        num_repeated = 0
        for length, flag in enumerate(flags, start=1):
            num_repeated += flag
            if 2 * num_repeated > length:
                return True
    return False


def _clip(document: str, characters: int) -> str:
    """Return the whole lines at the beginning of a document that fit into this many characters.

    A first line that does not fit is cut.
    """
    if len(document) <= characters:
        return document
    end_of_last_line = document.rfind("\n", 0, characters) + 1  # 0 if the first line does not fit
    if end_of_last_line == 0:
        return document[:characters]
    return document[:end_of_last_line]


def _numpy_docstrings() -> Iterator[tuple[str, str]]:
    """Yield dotted name and docstring of the objects that NumPy's public modules export, and of their methods."""
    import numpy

    modules = (numpy, numpy.linalg, numpy.fft, numpy.random, numpy.ma, numpy.polynomial)
    for module in modules:
        for name, value in _public_callables(module):
            yield from _long_docstring(f"{module.__name__}.{name}", value)
            if inspect.isclass(value):
                for method, function in _public_callables(value):
                    yield from _long_docstring(f"{module.__name__}.{name}.{method}", function)


def _public_callables(owner: ModuleType | type) -> Iterator[tuple[str, object]]:
    """Yield name and value of each function and class of a module, or method of a class, to read their docstrings.

    Private attributes, whose names begin with "_", are left out. Warnings and errors of deprecated ones are ignored.
    """
    for name in sorted(dir(owner)):
        if name.startswith("_"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = getattr(owner, name, None)
        if callable(value):
            yield name, value


def _long_docstring(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of an object; nothing if the docstring is too short for a document.

    Text that SciPy adds to NumPy's docstrings once it is imported is removed, so that the result does not depend on it.
    """
    text = _ADDED_BY_SCIPY.sub("", inspect.getdoc(value) or "")
    if len(text) >= _DOCSTRING_CHARACTERS:
        yield name, text


def _licence_files() -> Iterator[Path]:
    """Yield the licence files of Python and of all installed packages; files that do not exist may be among them."""
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    # Python's licence is in one of these places; which one depends on how Python was installed.
    yield standard_library / "LICENSE.txt"
    yield standard_library.parent.parent / "LICENSE.txt"
    for distribution in distributions():
        for file in distribution.files or ():
            is_licence = _LICENCE_NAME.search(file.name) is not None
            if is_licence and not file.name.endswith(_NO_TEXT_SUFFIXES):
                yield Path(str(file.locate()))


def _read_or_none(path: Path) -> str | None:
    """Return the text of a file; None if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def read_demo(name: str) -> list[str]:
    """Return the documents of a demo user, named as ``demo:NAME`` or ``NAME``.

    Raises:
        DataError: There is no demo user of that name.
    """
    name = name.removeprefix(DEMO_PREFIX)
    if name not in DEMO_USERS:
        raise DataError(f"no demo user {name!r}; allowed: {', '.join(DEMO_USERS)}.{did_you_mean(name, DEMO_USERS)}")
    return list(_read_once(name))  # a new list, so that callers cannot change the cached documents


@cache
def _read_once(name: str) -> tuple[str, ...]:
    """Return the documents of a demo user, cached because scanning the installed packages takes a second or two."""
    return tuple(DEMO_USERS[name]())
