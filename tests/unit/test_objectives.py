"""The comparison of objectives: its settings, what it records, and its arithmetic by hand. It is run by the bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.config.loading import parse
from tools.benchmarks import objectives
from tools.benchmarks.objectives import METHODS, folder_of, forget, raw_lines, recorded, settings
from tools.benchmarks.objectives_page import FinishedRun, draw, page, read, table, verdicts


def run(after: float, update_s: float = 1.0) -> FinishedRun:
    return FinishedRun([1, 2], [50.0, after], [(0, 48.0), (1, 50.0), (2, after)], update_s, 0.2, 0.1, 0.5, 1.0, 0.9)


@pytest.mark.parametrize("method", METHODS)
def test_settings_differ_from_grpos_in_the_estimator_alone(method: str) -> None:
    chosen, grpo = (settings(m, 1, 60, Path("run")) for m in (method, "GRPO"))
    assert Config.model_validate(chosen).algorithm.adv_estimator == METHODS[method][0]
    for of in (chosen, grpo):
        of.pop("critic", None)
        for key in ("adv_estimator", "group_params", "gamma", "lam"):
            of["algorithm"].pop(key, None)
    assert chosen == grpo


def write_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    steps = [{"step": s, "rewards/answer/accuracy": 0.5, "timing/backward_s": float(s), "wall": 9.0} for s in (1, 2)]
    evaluations = [{"step": s, "n": 8, "full_marks": {"answer": 2 + s}} for s in (0, 2)]
    for name, rows in (("metrics", steps), ("eval", evaluations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_finished_run_becomes_raw_lines_that_say_all_the_page_needs(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    lines = raw_lines("GRPO", 3, 2, tmp_path / "run")
    of = {"method": "GRPO", "seed": 3, "steps": 2}
    assert lines[0] == of | {"step": 1, "rewards/answer/accuracy": 0.5, "timing/backward_s": 1.0}
    assert lines[2:] == [of | {"step": 0, "held_out": 0.25, "n": 8}, of | {"step": 2, "held_out": 0.5, "n": 8}]
    found = read(lines)
    assert (found.gain, found.update_s, found.head_s, found.threshold) == (25.0, 1.5, 0.0, None)


def test_recorded_runs_are_not_trained_again_and_a_new_one_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []

    def train(method: str, seed: int, steps: int, runs: Path) -> Path:
        trained.append((method, seed))
        write_run(folder := folder_of(method, seed, steps, runs))
        return folder

    monkeypatch.setattr(objectives, "train", train)
    monkeypatch.setattr(objectives, "draw", lambda found: b"")
    monkeypatch.setattr(objectives.subprocess, "run", lambda *_, **__: None)
    where = ["--results", str(tmp_path / "r.jsonl"), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]

    def call(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["objectives.py", "--steps", "2", *arguments, *where])
        objectives.main()

    call("--seeds", "0", "--methods", "GRPO")
    call("--seeds", "0", "1", "--methods", "GRPO", "PPO (GAE)")
    assert trained == [("GRPO", 0), ("PPO (GAE)", 0), ("GRPO", 1), ("PPO (GAE)", 1)]
    assert len(recorded(tmp_path / "r.jsonl", 2)) == 4 and not recorded(tmp_path / "r.jsonl", 60)
    call("--seeds", "1", "--methods", "GRPO", "--again")
    assert trained[4:] == [("GRPO", 1)]
    assert "GRPO learned: its smallest gain is 25.0 points" in (tmp_path / "objectives.md").read_text()


def test_forgetting_a_run_leaves_the_others(tmp_path: Path) -> None:
    path, other = tmp_path / "r.jsonl", {"method": "GRPO", "seed": 1, "steps": 60}
    rows: list[dict[str, Any]] = [other, other | {"seed": 0}, other | {"steps": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run(tmp_path / "folder")
    forget(path, [tmp_path / "folder"], [("GRPO", 1)], 60)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[1:]
    assert not (tmp_path / "folder").exists()


def test_the_table_gives_the_mean_and_the_range_over_seeds() -> None:
    row = table({"GRPO": [run(80.0), run(90.0)]}).splitlines()[-1]
    assert row.startswith("| GRPO | 48.0 (48.0–48.0) | 50.0 (50.0–50.0) | 85.0 (80.0–90.0) | 37.0 (32.0–42.0)")


def test_only_a_difference_beyond_the_range_of_the_seeds_is_called_one() -> None:
    ppo = [run(80.0, 2.0), run(84.0, 2.2)]
    said = verdicts({"PPO (GAE)": ppo, "GROUP PPO, segment": [run(83.0, 1.0), run(57.9, 1.1)]})
    assert said[1].startswith("- GROUP PPO, segment did not learn: its smallest gain is 9.9 points")
    method, accuracy, update, head = (cell.strip() for cell in said[-1].strip("|").split("|"))
    assert method == "GROUP PPO, segment" and accuracy == "-11.5, within the seeds"
    assert update == "-1.05, better" and head.endswith("within the seeds")


def test_one_seed_decides_nothing() -> None:
    said = verdicts({"PPO (GAE)": [run(80.0)], "GROUP PPO, segment": [run(70.0)]})
    assert said[-1].count("one seed decides nothing") == 3


def test_the_same_results_draw_the_same_picture_and_the_page_shows_it() -> None:
    found = {"GRPO": [run(80.0)], "GROUP PPO, segment": [run(70.0)]}
    picture = draw(found)
    assert picture == draw(found)
    assert picture.startswith(b"<?xml") and b"GROUP PPO, segment" in page(found, 60, [0]).encode()
    assert "(objectives.svg)" in page(found, 60, [0])


def test_the_two_configs_with_a_critic_differ_in_the_estimator_alone() -> None:
    gae, group_ppo = (
        parse((objectives.ROOT / "configs" / name).read_text()) for name in ("ppo_gae.yaml", "group_ppo.yaml")
    )
    assert {of["algorithm"].pop("adv_estimator") for of in (gae, group_ppo)} == {"gae", "group_ppo"}
    assert group_ppo["algorithm"].pop("group_params")
    assert gae["run"].pop("output_dir") != group_ppo["run"].pop("output_dir")
    assert gae == group_ppo
