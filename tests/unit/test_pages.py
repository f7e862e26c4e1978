"""The pages hold together: no dead link, every page in reach of the README, both READMEs say the same."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def text_of(page: Path) -> str:
    """Without code: a call in a sentence or a block is no link."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(text_of(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+?)\s*$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_an_anchor_is_made_as_on_github() -> None:
    page = ROOT / "docs" / "rewards.md"
    assert {"check-it-before-any-gpu-time", "shapes", "bring-your-own-reward"} <= anchors(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_reach_of_the_readme_and_every_page_of_docs_is_in_its_index() -> None:
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        ahead += [target for target in targets if target.suffix == ".md" and target not in seen]
    assert [str(page) for page in PAGES if page not in seen] == []
    index = {link.partition("#")[0] for link in links(ROOT / "docs" / "README.md")}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_launch_sh_that_a_page_names_exists_and_so_does_every_config(page: Path) -> None:
    named = re.findall(r"(?<=bash launch\.sh )[a-z-]+\b(?!=)", page.read_text())
    assert set(named) - {"and", "or", "has"} <= COMMANDS.keys()
    for config in re.findall(r"configs/[\w./]+\.(?:yaml|jinja)", page.read_text()):
        assert (ROOT / config).is_file(), config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    if page.name == "log.md":
        return  # experiments keep the names of their time
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"runs"}
    named = {name for name in re.findall(r"`(\w+/[\w./-]+)", page.read_text()) if name.split("/")[0] in folders}
    files = {name.rstrip("./") for name in named if "." in Path(name).name or name.endswith("/")}
    assert sorted(name for name in files if not (ROOT / name).exists()) == []


def test_deepspeeds_launcher_knows_every_flag_that_a_page_gives_it() -> None:
    """Looked up in its source: importing it costs seconds."""
    (place,) = find_spec("deepspeed").submodule_search_locations  # type: ignore[union-attr]
    source = (Path(place) / "launcher" / "runner.py").read_text()
    lines = [line for page in PAGES for line in re.findall(r"deepspeed (--.*?) training_worker", page.read_text())]
    flags = {flag for line in lines for flag in re.findall(r"--\w+", line)}
    assert {"--include", "--hostfile", "--no_ssh", "--node_rank", "--master_addr"} <= flags
    assert [flag for flag in sorted(flags) if f'"{flag}"' not in source] == []


def numbers(page: Path) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text_of(page)))


def test_the_chinese_readme_has_the_same_blocks_links_and_figures_and_both_are_short() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README_zh.md"
    swapped = {"README_zh.md": "README.md"}
    assert [swapped.get(link, link) for link in links(english)] == links(chinese)
    assert len(english.read_text().splitlines()) <= 100 and len(chinese.read_text().splitlines()) <= 100
    blocks = [
        re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in (english, chinese)
    ]
    for (language, ours), (theirs, translated) in zip(*blocks, strict=True):
        assert language == theirs
        if language == "bash":  # comments are translated, commands are not
            assert re.sub(r"\s*#.*", "", ours) == re.sub(r"\s*#.*", "", translated)
    assert len(re.findall("^## ", english.read_text(), re.M)) == len(re.findall("^## ", chinese.read_text(), re.M))
    assert len(re.findall("^- ", english.read_text(), re.M)) == len(re.findall("^- ", chinese.read_text(), re.M))
    long = [[n for n in numbers(page) if len(n) > 1] for page in (english, chinese)]  # digits may be spelt out
    assert long[0] == long[1]
