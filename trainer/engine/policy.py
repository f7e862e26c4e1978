"""The policy in DeepSpeed: forward and backward of micro-batches, and their sums for a step's metrics."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from model.checksum import checksum
from model.compiled import compiled
from model.files import lora
from model.files.counted_dims import counted_dims
from model.files.dims import ModelDims, model_dims
from model.files.folder import causal_lm_class
from model.logprobs import arrange_causal_lm, load_model, score_logprobs, score_norms_of_row, score_terms
from model.packing import PackedRow, SequenceGroup
from model.router_replay import RouterReplay
from model.vision import layout_of
from trainer.algorithm.losses import TokenTerms, loss_and_terms
from trainer.algorithm.mismatch import by_cause, by_length, gaps
from trainer.algorithm.sums import TOKEN_SUMS
from trainer.data.tensors import MicroBatch, filler_row
from trainer.engine.deepspeed_config import policy_of
from trainer.engine.deepspeed_insides import gathered
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import Exported, base, exported


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

    def __init__(
        self, config: Config, world_size: int, sequence_group: SequenceGroup | None = None, is_trained: bool = True
    ):
        super().__init__(config, world_size, policy_of(config) if is_trained else None, sequence_group)

    def _load(self) -> Policy:
        config, given = self.config, self.config.model
        model, _ = load_model(causal_lm_class, given.path, given.dtype, given.revision, given.trust_remote_code)
        self.layout = layout_of(model.config, given.path, given.revision)
        if config.lora.r:
            self.adapter_settings = lora.settings_file(lora.add_adapters(model, config))
        return Policy(model, config.trainer.logprob_chunk_size, config.algorithm.entropy_coef > 0)

    def _arrange(self) -> None:
        arrange_causal_lm(self.model, self.config.trainer.packing, self.layout, self._largest)
        if self.config.algorithm.router_replay:
            row = filler_row().to(self.model.device)
            run = functools.partial(self._forward, row, score=score_logprobs)
            self.model.router_replay = RouterReplay(self.model, run, gathered)

    def _exported(self) -> list[Exported]:
        return exported(self.model, self.config.lora)

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
        algorithm, row = self.config.algorithm, self.row_on_device(batch.row)
        logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature)
        weights = self._to_device(batch.weights)
        if batch.is_filler:  # a rank without work joins the collectives with one token: no objective sees it
            loss_sum = (logprobs.exp() * weights).sum()  # at most 1 · 0, whatever the model's output
            self.accumulate(loss_sum)
            self.sums.add({"loss": loss_sum})
            return logprobs.detach()
        old, ref, proximal, advantages = (
            None if x is None else self._to_device(x)
            for x in (batch.old_logprobs, batch.ref_logprobs, batch.proximal_logprobs, batch.advantages)
        )
        given = logprobs, weights, old, ref, advantages
        if algorithm.loss is None:
            lengths = self._to_device(torch.tensor(batch.row.lengths))
            found = compiled(loss_and_terms, *given, lengths, algorithm, entropy, proximal)
        else:  # a user's function may be one that no compiler takes
            found = loss_and_terms(*given, batch.row.lengths, algorithm, entropy, proximal)
        loss_sum, *terms = found
        self.accumulate(loss_sum)
        mass = {} if row.sampling_mask is None else {"log_mass": log_mass}
        of_tokens = vars(TokenTerms(*terms)) | {"entropy": entropy, "logprobs": logprobs, "loss": loss_sum} | mass
        self.sums.add(of_tokens, functools.partial(_sums_of, batch, policy_version, algorithm.kl_estimator))
        if algorithm.router_replay:
            self.sums.add(self.model.router_replay.sums())
        return logprobs.detach()

    def score(self, row: PackedRow, temperature: float) -> Tensor:
        """Returns log-probs [N] of the row's targets, as `evaluate` does."""
        return self.evaluate(row, temperature, score_logprobs).float()

    def score_norms(self, row: PackedRow) -> Tensor:
        """Returns squared norms [N] of the targets' scores under the present weights, as `evaluate` does."""
        return self.evaluate(row, self.config.sampler.temperature, score_norms_of_row)


def _sums_of(
    batch: MicroBatch, policy_version: int | None, kl_estimator: str, of_tokens: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns TOKEN_SUMS of a micro-batch from its tokens' values [N] on the CPU."""
    logprobs, log_mass, old_logprobs = of_tokens.pop("logprobs"), of_tokens.pop("log_mass", None), batch.old_logprobs
    sampled, known = _sampled_logprobs(batch, logprobs, policy_version)
    of_tokens["abs_log_ratio"] = (logprobs - old_logprobs).abs()
    summed = {name: values.double().sum() for name, values in of_tokens.items()}
    if batch.ref_logprobs is not None and kl_estimator == "k3":  # the loss's, in float32, is noise below x = 1e-3
        summed["kl"] = gaps(batch.ref_logprobs.cpu(), logprobs)["k3"]
    summed |= by_length(of_tokens["correction"], batch.row.lengths) | gaps(logprobs, old_logprobs)
    return summed | by_cause(logprobs, old_logprobs, sampled, known, log_mass)


def _sampled_logprobs(
    batch: MicroBatch, logprobs: Tensor, policy_version: int | None
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Returns log-probs [N] under the weights that sampled, and a mask of the tokens for which they are known.

    They are those of an earlier pass; else the present ones, for tokens that the present version sampled.
    """
    is_present = batch.policy_versions.numpy() == (-1 if policy_version is None else policy_version)
    if batch.sampled_logprobs is None:
        return logprobs, is_present
    is_earlier = ~np.isnan(batch.sampled_logprobs.numpy())
    return torch.where(torch.from_numpy(is_earlier), batch.sampled_logprobs, logprobs), is_earlier | is_present
