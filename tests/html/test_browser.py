"""Every page in headless Chromium: no network, no error, colours, keys, a phone's width and A4."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.html.run_page import run_page
from tests.html import hostile

TEXT = " ".join(hostile.ATTACKS[:5])
PAGES = {
    "run": lambda: run_page(hostile.report(TEXT), machine="a machine"),
    "compare": lambda: hostile.compare_document(hostile.comparison(TEXT, rounds=40)),
    "tune": lambda: hostile.tune_document(hostile.search(TEXT, trials=40)),
    "diagnose": lambda: hostile.diagnose_document(hostile.diagnosis(TEXT, processes=4)),
}

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield running
        running.close()


@pytest.fixture(params=PAGES)
def document(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "page.html"
    path.write_text(PAGES[request.param]())
    return path.as_uri()


def opened(browser: Any, document: str, **options: Any) -> tuple[Any, list[str]]:
    """A tab with the page, and what went wrong in it so far and later."""
    page, problems = browser.new_page(**options), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != document else None)
    page.goto(document)
    return page, problems


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_runs_no_code_of_others(browser: Any, document: str, scheme: str, width: int) -> None:
    page, problems = opened(browser, document, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.mouse.move(width / 2, 400)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert "<script>" in page.title()
    assert problems == []


def test_colours_follow_the_system_until_a_key_changes_them(browser: Any, document: str) -> None:
    page, problems = opened(browser, document, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "scheme"
    page.keyboard.press("Enter")
    light = page.evaluate(background)
    assert light != dark
    assert page.locator("#scheme").inner_text() == "Use dark colours"
    page.locator("#scheme").click()
    assert page.evaluate(background) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark
    assert problems == []


def test_what_is_folded_opens_by_a_key_and_in_print(browser: Any, document: str) -> None:
    page, problems = opened(browser, document)
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    opened_by_key = "document.querySelector('details').open"
    assert page.evaluate(opened_by_key)
    page.keyboard.press("Enter")
    assert not page.evaluate(opened_by_key)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(opened_by_key)
    assert problems == []


def test_the_page_prints_on_a4(browser: Any, document: str, tmp_path: Path) -> None:
    if shutil.which("pdfinfo") is None:
        pytest.skip("no pdfinfo: apt-get install poppler-utils")
    page, problems = opened(browser, document)
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    facts = subprocess.run(["pdfinfo", tmp_path / "page.pdf"], capture_output=True, text=True, check=True).stdout
    assert "(A4)" in facts
    assert problems == []
