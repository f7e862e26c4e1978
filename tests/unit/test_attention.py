"""Shared-prompt attention against the same stock model run densely, one sequence at a time."""

import contextlib
import copy
import gc
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.types import Forks
from model import attention
from model.packing import Packing, pack
from tests.support.protocol_helpers import make_rollout
from tests.support.threads import threads
from tests.support.tiny import branches, randomise_vectors
from tools.benchmarks.count_operators import Operators, as_on_accelerator

VOCAB = 61
Groups = list[tuple[list[int], list[list[int]]]]
# (prompt length, completion lengths): unequal, several in a row, a prompt of one token, a single completion
SHAPES = [(5, (3, 1, 4)), (1, (2, 2)), (7, (6,)), (4, (1, 1, 1, 9))]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    attention.register()
    with threads(1):
        yield


def make_model(family: str, attn_implementation: str = "sdpa", **changes: Any) -> Any:
    """A random stock model with two query heads to a key head."""
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False}
    settings: dict[str, Any] = sizes | heads | more
    config = getattr(transformers, f"{family}Config")(**settings | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    randomise_vectors(model)
    return model


def exact(model: Any) -> Any:
    """The model in float64 all through: stock norms compute in float32 whatever they are given."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(forward, module)
    return model.double()


def shared(model: Any) -> Any:
    """The same weights, attending over packed rows."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention.NAME)
    return twin


def random_groups() -> Groups:
    rng = np.random.default_rng(0)
    return [
        (rng.integers(0, VOCAB, prompt).tolist(), [rng.integers(0, VOCAB, n).tolist() for n in lengths])
        for prompt, lengths in SHAPES
    ]


def packed_logits(model: Any, groups: Groups, packing: Packing, forks: Any) -> Tensor:
    """Logits that predict each target, in the model's own precision: [N, V]."""
    row = pack(groups, packing, forks=forks)
    decoder = model.get_decoder()
    hidden = decoder(input_ids=row.input_ids, use_cache=False, **attention.options(decoder, row)).last_hidden_state
    hidden = hidden.flatten(0, 1)
    return model.lm_head(hidden[row.source_index])


def dense_logits(model: Any, groups: Groups, forks: Any) -> Tensor:
    parts = []
    for (prompt, completions), of in zip(groups, forks or itertools.repeat(itertools.repeat(())), strict=False):
        for completion, forked in zip(completions, of, strict=False):
            for before, own in branches(prompt, make_rollout(tuple(completion), forks=forked)):
                logits = model(input_ids=torch.tensor([before + own]), use_cache=False).logits[0]
                parts.append(logits[len(before) - 1 : -1])
    return torch.cat(parts)


def forks_of(groups: Groups) -> list[list[Forks]]:
    """Of three tokens and more: one behind the prompt, one two behind its first token."""
    return [
        [((1, len(prompt)), (2, 1), (3, 1))[: max(0, len(completion) - 1)] for completion in completions]
        for prompt, completions in groups
    ]


def gradients(model: Any, scalar: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(model.parameters()))])


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


PRECISION = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["f64", "f32"]
)


def check(dense: Any, packed: Any, packing: Packing, dtype: torch.dtype, tolerance: float) -> None:
    """Logits, and the gradient of their sum along a random direction, of completions without forks and with them."""
    groups = random_groups()
    for forks in ((), forks_of(groups)):
        found, expected = packed_logits(packed, groups, packing, forks), dense_logits(dense, groups, forks)
        assert relative(found, expected) < tolerance
        direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        gradient = gradients(packed, (found * direction).sum())
        assert relative(gradient, gradients(dense, (expected * direction).sum())) < tolerance


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("packing", ["shared", "separate"])
@PRECISION
def test_logits_and_gradients_equal_one_dense_forward_per_sequence(
    family: str, packing: Packing, checkpointing: bool, dtype: torch.dtype, tolerance: float
) -> None:
    dense = exact(make_model(family)) if dtype == torch.float64 else make_model(family)
    packed = shared(dense)
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
    check(dense, packed.train(), packing, dtype, tolerance)


@pytest.fixture(params=["cpu", "accelerator"], autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here runs with the attention of a CPU and with that of an accelerator."""
    with as_on_accelerator() if request.param == "accelerator" else contextlib.nullcontext():
        yield


def test_cudnns_attention_which_plans_every_new_shape_is_switched_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    attention.register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "soft cap and window": (
        "Gemma2",
        {
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
        },
    ),
    "sinks and window": ("GptOss", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("packing", ["shared", "separate"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_soft_caps_and_sinks_are_those_of_one_dense_forward_per_sequence(kind: str, packing: Packing) -> None:
    family, changes = KINDS[kind]
    dense = make_model(family, attn_implementation="eager", **changes)
    check(dense, shared(dense), packing, torch.float32, 2e-6)


def live_bytes() -> int:
    """Of all tensors that Python holds."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_attention_of_a_long_run_keeps_nothing_of_the_rows_before(kind: str) -> None:
    family, changes = KINDS.get(kind, ("Qwen2", {}))
    model = shared(make_model(family, "eager", **changes))

    def train(prompt: int) -> None:
        completion = [1] * (150 - prompt)
        logits = packed_logits(model, [([1] * prompt, [completion] * 2)] * 3, "shared", ())
        logits.sum().backward()

    for prompt in range(92, 100):
        train(prompt)
    before = live_bytes()
    for prompt in range(100, 120):
        train(prompt)
    assert live_bytes() <= before + 1000


def test_a_wish_that_nobody_has_seen_here_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="attention with indices"):
        attention._attention(torch.nn.Module(), *[torch.ones(1, 1, 2, 2)] * 3, None, spans=(), indices=torch.ones(1))


def test_calling_the_model_without_spans_is_refused() -> None:
    with pytest.raises(ValueError, match="needs spans"):
        shared(make_model("Qwen2"))(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)


def test_a_sliding_window_that_holds_every_sequence_changes_nothing() -> None:
    dense = exact(make_model("Qwen2", use_sliding_window=True, sliding_window=13, max_window_layers=0))
    check(dense, shared(dense), "shared", torch.float64, 1e-9)


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_window_that_only_a_layer_knows_has_a_mask_of_its_own(
    is_attribute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, groups = shared(make_model("Qwen2")), random_groups()
    whole = packed_logits(model, groups, "shared", ())
    layer = model.model.layers[1].self_attn
    if is_attribute:
        layer.sliding_window = 3
    else:  # its code alone knows
        layer.__class__ = type("Windowed", (type(layer),), {"sliding_window": property(lambda _: 3)})
    found = packed_logits(model, groups, "shared", ())
    monkeypatch.setattr(attention, "is_compiled", lambda _: False)
    torch.testing.assert_close(found, packed_logits(model, groups, "shared", ()))
    assert relative(found, whole) > 0.01


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_a_layer_takes_as_many_operators_for_16_groups_as_for_one_and_for_forked_ones(kind: str) -> None:
    """Counts two layers, as the difference of four and two, in forward and backward of the accelerators' path."""
    family, changes = KINDS.get(kind, ("Qwen2", {}))

    def of_layers(groups: Groups, forks: Any) -> int:
        totals = []
        for layers in (4, 2):
            model = shared(make_model(family, "eager", **changes | {"num_hidden_layers": layers}))
            with as_on_accelerator(), Operators() as counted:
                packed_logits(model, groups, "shared", forks).sum().backward()
            totals.append(counted.names.total())
        return totals[0] - totals[1]

    one, many = random_groups()[:1], random_groups() * 4
    found = [of_layers(groups, forks) for groups, forks in ((one, ()), (many, ()), (many, forks_of(many)))]
    assert max(found) - min(found) <= 2, found
