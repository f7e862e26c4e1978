"""Records which experts each token was routed to in vLLM's engine: algorithm.router_replay.

    router of each mixture ─► step [tokens, layers, k] ─► after a forward: kept [slots, layers, k]
    finished request ─► its cache blocks ─► CompletionOutput.routed_experts [P + C − 1, layers, k]

vLLM's own recording (enable_return_routed_experts) needs its second model runner, which no CPU has.
This module stores the routing of a token under the number of the cache slot of its keys and values.
So prompts that share a prefix in the prefix cache share its routing too, a preempted sequence
writes both again, and no step waits for a GPU. vLLM assigns the routing to its completion. The last
token of a completion is never run.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import UserError
from sampler.engine.vllm_insides import capture_experts, lasting_cache, step_context


class Routing:
    """The recorder of routing in vLLM's worker."""

    def __init__(self, runner: Any, whole: Callable[[Tensor], Tensor]):
        """Wraps the runner's forward.

        runner: vLLM's GPUModelRunner. whole: expands the rows that were computed to all rows.
        Raises UserError for a model whose experts vLLM chooses inside a kernel.
        """
        try:
            self._group, self._layer, self._block_size = lasting_cache(runner)
            mixtures = capture_experts(runner.model, self._capture)
        except ValueError as error:
            raise UserError(
                f"algorithm.router_replay: vLLM: {error} Set algorithm.router_replay=false"
            ) from None
        self._runner = runner
        self._whole = whole
        layer_ids = sorted({mixture.layer_id for mixture in mixtures})
        self._index_of_layer = {layer_id: i for i, layer_id in enumerate(layer_ids)}
        experts = mixtures[0].moe_config
        dtype = torch.int16
        if experts.num_logical_experts <= 256:
            dtype = torch.uint8
        shape = (len(layer_ids), experts.experts_per_token)
        num_slots = runner.kv_cache_config.num_blocks * self._block_size
        # padding has slot −1, the last one, which belongs to no token
        self._kept = torch.zeros((num_slots + 1, *shape), dtype=dtype, device=runner.device)
        self._step = torch.zeros((runner.max_num_tokens, *shape), dtype=dtype, device=runner.device)
        self._forward = runner._model_forward
        runner._model_forward = self._model_forward

    def _capture(self, layer_id: int, experts: Tensor) -> None:
        rows = self._whole(experts)
        self._step[: len(rows), self._index_of_layer[layer_id]] = rows.to(self._step.dtype)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        slots = step_context().slot_mapping[self._layer]
        self._kept[slots] = self._step[: len(slots)]
        return output

    def of_request(self, request_id: str) -> NDArray[Any]:
        """Returns the routing of a request that has just finished.

        It is [tokens up to a whole block, layers, k].
        """
        blocks = self._runner.requests[request_id].block_ids[self._group]
        starts = torch.tensor(blocks, device=self._kept.device)[:, None] * self._block_size
        slots = starts + torch.arange(self._block_size, device=starts.device)
        routing = self._kept[slots.flatten()].cpu().numpy()
        if routing.dtype == np.int16:
            return routing.view(np.uint16)
        return routing


def deliver(llm: Any) -> None:
    """Adds the routing to all requests that vLLM's engine finishes.

    enable_return_routed_experts does the same.
    llm: a vllm.LLM whose engine's core is in this process, and its worker has a Routing.
    """
    core = llm.llm_engine.engine_core
    get_output = core.get_output

    def with_routing() -> Any:
        outputs = get_output()
        finished = [output for output in outputs.outputs if output.finished]
        if finished:
            request_ids = [output.request_id for output in finished]
            routings = llm.collective_rpc("routing_of", args=(request_ids,))[0]
            for output, routing in zip(finished, routings, strict=True):
                output.routed_experts = routing
        return outputs

    core.get_output = with_routing
