"""The benchmarks' arithmetic, by hand. The measurements themselves are run by `bash launch.sh bench`."""

import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processor import processor_called
from tools.benchmarks import bench, cells
from tools.benchmarks.cells import CELLS, FORWARDS_OF_A_STEP, ROOT, Cell, forward_flops, named

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


def test_prompts_of_every_length_share_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    monkeypatch.setattr(cells, "make_model", lambda _, folder: (folder.mkdir(parents=True), made.append(folder)))
    folders = [cells.prepare(Cell("1m", prompt=length)) for length in (3, 5, 3)]
    assert len(made) == 1 and len({(folder / "model").resolve(strict=True) for folder in folders}) == 1
    assert [len(json.loads((folder / "train.jsonl").read_text().split("\n")[0])["question"]) for folder in folders] == [
        3,
        5,
        3,
    ]


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


@pytest.mark.parametrize(
    ("processor", "instructions"),
    [
        ("Intel", ", AVX-512"),
        ("AMD", ", AVX-512 with bfloat16"),
        ("older AMD", ", AVX2"),
        ("Arm", ""),
    ],
)
def test_a_measurement_names_the_widest_instructions_of_its_processor(
    processor: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(limit, raising=False)
    cores = len(os.sched_getaffinity(0))
    with processor_called(processor):
        assert bench.machine() == f"{platform.machine()}, {cores} cores{instructions}"


def writes(folder: Path, walls: list[float]) -> list[str]:
    ends = enumerate(itertools.accumulate([0.0, *walls, 9.0]), 1)
    text = "".join(json.dumps({"step": i, "time": end, "completion_tokens": 100.0}) + "\n" for i, end in ends)
    (folder / "run").mkdir()
    return [sys.executable, "-c", f"import pathlib; pathlib.Path('{folder}/run/metrics.jsonl').write_text({text!r})"]


def test_a_commit_and_this_folder_are_measured_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    is_here: list[bool] = []

    def command(row: str, cell: Cell, count: int, folder: Path, root: Path) -> list[str]:
        is_here.append(root == tmp_path)
        assert (root / ".git").exists()
        return writes(folder, [9.0, 2.0 if is_here[-1] else 4.0])

    for name, stand_in in (("command", command), ("machine", lambda: "a"), ("ROOT", tmp_path)):
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(sys, "argv", ["bench", "--against", "HEAD", "--warmup", "2", "--rows", "run-ahead"])
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

    def command(row: str, cell: Cell, count: int, folder: Path, root: Path) -> list[str]:
        return (
            writes(folder, [7.0] * (count - 2)) if row == "streaming" else [sys.executable, "-c", "raise SystemExit(1)"]
        )

    for name, stand_in in (("command", command), ("machine", lambda: "a"), ("measured_flops", lambda: 2e9)):
        monkeypatch.setattr(bench, name, stand_in)
    given = f"bench --cells {cell.name} --rows streaming run-ahead --steps 2 --warmup 1 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", given.split())
    bench.main()
    old, first, second = map(json.loads, out.read_text().splitlines())
    assert old["machine"] == "b" and [first["step"], second["step"]] == [2, 3]
    assert {(r["machine"], r["wall_s"], r["flops"]) for r in (first, second)} == {("a", 7.0, 2e9)}
    assert "7.000 (7.000–7.000)" in capsys.readouterr().out and [*tmp_path.iterdir()] == [out]


def test_every_row_is_a_program_of_this_folder_and_stands_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    monkeypatch.setattr(cells, "prepare", lambda _: tmp_path)
    for row in bench.ROWS:
        program = bench.command(row, CELLS[0], 1, tmp_path)
        assert any(Path(word).is_file() for word in program[1:]) and f"| {row} |" in page
