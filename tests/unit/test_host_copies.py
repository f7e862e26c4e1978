"""The memory of copies is one buffer, and used again."""

import pytest
import torch

from model import devices
from trainer.save.host_copies import HostCopies


def test_copies_lie_in_one_buffer_of_their_size_and_the_next_ones_in_the_same_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_memory_for_cuda_is_ordinary_memory_registered_as_it_is_and_as_long_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
            return calls.append((f"registered {size} {flags}", at)) or 0

        def cudaHostUnregister(self, at: int) -> int:
            return calls.append(("freed", at)) or 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    buffer = devices.buffer_on_host(9 << 10, torch.device("cuda"))
    at = buffer.data_ptr()
    assert calls == [("registered 9216 0", at)]
    del buffer
    assert calls[1:] == [("freed", at)], "the next one may lie there, and CUDA registers no page twice"
