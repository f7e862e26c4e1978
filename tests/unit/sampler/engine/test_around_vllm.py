"""What is known of vLLM and done around it without starting it: architectures, sleep, precision and shared memory."""

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from common.errors import Retryable
from common.files.shared_memory import remove_orphans
from model.files.engine_models import is_unknown
from sampler.engine.cache_sleep import CacheSleep
from sampler.engine.engine_arguments import engine_arguments, set_environment
from tests.support.own_process import run
from tests.support.protocol_helpers import make_config
from tests.support.speed import limit


@pytest.mark.parametrize(
    ("architecture", "unknown"),
    [
        ("Qwen2ForCausalLM", False),  # vLLM's own
        ("Qwen2VLForConditionalGeneration", False),
        ("SmolLM3ForCausalLM", False),  # its Transformers back end, as vLLM says itself
        ("HeliumForCausalLM", False),  # as transformers' source says
        ("CodeGenForCausalLM", True),  # has an attention of its own
        ("MptForCausalLM", True),  # vLLM had it once
        ("NobodysForCausalLM", True),
    ],
)
def test_what_vllm_has_and_what_its_transformers_back_end_takes_is_known(architecture: str, unknown: bool) -> None:
    assert is_unknown([architecture]) is unknown
    assert not is_unknown([architecture, "LlamaForCausalLM"])


def test_the_answer_takes_less_than_a_second_and_imports_neither() -> None:
    code = (
        "import sys, time; begun = time.monotonic(); from model.files.engine_models import is_unknown; "
        "assert is_unknown(['NobodysForCausalLM']); assert not {'vllm', 'transformers', 'torch'} & set(sys.modules); "
        "print(time.monotonic() - begun)"
    )
    assert float(run([sys.executable, "-c", code])) < limit(1.0)


# ---- its cache sleeps: what vLLM is asked for, and when


def test_finished_requests_are_stepped_away_before_the_cache_sleeps_once_and_it_wakes_once() -> None:
    llm = MagicMock(wake_up=MagicMock(return_value=True))
    cache = CacheSleep(llm)
    for act in (cache.wake, cache.rest, cache.rest, cache.wake, cache.wake):
        act()
    asleep = [call.sleep(level=0, mode="keep"), call.release_kv_cache_memory()]
    assert llm.mock_calls == [*[call.llm_engine.step()] * 4, *asleep, call.wake_up(tags=["kv_cache"])]


@pytest.mark.parametrize("waking", [{"side_effect": RuntimeError("CUDA out of memory")}, {"return_value": False}])
def test_a_cache_that_cannot_wake_ends_the_process_and_names_the_setting(waking: dict[str, Any]) -> None:
    cache = CacheSleep(MagicMock(wake_up=MagicMock(**waking)))
    cache.rest()
    with pytest.raises(Retryable, match=re.escape("set vllm.enable_sleep_mode=false")):
        cache.wake()


# ---- float32 on a GPU: Triton would multiply in TF32, and the canary would refuse good weights

SETTING = "TRITON_F32_DEFAULT"


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "given", "expected"),
    [
        ("float32", False, None, "ieee"),
        ("float32", False, "tf32x3", "tf32x3"),  # what the user has set stays
        ("bfloat16", False, None, None),
        ("float32", True, None, None),
    ],
)
def test_triton_multiplies_in_full_float32_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, on_cpu: bool, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {SETTING: given} if given else {})
    set_environment(make_config(tmp_path, model={"path": "m", "dtype": dtype}), on_cpu)
    assert os.environ.get(SETTING) == expected


# ---- the noise of sequences without a seed comes from one generator of the engine


def test_every_start_of_a_sampler_on_an_accelerator_draws_other_noise_and_on_a_cpu_the_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path, model={"path": "m"}, run={"output_dir": str(tmp_path), "seed": 3})
    seeds = [engine_arguments(config, on_cpu=False)["seed"] for _ in range(20)]
    assert len({*seeds}) == 20 and all(0 <= seed < 2**32 for seed in seeds), "numpy's limits, which vLLM seeds too"
    assert engine_arguments(config, on_cpu=True)["seed"] == 3


# ---- which of the buffers in /dev/shm that killed workers left are deleted


def test_only_buffers_that_no_process_has_mapped_are_deleted(tmp_path: Path) -> None:
    shared, processes = tmp_path / "shm", tmp_path / "proc"
    shared.mkdir()
    for name in ("vllm_dist_aa-tp-[0-1]-cpushm0", "vllm_dist_bb-tp-[0-1]-cpushm0", "psm_other"):
        (shared / name).touch()
    (processes / "17").mkdir(parents=True)
    (processes / "17" / "maps").write_text("7f00-7f01 rw-s 0 00:1a 5  /dev/shm/vllm_dist_bb-tp-[0-1]-cpushm0\n")
    (processes / "self").mkdir()
    assert remove_orphans(shared, processes) == ["vllm_dist_aa-tp-[0-1]-cpushm0"]
    assert sorted(path.name for path in shared.iterdir()) == ["psm_other", "vllm_dist_bb-tp-[0-1]-cpushm0"]
