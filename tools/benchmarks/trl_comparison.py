"""What tools/benchmarks/trl_formulas.py compares; runs where TRL is installed.

A case is a set of options under TRL's names, given to both sides. Every case runs on SEEDS random batches of 3 groups
of 4 completions of 1 to 12 tokens, on policy (π_old = π_θ) and off policy (log-ratios of standard deviation 0.5, so
that every clip acts). Differences are in loss and in d loss / d log-probs, float32 on both sides.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from common.config import Config
from common.types import Group, Rollout
from trainer.algorithm.advantages import step_advantages
from trainer.algorithm.losses import Denominator, loss, token_objective, token_weights

SEEDS = range(5)
GROUPS, G, L_MAX = 3, 4, 12
B = GROUPS * G


@dataclass(frozen=True)
class Case:
    name: str
    options: Mapping[str, Any]
    halves: bool = False  # TRL accumulates two micro-batches
    reason: str = ""  # why the two differ; empty: they must agree


@dataclass(frozen=True)
class ComparedCase:
    name: str
    differences: tuple[float, ...]  # loss and gradient on policy, loss and gradient off policy; or advantages
    reason: str


WITH_KL = {"beta": 0.1, "epsilon_high": 0.3, "delta": 1.6}
LOSSES = [
    *(Case(name, {"loss_type": name}) for name in ("grpo", "dapo", "dr_grpo", "bnpo")),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.5}),
    *(
        Case(f"{name}, sequence level (GSPO)", {"loss_type": name, "importance_sampling_level": "sequence"})
        for name in ("grpo", "dapo", "dr_grpo")
    ),
    *(
        Case(f"{name}, beta (k3), epsilon_high, delta", {"loss_type": name} | WITH_KL)
        for name in ("grpo", "dapo", "dr_grpo", "bnpo")
    ),
    Case("cispo, beta (k3)", {"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.1}),
    *(
        Case(f"{name}, use_bias_correction_kl", {"loss_type": name, "use_bias_correction_kl": True} | WITH_KL)
        for name in ("grpo", "dapo")
    ),
    Case(
        "grpo, sequence level, beta (k3), delta",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "delta": 1.6},
    ),
    *(
        Case(
            f"grpo, {mode}",
            {"loss_type": "grpo", "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2},
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    Case("dapo, entropy_coef", {"loss_type": "dapo", "entropy_coef": 0.05}),
    *(Case(f"{name}, two micro-batches", {"loss_type": name}, halves=True) for name in ("grpo", "dapo", "dr_grpo")),
    Case(
        "bnpo, two micro-batches",
        {"loss_type": "bnpo"},
        halves=True,
        reason="TRL divides by each micro-batch's own tokens; here the denominator is the step's",
    ),
    Case(
        "grpo, entropy_coef",
        {"loss_type": "grpo", "entropy_coef": 0.05},
        reason="TRL's bonus is a mean over tokens for every loss_type; here it has the weights of loss_type",
    ),
]  # fmt: skip

ADVANTAGES = [
    *(Case(f"scale_rewards: {scale}", {"scale_rewards": scale}) for scale in ("group", "batch", "none")),
    Case(
        "normalize_then_sum (GDPO)",
        {"multi_objective_aggregation": "normalize_then_sum", "whiten_advantages": True, "scale_rewards": "group"},
    ),
    Case("rloo", {"adv_estimator": "rloo"}),
    Case("rloo, normalised", {"adv_estimator": "rloo", "whiten_advantages": True}),
]


def compare() -> list[ComparedCase]:
    logging.disable(logging.WARNING)  # TRL advises against some of the combinations
    rows = []
    for case in LOSSES:
        differences = [_loss_differences(case, seed, spread) for spread in (0.0, 0.5) for seed in SEEDS]
        on, off = np.max(differences[: len(SEEDS)], 0), np.max(differences[len(SEEDS) :], 0)
        rows.append(ComparedCase(case.name, (*on, *off), case.reason))
    for case in ADVANTAGES:
        rows.append(ComparedCase(case.name, (max(_advantage_difference(case, seed) for seed in SEEDS),), case.reason))
    return rows


def agrees(row: ComparedCase, tolerance: float) -> bool:
    """False also where a difference that is explained is not there: then the explanation is wrong."""
    return (max(row.differences) <= tolerance) != bool(row.reason)


def table(rows: Sequence[ComparedCase], tolerance: float) -> str:
    """Markdown: a line for each case, with its largest absolute differences, and why they are large."""
    from importlib.metadata import version

    return "\n".join(
        [
            f"TRL {version('trl')}, {len(SEEDS)} random batches of {B} completions of 1 to {L_MAX} tokens, float32.",
            f"Largest absolute differences, on and off policy; without a reason at most {tolerance:g}.",
            "",
            "| options | loss, or advantages | gradient | why |",
            "|---|---|---|---|",
            *(f"| {row.name} | {' | '.join(_cells(row))} | {row.reason} |" for row in rows),
        ]
    )


def _cells(row: ComparedCase) -> list[str]:
    """[loss, gradient] or [advantages, –]: the larger of on and off policy."""
    largest = [max(row.differences[i::2]) for i in range(min(2, len(row.differences)))]
    return [*("0" if d == 0 else f"{d:.1e}" for d in largest), "–"][:2]


@dataclass(frozen=True)
class Batch:
    """Flat, completion after completion; [N] each, advantages [B]."""

    lengths: list[int]
    logprobs: Tensor
    old_logprobs: Tensor  # the trainer's
    vllm_logprobs: Tensor  # the engine's
    ref_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.arange(max(self.lengths))[None, :] < torch.tensor(self.lengths)[:, None]

    def padded(self, flat: Tensor) -> Tensor:
        """[N] -> [B, longest], with a number at the padding that no formula may see."""
        return torch.full((B, max(self.lengths)), -3.0).masked_scatter(self.mask, flat)


def random_batch(seed: int, spread: float) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, L_MAX + 1, (B,), generator=random).tolist()

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=random)

    logprobs = -0.05 - noise(1.5).abs()
    old = logprobs + noise(spread)
    advantages = torch.randn(B, generator=random)
    return Batch(lengths, logprobs, old, old + noise(0.2), logprobs + noise(0.4), noise(1.0).abs(), advantages)


def _config(options: Mapping[str, Any]) -> Config:
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "sampler": {"max_completion_length": L_MAX}}
    rewards = {"reward_funcs": ["answer", "format"], "reward_weights": [1.0, 0.5]}
    return Config.model_validate(sections | {"rewards": rewards, "algorithm": dict(options)})


def _loss_differences(case: Case, seed: int, spread: float) -> tuple[float, float]:
    batch = random_batch(seed, spread)
    ours, theirs = _our_loss(batch, case), _trl_loss(batch, case)
    return abs(ours[0] - theirs[0]), float((ours[1] - theirs[1]).abs().max())


def _our_loss(batch: Batch, case: Case) -> tuple[float, Tensor]:
    algorithm = _config(case.options).algorithm
    logprobs, entropy = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    corrects = algorithm.vllm_importance_sampling_mode is not None
    objective, _ = token_objective(
        logprobs,
        batch.vllm_logprobs if corrects else batch.old_logprobs,
        batch.ref_logprobs if algorithm.beta else None,
        torch.repeat_interleave(batch.advantages, torch.tensor(batch.lengths)),
        batch.lengths,
        algorithm,
        entropy,
        batch.old_logprobs if corrects else None,
    )
    denominator = Denominator(algorithm.loss_type, B, sum(batch.lengths), L_MAX)
    value = loss(objective, token_weights(batch.lengths, denominator))
    return _with_gradients(value, logprobs, entropy)


def _with_gradients(value: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple[float, Tensor]:
    """(loss, [2N] its derivatives by log-probs and by entropies)"""
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return float(value), torch.cat(gradients)


def _trl_loss(batch: Batch, case: Case) -> tuple[float, Tensor]:
    trainer = _trl_trainer(GRPOTrainer, GRPOConfig, case.options)
    inputs = _trl_inputs(trainer, batch)
    trainer.beta = case.options.get("beta", 0.0)  # given only now: before, TRL would load a reference model
    trainer.args.use_bias_correction_kl = case.options.get("use_bias_correction_kl", False)
    inputs["advantages"] = batch.advantages
    if not case.options.get("vllm_importance_sampling_mode"):
        inputs["old_per_token_logps"] = batch.padded(batch.old_logprobs)
    inputs["ref_per_token_logps"] = batch.padded(batch.ref_logprobs)
    logprobs, entropy = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    outputs = {"log_probs": batch.padded(logprobs), "entropy": batch.padded(entropy)}
    parts = 2 if case.halves else 1
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
    total = torch.zeros(())
    for rows in torch.arange(B).chunk(parts):
        part = {k: v if k == "num_items_in_batch" else v[rows] for k, v in inputs.items()}
        given = SimpleNamespace(**{k: v[rows] for k, v in outputs.items()})
        total = total + trainer._compute_loss(lambda *_, given=given, **__: given, part)
    return _with_gradients(total, logprobs, entropy)


def _trl_inputs(trainer: Any, batch: Batch) -> dict[str, Any]:
    """TRL's own tensors for this batch: masks, item counts, advantages, importance weights."""
    completions = [[1] * n for n in batch.lengths]
    sampled = [part.tolist() for part in batch.vllm_logprobs.split(batch.lengths)]
    prompts = [[1]] * B
    if isinstance(trainer, RLOOTrainer):
        trainer._generate = lambda _: (prompts, completions, [""] * B)
    else:
        trainer._generate = lambda _: (prompts, completions, None, [""] * B, sampled, {}, None, None)
    scored = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.padded(batch.old_logprobs), None, None)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * B)
    trainer._get_per_token_logps_and_entropies = scored
    return inputs


def _trl_trainer(kind: Any, settings: Any, options: Mapping[str, Any], scores: Sequence[Callable] = ()) -> Any:
    """A trainer of one step over the whole batch, whose model is never asked anything."""
    ours = ("beta", "entropy_coef", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
            "whiten_advantages", "adv_estimator", "use_bias_correction_kl")  # fmt: skip
    arguments = settings(
        output_dir=tempfile.gettempdir(), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=B,
        num_generations=G, max_completion_length=L_MAX, steps_per_generation=1, beta=0.0,
        **{k: v for k, v in options.items() if k not in ours},
    )  # fmt: skip
    shape: dict[str, Any] = dict(
        vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_key_value_heads=1, **shape))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    trainer = kind(
        model=model, reward_funcs=list(scores) or [lambda **_: [0.0] * B], args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * B}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    if coefficient := options.get("entropy_coef"):
        trainer.entropy_coef, trainer._entropy_bonus_enabled = coefficient, True
    if mode := options.get("vllm_importance_sampling_mode"):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = mode
        trainer.vllm_importance_sampling_clip_min = None
        trainer.vllm_importance_sampling_clip_max = options["vllm_importance_sampling_clip_max"]
    return trainer


def _advantage_difference(case: Case, seed: int) -> float:
    config = _config(case.options)
    random = np.random.default_rng(seed)
    scores = random.choice([-1.0, 0.0, 1.0], (2, B)) + random.normal(0, 0.1, (2, B))
    rewards = np.array(config.rewards.weights) @ scores
    one: Any = np.ones(1)
    groups = [
        Group(g, 0, g, one, tuple(
            Rollout(one, one, one, dict(zip(config.rewards.names, scores[:, i], strict=True)), rewards[i], "stop")
            for i in range(g * G, (g + 1) * G)
        ))
        for g in range(GROUPS)
    ]  # fmt: skip
    ours = np.concatenate(list(step_advantages(groups, config).values()))

    functions = [lambda scores=scores[0], **_: scores.tolist(), lambda scores=scores[1], **_: scores.tolist()]
    options = {
        k: v
        for k, v in case.options.items()
        if k not in ("whiten_advantages", "adv_estimator", "use_bias_correction_kl")
    }
    options["reward_weights"] = config.rewards.weights
    kind, settings = GRPOTrainer, GRPOConfig
    if case.options.get("adv_estimator") == "rloo":
        kind, settings = RLOOTrainer, RLOOConfig
        options["normalize_advantages"] = config.algorithm.whiten_advantages
    theirs = _trl_inputs(_trl_trainer(kind, settings, options, functions), random_batch(seed, 0.0))["advantages"]
    return float(np.abs(ours - theirs.numpy()).max())
