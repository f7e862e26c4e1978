"""The plain loop that people start from, in one process, and what makes it faster, one rung at a time.

    seed          padded batch; logits of every position, prompts too; old log-probs computed again by the policy
    reuse         the engine's log-probs are the old ones
    flat          no padding: sequences one after the other in a row
    shared        a prompt is computed once for its group
    completions   the head runs on completion tokens only, in chunks
    onednn        linear layers run through oneDNN instead of MKL

Every rung generates with vLLM, loads the new weights into it, scores the reference with the policy's own code, and
makes one update of the same loss. What follows on the ladder, streaming and run-ahead, needs two processes: Tandem.
Left out: what does not cost time, such as logs and checkpoints.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from common.config import Config
from examples.quickstart import prompt_ids
from model.cpu.linear import OneDnnLinear
from model.logprobs import load_causal_lm, score_row
from model.packing import PackedRow, Packing, pack
from model.tokenizer import load_tokenizer
from tools.benchmarks.cells import BETA, LEARNING_RATE, StepLog, cell_parser, prepare, reward_functions, tandem_config

RUNGS = ("seed", "reuse", "flat", "shared", "completions", "onednn")


class Loop:
    def __init__(self, rung: str, config: Config):
        from sampler.engine import Engine

        level = RUNGS.index(rung)
        self.config = config
        self.reuses, self.heads_only_completions = level >= 1, level >= 4
        self.packing: Packing = "off" if level < 2 else "flat" if level == 2 else "shared"
        self.engine = Engine(config, num_gpus=0)
        torch.set_num_threads(2)  # vLLM in this process has set it to 1
        self.policy, self.reference = (
            load_causal_lm(config.model.path, "float32", None, trust_remote_code=False) for _ in range(2)
        )
        if level < 5:
            use_torch(self.policy)
            use_torch(self.reference)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def generate(self, prompts: list[list[int]], folder: Path, seed: int) -> list[list[Any]]:
        """The present weights' completions of every prompt, in order. folder: where the weights go."""
        from sampler.completions import SamplingParams

        self.policy.save_pretrained(folder)
        self.engine.weights.load(folder)
        settings = self.config.sampler
        for i, prompt in enumerate(prompts):
            params = SamplingParams(1.0, settings.max_completion_length, settings.num_generations, seed + i * 1000)
            self.engine.submit(i, prompt, params)
        finished: dict[int, list[Any]] = {}
        while self.engine.num_running:
            finished.update(self.engine.step())
        return [finished[i] for i in range(len(prompts))]

    def logprobs(self, model: Any, row: PackedRow) -> Tensor:
        """[N] log-probs of the completion tokens."""
        if self.heads_only_completions:
            return score_row(model, row, 1.0, self.config.trainer.logprob_chunk_size)[0]
        hidden = model.get_decoder()(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, spans=row.spans
        ).last_hidden_state.flatten(0, 1)
        everything = torch.log_softmax(model.get_output_embeddings()(hidden).float(), -1)
        return everything[row.source_index].gather(-1, row.target_ids[:, None])[:, 0]

    def update(self, prompts: list[list[int]], completions: list[list[Any]], rewards: Tensor) -> None:
        """One optimizer step. rewards [prompts, generations]. GRPO as in trainer/algorithm/losses.py."""
        ids = [[c.token_ids.tolist() for c in group] for group in completions]
        row = pack(list(zip(prompts, ids, strict=True)), self.packing)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        lengths = torch.tensor(row.lengths)
        with torch.no_grad():
            ref = self.logprobs(self.reference, row)
            engine = torch.cat([torch.from_numpy(c.logprobs) for group in completions for c in group])
            old = engine if self.reuses else self.logprobs(self.policy, row)
        new = self.logprobs(self.policy, row)
        ratio, a = (new - old).exp(), advantages.flatten().repeat_interleave(lengths)
        kl = (ref - new).exp() - (ref - new) - 1
        objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) - BETA * kl
        weights = (1.0 / (len(lengths) * lengths)).repeat_interleave(lengths)
        (-(weights * objective).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = cell_parser(__doc__)
    parser.add_argument("--rung", choices=RUNGS, default="seed")
    arguments = parser.parse_args()
    cell, folder = arguments.cell, prepare(arguments.cell)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-", dir="/dev/shm") as scratch:
        config = Config.model_validate(tandem_config(cell, folder, arguments.steps, Path(scratch)))
        tokenizer: Any = load_tokenizer(config.model.path, None, False)
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        loop = Loop(arguments.rung, config)
        log = StepLog(arguments.out, f"ladder-{arguments.rung}", cell)
        for step in range(arguments.steps):
            chosen = [rows[(step * cell.prompts + i) % len(rows)] for i in range(cell.prompts)]
            prompts = [prompt_ids(row["question"], tokenizer) for row in chosen]
            completions = loop.generate(prompts, Path(scratch) / f"v{step}", seed=step)
            texts = [tokenizer.batch_decode([c.token_ids for c in group]) for group in completions]
            scores = [
                [f(t, answer=[row["answer"]] * len(t)) for f in reward_functions(cell)]
                for t, row in zip(texts, chosen, strict=True)
            ]
            loop.update(prompts, completions, torch.tensor(scores).sum(1))
            log.step(sum(len(c.token_ids) for group in completions for c in group))


def use_torch(model: torch.nn.Module) -> None:
    """Undoes model.cpu.linear.use_onednn."""
    for module in model.modules():
        if type(module) is OneDnnLinear:
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]


if __name__ == "__main__":
    main()
