"""Frames: what was sent arrives unchanged, and nothing that was not sent honestly gets in."""

import dataclasses
import math
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from common.errors import WireError
from common.types import (
    EncodedImage,
    EvalFailure,
    EvalRequest,
    EvalResult,
    EvalSample,
    Failure,
    Group,
    Rollout,
    Tombstone,
)
from common.wire import wire
from common.wire.group_limits import check_group, check_spans
from common.wire.wire import Envelope, decode, encode
from tests.support.protocol_helpers import HELLO, LIMITS, make_group, make_rollout, of_two_turns
from tests.support.speed import overdue

ENVELOPE = Envelope("run", "life", "s0")


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def same(a: Any, b: Any) -> bool:
    """Equality that reads arrays and takes NaN for NaN."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


# ---- what is honest ----------------------------------------------------------------------------------------


def random_rollout(rng: random.Random, with_ref: bool, support: int) -> Rollout:
    """Of 0 to 8 tokens: any ids and numbers, and spans as a rollout can have them."""
    n = rng.randrange(9)
    numbers = np.random.default_rng(rng.randrange(2**32))
    ids = numbers.integers(-(2**31), 2**31, n, np.int32)
    edges = sorted(rng.sample(range(1, n), 2 * rng.randrange((n + 1) // 2))) if n else []
    starts = sorted({0, *rng.sample(range(n), rng.randrange(n))}) if n else []
    calls = rng.randrange(9)
    return Rollout(
        completion_ids=ids,
        old_logprobs=numbers.choice(array(-0.5, 3e38, -0.0, math.inf, math.nan), n),
        ref_logprobs=numbers.normal(size=n).astype(np.float32) if with_ref else None,
        rewards={name: rng.choice([0.5, 1e308, math.nan]) for name in ("answer", "Längen", "")[: rng.randrange(4)]},
        reward=rng.gauss(0, 1e9),
        finish_reason=rng.choice(["stop", "length"]),
        sampling_mask=numbers.integers(-1, 2**31, (n, support), np.int32) if support else None,
        observed=tuple(zip(edges[::2], edges[1::2], strict=True)),
        turns=len(edges) // 2 + rng.randrange(1, 4),
        tool_calls=calls,
        tool_errors=rng.randrange(calls + 1),
        environment_s=rng.random(),
        version_spans=tuple(zip(starts, sorted(rng.sample(range(2**40), len(starts))), strict=True)),
    )


def forked(rng: random.Random, prompt: int, rollout: Rollout) -> Rollout:
    """With forks at some of what was observed."""
    forks, before, size = list[tuple[int, int]](), 0, prompt
    for start, _ in rollout.observed:
        if rng.random() < 0.5:
            forks.append((start, rng.randrange(size + start - before)))
            before, size = forks[-1]
    return replace(rollout, forks=tuple(forks))


def routed(group: Group, dtype: Any = np.uint8, seed: int = 0) -> Group:
    """With 2 of 8 experts in 3 layers for every token but the last of each completion."""
    numbers = np.random.default_rng(seed)

    def experts(tokens: int) -> np.ndarray:
        return numbers.integers(0, 8, (tokens, 3, 2), dtype)

    rollouts = tuple(replace(r, routing=experts(len(r.completion_ids) - 1)) for r in group.rollouts)
    return replace(group, rollouts=rollouts, routing=experts(len(group.prompt_ids)))


def random_group(rng: random.Random) -> Group:
    with_ref, support = rng.random() < 0.5, rng.randrange(3)
    group = Group(
        rng.getrandbits(62),
        rng.getrandbits(31),
        rng.randrange(9),
        np.arange(rng.randrange(5), dtype=np.int32),
        tuple(random_rollout(rng, with_ref, support) for _ in range(rng.randrange(5))),
        images=tuple(EncodedImage(rng.randbytes(rng.randrange(9)), (1, 2, 2)) for _ in range(rng.randrange(3))),
        failures=("timed out", "ünder\0")[: rng.randrange(3)],
    )
    failed = [replace(r, failure=Failure("crash", "ünder\0")) if rng.random() < 0.2 else r for r in group.rollouts]
    group = replace(group, rollouts=tuple(failed))
    group = replace(group, rollouts=tuple(forked(rng, len(group.prompt_ids), r) for r in group.rollouts))
    whole = all(len(r.completion_ids) for r in group.rollouts)
    return routed(group, rng.choice([np.uint8, np.uint16]), rng.randrange(2**32)) if whole else group


HONEST: list[Any] = [
    make_group(3, 1),
    make_group(3, 1, *[make_rollout(ref_logprobs=array(-1, -1))] * 2),
    replace(make_group(3, 1, make_rollout(), of_two_turns()), failures=("timed out",)),
    make_group(3, 1, make_rollout(), make_rollout((3, 4, 5), version_spans=((0, 1), (2, 3)))),
    routed(make_group(3, 1)),
    Tombstone(3, 1, "reward failed"),
    EvalResult("v4", 0, 4, (EvalSample(1, "4\ud7ff", {"answer": 1.0}, 2, "stop"),), (EvalFailure(2, "killed"),)),
    HELLO,
    wire.Credit(8, [8, 9], [EvalRequest("v4", 0, (1, 2))], 4, "/weights/4", "0" * 64, 5),
    wire.Beat("generating", 7, 4, {"total/generate_s": 1.5}),
    wire.Beat("starting", 0, None, {}),
    wire.Bye("done", 130),
]
FRAMES = [encode(ENVELOPE, message) for message in HONEST]


def test_every_message_arrives_as_it_was_sent() -> None:
    rng = random.Random(4)
    for message in [*HONEST, *(random_group(rng) for _ in range(400))]:
        envelope = Envelope(rng.choice(["", "run"]), "a life", f"s{rng.random()}")
        assert same(decode(encode(envelope, message)), (envelope, message))


def test_rewards_may_be_any_number_and_nan_means_does_not_apply() -> None:
    rewards = {"answer": np.float64(0.5), "format": 1, "other": math.nan}
    _, arrived = decode(encode(ENVELOPE, make_group(0, 0, make_rollout(rewards=rewards, reward=np.float32(2)))))
    assert same(arrived.rollouts[0].rewards, {"answer": 0.5, "format": 1.0, "other": math.nan})
    assert arrived.rollouts[0].reward == 2.0
    check_group(make_group(0, 0, make_rollout(), make_rollout(rewards={"answer": math.nan}, reward=0.0)), LIMITS)


def test_the_sampled_tokens_of_a_rollout_are_all_but_the_observed_ones() -> None:
    rollout = of_two_turns(ref_logprobs=array(-1, -1, 0, 0, -2))
    assert rollout.completion_ids[rollout.sampled()].tolist() == [3, 4, 5]
    assert rollout.num_sampled == 3
    assert rollout.ref_log_ratios().tolist() == [0.5, 0.5, 1.5]
    assert make_rollout().completion_ids[make_rollout().sampled()].tolist() == [3, 4]


# ---- damage ------------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str | None:
    """The reason if it is refused; any exception but WireError fails the test."""
    try:
        call()
    except WireError as error:
        return error.reason
    return None


def refused(frames: list[bytes]) -> bool:
    reason = refusal(lambda: decode(frames))
    assert reason in (None, "digest", "frame_count", "malformed", "proto")
    return reason is not None


def flipped(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """With one bit of one frame turned round."""
    which = rng.choice([i for i, frame in enumerate(frames) if frame])
    bit = rng.randrange(8 * len(frames[which]))
    changed = bytearray(frames[which])
    changed[bit // 8] ^= 1 << bit % 8
    return [*frames[:which], bytes(changed), *frames[which + 1 :]]


def test_10000_flipped_bits_are_all_refused(figure: Callable[[str, str], None]) -> None:
    rng = random.Random(1)
    accepted = sum(not refused(flipped(rng, rng.choice(FRAMES))) for _ in range(10_000))
    figure("R7", f"10,000 flipped bits: {accepted} accepted")
    assert accepted == 0


def test_10000_malformed_messages_with_a_right_digest_crash_nothing_and_only_whole_ones_get_in(
    figure: Callable[[str, str], None],
) -> None:
    rng = random.Random(2)
    start, whole = time.monotonic(), 0
    for _ in range(10_000):
        header, arrays, _ = rng.choice(FRAMES)
        frames = sealed(damage(rng, header), damage(rng, arrays) if rng.random() < 0.3 else arrays)
        if not refused(frames):  # then it is a whole message of ours again, such as another number in a field
            assert not refused(encode(*decode(frames)))
            whole += 1
    seconds = time.monotonic() - start
    figure("R7", f"10,000 malformed: {10_000 - whole:,} refused, {whole} still whole, 0 crashes, {seconds:.1f} s")
    assert not overdue(seconds, 10)


def damage(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case 3 if changed:
                changed[at % len(changed)] = rng.randrange(256)
    return bytes(changed)


def sealed(header: bytes, arrays: bytes = b"") -> list[bytes]:
    return [header, arrays, wire._digest(header, arrays)]


def header_with(body: dict[str, Any], **fields: Any) -> bytes:
    values = {"proto": wire.PROTO, "run_id": "r", "incarnation": "i", "sampler_id": "s", "body": body}
    return msgspec.msgpack.encode(values | fields)


BYE = {"type": "bye", "reason": "", "exit_code": 0}
IDS = dict.fromkeys(("group_id", "policy_version", "problem_index"), 0)
ROLLOUT = {"completion_ids": ["<i4", [5]], "old_logprobs": ["<f4", [5]], "ref_logprobs": None, "rewards": {}}
ROLLOUT |= {"reward": 0.0, "finish_reason": "stop", "observed": [[2, 4]], "turns": 2}
BODY = IDS | {"prompt_ids": ["<i4", [1]], "rollouts": [ROLLOUT], "images": [{"png": b"", "grid_thw": [1, 2, 2]}]}
GROUP = {"type": "group", "group": BODY, "pngs": [["|u1", [0]]]}
ARRAYS = bytes(4 * (1 + 2 * 5))


def group_with(**changes: Any) -> list[bytes]:
    return sealed(header_with(GROUP | {"group": BODY | changes}), ARRAYS)


def rollout_with(**changes: Any) -> list[bytes]:
    return group_with(rollouts=[ROLLOUT | changes])


def whole(frames: list[bytes]) -> None:
    _, message = decode(frames)
    if isinstance(message, Group):
        check_spans(message)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        # whole messages, which are those that the builders make
        (sealed(header_with(BYE)), None),
        (group_with(), None),
        (rollout_with(tool_calls=2, tool_errors=2), None),
        (rollout_with(observed=[[1, 2], [3, 4]], turns=3), None),  # a turn before each of them
        (rollout_with(observed=[[0, 3]], turns=1), None),  # but not before one that it begins with
        (rollout_with(forks=[[2, 0]]), None),
        (rollout_with(forks=[[1, 1], [3, 2]], turns=3, observed=[[1, 2], [3, 4]]), None),
        # and those that we never send
        ([], "frame_count"),
        ([b"", b""], "frame_count"),
        ([b"", b"", b""], "digest"),
        (sealed(b""), "malformed"),
        (sealed(header_with(BYE, proto=wire.PROTO + 1)), "proto"),
        (sealed(header_with(BYE, surplus=1)), "malformed"),
        (sealed(header_with(BYE | {"surplus": 1})), "malformed"),
        (sealed(header_with({"type": "nothing of ours"})), "malformed"),
        (sealed(header_with(BYE), b"arrays where none belong"), "malformed"),
        (sealed(header_with(GROUP), ARRAYS + bytes(4)), "malformed"),
        (group_with(prompt_ids=["<i4", [-1]]), "malformed"),
        (group_with(prompt_ids=["<i4", [2**62]]), "malformed"),
        (group_with(prompt_ids=["<i4", []]), "malformed"),
        (group_with(prompt_ids=["<f4", [1]]), "malformed"),
        (group_with(prompt_ids=["|O", [1]]), "malformed"),
        (group_with(prompt_ids="<i4"), "malformed"),
        (group_with(images=[]), "malformed"),  # and one PNG
        (sealed(header_with(GROUP | {"pngs": [["|u1", [-1]]]}), ARRAYS), "malformed"),
        (sealed(header_with(GROUP | {"surplus": 1}), ARRAYS), "malformed"),
        (rollout_with(completion_ids=["<i4", [-1]]), "malformed"),
        (rollout_with(completion_ids=["<i4", [2**62]]), "malformed"),
        (rollout_with(finish_reason="abort"), "malformed"),
        (rollout_with(observed=[[0, 5]]), "malformed"),  # the model writes something
        (rollout_with(observed=[[2, 5]]), "malformed"),  # and ends
        (rollout_with(observed=[[2, 2]]), "malformed"),
        (rollout_with(observed=[[3, 2]]), "malformed"),
        (rollout_with(observed=[[1, 2], [2, 4]], turns=3), "malformed"),  # one span, not two
        (rollout_with(observed=[[3, 4], [1, 2]], turns=3), "malformed"),
        (rollout_with(forks=[[2, 3]]), "malformed"),  # all 3 tokens are kept: no fork
        (rollout_with(forks=[[2, -1]]), "malformed"),
        (rollout_with(forks=[[1, 1]]), "malformed"),  # sampled behind other tokens than it follows
        (rollout_with(forks=[[3, 1]]), "malformed"),  # the sequence before ends with what was observed
        (rollout_with(forks=[[5, 1]]), "malformed"),  # no token follows
        (rollout_with(forks=[[2, 1], [2, 0]]), "malformed"),
        (rollout_with(forks=[[3, 1], [1, 1]], turns=3, observed=[[1, 2], [3, 4]]), "malformed"),
        (rollout_with(forks=[[1, 1], [3, 3]], turns=3, observed=[[1, 2], [3, 4]]), "malformed"),  # 3 tokens: all kept
        (rollout_with(forks=[[2, 2**63]]), "malformed"),
        (rollout_with(turns=1), "malformed"),
        (rollout_with(observed=[[1, 2], [3, 4]], turns=2), "malformed"),
        (rollout_with(observed=[[0, 2], [3, 4]], turns=1), "malformed"),
        (rollout_with(tool_calls=1, tool_errors=2), "malformed"),
        (rollout_with(tool_errors=-1), "malformed"),
        (rollout_with(environment_s=-0.5), "malformed"),
        (rollout_with(environment_s=math.nan), "malformed"),
        (rollout_with(environment_s=math.inf), "malformed"),
        (rollout_with(version_spans=[[1, 4], [2, 5]]), "malformed"),  # does not begin at 0
        (rollout_with(version_spans=[[-1, 4], [0, 5]]), "malformed"),
        (rollout_with(version_spans=[[0, 4], [0, 5]]), "malformed"),  # a span without tokens
        (rollout_with(version_spans=[[0, 4], [2, 5], [1, 6]]), "malformed"),  # goes back
        (rollout_with(version_spans=[[0, 4], [5, 5]]), "malformed"),  # begins behind the last token
        (rollout_with(version_spans=[[0, 4], [1, 4]]), "malformed"),  # a version twice
        (rollout_with(version_spans=[[0, 5], [1, 4]]), "malformed"),  # an older one after a newer
        (sealed(b"\x91" * 500_000), "malformed"),  # arrays in arrays in arrays
        (sealed(header_with(BYE)[:-5] + b"\x91" * 500_000), "malformed"),
        (sealed(b"\x85\xa5proto\xdd\xff\xff\xff\xff"), "malformed"),  # says that four billion items follow
    ],
)
def test_messages_that_we_never_send_are_refused_and_whole_ones_not(frames: list[bytes], reason: str | None) -> None:
    assert refusal(lambda: whole(frames)) == reason


def test_a_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    bomb = pickle.dumps(Bomb())
    for frames in (sealed(bomb), sealed(header_with(BYE), bomb), [bomb] * 3, sealed(header_with(BYE, run_id=bomb))):
        assert refused(frames)
    assert list(tmp_path.iterdir()) == []
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()  # it would have


# ---- what this run cannot have -----------------------------------------------------------------------------

REF = {"ref_logprobs": array(-1, -1, 0, 0, -1)}
SET = np.array([[3, 9], [4, -1], [60, -1], [61, -1], [5, 6]], np.int32)
IN_TURNS, SCORED, FILTERED = {"max_turns": 2}, {"needs_ref_logprobs": True}, {"max_sampling_mask": 2}
EXPERTS = {"experts": (8, 2)}
OF_4_AND_5, IN_FLIGHT = make_rollout(version_spans=((0, 4), (1, 5))), {"in_flight_updates": True}


def one_of(*tokens: int, **changes: Any) -> Group:
    """Two rollouts, the second one with these changes."""
    return make_group(0, 0, make_rollout(), make_rollout(tokens or (3, 4), **changes))


def kept(*sets: list[int]) -> Rollout:
    """Tokens 3 and 4, with what they could have been."""
    return make_rollout(sampling_mask=np.array(sets, np.int32))


def both_of(rollout: Rollout) -> Group:
    return make_group(0, 0, rollout, rollout)


def group_of(**changes: Any) -> Group:
    return replace(make_group(0), **changes)


def one_failed(reason: str) -> Group:
    group = make_group(0)
    first, *others = group.rollouts
    return replace(group, rollouts=(replace(first, failure=Failure("timeout", reason)), *others))


@pytest.mark.parametrize(
    ("group", "limits", "reason"),
    [
        (make_group(0), {}, None),
        (both_of(make_rollout(ref_logprobs=array(-1, 0.0009))), SCORED, None),
        (group_of(failures=("x" * 500,)), IN_TURNS | {"num_generations": 3}, None),
        (make_group(0, 0, make_rollout(), of_two_turns()), IN_TURNS, None),
        (make_group(0, 0, make_rollout(), of_two_turns(forks=((2, 1),))), IN_TURNS, None),
        (both_of(of_two_turns(sampling_mask=SET, **REF)), IN_TURNS | SCORED | FILTERED, None),
        (both_of(kept([3, 0], [4, -1])), FILTERED, None),
        (routed(make_group(0)), EXPERTS, None),
        (make_group(0, 3, make_rollout(), OF_4_AND_5), IN_FLIGHT, None),  # the first rollout has tokens of 3
        (make_group(0, 4, make_rollout(version_spans=((0, 5),)), OF_4_AND_5), IN_FLIGHT, None),
        (make_group(0, 0, make_rollout()), {}, "group_size"),
        (make_group(0, 0, *[make_rollout()] * 3), {}, "group_size"),
        (replace(make_group(0, 0, make_rollout()), failures=("timed out",)), {}, "group_size"),
        (group_of(failures=("timed out",)), {}, "group_size"),
        (group_of(failures=("x",)), {"num_generations": 3}, "failure"),
        (one_failed("x" * 500), IN_TURNS, None),
        (one_failed("x" * 501), IN_TURNS, "failure"),
        (one_failed("x"), {}, "failure"),
        (group_of(failures=("x" * 501,)), IN_TURNS | {"num_generations": 3}, "failure"),
        (group_of(prompt_ids=np.array([], np.int32)), {}, "prompt_length"),
        (group_of(prompt_ids=np.zeros(9, np.int32)), {}, "prompt_length"),
        (group_of(prompt_ids=np.array([100], np.int32)), {}, "token_id"),
        (make_group(0, 0, make_rollout(), make_rollout(())), {}, "completion_length"),
        (one_of(*[1] * 9), {}, "completion_length"),
        (one_of(99, 100), {}, "token_id"),
        (one_of(-1, 5), {}, "token_id"),
        (one_of(old_logprobs=array(-1, math.nan)), {}, "logprob"),
        (one_of(old_logprobs=array(-1, -math.inf)), {}, "logprob"),
        (one_of(old_logprobs=array(-1, 0.01)), {}, "logprob"),
        (one_of(old_logprobs=array(-1)), {}, "logprob_length"),
        (one_of(ref_logprobs=array(-1, -1)), {}, "reference"),
        (make_group(0), SCORED, "reference"),
        (both_of(make_rollout(ref_logprobs=array(-1))), SCORED, "logprob_length"),
        (both_of(make_rollout(ref_logprobs=array(-1, 0.01))), SCORED, "logprob"),
        (make_group(0, 4, make_rollout(), OF_4_AND_5), {}, "version_spans"),
        (make_group(0, 3, make_rollout(version_spans=((0, 5),)), OF_4_AND_5), IN_FLIGHT, "version_spans"),
        (make_group(0, 5, make_rollout(), OF_4_AND_5), IN_FLIGHT, "version_spans"),
        (make_group(0), FILTERED, "sampling_mask"),
        (both_of(kept([3, 9], [4, 7])), {}, "sampling_mask"),
        (both_of(kept([3, 9, 8], [4, 7, 8])), FILTERED, "sampling_mask"),  # too wide
        (both_of(kept([3, 100], [4, 7])), FILTERED, "sampling_mask"),
        (both_of(kept([3, -2], [4, 7])), FILTERED, "sampling_mask"),
        (both_of(kept([3, 3], [4, 7])), FILTERED, "sampling_mask"),
        (both_of(kept([9, 3], [4, 7])), FILTERED, "sampling_mask"),  # the sampled token comes first
        (routed(make_group(0)), {}, "routing"),
        (make_group(0), EXPERTS, "routing"),
        (routed(make_group(0)), {"experts": (7, 2)}, "routing"),
        (routed(make_group(0)), {"experts": (8, 3)}, "routing"),
        (replace(routed(make_group(0)), rollouts=make_group(0).rollouts), EXPERTS, "routing"),
        (replace(routed(make_group(0)), routing=np.zeros((9, 3, 2), np.uint8)), EXPERTS, "routing"),
        (both_of(kept([3, 9])), FILTERED, "sampling_mask"),  # of one token alone
        (one_of(reward=math.nan), {}, "reward"),
        (one_of(reward=math.inf), {}, "reward"),
        (one_of(rewards={"answer": math.inf}), {}, "reward"),
        (one_of(rewards={}), {}, "reward_funcs"),
        (one_of(rewards={"other": 1.0}), {}, "reward_funcs"),
        (one_of(rewards={"answer": 1.0, "other": 1.0}), {}, "reward_funcs"),
        (make_group(0, 0, make_rollout(), of_two_turns()), {}, "turns"),
        (one_of(tool_calls=1), {}, "turns"),
        (one_of(turns=2), {}, "turns"),
        (make_group(0, 0, make_rollout(), of_two_turns(turns=3)), IN_TURNS, "turns"),
        (both_of(of_two_turns(old_logprobs=array(*[-0.5] * 5))), IN_TURNS, "observed"),
        (both_of(of_two_turns(ref_logprobs=array(-1, -1, 0, -1e-6, -1))), IN_TURNS | SCORED, "observed"),
        (both_of(of_two_turns(sampling_mask=np.where(SET == 61, 62, SET))), IN_TURNS | FILTERED, "sampling_mask"),
        (both_of(of_two_turns(sampling_mask=np.where(SET == -1, 7, SET))), IN_TURNS | FILTERED, "observed"),
    ],
)
def test_a_group_that_cannot_be_honest_is_refused_by_name_and_an_honest_one_passes(
    group: Group, limits: dict[str, Any], reason: str | None
) -> None:
    assert refusal(lambda: check_group(group, replace(LIMITS, **limits))) == reason


def test_the_bytes_of_a_group_with_experts_by_hand() -> None:
    """Experts of every token but the last of each completion: 5 + 3 + 4 − 2 tokens, 3 layers, 2 experts of a byte."""
    group = replace(
        make_group(0, 0, make_rollout((3, 4, 5)), make_rollout((3, 4, 5, 6))), prompt_ids=np.ones(5, np.int32)
    )
    assert len(encode(ENVELOPE, routed(group))[1]) == 4 * (5 + 2 * 7) + 10 * 3 * 2
