"""`bash launch.sh families`: two families of two kinds through the whole loop, by the command that writes the table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit
from tests.support.tier import full

ROOT = Path(__file__).resolve().parents[2]


@full
@pytest.mark.timeout(1200)
def test_two_families_are_built_trained_resumed_and_stand_in_the_table(tmp_path: Path) -> None:
    families = ("smollm3", "granitemoehybrid")
    command = [sys.executable, "tools/families/families.py", *families, "--runs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(1100))
    assert done.returncode == 0, done.stderr[-3000:]
    for family, layout in zip(families, ("shared", "separate"), strict=True):
        facts = json.loads((tmp_path / family / "facts.json").read_text())
        assert facts["exact"]["layout"] == layout and facts["exact"]["gradient"] <= 2e-6
        assert facts["loop"]["loop"] == "yes" and facts["loop"]["canary"] <= 1e-5, facts["loop"]
        assert facts["loop"]["gradient_norm"] > 0
        assert all(side["wrong"] == side["missed"] == [] for side in facts["proof"]["proof"].values())
        assert facts["resume"]["resume"] == "bit for bit"
        assert facts["lora"]["lora"] == "yes", facts["lora"]
        assert f"| {family} | {layout} |" in done.stdout
    assert "Not measured: qwen2, qwen3, llama" in done.stdout
