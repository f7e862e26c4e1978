"""DeepSpeed: the policy, its optimizer, and one step of them. Only this file and checkpoint.py import deepspeed.

Gradients accumulate over as many `backward` calls as there are until `step` (managed_gradient_accumulation: false).
The loss already carries the denominators of the whole step, so DeepSpeed's own averaging over ranks is undone by
multiplying with the world size. Left out: building the model in shards (zero.Init); every rank loads it whole first.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import Config, UserError
from common.logprobs import load_causal_lm, score_terms
from common.packing import PackedRow
from trainer.batch import MicroBatch
from trainer.deepspeed_config import deepspeed_config
from trainer.losses import loss, token_objective
from trainer.mismatch import by_cause

_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


class Policy(torch.nn.Module):
    """PackedRow -> (log-probs, entropies, log-masses) of its targets, so that DeepSpeed's hooks see one forward."""

    def __init__(self, model: Any, chunk_size: int, entropy_gradient: bool):
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient

    def forward(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        return score_terms(self.model, row, temperature, self.chunk_size, self.entropy_gradient)


@dataclass
class Sums:
    """Sums over completion tokens of one step, on this rank; `names` and `values` are added up over ranks."""

    tokens: float = 0.0
    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0  # of the token, or of its sequence with importance_sampling_level: sequence
    token_ratio: float = 0.0
    clipped: float = 0.0
    correction: float = 0.0
    corrected: float = 0.0
    log_ratio: float = 0.0
    abs_log_ratio: float = 0.0
    abs_prob_diff: float = 0.0
    exp_abs_log_ratio: float = 0.0
    support_tokens: float = 0.0  # the parts of the log-ratio: trainer/mismatch.py
    support_log_ratio: float = 0.0
    support_abs_prob_diff: float = 0.0
    support_exp_abs_log_ratio: float = 0.0
    support_k3: float = 0.0
    numerics_tokens: float = 0.0
    numerics_log_ratio: float = 0.0
    numerics_abs_prob_diff: float = 0.0
    numerics_exp_abs_log_ratio: float = 0.0
    numerics_k3: float = 0.0
    staleness_tokens: float = 0.0
    staleness_log_ratio: float = 0.0
    staleness_abs_prob_diff: float = 0.0
    staleness_exp_abs_log_ratio: float = 0.0
    staleness_k3: float = 0.0


@dataclass(frozen=True)
class StepResult:
    applied: bool
    grad_norm: float  # of the whole step, before clipping
    learning_rate: float  # of this step


def init_distributed(config: Config) -> None:
    """One process group over all ranks, also when started without the deepspeed launcher (one rank)."""
    import deepspeed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    backend = config.trainer.dist_backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend=backend, timeout=_COLLECTIVE_TIMEOUT, verbose=False)
    if not torch.cuda.is_available():
        _unlink_shared_buffer()


def _unlink_shared_buffer() -> None:
    """DeepSpeed on CPU makes a 66 MiB buffer per rank in /dev/shm for good. The mapping outlives the name."""
    import torch.distributed as dist

    dist.barrier()  # every rank has opened every buffer by now
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    buffer.unlink(missing_ok=True)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    def __init__(self, config: Config, world_size: int):
        import deepspeed
        from transformers import get_scheduler

        self.config, self.world_size = config, world_size
        trainer = config.trainer
        ds_config = deepspeed_config(config, world_size)
        self.stage: int = ds_config["zero_optimization"]["stage"]
        model = load_causal_lm(
            config.model.path, config.model.dtype, config.model.revision, config.model.trust_remote_code
        )
        _disable_dropout(model)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": trainer.weight_decay}, {"params": others, "weight_decay": 0.0}]

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            betas = (trainer.adam_beta1, trainer.adam_beta2)
            return torch.optim.AdamW(parameters, lr=trainer.learning_rate, betas=betas)

        def scheduler(of: torch.optim.Optimizer) -> Any:
            try:
                return get_scheduler(trainer.lr_scheduler_type, of, trainer.warmup_steps, trainer.max_steps)
            except ValueError as error:
                raise UserError(f"trainer.lr_scheduler_type {trainer.lr_scheduler_type!r}: {error}") from None

        self.ds, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=Policy(model, trainer.logprob_chunk_size, config.algorithm.entropy_coef > 0),
            model_parameters=groups,
            optimizer=None if "optimizer" in ds_config else optimizer,
            lr_scheduler=None if "scheduler" in ds_config else scheduler,
            config=ds_config,
        )
        self.model = model
        self.ds.clip_fp32_gradients = self._clip  # used by ZeRO 0 in float32 only; DeepSpeed's forgets the norm
        self._clipped_norm = math.nan
        self.ds.train()
        self.sums = Sums()

    @property
    def device(self) -> torch.device:
        return self.ds.device

    @property
    def tied_embeddings(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    def backward(
        self,
        batch: MicroBatch,
        own_logprobs: Tensor | None = None,
        sampled_logprobs: Tensor | None = None,
        policy_version: int | None = None,
    ) -> Tensor:
        """Forward and backward of one micro-batch; its metrics are added to `sums`.

        own_logprobs [N]: the first pass's, for the correction; None in that pass. sampled_logprobs [N]: the trainer's
        at the version that sampled the token, NaN where not known; tokens of policy_version, the present one, are known
        now. Both measure and correct the mismatch only. Returns the log-probs [N], detached.
        """
        row = batch.row.to(self.device)
        logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature)
        old_logprobs, advantages, weights = (
            x.to(self.device) for x in (batch.old_logprobs, batch.advantages, batch.weights)
        )
        objective, terms = token_objective(
            logprobs,
            old_logprobs,
            None if batch.ref_logprobs is None else batch.ref_logprobs.to(self.device),
            advantages,
            batch.row.lengths,
            self.config.algorithm,
            entropy,
            None if own_logprobs is None else own_logprobs.to(self.device),
        )
        share = loss(objective, weights)
        # ZeRO looks at gradients only, and an infinite loss may leave them finite: then make them NaN
        scale = self.world_size if torch.isfinite(share) else math.nan
        self.ds.backward(share * scale, scale_wrt_gas=False)
        logprobs, real = logprobs.detach(), weights > 0
        self._add_sums(share.detach(), logprobs, old_logprobs, entropy.detach(), terms, real)
        sampled = torch.full_like(old_logprobs, math.nan)
        if sampled_logprobs is not None:
            sampled = sampled_logprobs.to(self.device)
        is_present = batch.policy_versions.to(self.device) == (-1 if policy_version is None else policy_version)
        sampled = torch.where(is_present & sampled.isnan(), logprobs, sampled)
        log_mass = None if row.support_ids is None else log_mass[real]
        parts = by_cause(logprobs[real], old_logprobs[real], sampled[real], log_mass)
        for name, value in parts.items():
            setattr(self.sums, name, getattr(self.sums, name) + value)
        return logprobs

    def _add_sums(
        self, share: Tensor, logprobs: Tensor, old: Tensor, entropy: Tensor, terms: Any, real: Tensor
    ) -> None:
        log_ratio = (logprobs - old)[real].double()
        self.sums.loss += share.item()
        self.sums.tokens += int(real.sum())
        self.sums.entropy += entropy[real].double().sum().item()
        self.sums.kl += terms.kl[real].double().sum().item()
        self.sums.ratio += terms.ratio[real].double().sum().item()
        self.sums.token_ratio += log_ratio.exp().sum().item()
        self.sums.clipped += terms.is_clipped[real].double().sum().item()
        self.sums.correction += terms.correction[real].double().sum().item()
        self.sums.corrected += terms.is_corrected[real].double().sum().item()
        self.sums.log_ratio += log_ratio.sum().item()
        self.sums.abs_log_ratio += log_ratio.abs().sum().item()
        self.sums.abs_prob_diff += (logprobs.exp() - old.exp())[real].double().abs().sum().item()
        self.sums.exp_abs_log_ratio += log_ratio.abs().exp().sum().item()

    def step(self) -> StepResult:
        """The optimizer step over all gradients since the last one. Not applied if a loss or gradient is not finite.

        ZeRO 1–3 find a non-finite gradient and skip by themselves; ZeRO 0 would write it into the weights, so its
        gradients are dropped here first.
        """
        learning_rate = self.learning_rate
        if self.stage == 0 and not self._gradients_are_finite():
            self.ds.zero_grad()
            return StepResult(False, math.nan, learning_rate)
        self.ds.step()
        norm = self.ds.get_global_grad_norm()
        norm = self._clipped_norm if norm is None else float(norm)
        return StepResult(self.ds.was_step_applied(), norm, learning_rate)

    def _gradients_are_finite(self) -> bool:
        import torch.distributed as dist

        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        finite = torch.tensor([float(all(torch.isfinite(g).all() for g in gradients))], device=self.device)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite.item())

    def _clip(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.max_grad_norm)
        self._clipped_norm = float(norm)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def take_sums(self) -> Sums:
        sums, self.sums = self.sums, Sums()
        return sums

    @torch.no_grad()
    def score(self, row: PackedRow, temperature: float) -> Tensor:
        """Log-probs of the row's targets, without gradient. Every rank calls it (ZeRO-3 gathers parameters)."""
        self.ds.eval()
        logprobs, _, _ = self.ds(row.to(self.device), temperature)
        self.ds.train()
        return logprobs.float().cpu()

    def parameter_names(self) -> list[tuple[str, int]]:
        """(name, bytes) of every distinct parameter, in model order; a tied head appears once, as its embedding."""
        return [(n, getattr(p, "ds_numel", p.numel()) * p.element_size()) for n, p in self.model.named_parameters()]

    def full_parameters(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole CPU tensor) of the wanted parameters. Every rank iterates to the end (ZeRO-3 gathers)."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                if wanted(name):
                    tensor = parameter.detach()
                    yield name, tensor.cpu().clone() if self.stage == 3 else tensor.cpu()


def _disable_dropout(model: torch.nn.Module) -> None:
    """The sampler has none; with it here the ratio would compare two different networks."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
