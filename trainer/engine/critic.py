"""The critic: a transformers backbone and a linear head that give every completion token a value.

The value of a token is read from the hidden state of the token before it, as its logits would be.
The head starts at zero if the checkpoint is a causal language model, so that the first advantages
are the plain returns. The head of a reward model is kept, because its outputs already have the
scale of rewards. Not supported: a backbone shared with the policy. It would need weights for the
two losses (vf_coef).
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import Config
from common.errors import UserError
from model import vision
from model.layout import backbone, choose_layout, hidden_at_sources
from model.logprobs import load_model
from model.packing import PackedRow, SequenceGroup
from model.sequence_parallel import gather
from model.transformers_internals import value_class
from trainer.algorithm.losses import value_errors
from trainer.algorithm.sums import VALUE_SUMS
from trainer.data.tensors import ValueBatch
from trainer.engine.deepspeed_config import critic_optimizer
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import Exported, parameters, under_checkpoint_names


class ValueHead(torch.nn.Linear):
    """A linear head that computes in float32 even if its weights are bfloat16.

    Near 10, numbers of bfloat16 are 1/16 apart, and two values may differ by less.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)


class ValueModel(torch.nn.Module):
    """The module that DeepSpeed wraps. It maps a PackedRow to a value for each target, [N] float32.

    model: a transformers model with a value head `score`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, row: PackedRow) -> Tensor:
        hidden = hidden_at_sources(backbone(self.model), row)
        values = self.model.score(hidden)[:, 0]
        return gather(values, row.shard)


class Critic(DeepSpeedModel):
    """The critic as a model in DeepSpeed, with its forward and backward."""

    _sums = VALUE_SUMS

    def __init__(
        self, config: Config, world_size: int, sequence_group: SequenceGroup | None = None
    ):
        super().__init__(config, world_size, critic_optimizer(config), sequence_group)

    def _load(self) -> ValueModel:
        model = load_value_model(self.config)
        path, revision = self.config.model_source(self.config.critic)
        self.layout = vision.layout_of(model.config, path, revision)
        return ValueModel(model)

    def _arrange(self) -> None:
        choose_layout(self.model, self.config.trainer.packing, self.layout, self._largest)

    def _exported(self) -> list[Exported]:
        return under_checkpoint_names(self.model, parameters(self.model))

    def backward(self, batch: ValueBatch) -> None:
        """Runs forward and backward of one micro-batch, and adds its terms to the metric sums."""
        values = self.ds(self.row_on_device(batch.row))
        old_values = self._to_device(batch.old_values)
        returns = self._to_device(batch.returns)
        weights = self._to_device(batch.weights)
        cliprange = self.config.critic.cliprange_value
        errors, is_clipped = value_errors(values, old_values, returns, cliprange)
        loss_sum = (weights * errors).sum()
        self.accumulate(loss_sum)
        # `Sums` calls this function once per step on the CPU, so backward does not wait for a GPU.
        sums_of = functools.partial(_sums_of, batch.weights > 0)
        self.sums.add({"loss": loss_sum, "clipped": is_clipped}, sums_of)


def _sums_of(is_trained: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns VALUE_SUMS of a micro-batch of M tokens.

    is_trained: which tokens count, [M]; a filler's token does not. terms: the micro-batch's `loss`,
    a scalar, and whether each error is `clipped`, [M]. All are on the CPU.
    """
    return {
        "tokens": is_trained.sum(),
        "loss": terms["loss"],
        "clipped": terms["clipped"][is_trained].sum(),
    }


def load_value_model(config: Config) -> Any:
    """Loads the critic as a transformers model: a backbone `base_model` and a value head `score`.

    A head that the checkpoint does not contain starts at zero.
    Raises UserError if the model cannot be loaded, if its head is not a linear layer with one
    output, or if the checkpoint lacks weights other than those of the head.
    """
    path, revision = config.model_source(config.critic)
    trusts_code = config.model.trust_remote_code
    try:
        model, missing = load_model(
            value_class, path, config.model.dtype, revision, trusts_code, num_labels=1
        )
    except RuntimeError as error:  # its text lists every weight whose shape does not fit
        reason = str(error)[:500]
        raise UserError(
            f"critic {path!r} does not fit a value head with one output: {reason}"
        ) from None
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise UserError(
            f"critic {path!r} is a {type(model).__name__}, which has no linear head `score` with "
            "one output; set critic.path to a different model"
        )
    missing_in_backbone = [name for name in missing if not name.startswith("score.")]
    if missing_in_backbone:
        raise UserError(
            f"critic {path!r} lacks {len(missing_in_backbone)} weights, "
            f"the first is {missing_in_backbone[0]}; download the model again"
        )

    # on the meta device the new head allocates no weights, because it takes the loaded weights
    model.score = ValueHead(head.in_features, 1, bias=head.bias is not None, device="meta")
    model.score.weight = head.weight
    model.score.bias = head.bias
    if missing:  # only weights of the head
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
    return model
