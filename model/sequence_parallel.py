"""Sequence parallelism: one packed row split over ranks, as in DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).

    everywhere else     a rank has T/P tokens of the row           [1, H, T/P, d]
                        │ all-to-all: heads for tokens                   │  ▲
    in attention        ▼ a rank has H/P heads of all T tokens     [1, H/P, T, d]

P = sequence-parallel ranks, H = heads, d = head_dim. Attention itself is unchanged. Every rank computes the log-probs
of its own tokens' targets; `gather` gives all of them to all ranks, each of which computes the same loss:

    ∂L/∂θ = Σ_p ∂L/∂θ through the tokens of rank p

so that the gradients of the ranks of a group add up to the gradient of the row. Left out: rows with images; a row that
is not packed.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from model.files.folder import uneven_heads
from model.packing import PackedRow, SequenceGroup, Shard, Span


def shard(row: PackedRow, group: SequenceGroup | None) -> PackedRow:
    """Returns this rank's part of the row; the row itself without a group.

    Unused tokens are appended up to a multiple of P, as a span of their own. `spans` and `lengths` stay those of the
    whole row; the targets are those whose logits are computed from this part.
    """
    if group is None:
        return row
    assert row.spans and row.vision is None, "only packed rows without images are split over ranks"
    length = row.input_ids.shape[1]
    missing = -length % group.size
    share = (length + missing) // group.size
    begin = group.rank * share
    ids, positions = (F.pad(x, (0, missing))[:, begin : begin + share] for x in (row.input_ids, row.position_ids))
    routing = row.routing if row.routing is None else F.pad(row.routing, (0, 0) * 2 + (0, missing), value=-1)
    places = ((row.source_index >= begin) & (row.source_index < begin + share)).nonzero()[:, 0]
    return replace(
        row,
        input_ids=ids,
        position_ids=positions,
        spans=(*row.spans, Span(length, missing, ())) if missing else row.spans,
        source_index=row.source_index[places] - begin,
        target_ids=row.target_ids[places],
        sampling_mask=None if row.sampling_mask is None else row.sampling_mask[places],
        routing=routing if routing is None else routing[begin : begin + share],
        shard=Shard(group, places, len(row.target_ids)),
    )


def gather(part: Tensor, shard: Shard | None) -> Tensor:
    """Gathers values [n] of this rank's targets into [N], the same on every rank; unchanged without a shard.

    It is differentiable: every rank computes the whole loss, so each keeps the gradient of its own targets.
    """
    return part if shard is None else _Gather.apply(part, shard)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard) -> Tensor:
        ctx.places = shard.places
        whole = part.new_zeros(shard.num_targets).index_copy(0, shard.places, part)
        dist.all_reduce(whole, group=shard.group.handle)  # exact, because all other ranks add 0
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.places), None


class _AllToAll(torch.autograd.Function):
    """An all-to-all, [P, …] -> [P, …]: sends part p to rank p, and receives part p from there. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()  # empty_like would keep the strides of a transposed tensor
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group.handle)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def tokens_for_heads(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Exchanges queries, keys and values of all heads of this rank's tokens for those of all tokens of its heads.

    [1, H, T/P, d] and twice [1, K, T/P, d] -> [1, H/P, T, d] and twice [1, lcm(K, P)/P, T, d]: where K does not divide
    by P, key and value heads are repeated until they do. Raises UserError if H does not divide by P.
    """
    if query.shape[1] % group.size:
        raise UserError(uneven_heads(query.shape[1], group.size))
    repeats = math.lcm(key.shape[1], group.size) // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    of_ranks = [x[0].unflatten(0, (group.size, -1)) for x in (query, key, value)]  # [P, heads of rank p, T/P, d]
    received = _AllToAll.apply(torch.cat(of_ranks, 1), group)  # [P, my heads, tokens of rank p, d]
    mine = received.transpose(0, 1).flatten(1, 2)[None]
    return mine.split([x.shape[1] for x in of_ranks], 1)


def heads_for_tokens(output: Tensor, group: SequenceGroup) -> Tensor:
    """Exchanges attention outputs back, all tokens for all heads: [1, T, H/P, d] -> [1, T/P, H, d]."""
    received = _AllToAll.apply(output[0].unflatten(0, (group.size, -1)), group)  # [P, T/P, heads of rank p, d]
    return received.transpose(0, 1).flatten(1, 2)[None]
