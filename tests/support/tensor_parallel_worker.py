"""An engine of two tensor-parallel workers on a CPU, in a process of its own: it prints what it found, then waits."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from common.config import Config
from sampler.completions import SamplingParams
from sampler.engine import Engine
from sampler.reload import reload
from tests.support.plain_policy import PlainPolicy
from tests.support.tiny import tiny_model

PROMPTS = [list(range(10 + i, 40 + i)) for i in range(4)]


def largest_difference(engine: Engine, policy: PlainPolicy) -> float:
    """Between the engine's log-probs of what it sampled and those of one process."""
    for key, prompt in enumerate(PROMPTS):
        engine.submit(key, prompt, SamplingParams(1.0, 16, 2, key))
    engine.submit("aborted", PROMPTS[0], SamplingParams(1.0, 16, 2, 9))
    engine.step()
    engine.abort(["aborted"])
    worst, finished = 0.0, 0
    while engine.num_running:
        for key, completions in engine.step():
            finished += 1
            for completion in completions:
                expected = policy.logprobs(PROMPTS[key], completion.token_ids.tolist(), 1.0)
                worst = max(worst, float(np.abs(completion.logprobs - expected).max()))
    assert finished == len(PROMPTS), "what was aborted is not among them"
    return worst


def main(folder: Path) -> None:
    model = tiny_model(folder / "model")
    config = Config.model_validate(
        {
            "run": {"output_dir": str(folder / "run")},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "none.jsonl", "max_prompt_length": 64},
            "sampler": {"num_generations": 2, "max_completion_length": 16},
            "vllm": {"tensor_parallel_size": 2},
        }
    )
    policy = PlainPolicy(model)
    engine = Engine(config, num_gpus=0)
    reload(engine, policy.publish(folder / "weights", 1), config)
    first = largest_difference(engine, policy)
    policy.disturb(3)
    reload(engine, policy.publish(folder / "weights", 2), config)
    print(json.dumps({"first": first, "reloaded": largest_difference(engine, policy)}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
