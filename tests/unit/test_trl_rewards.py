"""Reward functions written for TRL run as they are: its examples in our words, its arguments, async ones."""

import textwrap
import time

import pytest

from common.config import Rewards
from common.errors import UserError
from rewards import RewardError, TrainerState, score_completions
from rewards.pool import RewardFailure, RewardPool
from tests.support.speed import limit, overdue

pytestmark = pytest.mark.timeout(60)

COLUMNS = {"question": "2+2?", "ground_truth": "4", "task": "math", "answer": "4"}
# The shapes of the examples in TRL's documentation of GRPO: token counts, characters, a format in chat messages, a
# reference column, two tasks, an async function, and the arguments that newer versions pass.
FUNCTIONS = r"""
import asyncio
import re

def tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def chat_format(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]

def reference(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if f and f.group(1) == truth else 0.0 for f, truth in zip(found, ground_truth)]

def math_only(prompts, completions, task, **kwargs):
    return [float("4" in c) if t == "math" else None for p, c, t in zip(prompts, completions, task)]

def code_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "code" else None for t in task]

async def slow_service(prompts, completions, **kwargs):
    await asyncio.sleep(0.3)
    return [1.0 if completion else 0.0 for completion in completions]

async def other_service(completions, **kwargs):
    await asyncio.sleep(0.3)
    return [0.5] * len(completions)

async def broken_service(completions, **kwargs):
    await asyncio.sleep(0)
    raise ConnectionError("refused")

def curriculum(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def talkative(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("first_words", [c[:5] for c in completions])
    log_metric("mean_chars", sum(map(len, completions)) / len(completions))
    return [0.0] * len(completions)

def scaled(completions, factor, ground_truth=None, **kwargs):
    return [factor * len(completion) for completion in completions]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "trl_rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def run(file, names, completions, prompt="2+2?", version=0, **settings):
    """[rewards of each completion], [totals], what was logged, through a real reward process."""
    config = Rewards(reward_funcs=[f"{file}:{name}" for name in names], timeout_s=limit(20), **settings)
    with RewardPool(config, columns=COLUMNS, max_steps=200) as pool:
        ids = [[7] * len(text.split()) for text in completions]
        pool.submit(1, prompt, completions, ids, COLUMNS, version)
        [(_, scores)] = pool.ready(timeout_s=limit(30))
        assert not isinstance(scores, RewardFailure), scores
        return [rewards for rewards, _ in scores], [total for _, total in scores], pool.logged


def test_the_examples_of_trl_on_string_prompts_run_unchanged(file):
    rewards, totals, _ = run(file, ["tokens", "characters", "reference"], [r"It is \boxed{4}.", "five"])
    assert rewards == [
        {"tokens": 3.0, "characters": 16.0, "reference": 1.0},
        {"tokens": 1.0, "characters": 4.0, "reference": 0.0},
    ]
    assert totals == [20.0, 5.0]


def test_the_example_of_trl_on_chat_prompts_runs_unchanged(file):
    completions = ["<think>a</think><answer>4</answer>", "4"]
    _, totals, _ = run(file, ["chat_format"], completions, prompt=[{"role": "user", "content": "2+2?"}])
    assert totals == [1.0, 0.0]


def test_a_function_that_returns_none_for_another_task_is_left_out_of_the_sum(file):
    rewards, totals, _ = run(file, ["math_only", "code_only"], ["4", "5"])
    assert totals == [1.0, 0.0]
    assert all(r["code_only"] != r["code_only"] for r in rewards)  # NaN


def test_async_functions_wait_together_and_beside_plain_ones(file):
    start = time.monotonic()
    _, totals, _ = run(file, ["slow_service", "characters", "other_service"], ["ab", ""])
    assert totals == [3.5, 0.5]
    assert not overdue(time.monotonic() - start, 10)  # 0.3 s each and together; the rest is the start of the process


def test_async_functions_of_one_call_overlap():
    import asyncio

    together = asyncio.Barrier(5)  # one after the other, the first would wait for ever

    async def waits(completions):
        await asyncio.wait_for(together.wait(), limit(20))
        return [1.0] * len(completions)

    scores = score_completions([(f"f{i}", waits, 1.0) for i in range(5)], ["p"], ["a"], {}, [[1]])
    assert scores[0][1] == 5.0


def test_an_async_function_that_raises_is_reported_like_any_other(file):
    with RewardPool(Rewards(reward_funcs=[f"{file}:broken_service"]), columns=COLUMNS) as pool:
        pool.submit(1, "2+2?", ["a"], [[1]], COLUMNS)
        [(_, failure)] = pool.ready(timeout_s=limit(30))
        assert failure.kind == "error"
        assert "broken_service raised ConnectionError: refused (trl_rewards.py:" in failure.reason
        pool.submit(2, "2+2?", ["a"], [[1]], COLUMNS)  # the loop survives it
        assert pool.ready(timeout_s=limit(30))[0][1] == failure


def test_trainer_state_holds_the_version_that_sampled_and_the_length_of_the_run(file):
    assert run(file, ["curriculum"], ["a"], version=50)[1] == [0.25]


def test_log_metric_reaches_the_sampler_and_log_extra_is_accepted(file):
    assert run(file, ["talkative"], ["four", "sixsix"])[2] == {"mean_chars": 5.0}


def test_reward_kwargs_are_given_to_their_function_and_stand_above_columns(file):
    assert run(file, ["scaled"], ["abc"], reward_kwargs={"scaled": {"factor": 2}})[1] == [6.0]
    seen = []

    def sees(completions, level=0, **columns):
        seen.append(level)
        return [0.0] * len(completions)

    from rewards.find import bind

    score_completions([("sees", bind(sees, {"level": 9}, "sees"), 1.0)], ["p"], ["a"], {"level": [1]}, [[1]])
    assert seen == [9]


def test_reward_kwargs_that_fit_no_function_or_no_parameter_are_refused(file):
    with pytest.raises(ValueError, match="reward_kwargs names 'answr', and reward_funcs gives answer"):
        Rewards(reward_funcs=["answer"], reward_kwargs={"answr": {}})

    def exact(completions, tolerance=0.0): ...

    from rewards.find import bind

    with pytest.raises(UserError, match=r"exact takes no 'tolerence'\. Did you mean tolerance"):
        bind(exact, {"tolerence": 1}, "exact")


def test_a_function_written_for_the_other_shape_of_completions_says_which_shape_there_is():
    def for_chats(completions, **columns):
        return [len(completion[0]["content"]) for completion in completions]

    def for_strings(completions, **columns):
        return [len(completion.split()) for completion in completions]

    with pytest.raises(RewardError, match="Completions are strings"):
        score_completions([("f", for_chats, 1.0)], ["p"], ["text"], {}, [[1]])
    chat = [[{"role": "assistant", "content": "text"}]]
    with pytest.raises(RewardError, match="Completions are message lists"):
        score_completions([("f", for_strings, 1.0)], [[{"role": "user", "content": "p"}]], chat, {}, [[1]])


def test_what_trl_passes_is_passed_by_these_names():
    seen = {}

    def everything(**arguments):
        seen.update(arguments)
        return [0.0]

    score_completions([("f", everything, 1.0)], ["p"], ["a"], {"level": [3]}, [[1]], TrainerState(4, 10))
    names = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "level"}
    assert names <= set(seen) and seen["trainer_state"].global_step == 4
