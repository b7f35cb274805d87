"""What the figures show: lines, bars and colours are those of the numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Patch

from comingle.reports import figures
from comingle.reports.canvas import (
    MIN_FONT_PIXELS,
    draw,
    expert_class,
    expert_colour,
    expert_css,
    legend_above,
    rgb,
    short,
    styles,
    svg,
)
from comingle.reports.figures import DEVIATION, INTERVALS, choose_users
from comingle.reports.page import Text, TokenView, tokens_figure, visible
from comingle.reports.runs import read_entries

EXPERTS = {"ann": ["generalist", "specialist"], "b$b <&": ["generalist"]}
SCORES = {2: {"ann": [[0.3, 0.7], [0.4, 0.6]], "b$b <&": [[1.0], [1.0]]}}


def curve(ann: float, bob: float) -> dict[int, dict[str, float]]:
    return {0: {"ann": 10.0, "b$b <&": 20.0}, 2: {"ann": ann, "b$b <&": bob}}


@pytest.fixture
def entries(write_run: Any) -> Any:
    return read_entries(
        [
            write_run("p", "pretrained", {0: curve(1, 1)[0]}),
            *(write_run(f"l{s}", "local", curve(4 + s, 8), seed=s) for s in (0, 1)),
            write_run("f", "fedavg", curve(5, 6), upload_bytes=10),
            write_run("c", "comigs-1g1s", curve(3, 7), scores=SCORES, experts=EXPERTS, upload_bytes=5),
        ]
    )


@pytest.mark.parametrize("width", [2.9, 5.8, 11.6])
def test_a_legend_is_no_wider_than_its_figure(width: float) -> None:
    names = [f"{kind} expert, layer {number}" for kind in ("generalist", "specialist") for number in range(4)]

    def paint(figure: Any, axes: list[Any]) -> None:
        legend_above(figure, [Patch() for _ in names], names)

    figure = draw(1, 1, (width, 4.0), paint)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_curves_have_a_panel_for_the_mean_and_for_each_user(entries: Any) -> None:
    figure = figures.curves_figure(entries)
    titles = ["mean over users", "geometric mean over users", "ann", "b$b <&"]
    assert [axis.get_title("left") for axis in figure.axes] == titles
    assert list(figure.axes[0].lines[1].get_ydata()) == [15, 6.25]
    assert list(figure.axes[1].lines[1].get_ydata()) == pytest.approx([200**0.5, (32**0.5 + 40**0.5) / 2])
    level, local, fedavg, comigs = figure.axes[2].lines
    assert list(level.get_ydata()) == [10, 10]
    assert [list(line.get_ydata()) for line in (local, fedavg, comigs)] == [[10, 4.5], [10, 5], [10, 3]]
    assert list(local.get_xdata()) == [0, 20]
    assert len(figure.axes[2].collections) == 1  # a band where there are two seeds, and only there
    late = figures.curves_figure(entries, start=False)
    assert [list(line.get_xdata()) for line in late.axes[2].lines] == [[20]] * 3


def test_bands_and_whiskers_are_explained_where_there_are_any(write_run: Any) -> None:
    def runs(seeds: int) -> Any:
        ends = {"local": 8, "fedavg": 6}
        return read_entries(
            [
                write_run(f"{name}-{s}-of-{seeds}", name, curve(4 + s, end + 2 * s), seed=s, upload_bytes=end - 6)
                for name, end in ends.items()
                for s in range(seeds)
            ]
        )

    for number, word, of_users in ((1, "", ""), (2, DEVIATION, INTERVALS)):
        local, fedavg = runs(number)
        for figure, kind, explained in (
            (figures.curves_figure([local, fedavg]), "bands: ", word),
            (figures.bytes_figure([local, fedavg]), "whiskers: ", word),
            (figures.users_figure([local, fedavg], local), "whiskers: ", of_users),
        ):
            assert figure is not None
            assert figure.get_supxlabel() == (kind + explained if explained else "")


def population(write_run: Any, *methods: str) -> Any:
    """30 users: local's results are 10, another method's are better for low numbers and worse for high ones."""
    crowd = {f"user{i}": 10.0 for i in range(30)}
    ends = {name: 10.0 if m == "local" else 10.0 + (i - 14.5) / 2 for m in methods for i, name in enumerate(crowd)}
    return read_entries(
        [write_run(m, m, {0: crowd, 2: crowd if m == "local" else ends}, measure="perplexity") for m in methods]
    )


def test_of_a_population_the_best_and_the_worst_have_curves(write_run: Any) -> None:
    figure = figures.curves_figure(population(write_run, "local", "comigs"))
    titles = [axis.get_title("left") for axis in figure.axes if axis.axison]
    best = [f"best {i + 1}: user{i}" for i in range(12)]
    worst = [f"worst {12 - i}: user{18 + i}" for i in range(12)]
    assert titles == ["mean over 30 users", "geometric mean over 30 users", *best, *worst]


def test_the_best_of_a_population_are_known_without_a_baseline(write_run: Any) -> None:
    (entry,) = population(write_run, "comigs")
    assert choose_users([entry], 3) == {"user0": "best 1: user0", "user1": "best 2: user1", "user29": "worst 1: user29"}
    assert choose_users([entry], 30) == {user: user for user in entry.first.users}
    crowd = {"ann": 0.9, "bob": None, "cem": 0.5}
    accuracies = read_entries([write_run("a", "floral", {2: crowd}, measure="accuracy")])
    assert list(choose_users(accuracies, 2)) == ["ann", "bob"]  # whose accuracy is no number is not the best


def test_a_population_has_its_distribution_and_its_gains_against_data(write_run: Any) -> None:
    local, comigs = population(write_run, "local", "comigs")
    panels = figures.population_panels([local, comigs], local)
    assert panels is not None
    distribution, against = panels.figure().axes
    ends = sorted(5 * (i - 14.5) for i in range(30))
    assert list(distribution.lines[0].get_xdata())[1:] == pytest.approx(ends)
    assert list(distribution.lines[0].get_ydata())[-1] == pytest.approx(1)
    assert list(against.lines[0].get_ydata()) == pytest.approx(ends)
    assert set(against.lines[0].get_xdata()) == {100}
    assert against.get_xlabel() == "training tokens of the user"
    assert panels.sheet[0][2:5] == ["user", "train_tokens", "change"]
    assert panels.sheet[1][2:5] == ["user0", 100, pytest.approx(-72.5)]
    assert len(panels.sheet) == 31
    bars = figures.users_panels([local, comigs], local)
    assert bars is not None
    assert len(bars.sheet) == 31  # with all of them too, whoever has a bar


def test_the_legend_explains_pale_and_hatched_bars(write_run: Any) -> None:
    results = {"local": {"ann": 10.0, "bob": 10.0}, "fedavg": {"ann": 12.0, "bob": 10.001}}
    entries = read_entries([write_run(method, method, {2: users}) for method, users in results.items()])
    panels = figures.users_panels(entries, entries[0])
    assert panels is not None
    (legend,) = panels.figure().legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "pale: level", "hatched: worse"]
    better = {"local": {"ann": 10.0}, "fedavg": {"ann": 8.0}}
    entries = read_entries([write_run(f"b-{method}", method, {2: users}) for method, users in better.items()])
    panels = figures.users_panels(entries, entries[0])
    assert panels is not None
    assert [label for _, label in panels.legend] == ["fedavg"]


def test_scores_are_heat_maps_of_layers_and_rounds_for_each_user_and_expert(entries: Any) -> None:
    """No lines on top of each other: every score has a place of its own, whatever the number of layers."""
    axes = figures.scores_figure(entries[-1]).axes
    shown = [axis for axis in axes if axis.axison]
    assert [axis.get_title("left") for axis in shown] == ["ann: generalist", "ann: specialist", "b$b <&: generalist"]
    assert not any(axis.lines for axis in shown)
    assert [axis.images[0].get_array().tolist() for axis in shown] == [[[0.3], [0.4]], [[0.7], [0.6]], [[1.0], [1.0]]]
    for axis, name in zip(shown, ("generalist", "specialist"), strict=False):
        blank, solid = axis.images[0].cmap([0.0, 1.0])
        assert to_hex(solid, keep_alpha=True) == expert_colour(name).light + "ff"
        assert blank[3] == 0
    assert [label.get_text() for label in shown[-1].get_xticklabels() if label.get_text()] == ["2"]


def luminance(colour: str) -> float:
    channels = [c / 255 for c in rgb(colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_on_both_backgrounds() -> None:
    """WCAG: 3 for lines against the page, 4.5 for the letters of a token on its expert's colour at its strongest."""
    for style in styles([f"m{i}" for i in range(7)] + ["pretrained", "local", "fedavg"]):
        assert contrast(style.colour.light, "#ffffff") > 2.9, style
        assert contrast(style.colour.dark, "#15191e") > 4.5, style
    for name, colour in expert_css():
        assert contrast(colour.light, "#1c2128") > 4.5, name
        assert contrast(colour.dark, "#e4e8ec") > 4.5, name


def test_methods_have_styles_of_their_own() -> None:
    found = styles(["pretrained", "local", "fedavg", *(f"m{i}" for i in range(6))])
    assert len({style.colour for style in found}) == 9
    assert styles(["fedavg"])[0].colour == found[2].colour
    assert len({(s.colour, s.line) for s in styles([f"m{i}" for i in range(14)])}) == 14
    assert [expert_class(name) for name in ("generalist", "specialist 2", "specialist 6")] == ["g1", "s2", "s1"]


def test_bars_are_gains_and_harm_is_hatched(entries: Any) -> None:
    figure = figures.users_figure(entries, entries[1])
    assert figure is not None
    bars = {(round(bar.get_width(), 6), bool(bar.get_hatch())) for bar in figure.axes[0].patches}
    assert {bar.get_alpha() for bar in figure.axes[0].patches} == {1.0}
    # Against local's 4 and 8 at the seed that they share
    assert bars == {(25.0, True), (-25.0, False), (-25.0, False), (-12.5, False)}
    assert figures.users_figure(entries[:2], entries[1]) is None


def test_a_level_result_is_pale_and_never_hatched(write_run: Any) -> None:
    runs = [write_run("l", "local", curve(10, 10)), write_run("c", "comigs", curve(10.01, 9.99))]
    entries = read_entries(runs)
    figure = figures.users_figure(entries, entries[0])
    assert figure is not None
    assert [(bar.get_alpha(), bar.get_hatch()) for bar in figure.axes[0].patches] == [(figures.LEVEL_OPACITY, "")] * 2


def test_bytes_are_held_against_both_means_of_perplexities(entries: Any) -> None:
    mean, geometric = figures.bytes_figure(entries).axes
    assert [axis.get_title("left") for axis in (mean, geometric)] == ["mean over users", "geometric mean over users"]
    ends = {text.get_text(): text.xy[1] for text in geometric.texts}
    assert ends["comigs-1g1s"] == pytest.approx(21**0.5)
    assert {text.get_text(): text.xy[1] for text in mean.texts}["comigs-1g1s"] == 5


def test_bytes_are_those_of_all_rounds(entries: Any) -> None:
    axis = figures.bytes_figure(entries).axes[0]
    assert sorted(text.get_text() for text in axis.texts) == ["comigs-1g1s", "fedavg", "local"]
    assert {text.xy[0] for text in axis.texts} == {0.0, 10.0, 5.0}
    assert axis.get_xlabel() == "uploaded by all users over the run, B"


def test_many_bytes_are_megabytes(write_run: Any) -> None:
    entries = read_entries([write_run("f", "fedavg", curve(5, 6), upload_bytes=2_000_000)])
    axis = figures.bytes_figure(entries).axes[0]
    assert [text.xy[0] for text in axis.texts] == [2.0]
    assert axis.get_xlabel().endswith("MB")


def test_labels_of_close_points_do_not_cover_each_other(write_run: Any) -> None:
    methods = ("fedavg", "floral", "comigs")
    paths = [write_run(m, m, curve(5 + i / 1000, 6), upload_bytes=9000 + 3 * i) for i, m in enumerate(methods)]
    paths.append(write_run("local", "local", curve(9, 9)))
    figure = figures.bytes_figure(read_entries(paths))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


# ---------------------------------------------------------------- accuracy and loss


def measured_entries(write_run: Any, measure: str, **ends: list[tuple[float, float]]) -> Any:
    """Entries of methods with an end for each seed; all start at 0.1 and 0.2, or 4 and 8."""
    start = (0.1, 0.2) if measure == "accuracy" else (4.0, 8.0)
    return read_entries(
        [
            write_run(f"{m}{s}", m, {r: dict(zip(("ann", "bob"), v, strict=True)) for r, v in ((0, start), (2, end))},
                      seed=s, measure=measure)
            for m, seeds in ends.items()
            for s, end in enumerate(seeds)
        ]
    )  # fmt: skip


def test_accuracies_are_drawn_in_per_cent_and_never_logarithmic(write_run: Any) -> None:
    entries = measured_entries(write_run, "accuracy", local=[(0.9, 0.8)], floral=[(0.95, 0.7)])
    axis = figures.curves_figure(entries).axes[0]
    assert (axis.get_yscale(), axis.get_ylabel()) == ("linear", "test accuracy, %")
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"{100 * y:g}" for y in axis.get_yticks()]
    losses = figures.curves_figure(entries, measure="loss").axes[0]
    assert losses.get_ylabel() == "test loss"
    assert list(losses.lines[0].get_ydata()) == pytest.approx([1.7, 0.3])
    (axis,) = figures.bytes_figure(entries).axes
    assert (axis.get_title("left"), axis.get_ylabel()) == ("mean over users", "test accuracy, %")


def test_accuracy_bars_to_the_right_are_gains(write_run: Any) -> None:
    entries = measured_entries(write_run, "accuracy", local=[(0.9, 0.8)], floral=[(0.95, 0.7)])
    figure = figures.users_figure(entries, entries[0])
    assert figure is not None
    axis = figure.axes[0]
    assert [(round(bar.get_width(), 6), bool(bar.get_hatch())) for bar in axis.patches] == [(5, False), (-10, True)]
    assert axis.get_xlabel() == (
        "change of test accuracy against local, percentage points (left: worse, right: better)"
    )


def test_loss_bars_are_multiples_on_a_logarithmic_axis(write_run: Any) -> None:
    entries = measured_entries(write_run, "loss", local=[(1.0, 2.0)] * 2, floral=[(1e-3, 4.0), (1e-5, 16.0)])
    figure = figures.users_figure(entries, entries[0])
    assert figure is not None
    axis = figure.axes[0]
    assert axis.get_xscale() == "log"
    ends = [(bar.get_x() + bar.get_width(), bool(bar.get_hatch())) for bar in axis.patches]
    assert [end for end, _ in ends] == pytest.approx([1e-4, 4.0])
    assert [hatched for _, hatched in ends] == [False, False]  # two seeds that differ so much tell neither
    ((low, _), (high, _)) = axis.collections[0].get_segments()[0]
    # Student's t with one degree of freedom, 12.7062; the mean of log10 is -4 with a standard error of 1.
    assert (low, high) == pytest.approx((10**-16.7062, 10**8.7062), rel=1e-3)
    # The axis ends one range of the bars, -4 to log10 of 4, beyond them.
    width = 4 + 0.60206
    assert axis.get_xlim() == pytest.approx((10 ** (-4 - 1.05 * width), 10 ** (0.60206 + 1.05 * width)), rel=1e-3)
    assert axis.get_xlabel() == "test loss as a multiple of that of local (left: better, right: worse)"


def test_losses_over_powers_of_ten_keep_their_lines_in_sight(write_run: Any) -> None:
    entries = measured_entries(write_run, "loss", local=[(1.0, 2.0)], floral=[(0.0002, 4.0), (0.0018, 4.0)])
    for start in (True, False):
        axis = figures.curves_figure(entries, start=start).axes[1]
        assert axis.get_yscale() == "log"
        assert axis.get_ylim() == pytest.approx((0.001 / 1.6, (4.0 if start else 1.0) * 1.6))
        # The mean is 0.001 and one deviation 0.00113: below zero there is no place on the axis.
        (band,) = axis.collections
        above = 0.001 + 0.0008 * 2**0.5
        ends = band.get_paths()[0].vertices[:, 1]
        assert [min(ends), max(e for e in ends if e < 0.1)] == pytest.approx([0.001**2 / above, above])


def test_a_band_on_a_plain_axis_is_one_deviation(write_run: Any) -> None:
    entries = measured_entries(write_run, "accuracy", floral=[(0.8, 0.5), (0.9, 0.5)])
    (band,) = figures.curves_figure(entries, start=False).axes[1].collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert [min(ends), max(ends)] == pytest.approx([0.85 - 0.05 * 2**0.5, 0.85 + 0.05 * 2**0.5])


@pytest.mark.slow
def test_files_are_png_and_svg_and_the_same_again(entries: Any, tmp_path: Path) -> None:
    paths = figures.save(figures.curves_figure(entries), tmp_path, "curves")
    assert paths[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = "".join(ET.parse(paths[1]).getroot().itertext())
    assert "b$b <&" in text
    before = paths[1].read_bytes()
    figures.save(figures.curves_figure(entries), tmp_path, "curves")
    assert paths[1].read_bytes() == before


@pytest.mark.slow
def test_a_picture_is_never_so_narrow_that_its_letters_are_small(entries: Any) -> None:
    for figure in (figures.curves_figure(entries), *figures.curves_panels(entries).parts()):
        root = ET.fromstring(svg(figure, "f", "l", {}))
        width = float(str(root.get("viewBox")).split()[2])
        least = float(str(root.get("style")).partition("min-width:")[2].partition("px")[0])
        assert least * 9 / width >= MIN_FONT_PIXELS
    assert least < 350  # a panel has room on a phone


def test_long_names_lose_their_middle() -> None:
    assert short("abc") == "abc"
    assert short("a" * 30 + "b" * 30, 11) == "aaaaa…bbbbb"


def test_panels_are_the_same_in_one_picture_and_apart(entries: Any) -> None:
    panels = figures.curves_panels(entries)
    together, apart = panels.figure().axes, [figure.axes[0] for figure in panels.parts()]
    for one, other in zip(together, apart, strict=True):
        assert one.get_title("left") == other.get_title("left")
        assert [list(a.get_ydata()) for a in one.lines] == [list(a.get_ydata()) for a in other.lines]
        assert (other.get_xlabel(), other.get_ylabel()) == ("local iterations", "test perplexity")


def test_inline_svg_follows_the_theme_and_has_ids_of_its_own(entries: Any) -> None:
    text = svg(figures.curves_figure(entries), "f7", "a label", {"#59636e": "var(--muted)"})
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "a label"
    assert "#59636e" not in text
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert ids
    assert all(one.startswith("f7-") for one in ids)


# ---------------------------------------------------------------- tokens


def view(tokens: tuple[str, ...] = ("a", " b", "\n", "$x$")) -> TokenView:
    gates = np.linspace(0, 1, 2 * len(tokens)).reshape(2, len(tokens))
    stacked = np.stack([gates, 1 - gates], -1).astype(np.float16)
    experts = ("generalist", "specialist")
    text = Text(name="t", owner="ann", tokens=tokens)
    return TokenView(label="c", users=("ann",), experts=(experts,), texts=(text,), gates=((stacked,),))


def test_drawn_tokens_have_the_colour_of_their_top_expert() -> None:
    figure = tokens_figure(view(), 0)
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.texts] == ["a", " b", "⏎", "$x$"]
    assert {to_hex(bar.get_facecolor()) for bar in axis.patches} == {"#4a94d8"}  # layer 0: all under one half
    assert {to_hex(bar.get_facecolor()) for bar in tokens_figure(view(), 1).axes[0].patches} == {"#f0892b"}
    assert "in distribution" in axis.get_title("left")


def test_long_texts_are_wrapped_and_odd_characters_are_signs() -> None:
    axis = tokens_figure(view(tuple(f" word{i}" for i in range(40))), 0).axes[0]
    assert max(bar.get_x() + bar.get_width() for bar in axis.patches) <= 56
    assert len({bar.get_y() for bar in axis.patches}) > 3
    assert visible("a\n\t\x00é") == "a⏎··é"
