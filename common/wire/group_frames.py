"""Conversion of a group of rollouts to the header and arrays that common/wire/wire.py sends, and back.

    arrays: int32 prompt ids, completion ids │ float32 old log-probs, ref log-probs │ int32 sampling masks │ PNGs │
            experts that the prompt's tokens met, and the completions' but the last of each, of 1 or 2 bytes

All arrays are little-endian and without gaps; their lengths are in the header. Reading copies nothing but the PNGs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.types import EncodedImage, FinishReason, Forks, Group, Rollout

Frame = bytes | memoryview

_DTYPES = {"completion_ids": "<i4", "old_logprobs": "<f4", "ref_logprobs": "<f4", "sampling_mask": "<i4"}
"""The arrays of a Rollout. Each stands in the frame for all rollouts, one after the other, before the next begins."""


class RolloutHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of a Rollout beside its arrays, under the same names."""

    length: int  # C, tokens of the completion
    rewards: dict[str, float]
    reward: float
    finish_reason: FinishReason
    observed: tuple[tuple[int, int], ...] = ()
    turns: int = 1
    tool_calls: int = 0
    tool_errors: int = 0
    environment_s: float = 0.0
    version_spans: tuple[tuple[int, int], ...] = ()
    turn_rewards: tuple[float, ...] = ()
    forks: Forks = ()

    def check(self, prompt: int) -> None:
        """Raises ValueError if its spans do not lie in the completion, or its counts do not fit together."""
        spans = [*itertools.chain(*self.observed), self.length]
        begins_observed = spans[0] == 0  # if the agents of a group started with different prompts
        has_sampled_between = not self.observed or _ascend(spans if begins_observed else [0, *spans])
        counts_fit = len(self.observed) < self.turns + begins_observed and 0 <= self.tool_errors <= self.tool_calls
        if not (has_sampled_between and counts_fit and 0 <= self.environment_s < math.inf):
            raise ValueError(f"{self} is no rollout")
        if len(self.turn_rewards) not in (0, len(self.observed) + 1) or not all(map(math.isfinite, self.turn_rewards)):
            raise ValueError(f"turn rewards {self.turn_rewards} of {self.turns} turns")
        starts, versions = [start for start, _ in self.version_spans], [version for _, version in self.version_spans]
        if starts and not (starts[0] == 0 and _ascend([*starts, self.length]) and _ascend(versions)):
            raise ValueError(f"version spans {self.version_spans} of {self.length} tokens")
        begins, size, before = {start for start, _ in self.observed}, prompt, 0
        for start, kept in self.forks:
            if not (start in begins and before < start and 0 <= kept < size + start - before):
                raise ValueError(f"forks {self.forks} of {prompt} + {self.length} tokens, observed {self.observed}")
            before, size = start, kept


_PLAIN_FIELDS = [name for name in RolloutHeader.__struct_fields__ if name != "length"]


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
    routing: tuple[int, int, Literal[1, 2]] | None = None  # layers, experts of a token, bytes of each
    source: str = ""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all completions."""
        return sum(rollout.length for rollout in self.rollouts)

    @property
    def widths(self) -> dict[str, int]:
        """Returns for each array of a Rollout its words of 4 bytes per token, 0 if the array is absent."""
        return dict(zip(_DTYPES, (1, 1, int(self.has_ref_logprobs), self.support_width), strict=True))

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes of the arrays."""
        num_words = self.prompt_length + sum(self.widths.values()) * self.num_tokens
        return 4 * num_words + sum(image.size for image in self.images) + math.prod(self.routed)

    @property
    def routed(self) -> tuple[int, ...]:
        """Returns (tokens, layers, experts of a token, bytes of each) for the prompt and all completions; else (0,)."""
        return (self.prompt_length + self.num_tokens - len(self.rollouts), *self.routing) if self.routing else (0,)

    def check(self) -> None:
        """Raises WireError or ValueError for values that no group can have."""
        sizes = [rollout.length for rollout in self.rollouts] + [image.size for image in self.images]
        if min([self.prompt_length, self.support_width, *sizes, *self.routed, *(self.routing or ())]) < 0:
            raise WireError("malformed", "negative length")
        if self.routing and not all(rollout.length for rollout in self.rollouts):
            raise WireError("malformed", "experts of a completion without tokens")
        for rollout in self.rollouts:
            rollout.check(self.prompt_length)


def write_group(group: Group) -> tuple[GroupHeader, bytes]:
    """Returns the header and the arrays of a group. Inverse of `read_group`."""
    rollouts = group.rollouts
    masks = [rollout.sampling_mask for rollout in rollouts if rollout.sampling_mask is not None]
    header = GroupHeader(
        group_id=group.group_id,
        policy_version=group.policy_version,
        problem_index=group.problem_index,
        prompt_length=len(group.prompt_ids),
        has_ref_logprobs=any(rollout.ref_logprobs is not None for rollout in rollouts),
        rollouts=tuple(
            RolloutHeader(len(rollout.completion_ids), *(getattr(rollout, name) for name in _PLAIN_FIELDS))
            for rollout in rollouts
        ),
        support_width=max((mask.shape[1] for mask in masks), default=0),
        images=tuple(ImageHeader(image.grid_thw, len(image.png)) for image in group.images),
        failures=group.failures,
        routing=None if group.routing is None else (*group.routing.shape[1:], group.routing.itemsize),
        source=group.source,
    )
    routed = [] if group.routing is None else [group.routing, *(rollout.routing for rollout in rollouts)]
    parts = [group.prompt_ids.astype("<i4").tobytes()]
    for (name, dtype), width in zip(_DTYPES.items(), header.widths.values(), strict=True):
        arrays = [getattr(rollout, name) for rollout in rollouts] if width else []
        parts += [_pad_to_width(array, width).astype(dtype).tobytes() for array in arrays]
    experts = [array.astype(f"<u{array.itemsize}").tobytes() for array in routed if array is not None]
    return header, b"".join([*parts, *(image.png for image in group.images), *experts])


def _pad_to_width(array: NDArray[Any], width: int) -> NDArray[Any]:
    """Pads an array [C, K] to [C, width] with -1. An array [C] stays as it is."""
    return array if array.ndim == 1 else np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=-1)


def read_group(header: GroupHeader, arrays: Frame) -> Group:
    """Returns the group. Raises WireError or ValueError if the header and the arrays do not fit each other."""
    header.check()
    if len(arrays) != header.num_bytes:
        raise WireError("malformed", f"{len(arrays)} bytes of arrays do not fit the lengths in the header")
    prompt_ids = np.frombuffer(arrays, "<i4", header.prompt_length)
    by_token, place = dict[str, NDArray[Any]](), prompt_ids.nbytes
    for name, width in header.widths.items():
        flat = np.frombuffer(arrays, _DTYPES[name], header.num_tokens * width, place)
        by_token[name] = flat.reshape(header.num_tokens, width)
        place += flat.nbytes
    ends = list(itertools.accumulate((image.size for image in header.images), initial=place))
    pngs = [bytes(arrays[start:end]) for start, end in itertools.pairwise(ends)]
    routed = None
    if header.routing:
        routed = np.frombuffer(arrays, f"<u{header.routed[-1]}", offset=ends[-1]).reshape(header.routed[:-1])
    return _assemble_group(header, prompt_ids, by_token, pngs, routed)


def read_outline(header: GroupHeader) -> Group:
    """Returns the group with all data of the header, and arrays of the right lengths that take no memory.

    Their tokens are -1, their log-probs NaN and their experts the last, so that training on them by mistake fails.
    PNGs are empty.
    """
    header.check()
    fillers = {"<i4": -1, "<f4": math.nan}
    by_token = {
        name: np.broadcast_to(np.array(fillers[dtype], dtype), (header.num_tokens, header.widths[name]))
        for name, dtype in _DTYPES.items()
    }
    prompt_ids = np.broadcast_to(np.int32(-1), header.prompt_length)
    last = np.array(2 ** (8 * header.routed[-1]) - 1, f"<u{header.routed[-1] or 1}")
    routed = np.broadcast_to(last, header.routed[:-1]) if header.routing else None
    return _assemble_group(header, prompt_ids, by_token, [b""] * len(header.images), routed)


def _assemble_group(
    header: GroupHeader,
    prompt_ids: NDArray[np.int32],
    by_token: Mapping[str, NDArray[Any]],  # array of a Rollout -> [tokens of all completions in order, words each]
    pngs: Sequence[bytes],
    routed: NDArray[Any] | None,
) -> Group:
    ends = itertools.accumulate((rollout.length for rollout in header.rollouts), initial=0)
    rollouts, place = [], header.prompt_length
    for plain, (start, end) in zip(header.rollouts, itertools.pairwise(ends), strict=True):
        fields = {name: getattr(plain, name) for name in _PLAIN_FIELDS}
        for name, width in header.widths.items():
            array = by_token[name][start:end]
            fields[name] = None if width == 0 else array if name == "sampling_mask" else array[:, 0]
        if routed is not None:
            fields["routing"] = routed[place : (place := place + plain.length - 1)]
        rollouts.append(Rollout(**fields))
    images = tuple(EncodedImage(png, image.grid_thw) for png, image in zip(pngs, header.images, strict=True))
    ids = header.group_id, header.policy_version, header.problem_index
    prompt_routing = None if routed is None else routed[: header.prompt_length]
    return Group(*ids, prompt_ids, tuple(rollouts), images, header.failures, prompt_routing, header.source)


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
