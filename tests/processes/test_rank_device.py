"""Several ranks on one GPU, below DeepSpeed's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from trainer.engine.rank_device import take_device

take_device(os.environ)
found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(found))
"""


@pytest.mark.timeout(240)
def test_deepspeeds_launcher_starts_more_ranks_than_there_are_gpus(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "TANDEM_RANK_DEVICES": "3,3", "PYTHONPATH": str(root)}
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "rank.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [one["RANK"] for one in found] == ["0", "1"]
    assert all((one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) == ("3", "0") for one in found)
