"""Devices: what a machine without an accelerator is, and what is asked of one that has it."""

import os
from unittest.mock import Mock, call

import pytest
import torch

from model import devices
from tests.support.configs import config_of
from trainer.engine import process_group
from trainer.save.host_copies import HostCopies


@pytest.mark.parametrize(
    ("vendor", "count", "collectives"),
    [("cuda", 2, "nccl"), ("xpu", 2, "xccl"), ("mps", 2, "gloo"), ("cuda", 0, "gloo")],
)
def test_another_vendor_is_a_name_and_without_an_accelerator_everything_is_the_cpu_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, vendor: str, count: int, collectives: str
) -> None:
    """torch names the vendor that it was built for, also where there is no accelerator."""
    asked: list[object] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(vendor, 0))
    for name in ("set_device_index", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *given, name=name: asked.append((name, *given)))
    assert devices.use(1) == 1
    devices.synchronize()
    devices.release_cache()
    assert asked == ([("set_device_index", 1), ("synchronize",), ("empty_cache",)] if count else [])
    assert devices.first() == (torch.device(vendor, 0) if count else torch.device("cpu"))
    assert devices.is_accelerator(devices.first()) == (count > 0)
    assert devices.collectives() == collectives


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"), [(1, 0, 0), (1, 3, 0), (2, 3, 1), (2, 4, 0), (8, 3, 3), (0, 3, 3)]
)
def test_a_rank_and_deepspeed_use_the_same_device_of_those_that_slurm_lets_it_see(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, expected: int
) -> None:
    class Meets(Exception):
        pass

    def meet(**_: object) -> None:
        raise Meets

    used: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setattr(devices, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(devices, "add_in_order", lambda: None)
    monkeypatch.setattr("deepspeed.init_distributed", meet)
    for name, value in {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(Meets):
        process_group.init_distributed(config_of())
    assert int(os.environ["LOCAL_RANK"]) == expected
    assert used == ([expected] if visible else [])


@pytest.mark.parametrize("is_initialized", [True, False])
def test_an_accelerator_is_in_use_once_this_process_has_its_memory(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool
) -> None:
    """The process in front of vLLM's workers has none: a first use would take hundreds of MB from them."""
    assert devices.in_use() == torch.device("cpu")
    monkeypatch.setattr(devices, "first", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    assert devices.in_use() == torch.device("cuda" if is_initialized else "cpu")


def test_gradients_of_picked_rows_have_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    rows, picked, x = torch.randn(8, 128, requires_grad=True), torch.randint(0, 8, (40_000,)), torch.randn(40_000, 128)
    devices.add_in_order()
    try:
        found = {torch.autograd.grad((rows[picked] * x).sum(), rows)[0].numpy().tobytes() for _ in range(10)}
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == 1


# ---- the memory of copies is one buffer, and used again


def test_copies_lie_in_one_buffer_of_their_size_and_the_next_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    make = devices.buffer_on_host
    monkeypatch.setattr(devices, "buffer_on_host", lambda *given: made.append(make(*given)) or made[-1])
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(33, dtype=torch.bfloat16), "c": torch.tensor(3)}
    host = HostCopies()
    for _ in range(2):
        host.make_room([tensor.nbytes for tensor in tensors.values()])
        copies = {name: host.copy(name, tensor) for name, tensor in tensors.items()}
        devices.synchronize()
        [buffer] = made
        assert buffer.nbytes == 64 + 128 + 64, "rounded to cache lines, not to powers of two"
        places = [copy.data_ptr() - buffer.data_ptr() for copy in copies.values()]
        assert places == [0, 64, 192]
        for name, copy in copies.items():
            assert torch.equal(copy, tensors[name]) and copy.dtype == tensors[name].dtype
        tensors["a"] += 5
        assert copies["a"].tolist() != tensors["a"].tolist()


def test_memory_for_cuda_is_ordinary_memory_registered_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Mock()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    buffer = devices.buffer_on_host(9 << 10, torch.device("cuda"))
    at = buffer.data_ptr()
    assert runtime.mock_calls == [call.cudaHostRegister(at, 9216, 0)]
    del buffer  # the next one may lie there, and CUDA registers no page twice
    assert runtime.mock_calls[1:] == [call.cudaHostUnregister(at)]
