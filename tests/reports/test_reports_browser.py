"""The page in headless Chromium, from disk: with mouse and keyboard, light and dark, on a phone, without an error.

Needs Debian's packages chromium and chromium-driver, and selenium (extra ``dev``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from browsers import chromium
from comingle.reports.page import Text, TokenView, render_page
from comingle.reports.runs import read_entries

pytestmark = pytest.mark.slow

USERS = ("ann", "b<b>ob")
TOKENS = ("Once", " upon", "\n", "", "é<i>", " time")
RGB = {"generalist": {"light": "240, 137, 43", "dark": "154, 73, 4"}}


def gates(seed: int) -> np.ndarray:
    """Layer 0 says 0.9 to the generalist everywhere, layer 1 says 0.2, but for what the seed moves."""
    found = np.empty((3, len(TOKENS), 2))
    found[0, :, 0], found[1, :, 0] = 0.9, 0.2
    found[2, :, 0] = np.random.default_rng(seed).random(len(TOKENS))
    found[..., 1] = 1 - found[..., 0]
    return found.astype(np.float16)


@pytest.fixture(scope="module")
def page(run_writer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_run = run_writer(folder)
    curve = {0: dict.fromkeys(USERS, 9.0), 2: dict.fromkeys(USERS, 5.0)}
    experts = {key: ["generalist", "specialist"] for key in USERS}
    scores = {2: {key: [[0.3, 0.7], [0.4, 0.6]] for key in USERS}}
    mixtures = {2: {USERS[0]: [1.0, 0.0], USERS[1]: [0.25, 0.75]}}
    entries = read_entries(
        [
            *(write_run(f"l{s}", "local", curve, seed=s) for s in (0, 1)),
            *(write_run(f"c{s}", "comigs", curve, seed=s, scores=scores, experts=experts) for s in (0, 1)),
            write_run("f", "floral", curve, mixtures=mixtures),
        ]
    )
    texts = tuple(Text(name=name, owner=name, tokens=TOKENS) for name in USERS)
    names = (("generalist", "specialist"),) * 2
    views = [
        TokenView(
            label=label,
            users=USERS,
            experts=names,
            texts=texts,
            gates=tuple(tuple(gates(10 * i + j) for j in range(2)) for i in range(2)),
        )
        for label in ("comigs", "pfedmoe")
    ]
    path = folder / "a page.html"
    path.write_text(render_page(entries, views), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(params=["light", "dark"])
def opened(browser: Any, page: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """The page in a colour scheme; whatever was done with it, the console must have stayed empty."""
    features = [{"name": "prefers-color-scheme", "value": request.param}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    yield browser, request.param
    assert browser.get_log("browser") == []


def backgrounds(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('.text span')].map((one) => getComputedStyle(one).backgroundColor)"
    return browser.execute_script(script)


def slide(browser: Any, layer: int) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = browser.find_element("id", "layer")
    slider.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * layer)


def test_the_slider_changes_the_colours(opened: Any) -> None:
    browser, theme = opened
    first = backgrounds(browser)
    assert len(first) == 4 * len(TOKENS)
    assert all(RGB["generalist"][theme] in colour for colour in first)
    slide(browser, 1)
    second = backgrounds(browser)
    assert not any(RGB["generalist"][theme] in colour for colour in second)
    assert browser.find_element("id", "layer-now").text == "1 of 2"
    slide(browser, 2)
    expected = [gate[0] > gate[1] for i in range(2) for j in range(2) for gate in gates(10 * i + j)[2]]
    assert [RGB["generalist"][theme] in colour for colour in backgrounds(browser)] == expected


def test_pointing_at_a_token_shows_its_probabilities(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    browser, _ = opened
    tip = browser.find_element("id", "tip")
    assert not tip.is_displayed()
    tokens = browser.find_elements("css selector", ".text span")
    ActionChains(browser).scroll_to_element(tokens[1]).move_to_element(tokens[1]).perform()
    assert tip.is_displayed()
    assert tip.text.replace("\n", " ") == '" upon" token 1, layer 0 generalist 90.0% specialist 10.0%'
    ActionChains(browser).move_to_element(browser.find_element("css selector", "#tokens h2")).perform()
    assert not tip.is_displayed()


def test_the_keyboard_reaches_every_token(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser, _ = opened
    slide(browser, 1)
    browser.find_element("id", "layer").send_keys(Keys.TAB)
    tip = browser.find_element("id", "tip")
    for number, said in enumerate(['"Once"', '" upon"', r'"\n"', "part of a character", '"é<i>"', '" time"']):
        focused = browser.switch_to.active_element
        assert focused.get_attribute("aria-describedby") == "tip"
        assert tip.text.startswith(f"{said} token {number}, layer 1")
        assert "generalist\n20.0%\nspecialist\n80.0%" in tip.text
        focused.send_keys(Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    browser.switch_to.active_element.send_keys(Keys.TAB)  # one stop for each cell
    assert browser.switch_to.active_element.text == "Once"


def test_the_probabilities_stay_with_their_token_when_the_page_scrolls(opened: Any) -> None:
    browser, _ = opened
    browser.execute_script("document.querySelector('.text span').focus()")
    tip, token = browser.find_element("id", "tip"), browser.find_element("css selector", ".text span")
    before = tip.rect["y"] - token.rect["y"]
    browser.execute_async_script("scrollBy(0, -40); requestAnimationFrame(() => setTimeout(arguments[0], 100))")
    assert tip.is_displayed()
    assert abs(tip.rect["y"] - token.rect["y"] - before) < 1


def test_the_probabilities_are_never_cut_off(opened: Any) -> None:
    browser, _ = opened
    tip = browser.find_element("id", "tip")
    for number in range(len(TOKENS)):
        script = "document.querySelectorAll('.cell')[1].querySelectorAll('.text span')[arguments[0]].focus()"
        browser.execute_script(script, number)
        room = browser.execute_script("return document.documentElement.clientWidth")
        assert tip.rect["x"] >= 0
        assert tip.rect["x"] + tip.rect["width"] <= room


def test_the_diagonal_is_marked_and_names_are_only_text(opened: Any) -> None:
    browser, _ = opened
    cells = browser.find_elements("css selector", ".cell")
    assert [("own" in cell.get_attribute("class")) for cell in cells] == [True, False, False, True]
    assert "in distribution" in cells[3].text
    assert "model: b<b>ob" in cells[1].text
    assert browser.find_elements("css selector", "b, .text i") == browser.find_elements("css selector", "#tip b")


def test_another_run_can_be_chosen_and_curves_switched(opened: Any) -> None:
    browser, _ = opened
    browser.find_element("css selector", "#view option:nth-child(2)").click()
    assert len(backgrounds(browser)) == 4 * len(TOKENS)
    whole, late = browser.find_elements("css selector", "[data-curves]")
    assert (whole.is_displayed(), late.is_displayed()) == (True, False)
    browser.find_elements("css selector", "input[name=curves]")[1].click()
    assert (whole.is_displayed(), late.is_displayed()) == (False, True)


def test_weights_are_painted_over_the_page(opened: Any, tmp_path: Path) -> None:
    """The heat map is an image inside the page: solid where a weight is 1, the page's own colour where it is 0."""
    browser, theme = opened
    drawing = browser.find_element("css selector", "#mixtures figure .frame svg")
    browser.execute_script("arguments[0].scrollIntoView()", drawing)
    (tmp_path / "heat.png").write_bytes(drawing.screenshot_as_png)
    pixels = (255 * imread(tmp_path / "heat.png")[..., :3]).round().astype(int)
    solid, paper = np.array([43, 123, 196]), np.array([255, 255, 255] if theme == "light" else [21, 25, 30])
    three_quarters = paper + 0.75 * (solid - paper)
    shares = [(np.abs(pixels - colour).max(-1) <= 4).mean() for colour in (solid, three_quarters, paper)]
    assert all(share > 0.02 for share in shares), shares


def luminance(colour: str) -> float:
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ink_and_figures_follow_the_colour_scheme(opened: Any) -> None:
    browser, theme = opened
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    paper, ink = (luminance(browser.execute_script(script, "body", p)) for p in ("backgroundColor", "color"))
    title = luminance(browser.execute_script(script, "figure svg text", "fill"))
    assert (paper < 0.05) == (theme == "dark")
    for colour in (ink, title):
        assert (max(colour, paper) + 0.05) / (min(colour, paper) + 0.05) > 5


def test_the_page_itself_never_scrolls_sideways(opened: Any) -> None:
    browser, _ = opened
    script = "return [document.documentElement.scrollWidth, innerWidth]"
    width, window = browser.execute_script(script)
    assert width <= window


# ---------------------------------------------------------------- on a phone

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}

LETTERS = """
const seen = [...document.querySelectorAll("figure svg text")].filter((one) => one.getClientRects().length);
return seen.map((one) => {
  const drawing = one.ownerSVGElement;
  const scale = drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(one).fontSize) * scale;
});
"""
FRAMES = """
return [...document.querySelectorAll(arguments[0])].filter((one) => one.getClientRects().length).map((one) => {
  one.scrollLeft = 1e6;
  const inner = one.firstElementChild.getBoundingClientRect();
  return [one.scrollWidth, one.clientWidth, one.scrollLeft, inner.right, one.getBoundingClientRect().right];
});
"""


@pytest.fixture
def phone(browser: Any, page: Path) -> Iterator[Any]:
    """The page on a screen 390 pixels wide, with everything unfolded."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []


def test_a_phone_shows_the_whole_page_without_scrolling_sideways(phone: Any) -> None:
    assert phone.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    for which in ("#curves .panels .frame", "#scores .panels .frame", "#ledger .panels .frame", "#users .phone .frame"):
        lefts = phone.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.getBoundingClientRect().left)"
            ".filter((left) => left > 0)",
            which,
        )
        assert lefts, which
        assert len(set(lefts)) == 1, which  # panels stand below each other


LONG = "/srv/" + "a_very_long_folder_name_without_a_space" * 6 + "/model"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_long_names_wrap_in_the_heading(browser: Any, run_writer: Any, tmp_path: Path, width: int) -> None:
    curve = {0: dict.fromkeys(USERS, 9.0), 2: dict.fromkeys(USERS, 5.0)}
    data = {"kind": "conversations", "dataset": {"path": LONG + "_of" * 60 + ".jsonl"}}
    write_run = run_writer(tmp_path)
    runs = [write_run(name, name, curve, base=LONG + name, recipe={"data": data}) for name in ("local", "comigs")]
    (tmp_path / "page.html").write_text(render_page(read_entries(runs)), encoding="utf-8")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**PHONE, "width": width})
    browser.get((tmp_path / "page.html").as_uri())
    edges = "return [...document.querySelectorAll('header *')].map((one) => one.getBoundingClientRect().right)"
    rights, page = browser.execute_script(edges), browser.execute_script("return document.documentElement.scrollWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert max(rights) <= width
    assert page == width


def test_letters_of_figures_can_be_read_on_a_phone(phone: Any) -> None:
    sizes = phone.execute_script(LETTERS)
    assert len(sizes) > 100
    assert min(sizes) > 9.9


@pytest.mark.parametrize("width", [320, 700, 1300])
def test_letters_of_figures_can_be_read_on_every_screen(phone: Any, width: int) -> None:
    phone.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**PHONE, "width": width})
    assert phone.execute_script("return document.documentElement.scrollWidth") == width
    assert min(phone.execute_script(LETTERS)) > 9.9


def test_wide_tables_and_figures_scroll_to_their_end_inside_their_frames(phone: Any) -> None:
    frames = phone.execute_script(FRAMES, ".wide, .frame")
    wide = [frame for frame in frames if frame[0] > frame[1]]
    assert len(wide) >= 3  # the ledger, who gained, the mixtures
    for inside, shown, scrolled, end, edge in wide:
        assert scrolled == pytest.approx(inside - shown, abs=1)
        assert end <= edge + 1  # the last column is in sight
    names = phone.execute_script(
        "return [...document.querySelectorAll('#ledger tbody th')].map((one) => one.getBoundingClientRect().left)"
    )
    assert min(names) >= 0  # and the names of its rows still are


def test_the_numbers_of_a_figure_are_a_link_away(browser: Any, page: Path, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    folder = tmp_path / "downloads"
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    browser.get(page.as_uri())
    browser.execute_script("document.querySelector('#ledger a.csv').click()")
    browser.execute_script("document.querySelector('#token-csv').click()")
    for name in ("bytes.csv", "tokens.csv"):
        WebDriverWait(browser, 10).until(lambda _, name=name: (folder / name).is_file())
    (head, *rows) = csv.reader((folder / "bytes.csv").open(encoding="utf-8"))
    assert head[:2] == ["of", "method"]
    assert [row[:2] for row in rows][:3] == [["mean", "local"], ["mean", "comigs"], ["mean", "floral"]]
    (head, *rows) = csv.reader((folder / "tokens.csv").open(encoding="utf-8", newline=""))
    assert head == ["text", "model", "layer", "token_number", "token", "expert", "probability"]
    assert len(rows) == 4 * 3 * len(TOKENS) * 2
    assert rows[:2] == [
        ["ann", "ann", "0", "0", "Once", "generalist", "0.9"], ["ann", "ann", "0", "0", "Once", "specialist", "0.1"]
    ]  # fmt: skip
    assert {row[4] for row in rows} == set(TOKENS)
