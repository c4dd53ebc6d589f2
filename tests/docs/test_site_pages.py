"""Structure of the manual as a site: what a screenshot would show, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"^(`{3,})(\w*).*?\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
UNLISTED = ("all-pages.md", "README.md", "architecture.md", "test-all.md")
COLUMNS = 125
"""Characters of a line of code that fit a window of 1280 pixels; ``tools/look_at_docs.py`` measures them."""


def test_the_home_page_has_five_lines_a_picture_and_three_doors() -> None:
    page = (DOCS / "README.md").read_text()
    first, rest = page.split("## Three doors")
    assert "zeromesh.initialize(model=model" in first
    assert "](pictures/speed.svg)" in first
    assert page.count("|---") == 3  # the one table has three columns
    assert rest.count("\n| ") == 4
    assert len(page.splitlines()) < 60


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_code_fits_a_window(page: Path) -> None:
    for _, language, code in CODE.findall(page.read_text()):
        if language != "mermaid":  # which is drawn
            assert max(map(len, code.splitlines()), default=0) <= COLUMNS, code


def test_the_site_loads_nothing_from_the_network_and_searches_from_a_disk() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "use_directory_urls: false" in settings
    assert "font: false" in settings
    assert "\n  - offline" in settings
    (script,) = re.findall(r"polyfills: \[(.+?)\]", settings)
    assert "iframe-worker" in script  # by this name the plugin knows that it need not load one
    assert 'location.protocol === "file:"' in (DOCS / script).read_text()


def test_every_page_is_in_the_navigation_and_in_the_list() -> None:
    settings, pages = (ROOT / "mkdocs.yml").read_text(), (DOCS / "all-pages.md").read_text()
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in settings
        assert f"]({page.name})" in pages or page.name in (
            "all-pages.md",
            "README.md",
            "architecture.md",
            "test-all.md",
        )
