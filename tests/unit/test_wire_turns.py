"""Rollouts of several turns on the wire and in recordings: what the model wrote stays apart from what it saw."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from common import wire
from common.errors import WireError
from common.group_limits import Limits, check_group
from common.types import Group
from common.wire import Envelope, decode, encode
from tests.support.protocol_helpers import LIMITS, make_group, make_rollout, of_two_turns, received
from trainer.link.recording import Recorder, read

IN_TURNS = dataclasses.replace(LIMITS, max_turns=2)
ENVELOPE = Envelope("run", "life", "s0")


def test_the_sampled_tokens_of_a_rollout_are_all_but_the_observed_ones() -> None:
    rollout = of_two_turns(ref_logprobs=np.array([-1, -1, 0, 0, -2], np.float32))
    assert rollout.completion_ids[rollout.sampled()].tolist() == [3, 4, 5]
    assert rollout.num_sampled == 3
    assert rollout.ref_log_ratios().tolist() == [0.5, 0.5, 1.5]
    assert make_rollout().completion_ids[make_rollout().sampled()].tolist() == [3, 4]


def test_turns_and_failures_come_back_from_a_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "groups.recording", cursor=0)
    group = dataclasses.replace(make_group(0, 0, make_rollout(), of_two_turns()), failures=("timed out",))
    recorder.append([received(group)])
    recorder.close()
    ((one, _),) = read(tmp_path / "groups.recording")
    assert isinstance(one.group, Group)
    group = one.group
    single, double = group.rollouts
    assert (single.observed, single.turns, single.environment_s) == ((), 1, 0.0)
    assert (double.observed, double.turns, double.tool_calls, double.environment_s) == (((2, 4),), 2, 1, 0.25)
    assert group.failures == ("timed out",)


def reencoded(group: Group, **changes: Any) -> list[bytes]:
    """Its frames with other fields of the last rollout."""
    header, arrays, _ = encode(ENVELOPE, group)
    plain = msgspec.msgpack.decode(header)
    plain["body"]["rollouts"][-1] |= changes
    header = msgspec.msgpack.encode(plain)
    return [header, arrays, wire._digest(header, arrays)]


@pytest.mark.parametrize(
    "changes",
    [
        {"observed": [[0, 2]]},  # the model begins
        {"observed": [[2, 5]]},  # and ends
        {"observed": [[2, 2]]},
        {"observed": [[3, 2]]},
        {"observed": [[1, 2], [2, 4]], "turns": 3},  # one span, not two
        {"observed": [[3, 4], [1, 2]], "turns": 3},
        {"observed": [[-1, 2]]},
        {"observed": [[2, 2**62]]},
        {"observed": [[2]]},
        {"observed": "24"},
        {"turns": 1},
        {"turns": -1},
        {"tool_calls": 1, "tool_errors": 2},
        {"tool_errors": -1},
        {"environment_s": -0.5},
        {"environment_s": math.nan},
        {"environment_s": math.inf},
        {"surplus": 1},
    ],
)
def test_turns_that_no_rollout_can_have_are_refused(changes: dict[str, Any]) -> None:
    group = make_group(0, 0, make_rollout(), of_two_turns())
    decode(reencoded(group))
    with pytest.raises(WireError) as caught:
        decode(reencoded(group, **changes))
    assert caught.value.reason == "malformed"


def test_an_honest_group_of_two_turns_passes_the_check_with_a_failure_in_a_third_place() -> None:
    limits = dataclasses.replace(IN_TURNS, num_generations=3)
    check_group(dataclasses.replace(make_group(0, 0, make_rollout(), of_two_turns()), failures=("x" * 500,)), limits)


SET = np.array([[3, 9], [4, -1], [60, -1], [61, -1], [5, 6]], np.int32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"old_logprobs": np.full(5, -0.5, np.float32)}, "observed"),
        ({"ref_logprobs": np.array([-1, -1, 0, -1e-6, -1], np.float32)}, "observed"),
        ({"sampling_mask": SET, "ref_logprobs": np.array([-1, -1, 0, 0, -1], np.float32)}, None),
        ({"sampling_mask": np.where(SET == 61, 62, SET)}, "sampling_mask"),
        ({"sampling_mask": np.concatenate([SET[:2], [[60, 7]], SET[3:]]).astype(np.int32)}, "observed"),
    ],
)
def test_an_observed_token_has_no_log_prob_and_no_other_token_in_its_place(
    changes: dict[str, Any], reason: str
) -> None:
    rollout = of_two_turns(**{"ref_logprobs": np.array([-1, -1, 0, 0, -1], np.float32)} | changes)
    limits = dataclasses.replace(IN_TURNS, needs_ref_logprobs=True, max_sampling_mask=2 * ("sampling_mask" in changes))
    group = make_group(0, 0, rollout, rollout)
    if reason is None:
        return check_group(group, limits)
    with pytest.raises(WireError) as caught:
        check_group(group, limits)
    assert caught.value.reason == reason


def test_the_reason_of_a_failure_is_short() -> None:
    limits = dataclasses.replace(IN_TURNS, num_generations=3)
    with pytest.raises(WireError) as caught:
        check_group(dataclasses.replace(make_group(0), failures=("x" * 501,)), limits)
    assert caught.value.reason == "failure"


@pytest.mark.parametrize(
    ("group", "limits", "reason"),
    [
        (make_group(0, 0, make_rollout(), of_two_turns()), LIMITS, "turns"),
        (make_group(0, 0, make_rollout(), make_rollout(tool_calls=1)), LIMITS, "turns"),
        (make_group(0, 0, make_rollout(), make_rollout(turns=2)), LIMITS, "turns"),
        (make_group(0, 0, make_rollout(), of_two_turns(turns=3)), IN_TURNS, "turns"),
        (
            dataclasses.replace(make_group(0), failures=("x",)),
            dataclasses.replace(LIMITS, num_generations=3),
            "failure",
        ),
    ],
)
def test_turns_and_failures_that_this_run_cannot_have_are_refused(group: Group, limits: Limits, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        check_group(group, limits)
    assert caught.value.reason == reason
