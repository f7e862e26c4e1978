"""Devices: what a machine without an accelerator is, and what is asked of one that has it."""

from types import SimpleNamespace

import pytest
import torch

from model import devices


def test_without_an_accelerator_everything_is_the_cpu_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for name in ("set_device_index", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: pytest.fail("there is none"))
    devices.use(1)
    devices.synchronize()
    devices.release_cache()
    cpu = devices.first()
    assert cpu.type == "cpu" and not devices.is_accelerator(cpu)
    assert (devices.name(cpu), devices.collectives()) == ("", "gloo")


@pytest.mark.parametrize(("vendor", "collectives"), [("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo")])
def test_another_vendor_is_a_name(monkeypatch: pytest.MonkeyPatch, vendor: str, collectives: str) -> None:
    asked: list[object] = []
    device = torch.device(vendor, 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    for name in ("set_device_index", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *given, name=name: asked.append((name, *given)))
    monkeypatch.setattr(torch, "get_device_module", lambda d: SimpleNamespace(get_device_name=lambda d: f"A {d.type}"))
    devices.use(1)
    devices.synchronize()
    devices.release_cache()
    assert asked == [("set_device_index", 1), ("synchronize",), ("empty_cache",)]
    assert (devices.first(), devices.is_accelerator(device), devices.name(device)) == (device, True, f"A {vendor}")
    assert devices.collectives() == collectives


def test_gradients_of_picked_rows_have_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    rows, picked, x = torch.randn(8, 128, requires_grad=True), torch.randint(0, 8, (40_000,)), torch.randn(40_000, 128)
    devices.add_in_order()
    try:
        found = {torch.autograd.grad((rows[picked] * x).sum(), rows)[0].numpy().tobytes() for _ in range(10)}
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == 1
