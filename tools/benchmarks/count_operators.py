"""The operators that a training step dispatches: on a GPU each is at least one kernel, whatever its size.

    python tools/benchmarks/count_operators.py --cell 1m-4x8-p64-c16 [setting=value …]

The trainer's own engine runs in bfloat16 on a CPU as it does on an accelerator, but compiles nothing: FlexAttention,
which has no gradient on a CPU, is attention with its mask written out. Views and allocations are not counted. The last
line is transformers alone: the same sequences, padded, with its own loss, clipping and torch's fused AdamW.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from common.config import Config, load
from model import attention, devices, log_softmax
from tools.benchmarks.cells import Cell, named, prepare, tandem_config
from trainer.engine import policy

_NO_KERNEL = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "detach", "as_strided", "alias", "reshape", "_reshape_alias", "unbind", "unflatten",
    "flatten", "lift_fresh", "is_same_size", "resize_", "set_", "empty", "empty_like", "new_empty", "empty_strided",
}  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts operators in its context. names: {operator: number}."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _NO_KERNEL:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_one(name: str) -> Iterator[None]:
    """Counts what runs in the context as one operator of this name."""
    counting = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Operators)]
    for mode in counting:
        mode.names[name] += 1
    with _disable_current_modes():
        yield


class _Compiled(torch.autograd.Function):
    """A function as its compiler would run it: one operator in each direction."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *given: Any) -> Any:
        with torch.enable_grad(), _as_one(function.__name__):
            ctx.given = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given]
            found = written_out(function, *ctx.given)
        ctx.found = found if isinstance(found, tuple) else (found,)
        ctx.mark_non_differentiable(*(x for x in ctx.found if not x.requires_grad))
        ctx.set_materialize_grads(False)
        detached = tuple(x.detach() for x in ctx.found)
        return detached if isinstance(found, tuple) else detached[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves = [x for x in ctx.given if isinstance(x, Tensor) and x.requires_grad]
        pairs = [(x, g) for x, g in zip(ctx.found, grads, strict=True) if g is not None]
        with _as_one("backward of a compiled function"):
            outputs, gradients = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
        return None, *(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in ctx.given)


def written_out(function: Callable[..., Any], *given: Any) -> Any:
    """Calls what an accelerator compiles, with FlexAttention's mask written out as [T, T]."""
    if function is attention._mask_of:
        tree, window = given
        places = torch.arange(tree.shape[1])
        return attention._mask_of(tree, window).mask_mod(None, None, places[:, None], places)
    if function is not attention._flex_attention:
        return function(*given)
    query, key, value, mask, scale, cap, sinks = given
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return attention._explicit_attention(query, key, value, attention._LayerOptions(scale, None, cap, sinks), mask)


def _compiled(function: Callable[..., Any], *given: Any, **_: Any) -> Any:
    return _Compiled.apply(function, *given)


@contextlib.contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Lets a model on a CPU take the way of an accelerator in the context."""
    attention._block_mask.cache_clear()
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(devices, "is_accelerator", lambda _: True))
        for module in (attention, log_softmax, policy):
            patched.enter_context(mock.patch.object(module, "compiled", _compiled))
        yield


def of_tandem(cell: Cell, config: Config) -> dict[str, Any]:
    """Returns the operators of the third step: of each micro-batch, of the optimizer's step, and of all."""
    from tools.benchmarks.trainer_step import make_groups
    from trainer.algorithm.losses import Denominator
    from trainer.data.tensors import micro_batch
    from trainer.data.training_group import TrainingGroup, set_advantages_from_rewards
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.process_group import init_distributed

    init_distributed(config)
    engine, size = PolicyEngine(config, 1).start(), config.groups_at_once
    denominator = Denominator("grpo", cell.prompts * cell.generations, 1, cell.completion)
    for step in range(3):
        groups, counts = make_groups(cell, step), list[Counter[str]]()
        for first in range(0, cell.prompts, size):
            scored = [TrainingGroup(group, config.algorithm) for group in groups[first : first + size]]
            set_advantages_from_rewards(scored, config)
            batch = micro_batch(scored, denominator, config.algorithm, engine.packing)
            with as_on_accelerator(), Operators() as operators:
                engine.backward(batch)
            counts.append(operators.names)
        with Operators() as operators:
            engine.step()
        counts.append(operators.names)
    return _line(counts, engine.model.config.num_hidden_layers)


def of_transformers(cell: Cell, path: str) -> dict[str, Any]:
    """Returns the operators of the second step of the same sequences, padded."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    length = cell.prompt + cell.completion
    ids = torch.randint(0, model.config.vocab_size, (cell.prompts * cell.generations, length))
    for _ in range(2):
        with Operators() as batch:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        with Operators() as step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return _line([batch.names, step.names], model.config.num_hidden_layers)


def _line(counts: list[Counter[str]], layers: int) -> dict[str, Any]:
    *batches, step = [count.total() for count in counts]
    return {
        "micro_batches": batches,
        "layers": layers,
        "step": step,
        "total": sum(batches) + step,
        "names": dict(sum(counts, Counter[str]()).most_common(12)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=named, default=named("1m-4x8-p64-c16"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    cell, folder = arguments.cell, prepare(arguments.cell)
    with tempfile.TemporaryDirectory() as scratch:
        settings = tandem_config(cell, folder, 3, Path(scratch))
        settings["algorithm"]["beta"] = 0.0  # no reference model
        (Path(scratch) / "config.yaml").write_text(yaml.safe_dump(settings))
        config = load(Path(scratch) / "config.yaml", ["model.dtype=bfloat16", *arguments.overrides])
        print(json.dumps({"tandem": of_tandem(cell, config)}), flush=True)
    print(json.dumps({"transformers": of_transformers(cell, str(folder / "model"))}), flush=True)


if __name__ == "__main__":
    main()
