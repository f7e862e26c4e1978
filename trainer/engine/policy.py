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
    """The module that DeepSpeed wraps. It scores the targets of a PackedRow with the policy.

    By default it returns each target's log-prob, entropy and log-mass, as `score_terms` of
    model.logprobs does, [N] each. If `score` is given, a function of model.logprobs such as
    `score_logprobs`, it returns the result of that function, [N].
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
    """The policy as a model in DeepSpeed, with its forward and backward.

    What policy and critic have in common, such as the optimizer step, is in DeepSpeedModel.
    is_trained: False for a frozen reference model (sharded_reference.py), which has no optimizer.
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
        """Returns the adapter_config.json that is published with every version of the adapters.

        Returns None if whole weights are published instead of adapters.
        """
        return self.adapter_settings if self.config.lora.publishes_adapters else None

    def base_checksums(self) -> dict[str, str]:
        """Returns the checksums of the frozen weights by name on rank 0, and {} on other ranks.

        They are computed on the weights' device. Every rank must call it.
        """
        is_rank_0 = torch.distributed.get_rank() == 0
        checksums = self.gathered_tensors(
            base(self.model),
            wanted=lambda name: is_rank_0,
            convert=lambda name, tensor: checksum(tensor),
        )
        return dict(checksums)

    @functools.cached_property
    def dims(self) -> ModelDims | None:
        """Returns the decoder's dimensions, or None if transformers does not know its layers."""
        return model_dims(self.model.config.to_dict()) or counted_dims(self.model.config)

    def backward(self, batch: MicroBatch, policy_version: int | None = None) -> Tensor:
        """Runs forward and backward of one micro-batch. Returns its log-probs [N], detached.

        It also adds the micro-batch's terms to the metric sums. It never waits for a GPU.
        policy_version: the version of the weights in this call. If a token was sampled by the same
        version, its log-prob here differs from the sampler's only by numerics, which the metrics
        then report. None: no token counts as sampled by these weights.
        """
        algorithm = self.config.algorithm
        row = self.row_on_device(batch.row)
        logprobs, entropy, log_mass = self.ds(row, self.config.sampler.temperature)
        weights = self._to_device(batch.weights)
        if batch.is_filler:
            # This rank has nothing to train, and only takes part in the other ranks' collectives.
            # The loss must be 0, and exp(logprobs) is at most 1, so the product with 0 is not NaN.
            loss_sum = (logprobs.exp() * weights).sum()
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
        else:  # the user's own objective may not compile
            loss_sum, *terms = loss_and_terms(
                *inputs, batch.row.lengths, algorithm, entropy, proximal
            )
        self.accumulate(loss_sum)

        terms_by_name = vars(TokenTerms(*terms)) | {"entropy": entropy, "logprobs": logprobs}
        terms_by_name["loss"] = loss_sum
        if row.sampling_mask is not None:
            terms_by_name["log_mass"] = log_mass
        # `Sums` calls this function once per step, on the CPU.
        sums_of = functools.partial(_sums_of, batch, policy_version, algorithm.kl_estimator)
        self.sums.add(terms_by_name, sums_of)
        if algorithm.router_replay:
            self.sums.add(self.model.router_replay.sums())
        return logprobs.detach()

    def _to_device_if_any(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self._to_device(values)

    def score(self, row: PackedRow, temperature: float) -> Tensor:
        """Returns the log-probs of the row's targets, [N] float32, on the CPU.

        They are computed without gradient. Every rank must call it, because ZeRO 3 gathers weights.
        """
        return self.evaluate(row, temperature, score_logprobs).float()

    def score_norms(self, row: PackedRow) -> Tensor:
        """Returns the squared score norm of each target under the current weights, [N] on the CPU.

        It is ‖∇ ln π(target)‖² with respect to the logits (algorithm/segments.py). Every rank must
        call it, because ZeRO 3 gathers weights.
        """
        return self.evaluate(row, self.config.sampler.temperature, score_norms_of_row)


def _sums_of(
    batch: MicroBatch,
    policy_version: int | None,
    kl_estimator: str,
    terms: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns a micro-batch's contributions to TOKEN_SUMS, as scalars by name.

    terms: a value for each of the micro-batch's tokens, [N], by name, and its loss, a scalar. All
    are on the CPU. policy_version: as in `PolicyEngine.backward`.
    """
    logprobs = terms["logprobs"]
    log_mass = terms.get("log_mass")
    old_logprobs = batch.old_logprobs
    own_logprobs, is_known = _own_logprobs(batch, logprobs, policy_version)

    sums: dict[str, Tensor] = {}
    for name, values in terms.items():
        if name not in ("logprobs", "log_mass"):  # only differences of log-probs are summed
            sums[name] = values.double().sum()
    sums["abs_log_ratio"] = (logprobs - old_logprobs).abs().double().sum()
    if batch.ref_logprobs is not None and kl_estimator == "k3":
        # The loss has computed k3(x) of x = log π_ref − log π_θ in float32, where k3(x) is rounding
        # noise if |x| is below 1e-3. So the metric is computed again, in float64.
        sums["kl"] = gaps(batch.ref_logprobs.cpu(), logprobs)["k3"]
    sums |= by_length(terms["correction"], batch.row.lengths)
    sums |= gaps(logprobs, old_logprobs)
    sums |= by_cause(logprobs, old_logprobs, own_logprobs, is_known, log_mass)
    return sums


def _own_logprobs(
    batch: MicroBatch, logprobs: Tensor, policy_version: int | None
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Returns each token's log-prob under the weights that sampled it, and whether it is known.

    Both are [N]. The log-prob is known in two cases: an earlier pass has stored it in the batch, or
    the token was sampled by the current policy version, so that `logprobs` has it. Where it is not
    known, the returned log-prob means nothing.
    """
    if policy_version is None:
        policy_version = -1  # no token was sampled by this version
    is_from_current_version = batch.policy_versions.numpy() == policy_version
    if batch.own_logprobs is None:
        return logprobs, is_from_current_version
    is_stored = ~np.isnan(batch.own_logprobs.numpy())
    own_logprobs = torch.where(torch.from_numpy(is_stored), batch.own_logprobs, logprobs)
    return own_logprobs, is_stored | is_from_current_version
