"""A group of rollouts <-> its header and its arrays, as common/wire.py sends them.

    arrays: int32 prompt ids, completion ids │ float32 old log-probs, ref log-probs │ int32 sampling masks │ PNGs

All little-endian and without gaps; the lengths stand in the header. Reading copies nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from common import version_spans
from common.errors import WireError
from common.turns import SINGLE_TURN, EpisodeFields, episode_of, with_episode
from common.types import EncodedImage, FinishReason, Group, Rollout


class GroupHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="group"):
    group_id: int
    policy_version: int
    problem_index: int
    prompt_length: int
    completion_lengths: list[int]
    has_ref_logprobs: bool
    rewards: list[dict[str, float | None]]  # None = NaN: the function does not apply
    reward: list[float]
    finish_reasons: list[FinishReason]
    support_width: int = 0  # K of sampling_mask; 0: there are none
    # Absent where there are none, so that groups of single turns are the frames that they always were.
    episodes: list[EpisodeFields] | msgspec.UnsetType = msgspec.UNSET
    failures: list[str] | msgspec.UnsetType = msgspec.UNSET
    version_spans: list[list[tuple[int, int]]] | msgspec.UnsetType = msgspec.UNSET  # by rollout


class _Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grid_thw: tuple[int, int, int]
    size: int  # bytes of its PNG


class ImageGroupHeader(GroupHeader, frozen=True, forbid_unknown_fields=True, tag="image_group"):
    """A kind of its own, so that groups of text are the frames that they always were."""

    images: list[_Image] = []


def write_group(group: Group) -> tuple[GroupHeader, bytes]:
    """Inverse of `read_group`."""
    rollouts = group.rollouts
    images = [_Image(image.grid_thw, len(image.png)) for image in group.images]
    kind = functools.partial(ImageGroupHeader, images=images) if images else GroupHeader
    header = kind(
        group_id=group.group_id,
        policy_version=group.policy_version,
        problem_index=group.problem_index,
        prompt_length=len(group.prompt_ids),
        completion_lengths=[len(r.completion_ids) for r in rollouts],
        has_ref_logprobs=any(r.ref_logprobs is not None for r in rollouts),
        rewards=[{k: None if math.isnan(v) else float(v) for k, v in r.rewards.items()} for r in rollouts],
        reward=[float(r.reward) for r in rollouts],
        finish_reasons=[r.finish_reason for r in rollouts],
        support_width=max((r.sampling_mask.shape[1] for r in rollouts if r.sampling_mask is not None), default=0),
        episodes=_episodes(rollouts),
        failures=list(group.failures) or msgspec.UNSET,
        version_spans=version_spans.listed(rollouts),
    )
    supports = [_widened(r.sampling_mask, header.support_width) for r in rollouts if r.sampling_mask is not None]
    ids = [group.prompt_ids, *(r.completion_ids for r in rollouts)]
    floats = [r.old_logprobs for r in rollouts] + [r.ref_logprobs for r in rollouts if r.ref_logprobs is not None]
    parts = [a.astype("<i4") for a in ids] + [a.astype("<f4") for a in floats] + [a.astype("<i4") for a in supports]
    return header, b"".join([*(a.tobytes() for a in parts), *(image.png for image in group.images)])


def _episodes(rollouts: Sequence[Rollout]) -> list[EpisodeFields] | msgspec.UnsetType:
    of = [episode_of(rollout) for rollout in rollouts]
    return msgspec.UNSET if all(episode == SINGLE_TURN for episode in of) else of


def _widened(ids: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """[C, K] -> [C, width], filled with -1."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)


def read_group(header: GroupHeader, arrays: bytes) -> Group:
    """Raises WireError or ValueError if they do not fit each other."""
    lengths = header.completion_lengths
    images = header.images if isinstance(header, ImageGroupHeader) else []
    episodes = [SINGLE_TURN] * len(lengths) if header.episodes is msgspec.UNSET else header.episodes
    none: list[list[tuple[int, int]]] = [[]] * len(lengths)
    versions = none if header.version_spans is msgspec.UNSET else header.version_spans
    _check_lists(header, images, len(episodes), len(versions))
    total = sum(lengths)
    ref_total = total if header.has_ref_logprobs else 0
    words = header.prompt_length + (2 + header.support_width) * total + ref_total
    if len(arrays) != 4 * words + sum(image.size for image in images):
        raise WireError("malformed", f"{len(arrays)} bytes of arrays do not fit the lengths in the header")
    ids = np.frombuffer(arrays, "<i4", header.prompt_length + total)
    floats = np.frombuffer(arrays, "<f4", total + ref_total, offset=4 * len(ids))
    supports = np.frombuffer(arrays, "<i4", total * header.support_width, offset=4 * (len(ids) + len(floats)))
    supports = supports.reshape(total, header.support_width)
    ends = np.cumsum(lengths).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    completion_ids, old_logprobs, ref_logprobs = ids[header.prompt_length :], floats[:total], floats[total:]
    rollouts = tuple(
        with_episode(
            Rollout(
                completion_ids=completion_ids[span],
                old_logprobs=old_logprobs[span],
                ref_logprobs=ref_logprobs[span] if header.has_ref_logprobs else None,
                rewards={k: math.nan if v is None else v for k, v in header.rewards[i].items()},
                reward=header.reward[i],
                finish_reason=header.finish_reasons[i],
                sampling_mask=supports[span] if header.support_width else None,
                version_spans=version_spans.checked(versions[i], lengths[i]),
            ),
            episodes[i],
        )
        for i, span in enumerate(spans)
    )
    prompt_ids = ids[: header.prompt_length]
    pngs = tuple(_read_images(images, arrays, 4 * words))
    failures = () if header.failures is msgspec.UNSET else tuple(header.failures)
    return Group(header.group_id, header.policy_version, header.problem_index, prompt_ids, rollouts, pngs, failures)


def _check_lists(header: GroupHeader, images: Sequence[_Image], num_episodes: int, num_versions: int) -> None:
    sizes = [header.prompt_length, header.support_width, *header.completion_lengths, *(image.size for image in images)]
    if min(sizes) < 0:
        raise WireError("malformed", "negative length")
    n = len(header.completion_lengths)
    if not n == num_episodes == num_versions == len(header.rewards) == len(header.reward) == len(header.finish_reasons):
        raise WireError("malformed", "lists of different lengths")


def _read_images(images: list[_Image], arrays: bytes, begin: int) -> Iterator[EncodedImage]:
    for image in images:
        yield EncodedImage(arrays[begin : begin + image.size], image.grid_thw)
        begin += image.size
