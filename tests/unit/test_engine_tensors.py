"""Which tensor of an engine is which published one, and what is said where they differ. Layers stand in for vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common.weights import TensorInfo
from model.checksum import describe
from sampler.engine_tensors import EngineModel, prove, prove_adapters
from sampler.proof import Proof, of_ranks
from sampler.vllm_worker import WeightExtension

HIDDEN, VOCABULARY, PADDED = 8, 5, 8


class UnquantizedLinearMethod:
    """On a CPU: keeps a packed copy and drops the plain matrix, as vLLM does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        matrix = layer.weight.data.clone()
        layer.cpu_linear = lambda x, *_: x @ matrix.T
        layer.weight = nn.Parameter(matrix.new_empty(0), requires_grad=False)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Leaves another matrix of another dtype."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.to(torch.float16), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, rows: int, columns: int, sizes: list[int] | None = None, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=torch.bfloat16), requires_grad=False)
        if sizes:
            self.output_partition_sizes = sizes


class VocabParallelEmbedding(Layer):
    pass


class Model(nn.Module):
    """One layer of a model as vLLM has it on a GPU: fused, padded, tied, nothing packed."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(PADDED, HIDDEN)
        self.model.qkv_proj = Layer(16, HIDDEN, [8, 4, 4], bias=True)
        self.model.gate_up_proj = Layer(12, HIDDEN, [6, 6])
        self.model.o_proj = Layer(HIDDEN, HIDDEN)
        self.lm_head = Layer(PADDED, HIDDEN)
        self.lm_head.weight = self.model.embed_tokens.weight

    def load(self, published: dict[str, torch.Tensor]) -> None:
        self.model.embed_tokens.weight.data[:VOCABULARY] = published["model.embed_tokens.weight"]
        self.model.o_proj.weight.data = published["model.o_proj.weight"].clone()
        for kind in ("weight", "bias"):
            parts = [published[f"model.{name}_proj.{kind}"] for name in "qkv"]
            getattr(self.model.qkv_proj, kind).data = torch.cat(parts)
        parts = [published[f"model.{name}_proj.weight"] for name in ("gate", "up")]
        self.model.gate_up_proj.weight.data = torch.cat(parts)


def published(seed: int = 0) -> dict[str, torch.Tensor]:
    shapes = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "o_proj.weight": (HIDDEN, HIDDEN)}
    shapes |= {"q_proj.weight": (8, HIDDEN), "k_proj.weight": (4, HIDDEN), "v_proj.weight": (4, HIDDEN)}
    shapes |= {"gate_proj.weight": (6, HIDDEN), "up_proj.weight": (6, HIDDEN)}
    all_shapes: dict[str, tuple[int, ...]] = shapes | {"q_proj.bias": (8,), "k_proj.bias": (4,), "v_proj.bias": (4,)}
    generator = torch.Generator().manual_seed(seed)
    return {f"model.{k}": torch.randn(s, generator=generator).bfloat16() for k, s in all_shapes.items()}


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: describe(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def model() -> Model:
    model = Model()
    model.load(published())
    return model


def test_fused_and_padded_tensors_hold_the_published_ones_in_order(model: Model) -> None:
    found, homeless = EngineModel(model).layout(expected(published()))
    assert homeless == []
    rows = {name: [(part.name, part.begin, part.rows) for part in parts] for name, parts in found.items()}
    q, k, v = (f"model.{name}_proj.weight" for name in "qkv")
    assert rows["model.qkv_proj.weight"] == [(q, 0, 8), (k, 8, 4), (v, 12, 4)]
    assert rows["model.embed_tokens.weight"] == [("model.embed_tokens.weight", 0, VOCABULARY)]
    assert "lm_head.weight" not in rows, "a tied head is not published"


def test_an_engine_that_holds_what_was_published_is_proven_whole(model: Model) -> None:
    proof = prove(model, expected(published()))
    assert (proof.proven, proof.unproven, proof.wrong) == (set(published()), {}, [])


def test_names_are_those_of_vllms_own_mapper(model: Model) -> None:
    model.hf_to_vllm_mapper = SimpleNamespace(  # type: ignore[assignment]  renames a prefix, and q_proj to qkv_proj
        map_name=lambda name: name.replace("old.", "model.").replace(".q_proj", ".qkv_proj")
    )
    tensors = {name.replace("model.", "old."): t for name, t in published().items()}
    proof = prove(model, expected(tensors))
    assert (proof.proven, proof.wrong) == (set(tensors), [])


Spoil = Callable[[Model], Any]
K_AND_V_SWAPPED = [12, 13, 14, 15, 8, 9, 10, 11]
QKV = "the engine's model.qkv_proj.weight does not hold the published model.{}_proj.weight"
WRONG: dict[str, tuple[Spoil, list[str]]] = {
    "a bit of v": (lambda m: m.model.qkv_proj.weight.data.view(torch.int16)[15, 7].bitwise_xor_(1), [QKV.format("v")]),
    "k and v swapped": (
        lambda m: m.model.qkv_proj.weight.data.copy_(m.model.qkv_proj.weight.data[[*range(8), *K_AND_V_SWAPPED]]),
        [QKV.format("k"), QKV.format("v")],
    ),
    "a padded row": (
        lambda m: m.model.embed_tokens.weight.data[VOCABULARY + 1].fill_(1),
        [f"the engine's {name} has rows behind 5 that are neither published nor zero"
         for name in ("model.embed_tokens.weight", "lm_head.weight")],
    ),
    "a head of its own": (
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.ones(PADDED, HIDDEN))),
        ["nothing was published for the engine's lm_head.weight"],
    ),
    "another layer": (
        lambda m: setattr(m.model, "extra", Layer(2, 2)),
        ["nothing was published for the engine's model.extra.weight"],
    ),
    "no o_proj": (
        lambda m: delattr(m.model, "o_proj"),
        ["the engine has no place for the published model.o_proj.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_differs_is_wrong_by_name(kind: str, model: Model) -> None:
    spoil, said = WRONG[kind]
    spoil(model)
    assert prove(model, expected(published())).wrong == said


def test_a_packed_matrix_is_named_and_left_to_the_canary_and_all_that_is_plain_is_compared(model: Model) -> None:
    for layer in (model.model.qkv_proj, model.model.o_proj):
        UnquantizedLinearMethod().process_weights_after_loading(layer)
    proof = prove(model, expected(published()))
    weights = {"model.o_proj.weight", *(f"model.{name}_proj.weight" for name in "qkv")}
    assert proof.unproven.keys() == weights
    assert proof.unproven["model.q_proj.weight"] == "model.qkv_proj.weight: vLLM packed it for a CPU"
    assert (proof.proven, proof.wrong) == (published().keys() - proof.unproven.keys(), [])
    model.model.qkv_proj.bias.data[15] += 1
    assert prove(model, expected(published())).wrong == [
        "the engine's model.qkv_proj.bias does not hold the published model.v_proj.bias"
    ]


def test_a_bias_that_was_widened_without_loss_is_proven_and_one_that_was_changed_is_not(model: Model) -> None:
    bias = model.model.qkv_proj.bias
    bias.data = bias.data.float()
    assert prove(model, expected(published())).wrong == []
    bias.data[0] += 1e-6
    [said] = prove(model, expected(published())).wrong
    assert said == "the engine's model.qkv_proj.bias does not hold the published model.q_proj.bias"


def test_what_vllm_transforms_or_splits_is_named_and_not_proven(model: Model) -> None:
    down: Any = model.model.o_proj
    down.quant_method = Fp8LinearMethod()
    proof = prove(model, expected(published()))
    assert proof.unproven == {"model.o_proj.weight": "model.o_proj.weight: vLLM transforms it (Fp8LinearMethod)"}
    assert proof.wrong == [] and "model.o_proj.weight" not in proof.proven
    del down.quant_method
    down.weight.data = down.weight.data.half()
    [why] = prove(model, expected(published())).unproven.values()
    assert why == "model.o_proj.weight: vLLM holds it in torch.float16, published is bfloat16"
    model.load(published())
    down.weight.data, down.tp_size = down.weight.data[:, :4].clone(), 2
    [why] = prove(model, expected(published())).unproven.values()
    assert why == "model.o_proj.weight: it is split over 2 ranks"


def test_shards_of_fused_and_of_packed_matrices_are_named_and_not_taken_for_wrong(model: Model) -> None:
    """On a CPU the shard is packed, and what is left of it is empty."""
    info = expected(published())
    model.model.qkv_proj = Layer(8, HIDDEN, [4, 2, 2], bias=True)  # half of each
    down: Any = model.model.o_proj
    model.model.qkv_proj.tp_size = down.tp_size = 2  # type: ignore[assignment]
    down.weight.data = down.weight.data[:, :4].clone()
    UnquantizedLinearMethod().process_weights_after_loading(down)
    proof = prove(model, info)
    split = {"model.o_proj.weight", *(f"model.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias"))}
    assert proof.unproven.keys() == split and proof.wrong == []
    assert proof.proven == info.keys() - split


def test_the_reports_of_several_ranks_are_one() -> None:
    one, other = Proof({"a"}, {"b": "split"}, ["c"], 1.0), Proof({"d"}, {}, ["e"], 2.0)
    assert of_ranks([one, other]) == Proof({"a", "d"}, {"b": "split"}, ["c", "e"], 2.0)


# ---- the worker's own part ------------------------------------------------------------------------------------------


class Worker(WeightExtension):
    """A worker on a GPU, or on a CPU that packs the embedding, and the head only once."""

    def __init__(self, packs: bool) -> None:
        self.model_runner = SimpleNamespace(model=Model())
        self.packs, self.given = packs, list[str]()
        if packs:
            self._pack("embed_tokens").lm_head.cpu_linear = "old"

    def _pack(self, name: str) -> Any:
        model = self.model_runner.model
        getattr(model.model, name).cpu_linear = getattr(model.model, name).weight.data.clone()
        return model

    def reload_weights(self, weights_iterator: Any) -> None:  # type: ignore[override]
        tensors = dict(weights_iterator)
        self.given = list(tensors)
        model = self.model_runner.model
        model.model.embed_tokens.weight = nn.Parameter(torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16))  # a new one
        model.load(tensors)
        if self.packs:
            self._pack("embed_tokens")


@pytest.mark.parametrize("packs", [True, False])
def test_after_a_reload_a_tied_head_is_the_new_embedding_and_multiplies_by_it(packs: bool) -> None:
    worker = Worker(packs)
    for seed in range(2):
        proof = worker.load_weights_from("nowhere", expected(published(seed)), published(seed))
        assert (proof.proven, proof.wrong) == (set(published()), [])
        model = worker.model_runner.model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        if packs:
            assert torch.equal(model.lm_head.cpu_linear[:VOCABULARY], published(seed)["model.embed_tokens.weight"])
    assert worker.load_weights_from("nowhere", None, published()) == Proof()
    stale = worker.load_weights_from("nowhere", expected(published(7)), published())
    assert len(stale.wrong) == len(published()) + 1, "the head is the embedding, so it is wrong as well"


def test_without_tensors_a_worker_reads_the_folder(tmp_path: Path) -> None:
    tensors = published()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:4]}, tmp_path / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[4:]}, tmp_path / "model-2.safetensors")
    worker = Worker(False)
    proof = worker.load_weights_from(str(tmp_path), expected(tensors))
    assert sorted(worker.given) == names and (proof.proven, proof.wrong) == (set(tensors), [])


# ---- under adapters -------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A LoRA layer of vLLM."""

    def __init__(self, base_layer: nn.Module, stacks: Any = None):
        super().__init__()
        self.base_layer = base_layer
        if stacks is not None:
            self.lora_a_stacked, self.lora_b_stacked = stacks.lora_a_stacked, stacks.lora_b_stacked


def test_a_base_of_one_other_bit_is_wrong_by_name(model: Model) -> None:
    for name in ("qkv_proj", "gate_up_proj", "o_proj"):
        setattr(model.model, name, Around(getattr(model.model, name)))
    proof = prove(model, expected(published()))
    assert (proof.proven, proof.unproven, proof.wrong) == (set(published()), {}, [])
    for name in published():
        tensors = published()
        tensors[name].view(torch.int16).view(-1)[5 % tensors[name].numel()] ^= 1
        wrong = prove(model, expected(tensors)).wrong
        assert wrong and all(f"the published {name}" in said for said in wrong), (name, wrong)


# ---- adapters -------------------------------------------------------------------------------------------------------


def adapters(rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}
    prefix, found = "base_model.model.model", {}
    for name, out in rows.items():
        found[f"{prefix}.{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
        found[f"{prefix}.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    return found


def lora_layers(largest: int = 4) -> dict[str, Any]:
    """gate_up_proj has no adapters."""
    tensors, prefix = adapters(), "base_model.model.model"

    def stack(names: list[str], which: str, shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        stacks = tuple(torch.zeros(1, 1, *shape) for shape in shapes)
        for into, name in zip(stacks, names, strict=False):
            tensor = tensors[f"{prefix}.{name}.{which}.weight"]
            into[0, 0, : tensor.shape[0], : tensor.shape[1]] = tensor
        return stacks

    def layer(names: list[str], rows: list[int]) -> Any:
        a = stack(names, "lora_A", [(largest, HIDDEN)] * len(rows))
        return SimpleNamespace(lora_a_stacked=a, lora_b_stacked=stack(names, "lora_B", [(r, largest) for r in rows]))

    qkv = layer(["q_proj", "k_proj", "v_proj"], [8, 4, 4])
    return {"model.qkv_proj": qkv, "model.o_proj": layer(["o_proj"], [8]), "model.gate_up_proj": layer([], [6, 6])}


def prove_layers(layers: dict[str, Any], tensors: dict[str, torch.Tensor], mapper: Any = None) -> Proof:
    model: Any = SimpleNamespace(
        packed_modules_mapping=Model.packed_modules_mapping,
        hf_to_vllm_mapper=mapper,
        named_modules=lambda: [("model", Model()), *layers.items()],
    )
    return prove_adapters(model, expected(tensors))


def test_adapters_are_proven_slice_by_slice() -> None:
    proof = prove_layers(lora_layers(), adapters())
    assert (proof.proven, proof.wrong) == (set(adapters()), [])


def test_adapters_of_a_model_that_sees_are_found_under_vllms_own_names() -> None:
    """vLLM moves the language model to the front, and names LoRA layers without joining q, k and v."""
    renames = SimpleNamespace(map_name=lambda name: name.replace("model.language_model.", "language_model.model.", 1))
    mapper = SimpleNamespace(map_name=lambda name: None, get_rename_mapper=lambda: renames)
    layers = {f"language_model.{path}": layer for path, layer in lora_layers().items()}
    tensors = {name.replace(".model.model.", ".model.model.language_model."): t for name, t in adapters().items()}
    proof = prove_layers(layers, tensors, mapper)
    assert (proof.proven, proof.wrong) == (set(tensors), [])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda la: la["model.qkv_proj"].lora_b_stacked[2][0, 0, 3].mul_(2), "does not hold .*v_proj.lora_B"),
        (lambda la: la["model.o_proj"].lora_a_stacked[0][0, 0, 3].add_(1), "has numbers around .*o_proj.lora_A"),
        (lambda la: la["model.o_proj"].lora_b_stacked[0][0, 0, :, 3].add_(1), "has numbers around .*o_proj.lora_B"),
        (lambda la: la["model.gate_up_proj"].lora_a_stacked[1][0].add_(1), "has a lora_A that nothing was published"),
        (lambda la: la["model.gate_up_proj"].lora_b_stacked[0][0].add_(1), "has a lora_B that nothing was published"),
        (lambda la: la.pop("model.o_proj"), "has no place for .*o_proj.lora_A"),
    ],
)
def test_other_adapters_are_wrong_by_name(spoil: Callable[[dict[str, Any]], Any], said: str) -> None:
    layers = lora_layers()
    spoil(layers)
    wrong = prove_layers(layers, adapters()).wrong
    assert wrong and re.search(said, wrong[0]), wrong
