"""The policy in DeepSpeed: forward and backward of micro-batches, and sums for a step's metrics."""

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
from model.logprobs import (
    arrange_causal_lm,
    load_model,
    score_logprobs,
    score_norms_of_row,
    score_terms,
)
from model.packing import PackedRow, SequenceGroup
from model.router_replay import RouterReplay
from model.vision import layout_of
from trainer.algorithm.losses import TokenTerms, loss_and_terms
from trainer.algorithm.mismatch import by_cause, by_length, gaps
from trainer.algorithm.sums import TOKEN_SUMS
from trainer.data.tensors import MicroBatch, filler_row
from trainer.engine.deepspeed_config import policy_optimizer
from trainer.engine.deepspeed_insides import gathered
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import Exported, base, exported


class Policy(torch.nn.Module):
    """A module for DeepSpeed's hooks: PackedRow -> log-probs, entropies, log-masses of its targets.

    With `score`, a function of model.logprobs, it returns that function's result for every target.
    """

    def __init__(self, model: Any, chunk_size: int, entropy_gradient: bool):
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient

    def forward(
        self, row: PackedRow, temperature: float = 1.0, score: Callable[..., Tensor] | None = None
    ) -> Any:
        if score is not None:
            return score(self.model, row, temperature, self.chunk_size)
        return score_terms(self.model, row, temperature, self.chunk_size, self.entropy_gradient)


class PolicyEngine(DeepSpeedModel):
    """The policy, which is a causal language model in DeepSpeed, with its forward and backward.

    DeepSpeedModel has what policy and critic have in common, such as the optimizer step.
    """

    _sums = TOKEN_SUMS

    def __init__(
        self,
        config: Config,
        world_size: int,
        sequence_group: SequenceGroup | None = None,
        is_trained: bool = True,
    ):
        optimizer = policy_optimizer(config) if is_trained else None
        super().__init__(config, world_size, optimizer, sequence_group)

    def _load(self) -> Policy:
        config = self.config
        path = config.model.path
        revision = config.model.revision
        model, _ = load_model(
            causal_lm_class, path, config.model.dtype, revision, config.model.trust_remote_code
        )
        self.layout = layout_of(model.config, path, revision)
        if config.lora.r:
            self.adapter_settings = lora.settings_file(lora.add_adapters(model, config))
        entropy_gradient = config.algorithm.entropy_coef > 0
        return Policy(model, config.trainer.logprob_chunk_size, entropy_gradient)

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
        """Returns the contents of the adapter_config.json that is published with every version.

        Returns None if versions are whole weights and not adapters.
        """
        return self.adapter_settings if self.config.lora.publishes_adapters else None

    def base_checksums(self) -> dict[str, str]:
        """Returns checksums of the frozen weights by name, made on their device, on rank 0.

        Every rank calls it, and the others get nothing.
        """
        is_rank_0 = torch.distributed.get_rank() == 0
        checksums = self.gathered_tensors(
            base(self.model), lambda _: is_rank_0, lambda _, tensor: checksum(tensor)
        )
        return dict(checksums)

    @functools.cached_property
    def dims(self) -> ModelDims | None:
        return model_dims(self.model.config.to_dict()) or counted_dims(self.model.config)

    def backward(self, batch: MicroBatch, policy_version: int | None = None) -> Tensor:
        """Runs forward and backward of one micro-batch. Returns its log-probs [N], detached.

        It also adds the micro-batch's metrics to `sums`. Nothing here waits for a GPU.
        policy_version: the present one. The log-probs of the tokens that this version sampled are
        those under the weights that sampled; they only measure and correct the mismatch.
        """
        algorithm = self.config.algorithm
        row = self.row_on_device(batch.row)
        logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature)
        weights = self._to_device(batch.weights)
        if batch.is_filler:
            # A rank without work joins the collectives with one token, which no objective sees.
            loss_sum = (logprobs.exp() * weights).sum()  # at most 1 · 0, whatever the output
            self.accumulate(loss_sum)
            self.sums.add({"loss": loss_sum})
            return logprobs.detach()
        inputs = (
            logprobs,
            weights,
            self._to_device(batch.old_logprobs),
            self._to_device_if_any(batch.ref_logprobs),
            self._to_device(batch.advantages),
        )
        proximal = self._to_device_if_any(batch.proximal_logprobs)
        if algorithm.loss is None:
            lengths = self._to_device(torch.tensor(batch.row.lengths))
            loss_sum, *terms = compiled(
                loss_and_terms, *inputs, lengths, algorithm, entropy, proximal
            )
        else:  # a user's function may be one that no compiler takes
            loss_sum, *terms = loss_and_terms(
                *inputs, batch.row.lengths, algorithm, entropy, proximal
            )
        self.accumulate(loss_sum)
        of_tokens = vars(TokenTerms(*terms)) | {"entropy": entropy, "logprobs": logprobs}
        of_tokens["loss"] = loss_sum
        if row.sampling_mask is not None:
            of_tokens["log_mass"] = log_mass
        sums = functools.partial(_sums_of, batch, policy_version, algorithm.kl_estimator)
        self.sums.add(of_tokens, sums)
        if algorithm.router_replay:
            self.sums.add(self.model.router_replay.sums())
        return logprobs.detach()

    def _to_device_if_any(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self._to_device(values)

    def score(self, row: PackedRow, temperature: float) -> Tensor:
        """Returns log-probs [N] of the row's targets, as `evaluate` does."""
        return self.evaluate(row, temperature, score_logprobs).float()

    def score_norms(self, row: PackedRow) -> Tensor:
        """Returns squared norms [N] of the targets' scores under the present weights."""
        return self.evaluate(row, self.config.sampler.temperature, score_norms_of_row)


def _sums_of(
    batch: MicroBatch,
    policy_version: int | None,
    kl_estimator: str,
    of_tokens: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns TOKEN_SUMS of a micro-batch from its tokens' values [N] on the CPU."""
    logprobs = of_tokens["logprobs"]
    log_mass = of_tokens.get("log_mass")
    old_logprobs = batch.old_logprobs
    sampled, is_known = _sampled_logprobs(batch, logprobs, policy_version)
    sums: dict[str, Tensor] = {}
    for name, values in of_tokens.items():
        if name not in ("logprobs", "log_mass"):  # only the gaps of these two are summed
            sums[name] = values.double().sum()
    sums["abs_log_ratio"] = (logprobs - old_logprobs).abs().double().sum()
    if batch.ref_logprobs is not None and kl_estimator == "k3":
        # The loss has computed k3(x) of x = log π_ref − log π_θ in float32, in which it is rounding
        # noise where |x| is below 1e-3.
        sums["kl"] = gaps(batch.ref_logprobs.cpu(), logprobs)["k3"]
    sums |= by_length(of_tokens["correction"], batch.row.lengths)
    sums |= gaps(logprobs, old_logprobs)
    return sums | by_cause(logprobs, old_logprobs, sampled, is_known, log_mass)


def _sampled_logprobs(
    batch: MicroBatch, logprobs: Tensor, policy_version: int | None
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Returns each token's log-prob under the weights that sampled it, and whether it is known.

    Both are [N]. The log-prob is known if an earlier pass stored it in the batch, or if the present
    policy version sampled the token, because `logprobs` are those under the present weights. An
    unknown one has any value.
    """
    if policy_version is None:
        policy_version = -1  # which sampled no token
    is_present = batch.policy_versions.numpy() == policy_version
    if batch.sampled_logprobs is None:
        return logprobs, is_present
    is_earlier = ~np.isnan(batch.sampled_logprobs.numpy())
    sampled = torch.where(torch.from_numpy(is_earlier), batch.sampled_logprobs, logprobs)
    return sampled, is_earlier | is_present
