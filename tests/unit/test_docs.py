"""The pages against the code: links, commands, settings, metrics, messages and the frameworks' keys exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from common.config import Config, Rewards, reference_page
from launcher.__main__ import COMMANDS
from report.advice_rules import RULES
from rewards.find import BUILT_IN
from tests.support.metrics_page import PAGE as METRICS
from tests.support.metrics_page import documented, unexplained
from tests.support.page_commands import PAGES, commands, without_comment
from tests.unit.test_imports import SOURCES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def links(page: Path) -> list[str]:
    """Without those in code, where a call is no link, and without other sites'."""
    text = re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    return [link for link in re.findall(r"\]\(([^()\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+?)\s*$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_no_link_is_dead(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= index


@every_page
def test_commands_configs_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"(?<=bash launch\.sh )[a-z-]+\b(?!=)", text)) - {"and", "or", "has"} <= COMMANDS.keys()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"runs"}
    named = re.findall(r"(?:`|(?<=configs))\b(\w+/[\w./-]+)", text) if page.name != "log.md" else []
    named = [name.rstrip("./") for name in named if name.split("/")[0] in folders and "." in Path(name).name]
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    for config in re.findall(r"configs/[\w./]+\.(?:yaml|jinja)", text):
        assert (ROOT / config).is_file(), config


def test_the_chinese_readme_has_the_same_links_commands_and_headings() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README_zh.md"
    assert [link.replace("README_zh", "README") for link in links(english)] == links(chinese)
    assert [command.text for command in commands(english)] == [command.text for command in commands(chinese)]
    for mark in ("## ", "- ", "| "):
        count = [len(re.findall(f"^{re.escape(mark)}", page.read_text(), re.M)) for page in (english, chinese)]
        assert count[0] == count[1], mark


def test_a_command_is_read_as_the_shell_reads_it() -> None:
    assert without_comment("ls 'a # b'  # c") == ("ls 'a # b'", "# c")
    assert without_comment("echo a#b") == ("echo a#b", "")
    assert without_comment("# alone") == ("", "# alone")
    texts = [command.text for command in commands(DOCS / "data.md")]
    assert any(text.startswith("python3 - <<'EOF'\nimport json\n") and text.endswith("\nEOF") for text in texts)


# --- settings


@cache
def known_keys() -> set[str]:
    return set(re.findall(r"^\| `([\w.]+)` \|", reference_page.page(), re.MULTILINE))


def test_the_reference_page_is_the_code_and_every_setting_is_on_it_with_a_meaning() -> None:
    page = reference_page.page()
    assert (DOCS / "config.md").read_text() == page, "run: .venv/bin/python -m common.config.reference_page"
    top = {name for name in Config.model_fields if not any(key.startswith(f"{name}.") for key in known_keys())}
    assert top == {"deepspeed", "vllm"} and top <= known_keys()
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    for row in (
        "| `sampler.num_generations` | `8`, ≥ 2 |",
        "| `model.path` | **required**, text |",
        "| `eval.steps` | `null`, int > 0 |",
        "| `trainer.dist_backend` | `auto`, `nccl`, `gloo` |",
        "| `critic.cliprange_value` | `0.5`, `null`, > 0 |",
        '| `rewards.reward_funcs` | `["answer", "format"]` |',
    ):
        assert row in page


@every_page
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    if page.name in ("coming_from.md", "CONTRIBUTING.md"):
        return  # other frameworks' keys, and modules
    sections = "|".join(name for name in Config.model_fields if name not in ("vllm", "deepspeed"))
    named = re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z]\w*(?:\.\w+)?)(?=[=`\s,;)])", page.read_text())
    groups = {key.rpartition(".")[0] for key in known_keys()}
    found = {key for key in named if not key.endswith((".md", ".json", ".py", ".yaml", ".jsonl"))}
    assert found - known_keys() - groups == set()
    assert found or page.name != "running.md", "settings are found"


@pytest.mark.parametrize("framework", ["TRL", "verl", "EasyR1", "MindSpeed-RL"])
def test_every_key_of_ours_that_others_are_sent_to_exists(framework: str) -> None:
    sections = re.split(r"^## ", (DOCS / "coming_from.md").read_text(), flags=re.MULTILINE)[1:]
    (section,) = [text for text in sections if text.startswith(framework)]
    same = "".join(re.findall(r"^Same name: ((?:`[^`]+`[,.]\s)+)", section, re.MULTILINE))
    rows = re.findall(r"^\| `.+?` \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) + same.count("`") // 2 >= 25
    for ours in [*rows, same]:
        outside = re.sub(r"\([^)]*\)", "", ours)  # in brackets stand values and the frameworks' own words
        named = set(re.findall(r"`([\w.]+)`", outside))
        assert named and named <= known_keys(), ours


# --- metrics


@cache
def source(*rooms: str) -> str:
    """Of these rooms, else all; texts that are written over several lines as one."""
    paths = [path for path in SOURCES if not rooms or path.relative_to(ROOT).parts[0] in rooms]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in paths))


def test_every_metric_of_the_code_is_explained() -> None:
    """Those of a group by their names in the sources; the others by the runs of the end-to-end tests."""
    groups = {name.split("/")[0] for name in documented() if "/" in name} - {"eval", "rewards"}  # also folders' names
    literals = re.findall(rf'"((?:{"|".join(groups)})/[^"\s]*[^"/_\s])"', source("trainer", "sampler", "report"))
    assert len(set(literals)) > 60
    for literal in {re.sub(r"\{[^}]*\}", "<>", literal) for literal in literals}:
        pattern = re.compile(re.escape(literal).replace("<>", ".+"))
        assert any(pattern.fullmatch(name) for name in documented()) or not unexplained({literal}), literal
    assert {f"advice/{cause}" for cause in RULES} == {name for name in documented() if name.startswith("advice/")}


def test_every_metric_that_is_explained_is_in_the_code() -> None:
    code = source("trainer", "sampler", "report")
    for name in documented() - {f"advice/{cause}" for cause in RULES}:
        last = name.rstrip("<>/").rsplit("/", 1)[-1].removeprefix("sampler_")
        assert re.search(rf'["/_}}]{last}["_]|\b{last}\b\s*[=:]', code), name


@every_page
def test_every_metric_that_a_page_names_is_explained(page: Path) -> None:
    groups = {name.split("/")[0] for name in documented() if "/" in name} - {"rewards"}
    named = re.findall(r"`(\w+/[\w/]*\w)`", page.read_text()) if page.name != "log.md" else []
    assert unexplained({name for name in named if name.split("/")[0] in groups}) == []


def test_every_metric_has_a_unit_and_a_healthy_range() -> None:
    for section in METRICS.split("\n## Advice")[0].split("\n## ")[1:]:
        tables = [line for line in section.splitlines() if line.startswith("| ")]
        columns = tables[0].strip("| ").split(" | ")
        assert columns[-1] == "Healthy" and ("Meaning (unit)" in columns or "\nUnit: " in section), tables[0]
        for row in tables[1:]:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            assert len(cells) == len(columns) and all(cells), row


# --- messages, rewards, templates


def test_every_message_of_the_page_stands_in_the_source() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(headings) >= 20
    for heading in headings:
        pieces = [re.escape(piece.strip()) for piece in heading.split("…") if piece.strip(" .;?=")]
        assert re.search("[^\n]*?".join(pieces), source()), heading


def test_the_page_lists_every_built_in_reward_and_template() -> None:
    section = (DOCS / "rewards.md").read_text().split("## Built-in rewards")[1]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(BUILT_IN)
    for names, weights in re.findall(r"`\[([\w, ]+)\]` \| (?:`\[([\d., ]+)\]`|null) \|", section):
        weighted = [float(weight) for weight in weights.split(",")] if weights else None
        Rewards(reward_funcs=names.split(", "), reward_weights=weighted)
        assert set(names.split(", ")) <= set(BUILT_IN)
    named = set(re.findall(r"^\| `(\w+\.jinja)` \|", (DOCS / "data.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in (ROOT / "configs" / "templates").iterdir()}
