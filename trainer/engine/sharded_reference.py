"""The trainer's reference where ranks hold shards of models: a frozen model or the policy's base.

A forward gathers weights from all ranks, so all ranks score at once. A rank without work scores a
filler row.
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
from trainer.engine.ranks import Collectives


class ShardedReference:
    """A reference with the methods of model.reference.Reference, each of which every rank calls."""

    def __init__(self, config: Config, collectives: Collectives, policy: PolicyEngine):
        """Loads the reference, or takes the policy's frozen weights as the reference.

        The config's reference_is_base decides which.
        """
        self._config = config
        self._collectives = collectives
        self._is_base = config.reference_is_base
        if self._is_base:
            self._engine = policy
        else:
            path, revision = config.model_source(config.reference)
            self._engine = self._load(path, revision)

    def _load(self, path: str, revision: str | None) -> PolicyEngine:
        """Returns a started engine of a frozen model in ZeRO 3."""
        config = self._config
        frozen = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": path, "revision": revision}),
                "algorithm": config.algorithm.model_copy(update={"router_replay": False}),
                "lora": type(config.lora)(),
                "deepspeed": {"zero_optimization": {"stage": 3}},
            }
        )
        collectives = self._collectives
        engine = PolicyEngine(
            frozen, collectives.world_size, collectives.sequence_group, is_trained=False
        )
        return engine.start()

    def replace(self, folder: str) -> None:
        """Replaces the reference by the model in this folder."""
        destroy(self._engine.ds)  # before the new one is loaded, because there is no room for two
        del self._engine
        gc.collect()  # an engine and its hooks refer to each other, so only this frees them
        self._engine = self._load(folder, None)

    @property
    def model(self) -> Any:
        return self._engine.model

    def score(self, row: PackedRow) -> Tensor:
        """Returns log π_ref of the row's targets: [N] float32, on the CPU."""
        row = replace(row, routing=None)  # the reference's own router chooses its experts
        adapters_context: Any = contextlib.nullcontext()
        if self._is_base:
            adapters_context = without_adapters(self.model)
        with adapters_context:
            return self._engine.score(row, self._config.sampler.temperature)
