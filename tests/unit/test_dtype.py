"""model.dtype: auto, decided by the processor, and by the run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import decided, dtype, load
from common.config.dtype import multiplies_bfloat16, native_dtype


def cpuinfo(vendor: str, flags: str) -> str:
    """Of two cores, as /proc/cpuinfo has them."""
    core = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu sse2 {flags}\nvmx flags\t: vnmi\n\n"
    return core + core.replace(": 0", ": 1")


@pytest.mark.parametrize(
    ("processor", "faster"),
    [
        (cpuinfo("AuthenticAMD", "avx2 avx512f avx512_bf16 avx512_vnni"), True),  # Zen 4: 205 for 102 GFLOP/s
        (cpuinfo("AuthenticAMD", "avx2"), False),  # Zen 3
        (cpuinfo("AuthenticAMD", "avx2 avx512f"), False),
        (cpuinfo("GenuineIntel", "avx2 avx512f avx512_bf16"), False),  # a Xeon without AMX: slower in bfloat16
        (cpuinfo("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile amx_int8"), True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),  # not x86
        ("", False),
    ],
)
def test_a_processor_multiplies_bfloat16_faster_with_amx_or_amds_avx512(processor: str, faster: bool) -> None:
    assert multiplies_bfloat16(processor) == faster


@pytest.fixture
def zen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whose processor is slower in bfloat16."""
    (tmp_path / "cpuinfo").write_text(cpuinfo("AuthenticAMD", "avx2"))
    monkeypatch.setattr(dtype, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(dtype, "_DRIVERS", (tmp_path / "nvidiactl",))


def a_config(folder: Path, of: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"run: {{output_dir: {folder}/run}}\nmodel: {{path: m, dtype: {of}}}\ndata: {{train: rows.jsonl}}\n"
        "rewards: {reward_funcs: [gsm8k_accuracy]}\n"
    )
    return path


@pytest.mark.usefixtures("zen3")
def test_with_a_gpu_it_is_bfloat16_whatever_the_processor(tmp_path: Path) -> None:
    assert native_dtype() == "float32"
    (tmp_path / "nvidiactl").touch()
    assert native_dtype() == "bfloat16"


@pytest.mark.usefixtures("zen3")
def test_auto_is_decided_when_a_config_is_read_and_told_to_the_other_processes(tmp_path: Path) -> None:
    config = a_config(tmp_path, "auto")
    assert load(config).model.dtype == "float32"
    assert decided(config, []) == ["model.dtype=float32"]


@pytest.mark.usefixtures("zen3")
@pytest.mark.parametrize(("written", "overrides"), [("bfloat16", []), ("auto", ["model.dtype=bfloat16"])])
def test_a_dtype_that_was_given_stays_and_needs_no_override(tmp_path: Path, written: str, overrides: list[str]) -> None:
    config = a_config(tmp_path, written)
    assert load(config, overrides).model.dtype == "bfloat16"
    assert decided(config, overrides) == []


@pytest.mark.usefixtures("zen3")
def test_a_resumed_run_keeps_the_dtype_that_it_began_with_on_another_processor(tmp_path: Path) -> None:
    config = a_config(tmp_path, "auto")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"dtype": "bfloat16"}}))
    assert load(config, ["run.resume=true"]).model.dtype == "bfloat16"
    assert decided(config, ["run.resume=true"]) == ["model.dtype=bfloat16"]
    assert load(config).model.dtype == "float32", "a new run in that folder is told of it elsewhere"


@pytest.mark.usefixtures("zen3")
@pytest.mark.parametrize("left", [None, "", "[]", '{"model": {}}', '{"model": {"dtype": "float16"}}'])
def test_a_run_folder_that_says_nothing_useful_leaves_it_to_the_processor(tmp_path: Path, left: str | None) -> None:
    if left is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.json").write_text(left)
    assert load(a_config(tmp_path, "auto"), ["run.resume=true"]).model.dtype == "float32"
