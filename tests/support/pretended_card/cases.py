"""What is executed on cards that are not there: each case and the largest error that rounding explains."""

from dataclasses import dataclass
from typing import Any

FLOAT32 = 1e-5
BFLOAT16 = 0.01  # inputs have 8 bits; the sums have 24


@dataclass(frozen=True)
class Case:
    """A request to `executes`."""

    card: str
    request: dict[str, Any]
    bound: float = FLOAT32  # ‖found − expected‖ / ‖expected‖
    most_graphs: int = 4  # that are compiled for all rows of the case


def _heads(query: int, key: int, size: int, kind: str = "full") -> dict[str, Any]:
    return {"query": query, "key": key, "size": size, "kind": kind}


def _attention(query: int, key: int, size: int, kind: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"of": "attention", "heads": _heads(query, key, size, kind), "tokens": tokens, **more}


def _layer(heads: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"of": "layer", "heads": heads, "tokens": [60, 140]} | more


# of each run of the tests
SINKS_AND_WINDOW = Case("9.0", _attention(4, 2, 64, "sinks and window", [150]))
GEMMA_2 = Case("8.6", _layer(_heads(4, 2, 64, "cap and window"), tokens=[100]))
HEAD = Case("9.0", {"of": "head", "tokens": 9, "vocabulary": 300, "num_in_set": 7, "entropy_gradient": True})
GRPO = Case("8.0", {"of": "objective", "settings": {"beta": 0.1, "delta": 4.0}, "lengths": [5, 1, 9]})
DEFAULT = {
    "attention with sinks and a window": SINKS_AND_WINDOW,
    "a layer of Gemma 2": GEMMA_2,
    "the head with sets": HEAD,
    "GRPO": GRPO,
}
GSPO = {"importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "sequence_mask", "beta": 0.04}
FULL = {
    "attention of short and long rows": Case("9.0", _attention(4, 2, 64, "full", [60, 300, 500])),
    "heads of 128 on a card with 99 KiB": Case("8.6", _attention(6, 1, 128, "full", [240])),
    "heads of 256 in bfloat16 on a card with 99 KiB": Case(
        "8.6", _attention(2, 1, 256, "full", [150], dtype="bfloat16"), BFLOAT16
    ),
    "heads of 192 in float32 on a card with 99 KiB": Case("12.0", _attention(2, 1, 192, "full", [150])),
    "heads of 80 with a cap": Case("8.0", _attention(4, 2, 80, "cap", [150])),
    "heads of 96 in bfloat16 with a window": Case(
        "10.0", _attention(7, 1, 96, "window", [150], dtype="bfloat16"), BFLOAT16
    ),
    "eight heads to a key head with sinks": Case("8.9", _attention(8, 1, 64, "sinks", [100], has_forks=False)),
    "a layer of Gemma 2, short and longer rows": Case("9.0", _layer(_heads(4, 2, 64, "cap and window"))),
    "a layer of Llama": Case("9.0", _layer(_heads(4, 1, 64))),
    "a layer of Qwen2 with a window and LoRA": Case("8.0", _layer(_heads(4, 2, 64, "window"), has_adapters=True)),
    "a layer of gpt-oss": Case("9.0", _layer(_heads(4, 2, 64, "sinks and window"))),
    "the head in bfloat16": Case("8.6", {"of": "head", "tokens": 5, "vocabulary": 500, "dtype": "bfloat16"}, BFLOAT16),
    "GSPO with a correction of the mismatch": Case("9.0", {"of": "objective", "settings": GSPO, "lengths": [5, 1, 9]}),
    "CISPO": Case(
        "8.6", {"of": "objective", "settings": {"loss_type": "cispo", "epsilon_high": 5.0}, "lengths": [4, 6]}
    ),
}
CASES = DEFAULT | FULL
