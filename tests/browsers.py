"""A headless Chromium, for tests of pages. Needs Debian's packages chromium and chromium-driver, and selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, whose console is kept; without one the test is skipped."""
    pytest.importorskip("selenium", reason="NO BROWSER TEST: pip install selenium")
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("NO BROWSER TEST: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1000"):
        options.add_argument(argument)
    for argument in ("--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield found
    finally:
        found.quit()
