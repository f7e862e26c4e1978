"""The benchmarks' arithmetic, by hand. The measurements themselves are run by `bash launch.sh bench`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmarks import bench, cells
from tools.benchmarks.cells import CELLS, ROOT, Cell, named
from tools.benchmarks.work import FORWARDS_OF_A_STEP, forward_flops

# two layers of width 4 with one head: projections 4 · 4 · 2 · (1 + 1) = 64, feed-forward 3 · 4 · 8 = 96, vocabulary 10
TINY = dict(
    hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, vocab_size=10
)


def test_work_is_counted_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of three prompts 4 + 2 · 2 = 8 tokens, 4 of them through the head, and 8 + 2 · (8 + 2) = 28 pairs."""
    monkeypatch.setitem(cells.SHAPES, "tiny", TINY)
    cell = Cell("tiny", prompts=3, generations=2, prompt=4, completion=2)
    assert forward_flops(cell) == 3 * (2 * 320 * 8 + 2 * 4 * 10 * 4 + 4 * 28 * 4 * 2)
    assert FORWARDS_OF_A_STEP == 5


def test_a_cell_is_found_by_its_name_and_trl_trains_by_groups_where_all_would_not_fit_24_gib() -> None:
    assert [named(cell.name) for cell in CELLS] == CELLS and all(cell.fits_one_forward for cell in CELLS)
    assert named("28m-4x32-p100-c20") == Cell("28m", 4, 32, 100, 20)
    # 64 · 192 tokens · 30 layers · width 576 · 40 · 4 bytes = 34 GB
    assert not named("smollm2-135m-8x8-p128-c64").fits_one_forward


def steps(machine: str, flops: float, **walls: list[float]) -> list[dict[str, object]]:
    common = {"machine": machine, "flops": flops, "cell": CELLS[0].name, "completion_tokens": 100.0}
    return [common | {"row": row.replace("_", "-"), "wall_s": wall} for row, each in walls.items() for wall in each]


def test_rows_have_medians_and_quartiles_beside_the_fastest_trl_row_of_their_cell_and_machine() -> None:
    fast = steps("fast", 4e9, streaming=[1.0, 2.0, 3.0, 4.0, 5.0], trl_stock=[24.0, 24.0], trl_plain=[6.0, 6.0])
    first, second = bench.tables([*fast, *steps("slow", 1e9, streaming=[8.0, 8.0])]).split("**slow**")
    floor = 5 * forward_flops(CELLS[0]) / 2 / 4e9
    assert first.strip().splitlines()[-3:] == [
        f"| {CELLS[0].name} | trl-stock | 24.000 (24.000–24.000) | 0.25 | {floor:.2f} |",
        f"| {CELLS[0].name} | trl-plain | 6.000 (6.000–6.000) | 1.00 | {floor:.2f} |",
        f"| {CELLS[0].name} | streaming | 3.000 (2.000–4.000) | 2.00 | {floor:.2f} |",
    ]
    assert f"| {CELLS[0].name} | streaming | 8.000 (8.000–8.000) | – | {4 * floor:.2f} |" in second


def writes(out: Path, row: str, walls: list[float]) -> list[str]:
    lines = [line | {"step": i} for i, line in enumerate(steps("?", 1e9, **{row: walls}), 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return [sys.executable, "-c", f"import pathlib; pathlib.Path({str(out)!r}).write_text({text!r})"]


def test_a_commit_and_this_folder_are_measured_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    is_here: list[bool] = []

    def command(row: str, cell: Cell, count: int, out: Path, root: Path) -> list[str]:
        is_here.append(root == tmp_path)
        assert (root / ".git").exists()
        return writes(out, row, [9.0, 2.0 if is_here[-1] else 4.0])

    for name, stand_in in (("command", command), ("machine", lambda: "a"), ("ROOT", tmp_path)):
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(sys, "argv", ["bench", "--against", "HEAD", "--warmup", "1", "--rows", "run-ahead"])
    bench.main()
    assert is_here == [False, True, True, False]
    said = f"{CELLS[1].name}: run-ahead: 4.000 s at HEAD, 2.000 s here, 0.500 times, on a"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert len(subprocess.check_output(["git", "worktree", "list"], cwd=tmp_path).splitlines()) == 1
    monkeypatch.setattr(bench, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(SystemExit, match="nothing to compare"):
        bench.main()


def test_steps_after_the_warm_up_are_added_to_the_file_and_to_no_page_and_a_row_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of 7 s after one of warm-up; the second row fails."""
    cell, out = CELLS[0], tmp_path / "bench.jsonl"
    out.write_text(json.dumps(steps("b", 1e9, streaming=[1.0])[0]) + "\n")

    def command(row: str, cell: Cell, count: int, out: Path, root: Path) -> list[str]:
        return writes(out, row, [7.0] * count) if row == "streaming" else [sys.executable, "-c", "raise SystemExit(1)"]

    for name, stand_in in (("command", command), ("machine", lambda: "a"), ("measured_flops", lambda: 2e9)):
        monkeypatch.setattr(bench, name, stand_in)
    given = f"bench --cells {cell.name} --rows streaming run-ahead --steps 2 --warmup 1 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", given.split())
    bench.main()
    old, first, second = map(json.loads, out.read_text().splitlines())
    assert old["machine"] == "b" and [first["step"], second["step"]] == [2, 3]
    assert {(r["machine"], r["wall_s"], r["flops"]) for r in (first, second)} == {("a", 7.0, 2e9)}
    assert "7.000 (7.000–7.000)" in capsys.readouterr().out and [*tmp_path.iterdir()] == [out]


def test_every_row_is_a_program_of_this_folder_and_stands_on_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for row in bench.ROWS:
        assert Path(bench.command(row, CELLS[0], 1, tmp_path)[1]).is_file() and f"| {row} |" in page
