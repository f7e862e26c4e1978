"""Asks the engine once, before the first group, for all that the run will need: a refusal ends the run at once.

    longest sequence   a prompt that is filled up to where max_prompt_length and max_completion_length end, sampled as a
                       group's are; the reference scores the same
    evaluation         a held-out prompt, with the settings that nothing else is sampled with

Each is cut to its last tokens, so that it costs a prompt and not a completion. Left out: publishing, reload and proof,
which version 0 goes through before any group; rewards, which are tried on made-up texts (row_checks.py); environments.
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

_SAMPLED = 2  # tokens of each completion: the second is decoded from the cache


def rehearse(config: Config, task: Task, engine: Engine, reference: Reference | None) -> None:
    """Samples and scores the longest sequence, and samples an evaluation, under any weights. Raises UserError."""
    start = time.monotonic()
    prompt, room = task.train[0], config.data.max_prompt_length + config.sampler.max_completion_length
    whole = np.pad(prompt.token_ids, (0, max(0, room - _SAMPLED - len(prompt.token_ids))), mode="edge")
    as_groups = replace(sampling_params(GroupKey(0, 0, 0), config), num_completions=1)
    _generate("the longest sequence", engine, replace(prompt, token_ids=whole), as_groups)
    if task.held_out:
        _generate("an evaluation", engine, task.held_out[0], held_out_params(config, 0))
    if reference is not None:
        report_progress("rehearsing the reference")
        end = whole[len(prompt.token_ids) :]
        reference.logprobs(prompt.token_ids, [end if len(end) else whole[-1:]], images=prompt.images)
    evaluated, seconds = " and an evaluation" * bool(task.held_out), time.monotonic() - start
    say(f"rehearsal: the longest sequence{evaluated} work ({seconds:.1f} s)")


def _generate(what: str, engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    report_progress(f"rehearsing {what}")
    params = replace(params, max_tokens=min(_SAMPLED, params.max_tokens))
    with raising_permanent_errors(f"vLLM refuses {what} of this run", "Change the settings that it names"):
        engine.submit("rehearsal", prompt.token_ids, params, prompt.images)
        while engine.num_running:
            engine.step()
