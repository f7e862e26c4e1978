"""Extends vLLM's worker: loads a checked version, and proves that the model holds it.

vLLM loads it by name through `worker_extension_cls`, and mixes it into its worker class.
"""

from collections.abc import Mapping, Sequence
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
    """What vLLM's worker can do besides."""

    model_runner: Any  # vLLM's worker provides these
    reload_weights: Any
    rank: int
    repeated_rows: RepeatedRows | None = None
    routing: Routing
    # where this model has the published tensors, since the first load
    layout: Layout | None = None

    def prepare(self, on_cpu: bool, records_routing: bool) -> None:
        """Prepares the worker for the run, once the model is loaded.

        A worker that is a process of its own ends when its parent ends. When its engine is killed,
        vLLM's worker usually ends by itself. But if it is stopped, or waits for ever while it
        notifies its own reader (SpinCondition.cancel), it would keep its GPU. On a CPU each layer
        reports progress, because a forward pass may exceed the allowed silence.
        """
        model = self.model_runner.model
        if self._num_workers > 1:
            die_with_parent()
        else:
            vllm_insides.spare_other_models(model)
        if on_cpu:
            for layer in vllm_insides.layers_of(model):
                layer.register_forward_pre_hook(lambda *_: report_progress("generating"))
        if on_cpu and cpu.is_on():
            self._compute_rows_once()
        if records_routing:
            self.routing = Routing(self.model_runner, self._all_rows)

    @property
    def _num_workers(self) -> int:
        return self.model_runner.vllm_config.parallel_config.world_size

    def _compute_rows_once(self) -> None:
        """Makes a model on a CPU compute equal rows once (repeated_rows.py).

        Rows cost time, comparing them does not.
        """
        settings = self.model_runner.vllm_config
        if settings.lora_config is not None or settings.parallel_config.pipeline_parallel_size > 1:
            return
        decoder = getattr(vllm_insides.language_model(self.model_runner.model), "model", None)
        attentions = vllm_insides.attentions_of(self)
        if not takes_rows(decoder) or not attentions:
            return
        block_size = settings.cache_config.block_size
        self.repeated_rows = RepeatedRows(
            decoder, attentions, lambda: step_context().attn_metadata, block_size
        )

    def _all_rows(self, computed: Tensor) -> Tensor:
        """Returns all rows of a step, from those that were computed."""
        if self.repeated_rows is None:
            return computed
        return self.repeated_rows.whole(computed)

    def routing_of(self, request_ids: Sequence[str]) -> list[NDArray[Any]]:
        """Returns the routing of requests that have just finished."""
        return [self.routing.of_request(request_id) for request_id in request_ids]

    def load_weights_from(
        self,
        folder: str,
        expected: Mapping[str, TensorInfo] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Proof:
        """Replaces all parameters, and compares them with `expected`, as WeightLoader.load says.

        folder: has the safetensors files, which are read if `tensors` is None.
        """
        weights = tensors
        if not weights:
            weights = mapped_tensors(sorted(Path(folder).glob("*.safetensors")))
        self.layout = self.layout or Layout()
        self._load(weights, self.layout)
        if not expected:
            return Proof()
        model = self.model_runner.model
        proof = prove(model, expected, self.layout, weights)
        if self.layout.loads == 1 and self.layout.computed:
            # the second load shows whether a load reaches the computed tensors
            self._load(weights, self.layout)
            proof = prove(model, expected, self.layout, weights)
        if tensors is None:
            # the workers map the same files, and each reads its share of them once more
            share = list(expected)[self.rank :: self._num_workers]
            wanted = [(name, weights[name], expected[name].checksum) for name in share]
            for name in sorted(unlike(wanted, devices.in_use())):
                proof.wrong.append(f"{folder} holds another {name} than the published one")
        return proof

    def _load(self, weights: Mapping[str, Tensor], layout: Layout) -> None:
        """Replaces all parameters, and mends what vLLM's reload leaves wrong.

        They are spoilt first, so that one which the reload does not reach is found by the proof.
        """
        model = self.model_runner.model
        spoil(model, layout)
        vllm_insides.forget_packed_experts(model)
        self.reload_weights(weights_iterator=vllm_insides.by_expert(model, weights))
        vllm_insides.copy_sinks(model, weights)
        vllm_insides.tie_again(model)

    def compare_adapter(self, adapter: Mapping[str, TensorInfo] | None) -> Proof:
        """Compares the adapter that was loaded with the published one, if it is given."""
        if not adapter:
            return Proof()
        return prove_adapters(self.model_runner.model, adapter)
