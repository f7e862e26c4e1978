"""Functions and layers that do not compile: what is computed, said and remembered."""

import copy
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

from model import attention, compiled, log_softmax
from model.attention import _block_mask
from model.compiled import compile_layers
from model.log_softmax import LogSoftmaxAt
from model.packing import PackedRow, Span, pack
from tests.support.forget_compiled import forget_compiled
from tests.support.operators import LargestTensor
from tests.support.raising import raising
from tests.support.threads import threads
from tools.benchmarks.count_operators import written_out

SHARED_MEMORY = "out of resource: shared memory, Required: 114688, Hardware limit: 101376."


class Compiler:
    """A compiler that refuses some lengths, as torch asks it: once for each graph."""

    def __init__(self) -> None:
        self.length = 0  # of the row that is computed
        self.refused: Callable[[int], bool] = lambda _: False
        self.error: Exception = RuntimeError("no choice for this shape")
        self.num_attempts = 0
        self.takes_symbolic_floats = True
        self.backend: Callable[..., Any] = lambda graph, _inputs: graph.forward

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_attempts += 1
        is_symbolic = any(isinstance(x, torch.SymFloat) or getattr(x, "dtype", None) == torch.float64 for x in inputs)
        if self.refused(self.length) or (is_symbolic and not self.takes_symbolic_floats):
            raise self.error
        return self.backend(graph, inputs)


def work(x: Tensor) -> Tensor:
    """Adds 1 where it is compiled; has a graph for short rows and one for long rows."""
    doubled = x * 2 if x.shape[0] < 128 else x + x
    return doubled + 1 if torch.compiler.is_compiling() else doubled


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of an engine on this CPU, in the same process
    monkeypatch.setattr(compiled, "is_compiled", lambda _: True)
    monkeypatch.setattr(attention, "is_compiled", lambda _: True)
    used = Compiler()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=used))
    attention.register()
    forget_compiled()
    with threads(1), torch._dynamo.config.patch(disable=False):
        yield used
    forget_compiled()


def is_fast(compiler: Compiler, length: int, function: Callable[..., Tensor] = work, **named: Any) -> bool:
    """Returns whether a row of this length was computed by compiled code."""
    compiler.length = length
    [value] = set(compiled.compiled(function, torch.ones(length), **named).tolist())
    assert value in (2, 3)
    return value == 3


def test_a_row_that_does_not_compile_leaves_the_rows_after_it_compiled(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.refused = lambda length: length < 128
    assert [is_fast(compiler, length) for length in (100, 300, 100, 70, 500, 1000)] == [
        False, True, False, False, True, True,
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert said.count("for 100 ") == said.count("for 70 ") == 1, "each shape once"
    assert said.count("no choice for this shape") == 2


def test_a_row_next_to_one_that_does_not_compile_is_compiled(compiler: Compiler) -> None:
    compiler.refused = lambda length: length == 100
    assert [is_fast(compiler, length) for length in (100, 101, 99)] == [False, True, True]
    assert is_fast(compiler, 100), "what the others compiled serves this length, too"


def test_two_hundred_lengths_that_do_not_compile_cost_ten_attempts(compiler: Compiler) -> None:
    compiler.refused = lambda length: length < 1300
    assert not any(is_fast(compiler, length) for length in range(1050, 1250) for _ in range(2))
    assert compiler.num_attempts <= 10
    assert any(is_fast(compiler, length) for length in range(1300, 2000)), "they are tried again, ever more rarely"


def test_lengths_that_are_compiled_stay_so_among_those_that_are_not(compiler: Compiler) -> None:
    def branching(x: Tensor) -> Tensor:
        doubled = x * 2 if x.shape[0] % 2 else x + x
        return doubled + 1 if torch.compiler.is_compiling() else doubled

    compiler.refused = lambda length: length % 2 == 1
    lengths = list(range(140, 160))
    assert [is_fast(compiler, length, branching) for length in lengths] == [n % 2 == 0 for n in lengths]


def test_a_failure_with_gradients_leaves_rows_without_gradients_compiled(compiler: Compiler) -> None:
    compiler.refused = lambda _: True
    trained = compiled.compiled(work, torch.ones(200, requires_grad=True))
    assert set(trained.tolist()) == {2}
    compiler.refused = lambda _: False
    for length in (200, 210, 220):
        with torch.no_grad():
            assert is_fast(compiler, length)


def test_the_head_of_a_long_chunk_is_compiled_after_a_short_one_failed(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_softmax.devices, "is_accelerator", lambda _: True)
    compiler.refused = lambda length: length < 128
    for length in (20, 300):
        compiler.length = length
        logits = torch.randn(length, 50)
        targets = torch.arange(length) % 50
        expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        before = compiler.num_attempts
        torch.testing.assert_close(LogSoftmaxAt.apply(logits, targets, None, 1.0, True, False)[0], expected)
        assert compiler.num_attempts == before + 1


def test_a_backward_that_does_not_compile_is_found_before_the_forward_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=raising(RuntimeError(SHARED_MEMORY)))
    monkeypatch.setattr(torch, "compile", lambda function, **_: torch._dynamo.optimize(backend, dynamic=True)(function))
    for length in (40, 200):
        leaf = torch.full((length,), 3.0, requires_grad=True)
        compiled.compiled(torch.square, leaf).sum().backward()
        assert leaf.grad is not None and set(leaf.grad.tolist()) == {6}
    assert "Required: 114688, Hardware limit: 101376" in capsys.readouterr().err


def test_what_no_length_changes_is_tried_once_for_its_kind(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.error = torch.OutOfMemoryError(SHARED_MEMORY)
    compiler.refused = lambda _: True
    for length in (40, 41, 200, 3000):
        assert not is_fast(compiler, length, kind="heads of 256")
    assert compiler.num_attempts == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "heads of 256" in said and "101376" in said
    compiled.abandon({"heads of 256"})
    assert not capsys.readouterr().err, "the agreement of all ranks says nothing anew"
    compiler.refused = lambda _: False
    assert is_fast(compiler, 200, kind="heads of 64")


def test_memory_that_runs_out_within_the_compiler_is_memory_that_runs_out(compiler: Compiler) -> None:
    compiler.error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    compiler.refused = lambda _: True
    with pytest.raises(torch.OutOfMemoryError):
        is_fast(compiler, 200)
    compiler.refused = lambda _: False
    assert is_fast(compiler, 200)


def test_the_early_end_of_a_recomputation_is_no_failure(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    leaf = torch.ones(200, requires_grad=True)
    checkpoint(functools.partial(compiled.compiled, torch.sin), leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.ones(200).cos())
    assert "not compiled" not in capsys.readouterr().err


def test_more_graphs_than_torch_allows_leave_the_first_ones_in_use(compiler: Compiler) -> None:
    """A function with a number has a graph for each number, as attention has for each scale."""

    def scaled(x: Tensor, factor: float) -> Tensor:
        return x * factor + torch.compiler.is_compiling()

    found = [compiled.compiled(scaled, torch.ones(200), float(i)).tolist()[0] for i in [*range(30), 0]]
    assert found == [i + 1.0 for i in [*range(30), 0]]


# ---- the mask -----------------------------------------------------------------------------------------------


def spans(*prompts: int) -> tuple[Span, ...]:
    groups = [([1] * prompt, [[1] * 40, [1] * 75, [1] * 9]) for prompt in prompts]
    forks = [[((3, 30),), (), ((2, 1), (4, 3))] for _ in prompts]
    return pack(groups, forks=forks).spans


@pytest.mark.parametrize("window", [None, 50, 200])
def test_a_mask_that_does_not_compile_is_the_same_without_a_tensor_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: raising(RuntimeError("Failed to find C compiler")))
    rows = spans(700, 60, 900)
    tree = attention.ancestry(rows)
    length = tree.shape[1]
    with LargestTensor() as largest:
        found = _block_mask(rows, window, torch.device("cpu"))
    assert largest.numel <= 128 * (length + 128)
    expected = attention._mask_of(tree, length if window is None else window)
    assert found.shape == expected.shape
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    positions = torch.arange(length)
    pairs = (positions, positions, positions[:, None], positions)
    assert torch.equal(found.mask_mod(*pairs), expected.mask_mod(*pairs))


def test_the_mask_of_a_row_is_compiled_after_that_of_another_row_was_not(compiler: Compiler) -> None:
    compiler.refused = lambda length: length == 1
    for compiler.length, prompt in enumerate((300, 20, 500), 1):
        before = compiler.num_attempts
        _block_mask(spans(prompt), None, torch.device("cpu"))
        assert compiler.num_attempts > before or compiler.length == 3


# ---- layers -------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two layers, one of them with a window, whose FlexAttention has its mask written out."""
    flex = attention._flex_attention
    monkeypatch.setattr(attention, "_block_mask", lambda row, window, _: _pairs(row, window))
    monkeypatch.setattr(attention, "_flex_attention", lambda *given: _written_out(flex, *given))
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, use_sliding_window=True, sliding_window=24, max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def _pairs(row: tuple[Span, ...], window: int | None) -> Tensor:
    tree = attention.ancestry(row)
    return written_out(attention._mask_of, tree, tree.shape[1] if window is None else window)


def _written_out(flex: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)


def hidden_states(model: Any, row: PackedRow) -> Tensor:
    base = model.get_decoder()
    options = attention.options(base, row)
    return base(input_ids=row.input_ids, use_cache=False, **options).last_hidden_state


def hidden(compiler: Compiler, model: Any, prompt: int, plain: Any) -> Tensor:
    """Returns a row's hidden states, which must be those of the model that is not compiled."""
    row = pack([([7] * prompt, [[1, 2, 3], [4, 5]])])
    compiler.length = row.input_ids.shape[1]
    with torch.no_grad():
        found = hidden_states(model, row)
        expected = hidden_states(plain, row)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return found


def test_layers_are_compiled_after_a_row_that_did_not_compile(
    compiler: Compiler, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = copy.deepcopy(model)
    compile_layers(model)
    compiler.refused = lambda length: length < 32
    hidden(compiler, model, 10, plain)
    failed = compiler.num_attempts
    hidden(compiler, model, 10, plain)
    assert compiler.num_attempts == failed, "not again for the same row"
    assert capsys.readouterr().err.count("for 1 × 15 × 32 Qwen2DecoderLayer is not compiled") == 2, "both kinds"
    attempts = []
    for prompt in (40, 45, 50, 55):
        hidden(compiler, model, prompt, plain)
        attempts.append(compiler.num_attempts)
    assert failed < attempts[0] and attempts[2] == attempts[3], "both kinds are compiled, for any length"
    assert "not compiled" not in capsys.readouterr().err


def test_a_layer_beyond_the_number_of_graphs_says_so(
    compiler: Compiler, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = compiled._set_for_dynamo

    def change_and_limit() -> Callable[[], None]:
        restore = change()
        torch._dynamo.config.recompile_limit = 1
        return restore

    monkeypatch.setattr(compiled, "_set_for_dynamo", change_and_limit)
    plain = copy.deepcopy(model)
    compile_layers(model)
    for prompt in (40, 45, 50):
        hidden(compiler, model, prompt, plain)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tandem: Qwen2DecoderLayer")]
    assert len(said) == 1 and "recompile_limit" in said[0]


def test_code_of_a_layer_that_torch_gives_up_is_said_once(
    compiler: Compiler, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def forward(x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
        return mlp(x)

    for layer in model.model.layers:
        mlp = layer.mlp.forward
        layer.mlp.forward = forward
    plain = copy.deepcopy(model)
    compile_layers(model)
    for prompt in (40, 45, 50):
        hidden(compiler, model, prompt, plain)
    said = capsys.readouterr().err
    assert 1 <= said.count("code of Qwen2DecoderLayer cannot be compiled") <= 2, "at most once for a kind of layer"


def test_attention_that_is_abandoned_goes_group_by_group_in_compiled_layers(
    compiler: Compiler, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = copy.deepcopy(model)
    compile_layers(model)
    hidden(compiler, model, 40, plain)
    torch.compiler.reset()
    compiled.abandon({"attention with heads of 16 in torch.float32"})
    assert "attention with heads of 16 in torch.float32 is not compiled" in capsys.readouterr().err
    attempts = []
    for prompt in (40, 45, 50, 55, 60):
        hidden(compiler, model, prompt, plain)
        attempts.append(compiler.num_attempts)
    assert attempts[2:] == [attempts[2]] * 3, "no row compiles anything anew"
    assert "not compiled" not in capsys.readouterr().err


NO_CHOICE = "no choice for this shape"


@pytest.mark.parametrize(
    ("are_layers_compiled", "refused", "error"),
    [
        (False, {1}, NO_CHOICE),  # what the second layer compiles would serve the first one
        (False, {1}, SHARED_MEMORY),
        (False, {1, 2}, SHARED_MEMORY),
        (True, {1}, NO_CHOICE),
        (True, {1, 2}, NO_CHOICE),
        (True, {1, 2}, SHARED_MEMORY),  # the first layer and its attention
        (True, {1, 2, 3, 4}, SHARED_MEMORY),  # both layers, which compile without their attention
    ],
)
def test_recomputed_layers_repeat_what_their_forward_did(
    compiler: Compiler, model: Any, are_layers_compiled: bool, refused: set[int], error: str
) -> None:
    compiler.refused = lambda _: compiler.num_attempts in refused
    compiler.error = RuntimeError(error)
    compiler.backend = aot_eager
    train_with_recomputation(model, are_layers_compiled)


def test_a_layer_is_recomputed_with_the_attention_that_a_later_layer_cannot_compile(
    compiler: Compiler, model: Any
) -> None:
    """The first layer's attention has no gradient, so no backward that needs shared memory."""
    model.model.embed_tokens.requires_grad_(False)
    first, second = model.model.layers
    first.requires_grad_(False).mlp.requires_grad_(True)
    second.self_attn.sliding_window = None
    compiler.refused = lambda _: compiler.num_attempts in (2, 3)
    compiler.error = RuntimeError(SHARED_MEMORY)
    compiler.backend = aot_eager
    train_with_recomputation(model, are_layers_compiled=True)


def train_with_recomputation(model: Any, are_layers_compiled: bool) -> None:
    """Computes gradients of rows, which must be those of the model that is not compiled."""
    plain = copy.deepcopy(model)
    if are_layers_compiled:
        compile_layers(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    # torch runs the backward of a GPU in a thread of its own
    with ThreadPoolExecutor(1) as gpu_thread:
        for prompt in (40, 45, 50):
            row = pack([([7] * prompt, [[1, 2, 3], [4, 5]])])
            for each in (model, plain):
                each.zero_grad()
                loss = hidden_states(each, row).square().mean()
                gpu_thread.submit(loss.backward).result()
            for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("own_window", [None, 5], ids=["no window", "a window of the layers alone"])
def test_a_recomputation_that_compiles_does_so_as_the_forward_did(
    compiler: Compiler,
    model: Any,
    own_window: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More graphs than torch allows a function by itself, one for each layer's scale, which may not be symbolic."""
    monkeypatch.setattr(attention, "_flex_attention", _scaled)
    first = model.model.layers[0]
    model.model.layers = torch.nn.ModuleList(copy.deepcopy(first) for _ in range(10))
    model.config.num_hidden_layers, model.config.layer_types = 10, ["full_attention"] * 10
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.1 + 0.01 * i
        layer.self_attn.sliding_window = own_window
    plain = copy.deepcopy(model)
    compile_layers(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    compiler.takes_symbolic_floats = False
    compiler.backend = aot_eager  # which saves other tensors for backward than the layer as it is
    row = pack([([7] * 40, [[1, 2, 3], [4, 5]])])
    loss = hidden_states(model, row).square().mean()
    assert compiler.num_attempts == 10
    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as gpu_thread:  # torch runs the backward of a GPU in a thread of its own
        gpu_thread.submit(loss.backward).result()
    assert compiler.num_attempts == 20
    for ours, expected in zip(model.parameters(), _gradients_without_compiler(plain, row, monkeypatch), strict=True):
        torch.testing.assert_close(ours.grad, expected, rtol=1e-3, atol=1e-6)
    assert "not compiled" not in capsys.readouterr().err


def _scaled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, *_: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query * scale, key, value, mask, scale=1.0)


def _gradients_without_compiler(model: Any, row: PackedRow, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "is_compiled", lambda _: False)
        patched.setattr(attention, "is_compiled", lambda _: False)
        model.zero_grad()
        hidden_states(model, row).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@torch.library.custom_op("tandem_test::shift", mutates_args=())
def shift(x: Tensor) -> Tensor:
    """Calls a compiled function while compiled code runs."""
    return x + compiled.compiled(work, x.new_ones(300))[0] - 3


@shift.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("nested", [False, True], ids=["layers", "layers with a compiled function inside"])
def test_functions_that_a_user_compiles_keep_torchs_settings(compiler: Compiler, model: Any, nested: bool) -> None:
    """By default torch makes one graph for all floats, and calls a function as it is where graphs are too many."""
    for layer in model.model.layers if nested else ():
        mlp = layer.mlp.forward
        layer.mlp.forward = lambda x, mlp=mlp: shift(mlp(x))
    compile_layers(model)
    with torch.no_grad():
        hidden_states(model, pack([([7] * 40, [[1, 2, 3], [4, 5]])]))
    assert compiler.num_attempts
    of_user = torch.compile(lambda x, factor, name: x * factor + len(name), dynamic=True)
    before = compiler.num_attempts
    for i in range(40):
        assert of_user(torch.ones(3), i + 0.5, "").tolist() == [i + 0.5] * 3
    for i in range(12):
        assert of_user(torch.ones(3), 0.5, "a" * i).tolist() == [i + 0.5] * 3
    assert compiler.num_attempts - before <= 10


def test_more_groups_compile_nothing_anew_without_attention(compiler: Compiler, model: Any) -> None:
    compile_layers(model)
    compiled.abandon(
        {
            "attention with heads of 16 in torch.float32",
            "attention with heads of 16 in torch.float32, a window of 24",
        }
    )
    attempts = []
    with torch.no_grad():
        for num_groups in (1, 2, 3, 4, 5, 6):
            hidden_states(model, pack([([7] * 40, [[1, 2, 3], [4, 5]])] * num_groups))
            attempts.append(compiler.num_attempts)
    assert attempts[1:] == [attempts[1]] * 5
