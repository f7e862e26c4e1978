"""Which tensor of an engine is which published one, and what is said where they differ. Layers stand in for vLLM's."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common.files.weights import TensorInfo
from model import devices
from model.checksum import describe
from sampler.engine import packed_product
from sampler.engine.adapter_tensors import prove_adapters
from sampler.engine.engine_layout import Layout
from sampler.engine.engine_tensors import Proof, of_ranks, prove, spoil
from sampler.engine.vllm_worker import WeightExtension

HIDDEN, VOCABULARY, PADDED = 8, 5, 8
ROWS = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": HIDDEN}


class Fp8LinearMethod:
    """One of vLLM's that leaves another matrix than the published one."""


class Layer(nn.Module):
    def __init__(self, rows: int, columns: int, sizes: list[int] | None = None, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=torch.bfloat16), requires_grad=False)
        if sizes:
            self.output_partition_sizes = sizes


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
        self.model.embed_tokens = Layer(PADDED, HIDDEN)
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
    rows = ROWS | {"embed_tokens": VOCABULARY, "gate_proj": 6, "up_proj": 6}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    shapes |= {f"{name}_proj.bias": (ROWS[f"{name}_proj"],) for name in "qkv"}
    generator = torch.Generator().manual_seed(seed)
    return {f"model.{k}": torch.randn(s, generator=generator).bfloat16() for k, s in shapes.items()}


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: describe(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def model() -> Model:
    model = Model()
    model.load(published())
    return model


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
        [f"the engine's {name} has numbers that are neither published nor zero"
         for name in ("model.embed_tokens.weight", "lm_head.weight")],
    ),
    "a head of its own": (
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.ones(PADDED, HIDDEN))),
        ["nothing was published for the engine's lm_head.weight"],
    ),
    "no o_proj": (
        lambda m: delattr(m.model, "o_proj"),
        ["the engine has no place for the published model.o_proj.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_what_differs_is_wrong_by_name(
    kind: str, model: Model, on_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, said = WRONG[kind]
    spoil(model)
    monkeypatch.setattr(devices, "is_accelerator", lambda device: on_accelerator)  # the CPU passes for one
    assert prove(model, expected(published())).wrong == said


def packed(layer: Any) -> None:
    """As for a CPU's product: the plain matrix is dropped."""
    layer.weight = nn.Parameter(layer.weight.data.new_empty(0), requires_grad=False)


def shard(layer: Any) -> None:
    layer.weight.data, layer.tp_size = layer.weight.data[:, :4].clone(), 2


def fused_shard(model: Model) -> None:
    model.model.qkv_proj = Layer(8, HIDDEN, [4, 2, 2], bias=True)  # half of each
    model.model.qkv_proj.tp_size = 2  # type: ignore[assignment]


O_PROJ, QKV_WEIGHTS = ["o_proj.weight"], [f"{name}_proj.weight" for name in "qkv"]
QKV_BIASES = [f"{name}_proj.bias" for name in "qkv"]
NOT_COMPARED: dict[str, tuple[Spoil, list[str], str]] = {
    "fused and packed": (lambda m: packed(m.model.qkv_proj), QKV_WEIGHTS, "vLLM packed it for a CPU"),
    "quantised": (
        lambda m: setattr(m.model.o_proj, "quant_method", Fp8LinearMethod()),
        O_PROJ,
        "vLLM transforms it (Fp8LinearMethod)",
    ),
    "cast": (
        lambda m: setattr(m.model.o_proj.weight, "data", m.model.o_proj.weight.data.half()),
        O_PROJ,
        "vLLM holds it in torch.float16, published is bfloat16",
    ),
    "split": (lambda m: shard(m.model.o_proj), O_PROJ, "it is split over 2 ranks"),
    "fused and split": (fused_shard, QKV_WEIGHTS + QKV_BIASES, "it is split over 2 ranks"),
}


@pytest.mark.parametrize("kind", NOT_COMPARED)
def test_what_cannot_be_compared_is_named_and_left_to_the_canary_and_the_rest_compared(kind: str, model: Model) -> None:
    change, names, why = NOT_COMPARED[kind]
    change(model)
    proof = prove(model, expected(published()))
    assert proof.unproven.keys() == {f"model.{name}" for name in names}
    assert all(said.endswith(f": {why}") for said in proof.unproven.values())
    assert (proof.proven, proof.wrong) == (published().keys() - proof.unproven.keys(), [])
    model.model.gate_up_proj.weight.data[11] += 1
    assert [said.rpartition(" ")[2] for said in prove(model, expected(published())).wrong] == ["model.up_proj.weight"]


def test_a_bias_that_was_widened_without_loss_is_proven_and_one_that_was_changed_is_not(model: Model) -> None:
    bias = model.model.qkv_proj.bias
    bias.data = bias.data.float()
    assert prove(model, expected(published())).wrong == []
    bias.data[0] += 1e-6
    [said] = prove(model, expected(published())).wrong
    assert said == "the engine's model.qkv_proj.bias does not hold the published model.q_proj.bias"


def test_the_reports_of_several_ranks_are_one() -> None:
    one, other = Proof({"a"}, {"b": "split"}, ["c"], 1.0), Proof({"d"}, {}, ["e"], 2.0)
    assert of_ranks([one, other]) == Proof({"a", "d"}, {"b": "split"}, ["c", "e"], 2.0)


# ---- what names do not tell ----------------------------------------------------------------------------------------


EXPERTS, WIDTH = 6, 4
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
Tensors = dict[str, torch.Tensor]


class Mixture(nn.Module):
    """Two layers as vLLM has them: experts in one tensor, a state's A = −exp(A_log), a norm; nothing declared."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.mlp, layer.mixer, layer.norm = nn.Module(), nn.Module(), nn.Module()
            layer.mlp.experts = nn.Module()
            layer.mlp.experts.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN))
            layer.mlp.experts.w13_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH))
            layer.mlp.experts.w2 = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH))
            layer.mixer.A = nn.Parameter(torch.zeros(3))
            layer.norm.weight = nn.Parameter(torch.zeros(HIDDEN))
        self.load(mixture(seed))

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            layer: Any = self.model.layers[numbers[0]]
            if "A_log" in name:
                layer.mixer.A.copy_(-tensor.exp())
            elif "norm" in name:
                layer.norm.weight.copy_(tensor)
            else:
                w13, w13_bias, w2 = (getattr(layer.mlp.experts, name)[numbers[1]] for name in ("w13", "w13_bias", "w2"))
                places = {"gate_proj": w13[:WIDTH], "up_proj": w13[WIDTH:], "down_proj": w2, "both_bias": w13_bias}
                next(place for part, place in places.items() if part in name).copy_(tensor)


def mixture(seed: int, scale: float = 1.0) -> Tensors:
    generator, found = torch.Generator().manual_seed(seed), {}
    for i in range(2):
        for e in range(EXPERTS):
            for part, shape in {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}.items():
                found[EXPERT.format(i, e, part)] = scale * torch.randn(shape, generator=generator)
            found[f"model.layers.{i}.mlp.experts.{e}.both_bias"] = torch.randn(2 * WIDTH, generator=generator)
        found[f"model.layers.{i}.mamba.A_log"] = torch.rand(3, generator=generator)
        found[f"model.layers.{i}.norm.weight"] = torch.randn(HIDDEN, generator=generator)
    return found


class Worker(WeightExtension):
    """skips: parts of names that a damaged loader passes over in silence."""

    def __init__(self, model: Any, rank: int = 0, num_workers: int = 1) -> None:
        settings = SimpleNamespace(parallel_config=SimpleNamespace(world_size=num_workers))
        self.model_runner, self.rank = SimpleNamespace(model=model, vllm_config=settings), rank
        self.skips, self.loads = tuple[str, ...](), 0

    def reload_weights(self, weights_iterator: Any) -> None:  # type: ignore[override]
        self.loads += 1
        brought = {name: t for name, t in weights_iterator if not any(part in name for part in self.skips)}
        self.model_runner.model.load(brought)

    def take(self, tensors: Tensors) -> Proof:
        return self.load_weights_from("nowhere", expected(tensors), tensors)


COMPUTED = {f"model.layers.{i}.mamba.A_log" for i in range(2)}


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["random", "all equal at first"])
def test_experts_are_found_by_their_checksums_and_must_stay_where_they_were_found(scale: float) -> None:
    worker = Worker(Mixture(9))
    for seed, of_seed in enumerate((scale, 1.0, 1.0)):
        tensors = mixture(seed, of_seed)
        proof = worker.take(tensors)
        assert (proof.wrong, proof.unproven.keys()) == ([], COMPUTED)
        assert proof.proven == tensors.keys() - COMPUTED
        assert worker.loads == seed + 2, "the first load is made twice: A must have been reached"
    assert {len(rules) for rules in worker.layout.rules.values()} == {1}  # type: ignore[union-attr]


HALF: dict[str, tuple[str, ...]] = {
    "no expert": (".experts.",),
    "half of the experts": (".experts.3.", ".experts.4.", ".experts.5."),
    "one layer": ("layers.1.",),
    "up alone": (".up_proj.",),
    "biases": ("both_bias",),
    "what is computed with": ("A_log",),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize("kind", HALF)
def test_a_load_that_brings_a_part_is_refused_by_name(kind: str, is_first: bool) -> None:
    """At an engine's first load, too: its sampler may have started again in the middle of a run."""
    worker, tensors = Worker(Mixture(9)), mixture(5)
    if not is_first:
        assert worker.take(mixture(4)).wrong == []
    worker.skips = HALF[kind]
    wrong = worker.take(tensors).wrong
    spoiled = {name for name in tensors if any(part in name for part in HALF[kind])}
    named = {name for name in tensors if any(said.endswith(name) or f" {name} " in said for said in wrong)}
    assert spoiled <= named


def swap_rows(layer: int, slots: tuple[int, int], tensor: str = "w13") -> Spoil:
    def swap(model: Any) -> None:
        there = getattr(model.model.layers[layer].mlp.experts, tensor).data
        there[list(slots)] = there[list(slots[::-1])].clone()

    return swap


def swap_layers(model: Any) -> None:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first.w2, second.w2 = second.w2, first.w2


def reverse(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.w2.data.copy_(layer.mlp.experts.w2.data.flip(0))


SWAPPED: dict[str, Spoil] = {
    "all experts, back to front": reverse,
    "two experts of one layer": swap_rows(1, (0, 4)),
    "two experts of a matrix": swap_rows(0, (2, 3), "w2"),
    "two layers": swap_layers,
    "gate and up of an expert": lambda m: (
        m.model.layers[0].mlp.experts.w13.data[5].copy_(m.model.layers[0].mlp.experts.w13.data[5].roll(WIDTH, 0))
    ),
    "one bit": lambda m: m.model.layers[1].mlp.experts.w2.data[5, 7].view(torch.int32)[3].bitwise_xor_(1),
    "one number that is computed": lambda m: m.model.layers[1].mixer.A.data[2].mul_(1 + 1e-5),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize("kind", SWAPPED)
def test_experts_in_each_others_places_are_no_other_layout(kind: str, is_first: bool) -> None:
    model, layout, tensors = Mixture(1), Layout(), mixture(2)
    if not is_first:
        assert prove(model, expected(mixture(1)), layout, mixture(1)).wrong == []
    model.load(tensors)
    SWAPPED[kind](model)
    wrong = prove(model, expected(tensors), layout, tensors).wrong
    assert wrong and all("layers" in said for said in wrong), wrong


def test_experts_that_are_published_in_one_tensor_may_be_transposed() -> None:
    model, tensors = Mixture(1), mixture(1)
    for i in range(2):
        for name, parts in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
            each = [torch.cat([tensors.pop(EXPERT.format(i, e, p)) for p in parts]).T for e in range(EXPERTS)]
            tensors[f"model.layers.{i}.mlp.experts.{name}_proj"] = torch.stack(each)
    assert prove(model, expected(tensors)).wrong == []
    model.model.layers[1].mlp.experts.w2.data[[1, 2]] = model.model.layers[1].mlp.experts.w2.data[[2, 1]]
    assert prove(model, expected(tensors)).wrong


def interleaved(w: torch.Tensor) -> torch.Tensor:
    return w.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def in_blocks(w: torch.Tensor) -> torch.Tensor:
    if w.ndim == 1:
        return w.flip(0)
    return w.unflatten(-1, (2, -1)).transpose(-3, -2).reshape(w.shape)


@torch.no_grad()
def kernel(model: Any, reorder: Callable[[torch.Tensor], torch.Tensor], layers: int = 2) -> None:
    """As a kernel does after a load: w2 of every expert, w13's bias and a norm in another order."""
    for layer in model.model.layers[:layers]:
        layer.mlp.experts.w2.copy_(torch.stack([reorder(w) for w in layer.mlp.experts.w2]))
        layer.mlp.experts.w13_bias.copy_(torch.stack([reorder(w) for w in layer.mlp.experts.w13_bias]))


@pytest.mark.parametrize("reorder", [interleaved, in_blocks, lambda w: w.flip(-1)], ids=["rows", "blocks", "flipped"])
@pytest.mark.parametrize(
    "kind", ["", *[k for k in SWAPPED if k[:4] != "gate"], "old", "one layer alone", "no values at hand"]
)
def test_what_a_kernel_moved_is_unproven_or_wrong(kind: str, reorder: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, tensors = Mixture(1 if kind == "old" else 2), mixture(2)
    if kind in SWAPPED:
        SWAPPED[kind](model)
    kernel(model, reorder, 1 if kind == "one layer alone" else 2)
    proof = prove(model, expected(tensors), None, {} if kind == "no values at hand" else tensors)
    moved = {name for name in tensors if "down_proj" in name or "both_bias" in name}
    if kind:
        assert proof.wrong
    else:
        assert (proof.wrong, proof.unproven.keys()) == ([], moved | COMPUTED)
        assert {why for name, why in proof.unproven.items() if name in moved} == {
            f"model.layers.{i}.mlp.experts.{t}: vLLM has rearranged it" for i in range(2) for t in ("w2", "w13_bias")
        }


@pytest.mark.parametrize("moved", ["rows", "numbers"])
def test_a_single_tensor_with_exchanged_rows_is_wrong_and_one_in_blocks_is_unproven(moved: str, model: Model) -> None:
    w = model.model.o_proj.weight.data
    w.copy_(w[[1, 0, *range(2, HIDDEN)]] if moved == "rows" else in_blocks(w))
    proof = prove(model, expected(published()), None, published())
    assert bool(proof.wrong) is (moved == "rows")
    assert ("model.o_proj.weight" in proof.unproven) is (moved == "numbers")


def multiplying(layer: Any) -> None:
    """Packed as on a CPU: the plain matrix is dropped, the product stays."""
    kept = layer.weight.data.clone()
    layer.input_size_per_partition = kept.shape[1]
    layer.cpu_linear = lambda x, weight, bias: x @ kept.T
    packed(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_named", [True, False], ids=["by name", "by its product"])
@pytest.mark.parametrize("kind", ["right", "one number", "one row", "old", "gate and up exchanged"])
def test_a_packed_matrix_is_asked_what_it_multiplies_by(kind: str, is_named: bool, dtype: torch.dtype) -> None:
    """Also where the model does not declare that gate and up are one, as StableLM's."""
    model, tensors = Model().to(dtype), {name: t.to(dtype) for name, t in published().items()}
    model.load({name: t.to(dtype) for name, t in published(7).items()} if kind == "old" else tensors)
    if not is_named:
        model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[misc]
    w = model.model.gate_up_proj.weight.data
    if kind == "one number":
        w[7, 3] += 0.01
    elif kind == "one row":
        w[7] += 0.01
    elif kind == "gate and up exchanged":
        w.copy_(w.roll(6, 0))
    multiplying(model.model.gate_up_proj)
    proof = prove(model, expected(tensors), None, tensors)
    parts = {"model.gate_proj.weight", "model.up_proj.weight"}
    if kind == "gate and up exchanged" and not is_named:
        assert not proof.wrong, "which is which of two that nobody declares, only the canary can tell"
    else:
        assert bool(proof.wrong) is (kind != "right"), proof.wrong
    assert parts - {said.rpartition(" ")[2] for said in proof.wrong} <= proof.unproven.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("error", [0.0, 0.1])
def test_one_number_of_a_packed_matrix_shows_in_a_sum_of_all_columns(
    error: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_product, "_COLUMNS", 0)
    monkeypatch.setattr(packed_product, "_WORK", 0)  # no column is compared by itself
    model, tensors = nn.Module(), {"layers.0.o_proj.weight": (0.05 * torch.randn(64, 2048)).to(dtype)}
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].o_proj = layer = Layer(64, 2048, [64])
    layer.weight.data = tensors["layers.0.o_proj.weight"].clone()
    layer.weight.data[7, 1000] += error
    multiplying(layer)
    assert bool(prove(model, expected(tensors), None, tensors).wrong) is (error > 0)


@pytest.mark.parametrize("kind", ["right", "one alone", "old"])
def test_packed_matrices_that_are_published_transposed_are_unproven_and_asked(kind: str) -> None:
    """As GPT-2's: in every layer; one alone, or an older one, is wrong."""
    model, tensors = nn.Module(), {f"layers.{i}.c_proj.weight": torch.randn(6, HIDDEN) for i in range(2)}
    model.layers = nn.ModuleList(nn.Module() for _ in range(2))
    brought = {name: torch.randn(6, HIDDEN) for name in tensors} if kind == "old" else dict(tensors)
    if kind == "one alone":
        tensors["layers.0.c_proj.weight"] = brought["layers.0.c_proj.weight"].T.contiguous()
    for i, layer in enumerate(model.layers):
        layer.c_proj = Layer(HIDDEN, 6, [HIDDEN])  # type: ignore[assignment]
        layer.c_proj.weight.data = brought[f"layers.{i}.c_proj.weight"].T.contiguous()
        multiplying(layer.c_proj)
    proof = prove(model, expected(tensors), None, tensors)
    assert bool(proof.wrong) is (kind != "right")
    if kind == "right":
        assert {why.partition(": ")[2] for why in proof.unproven.values()} == {"vLLM has rearranged it"}
        assert proof.unproven.keys() == tensors.keys()


def test_a_matrix_beside_a_layer_s_weight_is_not_asked_what_the_layer_multiplies_by() -> None:
    """A router's correction of ERNIE's mixtures is [1, experts], and stands in the layer of its scores."""
    model, tensors = Model(), published() | {"model.o_proj.correction": torch.ones(1, HIDDEN).bfloat16()}
    model.load(tensors)
    layer: Any = model.model.o_proj
    layer.correction = nn.Parameter(tensors["model.o_proj.correction"].clone())
    kept = layer.weight.data.clone()
    layer.cpu_linear = lambda x, weight, bias: x @ kept.T
    proof = prove(model, expected(tensors), None, tensors)
    assert (proof.proven, proof.wrong) == (set(tensors), [])


def test_a_packed_part_of_a_matrix_is_left_to_the_canary(model: Model) -> None:
    """With tensor parallelism on a CPU: its product is a part of the published one's."""
    layer: Any = model.model.gate_up_proj
    layer.weight.data, layer.output_partition_sizes, layer.tp_size = layer.weight.data[:6].clone(), [3, 3], 2
    multiplying(layer)
    proof = prove(model, expected(published()), None, published())
    assert proof.wrong == [] and {"model.gate_proj.weight", "model.up_proj.weight"} == proof.unproven.keys()


@pytest.mark.parametrize("kind", ["right", "old"])
def test_a_tensor_of_fewer_bits_must_be_the_published_one_rounded(kind: str) -> None:
    model, tensors = Mixture(3 if kind == "old" else 1), mixture(1)
    for layer in model.model.layers:
        layer.norm.weight.data = layer.norm.weight.data.bfloat16()
    proof = prove(model, expected(tensors), None, tensors)
    assert proof.narrow == {f"model.layers.{i}.norm.weight" for i in range(2)}
    assert any(said.endswith("norm.weight") for said in proof.wrong) is (kind == "old")
    assert proof.unproven["model.layers.0.norm.weight"].endswith(
        "vLLM holds it in torch.bfloat16, published is float32"
    )


def test_what_was_compared_once_must_be_comparable_for_ever() -> None:
    model, layout = Mixture(1), Layout()
    assert prove(model, expected(mixture(1)), layout).wrong == []
    packed(model.model.layers[0].norm)
    [said] = prove(model, expected(mixture(1)), layout).wrong
    assert said.startswith("model.layers.0.norm.weight was compared before, and is not now: ")


# ---- the worker's own part ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [True, False], ids=["tensors", "a folder"])
def test_a_reload_is_proven_and_a_tied_head_is_the_embedding(tmp_path: Path, in_memory: bool) -> None:
    worker, names = Worker(Model()), sorted(published())
    for seed in range(2):
        tensors = published(seed)
        for i, part in enumerate((names[:4], names[4:])):
            save_file({name: tensors[name] for name in part}, tmp_path / f"model-{i}.safetensors")
        proof = worker.load_weights_from(str(tmp_path), expected(tensors), tensors if in_memory else None)
        assert (proof.proven, proof.unproven, proof.wrong) == (set(names), {}, [])
    stale = worker.load_weights_from("nowhere", expected(published(7)), published())
    assert len(stale.wrong) == len(names) + 1, "the head is the embedding, so it is wrong as well"


def test_workers_that_map_the_same_files_read_a_share_of_them_each_once_more(tmp_path: Path) -> None:
    save_file(published(1), tmp_path / "model.safetensors")
    shares = []
    for rank in range(2):
        proof = Worker(Model(), rank, 2).load_weights_from(str(tmp_path), expected(published(2)))
        shares.append({said.split()[3] for said in proof.wrong if said.startswith(f"{tmp_path} holds another ")})
    assert min(map(len, shares)) > 1 and shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == published().keys()


# ---- adapters -------------------------------------------------------------------------------------------------------


PREFIX, RANK, LARGEST_RANK = "base_model.model.model", 2, 4


def adapters() -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(3), {}
    for name, rows in ROWS.items():
        found[f"{PREFIX}.{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
        found[f"{PREFIX}.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return found


def lora_layers() -> dict[str, Any]:
    """gate_up_proj has no adapters."""
    tensors = adapters()

    def layer(**rows: int) -> Any:
        a = tuple(torch.zeros(1, 1, LARGEST_RANK, HIDDEN) for _ in rows)
        b = tuple(torch.zeros(1, 1, count, LARGEST_RANK) for count in rows.values())
        for name, of_a, of_b in zip(rows, a, b, strict=True):
            if name in ROWS:
                of_a[0, 0, :RANK] = tensors[f"{PREFIX}.{name}.lora_A.weight"]
                of_b[0, 0, :, :RANK] = tensors[f"{PREFIX}.{name}.lora_B.weight"]
        return SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)

    return {
        "model.qkv_proj": layer(q_proj=8, k_proj=4, v_proj=4),
        "model.o_proj": layer(o_proj=8),
        "model.gate_up_proj": layer(gate_proj=6, up_proj=6),
    }


def prove_layers(layers: dict[str, Any], tensors: dict[str, torch.Tensor], mapper: Any = None) -> Proof:
    model: Any = SimpleNamespace(
        packed_modules_mapping=Model.packed_modules_mapping,
        hf_to_vllm_mapper=mapper,
        named_modules=lambda: [("model", Model()), *layers.items()],
        named_parameters=lambda: [],
        named_buffers=lambda: [("model.layers.0.act_fn.beta", torch.zeros(1).bfloat16())],
    )
    return prove_adapters(model, expected(tensors))


@pytest.mark.parametrize("sees", [False, True], ids=["of a text model", "of a model that sees"])
def test_adapters_are_proven_slice_by_slice(sees: bool) -> None:
    """Of a model that sees vLLM moves the language model to the front, and does not join q, k and v in names."""
    layers, tensors, mapper = lora_layers(), adapters(), None
    if sees:
        renames = SimpleNamespace(map_name=lambda n: n.replace("model.language_model.", "language_model.model.", 1))
        mapper = SimpleNamespace(map_name=lambda name: None, get_rename_mapper=lambda: renames)
        layers = {f"language_model.{path}": layer for path, layer in layers.items()}
        tensors = {name.replace(".model.model.", ".model.model.language_model."): t for name, t in tensors.items()}
    proof = prove_layers(layers, tensors, mapper)
    assert (proof.proven, proof.wrong) == (set(tensors), [])
    assert proof.narrow == {"model.layers.0.act_fn.beta"}, "what the base computes with, and the canary may be off by"


def test_what_vllm_makes_of_published_tensors_must_be_made_anew_by_every_load(model: Model) -> None:
    """Halves of latent attention's kv_b_proj: nothing is published for them, and stale ones would be used."""
    tensors, layout = published(), Layout()
    model.model.W_UV = nn.Parameter(torch.ones(2, 3))
    assert prove(model, expected(tensors), layout).wrong == []
    spoil(model, layout)
    assert "model.W_UV was not made anew" in prove(model, expected(tensors), layout).wrong[0]
    model.model.W_UV.data.fill_(2)
    assert prove(model, expected(tensors), layout).wrong == []


@pytest.mark.parametrize("named", ["one", "two"])
def test_adapters_of_a_layer_that_vllm_cuts_further_are_proven_in_every_part(named: str) -> None:
    """in_proj before a state is one layer with three parts; in_proj_qkv and in_proj_z share one with four."""
    of = {"one": {"in_proj": [4, 2, 2]}, "two": {"q_proj": [4, 2], "k_proj": [2], "v_proj": [3]}}[named]
    path = "model.in_proj" if named == "one" else "model.qkv_proj"
    tensors, a, b = dict[str, torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for leaf, sizes in of.items():
        a_of, b_of = torch.randn(2, 5).bfloat16(), torch.randn(sum(sizes), 2).bfloat16()
        tensors |= {f"base_model.model.model.{leaf}.lora_{w}.weight": t for w, t in (("A", a_of), ("B", b_of))}
        a += [a_of for _ in sizes]
        b += b_of.split(sizes)

    def wrong(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[str]:
        a_stacked, b_stacked = (tuple(t[None, None] for t in parts) for parts in (a, b))
        layer = SimpleNamespace(lora_a_stacked=a_stacked, lora_b_stacked=b_stacked)
        return prove_layers({path: layer}, tensors).wrong

    assert wrong(a, b) == []
    for i in range(len(a)):
        assert wrong([t + (j == i) for j, t in enumerate(a)], b), f"A of part {i}"
        assert wrong(a, [t + (j == i) for j, t in enumerate(b)]), f"B of part {i}"


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
