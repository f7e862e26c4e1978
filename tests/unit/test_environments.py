"""What environments and tools answer, as the sampler and the rewards see it."""

import pytest

from common.config import Rewards
from environments import Done, Turn, conversation, prompt_of
from rewards import text_of
from rewards.pool import RewardPool
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(60)

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*4?"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "calculator"}}]}
ANSWER = {"role": "tool", "name": "calculator", "content": "24"}


def test_reset_gives_the_prompt_or_leaves_the_rows_own_or_adds_to_its_last_user_message():
    assert prompt_of(ASK, Turn()) == ASK
    assert prompt_of(ASK, Turn([{"role": "user", "content": "Guess."}])) == [{"role": "user", "content": "Guess."}]
    assert prompt_of(ASK, Turn(appended=" Now.")) == [ASK[0], {"role": "user", "content": "6*4? Now."}]
    assert prompt_of(ASK[:1], Turn(appended="Go.")) == [ASK[0], {"role": "user", "content": "Go."}]
    assert ASK[1]["content"] == "6*4?"


def test_a_conversation_has_every_turn_and_every_answer_in_order_and_its_text_is_the_models_last_word():
    turns = [("<tool_call>…</tool_call>", Turn([ANSWER], assistant=CALL)), ("It is 24.", Done(1.0))]
    assert conversation(turns) == [CALL, ANSWER, {"role": "assistant", "content": "It is 24."}]
    assert text_of(conversation(turns)) == "It is 24."
    assert text_of(conversation(turns[:1])) == ""  # the tool's words are not the model's


def test_the_environments_reward_is_weighted_beside_the_others_and_rewards_see_the_conversation(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def turns(completions, environment_rewards, **columns):\n"
        "    assert environment_rewards == [2.0, None]\n"
        "    return [len(completion) for completion in completions]\n"
    )
    config = Rewards(reward_funcs=["environment", f"{tmp_path}/mine.py:turns"], reward_weights=[0.5, 1.0])
    whole = [CALL, ANSWER, {"role": "assistant", "content": "24"}]
    with RewardPool(config, columns=["question"]) as pool:
        pool.submit(1, ASK, [whole, whole[:1]], [[1], [2]], {"question": "6*4?"}, environment_rewards=[2.0, None])
        [(_, scores)] = pool.ready(timeout_s=limit(20))
    assert scores[0] == ({"environment": 2.0, "turns": 3.0}, 4.0)
    assert scores[1][1] == 1.0 and scores[1][0]["turns"] == 1.0
