"""Chromium for these tests, driven by playwright; without one of them, each test is skipped with a sentence."""

import importlib.util
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("there is no Chromium on PATH: install it to see the pages as a reader does")
    if not importlib.util.find_spec("playwright"):
        pytest.skip("what drives Chromium is not installed: make site installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(autouse=True)
def closed(browser):
    yield
    for context in browser.contexts:
        context.close()
