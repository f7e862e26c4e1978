"""The critic: a value for every completion token, by a transformers backbone with a linear head.

The value of token t is read from the hidden state that also predicts t. The head of a causal
language model starts at zero, so that the first advantages are the plain returns. The head of a
reward model is kept, because it already knows the scale of its scores. Not supported: a backbone
shared with the policy, which would need weights for the two losses (vf_coef).
"""

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
    """A linear head that computes in float32, also with bfloat16 weights.

    Two values near 10 may differ by less than bfloat16 can show.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)


class ValueModel(torch.nn.Module):
    """A module: PackedRow -> values [N] float32 at the positions that predict the row's targets."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, row: PackedRow) -> Tensor:
        hidden = hidden_at_sources(backbone(self.model), row)
        values = self.model.score(hidden)[:, 0]
        return gather(values, row.shard)


class Critic(DeepSpeedModel):
    """The critic in DeepSpeed."""

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
        """Runs forward and backward of one micro-batch, and adds its metrics to `sums`."""
        values = self.ds(self.row_on_device(batch.row))
        old_values = self._to_device(batch.old_values)
        returns = self._to_device(batch.returns)
        weights = self._to_device(batch.weights)
        cliprange = self.config.critic.cliprange_value
        errors, is_clipped = value_errors(values, old_values, returns, cliprange)
        loss_sum = (weights * errors).sum()
        self.accumulate(loss_sum)
        is_trained = batch.weights > 0

        def sums_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                "tokens": is_trained.sum(),
                "loss": tensors["loss"],
                "clipped": tensors["clipped"][is_trained].sum(),
            }

        self.sums.add({"loss": loss_sum, "clipped": is_clipped}, sums_of)


def load_value_model(config: Config) -> Any:
    """Loads a transformers model with one label: `base_model` and the linear head `score`.

    Raises UserError if the checkpoint has another number of labels, or lacks weights other than the
    head.
    """
    path, revision = config.model_source(config.critic)
    trusts_code = config.model.trust_remote_code
    try:
        model, missing = load_model(
            value_class, path, config.model.dtype, revision, trusts_code, num_labels=1
        )
    except RuntimeError as error:  # transformers names every weight of another shape
        reason = str(error)[:500]
        raise UserError(
            f"critic {path!r} does not fit a value head with one output: {reason}"
        ) from None
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise UserError(
            f"critic {path!r} is a {type(model).__name__} without a linear head `score`; "
            "choose another"
        )
    missing_in_backbone = [name for name in missing if not name.startswith("score.")]
    if missing_in_backbone:
        raise UserError(
            f"critic {path!r} lacks {len(missing_in_backbone)} weights, "
            f"the first is {missing_in_backbone[0]}; download the model again"
        )
    model.score = ValueHead(head.in_features, 1, bias=head.bias is not None, device="meta")
    model.score.weight = head.weight
    model.score.bias = head.bias
    if missing:
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
    return model
