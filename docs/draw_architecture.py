"""Draw ``architecture.svg`` (packages and tiers) and ``message.svg`` (the way of a message).

    python docs/draw_architecture.py

The tiers are those of the import contract in ``pyproject.toml``; only the words in a box stand here.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent

WORDS = {
    "comingle-papers": "published tables, figures and theory",
    "cli": "one file per command",
    "audits": "privacy attacks",
    "cost": "memory, bytes, time",
    "federation": "clients and server",
    "serving": "chat, API, export",
    "runs": "Python API, run folders, comparisons",
    "reports": "tables, figures, pages",
    "training": "round loop, client, server, optimizers",
    "privacy": "clipping, noise, secure and robust sums",
    "data": "read, tokenise, split",
    "methods": "one page per family",
    "models": "base models, adapters, routers, kernels",
    "config": "recipes and settings",
    "protocol": "messages and wire format",
    "utils": "tensor trees, files, records, errors",
}
"""Packages and what is in them."""

HOUSE, WIDTH, ROW, HEIGHT, GUTTER, TOP = 760, 480, 66, 48, 56, 14
LINE, FILL, WIRE = "#6b7c8d", "#eef3f8", "#fff4dc"
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1b2733}"
    ".name{font-size:16px;font-weight:600}.words{font-size:12px}.small{font-size:11.5px;fill:#445565}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px;font-weight:600}"
)

Tiers = list[list[str]]


# ---------------------------------------------------------------- packages


def tiers() -> Tiers:
    """Return the packages from the top tier to the bottom one, siblings side by side."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    return [["comingle-papers"], *([name.strip() for name in tier.split("|")] for tier in contract["layers"])]


def packages() -> str:
    """Draw packages as boxes, a tier a row, and one arrow for the direction of imports."""
    parts = []
    room = HOUSE - 2 * GUTTER
    for row, names in enumerate(tiers()):
        width = (room - 14 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            parts.append(_box(GUTTER + place * (width + 14), TOP + row * ROW, width, HEIGHT, name, WORDS[name]))
    height = len(tiers()) * ROW + TOP - (ROW - HEIGHT) + 10
    parts.append(_line(f"M{GUTTER / 2:.0f} {TOP + 8} V{height - 20:.0f}"))
    turned = f'<text x="0" y="0" transform="translate({GUTTER / 2 - 8:.0f} {height / 2:.0f}) rotate(-90)"'
    parts.append(f'{turned} text-anchor="middle" class="small">imports</text>')
    return _page("Packages of comingle; each imports only what is below it", HOUSE, height, parts)


# ---------------------------------------------------------------- the way of a message


def message() -> str:
    """Draw one round: clients on the left, the server on the right, messages between them."""
    left, right, wide, middle = 10, 284, 186, WIDTH / 2
    parts = [
        f'<rect x="{middle - 36}" y="10" width="72" height="584" rx="8" fill="{WIRE}"/>',
        _text(middle, 28, "wire", "name"),
        _text(middle, 46, "wire.py", "small"),
        _text(middle, 308, "pack", "code"),
        _text(middle, 326, "unpack", "code"),
        _text(left + wide / 2, 24, "users", "name"),
        _text(left + wide / 2, 42, "training/client.py", "small"),
        _text(right + wide / 2, 24, "server", "name"),
        _text(right + wide / 2, 42, "training/server.py", "small"),
        _step(right, 66, wide, "1", "ServerHalf.download", "a model for each participant", "with a stale model"),
        _step(left, 164, wide, "2", "Clients.receive", "take it; choose or mix", "with data of one's own"),
        _step(left, 262, wide, "3", "local.train", "phases of local steps,", "a cohort in one batch"),
        _step(left, 360, wide, "", "Clients.upload", "copies of what is shared", "and what is reported"),
        _step(right, 402, wide, "4", "ServerHalf.aggregate", "sum or stack, by name;", "only who took part"),
        _step(right, 500, wide, "5", "kept, version", "the absent download when", "they are next needed"),
        _line(f"M{right} 110 H{left + wide / 2} V162"),
        _text(middle, 102, "Download", "code"),
        _line(f"M{left + wide / 2} 236 V260"),
        _line(f"M{left + wide / 2} 334 V358"),
        _line(f"M{left + wide} 400 H{middle} V438 H{right - 2}"),
        _text(middle, 391, "Upload", "code"),
        _line(f"M{right + wide / 2} 474 V498"),
        _line(f"M{right} 548 H{left + wide / 2} V574"),
        _text(left + wide / 2, 592, "2 again, when next needed", "small"),
        _text(right + wide / 2, 592, "InProcess moves and counts", "small"),
    ]
    return _page("One round, as messages", WIDTH, 604, parts)


def _step(x: float, y: float, width: float, number: str, name: str, *words: str) -> str:
    box = f'<rect x="{x}" y="{y}" width="{width}" height="72" rx="7" fill="{FILL}" stroke="{LINE}"/>'
    lines = [_text(x + width / 2, y + 22, f"{number}  {name}" if number else name, "code")]
    lines += [_text(x + width / 2, y + 42 + 17 * i, line, "words") for i, line in enumerate(words)]
    return "".join([box, *lines])


# ---------------------------------------------------------------- SVG


def _box(x: float, y: float, width: float, height: float, name: str, words: str) -> str:
    look = f'fill="{FILL}" stroke="{LINE}"'
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="7" {look}/>'
    centre = x + width / 2
    return box + _text(centre, y + 21, name, "name") + _text(centre, y + 38, words, "words")


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" class="{kind}">{escape(text)}</text>'


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"/>'


def _page(title: str, width: float, height: float, parts: list[str]) -> str:
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{tip}</defs>\n"
        f'<rect width="{width}" height="{height:.0f}" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


DRAWINGS = {"architecture.svg": packages, "message.svg": message}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
