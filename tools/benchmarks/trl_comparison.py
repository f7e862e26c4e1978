"""Compares TRL's formulas with ours in every case, prints a table, exits with 1 on a surprise.

    python -m pip install trl==1.16.0 && python -W ignore -m tools.benchmarks.trl_comparison

A case is a set of options under TRL's names. TRL's side is its own code path, `GRPOTrainer._compute_loss` and
`_generate_and_score_completions` on padded tensors, with log-probs put where its model would put them; ours is
trainer.algorithm, fed packed. Every case runs on SEEDS random batches of 3 groups of 4 completions of 1 to 12 tokens,
on policy (π_old = π_θ) and off policy (log-ratios of standard deviation 0.5, so that every clip acts), in float32.
Models are left out, because their log-probs differ by kernels and not by formula.
"""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from common.config import Config
from common.types import Group, Rollout
from trainer.algorithm.advantages import step_advantages
from trainer.algorithm.losses import Denominator, loss, token_objective, token_weights

SEEDS, TOLERANCE = range(5), 1e-6
GROUPS, G, L_MAX = 3, 4, 12
B = GROUPS * G
Options = Mapping[str, Any]

SEQUENCE = {"importance_sampling_level": "sequence"}
KL = {"beta": 0.1, "epsilon_high": 0.3, "delta": 1.6}
ALL = ("grpo", "dapo", "dr_grpo", "bnpo")
RECIPES = "configs/recipes/objectives.py"  # loss types or settings of TRL -> ours
OURS: dict[str, Options] = {
    "sapo": {"loss_type": "grpo", "loss": f"{RECIPES}:sapo"},
    "vespo": {"loss_type": "dapo", "loss": f"{RECIPES}:vespo"},
    "off_policy_mask_threshold": {"loss": f"{RECIPES}:off_policy_mask"},
}
LOSSES: dict[str, Options] = {
    **{name: {} for name in ALL},
    "cispo": {"epsilon_high": 1.5},
    **{f"{name}, sequence level (GSPO)": SEQUENCE for name in ALL[:3]},
    **{f"{name}, beta (k3), epsilon_high, delta": KL for name in ALL},
    "cispo, beta (k3)": {"epsilon_high": 1.5, "beta": 0.1},
    **{f"{name}, use_bias_correction_kl": {"use_bias_correction_kl": True} | KL for name in ALL[:2]},
    "grpo, sequence level, beta (k3), delta": SEQUENCE | {"beta": 0.1, "delta": 1.6},
    **{
        f"grpo, {mode}, {floor}": {f"vllm_importance_sampling_{k}": v for k, v in bounds.items()}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        for floor in (0.0, 0.8)
        for bounds in [{"mode": mode, "clip_max": 1.2, "clip_min": floor}]
    },
    **{name: {} for name in ("sapo", "vespo")},
    "grpo, off-policy mask": {"off_policy_mask_threshold": 0.1},
    "dapo, entropy_coef": {"entropy_coef": 0.05},
    "grpo, entropy_coef": {"entropy_coef": 0.05},
    **{f"{name}, two micro-batches": {"micro_batches": 2} for name in ALL},
}
ADVANTAGES: dict[str, Options] = {
    **{f"scale_rewards: {scale}": {"scale_rewards": scale} for scale in ("group", "batch", "none")},
    "normalize_then_sum (GDPO)": {
        "multi_objective_aggregation": "normalize_then_sum", "whiten_advantages": True, "scale_rewards": "group"
    },
    "rloo": {"adv_estimator": "rloo"},
    "rloo, normalised": {"adv_estimator": "rloo", "whiten_advantages": True},
}  # fmt: skip
KNOWN_DIFFERENCES = {  # all others must agree
    "bnpo, two micro-batches": "TRL divides by each micro-batch's own tokens; here the denominator is the step's",
    "grpo, entropy_coef": "TRL's bonus is a mean over tokens for every loss_type; here it has the weights of loss_type",
}
SET_LATER = {"beta", "use_bias_correction_kl"}  # on the trainer: as arguments they would load a model


def compare() -> Iterator[tuple[str, float, float]]:
    """Yields (name, largest difference of losses or advantages, largest one of d loss / d log-probs and entropies)."""
    batches = [random_batch(seed, spread) for spread in (0.0, 0.5) for seed in SEEDS]
    for name, more in LOSSES.items():
        options: Options = {"loss_type": name.partition(",")[0], **more}
        pairs = [(our_loss(batch, options), trl_loss(batch, options)) for batch in batches]
        yield (
            name,
            max(abs(float(ours[0] - theirs[0])) for ours, theirs in pairs),
            max(float((ours[1] - theirs[1]).abs().max()) for ours, theirs in pairs),
        )
    for name, options in ADVANTAGES.items():
        yield name, max(advantage_difference(options, seed) for seed in SEEDS), 0.0


class Batch(NamedTuple):
    """A batch of flat tensors, completion after completion: [N] each, advantages [B]."""

    lengths: list[int]
    logprobs: Tensor
    old_logprobs: Tensor  # the trainer's
    vllm_logprobs: Tensor  # the engine's
    ref_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor

    def padded(self, flat: Tensor) -> Tensor:
        """Returns [N] as [B, longest], with a number at the padding that no formula may read."""
        return pad_sequence(flat.split(self.lengths), batch_first=True, padding_value=-3.0)


def random_batch(seed: int, spread: float) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, L_MAX + 1, (B,), generator=random).tolist()

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=random)

    logprobs = -0.05 - noise(1.5).abs()
    old = logprobs + noise(spread)
    advantages = torch.randn(B, generator=random)
    return Batch(lengths, logprobs, old, old + noise(0.2), logprobs + noise(0.4), noise(1.0).abs(), advantages)


def our_config(options: Options) -> Config:
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "sampler": {"max_completion_length": L_MAX}}
    rewards = {"reward_funcs": ["answer", "format"], "reward_weights": [1.0, 0.5]}
    algorithm = {name: value for name, value in options.items() if name not in ("micro_batches", *OURS)}
    for name in (*options, options.get("loss_type", "")):
        algorithm |= OURS.get(name, {})
    return Config.model_validate(sections | {"rewards": rewards, "algorithm": algorithm})


def our_loss(batch: Batch, options: Options) -> tuple[Tensor, Tensor]:
    """Returns (loss, [2N] its derivatives by log-probs and by entropies)."""
    algorithm = our_config(options).algorithm
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
    return with_gradients(loss(objective, token_weights(batch.lengths, denominator)), logprobs, entropy)


def with_gradients(value: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return value, torch.cat(gradients)


def trl_loss(batch: Batch, options: Options) -> tuple[Tensor, Tensor]:
    trainer = trl_trainer(options)
    inputs = trl_inputs(trainer, batch)
    trainer.beta = options.get("beta", 0.0)
    trainer.args.use_bias_correction_kl = options.get("use_bias_correction_kl", False)
    inputs["advantages"] = batch.advantages
    if "vllm_importance_sampling_mode" not in options:
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"] = batch.padded(batch.old_logprobs)
    inputs["ref_per_token_logps"] = batch.padded(batch.ref_logprobs)
    logprobs, entropy = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    outputs = {"log_probs": batch.padded(logprobs), "entropy": batch.padded(entropy)}
    parts = options.get("micro_batches", 1)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
    total = torch.zeros(())
    for rows in torch.arange(B).chunk(parts):
        part = {k: v if k == "num_items_in_batch" else v[rows] for k, v in inputs.items()}
        given = SimpleNamespace(**{k: v[rows] for k, v in outputs.items()})
        total = total + trainer._compute_loss(lambda *_, given=given, **__: given, part)
    return with_gradients(total, logprobs, entropy)


def trl_inputs(trainer: Any, batch: Batch) -> dict[str, Any]:
    """Returns TRL's own tensors for this batch: masks, item counts, advantages, importance weights."""
    completions = [[1] * n for n in batch.lengths]
    sampled = [part.tolist() for part in batch.vllm_logprobs.split(batch.lengths)]
    generated: tuple[Any, ...] = ([[1]] * B, completions, None, [""] * B, sampled, {}, None, None)
    if isinstance(trainer, RLOOTrainer):
        generated = ([[1]] * B, completions, [""] * B)
    trainer._generate = lambda _: generated
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.padded(batch.old_logprobs), None, None)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * B)
    del trainer._get_per_token_logps_and_entropies  # from now on the class's own again
    return dict(inputs)


def trl_trainer(options: Options, scores: Sequence[Callable] = ()) -> Any:
    """Makes a trainer of TRL for one step over the whole batch, whose model is never called."""
    kind, settings = (RLOOTrainer, RLOOConfig) if "adv_estimator" in options else (GRPOTrainer, GRPOConfig)
    arguments = settings(
        output_dir=tempfile.gettempdir(), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=B,
        num_generations=G, max_completion_length=L_MAX, steps_per_generation=1, beta=0.0,
        **{f.name: options[f.name] for f in fields(settings) if f.name in options.keys() - SET_LATER},
    )  # fmt: skip
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape: dict[str, Any] = {"vocab_size": 4, **dict.fromkeys(sizes, 4)}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    trainer = kind(
        model=model, reward_funcs=list(scores) or [lambda **_: [0.0] * B], args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * B}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    for name in options.keys() & SET_LATER - {"beta"}:  # with which TRL would ask the model for a reference
        setattr(trainer, name, options[name])
    trainer._entropy_bonus_enabled = "entropy_coef" in options
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "vllm_importance_sampling_mode" in options
    return trainer


def advantage_difference(options: Options, seed: int) -> float:
    config = our_config(options)
    random = np.random.default_rng(seed)
    scores = random.choice([-1.0, 0.0, 1.0], (2, B)) + random.normal(0, 0.1, (2, B))
    rewards, one = np.array(config.rewards.weights) @ scores, np.ones(1)
    rollouts = [
        Rollout(one, one, one, dict(zip(config.rewards.names, both, strict=True)), reward, "stop")  # type: ignore[arg-type]
        for both, reward in zip(scores.T, rewards, strict=True)
    ]
    groups = [Group(g, 0, g, one, tuple(rollouts[g * G : (g + 1) * G])) for g in range(GROUPS)]  # type: ignore[arg-type]
    ours = np.concatenate(list(step_advantages(groups, config).values()))

    functions = [lambda scores=column, **_: scores.tolist() for column in scores]
    more: dict[str, Any] = {"reward_weights": config.rewards.weights}
    if "adv_estimator" in options:
        more["normalize_advantages"] = config.algorithm.whiten_advantages
    trainer = trl_trainer({**options, **more}, functions)
    return float(np.abs(ours - trl_inputs(trainer, random_batch(seed, 0.0))["advantages"].numpy()).max())


def main() -> None:
    logging.disable(logging.WARNING)  # TRL advises against some of the combinations
    print("| options | loss, or advantages | gradient | why |\n|---|---|---|---|")
    surprises = []
    for name, value, gradient in compare():
        print(f"| {name} | {value:.1e} | {gradient:.1e} | {KNOWN_DIFFERENCES.get(name, '')} |", flush=True)
        if (max(value, gradient) > TOLERANCE) != (name in KNOWN_DIFFERENCES):
            surprises.append(name)
    if surprises:
        sys.exit(f"tandem: more than {TOLERANCE:g} apart, or no more where docs/algorithm.md says so: {surprises}")


if __name__ == "__main__":
    main()
