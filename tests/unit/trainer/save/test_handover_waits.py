"""On an accelerator a version is published, verified and proven with as many waits for 50 tensors as for 10."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.files import weights
from common.files.weights import BadWeights, Manifest, Published, VersionName
from model import devices
from model.checksum import describe
from sampler.engine.engine_tensors import prove, prove_adapters
from sampler.engine.verify import checked_tensors, mapped_tensors
from tests.support.configs import config_of
from tests.support.device_waits import DeviceWaits, HostReads, Operators
from tests.support.plain_policy import OneRank
from tests.support.versions import CANARY
from trainer.engine.exported import Exported, _form
from trainer.save import write_version
from trainer.save.host_copies import HostCopies
from trainer.save.write_version import DeltaWriter, Snapshot, snapshot

FEW, MANY = 10, 50


@pytest.fixture(autouse=True)
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an accelerator."""
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    monkeypatch.setattr(devices, "buffer_on_host", lambda size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(write_version, "canary", lambda *_: CANARY)


def tensors_of(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {f"layers.{i}.own.weight": torch.randn(7 + i, 8, generator=generator).bfloat16() for i in range(count)}


def taken(tensors: dict[str, Tensor], folder: Path) -> Snapshot:
    embedding = SimpleNamespace(num_embeddings=9)
    engine: Any = SimpleNamespace(published_settings=None, layout=None)
    engine.model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    engine.tensors = [Exported(name, (), lambda t=t: t, _form(t)) for name, t in tensors.items()]  # type: ignore[misc]
    engine.gathered_tensors = lambda some, wanted, to_host: ((t.name, to_host(t.name, t.make())) for t in some)
    ranks: Any = OneRank()
    return snapshot(engine, ranks, VersionName(folder, "run", "ab12", 3), 9, copies=False, memory=HostCopies())


def publish(tensors: dict[str, Tensor], folder: Path) -> Published:
    ranks: Any = OneRank()
    return taken(tensors, folder).write(ranks, DeltaWriter(full_every=1))


def verify(published: Published) -> tuple[dict[str, Tensor], Manifest]:
    manifest = weights.read_manifest(published)
    return checked_tensors(Path(published.weights_dir), manifest, config_of()), manifest


class Engine(nn.Module):
    """Each tensor in a layer of its own, in which a row of zeros follows; every other one is widened to float32."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.layers = nn.ModuleList(nn.Module() for _ in tensors)
        for i, (layer, tensor) in enumerate(zip(self.layers, tensors.values(), strict=True)):
            layer.own = nn.Module()
            padded = torch.cat([tensor, torch.zeros(1, 8)]).to(torch.float32 if i % 2 else torch.bfloat16)
            layer.own.weight = nn.Parameter(padded, requires_grad=False)


def layers_with_adapters(count: int) -> tuple[Any, dict[str, Tensor]]:
    generator, published, layers = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Any]()
    for i in range(count):
        a, b = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 6, 4)
        a[..., :2, :], b[..., :2] = torch.randn(2, 8, generator=generator), torch.randn(6, 2, generator=generator)
        published[f"base_model.model.layers.{i}.own.lora_A.weight"] = a[0, 0, :2].clone()
        published[f"base_model.model.layers.{i}.own.lora_B.weight"] = b[0, 0, :, :2].clone()
        layers[f"layers.{i}.own"] = SimpleNamespace(lora_a_stacked=(a,), lora_b_stacked=(b,))
    layers["layers.0.other"] = SimpleNamespace(lora_a_stacked=(torch.zeros(1, 1, 4, 8),) * 2, lora_b_stacked=())
    nothing: Callable[[], list[Any]] = list
    model = SimpleNamespace(named_modules=layers.items, named_parameters=nothing, named_buffers=nothing)
    return model, published


def published(folder: Path, count: int) -> Callable[[], object]:
    tensors = tensors_of(count)
    return lambda: taken(tensors, folder)


def verified(folder: Path, count: int) -> Callable[[], object]:
    version = publish(tensors_of(count), folder)
    manifest, files = weights.read_manifest(version), Path(version.weights_dir)
    mapped = mapped_tensors(files.glob("*.safetensors"))  # safetensors reads its own tensors, which are on the host

    def call() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sampler.engine.verify.mapped_tensors", lambda _: mapped)
            return checked_tensors(files, manifest, config_of())

    return call


def proven(folder: Path, count: int) -> Callable[[], object]:
    tensors = tensors_of(count)
    engine, expected = Engine(tensors), {name: describe(tensor) for name, tensor in tensors.items()}

    def call() -> None:
        proof = prove(engine, expected)
        assert (proof.proven, proof.wrong) == (tensors.keys(), [])

    return call


def adapters_proven(folder: Path, count: int) -> Callable[[], object]:
    model, tensors = layers_with_adapters(count)
    expected = {name: describe(tensor) for name, tensor in tensors.items()}

    def call() -> None:
        proof = prove_adapters(model, expected)
        assert (proof.proven, proof.wrong) == (tensors.keys(), [])

    return call


@pytest.mark.parametrize(("part", "operators"), [(published, 2), (verified, 1), (proven, 12), (adapters_proven, 13)])
def test_the_waits_for_a_version_do_not_depend_on_its_number_of_tensors(
    part: Callable[[Path, int], Callable[[], object]], operators: int, tmp_path: Path
) -> None:
    """Nor do most operators: a tensor has its copies, and those that ask for numbers beside it."""
    waits, launched = dict[int, int](), dict[int, int]()
    for count in (FEW, MANY):
        call = part(tmp_path / str(count), count)
        call()  # what is made once
        with DeviceWaits() as asked, HostReads() as read:
            call()
        with Operators() as ran:
            call()
        waits[count], launched[count] = asked.counts.total() + read.counts.total(), ran.counts.total()
    assert waits[FEW] == waits[MANY] <= 3
    assert launched[MANY] - launched[FEW] <= operators * (MANY - FEW)


def test_what_an_accelerator_verified_is_what_a_cpu_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(tensors_of(FEW), tmp_path)
    found, manifest = verify(published)
    monkeypatch.undo()
    again, _ = verify(published)
    assert all(torch.equal(found[name], again[name]) for name in manifest.tensors)
    assert manifest.tensors == {name: describe(tensor) for name, tensor in tensors_of(FEW).items()}


def test_an_accelerator_refuses_one_changed_bit_by_the_tensor_s_name(tmp_path: Path) -> None:
    published = publish(tensors_of(FEW), tmp_path)
    [file] = Path(published.weights_dir).glob("*.safetensors")
    *rest, last = file.read_bytes()
    file.write_bytes(bytes([*rest, last ^ 1]))
    with pytest.raises(BadWeights, match=r"tensor layers\.\d\.own\.weight is .*expected"):
        verify(published)


def test_a_number_that_is_not_published_is_wrong_though_all_published_ones_are_there() -> None:
    tensors = tensors_of(FEW)
    engine, expected = Engine(tensors), {name: describe(tensor) for name, tensor in tensors.items()}
    engine.layers[2].own.weight.data[-1, 3] = 1e-6
    engine.layers[3].own.weight.data[0, 0] += 1e-6  # a widened one that is not what was published
    assert prove(engine, expected).wrong == [
        "the engine's layers.2.own.weight has numbers that are neither published nor zero",
        "the engine's layers.3.own.weight does not hold the published layers.3.own.weight",
    ]
