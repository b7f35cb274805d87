"""What a file is that is no text, by its first bytes."""

from __future__ import annotations

import codecs

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_PICTURE = "a picture"
_KINDS = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive (as .docx, .odt and .epub are)",
    b"\xd0\xcf\x11\xe0": "an old office document",
    b"{\\rtf": "rich text (RTF)",
    b"\x89PNG": _PICTURE,
    b"\xff\xd8\xff": _PICTURE,
    b"GIF8": _PICTURE,
    b"\x1f\x8b": "compressed by gzip; name it .gz",
    b"\xfd7zXZ": "compressed by xz; name it .xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh91AY&SY": "compressed by bzip2",
    b"PAR1": "a table (Parquet); name it .parquet",
    b"SQLite format 3\0": "a database (SQLite)",
    b"GGUF": "a model's weights (GGUF)",
}


MOST_WORD_CHARACTERS = 1 << 20
"""Of one word; tokenizers take gigabytes for a longer one."""


def word_problem(text: str) -> str | None:
    """Return what is wrong with a text that has no white space for a million characters, as encoded files have."""
    if len(text) <= MOST_WORD_CHARACTERS or max(map(len, text.split()), default=0) <= MOST_WORD_CHARACTERS:
        return None
    return f"more than {MOST_WORD_CHARACTERS:,} characters without white space, which is no text"


def kind_of(content: bytes) -> str | None:
    """What some bytes are that are no text in any coding; None where they may be text."""
    for start, kind in _KINDS.items():
        if content.startswith(start):
            return kind
    if b"\0" in content and not content.startswith(UTF_16):
        return f"binary (zero byte at offset {content.index(0)})"
    return None
