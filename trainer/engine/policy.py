"""The policy in DeepSpeed: forward and backward of micro-batches, and what they tell about the step."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config import Config
from model import lora
from model.dims import ModelDims, model_dims
from model.logprobs import load_causal_lm, score_norms_of_row, score_terms
from model.packing import PackedRow
from model.stopwatch import Stopwatch
from trainer.algorithm.losses import ObjectiveSettings, loss, token_objective
from trainer.algorithm.mismatch import by_cause
from trainer.data.tensors import MicroBatch, filler_row
from trainer.engine.deepspeed_config import policy_of
from trainer.engine.deepspeed_model import DeepSpeedModel, StepResult
from trainer.engine.exported import Exported, adapters, exported


class Policy(torch.nn.Module):
    """PackedRow -> (log-probs, entropies, log-masses) of its targets, so that DeepSpeed's hooks see one forward.

    With norms_only their score norms instead, without gradient.
    """

    def __init__(self, model: Any, chunk_size: int, entropy_gradient: bool):
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient

    def forward(
        self, row: PackedRow, temperature: float, head_time: Stopwatch | None = None, norms_only: bool = False
    ) -> Any:
        if norms_only:
            return score_norms_of_row(self.model, row, temperature, self.chunk_size)
        return score_terms(self.model, row, temperature, self.chunk_size, self.entropy_gradient, head_time)


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
    support_tokens: float = 0.0  # the parts of the log-ratio: trainer/algorithm/mismatch.py
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


class Engine(DeepSpeedModel):
    def __init__(self, config: Config, world_size: int):
        model = load_causal_lm(
            config.model.path, config.model.dtype, config.model.revision, config.model.trust_remote_code
        )
        if config.lora.r:
            self.adapter_settings = lora.settings_file(lora.add_adapters(model, config))
        policy = Policy(model, config.trainer.logprob_chunk_size, config.algorithm.entropy_coef > 0)
        super().__init__(config, world_size, policy_of(config), model, policy)
        self.objective = ObjectiveSettings.of(config.algorithm)
        self.sums = Sums()
        self.head_time = Stopwatch(self.device)
        self._micro_batch = 0

    @property
    def published_settings(self) -> bytes | None:
        """adapter_config.json of every version; None where whole weights are published."""
        return self.adapter_settings if self.config.lora.publishes_adapters else None

    def tensors(self) -> list[Exported]:
        return exported(self.model, self.config.lora)

    def adapters(self) -> list[Exported]:
        return adapters(self.model)

    @property
    def dims(self) -> ModelDims | None:
        return model_dims(self.model.config.to_dict())

    def backward(
        self,
        batch: MicroBatch,
        proximal_logprobs: Tensor | None = None,
        sampled_logprobs: Tensor | None = None,
        policy_version: int | None = None,
    ) -> Tensor:
        """Forward and backward of one micro-batch; its metrics are added to `sums`.

        proximal_logprobs [N]: the first pass's, for the correction; None in that pass. sampled_logprobs [N]: ours
        at the version that sampled the token, NaN where not known; tokens of policy_version, the present one, are known
        now. Both measure and correct the mismatch only. Returns the log-probs [N], detached.
        """
        row = batch.row.to(self.device)
        with self._dropout_masks():
            logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature, self.head_time)
        old_logprobs, advantages, weights = (
            x.to(self.device) for x in (batch.old_logprobs, batch.advantages, batch.weights)
        )
        objective, terms = token_objective(
            logprobs,
            old_logprobs,
            None if batch.ref_logprobs is None else batch.ref_logprobs.to(self.device),
            advantages,
            batch.row.lengths,
            self.objective,
            entropy,
            None if proximal_logprobs is None else proximal_logprobs.to(self.device),
        )
        share = loss(objective, weights)
        self.accumulate(share)
        logprobs, real = logprobs.detach(), weights > 0
        self._add_sums(share.detach(), logprobs, old_logprobs, entropy.detach(), terms, real)
        sampled = torch.full_like(old_logprobs, math.nan)
        if sampled_logprobs is not None:
            sampled = sampled_logprobs.to(self.device)
        is_present = batch.policy_versions.to(self.device) == (-1 if policy_version is None else policy_version)
        sampled = torch.where(is_present & sampled.isnan(), logprobs, sampled)
        log_mass = None if row.sampling_mask is None else log_mass[real]
        parts = by_cause(logprobs[real], old_logprobs[real], sampled[real], log_mass)
        for name, value in parts.items():
            setattr(self.sums, name, getattr(self.sums, name) + value)
        return logprobs

    def step(self) -> StepResult:
        self._micro_batch = 0
        return super().step()

    @contextlib.contextmanager
    def _dropout_masks(self) -> Iterator[None]:
        """A function of where the run is: a resumed run drops what an uninterrupted one does."""
        if not self.config.lora.dropout:
            yield
            return
        place = self.config.run.seed, torch.distributed.get_rank(), self.ds.global_steps, self._micro_batch
        self._micro_batch += 1
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(random.Random(repr(place)).getrandbits(63))
            yield

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

    @torch.no_grad()
    def score_norms(self, row: PackedRow) -> Tensor:
        """Squared norms of the targets' scores under the present weights: [N]. Every rank calls it."""
        self.ds.eval()
        norms = self.ds(row.to(self.device), self.config.sampler.temperature, norms_only=True)
        self.ds.train()
        return norms.cpu()

    def probe(self) -> Tensor:
        return self.ds(filler_row().to(self.device), 1.0)[0]
