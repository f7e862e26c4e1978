"""The policy in DeepSpeed: forward and backward of micro-batches, and their sums for a step's metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from model.checksum import checksum
from model.files import lora
from model.files.counted_dims import counted_dims
from model.files.dims import ModelDims, model_dims
from model.logprobs import load_causal_lm, score_logprobs, score_norms_of_row, score_terms
from model.packing import PackedRow, SequenceGroup
from model.router_replay import RouterReplay
from model.vision import layout_of
from trainer.algorithm.losses import loss, token_objective
from trainer.algorithm.mismatch import by_cause, gaps
from trainer.algorithm.sums import TOKEN_SUMS
from trainer.data.tensors import MicroBatch, filler_row
from trainer.engine.deepspeed_config import policy_of
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import base, exported


class Policy(torch.nn.Module):
    """A module with one forward for DeepSpeed's hooks: PackedRow -> (log-probs, entropies, log-masses) of its targets.

    With `score`, a function of model.logprobs, it returns that function's result for every target instead.
    """

    def __init__(self, model: Any, chunk_size: int, entropy_gradient: bool):
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient

    def forward(self, row: PackedRow, temperature: float = 1.0, score: Callable[..., Tensor] | None = None) -> Any:
        if score is not None:
            return score(self.model, row, temperature, self.chunk_size)
        return score_terms(self.model, row, temperature, self.chunk_size, self.entropy_gradient)


class PolicyEngine(DeepSpeedModel):
    _sums = TOKEN_SUMS

    def __init__(self, config: Config, world_size: int, sequence_group: SequenceGroup | None = None):
        given = config.model
        model = load_causal_lm(given.path, given.dtype, given.revision, given.trust_remote_code, config.trainer.packing)
        if config.lora.r:
            self.adapter_settings = lora.settings_file(lora.add_adapters(model, config))
        policy = Policy(model, config.trainer.logprob_chunk_size, config.algorithm.entropy_coef > 0)
        if config.algorithm.router_replay:
            model.router_replay = RouterReplay(model, lambda: policy(filler_row(), score=score_logprobs))
        super().__init__(config, world_size, policy_of(config), policy, sequence_group)
        self.tensors = exported(model, config.lora)
        self.layout = layout_of(model.config, config.model.path, config.model.revision)

    @property
    def published_settings(self) -> bytes | None:
        """Returns adapter_config.json of every version; None if whole weights are published."""
        return self.adapter_settings if self.config.lora.publishes_adapters else None

    def base_checksums(self) -> dict[str, str]:
        """Returns checksums of the frozen weights, made on their device. Every rank calls it; rank 0 has the result."""
        is_rank_0 = torch.distributed.get_rank() == 0
        return dict(self.gathered_tensors(base(self.model), lambda _: is_rank_0, lambda _, tensor: checksum(tensor)))

    @functools.cached_property
    def dims(self) -> ModelDims | None:
        return model_dims(self.model.config.to_dict()) or counted_dims(self.model.config)

    def backward(self, batch: MicroBatch, policy_version: int | None = None) -> Tensor:
        """Runs forward and backward of one micro-batch and adds its metrics to `sums`. Nothing here waits for a GPU.

        policy_version: the present one. For tokens that it sampled, sampled_logprobs are known now; like proximal
        log-probs they only measure and correct the mismatch. Returns the log-probs [N], detached.
        """
        row = self.row_on_device(batch.row)
        logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature)
        old_logprobs, advantages, weights = map(self._to_device, (batch.old_logprobs, batch.advantages, batch.weights))
        if batch.is_filler:  # a rank without work joins the collectives with one token: no objective sees it
            loss_sum = (logprobs.exp() * weights).sum()  # at most 1 · 0, whatever the model's output
            self.accumulate(loss_sum)
            self.sums.add({"loss": loss_sum})
            return logprobs.detach()
        ref_logprobs, proximal_logprobs = (
            None if x is None else self._to_device(x) for x in (batch.ref_logprobs, batch.proximal_logprobs)
        )
        lengths, algorithm = batch.row.lengths, self.config.algorithm
        objective, terms = token_objective(
            logprobs, old_logprobs, ref_logprobs, advantages, lengths, algorithm, entropy, proximal_logprobs
        )
        loss_sum = loss(objective, weights)
        self.accumulate(loss_sum)
        logprobs = logprobs.detach()
        sampled, known = self._sampled_logprobs(batch, logprobs, policy_version)
        mass = None if row.sampling_mask is None else log_mass
        parts = by_cause(logprobs, old_logprobs, sampled, known, mass)
        if algorithm.router_replay:
            parts |= self.model.router_replay.sums()
        of_tokens = vars(terms) | {"entropy": entropy.detach(), "abs_log_ratio": (logprobs - old_logprobs).abs()}
        parts |= {name: values.double().sum() for name, values in of_tokens.items()}
        self.sums.add(gaps(logprobs, old_logprobs) | parts | {"loss": loss_sum})
        return logprobs

    def _sampled_logprobs(
        self, batch: MicroBatch, logprobs: Tensor, policy_version: int | None
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Returns log-probs [N] under the weights that sampled, and a mask of the tokens for which they are known.

        They are those of an earlier pass; else the present ones, for tokens that the present version sampled. The
        choice is made on the CPU.
        """
        is_present = batch.policy_versions.numpy() == (-1 if policy_version is None else policy_version)
        if batch.sampled_logprobs is None:
            return logprobs, is_present
        is_earlier = ~np.isnan(batch.sampled_logprobs.numpy())
        mask, earlier = self._to_device(torch.from_numpy(is_earlier)), self._to_device(batch.sampled_logprobs)
        return torch.where(mask, earlier, logprobs), is_earlier | is_present

    def score(self, row: PackedRow, temperature: float) -> Tensor:
        """Returns log-probs [N] of the row's targets, as `evaluate` does."""
        return self.evaluate(row, temperature, score_logprobs).float()

    def score_norms(self, row: PackedRow) -> Tensor:
        """Returns squared norms [N] of the targets' scores under the present weights, as `evaluate` does."""
        return self.evaluate(row, self.config.sampler.temperature, score_norms_of_row)
