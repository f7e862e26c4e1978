"""Frames: what was sent arrives unchanged, and nothing that was not sent honestly gets in."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import wire
from common.errors import WireError
from common.group_limits import check_group
from common.types import EncodedImage, EvalFailure, EvalRequest, EvalResult, EvalSample, Group, Rollout, Tombstone
from common.wire import Envelope, decode, encode
from tests.support.protocol_helpers import HELLO, LIMITS, make_group, make_rollout, of_two_turns
from tests.support.speed import overdue
from tests.support.texts import CHARACTERS

ENVELOPE = Envelope("run", "life", "s0")

ints = st.integers(-(2**31), 2**31 - 1)
numbers = st.floats(allow_nan=False)
texts = st.text(CHARACTERS)
scores = st.dictionaries(st.text(CHARACTERS, max_size=5), st.floats(allow_infinity=False), max_size=3)


@st.composite
def episodes(draw: st.DrawFn, length: int) -> dict[str, Any]:
    """Fields of a rollout of that many tokens: spans with sampled tokens before, between and behind them."""
    inner = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=6)) if length > 2 else set()
    edges = sorted(inner)[: len(inner) // 2 * 2]
    observed = tuple(zip(edges[::2], edges[1::2], strict=True))
    calls = draw(st.integers(0, 9))
    return {
        "observed": observed,
        "turns": len(observed) + draw(st.integers(1, 3)),
        "tool_calls": calls,
        "tool_errors": draw(st.integers(0, calls)),
        "environment_s": draw(st.floats(0, allow_infinity=False)),
    }


@st.composite
def version_spans(draw: st.DrawFn, length: int) -> tuple[tuple[int, int], ...]:
    """Of a rollout of that many tokens: starts and versions ascend."""
    starts = sorted({0, *draw(st.sets(st.integers(0, length - 1), max_size=3))}) if length else []
    versions = draw(st.sets(ints, min_size=len(starts), max_size=len(starts)))
    return tuple(zip(starts, sorted(versions), strict=True))


@st.composite
def rollouts(draw: st.DrawFn, with_ref: bool) -> Rollout:
    n = draw(st.integers(0, 6))
    array = st.lists(st.floats(width=32), min_size=n, max_size=n).map(lambda x: np.array(x, np.float32))
    ids = np.array(draw(st.lists(ints, min_size=n, max_size=n)), np.int32)
    ref = draw(array) if with_ref else None
    turns = draw(st.just({}) | episodes(n))
    finish_reason = draw(st.sampled_from(["stop", "length"]))
    spans = draw(st.just(()) | version_spans(n))
    return Rollout(ids, draw(array), ref, draw(scores), draw(numbers), finish_reason, **turns, version_spans=spans)


prompts = st.lists(ints, max_size=6).map(lambda x: np.array(x, np.int32))
groups = st.booleans().flatmap(
    lambda with_ref: st.builds(
        Group,
        ints,
        ints,
        ints,
        prompts,
        st.lists(rollouts(with_ref), max_size=4).map(tuple),
        failures=st.lists(st.text(CHARACTERS, max_size=9), max_size=2).map(tuple),
    )
)
requests = st.builds(EvalRequest, texts, ints, st.lists(ints).map(tuple))
samples = st.builds(EvalSample, ints, texts, st.dictionaries(texts, numbers), ints, st.just("stop"))
failures = st.lists(st.builds(EvalFailure, ints, texts), max_size=2).map(tuple)
messages = st.one_of(
    groups,
    st.builds(Tombstone, ints, ints, texts),
    st.builds(EvalResult, texts, ints, ints, st.lists(samples, max_size=3).map(tuple), failures),
    st.builds(wire.Hello, ints, texts, texts, ints, ints, st.booleans(), texts),
    st.builds(wire.Credit, ints, st.lists(ints), st.lists(requests, max_size=2), ints, texts, texts, ints),
    st.builds(wire.Beat, texts, ints, st.none() | ints, st.dictionaries(texts, numbers)),
    st.builds(wire.Bye, texts, ints),
)


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


@settings(max_examples=400, derandomize=True)
@given(messages, texts, texts, texts)
def test_every_message_arrives_as_it_was_sent(message: Any, run: str, life: str, name: str) -> None:
    envelope, arrived = decode(encode(Envelope(run, life, name), message))
    assert envelope == Envelope(run, life, name)
    assert same(arrived, message)


def test_an_outline_has_all_of_a_group_but_what_stands_in_its_arrays() -> None:
    ref, mask = np.full(2, -1, np.float32), np.array([[3, 9], [4, -1]], np.int32)
    images = (EncodedImage(b"a PNG", (1, 2, 2)),)
    rollouts = (make_rollout(ref_logprobs=ref, sampling_mask=mask), make_rollout((3, 4), ref_logprobs=ref))
    rollouts = (rollouts[0], dataclasses.replace(rollouts[1], sampling_mask=mask, reward=-1.0, finish_reason="length"))
    group = dataclasses.replace(make_group(3, 1, *rollouts), images=images, failures=("timed out",))
    header, arrays, _ = encode(ENVELOPE, group)
    outline, num_bytes = wire.decode_outline(header)
    assert isinstance(outline, Group) and num_bytes == len(arrays)
    assert outline.images == (EncodedImage(b"", (1, 2, 2)),)

    def without_arrays(group: Group) -> Any:
        none = np.empty(0)
        bare = {"completion_ids": none, "old_logprobs": none, "ref_logprobs": none, "sampling_mask": none}
        kept = tuple(dataclasses.replace(rollout, **bare) for rollout in group.rollouts)
        return dataclasses.replace(group, prompt_ids=none, rollouts=kept, images=())

    assert same(without_arrays(outline), without_arrays(group))
    for mine, theirs in zip(outline.rollouts, group.rollouts, strict=True):
        for name in ("completion_ids", "old_logprobs", "ref_logprobs", "sampling_mask"):
            array, real = getattr(mine, name), getattr(theirs, name)
            assert (array.shape, array.dtype) == (real.shape, real.dtype)
            assert not any(array.strides), "it takes no memory"
            assert np.isnan(array).all() if array.dtype.kind == "f" else (array == -1).all(), "nothing can train on it"
    tombstone = Tombstone(3, 1, "reward failed")
    assert wire.decode_outline(encode(ENVELOPE, tombstone)[0]) == (tombstone, 0)


def test_rewards_may_be_any_number_and_nan_means_does_not_apply() -> None:
    rewards = {"answer": np.float64(0.5), "format": 1, "other": math.nan}
    _, arrived = decode(encode(ENVELOPE, make_group(0, 0, make_rollout(rewards=rewards))))
    assert same(arrived.rollouts[0].rewards, {"answer": 0.5, "format": 1.0, "other": math.nan})


def honest_frames() -> list[list[bytes]]:
    request = EvalRequest("v4", 0, (1, 2))
    sample = EvalSample(1, "4", {"answer": 1.0}, 2, "stop")
    return [
        encode(ENVELOPE, message)
        for message in (
            make_group(3, 1),
            make_group(3, 1, make_rollout(ref_logprobs=np.full(2, -1, np.float32))),
            dataclasses.replace(make_group(3, 1, make_rollout(), of_two_turns()), failures=("timed out",)),
            make_group(3, 1, make_rollout(), make_rollout((3, 4, 5), version_spans=((0, 1), (2, 3)))),
            Tombstone(3, 1, "reward failed"),
            EvalResult("v4", 0, 4, (sample,), (EvalFailure(2, "killed"),)),
            HELLO,
            wire.Credit(8, [8, 9], [request], 4, "/weights/4", "0" * 64, 5),
            wire.Beat("generating", 7, 4, {"total/generate_s": 1.5}),
            wire.Bye("done"),
        )
    ]


def refused(frames: list[bytes]) -> bool:
    """True if decode refuses; any exception but WireError fails the test."""
    try:
        decode(frames)
    except WireError as error:
        assert error.reason in ("digest", "frame_count", "malformed", "proto")
        return True
    return False


def test_10000_flipped_bits_are_all_refused(figure: Callable[[str, str], None]) -> None:
    rng, honest = random.Random(1), honest_frames()
    accepted = 0
    for _ in range(10_000):
        frames = list(rng.choice(honest))
        which = rng.choice([i for i, frame in enumerate(frames) if frame])
        bit = rng.randrange(8 * len(frames[which]))
        changed = bytearray(frames[which])
        changed[bit // 8] ^= 1 << bit % 8
        frames[which] = bytes(changed)
        accepted += not refused(frames)
    figure("R7", f"10,000 flipped bits: {accepted} accepted")
    assert accepted == 0


def test_10000_malformed_messages_with_a_right_digest_crash_nothing_and_only_whole_ones_get_in(
    figure: Callable[[str, str], None],
) -> None:
    rng, honest = random.Random(2), honest_frames()
    start, whole = time.monotonic(), 0
    for _ in range(10_000):
        header, arrays, _ = rng.choice(honest)
        frames = [damage(rng, header), damage(rng, arrays) if rng.random() < 0.3 else arrays]
        frames.append(wire._digest(*frames))
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
GROUP_HEADER: dict[str, Any] = {
    "type": "group",
    "group_id": 0,
    "policy_version": 0,
    "problem_index": 0,
    "prompt_length": 1,
    "has_ref_logprobs": False,
    "rollouts": [{"length": 1, "rewards": {}, "reward": 0.0, "finish_reason": "stop"}],
}


def with_rollout(**changes: Any) -> dict[str, Any]:
    [rollout] = GROUP_HEADER["rollouts"]
    return GROUP_HEADER | {"rollouts": [rollout | changes]}


def test_the_builders_below_make_a_message_that_is_accepted() -> None:
    assert not refused(sealed(header_with(BYE)))
    assert not refused(sealed(header_with(GROUP_HEADER), b"\0" * 12))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frame_count"),
        ([b"", b""], "frame_count"),
        ([b"", b"", b""], "digest"),
        (sealed(b""), "malformed"),
        (sealed(header_with(BYE, proto=wire.PROTO + 1)), "proto"),
        (sealed(header_with(BYE, surplus=1)), "malformed"),
        (sealed(header_with(BYE | {"surplus": 1})), "malformed"),
        (sealed(header_with({"type": "nothing of ours"})), "malformed"),
        (sealed(header_with(BYE), b"arrays where none belong"), "malformed"),
        (sealed(header_with(GROUP_HEADER), b"\0" * 16), "malformed"),
        (sealed(header_with(with_rollout(length=-1)), b"\0" * 12), "malformed"),
        (sealed(header_with(GROUP_HEADER | {"prompt_length": 2**62}), b"\0" * 12), "malformed"),
        (sealed(header_with(with_rollout(length=2**62)), b"\0" * 12), "malformed"),
        (sealed(header_with(with_rollout(reward="much")), b"\0" * 12), "malformed"),
        (sealed(header_with(GROUP_HEADER | {"group_id": 1.5}), b"\0" * 12), "malformed"),
        (sealed(header_with(with_rollout(finish_reason="abort")), b"\0" * 12), "malformed"),
        (sealed(b"\x91" * 500_000), "malformed"),  # arrays in arrays in arrays
        (sealed(header_with(BYE)[:-5] + b"\x91" * 500_000), "malformed"),
        (sealed(b"\x85\xa5proto\xdd\xff\xff\xff\xff"), "malformed"),  # says that four billion items follow
    ],
)
def test_messages_that_we_never_send_are_refused_by_name(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(frames)
    assert caught.value.reason == reason


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for frames in (sealed(bomb), sealed(header_with(BYE), bomb), [bomb] * 3, sealed(header_with(BYE, run_id=bomb))):
        assert refused(frames)
    assert list(tmp_path.iterdir()) == []
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()  # it would have


def test_an_honest_group_passes_the_check() -> None:
    check_group(make_group(0), LIMITS)
    with_ref = make_group(0, 0, *[make_rollout(ref_logprobs=np.full(2, -1.0, np.float32))] * 2)
    check_group(with_ref, dataclasses.replace(LIMITS, needs_ref_logprobs=True))


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(0, 0, make_rollout()), "group_size"),
        (make_group(0, 0, *[make_rollout()] * 3), "group_size"),
        (dataclasses.replace(make_group(0, 0, make_rollout()), failures=("timed out",)), "group_size"),
        (dataclasses.replace(make_group(0), failures=("timed out",)), "group_size"),
        (dataclasses.replace(make_group(0), prompt_ids=np.array([], np.int32)), "prompt_length"),
        (dataclasses.replace(make_group(0), prompt_ids=np.zeros(9, np.int32)), "prompt_length"),
        (dataclasses.replace(make_group(0), prompt_ids=np.array([100], np.int32)), "token_id"),
        (make_group(0, 0, make_rollout(), make_rollout(())), "completion_length"),
        (make_group(0, 0, make_rollout(), make_rollout([1] * 9)), "completion_length"),
        (make_group(0, 0, make_rollout(), make_rollout((99, 100))), "token_id"),
        (make_group(0, 0, make_rollout(), make_rollout((-1, 5))), "token_id"),
        (make_group(0, 0, make_rollout(), make_rollout(old_logprobs=array(-1, math.nan))), "logprob"),
        (make_group(0, 0, make_rollout(), make_rollout(old_logprobs=array(-1, -math.inf))), "logprob"),
        (make_group(0, 0, make_rollout(), make_rollout(old_logprobs=array(-1, 0.01))), "logprob"),
        (make_group(0, 0, make_rollout(), make_rollout(old_logprobs=array(-1))), "logprob_length"),
        (make_group(0, 0, make_rollout(), make_rollout(ref_logprobs=array(-1, -1))), "reference"),
        (make_group(0, 0, make_rollout(), make_rollout(reward=math.nan)), "reward"),
        (make_group(0, 0, make_rollout(), make_rollout(reward=math.inf)), "reward"),
        (make_group(0, 0, make_rollout(), make_rollout(rewards={"answer": math.inf})), "reward"),
        (make_group(0, 0, make_rollout(), make_rollout(rewards={})), "reward_funcs"),
        (make_group(0, 0, make_rollout(), make_rollout(rewards={"other": 1.0})), "reward_funcs"),
        (make_group(0, 0, make_rollout(), make_rollout(rewards={"answer": 1.0, "other": 1.0})), "reward_funcs"),
    ],
)
def test_a_group_that_cannot_be_honest_is_refused_by_name(group: Group, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        check_group(group, LIMITS)
    assert caught.value.reason == reason


def test_reference_log_probs_are_required_where_the_trainer_needs_them() -> None:
    needing = dataclasses.replace(LIMITS, needs_ref_logprobs=True)
    with pytest.raises(WireError, match="needs reference log-probs and got none") as caught:
        check_group(make_group(0), needing)
    assert caught.value.reason == "reference"
    short = make_group(0, 0, *[make_rollout(ref_logprobs=np.full(1, -1.0, np.float32))] * 2)
    with pytest.raises(WireError) as caught:
        check_group(short, needing)
    assert caught.value.reason == "logprob_length"


def test_an_unscored_reward_is_honest() -> None:
    check_group(make_group(0, 0, make_rollout(), make_rollout(rewards={"answer": math.nan}, reward=0.0)), LIMITS)
