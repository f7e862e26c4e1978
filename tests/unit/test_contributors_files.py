"""What contributors look for: the site builds, and the hooks, the public workflow and .ci/run check the same."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ["ruff check", "ruff format --check", "mypy"]


def read(file: str) -> Any:
    return yaml.load((ROOT / file).read_text(), yaml.BaseLoader)  # mkdocs.yml names a function, which is not imported


def pages_of(nav: list[Any]) -> set[str]:
    """["README.md", {"Start": ["a.md"]}] -> {"README.md", "a.md"}"""
    return {page for entry in nav for page in ([entry] if isinstance(entry, str) else next(iter(entry.values())))}


def test_the_site_names_every_page() -> None:
    assert pages_of(read("tools/mkdocs.yml")["nav"]) == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.skipif(find_spec("pymdownx") is None, reason="needs pip install -r tools/locks/dev.txt")
def test_the_site_builds_without_a_dead_heading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()


def test_hooks_and_the_public_workflow_check_what_ci_run_checks() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f".venv/bin/{check}" in ci for check in CHECKS)
    (hooks,) = read(".ci/pre-commit.yaml")["repos"]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in hooks["hooks"]] == CHECKS
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert {"run": "bash .ci/run", "env": {"BACKEND": "cpu"}} in job["steps"]


def test_a_bug_report_asks_for_doctor_and_a_recording() -> None:
    form = {part["id"]: part for part in read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert form["doctor"]["validations"]["required"] == "true" and "doctor" in form["doctor"]["attributes"]["label"]
    assert "run.record=true" in form["recording"]["attributes"]["description"]
