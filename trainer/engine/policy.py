"""The policy in DeepSpeed: forward and backward of micro-batches, and what they tell about the step."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.config import Config
from model import lora
from model.dims import ModelDims, model_dims
from model.logprobs import load_causal_lm, score_norms_of_row, score_terms
from model.packing import PackedRow
from model.stopwatch import Stopwatch
from trainer.algorithm.losses import ObjectiveSettings, TokenTerms, loss, token_objective
from trainer.algorithm.mismatch import by_cause
from trainer.algorithm.sums import TOKEN_SUMS, Sums
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
        self.sums = Sums(TOKEN_SUMS, self.device)
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

    def backward(self, batch: MicroBatch, policy_version: int | None = None) -> Tensor:
        """Forward and backward of one micro-batch; its metrics are added to `sums`.

        policy_version: the present one. Of tokens that it sampled, sampled_logprobs are known now; like the proximal
        ones they serve to measure and correct the mismatch only. Returns the log-probs [N], detached.
        """
        row = batch.row.to(self.device)
        with self._dropout_masks():
            logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature, self.head_time)
        old_logprobs, advantages, weights = (
            x.to(self.device) for x in (batch.old_logprobs, batch.advantages, batch.weights)
        )
        ref_logprobs, proximal_logprobs, sampled = (
            None if x is None else x.to(self.device)
            for x in (batch.ref_logprobs, batch.proximal_logprobs, batch.sampled_logprobs)
        )
        objective, terms = token_objective(
            logprobs,
            old_logprobs,
            ref_logprobs,
            advantages,
            batch.row.lengths,
            self.objective,
            entropy,
            proximal_logprobs,
        )
        share = loss(objective, weights)
        self.accumulate(share)
        logprobs, real = logprobs.detach(), weights > 0
        if sampled is None:
            sampled = torch.full_like(old_logprobs, math.nan)
        is_present = batch.policy_versions.to(self.device) == (-1 if policy_version is None else policy_version)
        sampled = torch.where(is_present & sampled.isnan(), logprobs, sampled)
        log_mass = None if row.sampling_mask is None else log_mass[real]
        parts = by_cause(logprobs[real], old_logprobs[real], sampled[real], log_mass)
        self.sums.add(token_sums(share, logprobs, old_logprobs, entropy.detach(), terms, real) | parts)
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


def token_sums(
    share: Tensor, logprobs: Tensor, old: Tensor, entropy: Tensor, terms: TokenTerms, real: Tensor
) -> dict[str, Tensor]:
    """What a micro-batch adds to the sums of the step. real: [N] not a filler's."""
    log_ratio = (logprobs - old)[real].double()
    of_tokens = {"entropy": entropy, "kl": terms.kl, "ratio": terms.ratio, "clipped": terms.is_clipped}
    of_tokens |= {"correction": terms.correction, "corrected": terms.is_corrected}
    return {name: values[real].double().sum() for name, values in of_tokens.items()} | {
        "loss": share,
        "tokens": real.sum(),
        "token_ratio": log_ratio.exp().sum(),
        "log_ratio": log_ratio.sum(),
        "abs_log_ratio": log_ratio.abs().sum(),
        "abs_prob_diff": (logprobs.exp() - old.exp())[real].double().abs().sum(),
        "exp_abs_log_ratio": log_ratio.abs().exp().sum(),
    }
