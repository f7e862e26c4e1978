"""The cells to measure. A cell is a model shape, a batch shape and a length mode; every row of a table runs the same.

A cell makes its own folder with model, tokenizer and data, so that all rows read the same bytes. Speed does not depend
on values, so weights are random and prompts are random tokens of one exact length. "fixed" samples to the length limit
whatever is drawn, so that every row trains the same number of tokens; "natural" is the quick start's task and model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rewards import built_in

ROOT = Path(__file__).resolve().parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    "1m": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
               num_key_value_heads=2, vocab_size=512),
    "28m": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=2, vocab_size=8192),
    "smollm2-135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=49152),
    "qwen2.5-0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                         num_key_value_heads=2, vocab_size=151936),
    "qwen2.5-1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                         num_key_value_heads=2, vocab_size=151936),
}  # fmt: skip
SHAPES["quickstart"] = SHAPES["1m"]

BETA, LEARNING_RATE = 0.04, 1e-5


@dataclass(frozen=True)
class Cell:
    """A setup: Cell("1m", prompts=8, generations=8, prompt=256, completion=64) trains 8·8·64 = 4,096 tokens a step."""

    shape: str
    prompts: int = 8
    generations: int = 8
    prompt: int = 64  # tokens
    completion: int = 64  # tokens, at most

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.prompts}x{self.generations}-p{self.prompt}-c{self.completion}"

    @property
    def is_natural(self) -> bool:
        return self.shape == "quickstart"

    @property
    def fits_one_forward(self) -> bool:
        """Returns whether 24 GiB hold the activations of all padded sequences, about 40 float32 per token and width."""
        tokens = self.prompts * self.generations * (self.prompt + self.completion)
        return tokens * SHAPES[self.shape]["num_hidden_layers"] * SHAPES[self.shape]["hidden_size"] * 160 <= 24 << 30


CELLS = [
    *(Cell("1m", 8, 8, prompt, 64) for prompt in (64, 256, 512)),
    *(Cell("1m", 16, 16, prompt, 64) for prompt in (64, 256, 512)),
    *(Cell("28m", 8, 8, prompt, 64) for prompt in (64, 256, 512)),
    Cell("quickstart", 16, 16, 96, 48),
]


def named(name: str) -> Cell:
    """Returns the cell of this name, also one that is not in CELLS:  named("1m-8x32-p256-c64")"""
    shape, groups, prompt, completion = name.rsplit("-", 3)
    prompts, generations = groups.split("x")
    if shape not in SHAPES:
        raise SystemExit(f"no model shape {shape!r}; there are {', '.join(SHAPES)}")
    return Cell(shape, int(prompts), int(generations), int(prompt[1:]), int(completion[1:]))


def cell_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that every row's runner has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=named, required=True)
    parser.add_argument("--steps", type=int, required=True, help="warm-up included")
    parser.add_argument("--out", type=Path, required=True, help="one JSON line per step is appended")
    return parser


def prepare(cell: Cell) -> Path:
    """Makes the cell's folder once and returns it: model/ (weights and tokenizer) and train.jsonl."""
    if cell.is_natural:
        folder = ROOT / ".cache" / "quickstart"
        if not (folder / "model").is_dir():
            raise SystemExit("this cell trains the quick start's model; make it once: bash launch.sh")
        return folder
    folder = ROOT / ".cache" / "bench" / f"{cell.shape}-p{cell.prompt}"
    if not (folder / "train.jsonl").is_file():
        make_model(cell.shape, folder / "model")
        random = Random(0)
        rows = ["".join(random.choices("0123456789", k=cell.prompt)) for _ in range(1024)]
        lines = [json.dumps({"question": row, "answer": row[0]}) for row in rows]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_model(shape: str, folder: Path) -> None:
    """Writes a model of random float32 weights. Each digit is one token; the chat template leaves text unchanged."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([{"question": "0", "answer": "0"}], vocab_size=512, context_length=4096)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(**SHAPES[shape], **ids, tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def reward_functions(cell: Cell) -> list[Callable[..., list[Any]]]:
    """Returns the functions that `tandem_config` names, for TRL."""
    return [answer_reward, form_reward] if cell.is_natural else [even]


def answer_reward(completions: list[Any], answer: list[str], **_: Any) -> list[Any]:
    return built_in.answer(completions, answer)


def form_reward(completions: list[Any], **_: Any) -> list[Any]:
    return built_in.format(completions)


def even(completions: list[Any], **_: Any) -> list[float]:
    """Returns a reward that differs inside every group: its share of even characters. Takes strings or messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ord(char) % 2 == 0 for char in text) / max(1, len(text)) for text in texts]


def tandem_config(cell: Cell, folder: Path, steps: int, output_dir: Path) -> dict[str, Any]:
    """Returns Tandem's settings for the cell; `folder` is the one of `prepare`. A step has about four micro-batches."""
    return {
        "run": {"output_dir": str(output_dir), "report_to": []},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": cell.prompt},
        "sampler": {
            "num_generations": cell.generations, "max_completion_length": cell.completion,
            "ignore_eos": not cell.is_natural,
        },
        "rewards": {"reward_funcs": ["answer", "format"] if cell.is_natural else [f"{__file__}:even"]},
        "algorithm": {"beta": BETA},
        "trainer": {
            "max_steps": steps, "prompts_per_step": cell.prompts, "groups_per_micro_batch": max(1, cell.prompts // 4),
            "learning_rate": LEARNING_RATE, "save_steps": 0,
        },
        "vllm": {"max_model_len": cell.prompt + cell.completion},
    }  # fmt: skip
