"""The lines of samples.jsonl, which show the texts of a step's completions. Pure functions."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.types import Group, Rollout, Tombstone, without_tombstones
from model.files.images import one_mark_an_image, sample_record


def samples_records(
    groups: Sequence[Group | Tombstone], step: int, count: int, decode: Any
) -> list[dict[str, Any]]:
    """Returns lines of samples.jsonl: the worst and the best completion of the first groups.

    step: the number of the optimizer step. count: the number of groups to take, tombstones not
    counted. decode: the tokenizer's function from a list of token ids to their text.
    """
    records = []
    for group in without_tombstones(groups)[:count]:
        ranked = sorted(group.rollouts, key=lambda rollout: rollout.reward)
        records.append(_sample_record(group, ranked[0], "worst", step, decode))
        records.append(_sample_record(group, ranked[-1], "best", step, decode))
    return records


def _sample_record(
    group: Group, rollout: Rollout, which: str, step: int, decode: Any
) -> dict[str, Any]:
    record = {
        "step": step,
        "group_id": group.group_id,
        "policy_version": group.policy_version,
        "problem_index": group.problem_index,
        "which": which,
        "prompt": one_mark_an_image(decode(group.prompt_ids.tolist())),
        "completion": decode(rollout.completion_ids.tolist()),
        "rewards": dict(rollout.rewards),
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
    }
    if group.images:
        record["images"] = [sample_record(image) for image in group.images]
    if rollout.observed:
        record["turns"] = turn_texts(rollout, decode)
    if rollout.failure:
        record["failure"] = asdict(rollout.failure)
    return record


def turn_texts(rollout: Rollout, decode: Any) -> list[dict[str, Any]]:
    """Returns the texts of a completion in order, each with its author.

    The result is [{"by": "model", "text": …}, {"by": "environment", "text": …}, …]. Where the
    environment rewrote the history, the author is "history", and the text is the history as it was
    repeated, with what was added to it. The model's texts have `reward` if turns were rewarded
    separately.
    """
    token_ids = rollout.completion_ids.tolist()
    fork_starts = {start for start, _ in rollout.forks}
    texts: list[dict[str, Any]] = []
    turn_start = 0
    for start, end in rollout.observed:  # the tokens that the model did not sample
        author = "environment"
        if start in fork_starts:
            author = "history"
        texts.append({"by": "model", "text": decode(token_ids[turn_start:start])})
        texts.append({"by": author, "text": decode(token_ids[start:end])})
        turn_start = end
    texts.append({"by": "model", "text": decode(token_ids[turn_start:])})
    texts_of_model = texts[::2]
    for text, reward in zip(texts_of_model, rollout.turn_rewards, strict=False):
        text["reward"] = reward
    return texts
