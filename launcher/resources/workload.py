"""The demands of a run on the machine, in plain numbers. The estimates of memory start from them.

b = bytes per value of model.dtype, N = parameters, R = ranks, S = ranks that share a micro-batch, T = tokens in a
micro-batch, P = prompt, C = completion, G = completions in a group; other letters as in dims.py. docs/plan.md
states every formula.
"""

from dataclasses import dataclass
from typing import Any

from common.config import Config
from model.files.counted_dims import read_dims
from model.files.dims import ModelDims
from trainer.engine.deepspeed_config import OPTIMIZERS, deepspeed_config, is_offloaded, optimizer_of

BYTES = {"float32": 4, "bfloat16": 2}
BUCKET = 500_000_000  # DeepSpeed's default of reduce_bucket_size, and its MEMORY_OPT_ALLREDUCE_SIZE


@dataclass(frozen=True)
class Workload:
    """The sizes of a run that decide how much memory it needs."""

    model: ModelDims
    dtype: str
    ranks: int
    zero_stage: int
    prompt: int  # P, the longest
    completion: int  # C, the longest
    num_generations: int  # G
    groups_per_micro_batch: float  # the longest groups; of a budget of tokens as many as it holds, at least 1
    groups_per_batch: int
    shares_prompt: bool = True
    sequences: int = 1  # per rollout, at most
    checkpointing: bool = False
    chunk: int = 1024  # trainer.logprob_chunk_size
    adapters: int | None = None  # parameters of LoRA, which alone are trained; None = every weight is trained
    has_token_budget: bool = False  # trainer.max_tokens_per_micro_batch
    critic: ModelDims | None = None
    reference: ModelDims | None = None
    reference_on: str = "sampler"  # or "trainer": the side that holds and runs it
    reference_is_base: bool = False  # on the trainer it is the policy with its adapters switched off: no second copy
    max_num_seqs: int = 256
    on_gpu: bool = True
    sums_in_fp32: bool = False  # gradients add up over micro-batches in float32, with weights in bfloat16
    moments: float = 8  # bytes of the optimizer's memory for each parameter
    bucket: int = BUCKET  # B, DeepSpeed's reduce_bucket_size: values
    writes_behind: bool = False  # a version is written while the next step trains
    ranks_per_gpu: int = 1
    sp_size: int = 1  # S, trainer.sequence_parallel_size: ranks that share a micro-batch
    tp_size: int = 1  # T, trainer.tensor_parallel_size: ranks that share each layer
    offloads_optimizer: bool = False  # masters, moments and their gradients are in the host's memory
    offloads_weights: bool = False
    images: int = 0  # per prompt, at most
    patches: int = 0  # patches of the largest image
    trains_tower: bool = True  # the vision tower of policy and critic is trained; with LoRA it is frozen

    @property
    def bytes_per_value(self) -> int:
        return BYTES[self.dtype]

    @property
    def frozen(self) -> float:
        """Returns the policy's number of frozen parameters: with LoRA the model's, else a frozen vision tower's.

        Like all counts of parameters below it is that of a rank before ZeRO divides it.
        """
        return self.model.per_rank(self.tp_size) if self.adapters is not None else self._frozen_tower(self.model)

    @property
    def trained(self) -> float:
        return self.model.per_rank(self.tp_size) - self.frozen if self.adapters is None else self.adapters

    @property
    def trained_by_critic(self) -> float:
        return self.critic.per_rank(self.tp_size) - self._frozen_tower(self.critic) if self.critic else 0

    @property
    def zero_ranks(self) -> int:
        """Returns the number of ranks over which ZeRO divides states."""
        return self.ranks // self.tp_size

    def _frozen_tower(self, model: ModelDims) -> int:
        return model.vision.parameters if model.vision and not self.trains_tower else 0

    @property
    def tokens_of_group(self) -> int:
        """Returns P + G·C with a shared prompt, else G·(P + C) for each sequence that a rollout may have."""
        if self.shares_prompt:
            return self.prompt + self.num_generations * self.completion
        return self.num_generations * self.sequences * (self.prompt + self.completion)


def workload_of(
    config: Config, num_ranks: int, model: ModelDims, on_gpu: bool = True, ranks_per_gpu: int = 1
) -> Workload:
    """Returns the workload of a config. Reads config.json of critic and reference, if they are models of their own.

    Raises UserError if the DeepSpeed settings contradict the config.
    """
    from sampler.engine.engine_arguments import max_num_seqs

    settings = deepspeed_config(config, num_ranks)
    zero, sums = settings["zero_optimization"], settings.get("data_types", {}).get("grad_accum_dtype")
    budget, critic, reference = config.trainer.max_tokens_per_micro_batch, config.critic, config.reference
    lora, named = config.lora, config.lora.target_modules
    vision, longest = model.vision, config.data.max_prompt_length
    images = config.data.limit_images if config.data.image_key is not None else 0
    modules = None if isinstance(named, str) else {name.split(".")[-1] for name in named}
    return Workload(
        model=model,
        dtype=config.model.dtype,
        ranks=num_ranks,
        zero_stage=int(zero["stage"]),
        prompt=longest,
        completion=config.sampler.max_completion_length,
        num_generations=config.sampler.num_generations,
        groups_per_micro_batch=config.groups_at_once if budget is None else max(1.0, budget / config.longest_group),
        has_token_budget=budget is not None,
        groups_per_batch=config.prompts_per_batch,
        shares_prompt=config.trainer.packing != "separate",
        sequences=config.max_sequences,
        checkpointing=config.model.gradient_checkpointing,
        chunk=config.trainer.logprob_chunk_size,
        adapters=model.adapter_parameters(lora.r, modules) if lora.r else None,
        critic=_dims_or(model, critic.path) if config.algorithm.needs_critic else None,
        reference=_dims_or(model, reference.path) if config.algorithm.beta > 0 else None,
        reference_is_base=config.reference_is_base,
        reference_on=config.reference_on or "sampler",
        max_num_seqs=int(config.vllm.get("max_num_seqs", max_num_seqs(config))),
        on_gpu=on_gpu,
        sums_in_fp32=config.model.dtype == "bfloat16" and sums == "fp32",
        moments=_moments(settings, model),
        bucket=int(float(zero.get("reduce_bucket_size", BUCKET))),
        writes_behind=config.trainer.max_staleness > 0,
        ranks_per_gpu=ranks_per_gpu,
        sp_size=config.trainer.sequence_parallel_size,
        tp_size=config.trainer.tensor_parallel_size,
        offloads_optimizer=is_offloaded(zero, "offload_optimizer"),
        offloads_weights=is_offloaded(zero, "offload_param"),
        images=images,
        # of an image of data.max_pixels, at most as many as fit into a prompt
        patches=min(vision.patches(config.data.max_pixels), longest * vision.merge**2) if vision and images else 0,
        trains_tower=not config.model.freeze_vision_tower and not config.lora.r,
    )


def _moments(settings: dict[str, Any], model: ModelDims) -> float:
    """Returns the optimizer's bytes per parameter: Muon's are Adam's for embedding and head, half for matrices."""
    name = optimizer_of(settings)
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    return OPTIMIZERS[name] * (1 + (name == "muon") * embeddings / model.parameters)


def _dims_or(policy: ModelDims, path: str | None) -> ModelDims | None:
    """Returns the dimensions of the model at `path`; without a path those of the policy, where it starts."""
    return read_dims(path, None) if path else policy
