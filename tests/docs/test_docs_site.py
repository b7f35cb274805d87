"""The documentation site builds without a warning, loads nothing from elsewhere, and has no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from documents import REPOSITORY

from browsers import chromium

pytest.importorskip("material", reason="NO DOCUMENTATION SITE: pip install comingle[docs]")

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""What a browser loads by itself."""


class Seen(HTMLParser):
    """The places that a page has, those that it leads to, and what it loads."""

    def __init__(self, page: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADED.get(tag, "") in found:
            self.loads.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Seen]:
    return {page: Seen(page) for page in site.rglob("*.html")}


def outside(target: str) -> bool:
    return "://" in target or target.startswith(("//", "mailto:", "data:"))


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Seen]) -> None:
    """Neither by a page nor by its style sheets."""
    assert len(pages) > 25
    for page, seen in pages.items():
        assert seen.loads
        for target in seen.loads:
            assert not outside(target), (page.name, target)
            assert target.startswith("/") or (page.parent / unquote(target)).exists(), (page.name, target)
    sheets = [path.read_text(encoding="utf-8") for path in next(iter(pages)).parent.rglob("*.css")]
    assert sheets
    assert not any(f"{start}http" in sheet for sheet in sheets for start in ("url(", 'url("', '@import "'))


@pytest.mark.slow
def test_links_within_the_site_lead_somewhere(pages: dict[Path, Seen]) -> None:
    count = 0
    for page, seen in pages.items():
        for target in seen.links:
            if outside(target) or page.name == "404.html":
                continue
            path, _, anchor = target.partition("#")
            linked = (page.parent / unquote(path)).resolve() if path else page
            linked = linked / "index.html" if linked.is_dir() else linked
            assert linked.is_file(), (page.name, target)
            assert not anchor or linked.suffix != ".html" or unquote(anchor) in pages[linked].ids, (page.name, target)
            count += 1
    assert count > 1000


@pytest.mark.slow
def test_the_index_for_language_models_leads_to_pages(site: Path) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((\S+)\)", index)
    assert len(linked) > 25
    assert [target for target in linked if not (site / target).is_file()] == []


@pytest.mark.slow
def test_commands_and_methods_are_those_of_the_code(site: Path, pages: dict[Path, Seen]) -> None:
    from comingle.cli import CoreCommands
    from comingle.methods import REGISTRY

    verbs = {f"comingle-{name}" for name in CoreCommands.core_functions}
    assert verbs <= pages[site / "reference" / "cli.html"].ids
    assert {name.rstrip("+") for name in REGISTRY} <= pages[site / "reference" / "methods.html"].ids


@pytest.mark.slow
def test_the_public_names_are_in_the_reference(site: Path, pages: dict[Path, Seen]) -> None:
    import comingle

    ids = pages[site / "reference" / "api.html"].ids
    assert {f"comingle.{name}" for name in comingle.__all__ if not name.startswith("_")} <= ids
    extending = {"methods.base.Method", "methods.base.ClientHook.receive", "methods.server.Mean"}
    assert {f"comingle.{name}" for name in extending} <= pages[site / "reference" / "extending.html"].ids


@pytest.mark.slow
def test_pages_can_be_read_on_a_phone_and_searched_from_disk(site: Path, pages: dict[Path, Seen]) -> None:
    """Nothing is wider than the screen but what scrolls by itself; the console stays empty."""
    from selenium.webdriver.support.ui import WebDriverWait

    with chromium() as browser:
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for page in pages:
            if page.name == "404.html":  # it is for servers: its paths begin at the root
                continue
            browser.get(page.as_uri())  # a script then puts wide tables into boxes that scroll
            WebDriverWait(browser, 10).until(lambda _: wide(browser) <= 390, page.name)
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.get((site / "index.html").as_uri())
        browser.find_element("css selector", "[data-md-component=search-query]").send_keys("specialists")
        result = browser.find_element("css selector", "[data-md-component=search-result]")
        WebDriverWait(browser, 20).until(lambda _: "matching documents" in result.text)
        assert browser.get_log("browser") == []


def wide(browser: Any) -> int:
    """Width of a page in pixels."""
    return browser.execute_script("return document.documentElement.scrollWidth")
