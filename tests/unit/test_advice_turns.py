"""The rules of advice for runs with tools, on both sides of their thresholds."""

from __future__ import annotations

from common.config import load
from tests.unit.test_advice import advise, after, settings_with

TOOLS = settings_with(has_tools=True, max_turns=8)


def test_a_model_that_stops_calling_is_told_apart_from_one_that_needs_no_tool_any_more():
    fell = after(15, 0.1, before=1.2)
    found = advise(24, rollout__tool_calls=fell)
    assert list(found) == ["tools_unused"]
    assert found["tools_unused"].startswith("calls of tools fell from 1.20 to 0.10 in a rollout: it guesses instead.")
    assert advise(23, rollout__tool_calls=fell) == {}  # a step of the newest ten is from before
    assert advise(24, rollout__tool_calls=after(15, 0.13, before=1.2)) == {}
    right = {"rewards__answer__std": 0.1, "rewards__answer__mean": 0.5}
    assert advise(24, rollout__tool_calls=fell, **right, rewards__answer__accuracy=0.9) == {}
    assert "tools_unused" in advise(24, rollout__tool_calls=fell, **right, rewards__answer__accuracy=0.89)


def test_a_model_that_never_calls_is_told_so_after_ten_steps_if_it_has_tools():
    assert advise(10, TOOLS, rollout__tool_calls=0.0)["tools_unused"].startswith("no tool was called in the last 10")
    assert advise(9, TOOLS, rollout__tool_calls=0.0) == {}
    assert advise(10, rollout__tool_calls=0.0) == {}  # an environment may have none
    assert advise(10, TOOLS, rollout__tool_calls=after(10, 0.01)) == {}


def test_rollouts_that_end_at_max_turns_are_a_loop_from_a_half_on_and_not_called_too_short(tmp_path):
    found = advise(5, TOOLS, rollout__max_turns_ratio=0.5, completions__clipped_ratio=0.6)
    assert list(found) == ["turns_exhausted"]
    assert "50% of rollouts end because they reached rollout.max_turns 8" in found["turns_exhausted"]
    assert "rollout.max_turns=16," in found["turns_exhausted"]
    (tmp_path / "c.yaml").write_text("{model: {path: m}, data: {train: t.jsonl}, rollout: {tools: [t.py:f]}}")
    load(tmp_path / "c.yaml", ["rollout.max_turns=16"])
    assert advise(4, TOOLS, rollout__max_turns_ratio=0.5) == {}
    assert advise(5, TOOLS, rollout__max_turns_ratio=0.49, completions__clipped_ratio=0.98) == {}
    assert list(advise(5, rollout__max_turns_ratio=0.0, completions__clipped_ratio=0.5)) == ["truncated"]


def test_calls_that_nearly_all_fail_are_told_and_no_calls_at_all_are_not():
    found = advise(5, TOOLS, rollout__tool_calls=2.0, rollout__tool_errors=1.8)
    assert list(found) == ["tools_fail"] and found["tools_fail"].startswith("90% of the calls of tools in the last 5 ")
    assert advise(5, TOOLS, rollout__tool_calls=2.0, rollout__tool_errors=1.79) == {}
    assert advise(4, TOOLS, rollout__tool_calls=2.0, rollout__tool_errors=2.0) == {}
    assert advise(5, rollout__tool_calls=0.0, rollout__tool_errors=0.0) == {}
