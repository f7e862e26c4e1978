"""Loads the weights or the adapter of a version into a vLLM engine, and compares them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config import Config
from common.files.weights import TensorInfo
from sampler.engine.engine_arguments import has_tower
from sampler.engine.engine_tensors import Proof, of_ranks
from sampler.engine.in_flight import InFlight


class WeightLoader:
    """Loads weights into a vLLM engine. Requests must name `adapter`."""

    def __init__(self, llm: Any, config: Config, in_flight: InFlight | None):
        """llm: a vllm.LLM whose engine is in this process. in_flight: that of its requests."""
        self._llm = llm
        self._in_flight = in_flight
        self._engine = llm.llm_engine
        self._has_tower = has_tower(config)
        self._applies_adapters = config.lora.publishes_adapters
        self._num_adapters = 0  # loaded so far
        self.adapter: Any = None  # vLLM's LoRARequest of the current version, None without adapters

    def load(
        self,
        folder: Path,
        expected: Mapping[str, TensorInfo] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        version: int = 0,
    ) -> Proof:
        """Replaces the weights by those of a verified folder, and compares them with `expected`.

        Where the run publishes adapters, it is the adapter. An exception, or anything wrong in the
        proof, leaves the engine unusable.

        expected: nothing is compared without it.
        tensors: the folder's, if they are in memory. Workers that are processes of their own read
        the folder.
        version: the label of later tokens with sampler.in_flight_updates. Then sequences may be
        decoding.
        """
        is_idle = not self._engine.has_unfinished_requests()
        assert self._in_flight or is_idle, (
            "a group is sampled by one policy version: reload only between groups"
        )
        if self._applies_adapters:
            self._load_adapter(folder)
            proofs = self._llm.collective_rpc("compare_adapter", args=(expected,))
        else:
            if self._engine.vllm_config.parallel_config.world_size > 1:
                tensors = None  # the workers have another memory
            arguments = (str(folder), expected, tensors)
            proofs = self._llm.collective_rpc("load_weights_from", args=arguments)
        if not self._llm.reset_prefix_cache(reset_running_requests=self._in_flight is not None):
            raise RuntimeError(
                "vLLM did not reset its prefix cache: keys and values of the old weights are in it"
            )
        if self._in_flight:
            self._in_flight.begin(version)
        if self._has_tower:
            self._engine.reset_encoder_cache()  # it has image features of the old vision model
        return of_ranks(proofs)

    def _load_adapter(self, folder: Path) -> None:
        """Loads an adapter under a new number and name.

        vLLM identifies weights and cached prefixes by them.
        """
        from vllm.lora.request import LoRARequest

        if self.adapter is not None:
            self._engine.remove_lora(self.adapter.lora_int_id)
        self._num_adapters += 1
        self.adapter = LoRARequest(f"adapter-{self._num_adapters}", self._num_adapters, str(folder))
        self._engine.add_lora(self.adapter)
        loaded = self._engine.list_loras()
        if loaded != {self._num_adapters}:
            raise RuntimeError(
                f"vLLM holds the adapters {loaded} instead of {self._num_adapters} alone"
            )
