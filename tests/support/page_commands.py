"""The commands that the pages give their readers to type: every line of every ```bash block, as it stands there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.md")])
_BLOCK = re.compile(r"^( *)```(?:bash|console|sh|shell)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"\bneeds (a GPU|GPUs|the hub|a hub account|a network|Docker|Slurm)\b|\btakes (minutes)\b")
_DOCUMENT = re.compile(r"<<'(\w+)'")


@dataclass(frozen=True)
class Command:
    """text: without its comment. needs: what the comment says it needs, "" if nothing.

    `hf download a/b  # needs the hub` → Command("docs/a.md", "hf download a/b", "the hub")
    """

    page: str
    text: str
    needs: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "))


def commands(page: Path) -> list[Command]:
    """Of all blocks of a page, in its order. A here-document and a text over several lines belong to their command."""
    name = str(page.relative_to(ROOT))
    blocks = (match[2] for match in _BLOCK.finditer(page.read_text()))
    found = (without_comment(lines) for block in blocks for lines in _whole(block.splitlines()))
    return [Command(name, text, needs(comment)) for text, comment in found if text]


def needs(comment: str) -> str:
    """ "# needs a GPU: does it fit?" → "a GPU" """
    match = _NEEDS.search(comment)
    return next(filter(None, match.groups())) if match else ""


def _whole(lines: list[str]) -> Iterator[str]:
    """Each command with all its lines."""
    rest = iter(lines)
    for line in rest:
        text = line
        if document := _DOCUMENT.search(line):
            for inside in rest:
                text += f"\n{inside}"
                if inside == document[1]:
                    break
        else:
            while _is_open(text):
                text += f"\n{next(rest)}"
        yield text


def _is_open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # no closing quotation
        return True
    return text.endswith("\\")


def without_comment(text: str) -> tuple[str, str]:
    """(command, comment).  "ls 'a # b'  # c" → ("ls 'a # b'", "# c")"""
    if _DOCUMENT.search(text):
        return text.strip(), ""
    for match in re.finditer(r"(?:^|(?<=\s))#", text):
        try:
            shlex.split(text[: match.start()])
        except ValueError:
            continue  # inside a quotation
        return text[: match.start()].strip(), text[match.start() :]
    return text.strip(), ""
