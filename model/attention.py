"""Attention over packed rows, registered with transformers under the name "shared_prompt".

Causal inside the prompt; every completion sees the prompt and its own past, never another completion. The prompt's
keys and values are computed once and read by all completions of the group (Hydragen, arXiv 2402.05099, shares them
in decoding; this is the same for training). No [T, T] mask exists: the G completions of a group become a batch of G
rows, padded to the longest of them. Padded keys lie behind every real query, so the causal mask already hides them.
On a GPU there is no mask at all: see `_past`.

Works with stock transformers models that go through AttentionInterface. `use_cache=False` is mandatory: a cache would
make transformers append to it and sequences attend to each other. Left out: attention dropout; sliding
windows, soft caps and sinks, which are refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from model import devices
from model.packing import SequenceGroup, Span
from model.sequence_parallel import heads_for_tokens, tokens_for_heads

NAME = "shared_prompt"


def register() -> None:
    """Makes `attn_implementation="shared_prompt"` known to transformers. Call before from_pretrained.

    Takes cuDNN's attention out of torch's choice in this process.
    """
    from transformers import AttentionInterface

    devices.switch_off_planned_attention()
    # without a mask of this name transformers makes none, and asks the device for nothing to make one of
    AttentionInterface.register(NAME, _attention)


def _attention(  # noqa: PLR0913 transformers', and what a packed row adds
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, T, head_dim]; [sequences, …] where nothing is packed and spans is empty
    key: Tensor,  # [1, num_key_value_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    spans: tuple[Span, ...] | None = None,
    sequence_group: SequenceGroup | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. Returns ([rows, T, num_heads, head_dim], None).

    sequence_group: the ranks that share the row. T are then this rank's tokens, and spans still those of the whole row.
    Raises UserError if the model asks for attention that this is not.
    """
    if spans is None:
        raise ValueError('attn_implementation="shared_prompt" needs spans=…: call the model with a PackedRow')
    if sequence_group is not None:
        query, key, value = tokens_for_heads(query, key, value, sequence_group)
        output, _ = _attention(module, query, key, value, None, scaling, spans, **extra)
        return heads_for_tokens(output, sequence_group), None
    _refuse_other_attention(spans or (Span(0, query.shape[2], ()),), extra)
    if not spans:
        dense = _torch_attention(query, key, value, is_causal=True, scale=scaling)
        return dense.transpose(1, 2).contiguous(), None
    outputs = [_span_attention(query, key, value, span, scaling) for span in spans]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=gqa, **how)


def _refuse_other_attention(spans: tuple[Span, ...], extra: dict[str, Any]) -> None:
    """A model's further wishes must not be ignored: the log-probs would be those of another model."""
    for name in ("softcap", "s_aux", "position_bias", "indices", "block_indices"):
        if extra.get(name) is not None:
            raise UserError(
                f"this model's attention uses {name}, which packed rows do not have; "
                "choose a model with plain causal attention, such as Qwen2.5, Qwen3 or Llama"
            )
    window = extra.get("sliding_window")
    longest = max(span.prompt + max(span.completions, default=0) for span in spans)
    if window is not None and longest > window:
        raise UserError(
            f"this model has a sliding window of {window} tokens and a sequence has {longest}; packed rows have no "
            f"window: keep data.max_prompt_length + sampler.max_completion_length within {window}"
        )


def _span_attention(query: Tensor, key: Tensor, value: Tensor, span: Span, scaling: float | None) -> Tensor:
    """One group: [1, H, prompt + Σ completions, d]."""
    begin = span.start + span.prompt
    end = begin + sum(span.completions)
    alone = len(span.completions) <= 1  # nothing to share: one causal sequence
    q, k, v = (x[:, :, span.start : end if alone else begin] for x in (query, key, value))
    prompt = _torch_attention(q, k, v, is_causal=True, scale=scaling)
    if alone:
        return prompt
    rows, real = _indexes(span.completions, query.device)
    num_rows, longest = rows.shape
    q_rows, k_rows, v_rows = (x[0, :, begin:end][:, rows].transpose(0, 1) for x in (query, key, value))  # [G, H, C, d]
    k_all = torch.cat([k.expand(num_rows, -1, -1, -1), k_rows], dim=2)
    v_all = torch.cat([v.expand(num_rows, -1, -1, -1), v_rows], dim=2)
    mask = _past(longest, span.prompt + longest, query.device)
    padded = _torch_attention(q_rows, k_all, v_all, attn_mask=mask, scale=scaling)
    flat = padded.transpose(1, 2).reshape(num_rows * longest, query.shape[1], -1)  # [G·C, H, d]
    completions = flat[real]  # [Σ C, H, d]
    return torch.cat([prompt, completions.transpose(0, 1)[None]], dim=2)


def _past(queries: int, keys: int, device: torch.device) -> Tensor:
    """What query i of the last `queries` among `keys` tokens sees: itself and all before it, [queries, keys].

    On a GPU a description that torch hands to flash attention, which reads grouped heads as they are; given a mask,
    flash attention refuses, and the kernel that is left writes out every score. On a CPU a mask.
    """
    return _described_past(queries, keys) if devices.is_accelerator(device) else _mask(queries, keys)


def _described_past(queries: int, keys: int) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler with it

    return causal_lower_right(queries, keys)


@functools.lru_cache(maxsize=64)
def _mask(queries: int, keys: int) -> Tensor:
    """Made once for all layers of a forward."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@functools.lru_cache(maxsize=64)
def _indexes(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(pad index [G, C], unpad index [Σ C]): made once for all layers of a forward.

    On the CPU: how many tokens are real is known there without waiting for a GPU.
    """
    rows, real = pad_index(lengths), unpad_index(lengths)
    return rows.to(device, non_blocking=True), real.to(device, non_blocking=True)


def pad_index(lengths: tuple[int, ...]) -> Tensor:
    """[G, max] positions of the flat tokens as rows; padding repeats a row's last token.

    lengths (2, 1) -> [[0, 1], [2, 2]]
    """
    sizes = torch.tensor(lengths)
    starts = torch.cumsum(sizes, 0) - sizes
    column = torch.arange(max(lengths))
    return starts[:, None] + torch.minimum(column[None], sizes[:, None] - 1)


def unpad_index(lengths: tuple[int, ...]) -> Tensor:
    """[Σ lengths] positions of the real tokens in the flattened rows.  (2, 1) -> [0, 1, 2]; (1, 2) -> [0, 2, 3]"""
    real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return real.flatten().nonzero()[:, 0]
