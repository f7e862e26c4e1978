"""Loads the weights of a version, or its adapter, into a vLLM engine, and compares the engine's tensors with them."""

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
    """Loads weights into `llm`, a vllm.LLM whose engine is in this process. Requests must name `adapter`."""

    def __init__(self, llm: Any, config: Config, in_flight: InFlight | None):
        self._llm, self._in_flight = llm, in_flight
        self._engine = llm.llm_engine
        self._sees = has_tower(config)
        self._applies_adapters = config.lora.publishes_adapters
        self._num_adapters = 0  # loaded so far
        self.adapter: Any = None  # adapter of the present version, on top of the base weights

    def load(
        self,
        folder: Path,
        expected: Mapping[str, TensorInfo] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        version: int = 0,
    ) -> Proof:
        """Replaces the weights, or the adapter where the run publishes adapters, by those of a verified folder.

        It compares them with `expected`, if given: an exception, or anything wrong in the proof, leaves the engine
        unusable. tensors: the folder's, if they are in memory; workers that are processes of their own read the folder.
        version: label of later tokens, with sampler.in_flight_updates; then sequences may be decoding.
        """
        is_idle = not self._engine.has_unfinished_requests()
        assert self._in_flight or is_idle, (
            "a group is sampled by one policy version: reload only between groups"
        )
        if self._applies_adapters:
            self._load_adapter(folder)
            proofs = self._llm.collective_rpc("compare_adapter", args=(expected,))
        else:
            given = None if self._engine.vllm_config.parallel_config.world_size > 1 else tensors
            proofs = self._llm.collective_rpc(
                "load_weights_from", args=(str(folder), expected, given)
            )
        if not self._llm.reset_prefix_cache(reset_running_requests=self._in_flight is not None):
            raise RuntimeError(
                "vLLM did not reset its prefix cache: keys and values of the old weights are in it"
            )
        if self._in_flight:
            self._in_flight.begin(version)
        if self._sees:
            self._engine.reset_encoder_cache()  # the cache has image features of the old vision model
        return of_ranks(proofs)

    def _load_adapter(self, folder: Path) -> None:
        """Loads an adapter under a new number and name, because vLLM identifies weights and cached prefixes by them."""
        from vllm.lora.request import LoRARequest

        if self.adapter is not None:
            self._engine.remove_lora(self.adapter.lora_int_id)
        self._num_adapters += 1
        self.adapter = LoRARequest(f"adapter-{self._num_adapters}", self._num_adapters, str(folder))
        self._engine.add_lora(self.adapter)
        if (loaded := self._engine.list_loras()) != {self._num_adapters}:
            raise RuntimeError(
                f"vLLM holds the adapters {loaded} instead of {self._num_adapters} alone"
            )
