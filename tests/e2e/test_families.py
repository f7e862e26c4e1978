"""`bash launch.sh families`: two families of two kinds through the whole loop, by the command that writes the table."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.own_process import run
from tests.support.tier import full


@full
@pytest.mark.timeout(2500)
def test_two_families_are_built_trained_resumed_and_stand_in_the_table(tmp_path: Path) -> None:
    families = ("smollm3", "granitemoehybrid")
    table = run([sys.executable, "tools/families/families.py", *families, "--runs", str(tmp_path)], 2400)
    for family, layout in zip(families, ("shared", "separate"), strict=True):
        facts = json.loads((tmp_path / family / "facts.json").read_text())
        assert facts["exact"]["layout"] == layout and facts["exact"]["gradient"] <= 2e-6
        assert facts["loop"]["loop"] == "yes" and facts["loop"]["canary"] <= 1e-5, facts["loop"]
        assert facts["loop"]["gradient_norm"] > 0
        assert all(side["wrong"] == side["missed"] == [] for side in facts["proof"]["proof"].values())
        assert facts["resume"]["resume"] == "bit for bit"
        assert facts["lora"]["lora"] == "yes", facts["lora"]
        assert f"| {family} | {layout} |" in table
    assert "Not measured: qwen2, qwen3, llama" in table
