"""A random Qwen2 small enough for any test, in a folder that transformers, DeepSpeed and vLLM load like a real one.

Also the plainest way to score a sequence with it: one forward per sequence, a full log_softmax, no packing.
head_dim is 32, because vLLM's CPU attention refuses 16.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.types import Group, Rollout

HEAD_DIM = 32
VOCAB_SIZE = 320
MAX_LENGTH = 1024


def tiny_model(folder: Path, hidden: int = 64, layers: int = 2, vocab: int | None = None) -> Path:
    """Writes model and tokenizer into `folder` and returns it. Tied embeddings, float32, always the same weights.

    vocab: rows of the embedding; more than the tokenizer has is allowed, as in Qwen2.5. None = the tokenizer's.
    """
    shutil.copytree(_made(hidden, layers, vocab), folder, dirs_exist_ok=True)
    return folder


def model_of_shape(folder: Path, shape: Mapping[str, object]) -> Path:
    """tiny_model with a config.json that says another shape: for what reads sizes and never weights."""
    file = tiny_model(folder) / "config.json"
    derived = {"head_dim", "layer_types"}
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key not in derived}
    file.write_text(json.dumps({**kept, **shape}))
    return folder


@cache
def _made(hidden: int, layers: int, vocab: int | None) -> Path:
    """Once per process."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.quickstart import QuickStart
    from examples.tokenizer import train_tokenizer

    rows = [problem.row() for problem in QuickStart().split("train", 64)]
    tokenizer = train_tokenizer(rows, VOCAB_SIZE, MAX_LENGTH)
    config = Qwen2Config(
        vocab_size=vocab or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=max(1, hidden // HEAD_DIM // 2),
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        randomise_vectors(model)
    folder = Path(tempfile.mkdtemp(prefix="tandem-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_reward_model(folder: Path, model: Path) -> Path:
    """A random reward model with one label, of tiny_model's shape and with its tokenizer."""
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    config = AutoConfig.from_pretrained(model, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reward_model = Qwen2ForSequenceClassification(config)
        randomise_vectors(reward_model)
    shutil.copytree(model, folder, dirs_exist_ok=True)
    reward_model.save_pretrained(folder)
    return folder


def randomise_vectors(model: torch.nn.Module) -> None:
    """Norms and biases start as ones and zeros: two of them swapped, or one lost, would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def dense_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) of the completion's tokens: [C], in the model's dtype, with gradient."""
    return dense_scores(model, prompt, completion, temperature)[0]


def dense_scores(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """The log-probs, and −Σ p log p of the distribution each was drawn from: [C] each, with gradient."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    before = range(len(prompt) - 1, len(prompt) - 1 + len(completion))
    entropies = torch.stack([-(logprobs[t].exp() * logprobs[t]).sum() for t in before])
    return torch.stack([logprobs[t, token] for t, token in zip(before, completion, strict=True)]), entropies


def dense_values(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Values [C] of a model for sequence classification, each from the position before its token, with gradient."""
    hidden = model.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).last_hidden_state[0]
    return torch.stack([model.score(hidden[len(prompt) - 1 + t])[0] for t in range(len(completion))])


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative, in the Euclidean norm over all parameters."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([t[name].double().flatten() for name in sorted(t)]) for t in (found, expected)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def random_rollout(rng: np.random.Generator, vocab_size: int, length: int, reward: float, beta: float) -> Rollout:
    """A completion whose old and reference log-probs spread around log(1 / vocab_size), the tiny model's own level."""
    level = -np.log(vocab_size)
    return Rollout(
        completion_ids=rng.integers(0, vocab_size, length).astype(np.int32),
        old_logprobs=rng.normal(level, 0.5, length).astype(np.float32),
        ref_logprobs=rng.normal(level, 0.5, length).astype(np.float32) if beta > 0 else None,
        rewards={"answer": reward},
        reward=reward,
        finish_reason="stop",
    )


def in_turns(group: Group) -> Group:
    """The same tokens. Of completions of three and more the second is observed, of seven and more also two others."""

    def observed(rollout: Rollout) -> Rollout:
        length = len(rollout.completion_ids)
        spans = (((1, 2),) if length > 2 else ()) + (((3, 5),) if length > 6 else ())
        at = [t for span in spans for t in range(*span)]
        arrays = {name: getattr(rollout, name) for name in ("old_logprobs", "ref_logprobs")}
        zeroed = {name: array.copy() for name, array in arrays.items() if array is not None}
        for array in zeroed.values():
            array[at] = 0
        return dataclasses.replace(rollout, observed=spans, turns=len(spans) + 1, tool_calls=len(spans), **zeroed)

    return dataclasses.replace(group, rollouts=tuple(map(observed, group.rollouts)))


def in_forks(group: Group) -> Group:
    """As `in_turns`; what was observed follows all but a token of the sequence before, or half of it, or nothing."""

    def forked(i: int, rollout: Rollout) -> Rollout:
        forks, before, size = list[tuple[int, int]](), 0, len(group.prompt_ids)
        for start, _ in rollout.observed:
            size += start - before
            kept = (size - 1, size // 2, 0)[(i + len(forks)) % 3]
            forks.append((start, kept))
            before, size = start, kept
        return dataclasses.replace(rollout, forks=tuple(forks))

    turns = in_turns(group)
    return dataclasses.replace(turns, rollouts=tuple(forked(i, r) for i, r in enumerate(turns.rollouts)))


def branches(prompt: Sequence[int], rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """(what it begins with, its own tokens) of each sequence of a rollout, token by token."""
    sequence, kept, found = list(prompt), dict(rollout.forks), list[tuple[list[int], list[int]]]()
    for t, token in enumerate(rollout.completion_ids.tolist()):
        if t == 0 or t in kept:
            sequence = sequence[: kept.get(t, len(sequence))]
            found.append((list(sequence), []))
        sequence.append(token)
        found[-1][1].append(token)
    return found


def random_group(
    group_id: int, vocab_size: int, rewards: Sequence[float], *, beta: float = 0.0, longest: int = 12
) -> Group:
    """A group with one completion per reward, of unequal lengths. The same group_id gives the same tokens."""
    rng = np.random.default_rng(group_id)
    prompt = rng.integers(0, vocab_size, rng.integers(1, longest)).astype(np.int32)
    lengths = rng.integers(1, longest + 1, len(rewards))
    rollouts = [random_rollout(rng, vocab_size, int(n), r, beta) for n, r in zip(lengths, rewards, strict=True)]
    return Group(group_id, 0, group_id, prompt, tuple(rollouts))


def bytes_kept(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Of every tensor that autograd saves in a forward pass, beside the model's own parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors too: a freed storage's address would be used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
