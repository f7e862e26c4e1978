"""Reward functions written for TRL run as they are: its examples in our words, its arguments, async ones."""

import asyncio
import math

import pytest

from common.config import Rewards
from common.errors import UserError
from rewards import RewardError, score_completions
from rewards.find import bind
from rewards.pool import RewardFailure, RewardPool
from tests.support.python_file import python_file
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(60)

COLUMNS = {"question": "2+2?", "ground_truth": "4", "task": "math", "answer": "4"}
# The shapes of the examples in TRL's documentation of GRPO: token counts, a format in chat messages, two tasks, an
# async function, and the arguments that newer versions pass.
FUNCTIONS = r"""
import asyncio
import re

def tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def chat_format(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]

def math_only(prompts, completions, task, **kwargs):
    return [float("4" in c) if t == "math" else None for p, c, t in zip(prompts, completions, task)]

def code_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "code" else None for t in task]

async def service(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def curriculum(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def talkative(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("first_words", [c[:5] for c in completions])
    log_metric("mean_chars", sum(map(len, completions)) / len(completions))
    return [0.0] * len(completions)

def scaled(completions, factor, ground_truth=None, **kwargs):  # reward_kwargs stand above columns
    return [factor * len(completion) for completion in completions if ground_truth == "mine"]
"""


file = python_file(FUNCTIONS)


# Of two completions; None: it does not apply
EXPECTED = {
    "tokens": [3.0, 1.0],
    "math_only": [1.0, 0.0],
    "code_only": [None, None],
    "service": [1.0, 1.0],
    "curriculum": [0.25, 0.25],  # version 50 of 200 steps
    "talkative": [0.0, 0.0],
    "scaled": [32.0, 8.0],
}


def run(file, names, completions, prompt, **settings):
    """({name: rewards}, totals, what was logged), through a real reward process."""
    config = Rewards(reward_funcs=[f"{file}:{name}" for name in names], timeout_s=limit(20), **settings)
    with RewardPool(config, columns=COLUMNS, max_steps=200) as pool:
        pool.submit(1, prompt, completions, [[7] * len(text.split()) for text in completions], COLUMNS, 50)
        [(_, scores)] = pool.ready(timeout_s=limit(30))
        assert not isinstance(scores, RewardFailure), scores
        by_name = {name: [None if math.isnan(r[name]) else r[name] for r, _ in scores] for name in names}
        return by_name, [total for _, total in scores], pool.logged


def test_the_examples_of_trl_run_unchanged(file):
    settings = {"reward_kwargs": {"scaled": {"factor": 2, "ground_truth": "mine"}}}
    found, totals, logged = run(file, list(EXPECTED), [r"It is \boxed{4}.", "five"], "2+2?", **settings)
    assert found == EXPECTED
    assert totals == [sum(values[i] or 0.0 for values in EXPECTED.values()) for i in range(2)]
    assert logged == {"mean_chars": 10.0}
    completions = ["<think>a</think><answer>4</answer>", "4"]
    assert run(file, ["chat_format"], completions, [{"role": "user", "content": "2+2?"}])[1] == [1.0, 0.0]


def test_async_functions_of_one_call_overlap():
    together = asyncio.Barrier(5)  # one after the other, the first would wait for ever

    async def waits(completions):
        await asyncio.wait_for(together.wait(), limit(20))
        return [1.0] * len(completions)

    scores = score_completions([(f"f{i}", waits, 1.0) for i in range(5)], ["p"], ["a"], {}, [[1]])
    assert scores[0][1] == 5.0


def test_an_async_function_that_raises_is_reported_like_any_other():
    async def broken(completions):
        await asyncio.sleep(0)
        raise ConnectionError("refused")

    for _ in range(2):  # the loop survives it
        with pytest.raises(RewardError, match=r"f raised ConnectionError: refused \(test_trl_rewards.py:"):
            score_completions([("f", broken, 1.0)], ["p"], ["a"], {}, [[1]])


def test_reward_kwargs_that_fit_no_function_or_no_parameter_are_refused():
    with pytest.raises(ValueError, match="reward_kwargs names 'answr', and reward_funcs gives answer"):
        Rewards(reward_funcs=["answer"], reward_kwargs={"answr": {}})

    def exact(completions, tolerance=0.0): ...

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


def test_functions_may_change_their_token_ids_and_these_are_not_copied_one_by_one():
    class Id(int):
        def __deepcopy__(self, memo):
            raise AssertionError("thousands of them")

    def empties(completion_ids, **columns):
        completion_ids[0].clear()
        return [1.0]

    def counts(completions_ids, **columns):
        return [float(len(completions_ids[0]))]

    functions = [("empties", empties, 1.0), ("counts", counts, 1.0)]
    [(rewards, _)] = score_completions(functions, [""], ["a"], {}, [[Id(1), Id(2)]])
    assert rewards == {"empties": 1.0, "counts": 2.0}
