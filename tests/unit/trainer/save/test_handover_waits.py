"""On an accelerator a version is taken with as many waits for 50 tensors as for 10."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.files.weights import VersionName
from model import devices
from model.checksum import describe
from tests.support.device_waits import DeviceWaits, HostReads
from tests.support.plain_policy import OneRank
from tests.support.versions import CANARY
from trainer.engine.exported import Exported, _form
from trainer.save import write_version
from trainer.save.host_copies import HostCopies
from trainer.save.write_version import Snapshot, snapshot


def taken(tensors: dict[str, Tensor], folder: Path) -> Snapshot:
    embedding = SimpleNamespace(num_embeddings=9)
    engine: Any = SimpleNamespace(published_settings=None, layout=None)
    engine.model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    engine.tensors = [Exported(name, (), lambda t=t: t, _form(t)) for name, t in tensors.items()]  # type: ignore[misc]
    engine.gathered_tensors = lambda some, wanted, to_host: ((t.name, to_host(t.name, t.make())) for t in some)
    ranks: Any = OneRank()
    return snapshot(engine, ranks, VersionName(folder, "run", "ab12", 3), 9, copies=False, memory=HostCopies())


def test_the_waits_for_a_version_do_not_depend_on_its_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU passes for an accelerator."""
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    monkeypatch.setattr(devices, "buffer_on_host", lambda size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(write_version, "canary", lambda *_: CANARY)
    waits = []
    for count in (10, 50):
        tensors = {f"layers.{i}.weight": torch.randn(7 + i, 8).bfloat16() for i in range(count)}
        taken(tensors, tmp_path)  # what is made once
        with DeviceWaits() as asked, HostReads() as read:
            found = taken(tensors, tmp_path)
        waits.append(asked.counts.total() + read.counts.total())
        assert found.device_infos == {name: describe(tensor) for name, tensor in tensors.items()}
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert waits[0] == waits[1] <= 3
