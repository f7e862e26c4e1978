"""Runs TRL's GRPOTrainer on a cell, for bench.py.

    stock    generation by transformers' generate; everything else TRL's default, but float32 and CPU
    plain    the same without gradient checkpointing, TRL's default: faster where memory suffices

Makes one update per batch of rollouts, group by group if one forward of all would not fit the memory. Beta and learning
rate are those of cells.py; the reward functions use no model.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.cells import BETA, LEARNING_RATE, Cell, cell_parser, prepare, reward_functions


def main() -> None:
    parser = cell_parser(__doc__)
    parser.add_argument("--backend", choices=("stock", "plain"), default="stock")
    arguments = parser.parse_args()
    cell: Cell = arguments.cell
    folder = prepare(cell)
    from datasets import Dataset, load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    if cell.is_natural:
        rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    else:
        rows = rows.rename_column("question", "prompt")
    assert isinstance(rows, Dataset)
    fixed = {} if cell.is_natural else {"min_new_tokens": cell.completion}
    micro_batches = 1 if cell.fits_one_forward else cell.prompts
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        logging_steps=10_000, disable_tqdm=True, seed=0, max_steps=arguments.steps,
        per_device_train_batch_size=cell.prompts * cell.generations // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=cell.generations, max_completion_length=cell.completion, beta=BETA,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0, num_iterations=1,
        generation_kwargs=fixed or None, model_init_kwargs={"dtype": "float32"},
        **({} if arguments.backend == "stock" else {"gradient_checkpointing": False}),
    )  # fmt: skip
    ends = [time.monotonic()]

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.monotonic())
            record: dict[str, Any] = {"row": f"trl-{arguments.backend}", "cell": cell.name, "step": state.global_step}
            record |= {"wall_s": ends[-1] - ends[-2], "completion_tokens": trainer._tandem_tokens}
            with open(arguments.out, "a") as file:
                file.write(json.dumps(record) + "\n")

    class Counting(GRPOTrainer):
        _tandem_tokens = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self._tandem_tokens = float(output["completion_mask"].sum())
            return output

    trainer = Counting(
        model=str(folder / "model"), reward_funcs=reward_functions(cell), args=config, train_dataset=rows,
        callbacks=[EndOfStep()],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
