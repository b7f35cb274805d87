"""The page as text: self-contained, escaped, small, and saying who was harmed."""

from __future__ import annotations

import base64
import html.parser
import json
import re
from typing import Any

import numpy as np
import pytest

from comingle.reports.page import render_page
from comingle.reports.runs import read_entries
from comingle.reports.tokens import Text, TokenView, pack_gates

NASTY = "</script><img src=x onerror=alert(1)> & \"'{{ 7*7 }} \u2028"
EXPERTS = {"ann": ["generalist", "specialist"], NASTY: ["generalist", "specialist"]}


def curve(ann: float, other: float) -> dict[int, dict[str, float]]:
    return {0: {"ann": 10.0, NASTY: 20.0}, 2: {"ann": ann, NASTY: other}}


@pytest.fixture(scope="module")
def entries(run_writer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    write_run = run_writer(tmp_path_factory.mktemp("page"))
    scores = {2: {user: [[0.3, 0.7], [0.4, 0.6]] for user in EXPERTS}}
    return read_entries(
        [
            *(write_run(f"l{s}", "local", curve(4, 8), seed=s) for s in (0, 1)),
            *(write_run(f"c{s}", "comigs", curve(3, 9), seed=s, scores=scores, experts=EXPERTS) for s in (0, 1)),
        ]
    )


def token_view(*, layers: int = 2, tokens: tuple[str, ...] = ("a", NASTY, "\n"), users: int = 2) -> TokenView:
    names = ("ann", NASTY, "cem", "dan")[:users]
    draw = np.random.default_rng(0).random((layers, len(tokens)))
    gates = np.stack([draw, 1 - draw], -1).astype(np.float16)
    return TokenView(
        label="comigs",
        users=names,
        experts=(("generalist", "specialist"),) * users,
        texts=tuple(Text(name=name, owner=name, tokens=tokens) for name in names),
        gates=tuple(tuple(gates for _ in names) for _ in names),
    )


@pytest.fixture(scope="module")
def page(entries: Any) -> str:
    """With a token view."""
    return render_page(entries, [token_view()])


class Seen(html.parser.HTMLParser):
    """Every tag, every attribute that could load something, and the text of the embedded data."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"] or ""] if "id" in found else []
        links = [found[name] or "" for name in ("src", "href", "xlink:href", "action", "srcset") if name in found]
        self.loads += [link for link in links if not link.startswith("#")]
        self._inside = found.get("id") == "token-data"

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def parse(page: str) -> Seen:
    seen = Seen()
    seen.feed(page)
    return seen


def test_nothing_is_loaded_and_nobody_can_put_a_tag_into_the_page(page: str) -> None:
    seen = parse(page)
    assert seen.loads == []
    assert "img" not in seen.tags
    assert seen.tags.count("script") == 2
    assert "{{ 7*7 }}" in page  # a name is no template
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(seen.ids) == len(set(seen.ids))
    (told,) = json.loads(seen.data)
    assert told["texts"][0]["tokens"] == ["a", NASTY, "\n"]
    assert [user["name"] for user in told["users"]] == ["ann", NASTY]


def test_who_gained_and_who_was_harmed_is_named(page: str) -> None:
    text = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", page))
    assert "comigs ann (-25.0%) nobody &lt;/script&gt;" in text
    assert "(+12.5%)" in text


def test_without_a_baseline_the_page_says_what_to_run(entries: Any) -> None:
    page = render_page(entries[1:])
    assert "Token view" not in page
    assert "private text" not in page
    assert "nobody can be" in page
    assert "--methods local,fedavg" in page


def test_the_best_of_each_column_is_marked(page: str) -> None:
    rows = re.findall(r"<tr>.*?</tr>", page.split("</tbody>")[0])
    assert [re.findall(r'class="best">([^<]*)', row) for row in rows[1:]] == [["8.00 (0.00)", "6.00 (0.00)"], ["3.00 (0.00)", "6.00 (0.00)"]]  # fmt: skip  # noqa: E501


def test_private_text_is_announced_and_given_text_is_not(entries: Any, page: str) -> None:
    assert "this page contains private text" in page
    one = token_view()
    given = tuple(Text(name=text.name, owner=None, tokens=text.tokens) for text in one.texts)
    other = render_page(entries[1:], [TokenView(**{**vars(one), "texts": given})])
    assert "private text" not in other
    assert "were given to" in other


def test_every_colour_of_a_figure_has_one_for_the_dark(page: str) -> None:
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    used = set(re.findall(r"var\((--c[0-9a-f]{6})\)", page))
    assert used
    for name in used:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark


def test_gates_are_packed_in_thousandths() -> None:
    gates = np.array([[[0.0, 1.0], [0.123, 0.877]]], dtype=np.float16)
    found = np.frombuffer(base64.b64decode(pack_gates(gates)), "<u2")
    assert found.tolist() == [0, 1000, 123, 877]


def test_four_users_with_four_texts_and_thirty_layers_stay_small(entries: Any) -> None:
    view = token_view(layers=30, tokens=tuple(f" word{i}" for i in range(120)), users=4)
    assert len(render_page(entries[1:], [view])) < 2_000_000
