"""Extends vLLM's worker: loads a checked version, and proves that the model holds it.

vLLM loads it by name through `worker_extension_cls`, and mixes it into its worker class.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from common.files.weights import TensorInfo
from common.processes.exits import die_with_parent
from common.processes.watchdog import report_progress
from model import cpu, devices
from model.checksum import unlike
from model.cpu.repeated_rows import RepeatedRows, takes_rows
from sampler.engine import vllm_insides
from sampler.engine.adapter_tensors import prove_adapters
from sampler.engine.engine_layout import Layout
from sampler.engine.engine_tensors import Proof, prove, spoil
from sampler.engine.routing import Routing
from sampler.engine.verify import mapped_tensors
from sampler.engine.vllm_insides import step_context


class WeightExtension:
    model_runner: Any  # vLLM's worker provides these
    reload_weights: Any
    rank: int
    repeated_rows: RepeatedRows | None = None
    routing: Routing
    layout: Layout | None = (
        None  # layout of the published tensors in this model, since the first load
    )

    def prepare(self, on_cpu: bool, records_routing: bool) -> None:
        """Prepares the worker for the run, once the model is loaded.

        A worker that is a process of its own ends when its parent ends. When its engine is killed, vLLM's worker ends
        by itself unless it is stopped, or waits for ever while it notifies its own reader (SpinCondition.cancel): then
        it would keep its GPU. On a CPU each layer reports progress: a forward pass may exceed the allowed silence.
        """
        model = self.model_runner.model
        if self.model_runner.vllm_config.parallel_config.world_size > 1:
            die_with_parent()
        else:
            vllm_insides.spare_other_models(model)
        if on_cpu:
            for layer in vllm_insides.layers_of(model):
                layer.register_forward_pre_hook(lambda *_: report_progress("generating"))
        if on_cpu and cpu.is_on():
            self._compute_rows_once()
        if records_routing:
            whole = self.repeated_rows.whole if self.repeated_rows else lambda rows: rows
            self.routing = Routing(self.model_runner, step_context, whole)

    def _compute_rows_once(self) -> None:
        """Makes a model on a CPU compute equal rows once (repeated_rows.py): rows cost time, comparing does not."""
        settings = self.model_runner.vllm_config
        decoder = getattr(vllm_insides.language_model(self.model_runner.model), "model", None)
        if settings.lora_config is not None or settings.parallel_config.pipeline_parallel_size > 1:
            return
        if takes_rows(decoder) and (attentions := vllm_insides.attentions_of(self)):
            block_size = settings.cache_config.block_size
            self.repeated_rows = RepeatedRows(
                decoder, attentions, lambda: step_context().attn_metadata, block_size
            )

    def routing_of(self, request_ids: Sequence[str]) -> list[NDArray[Any]]:
        return [self.routing.of_request(request_id) for request_id in request_ids]

    def load_weights_from(
        self,
        folder: str,
        expected: Mapping[str, TensorInfo] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Proof:
        """Replaces all parameters by the safetensors files in `folder`, as WeightLoader.load says."""
        weights = tensors or mapped_tensors(sorted(Path(folder).glob("*.safetensors")))
        self.layout = self.layout or Layout()
        self._load(weights, self.layout)
        if not expected:
            return Proof()
        proof = prove(self.model_runner.model, expected, self.layout, weights)
        if (
            self.layout.loads == 1 and self.layout.computed
        ):  # loads once more to see whether a load reaches them
            self._load(weights, self.layout)
            proof = prove(self.model_runner.model, expected, self.layout, weights)
        if (
            tensors is None
        ):  # each of the workers, which map the same files, reads its share of them once more
            own = islice(
                expected.items(),
                self.rank,
                None,
                self.model_runner.vllm_config.parallel_config.world_size,
            )
            read = ((name, weights[name], info.checksum) for name, info in own)
            other = sorted(unlike(read, devices.in_use()))
            proof.wrong += [
                f"{folder} holds another {name} than the published one" for name in other
            ]
        return proof

    def _load(self, weights: Mapping[str, Tensor], layout: Layout) -> None:
        model = self.model_runner.model
        spoil(model, layout)
        vllm_insides.forget_packed_experts(model)
        self.reload_weights(weights_iterator=vllm_insides.by_expert(model, weights))
        vllm_insides.copy_sinks(model, weights)
        vllm_insides.tie_again(model)

    def compare_adapter(self, adapter: Mapping[str, TensorInfo] | None) -> Proof:
        return prove_adapters(self.model_runner.model, adapter) if adapter else Proof()
