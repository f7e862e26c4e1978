"""Attention over packed rows, registered with transformers under the name "shared_prompt".

Attention is causal in the prompt; every completion sees the prompt and its own past, never another completion. The
prompt's keys and values are computed once and read by all completions of the group (Hydragen, arXiv 2402.05099, shares
them in decoding; this is the same for training). No [T, T] mask exists.

    accelerator    one FlexAttention for all groups of a row (arXiv 2412.05496), whose mask is packing.ancestry
    CPU            group by group: the G completions become a batch of G rows, padded to the longest of them. Padded
                   keys lie behind every real query, so the causal mask already hides them

A layer's other options are computed as transformers does: a window, a soft cap of the scores, sinks.

    s_ij = scale · q_i k_j,  with a cap c: c tanh(s_ij / c)        seen: i − window < j ≤ i
    o_i  = Σ_j exp(s_ij) v_j / (Σ_j exp(s_ij) + exp(sink))

It works with stock transformers models that use AttentionInterface. `use_cache=False` is mandatory: transformers would
append to a cache, and sequences would attend to each other. Left out: attention dropout; any other option, which is
refused, and which layout.py detects when a model is loaded.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import devices
from model.compiled import begin_row, compiled, is_abandoned, is_compiled
from model.packing import PackedRow, SequenceGroup, Span, ancestry
from model.sequence_parallel import heads_for_tokens, tokens_for_heads

NAME = "shared_prompt"
_Indexes = tuple[Tensor, Tensor]  # those that pad completions, and those that take the padding away
_BLOCK = 128  # queries, and keys, of a block of FlexAttention's mask


@dataclass(frozen=True)
class _LayerOptions:
    """The options of one layer's attention besides causality."""

    scale: float | None
    window: int | None  # tokens that a query sees, itself among them
    cap: float | None
    sinks: Tensor | None  # [num_heads]


class _Groups:
    """The spans of a row's groups, hidden from the compiler.

    It would compile a layer anew for each number of groups.
    """

    def __init__(self, spans: tuple[Span, ...]):
        self.spans = spans


def _spans_of(groups: _Groups | None) -> tuple[Span, ...]:
    return groups.spans if groups else ()


def register() -> None:
    """Makes `attn_implementation="shared_prompt"` known to transformers. Call it before from_pretrained.

    It also disables cuDNN's attention in this process, and makes "sdpa" refuse the options that it would ignore.
    """
    from transformers import AttentionInterface

    devices.switch_off_planned_attention()
    # without a mask function of this name transformers makes no mask, and reads nothing from the device for one
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register("sdpa", _strict_sdpa)


def _strict_sdpa(*tensors: Any, **arguments: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _refuse_options(("softcap", "s_aux"), arguments)  # transformers' own sdpa ignores these silently
    return sdpa_attention_forward(*tensors, **arguments)


def _refuse_options(names: Sequence[str], arguments: dict[str, Any]) -> None:
    if unknown := [name for name in names if arguments.get(name) is not None]:
        raise NotImplementedError(f"attention with {unknown[0]}, an option that cannot be computed here")


def options(base: Any, row: PackedRow) -> dict[str, Any]:
    """Returns a row's arguments for a forward without cache, besides token ids. base: transformers' text model."""
    if base.config._attn_implementation != NAME:
        assert sum(len(span.completions + span.forks) for span in row.spans) <= 1, (
            "these layers would mix the sequences of a row"
        )
        return {} if row.vision is None else {"position_ids": row.position_ids}
    found: dict[str, Any] = {"position_ids": row.position_ids}
    if row.shard is not None:
        found["sequence_group"] = row.shard.group
    if is_compiled(row.input_ids):
        begin_row()
        windows = {None, getattr(base.config.get_text_config(), "sliding_window", None)}
        for module in base.modules():  # a layer may have a window that the configuration does not name
            window = vars(module).get("sliding_window")
            if isinstance(window, int):
                windows.add(window)
        device, spans = row.input_ids.device, row.spans or (Span(0, row.input_ids.shape[1], ()),)
        found["block_masks"] = {window: _block_mask(spans, window, device) for window in windows}
        found["groups"] = _Groups(row.spans)
    else:
        found["spans"] = row.spans
    return found


def _attention(  # noqa: PLR0913 transformers', and what a packed row adds
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, T, head_dim]; [sequences, …] where nothing is packed and spans is empty
    key: Tensor,  # [1, num_key_value_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    spans: tuple[Span, ...] | None = None,
    block_masks: dict[int | None, Any] | None = None,  # by the layer's window, on an accelerator
    groups: _Groups | None = None,  # with block_masks, in place of spans
    sequence_group: SequenceGroup | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Computes attention as a transformers AttentionInterface function. Returns ([rows, T, num_heads, head_dim], None).

    sequence_group: the ranks that share the row. T are then this rank's tokens, and spans still those of the whole row.
    Raises NotImplementedError if the model needs an option that is not supported.
    """
    if block_masks is None and spans is None:
        raise ValueError('attn_implementation="shared_prompt" needs spans=…: call the model with a PackedRow')
    _refuse_options(("position_bias", "indices", "block_indices"), extra)
    if sequence_group is not None:
        query, key, value = tokens_for_heads(query, key, value, sequence_group)
        s_aux = None if s_aux is None else s_aux.chunk(sequence_group.size)[sequence_group.rank]
    by_group = functools.partial(_by_group, layer=_LayerOptions(scaling, sliding_window, softcap, s_aux))
    if block_masks is None:
        output = by_group(query, key, value, spans or ())
    else:
        mask = block_masks.get(sliding_window)
        if mask is None:  # a window that only the layer's code knows
            whole = _spans_of(groups) or (Span(0, query.shape[2], ()),)
            mask = _block_mask(whole, sliding_window, query.device)
        given = query, key, value, mask, scaling, softcap, s_aux
        kind = _kind(query, value, sliding_window, softcap, s_aux)
        if not torch.compiler.is_compiling():
            instead = functools.partial(by_group, query, key, value, _spans_of(groups))
            output = compiled(_flex_attention, *given, instead=instead, kind=kind, module=module)
        elif is_abandoned(kind):  # the layer is compiled around it
            layer_options = scaling, sliding_window, softcap, s_aux
            output = _uncompiled_by_group(query, key, value, groups, *layer_options)
        else:
            output = _flex_attention(*given)
    output = output.transpose(1, 2).contiguous()
    return output if sequence_group is None else heads_for_tokens(output, sequence_group), None


def _kind(query: Tensor, value: Tensor, window: int | None, cap: float | None, sinks: Tensor | None) -> str:
    """Returns what decides on the kernels of a layer's attention, in words."""
    options = f"heads of {int(query.shape[-1])}"
    if value.shape[-1] != query.shape[-1]:
        options += f" with values of {int(value.shape[-1])}"
    options += f" in {query.dtype}"
    if window is not None:
        options += f", a window of {window}"
    if cap is not None:
        options += f", a cap of {cap}"
    if sinks is not None:
        options += ", sinks"
    return f"attention with {options}"


@functools.lru_cache(maxsize=4)  # full and windowed layers of a row, and of the reference's
def _block_mask(spans: tuple[Span, ...], window: int | None, device: torch.device) -> Any:
    """Returns FlexAttention's mask of a row, made once for all its layers with this window."""
    tree = ancestry(spans).to(device, non_blocking=True)
    window = tree.shape[1] if window is None else window
    return compiled(_mask_of, tree, window, instead=lambda: _mask_in_rows(tree, window))


def _mask_of(tree: Tensor, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    length = tree.shape[1]
    return create_block_mask(_visibility(tree, window), None, None, length, length, tree.device)


def _mask_in_rows(tree: Tensor, window: int) -> Any:
    """Returns `_mask_of` without a compiler, one row of blocks at a time: only a compiler spares the [T, T] mask."""
    from torch.nn.attention.flex_attention import BlockMask

    length = tree.shape[1]
    is_seen = _visibility(tree, window)
    positions = torch.arange(length, device=tree.device)
    counts = []  # of visible pairs in each block
    for queries in positions.split(_BLOCK):
        seen = is_seen(queries, queries, queries[:, None], positions)
        padded = F.pad(seen, (0, -length % _BLOCK))
        counts.append(padded.unflatten(1, (-1, _BLOCK)).sum((0, 2)))
    pairs = torch.stack(counts)
    is_full = pairs == _BLOCK * _BLOCK
    partial = _block_lists((pairs > 0) & ~is_full)
    full = _block_lists(is_full)
    return BlockMask.from_kv_blocks(*partial, *full, _BLOCK, is_seen, seq_lengths=(length, length))


def _block_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks are chosen in each row [1, 1, R], and their numbers, which come first, [1, 1, R, C]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _visibility(tree: Tensor, window: int) -> Callable[..., Tensor]:
    first, end, depth = tree.unbind()

    def is_seen(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (first[j] <= first[i]) & (first[i] < end[j]) & (depth[i] - depth[j] < window)

    return is_seen


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Returns attention [rows, H, T, d]. A sink is a key without a value: o · Z / (Z + exp(sink)) with log Z = lse."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    gqa = query.shape[1] != key.shape[1]
    options: Any = _kernel_options(query, value)
    auxiliary = AuxRequest(lse=sinks is not None)
    output, found = flex_attention(
        query, key, value, capped, mask, scale, gqa, kernel_options=options, return_aux=auxiliary
    )
    if sinks is None or found.lse is None:
        return output
    return output * torch.sigmoid(found.lse - sinks[:, None]).to(output.dtype)[..., None]


def _kernel_options(query: Tensor, value: Tensor) -> dict[str, Any]:
    """Returns FlexAttention's options: its common kernel for rows of any length, with blocks that fit the device.

    For rows below 128 tokens torch would choose its decoding kernel, which has no block for more than 128 queries of
    the heads that share a key head, and does not compile where there are more.

    A block of the backward holds B queries, their gradients, B keys and B values in shared memory. Torch's own blocks
    have 64 of each in 16 bits, for heads of up to 256, and 16 otherwise. A block of the forward holds queries, keys and
    their products; torch has none of its own for float32 heads between 128 and 256, and takes 64 queries and keys.
    """
    options: dict[str, Any] = {"BACKEND": "TRITON"}
    available = devices.shared_memory_per_block(query.device)
    query_size = int(query.shape[-1])
    value_size = int(value.shape[-1])
    if available is None or query_size > 256:
        return options
    if query.element_size() > 2:
        forward_bytes = 4 * 64 * (2 * _next_power_of_2(query_size) + 64)
        if 128 < query_size < 256 and forward_bytes > available:
            options |= {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}  # torch's own for heads of 256
        return options
    token_bytes = 2 * query.element_size() * (_next_power_of_2(query_size) + _next_power_of_2(value_size))
    if 64 * token_bytes <= available:
        return options
    block = 32 if 32 * token_bytes <= available else 16
    options["bwd_num_stages"] = 1
    for name in ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"):
        options[name] = block
    return options


def _next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


@torch.compiler.disable
def _uncompiled_by_group(  # noqa: PLR0913 a compiler passes no object that is made in its graph
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: _Groups | None,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return _by_group(query, key, value, _spans_of(groups), _LayerOptions(scale, window, cap, sinks))


def _by_group(query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...], layer: _LayerOptions) -> Tensor:
    """Returns the attention of a row, [rows, H, T, d], one group after the other."""
    if not spans:
        return _attend(query, key, value, layer)
    indexes = _indexes_of_row(spans, query.device)
    outputs = [_span_attention(query, key, value, span, layer, indexes) for span in spans]
    return torch.cat(outputs, dim=2)


def _span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    layer: _LayerOptions,
    indexes: dict[Span, _Indexes],  # of the row's groups
) -> Tensor:
    """Returns the attention of one group: [1, H, prompt + Σ completions, d]."""
    if span.forks:
        return _tree_attention(query, key, value, span, layer)
    begin = span.start + span.prompt
    end = begin + sum(span.completions)
    is_single = len(span.completions) <= 1  # nothing to share: one causal sequence
    q, k, v = (x[:, :, span.start : end if is_single else begin] for x in (query, key, value))
    prompt = _attend(q, k, v, layer)
    if is_single:
        return prompt
    rows, real = indexes[span]
    num_rows, longest = rows.shape
    q_rows, k_rows, v_rows = (
        _Padded.apply(x[0, :, begin:end], rows, real).transpose(0, 1) for x in (query, key, value)
    )
    k_all = torch.cat([k.expand(num_rows, -1, -1, -1), k_rows], dim=2)
    v_all = torch.cat([v.expand(num_rows, -1, -1, -1), v_rows], dim=2)
    padded = _attend(q_rows, k_all, v_all, layer)
    flat = padded.transpose(1, 2).reshape(num_rows * longest, query.shape[1], -1)  # [G·C, H, d]
    completions = flat.index_select(0, real)  # [Σ C, H, d]
    return torch.cat([prompt, completions.transpose(0, 1)[None]], dim=2)


class _Padded(torch.autograd.Function):
    """The padding of [H, Σ C, d] to [H, G, C, d] by `_indexes`. Padded values are not read and have no gradient, so the
    gradient is gathered in one pass, while that of an index is sorted and summed: on a GPU most of the attention.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, rows: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(real)
        return flat.index_select(1, rows.flatten()).unflatten(1, rows.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [real] = ctx.saved_tensors
        return grad.flatten(1, 2).index_select(1, real), None, None


def _tree_attention(query: Tensor, key: Tensor, value: Tensor, span: Span, layer: _LayerOptions) -> Tensor:
    """Returns `_span_attention` for forked completions: a sequence's new tokens see the shared ones and themselves."""
    edges = [[0, *(start for start, _ in forks), n] for n, forks in zip(span.completions, span.forks, strict=True)]
    sizes = [span.prompt, *(end - start for of in edges for start, end in itertools.pairwise(of))]
    tokens = slice(span.start, span.start + sum(sizes))
    parts = zip(*(x[:, :, tokens].split(sizes, 2) for x in (query, key, value)), strict=True)  # one gradient for all
    q, k, v = next(parts)
    prompt, outputs = (k, v), [_attend(q, k, v, layer)]
    for forks in span.forks:
        seen = [prompt]
        for shared in (span.prompt, *(kept for _, kept in forks)):
            q, k, v = next(parts)
            seen = [*_first_tokens(seen, shared), (k, v)]
            keys, values = (torch.cat(x, 2) for x in zip(*seen, strict=True))
            outputs.append(_attend(q, keys, values, layer))
    return torch.cat(outputs, 2)


def _first_tokens(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the keys and values of the first `count` tokens of a sequence in parts."""
    found = []
    for k, v in parts:
        if count > 0:
            found.append((k[:, :, :count], v[:, :, :count]))
        count -= k.shape[2]
    return found


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: _LayerOptions) -> Tensor:
    """Returns [rows, H, Q, d]: queries are the last Q of the K tokens that have keys, and see all up to themselves."""
    queries, keys = query.shape[2], key.shape[2]
    window = layer.window if layer.window is not None and layer.window < keys else None
    if layer.cap is not None or layer.sinks is not None:
        return _explicit_attention(query, key, value, layer, _mask(queries, keys, window, query.device))
    gqa, causal = query.shape[1] != key.shape[1], queries == keys and window is None
    mask = None if causal else _mask(queries, keys, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=layer.scale, enable_gqa=gqa)


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, layer: _LayerOptions, seen: Tensor) -> Tensor:
    """Computes attention with explicit scores, for options without a torch kernel. seen: [Q, K]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if layer.scale is None else layer.scale)
    if layer.cap is not None:
        scores = layer.cap * torch.tanh(scores / layer.cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns the mask [queries, keys] of the last `window` tokens up to each query.

    Each layer makes it anew: kept for all layers, those of a long row would fill much of a GPU.
    """
    past = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return past if window is None else past.triu(keys - queries - window + 1)


@functools.lru_cache(maxsize=2)  # the row of the policy and its reference, and the critic's
def _indexes_of_row(spans: tuple[Span, ...], device: torch.device) -> dict[Span, _Indexes]:
    """Returns `_indexes` of each group of several completions, once for all layers of a forward."""
    return {span: _indexes(span.completions, device) for span in spans if len(span.completions) > 1}


def _indexes(lengths: tuple[int, ...], device: torch.device) -> _Indexes:
    """Returns (pad index [G, C], unpad index [Σ C]).

    The first are positions of the flat tokens as rows, whose padding repeats a row's last token; the second are
    positions of real tokens in the flattened rows.  (1, 2) -> [[0, 0], [1, 2]] and [0, 2, 3]

    They are computed on the CPU, where the number of real tokens is known without waiting for a GPU.
    """
    sizes, column = torch.tensor(lengths)[:, None], torch.arange(max(lengths))
    rows = torch.cumsum(sizes, 0) - sizes + torch.minimum(column, sizes - 1)
    real = (column < sizes).flatten().nonzero()[:, 0]
    return rows.to(device, non_blocking=True), real.to(device, non_blocking=True)
