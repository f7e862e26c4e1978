"""The sampler's engine beside vLLM's own `generate`, and the operators of one decoding step by number of sequences.

    python -m tools.benchmarks.sampler_alone --cell 1m-32x8-p64-c64 --rounds 4 [setting=value …]

Both sample with log-probs and without seeds, by turns in one engine. Operators in a CUDA graph are not counted.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from common.config import load
from model import devices
from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from sampler.turns.task import GroupKey, sampling_params
from tools.benchmarks.bench import machine
from tools.benchmarks.cells import SHAPES, Cell, named, prepare, tandem_config
from tools.benchmarks.count_operators import Operators

SEQUENCES = (16, 64, 256)


def operators(engine: Engine, params: SamplingParams, sequences: int) -> int:
    """Returns the operators of one engine step in which this many sequences decode."""
    for key in range(sequences // params.num_completions):
        engine.submit(key, [7 + key % 50] * 8, replace(params, max_tokens=8))
    for _ in range(4):
        engine.step()
    with Operators() as counted:
        engine.step()
    while engine.num_running:
        engine.step()
    return counted.names.total()


def rates(cell: Cell, engine: Engine, params: SamplingParams, rounds: int) -> dict[str, object]:
    """Returns tokens per second of each round after the first, and the quotient of the medians."""
    random, found = np.random.default_rng(0), dict[str, list[float]](vllm=[], tandem=[])
    own = engine._vllm.SamplingParams(n=cell.generations, max_tokens=cell.completion, ignore_eos=True, logprobs=0)
    own.detokenize = False
    for i in range(rounds + 1):
        for row in ("vllm", "tandem") if i % 2 else ("tandem", "vllm"):
            prompts = random.integers(5, SHAPES[cell.shape]["vocab_size"], (cell.prompts, cell.prompt)).tolist()
            start = time.perf_counter()
            if row == "vllm":
                tokens = [engine._vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts]
                engine._llm.generate(tokens, own, use_tqdm=False)
            else:
                for key, ids in enumerate(prompts):
                    engine.submit(key, ids, params)
                while engine.num_running:
                    engine.step()
            found[row].append(cell.prompts * cell.generations * cell.completion / (time.perf_counter() - start))
    vllm, tandem = found["vllm"][1:], found["tandem"][1:]
    return {"vllm": vllm, "tandem": tandem, "ratio": statistics.median(tandem) / statistics.median(vllm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=named, default=named("1m-32x8-p64-c64"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cell, file = arguments.cell, Path(scratch, "config.yaml")
        file.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), 1, Path(scratch))))
        most = max(*SEQUENCES, cell.prompts * cell.generations)
        config = load(file, [f"vllm.max_num_seqs={most}", *arguments.overrides])
        engine = Engine(config, devices.count())
        with_seed = replace(sampling_params(GroupKey(0, 0, 0), config), keeps_seed=True)
        without = replace(with_seed, seed=None)
        is_async = engine._llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        device = engine._vllm.platforms.current_platform.get_device_name()
        line = {"cell": cell.name, "machine": machine(), "device": device, "async_scheduling": is_async}
        print(json.dumps(line | rates(cell, engine, without, arguments.rounds)), flush=True)
        for kind, params in {"without seeds": without, "with seeds": with_seed}.items():
            print(json.dumps({"operators": kind} | {n: operators(engine, params, n) for n in SEQUENCES}), flush=True)


if __name__ == "__main__":
    main()
