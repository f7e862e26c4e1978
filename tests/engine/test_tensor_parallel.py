"""One engine of two workers on a CPU: the log-probs of one process, the reload, and nothing that outlives a kill."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.files.shared_memory import PATTERN, remove_orphans
from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from tests.support.configs import config_in
from tests.support.engines import finished
from tests.support.plain_policy import PlainPolicy
from tests.support.speed import is_gone, until
from tests.support.tier import full
from tests.support.tiny import tiny_model

SHARED = Path("/dev/shm")
PROMPTS = [list(range(10 + i, 40 + i)) for i in range(4)]


@full
@pytest.mark.timeout(600)
def test_two_workers_have_the_log_probs_of_one_also_after_a_reload_and_no_kill_leaves_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, spawn = set(SHARED.glob(PATTERN)), multiprocessing.get_context("spawn")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    ours, theirs = spawn.Pipe()
    engine = spawn.Process(target=_engine, args=(tmp_path, theirs))
    engine.start()
    theirs.close()
    try:
        assert max(ours.recv()) <= 1e-5
        workers = psutil.Process(engine.pid).children(recursive=True)
        [stuck] = [worker for worker in workers if "Worker_TP1" in "".join(worker.cmdline())]
        stuck.suspend()  # as one that waits for ever in vLLM's own way out
    finally:
        engine.kill()
        engine.join()
    until(lambda: all(is_gone(worker.pid) for worker in workers), seconds=30)
    remove_orphans()  # as the next sampler does at its start
    assert not set(SHARED.glob(PATTERN)) - before


def _engine(folder: Path, pipe: Connection) -> None:
    """Sends how far its log-probs are from those of one process, at first and after a reload, and waits."""
    model = tiny_model(folder / "model")
    given = {"model": {"path": str(model), "dtype": "float32"}, "data": {"max_prompt_length": 64}}
    sampler = {"num_generations": 2, "max_completion_length": 16}
    config = config_in(folder, **given, sampler=sampler, vllm={"tensor_parallel_size": 2})
    policy, engine, found = PlainPolicy(model), Engine(config, num_gpus=0), []
    for version in (1, 2):
        policy.disturb(version)
        reload(engine, policy.publish(folder / "weights", version), config)
        found.append(_largest_difference(engine, policy))
    pipe.send(found)
    time.sleep(600)


def _largest_difference(engine: Engine, policy: PlainPolicy) -> float:
    for key, prompt in enumerate(PROMPTS):
        engine.submit(key, prompt, SamplingParams(1.0, 16, 2, key))
    engine.submit("aborted", PROMPTS[0], SamplingParams(1.0, 16, 2, 9))
    engine.step()
    engine.abort(["aborted"])
    found = finished(engine)
    assert len(found) == len(PROMPTS), "what was aborted is not among them"
    return max(
        float(np.abs(c.logprobs - policy.logprobs(PROMPTS[key], c.token_ids.tolist(), 1.0)).max())
        for key, completions in found.items()
        for c in completions
    )
