"""Draws ``architecture.svg`` (rooms, and who imports whom) and ``message.svg`` (the way of a message).

    python docs/draw_architecture.py

The rooms, their rows and the arrows come from the imports in ``src/comingle``; only the order within a row and the few
words in a box stand here. A box is one row below the lowest room that imports it. An arrow that follows from others is
left out: where a imports b and b imports c, the arrow from a to c.
"""

from __future__ import annotations

import ast
import tomllib
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "comingle"

GROUPS = {
    "errors": ("errors", "records", "trees", "inputs", "locks", "plugins", "terminal"),
}
"""Single modules of one storey, drawn as one box."""

CONTRACT = "The core knows nothing of what stands on it"
"""Of import-linter, in ``pyproject.toml``: its source modules are the core."""

WORDS = {
    "papers": "tables, theory",
    "cli": "one file per verb",
    "serving": "models in use",
    "costing": "before a run",
    "federation": "users elsewhere",
    "audits": "attacks",
    "comparing": "side by side, advice",
    "joining": "later users",
    "processes": "torch.distributed",
    "store": "users on disk",
    "demo": "made-up users",
    "alone": "a recipe for one",
    "layers": "native layers",
    "gguf": "GGUF bases",
    "gpu": "Triton, graphs",
    "cpu": "attention, loss",
    "tracking": "W&B, MLflow",
    "masking": "keys, shares, masks",
    "export": "other formats",
    "runs": "prepare, build, execute",
    "progress": "lines and bars",
    "kinds": "a folder each",
    "recipes": "the YAML",
    "transports": "in process, Flower",
    "reports": "tables, pages",
    "engines": "two halves: client.py · server.py",
    "robust": "medians, Krum, bounds",
    "privacy": "clip, noise, account",
    "methods": "a page each",
    "models": "bases, nets",
    "protocol": "messages, wire",
    "evaluation": "scores",
    "adapters": "LoRA, experts",
    "data": "text, samples, seeds",
    "routers": "gates, mixtures",
    "tables": "of one run",
    "errors": "with records, trees, inputs, locks, plugins, terminal: under all",
}
"""In the order in which rooms of a row stand, from the left."""

HOUSE, WIDTH, ROW, HEIGHT, GUTTER, TOP = 760, 480, 78, 46, 34, 14
LINE, FILL, WIRE = "#6b7c8d", "#eef3f8", "#fff4dc"
INK, CORE = "#1b2733", "#dbe9f6"
"""Of the core's boxes, their frames and what is inside."""
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1b2733}"
    ".name{font-size:16px;font-weight:600}.words{font-size:12px}.small{font-size:11.5px;fill:#445565}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px;font-weight:600}"
)

Graph = dict[str, set[str]]


# ---------------------------------------------------------------- the code's own imports


def rooms() -> Graph:
    """Which room imports which, with :data:`GROUPS` as one; the ground floor is everybody's and has no arrows."""
    group = {name: head for head, names in GROUPS.items() for name in names}
    graph: Graph = {}
    for path in sorted(SOURCE.rglob("*.py")):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        room = group.get(own, own)
        wanted = {group.get(name, name) for name in imported(path)}
        graph.setdefault(room, set()).update(wanted - {room})
    return graph


def imported(path: Path) -> set[str]:
    """The rooms that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "comingle":
            names |= {f"comingle.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    parts = [name.split(".") for name in names if name.startswith("comingle.")]
    return {part[1] for part in parts if (SOURCE / part[1]).is_dir() or (SOURCE / f"{part[1]}.py").is_file()}


def core() -> set[str]:
    """The rooms that are the core, whole or in part, and their groups."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in project["tool"]["importlinter"]["contracts"] if one["name"] == CONTRACT)
    return {name.split(".")[1] for name in contract["source_modules"]}


def below(graph: Graph, room: str) -> set[str]:
    """Everything that a room imports, also through others."""
    return graph[room].union(*(below(graph, other) for other in graph[room]))


def arrows(graph: Graph) -> Graph:
    """Without what follows from others."""
    return {room: found - set().union(*(below(graph, other) for other in found)) for room, found in graph.items()}


def rows(graph: Graph) -> list[list[str]]:
    """From the top: each room one row below the lowest that imports it, the ground floor last."""
    depth = dict.fromkeys(graph, 0)
    for room in reversed(list(TopologicalSorter(graph).static_order())):
        for other in graph[room]:
            depth[other] = max(depth[other], depth[room] + 1)
    depth["errors"] = max(depth.values())
    order = {name: i for i, name in enumerate(WORDS)}
    return [
        sorted((room for room in graph if depth[room] == row), key=lambda room: order[room])
        for row in range(max(depth.values()) + 1)
    ]


# ---------------------------------------------------------------- the house


def house() -> str:
    """The rooms as boxes, their imports as arrows that point down."""
    graph = rooms()
    places: dict[str, tuple[float, float, float]] = {}
    stacked = rows(graph)
    for row, names in enumerate(stacked):
        room = HOUSE - 2 * GUTTER
        whole = names == ["errors"]
        width = room if whole else min((room - 18 * (len(names) - 1)) / len(names), 182 if len(names) > 1 else 230)
        step = room / len(names)
        for place, name in enumerate(names):
            places[name] = (GUTTER + step * (place + 0.5) - width / 2, TOP + row * ROW, width)
    parts = []
    for room, others in sorted(arrows(graph).items()):
        parts += [_import(places, room, other, stacked) for other in sorted(others - {"errors"})]
    inside = core()
    parts += [_box(*place, HEIGHT, name, WORDS[name], name in inside) for name, place in places.items()]
    title = "The rooms of comingle; an arrow means: imports"
    return _page(title, HOUSE, len(stacked) * ROW + TOP - (ROW - HEIGHT) + 6, parts)


def _import(places: dict[str, tuple[float, float, float]], room: str, other: str, stacked: list[list[str]]) -> str:
    """One arrow: straight to the next row, along the outer wall to rows further down."""
    (x, y, width), (to_x, to_y, to_width) = places[room], places[other]
    rank = next(names.index(other) for names in stacked if other in names)
    if to_y - y < 1.5 * ROW:
        start = min(max(to_x + to_width / 2, x + 14), x + width - 14)
        end = min(max(x + width / 2, to_x + 14), to_x + to_width - 14)
        return _line(f"M{start:.0f} {y + HEIGHT:.0f} L{end:.0f} {to_y - 2:.0f}")
    left = rank == 0 or to_x + to_width / 2 < HOUSE / 2
    wall = GUTTER / 2 if left else HOUSE - GUTTER / 2
    side, end = (x, to_x - 2) if left else (x + width, to_x + to_width + 2)
    return _line(f"M{side:.0f} {y + HEIGHT / 2:.0f} H{wall:.0f} V{to_y + HEIGHT / 2:.0f} H{end:.0f}")


# ---------------------------------------------------------------- the way of a message


def message() -> str:
    """One round: the server's half on the right, the users' on the left, the wire between them."""
    left, right, wide, middle = 10, 284, 186, WIDTH / 2
    parts = [
        f'<rect x="{middle - 36}" y="10" width="72" height="584" rx="8" fill="{WIRE}"/>',
        _text(middle, 28, "wire", "name"),
        _text(middle, 46, "wire.py", "small"),
        _text(middle, 308, "pack", "code"),
        _text(middle, 326, "unpack", "code"),
        _text(left + wide / 2, 24, "users", "name"),
        _text(left + wide / 2, 42, "engines/client.py", "small"),
        _text(right + wide / 2, 24, "server", "name"),
        _text(right + wide / 2, 42, "engines/server.py", "small"),
        _step(right, 66, wide, "1", "ServerHalf.download", "a model for each participant", "who is behind"),
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


def _box(x: float, y: float, width: float, height: float, name: str, words: str, dark: bool) -> str:
    look = f'fill="{CORE}" stroke="{INK}"' if dark else f'fill="{FILL}" stroke="{LINE}"'
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="7" {look}/>'
    centre = x + width / 2
    return box + _text(centre, y + 20, name, "name") + _text(centre, y + 37, words, "words")


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


DRAWINGS = {"architecture.svg": house, "message.svg": message}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
