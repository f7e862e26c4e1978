"""Resident memory stays as it is, whatever the lengths: of a trainer's steps, and of a sampler's reloads and prompts.

What grew was oneDNN's cache of compiled kernels, one for each number of rows. So every test first shows its process
a grid of numbers, then as many that are not on it: a process that compiles for each of them grows by more than is
allowed here, whatever the machine. And the heap of a sampler: a hole that a large tensor left and something small took
a place in does not hold the next large one. The environment is launch.sh's.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch

from launcher.resources.placement import placement
from tests.support.configs import config_in
from tests.support.own_process import run
from tests.support.tier import full
from tests.support.tiny import tiny_model

pytestmark = full

GROWTH = 0.02  # of resident memory, from the end of the grid on
GROUP_SIZE = 8


def growth(work: Callable[[int], None], grid: Iterable[int], others: Iterable[int]) -> None:
    """Prints bytes after the grid and after the others."""
    process, seen = psutil.Process(), []
    for tokens in (grid, others):
        for number in tokens:
            work(number)
        memory = process.memory_info()
        seen.append(memory.rss - memory.shared)  # pages of files come and go with what else the machine does
    print(json.dumps(seen))


def off_grid(begin: int, end: int, step: int, count: int) -> list[int]:
    return random.Random(0).sample([n for n in range(begin, end) if n % step], count)


def train(folder: str) -> None:
    """Steps on one group each, of so many tokens in all: a prompt and eight completions of unequal length."""
    from model.logprobs import load_causal_lm, score_terms
    from model.packing import pack

    torch.set_num_threads(1)
    model = load_causal_lm(str(tiny_model(Path(folder))), "float32", None, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    random_lengths = random.Random(1)

    def step(tokens: int) -> None:
        cuts = sorted(random_lengths.sample(range(40, tokens), GROUP_SIZE - 1))
        lengths = [end - begin for begin, end in zip([39, *cuts], [*cuts, tokens], strict=True)]
        row = pack([([5] * 39, [[7] * length for length in lengths])])
        score_terms(model, row, 1.0, 1024)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    growth(step, range(160, 481, 32), off_grid(160, 480, 32, 60))


def sample(folder: str) -> None:
    """Eight prompts of so many tokens in all, and now and then another version of the weights."""
    from sampler.engine.completions import SamplingParams
    from sampler.engine.engine import Engine
    from sampler.engine.reload import reload
    from tests.support.plain_policy import PlainPolicy

    path, draw = tiny_model(Path(folder) / "model"), random.Random(1)
    config = config_in(Path(folder), model={"path": str(path), "dtype": "float32"}, data={"max_prompt_length": 128})
    engine, policy, waves = Engine(config, num_gpus=0), PlainPolicy(path), 0
    vocabulary = policy.model.config.vocab_size
    versions = [policy.publish(Path(folder) / "w", v) for v in range(2)]

    def wave(tokens: int) -> None:
        nonlocal waves
        if waves % 10 == 0:
            reload(engine, versions[waves // 10 % 2], config)
        waves += 1
        for i in range(GROUP_SIZE):
            length = tokens // GROUP_SIZE + (i < tokens % GROUP_SIZE)
            prompt = [draw.randrange(3, vocabulary) for _ in range(length)]
            engine.submit(i, prompt, SamplingParams(1.0, 2, 1, i))
        while engine.num_running:
            engine.step()

    # the first ones fill oneDNN's cache of 256 kernels (SAMPLERS_MEMORY), of which each number of tokens takes some
    others = off_grid(256, 768, 8, 240)
    growth(wave, [*range(256, 769, 8), *others[:160]], others[160:])


def replace_heads() -> None:
    """As reloads do with the largest tensor of a model of 135M parameters: each leaves something small behind."""
    torch.set_num_threads(1)
    head, kept = torch.ones(576, 49152), []

    def replace(_: int) -> None:
        nonlocal head
        head = torch.ones(576, 49152)
        kept.append(torch.ones(20_000))

    growth(replace, range(3), range(8))


def grown(call: str, folder: Path, side: str) -> float:
    """By which fraction the process grew that makes this call."""
    place = placement(config_in(folder, model={"dtype": "float32"}), gpus=(), cores=(0,))
    of_side = place.samplers[0].env if side == "sampler" else place.trainer_env
    environment = {**of_side, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code = f"from tests.processes.test_resident_memory import replace_heads, sample, train; {call}"
    before, after = json.loads(run([sys.executable, "-c", code], env=os.environ | environment).splitlines()[-1])
    return (after - before) / before


def test_a_trainer_on_completions_of_every_length_does_not_grow(tmp_path: Path) -> None:
    assert grown(f"train({str(tmp_path)!r})", tmp_path, "trainer") < GROWTH


def test_a_sampler_on_prompts_of_every_length_does_not_grow(tmp_path: Path) -> None:
    assert grown(f"sample({str(tmp_path)!r})", tmp_path, "sampler") < GROWTH


def test_a_sampler_whose_reloads_make_large_tensors_anew_does_not_grow(tmp_path: Path) -> None:
    assert grown("replace_heads()", tmp_path, "sampler") < GROWTH
