"""The commands of docs/data.md, docs/images.md and docs/rewards.md that start nothing heavy do what the pages say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Rewards
from rewards.find import BUILT_IN
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).resolve().parents[2]


def commands(page: str) -> str:
    """Every bash block of a page as one script, with `check` called directly and what starts engines left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    script = (
        "\n".join(blocks)
        .replace("bash launch.sh check", "PYTHON -m launcher.check_rewards")
        .replace("python3", "PYTHON")
    )
    lines = [line for line in script.splitlines() if not line.startswith("bash launch.sh ")]
    return "\n".join(lines).replace("PYTHON", f"'{sys.executable}'")


@pytest.mark.parametrize(("page", "checks"), [("data.md", 2), ("images.md", 1), ("rewards.md", 4)])
def test_the_commands_of_the_page_run_from_an_empty_folder(page: str, checks: int, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", commands(page)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit(180)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tandem: the rewards look right") == checks
    assert "problem:" not in done.stdout


def test_the_page_lists_every_built_in_reward() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    section = page.split("## Built-in rewards")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(BUILT_IN)
    for names, weights in re.findall(r"`\[([\w, ]+)\]` \| (?:`\[([\d., ]+)\]`|null) \|", section):
        weighted = [float(weight) for weight in weights.split(",")] if weights else None
        Rewards(reward_funcs=names.split(", "), reward_weights=weighted)
        assert set(names.split(", ")) <= set(BUILT_IN)


def test_every_template_of_the_page_is_there_and_none_is_missing_from_it() -> None:
    named = set(re.findall(r"^\| `(\w+\.jinja)` \|", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in (ROOT / "configs" / "templates").iterdir()}
