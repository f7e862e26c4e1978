"""Compiles cases for a card that is not there, and prints a JSON line for each.

What is compiled is the product's: the mask, the attention, or a decoder layer, forward and backward.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

from common import bfloat16
from common.config.algorithm import Algorithm
from model import attention, compiled
from model.log_softmax import LogSoftmaxAt
from model.packing import PackedRow
from tests.support.forget_compiled import forget_compiled, forget_failures
from tests.support.pretended_card import CARDS, backend
from tests.support.pretended_card.attention import Heads, hidden_states, make_model, packed_row
from tests.support.pretended_card.cells import Cell
from trainer.algorithm.losses import loss_and_terms

KEY_HEADS = 2
TOKENS = {"short": 60, "long": 20_000}


def compile_cell(cell: Cell, num_lengths: int) -> dict[str, Any]:
    """Returns what happens to a case on its card, and its attention's kernels.

    outcome: "fits" if all was compiled; "by group" if attention was computed group by group, which is slower;
    "refused" if the card has no such dtype.
    graphs: how many there were after the row of each length. largest_buffer: elements of what kernels write.
    """
    if cell.dtype == "bfloat16" and bfloat16.is_missing(CARDS[cell.card].capability):
        return {"outcome": "refused", "kernels": [], "largest_buffer": 0}
    _forget_all_but_the_mask()
    counters.clear()
    backend.kernels.clear()
    backend.buffers.clear()
    heads = Heads(KEY_HEADS * cell.heads_per_key_head, KEY_HEADS, cell.size, cell.kind)
    run = _attention_alone(cell, heads) if cell.layer == "attention alone" else _layer(cell, heads)
    graphs = []
    for i in range(num_lengths):
        run(packed_row(TOKENS[cell.length] + 97 * i, cell.has_forks, seed=i))
        graphs.append(counters["stats"]["unique_graphs"])
    kernels = [vars(kernel) for kernel in backend.kernels if kernel.is_attention]
    is_compiled = bool(kernels) and not compiled.has_failed()
    outcome = "fits" if is_compiled else "by group"
    return {"outcome": outcome, "kernels": kernels, "graphs": graphs, "largest_buffer": max(backend.buffers, default=0)}


def _forget_all_but_the_mask() -> None:
    """Forgets compiled code and failures. The mask's code stays, which is the same for all layers of a card."""
    for reference in convert_frame.input_codes.seen:
        code = reference()
        if code is not None and code is not attention._mask_of.__code__:
            torch._C._dynamo.eval_frame.reset_code(code)
    forget_failures()


def _attention_alone(cell: Cell, heads: Heads) -> Callable[[PackedRow], None]:
    """Returns forward and backward of attention over a row."""
    dtype = getattr(torch, cell.dtype)

    def run(row: PackedRow) -> None:
        length = row.input_ids.shape[1]
        sizes = (heads.query, heads.size), (heads.key, heads.size), (heads.key, cell.value_size or heads.size)
        tensors: list[Any] = [
            torch.empty(1, number, length, size, device="cuda", dtype=dtype, requires_grad=True)
            for number, size in sizes
        ]
        sinks = torch.empty(heads.query, device="cuda", requires_grad=True) if heads.has_sinks else None
        options = {"scaling": heads.size**-0.5, "sliding_window": heads.window, "softcap": heads.cap, "s_aux": sinks}
        if compiled.is_compiled(tensors[0]):
            masks = {heads.window: attention._block_mask(row.spans, heads.window, tensors[0].device)}
            options |= {"block_masks": masks, "groups": attention._Groups(row.spans)}
        else:
            options |= {"spans": row.spans}
        output, _ = attention._attention(torch.nn.Module(), *tensors, None, **options)
        output.sum().backward()
        assert all(tensor.grad is not None for tensor in tensors)

    return run


def _layer(cell: Cell, heads: Heads) -> Callable[[PackedRow], None]:
    """Returns forward and backward of a decoder layer over a row."""
    model = make_model(heads, getattr(torch, cell.dtype), has_adapters="LoRA" in cell.layer).to("cuda")
    if compiled.is_compiled(next(model.parameters())):  # as the trainer does
        compiled.compile_layers(model)

    def run(row: PackedRow) -> None:
        hidden_states(model, row.to(torch.device("cuda", 0))).sum().backward()

    return run


def compile_head_and_objective(dtype: torch.dtype) -> dict[str, Any]:
    """Returns what happens to the head of a vocabulary of Qwen2.5's size, with sets and entropies, and to GRPO."""
    forget_compiled()
    backend.kernels.clear()
    logits = torch.empty(777, 151_936, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.zeros(777, device="cuda", dtype=torch.int64)
    for sets in (None, torch.zeros(777, 50, device="cuda", dtype=torch.int64)):
        logprobs, entropy, _ = LogSoftmaxAt.apply(logits, targets, sets, 0.7, True, True)
        old, reference, advantages, weights = torch.empty(4, 777, device="cuda").unbind()
        lengths = torch.full((7,), 111, device="cuda")
        algorithm = Algorithm(beta=0.1, entropy_coef=0.01)
        given = logprobs, weights, old, reference, advantages, lengths, algorithm, entropy, None
        loss, *_ = compiled.compiled(loss_and_terms, *given)
        loss.backward()
    return {
        "outcome": "by group" if compiled.has_failed() else "fits",
        "kernels": [vars(kernel) for kernel in backend.kernels],
    }


def main(request: dict[str, Any]) -> None:
    """Prints a line for each case of a request, as `python -m tests.support.pretended_card` is given it.

    "kernel_options" in the request: FlexAttention's options of each line, in place of the product's.
    "head_and_objective": dtypes of logits, each of which has a line of its own, too.
    "num_lengths": how many rows of different lengths each case has.
    """
    for dtype in request.get("head_and_objective", []):
        print(json.dumps(compile_head_and_objective(getattr(torch, dtype))), flush=True)
    for options in request.get("kernel_options", [None]):
        if options is not None:
            attention._kernel_options = functools.partial(_chosen_options, {"BACKEND": "TRITON", **options})
        for values in request["cells"]:
            found = _outcome(Cell(**values), request.get("num_lengths", 1))
            print(json.dumps({"cell": values, "kernel_options": options, **found}), flush=True)


def _chosen_options(options: dict[str, Any], *_: Any) -> dict[str, Any]:
    return options


def _outcome(cell: Cell, num_lengths: int) -> dict[str, Any]:
    try:
        return compile_cell(cell, num_lengths)
    except Exception as error:
        text = " ".join(str(error).split())
        return {"outcome": f"dies: {type(error).__name__}: {text[:300]}", "kernels": [], "largest_buffer": 0}
