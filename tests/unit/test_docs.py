"""The pages against the code: links, commands, settings, metrics, messages and the frameworks' keys exist."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from common.config import Config, Rewards, load, reference_page
from common.config.loading import known_keys
from common.paths import ROOT
from launcher.__main__ import COMMANDS
from report.advice import RULES
from rewards.find import BUILT_IN
from tests.support import syntax
from tests.support.metrics_page import documented, unexplained
from tests.support.speed import limit
from tests.unit.test_imports import SOURCES

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "configs").rglob("*.md")])
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIG_FILE = re.compile(r"^cat > (\S+\.yaml) <<'(\w+)'\n(.*?)^\2", re.MULTILINE | re.DOTALL)
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


def test_every_page_is_in_the_index_and_on_the_site() -> None:
    index = {link.partition("#")[0] for link in links(DOCS / "README.md")} | {"README.md"}
    site = set(re.findall(r"\w+\.md", (ROOT / "tools" / "mkdocs.yml").read_text().split("\nnav:\n")[1]))
    assert {path.name for path in DOCS.glob("*.md")} <= index & site


@every_page
def test_commands_configs_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"(?<=bash launch\.sh )[a-z-]+\b(?!=)", text)) - {"and", "or", "has"} <= COMMANDS.keys()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"runs"}
    named = re.findall(r"(?:`|(?<=configs))\b(\w+/[\w./-]+)", text) if page.name != "log.md" else []
    named = [name.rstrip("./") for name in named if name.split("/")[0] in folders and "." in Path(name).name]
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def commands(page: Path) -> list[list[str]]:
    """The words of every `bash launch.sh …` in the page's blocks."""
    script = "\n".join(BASH.findall(page.read_text())).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in re.findall(r"^bash launch\.sh.*$", script, re.MULTILINE)]


@every_page
def test_the_settings_of_a_pages_commands_and_examples_load(page: Path, tmp_path: Path) -> None:
    """Of files of ours, and of those that a page writes. What the commands do is tested by the stories."""
    written = {name: text for each in PAGES for name, _, text in CONFIG_FILE.findall(each.read_text())}
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in commands(page):
        for name in [word for word in words if word in written or re.fullmatch(r"configs/.+\.yaml", word)]:
            overrides = [word for word in words if re.match(r"[a-z]+\.\w+=[^$]", word)]
            load((tmp_path if name in written else ROOT) / name, overrides)


def test_the_chinese_readme_has_the_same_links_commands_and_headings() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README_zh.md"
    assert [link.replace("README_zh", "README") for link in links(english)] == links(chinese)
    assert commands(english) == commands(chinese)
    for mark in ("## ", "- ", "| "):
        count = [len(re.findall(f"^{re.escape(mark)}", page.read_text(), re.M)) for page in (english, chinese)]
        assert count[0] == count[1], mark


@pytest.mark.parametrize(("code", "again"), [(75, ["sbatch job.sh"]), (0, []), (2, [])])
def test_the_batch_job_of_the_page_submits_itself_until_it_is_done(code: int, again: list[str], tmp_path: Path) -> None:
    [job] = [block for block in BASH.findall((DOCS / "running.md").read_text()) if "sbatch" in block]
    (tmp_path / "launch.sh").write_text(f'echo "$@" >>said\nexit {code}\n')
    job = 'sbatch() { echo sbatch "$@" >>said; }\n' + job
    done = subprocess.run(["bash", "-c", job], cwd=tmp_path, timeout=limit(60), check=False)
    words = "run my_task/run.yaml run.output_dir=runs/long trainer.max_hours=11.8 run.resume=false"
    assert (done.returncode, (tmp_path / "said").read_text().splitlines()) == (code, [words, *again])


# --- settings


def test_the_reference_page_is_the_code_and_gives_every_setting_a_meaning() -> None:
    page = reference_page.page()
    assert (DOCS / "config.md").read_text() == page, "run: .venv/bin/python -m common.config.reference_page"
    rows = [line.strip() for line in page.splitlines() if line.startswith("  ")]
    assert len(rows) > 100 and [row for row in rows if not re.fullmatch(r"\w+:.*  # \S.*", row)] == []
    assert "dist_backend: auto  # or nccl, gloo. auto: nccl on GPUs, else gloo." in rows


@every_page
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    if page.name in ("coming_from.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        return  # other frameworks' keys, modules, and what is gone
    sections = "|".join(name for name in Config.model_fields if name not in ("vllm", "deepspeed"))
    named = re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z]\w*(?:\.\w+)?)(?=[=`\s,;)])", page.read_text())
    found = {key for key in named if not key.endswith((".md", ".json", ".py", ".yaml", ".jsonl"))}
    assert found <= set(known_keys())


@pytest.mark.parametrize("framework", ["TRL", "verl", "EasyR1", "OpenRLHF", "MindSpeed-RL"])
def test_every_key_of_ours_that_others_are_sent_to_exists(framework: str) -> None:
    (section,) = re.findall(rf"^## {framework}\b.*?(?=^## |\Z)", (DOCS / "coming_from.md").read_text(), re.M | re.S)
    same = "".join(re.findall(r"^Same name: ((?:`[^`]+`[,.]\s)+)", section, re.MULTILINE))
    rows = re.findall(r"^\| `.+?` \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) + same.count("`") // 2 >= 25
    for ours in [*rows, same]:
        named = set(re.findall(r"`([\w.]+)`", re.sub(r"\([^)]*\)", "", ours)))  # in brackets stand their words
        assert named and named <= set(known_keys()), ours


# --- metrics


@every_page
def test_every_metric_that_a_page_names_is_explained(page: Path) -> None:
    groups = {name.split("/")[0] for name in documented() if "/" in name} - {"rewards"}
    named = re.findall(r"`(\w+/[\w/]*\w)`", page.read_text()) if page.name != "log.md" else []
    assert unexplained({name for name in named if name.split("/")[0] in groups}) == []
    assert {f"advice/{cause}" for cause in RULES} == {name for name in documented() if name.startswith("advice/")}


# --- messages, rewards, templates


def test_every_message_of_the_page_stands_in_the_source() -> None:
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) >= 20
    for heading in headings:
        pieces = [re.escape(piece.strip()) for piece in heading.split("…") if piece.strip(" .;?=")]
        assert re.search("[^\n]*?".join(pieces), source), heading


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


# ---- RELIABILITY.md has a row for every promise, and names tests that exist

RELIABILITY = (DOCS / "RELIABILITY.md").read_text()
ROWS = {line.split("|")[1].strip(): line for line in RELIABILITY.splitlines() if re.match(r"\| R\d+ \|", line)}
REFERENCE = re.compile(r"`(?:tests/\w+/)?(test_\w+\.py)(?:::(\w+))?`")


@cache
def functions(file: str) -> set[str]:
    """Of the files of that name, in the folders of several tiers."""
    paths = list((ROOT / "tests").rglob(file))
    assert paths, f"{file} does not exist"
    return {function.name for path in paths for function in syntax.functions(path)}


def test_every_promise_is_held_by_tests_that_exist() -> None:
    assert list(ROWS) == [f"R{n}" for n in range(1, 17)]
    named = {promise: REFERENCE.findall(row) for promise, row in ROWS.items()}
    for page in ("SECURITY.md", "gpu.md"):
        named[page] = REFERENCE.findall((DOCS / page).read_text())
    for promise, tests in named.items():
        assert tests, promise
        for file, function in tests:
            known = functions(file)
            assert function in known or not (function or promise.startswith("R")), f"{promise}: {file}::{function}"
