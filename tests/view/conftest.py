"""A real Chromium, and a page that fails the test by what no page should do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.view.scenes import Engine

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Few processes: a test costs a page, and no more.
    "--in-process-gpu",
    "--renderer-process-limit=1",
]
# Seen by the page before anything of its own runs.
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-pictures",
        action="store_true",
        help="Write the page's picture to docs/images.",
    )


@pytest.fixture(scope="session")
def browsing() -> Iterator[Any]:
    """A context of the browser."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser.new_context()
        browser.close()


class Tab:
    """A page, and what went wrong on it.

    Args:
        context: Of the browser.
        width: Of the window.
        height: Of the window.
        scheme: `light` or `dark`.
    """

    def __init__(
        self, context: Any, width: int = 1280, height: int = 800, scheme: str = "light"
    ) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme)
        self.page.add_init_script(_WATCH)
        self.hosts: set[str] = set()
        self.urls: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _asked(self, url: str) -> None:
        self.urls.append(url)
        if not url.startswith(("data:", "blob:")):
            self.hosts.add("/".join(url.split("/")[:3]))

    def open(self, engine: Engine, place: str = "") -> Any:
        self.page.goto(f"{engine.url}/records/view{place}")
        return self.page

    def open_run(self, engine: Engine, key: str, query: str = "") -> Any:
        page = self.open(engine, f"#/{key}{query}")
        page.wait_for_selector(".block .t")
        return page

    def check(self) -> None:
        assert self.errors == []
        assert self.page.evaluate("window.violations") == []
        assert len(self.hosts) <= 1, f"asked elsewhere: {self.hosts}"
        self.page.close()


@pytest.fixture
def tab(browsing: Any) -> Iterator[Tab]:
    tab = Tab(browsing)
    yield tab
    tab.check()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine
