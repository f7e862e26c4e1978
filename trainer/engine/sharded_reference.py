"""The trainer's reference where ranks hold parts of models: a frozen model of its own, or the policy's base.

A forward gathers weights from all ranks, so all ranks score at once; a rank without work scores a row of no use.
"""

import contextlib
import gc
from dataclasses import replace
from typing import Any

from torch import Tensor

from common.config import Config
from model.packing import PackedRow
from model.transformers_internals import without_adapters
from trainer.engine.deepspeed_insides import destroy
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange


class ShardedReference:
    """A reference with the methods of model.reference.Reference, each of which every rank calls."""

    def __init__(self, config: Config, exchange: Exchange, policy: PolicyEngine):
        """Loads the reference, or takes the policy's frozen weights as the reference (config.reference_is_base)."""
        self._config, self._exchange, self._is_base = config, exchange, config.reference_is_base
        self._engine = policy if self._is_base else self._loaded(*config.model_source(config.reference))

    def _loaded(self, path: str, revision: str | None) -> PolicyEngine:
        config = self._config
        frozen = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": path, "revision": revision}),
                "algorithm": config.algorithm.model_copy(update={"router_replay": False}),
                "lora": type(config.lora)(),
                "deepspeed": {"zero_optimization": {"stage": 3}},
            }
        )
        return PolicyEngine(frozen, self._exchange.world_size, self._exchange.sequence_group, is_trained=False).start()

    def replace(self, folder: str) -> None:
        """Replaces the reference by the model in this folder."""
        destroy(self._engine.ds)  # first: there is no room for two
        del self._engine
        gc.collect()  # an engine and its hooks refer to each other, so only the collector frees them
        self._engine = self._loaded(folder, None)

    @property
    def model(self) -> Any:
        return self._engine.model

    def score(self, row: PackedRow) -> Tensor:
        """Returns log π_ref of the row's targets: [N] float32, on the CPU."""
        with without_adapters(self.model) if self._is_base else contextlib.nullcontext():
            # the reference's own router chooses its experts
            return self._engine.score(replace(row, routing=None), self._config.sampler.temperature)
