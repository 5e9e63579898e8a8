"""A headless Chromium for tests of pages. The tests skip where there is none, or no playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FOREIGN_HOST = "page.example.com"
"""A name that the browser takes for this machine, as a name does whose owner has rebound it."""
ARGUMENTS = (
    "--no-sandbox",  # the tests may run as root, where Chromium's sandbox can't
    "--disable-gpu",
    "--disable-lcd-text",  # screenshots without coloured edges are smaller
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--host-resolver-rules=MAP {FOREIGN_HOST} 127.0.0.1",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Runs a browser until the block ends. Use it in tests that have no event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, headless=True, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
