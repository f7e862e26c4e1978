"""A group of rollouts <-> its header and its arrays, as common/wire.py sends them.

    arrays: int32 prompt ids, completion ids │ float32 old log-probs, ref log-probs │ int32 sampling masks │ PNGs

All little-endian and without gaps; the lengths stand in the header. Reading copies nothing but the PNGs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.types import EncodedImage, FinishReason, Group, Rollout

Frame = bytes | memoryview


class RolloutHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a Rollout has beside its arrays, under the same names."""

    length: int  # C, tokens of the completion
    rewards: dict[str, float | None]  # None = NaN: the function does not apply
    reward: float
    finish_reason: FinishReason
    observed: tuple[tuple[int, int], ...] = ()
    turns: int = 1
    tool_calls: int = 0
    tool_errors: int = 0
    environment_s: float = 0.0
    version_spans: tuple[tuple[int, int], ...] = ()

    def check(self) -> None:
        """Raises ValueError if its spans do not lie in the completion, or its counts do not fit together."""
        edges = [0, *itertools.chain(*self.observed), self.length]
        has_sampled_between = not self.observed or _ascend(edges)
        counts_fit = len(self.observed) < self.turns and 0 <= self.tool_errors <= self.tool_calls
        if not (has_sampled_between and counts_fit and 0 <= self.environment_s < math.inf):
            raise ValueError(f"{self} is no rollout")
        starts, versions = [start for start, _ in self.version_spans], [version for _, version in self.version_spans]
        if starts and not (starts[0] == 0 and _ascend([*starts, self.length]) and _ascend(versions)):
            raise ValueError(f"version spans {self.version_spans} of {self.length} tokens")


class ImageHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grid_thw: tuple[int, int, int]
    size: int  # bytes of its PNG


class GroupHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="group"):
    group_id: int
    policy_version: int
    problem_index: int
    prompt_length: int
    has_ref_logprobs: bool
    rollouts: tuple[RolloutHeader, ...]
    support_width: int = 0  # K of sampling_mask; 0: there are none
    images: tuple[ImageHeader, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def num_words(self) -> int:
        """Of 4 bytes each, in front of the PNGs."""
        per_token = 2 + self.support_width + self.has_ref_logprobs
        return self.prompt_length + per_token * sum(rollout.length for rollout in self.rollouts)

    @property
    def num_bytes(self) -> int:
        """Of the arrays."""
        return 4 * self.num_words + sum(image.size for image in self.images)


def write_group(group: Group) -> tuple[GroupHeader, bytes]:
    """Inverse of `read_group`."""
    rollouts = group.rollouts
    header = GroupHeader(
        group_id=group.group_id,
        policy_version=group.policy_version,
        problem_index=group.problem_index,
        prompt_length=len(group.prompt_ids),
        has_ref_logprobs=any(r.ref_logprobs is not None for r in rollouts),
        rollouts=tuple(map(_rollout_header, rollouts)),
        support_width=max((r.sampling_mask.shape[1] for r in rollouts if r.sampling_mask is not None), default=0),
        images=tuple(ImageHeader(image.grid_thw, len(image.png)) for image in group.images),
        failures=group.failures,
    )
    supports = [_widened(r.sampling_mask, header.support_width) for r in rollouts if r.sampling_mask is not None]
    ids = [group.prompt_ids, *(r.completion_ids for r in rollouts)]
    floats = [r.old_logprobs for r in rollouts] + [r.ref_logprobs for r in rollouts if r.ref_logprobs is not None]
    parts = [a.astype("<i4") for a in ids] + [a.astype("<f4") for a in floats] + [a.astype("<i4") for a in supports]
    return header, b"".join([*(a.tobytes() for a in parts), *(image.png for image in group.images)])


def _rollout_header(rollout: Rollout) -> RolloutHeader:
    return RolloutHeader(
        length=len(rollout.completion_ids),
        rewards={name: None if math.isnan(value) else float(value) for name, value in rollout.rewards.items()},
        reward=float(rollout.reward),
        finish_reason=rollout.finish_reason,
        observed=rollout.observed,
        turns=rollout.turns,
        tool_calls=rollout.tool_calls,
        tool_errors=rollout.tool_errors,
        environment_s=float(rollout.environment_s),
        version_spans=rollout.version_spans,
    )


def _widened(ids: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """[C, K] -> [C, width], filled with -1."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)


def read_group(header: GroupHeader, arrays: Frame) -> Group:
    """Raises WireError or ValueError if they do not fit each other."""
    total = _check(header)
    ref_total = total if header.has_ref_logprobs else 0
    if len(arrays) != header.num_bytes:
        raise WireError("malformed", f"{len(arrays)} bytes of arrays do not fit the lengths in the header")
    ids = np.frombuffer(arrays, "<i4", header.prompt_length + total)
    floats = np.frombuffer(arrays, "<f4", total + ref_total, offset=4 * len(ids))
    supports = np.frombuffer(arrays, "<i4", total * header.support_width, offset=4 * (len(ids) + len(floats)))
    prompt_ids, completion_ids = ids[: header.prompt_length], ids[header.prompt_length :]
    pngs = _read_pngs(header.images, arrays, 4 * header.num_words)
    return _group(
        header,
        prompt_ids,
        (completion_ids, floats[:total], floats[total:], supports.reshape(total, header.support_width)),
        pngs,
    )


def read_outline(header: GroupHeader) -> Group:
    """The group with everything that the header says and arrays of the right lengths that take no memory.

    Their tokens are -1 and their log-probs NaN, so that training on them by mistake fails. PNGs are empty.
    """
    total = _check(header)
    no_ids = np.broadcast_to(np.int32(-1), total)
    no_logprobs = np.broadcast_to(np.float32(math.nan), total)
    no_supports = np.broadcast_to(np.int32(-1), (total, header.support_width))
    prompt_ids = np.broadcast_to(np.int32(-1), header.prompt_length)
    pngs = [b""] * len(header.images)
    return _group(header, prompt_ids, (no_ids, no_logprobs, no_logprobs, no_supports), pngs)


def _group(header: GroupHeader, prompt_ids: NDArray[np.int32], by_token: Sequence[Any], pngs: Sequence[bytes]) -> Group:
    """by_token: ids, old and ref log-probs [total], and supports [total, K], of all completions one after the other."""
    ends = list(itertools.accumulate(rollout.length for rollout in header.rollouts))
    rollouts = tuple(
        _rollout(rollout, header, *(array[end - rollout.length : end] for array in by_token))
        for rollout, end in zip(header.rollouts, ends, strict=True)
    )
    images = tuple(EncodedImage(png, image.grid_thw) for png, image in zip(pngs, header.images, strict=True))
    ids = header.group_id, header.policy_version, header.problem_index
    return Group(*ids, prompt_ids, rollouts, images, header.failures)


def _rollout(
    rollout: RolloutHeader,
    header: GroupHeader,
    completion_ids: NDArray[np.int32],
    old_logprobs: NDArray[np.float32],
    ref_logprobs: NDArray[np.float32],
    supports: NDArray[np.int32],
) -> Rollout:
    return Rollout(
        completion_ids=completion_ids,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs if header.has_ref_logprobs else None,
        rewards={name: math.nan if value is None else value for name, value in rollout.rewards.items()},
        reward=rollout.reward,
        finish_reason=rollout.finish_reason,
        sampling_mask=supports if header.support_width else None,
        observed=rollout.observed,
        turns=rollout.turns,
        tool_calls=rollout.tool_calls,
        tool_errors=rollout.tool_errors,
        environment_s=rollout.environment_s,
        version_spans=rollout.version_spans,
    )


def _check(header: GroupHeader) -> int:
    """Tokens of all completions. Raises WireError or ValueError for what no group can have."""
    lengths = [rollout.length for rollout in header.rollouts]
    if min([header.prompt_length, header.support_width, *lengths, *(image.size for image in header.images)]) < 0:
        raise WireError("malformed", "negative length")
    for rollout in header.rollouts:
        rollout.check()
    return sum(lengths)


def _read_pngs(images: Sequence[ImageHeader], arrays: Frame, begin: int) -> list[bytes]:
    ends = itertools.accumulate((image.size for image in images), initial=begin)
    return [bytes(arrays[start:end]) for start, end in itertools.pairwise(ends)]


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
