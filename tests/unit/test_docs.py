"""The pages say what the code does: config.md is generated, every key and message that a page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from common.config import Config, reference_page
from tests.support.syntax import walk
from tests.unit.test_imports import trees

DOCS = Path(__file__).resolve().parents[2] / "docs"
FRAMEWORKS = ("TRL", "verl", "EasyR1", "MindSpeed-RL", "OpenRLHF")


@cache
def known_keys() -> set[str]:
    """Every key of the reference, and the sections that stand for themselves (`vllm`, `deepspeed`)."""
    return set(re.findall(r"^\| `([\w.]+)` \|", reference_page.page(), re.MULTILINE))


def test_the_reference_page_is_the_code() -> None:
    written = (DOCS / "config.md").read_text()
    assert written == reference_page.page(), "run: .venv/bin/python -m common.config.reference_page"


def test_every_setting_is_in_the_reference_with_a_meaning() -> None:
    top = {name for name in Config.model_fields if not any(key.startswith(f"{name}.") for key in known_keys())}
    assert top == {"deepspeed", "vllm"} and top <= known_keys()
    rows = [line for line in reference_page.page().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_defaults_limits_and_other_values_are_readable() -> None:
    page = reference_page.page()
    for row in (
        "| `sampler.num_generations` | `8`, ≥ 2 |",
        "| `algorithm.epsilon` | `0.2`, > 0 |",
        "| `model.path` | **required**, text |",
        "| `eval.steps` | `null`, int > 0 |",
        "| `trainer.learning_rate` | `1e-06`, > 0 |",
        "| `trainer.dist_backend` | `auto`, `nccl`, `gloo` |",
        "| `critic.cliprange_value` | `0.5`, `null`, > 0 |",
        "| `lora.target_modules` | `all-linear`, list of text |",
        '| `rewards.reward_funcs` | `["answer", "format"]` |',
    ):
        assert row in page


def rows_of(framework: str) -> list[tuple[str, str]]:
    """Their keys beside ours: the rows of the table, and every key that has the same name."""
    page = (DOCS / "coming_from.md").read_text()
    section = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    (found,) = [text for text in section if text.startswith(framework)]
    same = re.findall(r"^Same name: ((?:`[^`]+`[,.]\s)+)", found, re.MULTILINE)
    keys = [(key, f"`{key}`") for listed in same for key in re.findall(r"`([^`]+)`", listed)]
    return keys + re.findall(r"^\| `(.+?)` \| (.+) \|$", found, re.MULTILINE)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_key_of_ours_that_others_are_sent_to_exists(framework: str) -> None:
    rows = rows_of(framework)
    theirs_all = [key for theirs, _ in rows for key in theirs.split("`, `")]
    assert len(theirs_all) >= 30
    assert len({theirs for theirs, _ in rows}) == len(rows)
    known = known_keys()
    for theirs, ours in rows:
        outside = re.sub(r"\([^)]*\)", "", ours)  # in brackets stand values and the frameworks' own words
        named = re.findall(r"`([\w.]+)`", outside)
        assert named, f"{theirs}: no key in {ours!r}"
        assert set(named) <= known, f"{theirs}: {set(named) - known} is no key of ours"


OTHERS_KEYS = {"coming_from.md", "CONTRIBUTING.md"}  # name other frameworks' keys, and modules
PAGES = sorted(page for folder in (DOCS, DOCS.parent) for page in folder.glob("*.md") if page.name not in OTHERS_KEYS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    sections = "|".join(name for name in Config.model_fields if name not in ("vllm", "deepspeed"))
    named = re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z]\w*(?:\.\w+)?)(?=[=`\s,;)])", page.read_text())
    groups = {key.rpartition(".")[0] for key in known_keys()}
    found = {key for key in named if not key.endswith((".md", ".json", ".py", ".yaml", ".jsonl"))}
    assert found - known_keys() - groups == set()


def test_settings_are_found_on_most_pages() -> None:
    """Without this a changed pattern would make the test above agree with everything."""
    texts = [page.read_text() for page in PAGES]
    assert sum("`trainer." in text or "`sampler." in text for text in texts) >= 15


@cache
def texts() -> list[str]:
    """Every text of the source, a formatted value as `…`."""
    found = []
    for tree in trees().values():
        for node in walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                found.append("".join(_parts(node)))
    return found


def _parts(node: ast.expr) -> list[str]:
    """Of a sum of texts."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parts(node.left) + _parts(node.right)
    if isinstance(node, ast.JoinedStr):
        return [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
    return [str(node.value)] if isinstance(node, ast.Constant) else ["…"]


def headings() -> list[str]:
    return [match[1] for match in re.finditer(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)]


def test_the_page_of_messages_has_some() -> None:
    assert len(headings()) >= 25 and len(set(headings())) == len(headings())


@pytest.mark.parametrize("heading", headings())
def test_a_quoted_message_stands_in_the_source(heading: str) -> None:
    pieces = [re.escape(piece.strip()) for piece in heading.split("…") if piece.strip(" .;?=")]
    assert sum(map(len, pieces)) >= 10, "too short to search for"
    pattern = re.compile(".*?".join(pieces), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), heading
