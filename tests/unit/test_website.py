"""The pages as a site: every link exists, nothing is fetched, search works without a server."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.speed import limit
from website import __main__ as website

ROOT = Path(__file__).resolve().parents[2]
needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("furo") is None, reason="needs pip install -r tools/locks/dev.txt"
)


def test_every_page_is_reachable_from_the_readme() -> None:
    reachable = {path for path in website.reachable(ROOT / "README.md") if path.suffix == ".md"}
    assert set((ROOT / "docs").glob("*.md")) | set(ROOT.glob("*.md")) <= reachable


def test_a_link_to_nothing_is_an_error_that_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("[here](page.md#there), [there](absent.md)")
    with pytest.raises(FileNotFoundError, match=r"page.md links to .*absent.md, which is no file"):
        website.links(tmp_path / "page.md")


def test_the_sections_of_the_index_become_tables_of_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    index = tmp_path / "docs" / "README.md"
    index.parent.mkdir()
    index.write_text("# Order\n\n1. **Start:** [README](../README.md), [a page](a.md#x)\n2. **End:** [b](../B.md)\n")
    captions = re.findall(r":caption: (.+)\n\n(.*)\n", website.contents(index))
    assert captions == [("Start", "A page <docs/a>"), ("End", "B <B>")]


@pytest.fixture(scope="module")
def site() -> Path:
    website.stage()
    assert website.render() == 0, "Sphinx names the link or heading above"
    return website.SITE


@needs_sphinx
@pytest.mark.processes
def test_every_link_and_heading_of_the_site_exists_and_a_reader_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+?(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert loaded == [], page


@needs_sphinx
@pytest.mark.processes
def test_a_heading_that_does_not_exist_stops_the_build(site: Path) -> None:
    page = website.PAGES / "docs" / "concepts.md"
    whole = page.read_text()
    page.write_text(f"{whole}\n[there](plan.md#no-such-heading)\n")
    try:
        assert website.render() != 0
    finally:
        page.write_text(whole)


@needs_sphinx
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs apt-get install chromium")
def test_search_finds_pages_without_a_server(site: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    url = f"file://{site}/search.html?q=staleness"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=limit(60))
    assert re.search(r"found [1-9]\d* pages matching", done.stdout), done.stdout[-2000:]
