"""Runs TRL's GRPOTrainer on a cell, for bench.py.

    stock    generation by transformers' generate; everything else TRL's default, but float32 on a CPU
    plain    the same without gradient checkpointing, TRL's default: faster where memory suffices
    vllm     generation by vLLM in the same process, for a GPU

Makes one update per batch of rollouts, group by group if one forward of all would not fit the memory. Beta and learning
rate are those of cells.py; the reward functions use no model.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rewards import built_in
from tools.benchmarks.cells import BETA, LEARNING_RATE, Cell, cell_parser, even, prepare


def main() -> None:
    parser = cell_parser(__doc__)
    parser.add_argument("--backend", choices=("stock", "plain", "vllm"), default="stock")
    arguments = parser.parse_args()
    cell: Cell = arguments.cell
    folder = prepare(cell)
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def prompt(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": row["question"]}] if cell.is_natural else row["question"]}

    on_cpu, by_vllm = not torch.accelerator.is_available(), arguments.backend == "vllm"
    fixed = {"ignore_eos": True} if by_vllm else {"min_new_tokens": cell.completion}
    micro_batches = 1 if cell.fits_one_forward else cell.prompts if on_cpu else min(4, cell.prompts)
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=on_cpu, bf16=not on_cpu, report_to="none", save_strategy="no",
        logging_steps=10_000, disable_tqdm=True, seed=0, max_steps=arguments.steps,
        per_device_train_batch_size=cell.prompts * cell.generations // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=cell.generations, max_completion_length=cell.completion, beta=BETA,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0, num_iterations=1,
        generation_kwargs=None if cell.is_natural else fixed, gradient_checkpointing=arguments.backend != "plain",
        model_init_kwargs={"dtype": "float32"} if on_cpu else None,
        use_vllm=by_vllm, vllm_max_model_length=cell.prompt + cell.completion,
    )  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tokens = trainer._metrics["train"]["completions/mean_length"][-1] * cell.prompts * cell.generations
            record = {"step": state.global_step, "time": time.time(), "completion_tokens": tokens}
            with open(arguments.out, "a") as file:
                file.write(json.dumps(record) + "\n")

    answer_and_form = [
        lambda completions, answer, **_: built_in.answer(completions, answer),
        lambda completions, **_: built_in.format(completions),
    ]
    rewards: Any = answer_and_form if cell.is_natural else [even]
    trainer = GRPOTrainer(
        model=str(folder / "model"), reward_funcs=rewards, args=config, callbacks=[EndOfStep()],
        train_dataset=Dataset.from_json(str(folder / "train.jsonl")).map(prompt),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
