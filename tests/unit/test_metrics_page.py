"""docs/metrics.md against the code: every metric that can be logged stands in it, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from report.advice_rules import RULES
from tests.support.syntax import functions, tree, walk
from trainer.record.step_records import SAMPLER_TOTALS
from trainer.record.throughput import SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def pattern(node: ast.expr) -> str | None:
    """The text of a string, with <> for what an f-string puts in: f"rewards/{name}/mean" → "rewards/<>/mean"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
    return None


def keys(function: ast.AST) -> Iterator[str]:
    """Keys of dict displays, of dict comprehensions and of assignments such as values["reward"] = …"""
    for node in walk(function):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            found = node.keys
        elif isinstance(node, ast.DictComp):
            found = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found = [node.slice]
        yield from (text for key in found if key is not None and (text := pattern(key)) is not None)


def subscripts(path: Path, name: str) -> Iterator[str]:
    """Constant and f-string keys of `self.name[…]`."""
    for node in walk(tree(path)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == name:
            key = pattern(node.slice)
            yield from [key] if key is not None else []


@cache
def logged() -> frozenset[str]:
    """Names in the code of everything that a line of metrics.jsonl or a sink may hold."""
    names = {"step", "time", "num_non_finite", *SECONDS, *(f"advice/{cause}" for cause in RULES)}
    for path in (ROOT / "trainer").rglob("*.py"):
        for function in functions(path):
            makes = function.name.endswith("_metrics") or (path.stem, function.name) in {
                ("loop", "record"),
                ("step_records", "write"),
                ("step_records", "_learning"),
                ("throughput", "step"),
            }
            names |= set(keys(function)) if makes else set()
        for node in walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("record_seconds", "_record_seconds")
            ):
                names.add(pattern(node.args[0]) or "")
        names |= {f"link/{key}" for key in subscripts(path, "counters")}
    for path in (ROOT / "sampler").glob("*.py"):
        for key in subscripts(path, "stats"):
            names.add(SAMPLER_TOTALS.get(key, key.replace("total/", "timing/sampler_")))
    log_eval = next(f for f in functions(ROOT / "report" / "run_log.py") if f.name == "log_eval")
    names |= set(keys(log_eval))
    return frozenset(names - {"link/<>", ""})  # record() prefixes the counters, which are taken one by one above


def documented() -> set[str]:
    """Names in the first column of the page's tables, <function> and the like as <>."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {re.sub(r"<\w+>", "<>", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def unexplained(names: set[str]) -> list[str]:
    """Of names as they stand in a metrics.jsonl."""
    patterns = [re.compile(re.escape(name).replace("<>", "[^/]+")) for name in documented()]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))


def test_every_metric_that_the_code_logs_is_explained():
    assert sorted(logged() - documented()) == []


def test_every_metric_that_is_explained_is_logged():
    assert sorted(documented() - logged()) == []


def test_every_metric_that_another_page_names_is_explained():
    groups = {name.split("/")[0] for name in documented() if "/" in name} - {"rewards"}  # also a folder of the source
    elsewhere = [path for path in (ROOT / "docs").glob("*.md") if path.name not in ("log.md", "metrics.md")]
    pages = [*ROOT.glob("*.md"), *elsewhere]
    for page in pages:
        named = re.findall(r"`(\w+/[\w/]*\w)`", page.read_text())
        assert unexplained({name for name in named if name.split("/")[0] in groups}) == [], page.name


def test_the_collection_sees_metrics_of_every_kind():
    """Without this a renamed function would make the two tests above agree on nothing."""
    expected = {"reward", "rewards/<>/accuracy", "mismatch/k3", "kl", "grad_norm", "timing/backward_s", "sync/reload_s"}
    expected |= {"wait/sampler_s", "timing/sampler_generate_s", "link/refused/<>", "link/unsent", "eval/<>/accuracy"}
    assert expected | {"e2e_tps", "timing/all_s", "timing/first_step_s", "reward_shaped"} <= logged()


def test_every_row_says_unit_healthy_range_and_what_to_do():
    """A cell of its own, brackets at the meaning's end for the unit, or a line above the table for all rows."""
    rows = 0
    for section in PAGE.split("\n## ")[1:]:
        tables = [line for line in section.splitlines() if line.startswith("| ")]
        columns = tables[0].strip("| ").split(" | ")
        assert columns[-1] == "Otherwise" and ("Healthy" in columns or "Healthy: " in section), tables[0]
        assert "Meaning (unit)" in columns or "\nUnit: " in section, tables[0]
        for row in tables[1:]:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            assert len(cells) == len(columns) and all(cells), row
            assert columns[1] != "Meaning (unit)" or re.search(r" \([^()]+\)$", cells[1]), row
            rows += 1
    assert rows > 90


def test_a_name_of_a_run_is_looked_up_with_its_own_parts():
    names = {"rewards/my_reward/mean", "link/refused/eval_duplicate", "reward"}
    assert unexplained(names | {"rewards/a/b/mean", "rewardz"}) == ["rewards/a/b/mean", "rewardz"]
