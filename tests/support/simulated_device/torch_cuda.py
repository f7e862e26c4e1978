"""torch.cuda for the simulated device: functions that a torch without CUDA has not, or that would look for a driver."""

import contextlib
from typing import Any

import torch

from tests.support.simulated_device.card import MEMORY, Card


class Stream:
    """A stream on which everything is done already."""

    device = torch.device("cuda", 0)
    device_index = stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """An event that has happened already."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Runtime:
    """torch.cuda.cudart(): of ordinary memory that is registered nothing changes."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def install(card: Card) -> None:
    """Replaces these functions, from now on."""
    stream = Stream()
    properties = card.properties()
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: card.capability,
        "get_device_name": lambda *_: card.name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "cudart": Runtime,
        "check_error": lambda code: None,
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "set_rng_state": lambda state, *_: torch.default_generator.set_state(state),
        "manual_seed": lambda *_: None,  # the CPU's generator draws for it
        "manual_seed_all": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
    }
    for name, function in functions.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        setattr(torch._C, name, lambda *_: 0)
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
