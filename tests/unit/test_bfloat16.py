"""GPUs below compute capability 8.0: float32 works there, and bfloat16 is refused with a remedy."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

from common.errors import UserError
from launcher import doctor, plan
from launcher.resources.precision import require_bfloat16
from model import attention, devices
from model import compiled as compiling
from model.attention import options
from model.packing import pack
from sampler.engine import engine_arguments
from tests.support.configs import config_of
from trainer.engine import process_group

Capability = tuple[int, int]
CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (9, 0)]
every_capability = pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
REMEDY = "set model.dtype=float32"


def refusal(check: Callable[[], None]) -> str:
    """What the refusal says; "" if there is none."""
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def is_right(said: str, capability: Capability, asks: bool) -> bool:
    """Whether bfloat16 that is asked for is refused below 8.0, with the value and the remedy."""
    if not asks or capability >= (8, 0):
        return said == ""
    return ".".join(map(str, capability)) in said and REMEDY in said


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's program, whose second GPU has the capability in the file that is returned."""
    capability = tmp_path / "capability"
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "0, 9.0"\necho "1, $(cat {capability})"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return capability


@every_capability
@pytest.mark.parametrize(
    ("dtype", "of_vllm", "gpus", "needs"),
    [
        ("bfloat16", None, ([0], [1]), True),
        ("bfloat16", None, ([1], [0]), True),
        ("bfloat16", None, ([0], [0]), False),
        ("float32", None, ([1], [1]), False),
        ("float32", "bfloat16", ([1], [0]), True),
        ("float32", "bfloat16", ([0], [1]), False),
        ("bfloat16", "float32", ([1], [0]), False),
    ],
)
def test_the_launcher_refuses_bfloat16_on_a_gpu_without_it(
    driver: Path,
    capability: Capability,
    dtype: str,
    of_vllm: str | None,
    gpus: tuple[list[int], list[int]],
    needs: bool,
) -> None:
    driver.write_text(".".join(map(str, capability)))
    vllm = {} if of_vllm is None else {"dtype": of_vllm}
    config = config_of(model={"dtype": dtype}, vllm=vllm)
    said = refusal(lambda: require_bfloat16(config, *gpus))
    assert is_right(said, capability, asks=needs)


def test_a_gpu_that_does_not_report_its_capability_is_taken(driver: Path) -> None:
    driver.write_text("[N/A]")
    require_bfloat16(config_of(), [1], [1])


@every_capability
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_refuses_bfloat16_on_a_gpu_without_it(
    driver: Path,
    capability: Capability,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver.write_text(".".join(map(str, capability)))
    monkeypatch.setattr(plan, "visible_gpus", lambda _: (1, 0))
    monkeypatch.setattr(plan, "_plan", lambda *_: 0)  # what follows reads a model
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  path: m\ndata:\n  train: t.jsonl\n")
    code = plan.main([str(path), f"model.dtype={dtype}"])
    said = capsys.readouterr().err
    assert is_right(said, capability, asks=dtype == "bfloat16")
    assert code == (2 if said else 0)


@every_capability
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rank_refuses_bfloat16_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, capability: Capability, dtype: str
) -> None:
    class Meets(Exception):
        pass

    def meet() -> None:
        raise Meets

    monkeypatch.setattr(devices, "use", lambda index: index)
    monkeypatch.setattr(devices, "first", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "compute_capability", lambda _: capability)
    monkeypatch.setattr(devices, "collectives", lambda: "nccl")
    monkeypatch.setattr(process_group, "guard_ops", meet)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    config = config_of(model={"dtype": dtype})
    said = ""
    try:
        process_group.init_distributed(config)
    except UserError as error:
        said = str(error)
    except Meets:
        pass
    assert is_right(said, capability, asks=dtype == "bfloat16")


class DeviceCapability(NamedTuple):
    """As vLLM has it."""

    major: int
    minor: int


class Platform:
    """vLLM's, of a machine with one kind of GPU."""

    def __init__(self, capability: Capability | None, is_cuda: bool = True) -> None:
        self._capability = None if capability is None else DeviceCapability(*capability)
        self._is_cuda = is_cuda

    def is_cuda(self) -> bool:
        return self._is_cuda

    def get_device_capability(self) -> DeviceCapability | None:
        return self._capability


@every_capability
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("section", ["model", "vllm"])
def test_the_sampler_refuses_bfloat16(capability: Capability, dtype: str, section: str) -> None:
    other = {"model": {"dtype": "float32"}}
    config = config_of(**(other | {section: {"dtype": dtype}}))
    said = refusal(lambda: engine_arguments.require_bfloat16(config, Platform(capability)))
    assert is_right(said, capability, asks=dtype == "bfloat16")
    engine_arguments.require_bfloat16(config, Platform(None))
    engine_arguments.require_bfloat16(config, Platform((7, 5), is_cuda=False))


@every_capability
def test_doctor_names_float32_for_a_gpu_without_bfloat16(capability: Capability) -> None:
    check = doctor.gpu("Tesla T4", ".".join(map(str, capability)))
    assert check.ok == (capability >= (7, 5))
    said = check.text if check.ok else check.fix
    assert (REMEDY in said) == (capability < (8, 0))


# ---- float32 on such a GPU


@pytest.fixture
def compilations(capability: Capability, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Makes the CPU a GPU of this capability. Returns the functions that were compiled.

    They run as they are, because there is no Triton.
    """
    asked: list[object] = []

    def compile_it(function: object, **_: object) -> object:
        asked.append(function)
        return function

    monkeypatch.setattr(devices, "is_accelerator", lambda _: True)
    monkeypatch.setattr(devices, "compute_capability", lambda _: capability)
    monkeypatch.setattr(torch, "compile", compile_it)
    compiling._compiled.cache_clear()
    attention._block_mask.cache_clear()
    yield asked
    compiling._compiled.cache_clear()
    attention._block_mask.cache_clear()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@every_capability
def test_functions_are_compiled_where_triton_runs(compilations: list[object], capability: Capability) -> None:
    x = torch.arange(3.0)
    assert compiling.is_compiled(x) == (capability >= (8, 0))
    assert compiling.compiled(doubled, x).tolist() == [0, 2, 4]
    assert compilations == ([doubled] if capability >= (8, 0) else [])


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=str)
def test_attention_of_an_old_gpu_is_that_of_the_cpu_group_by_group(
    compilations: list[object], capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = pack([([1, 2, 3], [[4, 5], [6]]), ([7, 8], [[9], [10, 11, 12]])])
    base = tiny_base()
    on_gpu = base(row.input_ids, use_cache=False, **options(base, row)).last_hidden_state
    assert compilations == []
    monkeypatch.undo()
    on_cpu = base(row.input_ids, use_cache=False, **options(base, row)).last_hidden_state
    assert torch.equal(on_gpu, on_cpu)


def tiny_base() -> torch.nn.Module:
    """A decoder without its head, whose rows share prompts."""
    attention.register()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, attn_implementation=attention.NAME)
    return Qwen2Model(config).eval()
