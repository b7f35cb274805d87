"""Colours, each for light and for dark backgrounds; pairs that colour-blind readers can tell apart.

Methods take Okabe and Ito's colours, with a line style and a marker that say the same once more. Generalists are
orange and specialists blue, as in the paper; further ones get hues of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LineStyle = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Colour:
    """The same role on a light and on a dark background."""

    light: str
    dark: str


INK = Colour("#1c2128", "#e4e8ec")
MUTED = Colour("#59636e", "#a3adb8")
LINE = Colour("#d5dbe1", "#39424c")
PAPER = Colour("#ffffff", "#15191e")

_FIXED = {"pretrained": 7, "local": 2, "fedavg": 3}
_METHODS = (
    Colour("#d55e00", "#ff8f4a"),
    Colour("#0072b2", "#5aaee8"),
    Colour("#00805d", "#2fcb9f"),
    Colour("#a8508a", "#e79cc9"),
    Colour("#3a9bd3", "#9bd8f7"),
    Colour("#b07900", "#f2bd4b"),
    Colour("#6f4bb2", "#b798ec"),
    Colour("#6b6f75", "#b4b9bf"),
    Colour("#7d5a35", "#cfa272"),
)
_LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX*<>hd"

# What a token's background is, and what a heat map is filled with; on light and on dark.
_EXPERTS = {
    "generalist": (Colour("#f0892b", "#9a4904"), Colour("#d9b52c", "#806410")),
    "specialist": (
        Colour("#4a94d8", "#1f69b3"),
        Colour("#35b592", "#0c6b50"),
        Colour("#a885d6", "#7247ad"),
        Colour("#98a2ad", "#5d6873"),
        Colour("#e07aa5", "#a83a6e"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a method is drawn."""

    colour: Colour
    line: LineStyle
    marker: str


def styles(methods: Sequence[str]) -> list[Style]:
    """A style for each method; pretrained, local and fedavg look the same in every report."""
    free = [number for number in range(len(_METHODS)) if number not in _FIXED.values()]
    chosen: list[Style] = []
    others = 0
    for method in methods:
        number, line = _FIXED.get(method), "-"
        if number is None or method in methods[: len(chosen)]:
            number, line = free[others % len(free)], _LINES[others // len(free) % len(_LINES)]
            others += 1
        marker = _MARKERS[number % len(_MARKERS)]
        if method == "pretrained":  # a level, not a curve
            line, marker = ":", ""
        chosen.append(Style(colour=_METHODS[number], line=line, marker=marker))
    return chosen


def expert_kind(name: str) -> tuple[str, int]:
    """The role of an expert and its number from 0: ``("specialist", 1)`` for "specialist 2"."""
    role, _, number = name.partition(" ")
    return role, int(number) - 1 if number else 0


def expert_colour(name: str) -> Colour:
    """The background of a token whose top expert this is."""
    role, number = expert_kind(name)
    return _EXPERTS[role][number % len(_EXPERTS[role])]


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def expert_css() -> list[tuple[str, Colour]]:
    """The tokens' colours by the short name of their expert: g1, g2, s1 ..."""
    return [(f"{role[0]}{n + 1}", one) for role, kinds in _EXPERTS.items() for n, one in enumerate(kinds)]


def expert_class(name: str) -> str:
    """The short name of an expert in :func:`expert_css`."""
    role, number = expert_kind(name)
    return f"{role[0]}{number % len(_EXPERTS[role]) + 1}"
