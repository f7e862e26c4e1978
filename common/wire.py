"""Records <-> frames. Three frames a message: a msgpack header, raw little-endian arrays, a digest of both.

No pickle and no compression. Everything that arrives is decoded by type, then range-checked; what fails raises
WireError and is counted by its reason, never used. CURVE authenticates tcp; the digest catches damage on any link.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.png import check_png
from common.turns import MAX_FAILURE, SINGLE_TURN, Episode, episode_of, trouble, with_episode
from common.types import EncodedImage, EvalRequest, EvalResult, FinishReason, Group, Rollout, Tombstone

PROTO = 2
_DIGEST_BYTES = 16


class WireError(Exception):
    """A message that must not be used. `reason` is a short, countable name."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Sampler → trainer, each second until credited: who I am and what I can serve."""

    pid: int
    dataset_fingerprint: str  # of the training rows; a resumed run must find the same
    tokenizer_hash: str
    num_problems: int
    num_eval_problems: int
    scores_reference: bool = False  # its groups carry ref_logprobs; the trainer must want the same
    incarnation: str = ""  # of this sampler: a new one each time it starts, for in a container every pid is the same
    eval_fingerprint: str = ""  # of the held-out rows


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="credit"):
    """Trainer → sampler, on change and each second: the full state, so that losing one is harmless."""

    cursor: int  # groups below it are trained and may be forgotten
    lease: list[int]  # groups this sampler shall produce, and no other; it sends again what it sent and finds here
    evals: list[EvalRequest]  # evaluation chunks this sampler shall produce
    version: int  # sample with exactly these weights
    weights_dir: str
    manifest_sha256: str
    progress: int  # of the training loop; a lower one was overtaken on the way


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """Sampler → trainer from the work loop, so that a stuck loop falls silent."""

    phase: str
    progress: int
    loaded_version: int | None
    stats: dict[str, float]  # metrics of the sampler, newest values


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """Either way: I end, and why. exit_code is what the receiver should exit with too."""

    reason: str
    exit_code: int = 0


class _GroupHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="group"):
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
    episodes: list[Episode] | msgspec.UnsetType = msgspec.UNSET
    failures: list[str] | msgspec.UnsetType = msgspec.UNSET


class _Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grid_thw: tuple[int, int, int]
    size: int  # bytes of its PNG


class _ImageGroupHeader(_GroupHeader, frozen=True, forbid_unknown_fields=True, tag="image_group"):
    """A kind of its own, so that groups of text are the frames that they always were."""

    images: list[_Image] = []


class _Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tombstone"):
    group_id: int
    policy_version: int
    reason: str


class _EvalResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="eval"):
    result: EvalResult


Message = Hello | Credit | Beat | Bye | Group | Tombstone | EvalResult
_Body = Hello | Credit | Beat | Bye | _GroupHeader | _ImageGroupHeader | _Tombstone | _EvalResult


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    proto: int
    run_id: str
    incarnation: str  # of the trainer: a new one each time it starts; empty in a HELLO that has not met one yet
    sampler_id: str
    body: _Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True)
class Envelope:
    """Who speaks, and to which start of the trainer it belongs."""

    run_id: str
    incarnation: str
    sampler_id: str


@dataclass(frozen=True)
class ImageLimits:
    """What honest images look like in this run."""

    max_images: int  # of a prompt
    max_pixels: int  # of an image
    patch_size: int
    merge_size: int
    image_token: int  # stands in a prompt once for each merged patch


@dataclass(frozen=True)
class Limits:
    """What an honest group looks like in this run."""

    vocab_size: int
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    needs_ref_logprobs: bool  # beta above 0, and the sampler scores the reference
    reward_funcs: tuple[str, ...]
    max_sampling_mask: int = 0  # tokens that one could have been; 0: all of the vocabulary
    images: ImageLimits | None = None  # None: prompts are text alone


def encode(envelope: Envelope, message: Message) -> list[bytes]:
    """Three frames. Inverse of `decode`."""
    body, arrays = _to_body(message)
    header = _encoder.encode(
        _Header(PROTO, envelope.run_id, envelope.incarnation, envelope.sampler_id, body),
    )
    return [header, arrays, _digest(header, arrays)]


def decode(frames: list[bytes]) -> tuple[Envelope, Message]:
    """Raises WireError for anything that `encode` did not make."""
    if len(frames) != 3:
        raise WireError("frame_count", f"{len(frames)} frames, expected 3")
    header, arrays, digest = frames
    if _digest(header, arrays) != digest:
        raise WireError("digest")
    try:
        decoded = _decoder.decode(header)
        if decoded.proto != PROTO:
            raise WireError("proto", f"the peer speaks protocol {decoded.proto}, this is {PROTO}: update one of them")
        message = _from_body(decoded.body, arrays)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise WireError("malformed", str(error)) from None
    return Envelope(decoded.run_id, decoded.incarnation, decoded.sampler_id), message


def check_group(group: Group, limits: Limits) -> None:
    """Raises WireError if the group cannot be an honest one. Shapes were checked by `decode`."""
    found, failed = len(group.rollouts), len(group.failures)
    if found + failed != limits.num_generations or found < 2:
        raise WireError("group_size", f"{found} rollouts and {failed} failures, expected {limits.num_generations}")
    if any(len(reason) > MAX_FAILURE for reason in group.failures):
        raise WireError("failure", f"a reason of more than {MAX_FAILURE} characters")
    if not 0 < len(group.prompt_ids) <= limits.max_prompt_length:
        raise WireError("prompt_length", f"{len(group.prompt_ids)} tokens")
    _check_ids(group.prompt_ids, limits.vocab_size)
    _check_images(group, limits.images)
    for rollout in group.rollouts:
        length = len(rollout.completion_ids)
        if not 0 < length <= limits.max_completion_length:
            raise WireError("completion_length", f"{length} tokens")
        _check_ids(rollout.completion_ids, limits.vocab_size)
        _check_logprobs(rollout.old_logprobs, length)
        if (rollout.ref_logprobs is not None) != limits.needs_ref_logprobs:
            what = "needs reference log-probs and got none" if limits.needs_ref_logprobs else "wants none and got some"
            raise WireError("reference", f"the trainer {what}")
        if rollout.ref_logprobs is not None:
            _check_logprobs(rollout.ref_logprobs, length)
        _check_sampling_mask(rollout, limits)
        if wrong := trouble(rollout):
            raise WireError("observed", wrong)
        if not math.isfinite(rollout.reward) or any(map(math.isinf, rollout.rewards.values())):
            raise WireError("reward", f"{rollout.reward} from {dict(rollout.rewards)}")
        if tuple(rollout.rewards) != limits.reward_funcs:
            raise WireError("reward_funcs", f"{tuple(rollout.rewards)}, expected {limits.reward_funcs}")


def _check_images(group: Group, limits: ImageLimits | None) -> None:
    """Afterwards every PNG decodes, to the size of its grid, and the prompt has a place for each of its tokens."""
    if limits is None:
        if group.images:
            raise WireError("image", f"{len(group.images)} images nobody asked for")
        return
    if len(group.images) > limits.max_images:
        raise WireError("image", f"{len(group.images)} images, at most {limits.max_images} are allowed")
    tokens = 0
    for image in group.images:
        times, rows, columns = image.grid_thw
        if times != 1 or min(rows, columns) <= 0 or rows % limits.merge_size or columns % limits.merge_size:
            raise WireError("image", f"a grid of {image.grid_thw} patches")
        try:
            size = check_png(image.png, limits.max_pixels)
        except ValueError as error:
            raise WireError("image", f"a PNG of {len(image.png)} bytes: {error}") from None
        if size != (rows * limits.patch_size, columns * limits.patch_size):
            raise WireError("image", f"{size[1]} × {size[0]} pixels in a grid of {rows} × {columns} patches")
        tokens += rows * columns // limits.merge_size**2
    found = int((group.prompt_ids == limits.image_token).sum())
    if found != tokens:
        raise WireError("image", f"{found} image tokens in the prompt, its images have {tokens}")


def _check_sampling_mask(rollout: Rollout, limits: Limits) -> None:
    ids = rollout.sampling_mask
    if (ids is None) != (limits.max_sampling_mask == 0):
        raise WireError(
            "sampling_mask", "no sets of kept tokens" if ids is None else "sets of kept tokens nobody asked for"
        )
    if ids is None:
        return
    ordered = np.sort(ids, -1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if ids.shape[1] > limits.max_sampling_mask or ids.min() < -1 or ids.max() >= limits.vocab_size or repeats.any():
        raise WireError("sampling_mask", f"{ids.shape[1]} tokens, {ids.min()}…{ids.max()}, repeated: {repeats.any()}")
    if (ids[:, 0] != rollout.completion_ids).any():
        raise WireError("sampling_mask", "a sampled token is not the first of its set")


def _check_ids(ids: NDArray[np.int32], vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise WireError("token_id", f"{ids.min()}…{ids.max()} outside the vocabulary of {vocab_size}")


def _check_logprobs(logprobs: NDArray[np.float32], length: int) -> None:
    if len(logprobs) != length:
        raise WireError("logprob_length", f"{len(logprobs)} log-probs for {length} tokens")
    # 1e-3 above zero: a log-prob of a certain token may round to a hair above 0.
    if length and not (np.isfinite(logprobs).all() and logprobs.max() <= 1e-3):
        raise WireError("logprob", "not finite or above 0")


def _digest(header: bytes, arrays: bytes) -> bytes:
    hasher = hashlib.blake2b(len(header).to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    hasher.update(header)
    hasher.update(arrays)
    return hasher.digest()


def _to_body(message: Message) -> tuple[_Body, bytes]:
    if isinstance(message, Group):
        rollouts = message.rollouts
        images = [_Image(image.grid_thw, len(image.png)) for image in message.images]
        kind = functools.partial(_ImageGroupHeader, images=images) if images else _GroupHeader
        header = kind(
            group_id=message.group_id,
            policy_version=message.policy_version,
            problem_index=message.problem_index,
            prompt_length=len(message.prompt_ids),
            completion_lengths=[len(r.completion_ids) for r in rollouts],
            has_ref_logprobs=any(r.ref_logprobs is not None for r in rollouts),
            rewards=[{k: None if math.isnan(v) else float(v) for k, v in r.rewards.items()} for r in rollouts],
            reward=[float(r.reward) for r in rollouts],
            finish_reasons=[r.finish_reason for r in rollouts],
            support_width=max((r.sampling_mask.shape[1] for r in rollouts if r.sampling_mask is not None), default=0),
            episodes=_episodes(rollouts),
            failures=list(message.failures) or msgspec.UNSET,
        )
        supports = [_widened(r.sampling_mask, header.support_width) for r in rollouts if r.sampling_mask is not None]
        ids = [message.prompt_ids, *(r.completion_ids for r in rollouts)]
        floats = [r.old_logprobs for r in rollouts] + [r.ref_logprobs for r in rollouts if r.ref_logprobs is not None]
        parts = [a.astype("<i4") for a in ids] + [a.astype("<f4") for a in floats] + [a.astype("<i4") for a in supports]
        return header, b"".join([*(a.tobytes() for a in parts), *(image.png for image in message.images)])
    if isinstance(message, Tombstone):
        return _Tombstone(message.group_id, message.policy_version, message.reason), b""
    if isinstance(message, EvalResult):
        return _EvalResult(message), b""
    return message, b""


def _episodes(rollouts: Sequence[Rollout]) -> list[Episode] | msgspec.UnsetType:
    of = [episode_of(rollout) for rollout in rollouts]
    return msgspec.UNSET if all(episode == SINGLE_TURN for episode in of) else of


def _widened(ids: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """[C, K] -> [C, width], filled with -1."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)


def _from_body(body: _Body, arrays: bytes) -> Message:
    if isinstance(body, _GroupHeader):
        return _read_group(body, arrays)
    if arrays:
        raise WireError("malformed", f"{len(arrays)} bytes of arrays behind a {type(body).__name__}")
    if isinstance(body, _Tombstone):
        return Tombstone(body.group_id, body.policy_version, body.reason)
    if isinstance(body, _EvalResult):
        return body.result
    return body


def _read_group(header: _GroupHeader, arrays: bytes) -> Group:
    lengths = header.completion_lengths
    n, total = len(lengths), sum(lengths)
    if header.prompt_length < 0 or header.support_width < 0 or any(length < 0 for length in lengths):
        raise WireError("malformed", "negative length")
    episodes = [SINGLE_TURN] * n if header.episodes is msgspec.UNSET else header.episodes
    if not n == len(episodes) == len(header.rewards) == len(header.reward) == len(header.finish_reasons):
        raise WireError("malformed", "lists of different lengths")
    ref_total = total if header.has_ref_logprobs else 0
    images = header.images if isinstance(header, _ImageGroupHeader) else []
    if any(image.size < 0 for image in images):
        raise WireError("malformed", "negative length")
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
            ),
            episodes[i],
        )
        for i, span in enumerate(spans)
    )
    prompt_ids = ids[: header.prompt_length]
    pngs = tuple(_read_images(images, arrays, 4 * words))
    failures = () if header.failures is msgspec.UNSET else tuple(header.failures)
    return Group(header.group_id, header.policy_version, header.problem_index, prompt_ids, rollouts, pngs, failures)


def _read_images(images: list[_Image], arrays: bytes, begin: int) -> Iterator[EncodedImage]:
    for image in images:
        yield EncodedImage(arrays[begin : begin + image.size], image.grid_thw)
        begin += image.size
