"""The tour on a tiny model: every stop has data, every file that it names exists, and the page tells the same stops."""

import json
import re
from pathlib import Path

import pytest
import yaml

from common.paths import ROOT
from tests.support.tiny import tiny_model
from tools.tour import main


def test_a_group_passes_every_stop_and_named_files_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"What is 1 + {i}?", "answer": f"#### {1 + i}"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "run": {"output_dir": str(tmp_path / "run")},
        "model": {"path": str(tiny_model(tmp_path / "model")), "dtype": "float32"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_prompt_length": 96},
        "sampler": {"max_completion_length": 6},
        "algorithm": {"dead_groups": "keep", "beta": 0.1},
    }
    (tmp_path / "tour.yaml").write_text(yaml.safe_dump(config))
    main([str(tmp_path / "tour.yaml")])
    stops = re.findall(r"^(\d+)\. (.+?)   \[(.+)\]\n    (.+)", capsys.readouterr().out, re.MULTILINE)
    assert [int(number) for number, *_ in stops] == list(range(1, 11))
    told = re.findall(r"^\*\*(\d+)\. (.+)\*\* — `", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert [(number, title.lower()) for number, title in told] == [stop[:2] for stop in stops]
    folder = Path()
    for _, _, files, _ in stops:
        for file in map(Path, files.split(", ")):
            folder = file.parent if len(file.parts) > 1 else folder
            assert (ROOT / folder / file.name).is_file(), file
