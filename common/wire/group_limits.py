"""The limits of a valid group in this run: every number of a received group is checked before it is used."""

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError, require
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
    """Raises WireError if the group cannot be a valid one."""
    check_spans(group)
    _check_size(group, limits)
    _check_failures(group, limits)
    _check_versions(group, limits)
    require(0 < len(group.prompt_ids) <= limits.max_prompt_length, "prompt_length", f"{len(group.prompt_ids)} tokens")
    _check_ids(group.prompt_ids, limits.vocab_size)
    _check_images(group, limits.images)
    _check_routing(group, limits)
    for rollout in group.rollouts:
        length = len(rollout.completion_ids)
        require(0 < length <= limits.max_completion_length, "completion_length", f"{length} tokens")
        _check_ids(rollout.completion_ids, limits.vocab_size)
        _check_logprobs(rollout.old_logprobs, length)
        wants = "needs reference log-probs and got none" if limits.needs_ref_logprobs else "wants none and got some"
        is_wanted = (rollout.ref_logprobs is not None) == limits.needs_ref_logprobs
        require(is_wanted, "reference", f"the trainer {wants}")
        if rollout.ref_logprobs is not None:
            _check_logprobs(rollout.ref_logprobs, length)
        _check_sampling_mask(rollout, limits)
        _check_turns(rollout, limits)
        finite = math.isfinite(rollout.reward) and not any(map(math.isinf, rollout.rewards.values()))
        require(finite, "reward", f"{rollout.reward} from {dict(rollout.rewards)}")
        names = tuple(rollout.rewards)
        require(names == limits.reward_funcs, "reward_funcs", f"{names}, expected {limits.reward_funcs}")


def check_spans(group: Group) -> None:
    """Raises WireError if spans do not lie in their completion, or counts do not fit together."""
    for r in group.rollouts:
        length, turns = len(r.completion_ids), f"{r.turns} turns, {r.tool_errors} errors of {r.tool_calls} calls"
        spans = [*itertools.chain(*r.observed), length]
        begins_observed = spans[0] == 0  # if the agents of a group started with different prompts
        has_sampled_between = not r.observed or _ascend(spans if begins_observed else [0, *spans])
        counts_fit = len(r.observed) < r.turns + begins_observed and 0 <= r.tool_errors <= r.tool_calls
        fits = has_sampled_between and counts_fit and 0 <= r.environment_s < math.inf
        what = f"{length} tokens, observed {r.observed}, {turns}, {r.environment_s} s is no rollout"
        require(fits, "malformed", what)
        fits = len(r.turn_rewards) in (0, len(r.observed) + 1) and all(map(math.isfinite, r.turn_rewards))
        require(fits, "malformed", f"turn rewards {r.turn_rewards} of {r.turns} turns")
        starts, versions = [start for start, _ in r.version_spans], [version for _, version in r.version_spans]
        fits = not starts or (starts[0] == 0 and _ascend([*starts, length]) and _ascend(versions))
        require(fits, "malformed", f"version spans {r.version_spans} of {length} tokens")
        begins, size, before = {start for start, _ in r.observed}, len(group.prompt_ids), 0
        what = f"forks {r.forks} of {size} + {length} tokens, observed {r.observed}"
        for start, kept in r.forks:
            require(start in begins and before < start and 0 <= kept < size + start - before, "malformed", what)
            before, size = start, kept


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def _check_size(group: Group, limits: Limits) -> None:
    found, failed = len(group.rollouts), len(group.failures)
    what = f"{found} rollouts and {failed} failures, expected {limits.num_generations}"
    require(found + failed == limits.num_generations and found >= 2, "group_size", what)


def _check_failures(group: Group, limits: Limits) -> None:
    reasons = [*group.failures, *(r.failure.reason for r in group.rollouts if r.failure)]
    require(not reasons or limits.max_turns, "failure", "there is no environment that could have failed")
    longest = max(map(len, reasons), default=0)
    require(longest <= MAX_FAILURE, "failure", f"a reason of more than {MAX_FAILURE} characters")


def _check_versions(group: Group, limits: Limits) -> None:
    has_spans = any(r.version_spans for r in group.rollouts)
    require(limits.in_flight_updates or not has_spans, "version_spans", "versions of single tokens nobody asked for")
    oldest, version = oldest_version(group.policy_version, group.rollouts), group.policy_version
    require(oldest == version, "version_spans", f"its oldest token is of {oldest}, it is of {version}")


def _check_turns(rollout: Rollout, limits: Limits) -> None:
    """Raises WireError unless observed tokens have log-probs of 0 and no alternatives, and turns are within limits."""
    observed = np.delete(np.arange(len(rollout.completion_ids)), rollout.sampled())
    logprobs = [x[observed] for x in (rollout.old_logprobs, rollout.ref_logprobs) if x is not None]
    require(not any(map(np.any, logprobs)), "observed", "an observed token has a log-prob")
    is_alone = rollout.sampling_mask is None or (rollout.sampling_mask[observed, 1:] == -1).all()
    require(is_alone, "observed", "an observed token has a set of tokens that could have been sampled")
    is_allowed = rollout.turns <= max(1, limits.max_turns) and (limits.max_turns or not rollout.tool_calls)
    what = f"{rollout.turns} turns and {rollout.tool_calls} calls, at most {limits.max_turns}"
    require(is_allowed, "turns", what)


def _check_routing(group: Group, limits: Limits) -> None:
    wants = "wants none and got some" if limits.experts is None else "needs the experts of each token and got none"
    is_wanted = (limits.experts is None) == (group.routing is None)
    require(is_wanted, "routing", f"the trainer {wants}: give both the same algorithm.router_replay")
    if limits.experts is None or group.routing is None:
        return
    count, per_token = limits.experts
    routed = [(group.routing, len(group.prompt_ids)), *((r.routing, len(r.completion_ids) - 1) for r in group.rollouts)]
    for experts, tokens in routed:
        shape = (tokens, *group.routing.shape[1:2], per_token)
        if experts is None or experts.shape != shape or experts.max(initial=0) >= count:
            found = "none" if experts is None else f"{experts.shape} up to {experts.max(initial=0)}"
            raise WireError("routing", f"experts: {found}, expected {shape} below {count}")


def _check_images(group: Group, limits: ImageLimits | None) -> None:
    """Raises WireError unless every PNG decodes to the size of its grid and the prompt has all its image tokens."""
    count, tokens = len(group.images), 0
    if limits is None:
        return require(not count, "image", f"{count} images nobody asked for")
    is_rewritten = count and any(rollout.forks for rollout in group.rollouts)
    require(not is_rewritten, "image", "the history of a prompt with images was rewritten")
    require(count <= limits.max_images, "image", f"{count} images, at most {limits.max_images} are allowed")
    for image in group.images:
        times, rows, columns = image.grid_thw
        is_whole = min(rows, columns) > 0 and not (rows % limits.merge_size or columns % limits.merge_size)
        require(times == 1 and is_whole, "image", f"a grid of {image.grid_thw} patches")
        try:
            size = picture_size(image.png, limits.max_pixels)
        except ValueError as error:
            raise WireError("image", f"a PNG of {len(image.png)} bytes: {error}") from None
        what = f"{size[1]} × {size[0]} pixels in a grid of {rows} × {columns} patches"
        require(size == (rows * limits.patch_size, columns * limits.patch_size), "image", what)
        tokens += rows * columns // limits.merge_size**2
    found = int((group.prompt_ids == limits.image_token).sum())
    require(found == tokens, "image", f"{found} image tokens in the prompt, its images have {tokens}")


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
    is_wanted, tokens = (ids is None) == (limits.max_sampling_mask == 0), len(rollout.completion_ids)
    require(is_wanted, "sampling_mask", f"{'no' if ids is None else 'unwanted'} sets of kept tokens")
    if ids is None:
        return
    require(ids.ndim == 2 and len(ids) == tokens, "sampling_mask", f"sets of shape {ids.shape} for {tokens} tokens")
    ordered = np.sort(ids, -1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if ids.shape[1] > limits.max_sampling_mask or ids.min() < -1 or ids.max() >= limits.vocab_size or repeats.any():
        raise WireError("sampling_mask", f"{ids.shape[1]} tokens, {ids.min()}…{ids.max()}, repeated: {repeats.any()}")
    is_first = (ids[:, 0] == rollout.completion_ids).all()
    require(is_first, "sampling_mask", "a sampled token is not the first of its set")


def _check_ids(ids: NDArray[np.int32], vocab_size: int) -> None:
    low, high = ids.min(), ids.max()
    is_known = ids.ndim == 1 and low >= 0 and high < vocab_size
    require(is_known, "token_id", f"{low}…{high} outside the vocabulary of {vocab_size}")


def _check_logprobs(logprobs: NDArray[np.float32], length: int) -> None:
    require(logprobs.shape == (length,), "logprob_length", f"{logprobs.shape} log-probs for {length} tokens")
    # 1e-3 above zero: a log-prob of a certain token may round to a hair above 0.
    require(np.isfinite(logprobs).all() and logprobs.max() <= 1e-3, "logprob", "not finite or above 0")
