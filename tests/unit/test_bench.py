"""The benchmarks' arithmetic, by hand. The measurements themselves are run by `bash launch.sh bench`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks import bench, cells, handover
from tools.benchmarks.bench import Summary, summarise
from tools.benchmarks.cells import CELLS, ROOT, Cell, named
from tools.benchmarks.work import step_work

# two layers of width 4 with one head: projections 4 · 4 · 2 · (1 + 1) = 64, feed-forward 3 · 4 · 8 = 96, vocabulary 10
TINY = dict(
    hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, vocab_size=10
)


def test_work_is_counted_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.SHAPES, "tiny", TINY)
    cell = Cell("tiny", prompts=3, generations=2, prompt=4, completion=2)
    # shared: 4 + 2 · 2 = 8 tokens and 8 + 2 · (8 + 2) = 28 pairs; dense: 12 tokens and 16 + 20 = 36 pairs
    head, shared = 2 * 4 * 10 * 4, 2 * 320 * 8
    forward = 3 * (shared + head + 4 * 28 * 4 * 2)
    assert step_work(cell, dense=False).reference == forward
    assert step_work(cell, dense=False).train == 3 * forward
    assert step_work(cell, dense=True).reference == 3 * (2 * 320 * 12 + head + 4 * 36 * 4 * 2)
    assert step_work(cell, dense=True).generate == forward
    assert step_work(cell, dense=False).decode_bytes == 2 * 4 * (320 + 40)  # two tokens, float32


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_a_cell_is_found_by_its_name(cell: Cell) -> None:
    assert named(cell.name) == cell


def test_a_cell_that_is_not_in_the_list_can_be_named_too() -> None:
    assert named("28m-4x32-p100-c20") == Cell("28m", 4, 32, 100, 20)


def test_trl_runs_group_by_group_where_all_sequences_would_not_fit_24_gib() -> None:
    assert all(cell.fits_one_forward for cell in CELLS)
    # 64 · 192 tokens · 30 layers · width 576 · 40 · 4 bytes = 34 GB
    assert not named("smollm2-135m-8x8-p128-c64").fits_one_forward


def record(row: str, wall_s: float, tokens: float = 100.0) -> dict[str, object]:
    return {"row": row, "wall_s": wall_s, "completion_tokens": tokens}


def test_rows_are_summarised_by_median_and_quartiles_in_the_order_of_the_page() -> None:
    records = [record("streaming", w) for w in (1.0, 2.0, 3.0, 4.0, 5.0)] + [record("trl-stock", w) for w in (8, 10)]
    assert summarise(records) == [
        Summary("trl-stock", 9.0, 8.5, 9.5, pytest.approx((100 / 8 + 10) / 2)),
        Summary("streaming", 3.0, 2.0, 4.0, pytest.approx(100 / 3)),
    ]


def step_on(machine: str, row: str, wall_s: float, cell: str = CELLS[0].name, flops: float = 1e9) -> dict[str, object]:
    return record(row, wall_s) | {"cell": cell, "machine": machine, "flops": flops}


def test_a_row_is_compared_with_the_fastest_trl_row_of_its_cell_and_never_with_another_machines() -> None:
    walls = {"trl-stock": 4, "trl-plain": 2, "streaming": 1}
    fast = [step_on("fast", row, s, flops=4e9) for row, s in walls.items() for _ in range(3)]
    slow = [step_on("slow", "streaming", 8.0) for _ in range(3)]
    first, second = bench.tables([*fast, *slow]).split("**slow**")
    name = CELLS[0].name
    assert first.startswith("**fast**; one core does 4 GFLOP/s") and second.startswith("; one core does 1 GFLOP/s")
    floor = step_work(CELLS[0], dense=False).total / 2 / 4e9
    assert f"| {name} | trl-stock | 4.000 (4.000–4.000) | 0.50 | {floor:.2f} |" in first
    assert f"| {name} | streaming | 1.000 (1.000–1.000) | 2.00 | {floor:.2f} |" in first
    assert f"| {name} | streaming | 8.000 (8.000–8.000) | – | {4 * floor:.2f} |" in second


def test_steps_after_the_warm_up_are_added_to_the_file_and_to_no_page_and_a_row_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of 7 s after one of warm-up; the second row fails."""
    cell, out = CELLS[0], tmp_path / "bench.jsonl"
    out.write_text(json.dumps(step_on("b", "streaming", 1)) + "\n")

    def command(row: str, cell: Cell, steps: int, out: Path) -> list[str]:
        lines = [step_on("?", row, 7.0, cell=cell.name) | {"step": i} for i in range(1, steps + 1)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        writes = f"import pathlib; pathlib.Path({str(out)!r}).write_text({text!r})"
        return [sys.executable, "-c", writes if row == "streaming" else "raise SystemExit(1)"]

    for name, stand_in in (("command", command), ("machine", lambda: "a"), ("measured_flops", lambda: 2e9)):
        monkeypatch.setattr(bench, name, stand_in)
    given = f"bench --cells {cell.name} --rows streaming run-ahead --steps 2 --warmup 1 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", given.split())
    bench.main()
    old, first, second = map(json.loads, out.read_text().splitlines())
    assert old["machine"] == "b" and [first["step"], second["step"]] == [2, 3]
    assert {(r["machine"], r["wall_s"], r["flops"]) for r in (first, second)} == {("a", 7.0, 2e9)}
    assert "7.000 (7.000–7.000)" in capsys.readouterr().out and [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize(("row", "program"), [("ladder-seed", "seed_loop"), ("run-ahead", "tandem_run")])
def test_a_row_is_a_program_of_this_folder(row: str, program: str, tmp_path: Path) -> None:
    assert Path(bench.command(row, CELLS[0], 1, tmp_path)[1]) == Path(bench.__file__).with_name(f"{program}.py")
    assert Path(bench.__file__).with_name(f"{program}.py").is_file()


def test_a_machine_is_named_with_its_processor_and_cores() -> None:
    assert re.fullmatch(rf".+, {len(os.sched_getaffinity(0))} cores", bench.machine())


def test_every_row_of_the_page_has_a_command() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert [row for row in bench.ROWS if f"| {row} |" not in page] == []


def test_the_hand_over_is_measured_with_a_samplers_heap_and_starts_again_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr(os, "environ", {"MALLOC_TRIM_THRESHOLD_": "7", "HOME": "/home"})
    handover.start_as_a_sampler()
    (given,) = started
    own = {"MALLOC_TRIM_THRESHOLD_": "7", "MALLOC_MMAP_THRESHOLD_": "67108864", "HOME": "/home"}
    assert given == (sys.executable, sys.orig_argv, own), "what the user has set stays"
    monkeypatch.setattr(os, "environ", own)
    handover.start_as_a_sampler()
    assert len(started) == 1
