"""The limits of a valid group in this run: every number of a received group is checked before it is used."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.types import Group, Rollout, oldest_version

MAX_FAILURE = 500  # characters of the reason why a rollout is missing
FAILURES_ALLOWED = 0.01  # share of groups, of held-out problems and of rows; more end the run


def too_many(failures: int, total: int, what: str) -> str:
    """Returns a sentence if the run may not go on with so many failures of the total, "" if they are few."""
    if failures <= max(3.0, FAILURES_ALLOWED * total):  # three, however small the total is
        return ""
    return f"{failures} {what}, more than {FAILURES_ALLOWED:g} of them all"


@dataclass(frozen=True)
class ImageLimits:
    """The limits of valid images in this run."""

    max_images: int  # per prompt
    max_pixels: int  # per image
    patch_size: int
    merge_size: int
    image_token: int  # occurs in a prompt once for each merged patch


@dataclass(frozen=True)
class Limits:
    """The limits of a valid group in this run."""

    vocab_size: int
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    needs_ref_logprobs: bool  # beta above 0, and the sampler scores the reference
    reward_funcs: tuple[str, ...]
    max_sampling_mask: int = 0  # tokens that each token could have been; 0: all of the vocabulary
    images: ImageLimits | None = None  # None: prompts are text alone
    max_turns: int = 0  # per rollout with an environment or tools; 0: there are none
    in_flight_updates: bool = False  # tokens of a completion may be of several versions
    experts: tuple[int, int] | None = None  # (per layer, per token) of recorded routing; None: there is none


def check_group(group: Group, limits: Limits) -> None:
    """Raises WireError if the group cannot be a valid one. Shapes were checked by `decode`."""
    _check_size(group, limits)
    _check_versions(group, limits)
    if not 0 < len(group.prompt_ids) <= limits.max_prompt_length:
        raise WireError("prompt_length", f"{len(group.prompt_ids)} tokens")
    _check_ids(group.prompt_ids, limits.vocab_size)
    _check_images(group, limits.images)
    _check_routing(group, limits)
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
        _check_turns(rollout, limits)
        if not math.isfinite(rollout.reward) or any(map(math.isinf, rollout.rewards.values())):
            raise WireError("reward", f"{rollout.reward} from {dict(rollout.rewards)}")
        if tuple(rollout.rewards) != limits.reward_funcs:
            raise WireError("reward_funcs", f"{tuple(rollout.rewards)}, expected {limits.reward_funcs}")


def _check_size(group: Group, limits: Limits) -> None:
    found, failed = len(group.rollouts), len(group.failures)
    if found + failed != limits.num_generations or found < 2:
        raise WireError("group_size", f"{found} rollouts and {failed} failures, expected {limits.num_generations}")
    if failed and not limits.max_turns:
        raise WireError("failure", "there is no environment that could have failed")
    if any(len(reason) > MAX_FAILURE for reason in group.failures):
        raise WireError("failure", f"a reason of more than {MAX_FAILURE} characters")


def _check_versions(group: Group, limits: Limits) -> None:
    if any(r.version_spans for r in group.rollouts) and not limits.in_flight_updates:
        raise WireError("version_spans", "versions of single tokens nobody asked for")
    oldest = oldest_version(group.policy_version, group.rollouts)
    if oldest != group.policy_version:
        raise WireError("version_spans", f"its oldest token is of {oldest}, it is of {group.policy_version}")


def _check_turns(rollout: Rollout, limits: Limits) -> None:
    """Raises WireError unless observed tokens have log-probs of 0 and no alternatives, and turns are within limits."""
    observed = np.delete(np.arange(len(rollout.completion_ids)), rollout.sampled())
    logprobs = [x[observed] for x in (rollout.old_logprobs, rollout.ref_logprobs) if x is not None]
    if any(map(np.any, logprobs)):
        raise WireError("observed", "an observed token has a log-prob")
    if rollout.sampling_mask is not None and (rollout.sampling_mask[observed, 1:] != -1).any():
        raise WireError("observed", "an observed token has a set of tokens that could have been sampled")
    if rollout.turns > max(1, limits.max_turns) or (rollout.tool_calls and not limits.max_turns):
        raise WireError("turns", f"{rollout.turns} turns and {rollout.tool_calls} calls, at most {limits.max_turns}")


def _check_routing(group: Group, limits: Limits) -> None:
    routed = [group.routing, *(rollout.routing for rollout in group.rollouts)]
    if (limits.experts is None) != (group.routing is None):
        wants = "wants none and got some" if limits.experts is None else "needs the experts of each token and got none"
        raise WireError("routing", f"the trainer {wants}: give both the same algorithm.router_replay")
    for experts in routed:
        if limits.experts is None or experts is None or not experts.size:
            continue
        count, per_token = limits.experts
        if experts.shape[2] != per_token or experts.max() >= count:
            raise WireError("routing", f"experts up to {experts.max()} of {count}, {experts.shape[2]} for a token")


def _check_images(group: Group, limits: ImageLimits | None) -> None:
    """Raises WireError unless every PNG decodes to the size of its grid and the prompt has all its image tokens."""
    if limits is None:
        if group.images:
            raise WireError("image", f"{len(group.images)} images nobody asked for")
        return
    if group.images and any(rollout.forks for rollout in group.rollouts):
        raise WireError("image", "the history of a prompt with images was rewritten")
    if len(group.images) > limits.max_images:
        raise WireError("image", f"{len(group.images)} images, at most {limits.max_images} are allowed")
    tokens = 0
    for image in group.images:
        times, rows, columns = image.grid_thw
        if times != 1 or min(rows, columns) <= 0 or rows % limits.merge_size or columns % limits.merge_size:
            raise WireError("image", f"a grid of {image.grid_thw} patches")
        try:
            size = picture_size(image.png, limits.max_pixels)
        except ValueError as error:
            raise WireError("image", f"a PNG of {len(image.png)} bytes: {error}") from None
        if size != (rows * limits.patch_size, columns * limits.patch_size):
            raise WireError("image", f"{size[1]} × {size[0]} pixels in a grid of {rows} × {columns} patches")
        tokens += rows * columns // limits.merge_size**2
    found = int((group.prompt_ids == limits.image_token).sum())
    if found != tokens:
        raise WireError("image", f"{found} image tokens in the prompt, its images have {tokens}")


def picture_size(png: bytes, max_pixels: int) -> tuple[int, int]:
    """Returns (height, width). Raises ValueError unless a PNG decodes to RGB; its size is checked before that."""
    from PIL import Image as images

    try:
        with images.open(io.BytesIO(png), formats=["PNG"]) as picture:
            if picture.mode != "RGB" or picture.width * picture.height > max_pixels:
                raise ValueError(f"{picture.width} × {picture.height} of {picture.mode}, at most {max_pixels} of RGB")
            picture.load()
            return picture.height, picture.width
    except Exception as error:  # PIL's decoders raise what they like
        raise ValueError(str(error)) from None


def _check_sampling_mask(rollout: Rollout, limits: Limits) -> None:
    ids = rollout.sampling_mask
    if (ids is None) != (limits.max_sampling_mask == 0):
        raise WireError("sampling_mask", f"{'no' if ids is None else 'unwanted'} sets of kept tokens")
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
