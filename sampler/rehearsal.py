"""Asks the engine once, before the first group, for all that the run will need.

A refusal then ends the run at once, not after an hour.

    longest sequence   a prompt that is filled up to where max_prompt_length and
                       max_completion_length end, sampled as those of groups are. The reference
                       model scores the same sequence.
    evaluation         a held-out prompt, with the settings of evaluations

Each sequence is cut to its last tokens, so that it costs a prompt and not a completion. Not
rehearsed: publishing, reload and proof, because version 0 goes through them before any group;
rewards, which row_checks.py tries on made-up texts; environments.
"""

import time
from dataclasses import replace

import numpy as np

from common.config import Config
from common.processes.certain_errors import raising_permanent_errors
from common.processes.exits import say
from common.processes.watchdog import report_progress
from common.types import Prompt
from model.reference import Reference
from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from sampler.turns.task import GroupKey, Task, held_out_params, sampling_params

_NUM_SAMPLED = 2  # tokens of each completion; the second is decoded from the cache


def rehearse(config: Config, task: Task, engine: Engine, reference: Reference | None) -> None:
    """Samples and scores the longest sequence, and samples an evaluation, with whatever weights.

    Raises UserError if the engine refuses one of them.
    """
    start = time.monotonic()
    prompt = task.train[0]
    longest = config.data.max_prompt_length + config.sampler.max_completion_length
    num_missing = max(0, longest - _NUM_SAMPLED - len(prompt.token_ids))
    longest_ids = np.pad(prompt.token_ids, (0, num_missing), mode="edge")
    params = replace(sampling_params(GroupKey(0, 0, 0), config), num_completions=1)
    _generate("the longest sequence", engine, replace(prompt, token_ids=longest_ids), params)
    rehearsed = "the longest sequence"
    if task.held_out:
        _generate("an evaluation", engine, task.held_out[0], held_out_params(config, 0))
        rehearsed = "the longest sequence and an evaluation"
    if reference is not None:
        report_progress("rehearsing the reference")
        completion_ids = longest_ids[len(prompt.token_ids) :]
        if len(completion_ids) == 0:
            completion_ids = longest_ids[-1:]
        reference.logprobs(prompt.token_ids, [completion_ids], images=prompt.images)
    seconds = time.monotonic() - start
    say(f"rehearsal: {rehearsed} work ({seconds:.1f} s)")


def _generate(what: str, engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    report_progress(f"rehearsing {what}")
    params = replace(params, max_tokens=min(_NUM_SAMPLED, params.max_tokens))
    remedy = "Change the settings that it names"
    with raising_permanent_errors(f"vLLM refuses {what} of this run", remedy):
        engine.submit("rehearsal", prompt.token_ids, params, prompt.images)
        while engine.num_running:
            engine.step()
