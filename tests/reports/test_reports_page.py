"""The page as text: self-contained, escaped, small, and saying who was harmed."""

from __future__ import annotations

import base64
import csv
import html
import html.parser
import json
import re
from typing import Any

import numpy as np
import pytest

from comingle.reports.page import Text, TokenView, pack_gates, render_page
from comingle.reports.runs import read_entries
from comingle.reports.tables import upload_weight_tables, upload_weights
from comingle.utils.errors import RecipeError

NASTY = "</script><img src=x onerror=alert(1)> & \"'{{ 7*7 }} \u2028"
CSV = "data:text/csv;charset=utf-8;base64,"
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
    assert [link for link in seen.loads if not link.startswith((CSV, "data:image/png;base64,"))] == []
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
    assert "comigs ann -25.0% (-25.00 to -25.00) none &lt;/script&gt;" in text
    assert " +12.5% (" in text


@pytest.mark.slow
def test_without_a_baseline_the_page_says_what_to_run(entries: Any) -> None:
    page = render_page(entries[1:])
    assert "Token view" not in page
    assert "private text" not in page
    assert "--methods local,fedavg" in page


def test_methods_have_verdicts_in_place_of_bold_numbers(page: str) -> None:
    text = prose(page)
    assert 'class="best"' not in page
    assert "Better, level or worse Against local: geometric mean of test perplexity over 2 users and seeds 0, 1" in text
    assert re.search(r"verdict p over users ahead worst comigs -8\.1% -9\d\.\d to \+\d+\.\d level – \d of 4 \+", text)
    assert "Wilcoxon's test needs at least 6 users to reach p = 0.05; here are 2." in text.replace("&#39;", "'")


@pytest.mark.slow
def test_a_verdict_has_the_colour_of_a_gain_or_a_harm(write_run: Any) -> None:
    ends = {"local": 1.0, "good": 0.5, "bad": 2.0}
    paths = [
        write_run(f"{name}{seed}", name, {1: {"a": 8.0 * factor, "b": 4.0 * factor}}, seed=seed)
        for name, factor in ends.items()
        for seed in (0, 1)
    ]
    entries = read_entries(paths)
    page = render_page(entries)
    assert '<td class="gain">better</td>' in page
    assert '<td class="harm">worse</td>' in page
    assert "Against good: " in prose(render_page(entries, baseline="good"))
    with pytest.raises(RecipeError, match="--against 'goood': not among the methods"):
        render_page(entries, baseline="goood")


def prose(page: str) -> str:
    """What a reader reads, without the drawn figures, in one line."""
    body = re.sub(r"<svg.*?</svg>", " ", page[page.index("<body>") :], flags=re.DOTALL)
    body = re.sub(r"<script.*?</script>", " ", body, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", body))


# ---------------------------------------------------------------- nets and client-level mixtures


def net_entries(write_run: Any, measure: str, ends: dict[str, list[float]], **options: Any) -> Any:
    """One run of each method: a start where all are alike, and an end for each user."""
    start = 0.125 if measure == "accuracy" else 4.0
    recipe = {"data": {"task": {"name": "mnist", "shift": "labels"}}}
    names = [f"user-{number}" for number in range(len(next(iter(ends.values()))))]
    return read_entries(
        [
            write_run(method, method, {0: dict.fromkeys(names, start), 2: dict(zip(names, found, strict=True))},
                      measure=measure, recipe=recipe, base="net:mnist", **(options if method == "floral" else {}))
            for method, found in ends.items()
        ]
    )  # fmt: skip


MIXED = {
    "mixtures": {r: {"user-0": [1 - p, p], "user-1": [p, 1 - p]} for r, p in ((0, 0.5), (2, 0.875))},
    "clusters": {"user-0": 0, "user-1": 1},
}


@pytest.fixture(scope="module")
def accuracies(run_writer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two methods, one with mixtures and true clusters."""
    write_run = run_writer(tmp_path_factory.mktemp("accuracies"))
    ends = {"local": [0.75, 0.5], "floral": [0.8, 0.25]}
    return render_page(net_entries(write_run, "accuracy", ends, **MIXED))


@pytest.fixture(scope="module")
def losses(run_writer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two methods, one with mixtures, without true clusters."""
    write_run = run_writer(tmp_path_factory.mktemp("losses"))
    ends = {"fedavg": [2.0, 2.0], "floral": [0.002, 4.0]}
    return render_page(net_entries(write_run, "loss", ends, mixtures=MIXED["mixtures"]))


def test_curves_of_other_runs_cite_no_paper(write_run: Any) -> None:
    curve = {0: {"ada": 0.25}, 2: {"ada": 0.75}}
    options = {"measure": "accuracy", "recipe": {"data": {"kind": "samples"}}, "base": "net:cnn"}
    text = prose(render_page(read_entries([write_run("local", "local", curve, **options)])))
    assert "Test accuracy during training, against local iterations." in text
    assert "CoMiGS" not in text


@pytest.mark.slow
def test_a_page_of_accuracies_speaks_of_accuracies(accuracies: str) -> None:
    page, text = accuracies, prose(accuracies)
    assert "Task mnist (shift labels) · net mnist · 2 users" in text
    assert "Test accuracy at the last evaluation (per cent, higher is better)" in text
    assert "geometric" not in text
    assert "method higher (one seed) level lower (one seed)" in text
    assert "floral user-0 (+5.0\u00a0points) none user-1 (-25.0\u00a0points)".replace("\u00a0", " ") in text
    assert 'a change below 1 point is called "level"' in text
    assert "in percentage points: more is better" in text
    assert "samples/s" in text
    for word in ("perplexity", "tokens", "token", "Expert scores", "expert", "private"):
        assert word not in text, word
    assert "perplexity" not in page.partition("</style>")[2].partition("<footer>")[0]  # nor in a figure or its label


@pytest.mark.slow
def test_of_accuracies_the_losses_can_be_seen_too(accuracies: str) -> None:
    radios = re.findall(r'name="curves" value="(\d)"( checked)?> ([^<]*)</label>', accuracies)
    late = "without the start, so that late differences show"
    assert [(value, bool(on), label) for value, on, label in radios] == [
        ("0", True, "accuracy from the start"),
        ("1", False, f"accuracy {late}"),
        ("2", False, "loss from the start"),
        ("3", False, f"loss {late}"),
    ]
    drawings = re.findall(r'<div data-curves="(\d)"( hidden)?>(.*?)</figure>', accuracies, re.DOTALL)
    assert [(value, bool(hidden)) for value, hidden, _ in drawings] == [
        ("0", False), ("1", True), ("2", True), ("3", True)
    ]  # fmt: skip
    axes = [set(re.findall(r">(test (?:accuracy, %|loss))</text>", drawn)) for _, _, drawn in drawings]
    assert axes == [{"test accuracy, %"}] * 2 + [{"test loss"}] * 2


@pytest.mark.slow
def test_a_page_of_losses_says_multiples(losses: str) -> None:
    text = prose(losses)
    assert "Test loss at the last evaluation (lower is better)" in text
    assert "floral user-0 (×0.001) none user-1 (×2)" in text
    assert 'a change below a factor of 1.01 is called "level"' in text
    assert "×0.5 is half the loss." in text
    assert "geometric" not in text  # there is one seed


def test_mixtures_are_shown_with_the_index(accuracies: str) -> None:
    page, text = accuracies, prose(accuracies)
    assert "seed ARI at the end entropy, nats mismatch 0 1.00 0.50 to 0.50 0.25 to 0.25" in text
    assert "each user's mixture over the rounds (FLoRAL, section 3.2); solid is 1" in text
    assert "user true cluster adaptor set 1 adaptor set 0 user-0 0 0.88 0.12 user-1 1 0.12 0.88" in text
    (heat,) = re.findall(r'<svg role="img" aria-label="weight of each adaptor set.*?</svg>', page, re.DOTALL)
    assert all(f">{word}<" in heat for word in ("cluster 0", "cluster 1", "round 0", "round 2", "ARI 1.00"))
    loads = [link for link in parse(page).loads if not link.startswith(CSV)]
    assert len(loads) == 3  # two heat maps and the colours beside them
    assert all(link.startswith("data:image/png;base64,") for link in loads)


@pytest.mark.slow
def test_without_true_clusters_there_is_no_index(losses: str) -> None:
    text = prose(losses)
    assert "Mixtures of users" in text
    assert not [word for word in ("ARI", "true cluster", "mismatch", "diagonal") if word in text]
    assert "seed entropy, nats 0 0.50 to 0.50" in text


@pytest.mark.slow
def test_models_and_adaptor_sets_are_told_apart(write_run: Any) -> None:
    curve = {0: {"user-0": 4.0, "user-1": 4.0}, 2: {"user-0": 2.0, "user-1": 1.0}}
    mixed = {"floral": "adaptor set", "ensemble": "model"}
    runs = [write_run(name, name, curve, measure="loss", component=what, **MIXED) for name, what in mixed.items()]
    text = prose(render_page(read_entries(runs)))
    assert "The weight of each component in each user's mixture" in text
    assert "user true cluster adaptor set 1 adaptor set 0" in text
    assert "user true cluster model 1 model 0" in text
    assert "FLoRAL" not in text  # which did not think of all of them


@pytest.mark.slow
def test_mixtures_of_models_are_not_said_to_be_those_of_floral(write_run: Any) -> None:
    curve = {0: {"ann": 4.0, "bob": 4.0}, 2: {"ann": 2.0, "bob": 1.0}}
    mixtures = {2: {"ann": [0.75, 0.25], "bob": [0.5, 0.5]}}
    runs = [write_run("one", "stacking", curve, component="model", mixtures=mixtures)]
    text = prose(render_page(read_entries(runs)))
    assert "The weight of each model in each user's mixture over the rounds; solid is 1" in text
    assert "FLoRAL" not in text


@pytest.mark.slow
def test_given_mixtures_are_no_finding(write_run: Any) -> None:
    given = {r: {"user-0": [1, 0], "user-1": [0, 1]} for r in (0, 2)}
    page = render_page(net_entries(write_run, "loss", {"floral": [2.0, 1.0]}, mixtures=given))
    assert "Mixtures of users" not in page
    assert 'href="#mixtures"' not in page


@pytest.mark.slow
def test_of_many_users_the_worst_and_the_best_stand_in_the_table(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comingle.reports.figures.MAX_PANELS", 2)
    monkeypatch.setattr("comingle.reports.figures.MAX_PANELS", 2)
    monkeypatch.setattr("comingle.reports.page.MAX_PANELS", 2)
    monkeypatch.setattr("comingle.reports.figures.MAX_BARS", 3)
    ends = {"local": [0.5] * 16, "floral": [1.0, 0.5, *[0.25] * 13, 0.125]}
    page = render_page(net_entries(write_run, "loss", ends))
    text = prose(page)
    assert "method worst user best user mean local 0.5 · user-0 0.5 · user-0 0.5 floral" in text
    assert "floral 1 · user-0 0.125 · user-15 0.305" in text
    assert "All 16 users as a table user local floral user-0 0.5 1 user-1 0.5 0.5" in text
    assert "Of 16 users, the 1 best and the 1 worst are shown" in text
    assert "2 best and the 1 worst of 16 users" in text
    assert "All 16 users: the cumulative distribution of their changes" in text
    titles = re.findall(r">((?:best|worst) \d: user-\d+)</text>", page[: page.index('id="users"')])
    assert set(titles) == {"best 1: user-15", "worst 1: user-0"}
    named = ", ".join(f"user-{number} (×0.5)" for number in range(2, 13))
    # Those for whom nothing changes are told with a single seed too.
    assert f"floral 14 users: user-15 (×0.25), {named} and 2 more user-1 (×1) user-0 (×2)" in text


@pytest.mark.slow
def test_the_worst_accuracy_is_the_lowest(write_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comingle.reports.page.MAX_USER_COLUMNS", 1)
    page = render_page(net_entries(write_run, "accuracy", {"floral": [0.8, 0.25], "ensemble": [0.75, 0.5]}))
    assert "floral 25.0% · user-1 80.0% · user-0 52.5%" in prose(page)


def sheets(page: str) -> dict[str, list[list[str]]]:
    """The files behind the links of the page."""
    links = re.findall(rf'download="([^"]+)\.csv" href="{CSV}([^"]+)"', page)
    return {name: list(csv.reader(base64.b64decode(data).decode().splitlines())) for name, data in links}


def test_every_figure_has_its_numbers(page: str, accuracies: str) -> None:
    assert page.count("<figure>") == len(sheets(page)) == 5
    assert sheets(accuracies)["mixtures-floral"][1] == ["0", "0", "user-0", "0", "1", "0.5"]
    found = sheets(page)
    assert found["curves-perplexity"][-1][1:] == ["comigs", "20", "9.0", "0.0"]
    assert ["geometric mean over users", "comigs", "20"] in [row[:3] for row in found["curves-perplexity"]]
    assert "0" not in {row[2] for row in found["curves-perplexity-late"]}
    (ann, _) = found["users-against-local"][1:]
    assert (ann[:4], ann[-1]) == (["comigs", "local", "ann", "100"], "gained")
    assert [float(number) for number in ann[4:-1]] == pytest.approx([-25.0, 0.0, -25.0, -25.0])
    assert found["bytes"][0] == ["of", "method", "upload_bytes_in_total", "mean_over_seeds", "std_over_seeds"]
    assert found["scores-comigs"][1] == ["ann", "generalist", "0", "2", "0.3", "0.0"]


@pytest.mark.slow
def test_a_single_method_has_no_verdict(entries: Any) -> None:
    assert "Better, level or worse" not in render_page(entries[:1])


@pytest.mark.slow
def test_one_seed_is_neither_gain_nor_harm(write_run: Any) -> None:
    page = render_page(net_entries(write_run, "perplexity", {"local": [4.0, 8.0], "comigs": [4.004, 9.0]}))
    text = prose(page)
    assert "comigs none user-0 (+0.1%) user-1 (+12.5%)" in text
    assert "method lower (one seed) level higher (one seed)" in text
    assert 'a change below 1% is called "level"' in text
    assert 'class="harm"' not in page


@pytest.mark.slow
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


@pytest.mark.slow
def test_four_users_with_four_texts_and_thirty_layers_stay_small(entries: Any) -> None:
    view = token_view(layers=30, tokens=tuple(f" word{i}" for i in range(120)), users=4)
    assert len(render_page(entries[1:], [view])) < 2_000_000


@pytest.mark.slow
def test_the_page_says_whose_uploads_counted(run_writer: Any, tmp_path: Any, page: str) -> None:
    assert "Uploads that counted" not in page
    write_run, scores = run_writer(tmp_path), {number: {"ann": 3.0, NASTY: 4.0} for number in (0, 1, 2, 3)}
    judged = {1: {"ann": 1.0, NASTY: 0.0}, 2: {"ann": 0.5}, 3: {"ann": 0.0, NASTY: 0.0}}
    entries = read_entries([write_run("robust", "fedavg", scores, judged=judged)])
    assert [(one.user, one.uploads, one.left_out, one.mean) for one in upload_weights(entries[0])] == [
        (NASTY, 2, 2, 0.0),
        ("ann", 3, 1, 0.5),
    ]
    found = render_page(entries)
    section = found[found.index('<section id="judged">') :]
    assert "fedavg: krum" in section
    assert "<td>2 of 2</td><td>0.00</td>" in section
    assert "<td>1 of 3</td><td>0.50</td>" in section
    assert NASTY not in found
    crowd = {f"user{number:02}": float(number) for number in range(20)}
    many = {1: {name: number / 20 for number, name in enumerate(crowd)}}
    of_many = upload_weight_tables(read_entries([write_run("many", "fedavg", {0: crowd, 1: crowd}, judged=many)]))[0]
    assert ([row[0] for row in of_many["rows"]], of_many["more"]) == ([f"user{number:02}" for number in range(12)], 8)


# -------------------------------------------------------------------- heading


def heading_of(page: str) -> str:
    """Return the text of the only first-level heading."""
    (found,) = re.findall(r"<h1>(.*?)</h1>", page, re.DOTALL)
    return html.unescape(found)


LANGUAGES = {"name": "xnli", "path": "/data/xnli"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"kind": "text", "dataset": None}, "text"),
        (
            {"kind": "conversations", "dataset": {"path": "/srv/long/way/chats.jsonl"}},
            "conversations (chats.jsonl)",
        ),
        ({"kind": "text", "dataset": {"path": ["C:\\data\\a.csv", "owner/books/"]}}, "text (a.csv, books)"),
        (
            {"kind": "text", "dataset": {"path": [f"{i}.txt" for i in range(40)]}},
            "text (0.txt, 1.txt, 2.txt and 37 more)",
        ),
        ({"kind": "questions", "questions": LANGUAGES}, "questions (xnli)"),
        ({"kind": "task", "task": {"name": "mnist", "shift": "labels"}}, "mnist (shift labels)"),
        ({}, "text"),
    ],
    ids=["text", "file", "files", "many", "questions", "task", "unknown"],
)
@pytest.mark.sampled(1)
def test_the_heading_names_methods_data_and_seeds(write_run: Any, data: Any, told: str) -> None:
    runs = [
        write_run(f"{method}{seed}", method, curve(4, 8), seed=seed, recipe={"data": data})
        for method in ("local", "comigs", "fedavg")
        for seed in (0, 3)
    ]
    page = render_page(read_entries(runs))
    assert heading_of(page) == f"local, comigs and fedavg on {told}, seeds 0, 3"
    (title,) = re.findall(r"<title>(.*?)</title>", page)
    assert html.unescape(title) == f"local, comigs and fedavg on {told}, seeds 0, 3 · comingle report"


@pytest.mark.slow
def test_the_heading_of_samples_without_a_kind_and_of_one_run(write_run: Any) -> None:
    page = render_page(read_entries([write_run("f", "fedavg", {0: {"ann": 0.5}}, measure="accuracy", seed=7)]))
    assert heading_of(page) == "fedavg on samples, seed 7"


@pytest.mark.slow
def test_the_heading_counts_what_is_too_much_for_it(write_run: Any) -> None:
    runs = [write_run(f"m{i}", f"method-{i}", curve(4, 8)) for i in range(9)]
    runs += [write_run(f"s{i}", "method-0", curve(4, 8), seed=i) for i in range(1, 30)]
    assert heading_of(render_page(read_entries(runs))) == ("method-0, method-1, method-2 and 6 more on text, 30 seeds")


@pytest.mark.slow
def test_data_that_differs_is_not_named_by_the_first_runs(write_run: Any) -> None:
    runs = [
        write_run(name, name, curve(4, 8), recipe={"data": {"kind": "text", "dataset": {"path": f"{name}.txt"}}})
        for name in ("local", "fedavg")
    ]
    assert (
        heading_of(render_page(read_entries(runs)))
        == "local and fedavg on text (local.txt) and text (fedavg.txt), seed 0"
    )
