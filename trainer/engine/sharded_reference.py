"""The reference model in the trainer, if each rank holds only a shard of every model.

The reference is a frozen model in ZeRO 3, or the base weights of a policy with adapters. A forward
gathers weights from all ranks, so all ranks must score at once. A rank that has nothing to score
takes a filler row of one token.
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
    """A reference model that is sharded over the ranks.

    It has those methods of model.reference.Reference that the trainer calls.
    Every rank must call each of its methods.
    """

    def __init__(self, config: Config, collectives: Collectives, policy: PolicyEngine):
        """Loads the reference model, or uses the policy without its adapters as the reference.

        The policy is used if config.reference_is_base is true.
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
        """Loads a frozen model in ZeRO 3 from a folder or the hub.

        It takes the policy's config, without router replay, adapters and the user's DeepSpeed
        settings.
        """
        config = self._config
        no_adapters = type(config.lora)()
        frozen = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": path, "revision": revision}),
                "algorithm": config.algorithm.model_copy(update={"router_replay": False}),
                "lora": no_adapters,
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
        # memory has no room for two models, so the old one is freed before the new one is loaded
        destroy(self._engine.ds)
        del self._engine
        gc.collect()  # the engine and its hooks refer to each other
        self._engine = self._load(folder, None)

    @property
    def model(self) -> Any:
        """Returns the reference's transformers model.

        If the reference is the policy without its adapters, it is the policy's own model.
        """
        return self._engine.model

    def score(self, row: PackedRow) -> Tensor:
        """Returns the reference's log-probs of the row's targets, [N] float32, on the CPU."""
        row = replace(row, routing=None)  # the reference's own router chooses its experts
        adapters_context: Any = contextlib.nullcontext()
        if self._is_base:
            adapters_context = without_adapters(self.model)
        with adapters_context:
            return self._engine.score(row, self._config.sampler.temperature)
