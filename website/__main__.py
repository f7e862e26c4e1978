"""The pages as a static site in .cache/website/site: `.venv/bin/python -m website`, with tools/locks/dev.txt there.

It needs no network and stops at the first link or heading that does not exist; a reader's browser fetches nothing, and
search works without a server. The pages are those of the repository, in the order of docs/README.md, in the folders
where they stand. README.md is the site's index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / ".cache" / "website" / "pages"
SITE = PAGES.with_name("site")
LINK = re.compile(r"\[([^][]+)\]\(([^)\s#]+)(?:#[^)\s]*)?\)")  # [text](target)
SECTION = re.compile(r"^\d+\. \*\*(.+?):\*\*")  # of docs/README.md: "1. **Start:** [README](../README.md) …"


def links(page: Path) -> list[tuple[str, Path]]:
    """(text, file of the repository) of a page's links, in its order. Raises FileNotFoundError for what is no file."""
    found = _links_of(page.read_text(), page)
    for _, path in found:
        if not path.is_file() or not path.is_relative_to(ROOT):
            raise FileNotFoundError(f"{page.relative_to(ROOT)} links to {path}, which is no file of this repository")
    return found


def reachable(start: Path) -> list[Path]:
    """Every file that the links of pages lead to from `start`, itself first, each once."""
    found, queue = [start], [start]
    while queue:
        new = [path for _, path in links(queue.pop(0)) if path not in found]
        found += dict.fromkeys(new)
        queue += [path for path in dict.fromkeys(new) if path.suffix == ".md"]
    return found


def contents(index: Path) -> str:
    """Hidden tables of contents: one for each numbered section of docs/README.md, with the pages it links to."""
    tables = []
    for item in re.split(r"\n(?=\d+\. )", index.read_text()):
        if section := SECTION.match(item):
            pages = [(text, path) for text, path in _links_of(item, index) if path.suffix == ".md"]
            entries = [
                f"{text[0].upper() + text[1:]} <{_page(path)}>" for text, path in pages if _page(path) != "index"
            ]
            tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {section[1]}", "", *entries, "```", ""]))
    return "\n" + "\n".join(tables)


def _links_of(text: str, page: Path) -> list[tuple[str, Path]]:
    found = [(name, target) for name, target in LINK.findall(text) if "://" not in target]
    return [(name, Path(os.path.normpath(page.parent / target))) for name, target in found]


def _page(path: Path) -> str:
    """Its name on the site."""
    name = str(path.relative_to(ROOT).with_suffix(""))
    return "index" if name == "README" else name


def stage() -> None:
    """Copies what is reachable into PAGES."""
    shutil.rmtree(PAGES.parent, ignore_errors=True)
    for path in reachable(ROOT / "README.md"):
        copy = PAGES / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for path in PAGES.rglob("*.md"):
        up = "../" * (len(path.relative_to(PAGES).parts) - 1)
        path.write_text(path.read_text().replace(f"]({up}README.md", f"]({up}index.md"))
    (PAGES / "README.md").rename(PAGES / "index.md")
    with open(PAGES / "index.md", "a") as file:
        file.write(contents(ROOT / "docs" / "README.md"))


def render() -> int:
    """The exit status of Sphinx over PAGES, 0 = every link and heading exists."""
    options = ["-q", "-n", "-W", "--keep-going", "-c", str(ROOT / "website"), "-d", str(PAGES.with_name("doctrees"))]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, str(PAGES), str(SITE)]).returncode


if __name__ == "__main__":
    stage()
    sys.exit(render())
