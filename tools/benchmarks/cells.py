"""The cells to measure. A cell is a model shape, a batch shape and a length mode; every row of a table runs the same.

The operations of a step and this machine's speed give a lower bound of its seconds. Only matrix products are counted,
and as few as possible: a prompt once for its group, nothing recomputed, no bytes of weights that decoding reads.

A cell makes its own folder with model, tokenizer and data, so that all rows read the same bytes. Speed does not depend
on values, so weights are random and prompts are random tokens of one exact length. "fixed" samples to the length limit
whatever is drawn, so that every row trains the same number of tokens; "natural" is the quick start's task and model.
"""

import argparse
import fcntl
import json
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

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
    "qwen2.5-7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                       num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip
SHAPES["quickstart"] = SHAPES["1m"]

BETA, LEARNING_RATE = 0.04, 1e-5
FORWARDS_OF_A_STEP = 5  # to sample, for the reference and to train, and two that the backward pass takes


class Cell(NamedTuple):
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


def forward_flops(cell: Cell) -> float:
    """Returns the floating-point operations over a step's tokens, 2 per multiply-add, with completions of full length.

    2 · N · T + 2 · d · V · n + 4 · A · heads · head_dim · layers: N parameters of the layers without embeddings,
    T tokens, n of them through the head, A pairs of a query and a key that attend.
    """
    s, p, c, g = SHAPES[cell.shape], cell.prompt, cell.completion, cell.generations
    head_dim = s["hidden_size"] // s["num_attention_heads"]
    projections = 2 * s["hidden_size"] * head_dim * (s["num_attention_heads"] + s["num_key_value_heads"])
    parameters = s["num_hidden_layers"] * (projections + 3 * s["hidden_size"] * s["intermediate_size"])
    pairs = p * p / 2 + g * (c * p + c * c / 2)
    attention = 4 * pairs * s["num_attention_heads"] * head_dim * s["num_hidden_layers"]
    head = 2 * s["hidden_size"] * s["vocab_size"] * g * c
    return cell.prompts * (2 * parameters * (p + g * c) + head + attention)


def measured_flops(seconds: float = 1.0) -> float:
    """Returns the speed of one core, in operations per second, in a float32 matrix product that fits its cache."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer, rows = torch.nn.Linear(768, 768, bias=False).requires_grad_(False), torch.randn(768, 768)
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        for _ in range(4):
            layer(rows)
        best = max(best, 4 * 2 * 768**3 / (time.perf_counter() - start))
    torch.set_num_threads(threads)
    return best


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
    model = folder.parent / cell.shape  # one for prompts of every length
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together
        if (folder / "train.jsonl").is_file():
            return folder
        if not model.is_dir():
            make_model(cell.shape, folder / "part")
            (folder / "part").rename(model)
        if not (folder / "model").exists():
            (folder / "model").symlink_to(Path("..", cell.shape))
        random = Random(0)
        rows = ["".join(random.choices("0123456789", k=cell.prompt)) for _ in range(1024)]
        lines = [json.dumps({"question": row, "answer": row[0]}) for row in rows]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_model(shape: str, folder: Path) -> None:
    """Writes a model of random weights, in bfloat16 where Qwen's are. Each digit is a token; the template adds none."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from examples.tokenizer import train_tokenizer
    from model import devices

    tokenizer = train_tokenizer([{"question": "0", "answer": "0"}], vocab_size=512, context_length=4096)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(**{"tie_word_embeddings": True} | SHAPES[shape], **ids, max_position_embeddings=4096)
    torch.manual_seed(0)
    with devices.first():  # where billions of random numbers take the least time
        dtype = torch.bfloat16 if shape.startswith("qwen") else torch.float32
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def even(completions: list[Any], **_: Any) -> list[float]:
    """Returns a reward that differs inside every group: its share of even characters. Takes strings or messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ord(char) % 2 == 0 for char in text) / max(1, len(text)) for text in texts]


def tandem_config(cell: Cell, folder: Path, steps: int, output_dir: Path) -> dict[str, Any]:
    """Returns settings for the cell; `folder` is the one of `prepare`. On a CPU a step has four micro-batches."""
    from model import devices

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
            "max_steps": steps, "prompts_per_step": cell.prompts, "learning_rate": LEARNING_RATE, "save_steps": 0,
            **({} if devices.count() else {"groups_per_micro_batch": max(1, cell.prompts // 4)}),
        },
        "vllm": {"max_model_len": cell.prompt + cell.completion},
    }  # fmt: skip
