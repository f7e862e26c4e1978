"""Compiled decoder layers beside the same layers as they are: numbers, and that no new length compiles anything."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from model import attention, devices
from model.compiled import _MAX_GRAPHS, compile_layers
from model.packing import PackedRow, pack
from tests.support.configs import config_of
from tests.support.threads import threads
from tools.benchmarks.count_operators import as_on_accelerator
from trainer.engine import deepspeed_model
from trainer.engine.deepspeed_model import DeepSpeedModel

WINDOW = 24


@torch.library.custom_op("tandem_test::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Stands for FlexAttention, which has no gradient on a CPU: its mask is written out as [T, T]."""
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, mask = ctx.saved_tensors
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        output = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
    return *torch.autograd.grad(output, leaves, grad), None


attend.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of an engine on this CPU, in the same process
    attention.register()
    torch._dynamo.reset()
    counters.clear()
    with threads(1), torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


def make_model() -> Any:
    config = Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).train()
    model.set_attn_implementation(attention.NAME)
    return model


def rows() -> list[PackedRow]:
    """Twenty rows of different lengths and numbers of groups, some with forks."""
    found = []
    for i in range(20):
        groups = [(list(range(5, 12 + i)), [list(range(20, 24 + i + k)) for k in range(3)]) for _ in range(1 + i % 3)]
        forks = [[((1, 2),), (), ()] for _ in groups] if i % 2 else ()
        found.append(pack(groups, "shared", forks=forks))
    return found


def hidden(model: Any, row: PackedRow) -> Tensor:
    base = model.get_decoder()
    return base(input_ids=row.input_ids, use_cache=False, **attention.options(base, row)).last_hidden_state


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_rows_of_twenty_lengths_are_trained_by_what_the_first_two_compiled(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_flex_attention", lambda q, k, v, mask, *_: attend(q, k, v, mask))
    plain = make_model()
    model = copy.deepcopy(plain)
    compile_layers(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    graphs = []
    with as_on_accelerator():
        for row in rows():
            outputs = [hidden(each, row) for each in (plain, model)]
            torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
            for each, output in zip((plain, model), outputs, strict=True):
                each.zero_grad()
                output.square().mean().backward()
            for ours, expected in zip(model.model.layers.parameters(), plain.model.layers.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-6)
            graphs.append(num_graphs())
    assert not counters["graph_break"]
    assert graphs[1:] == [graphs[1]] * 19 and graphs[-1] <= 4, "layers with a window and without, for any length"


def test_a_compiled_layer_takes_flex_attention_and_the_masks_of_any_row() -> None:
    model = make_model().eval()
    plain, graphs = copy.deepcopy(model), []
    compile_layers(model)
    with torch.no_grad(), mock.patch.object(devices, "is_accelerator", lambda _: True):
        for row in rows()[:8]:
            found = hidden(model, row)
            with mock.patch.object(attention, "is_compiled", lambda _: False):
                torch.testing.assert_close(found, hidden(plain, row), rtol=1e-4, atol=1e-5)
            graphs.append(num_graphs())
    assert not counters["graph_break"] and graphs[2:] == [graphs[2]] * 6


@dataclass(frozen=True)
class Kinds:
    windows: bool = False
    adapters: bool = False
    checkpointing: bool = False
    sinks: bool = False


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        (Kinds(), 3),
        (Kinds(windows=True), 6),
        (Kinds(adapters=True), 4),
        (Kinds(windows=True, adapters=True), 7),
        (Kinds(windows=True, adapters=True, checkpointing=True), 8),
        (Kinds(windows=True, adapters=True, checkpointing=True, sinks=True), 8),
    ],
    ids=str,
)
def test_the_graphs_of_layers_leave_room_below_torchs_limit(
    kinds: Kinds, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "_flex_attention", _attend_with_sinks)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = make_model()
    for i, layer in enumerate(model.model.layers):
        if not kinds.windows:
            layer.self_attn.sliding_window = None
        if kinds.sinks:
            layer.self_attn.sinks = torch.nn.Parameter(torch.full((4,), float(i)))
    if kinds.sinks:
        monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, _attention_with_sinks)
    if kinds.adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).base_model.model
    compile_layers(model)
    if kinds.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with as_on_accelerator():
        for row in rows()[:5]:
            hidden(model.train(), row).square().mean().backward()
            with torch.no_grad():
                hidden(model.eval(), row)
    assert 1 <= num_graphs() <= most
    assert 4 * most <= _MAX_GRAPHS
    assert "not compiled" not in capsys.readouterr().err


def _attention_with_sinks(module: Any, *given: Any, **named: Any) -> Any:
    return attention._attention(module, *given, s_aux=module.sinks, **named)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, _scale: float, _cap: None, sinks: Tensor | None
) -> Tensor:
    output = attend(query, key, value, mask)
    return output if sinks is None else output * torch.sigmoid(sinks)[:, None, None]


REASONS = [
    ({}, None, "compiled as they first run"),
    ({"stage": 3}, None, "not compiled, because ZeRO 3 gathers"),
    ({"sequence_group": "two ranks"}, None, "not compiled, because sequence parallelism is on"),
    ({"packing": "separate"}, None, "not compiled, because its layers cannot share a prompt"),
    ({}, (2, 8), "not compiled, because it has experts"),
]


@pytest.mark.parametrize(("changes", "experts", "expected"), REASONS)
def test_a_sentence_says_whether_layers_are_compiled_and_why_not(
    changes: dict[str, Any],
    experts: Any,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(deepspeed_model, "expert_counts", lambda _: experts)
    monkeypatch.setattr(deepspeed_model.dist, "get_rank", lambda: 0)
    facts = {"stage": 1, "sequence_group": None, "packing": "shared"} | changes
    engine: Any = SimpleNamespace(model=make_model(), config=config_of(), **facts)
    DeepSpeedModel._compile_layers(engine)
    assert f"the layers of a Qwen2ForCausalLM are {expected}" in capsys.readouterr().err
    are_compiled = {layer._compiled_call_impl is not None for layer in engine.model.model.layers}
    assert are_compiled == {"not" not in expected}
