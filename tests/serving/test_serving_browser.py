"""The page in a real browser: keys, two models, a stream, the layer slider, the keyboard, narrow and dark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serving_api import KEYS, serving

from browsers import chromium
from comingle.models.routing import pieces
from comingle.serving.access import Keys, Limits
from comingle.serving.api import make_app
from comingle.serving.engine import Engine

pytestmark = pytest.mark.slow

WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(people: Any) -> Iterator[str]:
    with serving(make_app(Engine(people(), rows=3), Keys(people(), KEYS), Limits(), answers=False)) as found:
        yield found


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def every(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def wait(browser: Any, condition: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT_SECONDS).until(lambda _: condition())


def look(browser: Any, name: str) -> None:
    """Keeps a picture where ``COMINGLE_SCREENSHOTS`` names a folder."""
    if folder := os.environ.get("COMINGLE_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def say(browser: Any, text: str, answers: int) -> None:
    from selenium.webdriver.common.keys import Keys as Press

    find(browser, "#prompt").send_keys(text, Press.ENTER)
    wait(browser, lambda: find(browser, "#stop").get_attribute("disabled"))
    wait(browser, lambda: len(every(browser, ".turn.theirs")) == answers)


def load(browser: Any, address: str) -> None:
    """Opens the page and waits for the models, or for the refusal without a key."""
    browser.get(address)
    wait(browser, lambda: find(browser, "#send").is_enabled() or "key" in find(browser, "#status").text)


def begin(browser: Any, address: str) -> None:
    """Opens the page and gives the keys, unless a test before has: the tab keeps them."""
    load(browser, address)
    if not find(browser, "#send").is_enabled():
        find(browser, "#keys").send_keys("\n".join(KEYS.values()))
        find(browser, "#open").click()
        wait(browser, lambda: find(browser, "#send").is_enabled())
        browser.execute_script("document.querySelector('#locked').open = false")


def shown(person: Any, text: str, new: int) -> str:
    """What a model says as tokens show it, which is not the same where a random model says no whole characters."""
    tokenizer = person.model.base.tokenizer
    return "".join(pieces(tokenizer, tokenizer(person.generate(text, max_new_tokens=new))["input_ids"]))


def test_a_visit(browser: Any, address: str, people: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys as Press

    browser.set_window_size(1300, 900)
    browser.get(address)
    wait(browser, lambda: "key" in find(browser, "#status").text)
    assert not find(browser, "#send").is_enabled()
    find(browser, "#keys").send_keys("\n".join(KEYS.values()))
    find(browser, "#open").click()
    wait(browser, lambda: find(browser, "#send").is_enabled())
    browser.execute_script("document.querySelector('#locked').open = false")
    names = [option.text for option in every(browser, "section:first-child .model option")]
    assert names == list(KEYS)
    assert find(browser, "#mode").get_attribute("value") == "text"
    browser.execute_script(
        "document.querySelector('#temperature').value = 0; document.querySelector('#length').value = 24"
    )

    say(browser, "one two", 1)
    expected = shown(people()["ann"], "one two", 24)
    wait(browser, lambda: every(browser, ".token"))
    told = "".join(token.get_attribute("textContent") for token in every(browser, ".token"))
    assert told == expected

    find(browser, "#two").click()
    find(browser, "#clear").click()
    say(browser, "one two", 2)
    wait(browser, lambda: len({t.get_attribute("data-expert") for t in every(browser, ".token")}) == 2)
    bodies = [turn.get_attribute("textContent") for turn in every(browser, ".turn.theirs")]
    assert bodies == [name + shown(people()[name], "one two", 24) for name in KEYS]

    slider = find(browser, "section:first-child .layer")
    routing = people()["ann"].route("one two" + expected)
    for layer in (1, 2):
        slider.send_keys(Press.ARROW_RIGHT)
        assert find(browser, "section:first-child output").text == f"{layer} of 2"
        tops = [t.get_attribute("data-expert") for t in every(browser, "section:first-child .token")]
        gates = routing.gates[layer - 1, -len(tops) :].float()
        wanted = [routing.experts[i] for i in gates.argmax(-1)]
        unsure = (gates[:, 0] - 0.5).abs() < 0.01  # passes of other lengths round in other ways
        assert all(a == b or u for a, b, u in zip(tops, wanted, unsure, strict=True))

    token = every(browser, "section:first-child .token")[1]
    ActionChains(browser).move_to_element(token).perform()
    wait(browser, lambda: find(browser, "section:first-child .told").text.endswith("%"))
    assert "generalist" in find(browser, "section:first-child .told").text
    look(browser, "two-models")
    browser.execute_script("document.querySelector('.turns').focus()")
    before = find(browser, "section:first-child .told").text
    ActionChains(browser).send_keys(Press.ARROW_RIGHT).perform()
    wait(browser, lambda: find(browser, "section:first-child .told").text != before)

    from selenium.webdriver.support.ui import Select

    Select(find(browser, "section:first-child .model")).select_by_visible_text("bob")
    say(browser, "x", 4)
    assert every(browser, "section:first-child .who")[-1].text == "bob"

    find(browser, "#prompt").send_keys(Press.SHIFT, Press.ENTER)
    assert len(every(browser, ".turn.theirs")) == 4
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_wrong_key_and_a_server_that_refuses(browser: Any, address: str) -> None:
    load(browser, address)
    browser.execute_script("document.querySelector('#keys').value = 'wrong'")
    browser.execute_script("document.querySelector('#locked').open = true")
    find(browser, "#open").click()
    wait(browser, lambda: "Bearer KEY" in find(browser, "#status").text)
    browser.execute_script(f"document.querySelector('#keys').value = {KEYS['ann']!r}")
    find(browser, "#open").click()
    wait(browser, lambda: find(browser, "#send").is_enabled())
    browser.execute_script("document.querySelector('#length').value = 5000")
    say(browser, "a", 1)
    assert find(browser, ".turn.failed").text.endswith("max_tokens: got 5,000; allowed: up to 1,024")
    browser.get_log("browser")  # the browser itself tells of every 401 and 400


def test_an_answer_can_be_stopped(browser: Any, address: str) -> None:
    begin(browser, address)
    browser.execute_script(
        "document.querySelector('#length').value = 900; document.querySelector('#temperature').value = 0"
    )
    from selenium.webdriver.common.keys import Keys as Press

    find(browser, "#prompt").send_keys("one two", Press.ENTER)
    wait(browser, lambda: find(browser, "#stop").is_enabled())
    find(browser, "#stop").click()
    wait(browser, lambda: find(browser, "#send").is_enabled())


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 390), ("dark", 1300)])
def test_narrow_and_dark(browser: Any, address: str, scheme: str, width: int) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        begin(browser, address)
        if not find(browser, "#two").is_selected():
            find(browser, "#two").click()
        browser.execute_script("document.querySelector('#length').value = 60")
        say(browser, "the longest of them all", 2 * (1 + 0))
        wait(browser, lambda: every(browser, ".token"))
        browser.execute_script(  # a user's name of any length
            "for (const one of document.querySelectorAll('.model')) one.add(new Option('name '.repeat(30)));"
        )
        wide = browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide == 0
        paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 25, 30)")
        look(browser, f"{scheme}-{width}")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
