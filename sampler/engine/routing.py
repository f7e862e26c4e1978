"""Records which experts each token was routed to in vLLM's engine: algorithm.router_replay.

    router of each mixture ─► step [tokens, layers, k] ─► behind each forward: kept [cache slots, layers, k]
    finished request ─► its cache blocks ─► CompletionOutput.routed_experts [P + C − 1, layers, k]

vLLM's own recording (enable_return_routed_experts) needs its second model runner, which no CPU has. This module stores
the routing of a token under the number of the cache slot of its keys and values: prompts that share a prefix in the
prefix cache share its routing too, a preempted sequence writes both again, and no step waits for a GPU. vLLM assigns
the routing to its completion. The last token of a completion is never run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import UserError
from sampler.engine.vllm_insides import capture_experts, lasting_cache


class Routing:
    """The recorder of routing in vLLM's worker."""

    def __init__(self, runner: Any, context: Callable[[], Any], whole: Callable[[Tensor], Tensor]):
        """Wraps the runner's forward. context: vLLM's get_forward_context. whole: expands computed rows to all rows.

        runner: vLLM's GPUModelRunner. Raises UserError for a model whose experts vLLM chooses inside a kernel.
        """
        try:
            self._group, self._layer, self._block_size = lasting_cache(runner)
            mixtures = capture_experts(runner.model, self._capture)
        except ValueError as error:
            raise UserError(
                f"algorithm.router_replay: vLLM: {error} Set algorithm.router_replay=false"
            ) from None
        self._runner, self._context, self._whole = runner, context, whole
        self._places = {
            layer_id: i for i, layer_id in enumerate(sorted({m.layer_id for m in mixtures}))
        }
        of_token = len(self._places), mixtures[0].moe_config.experts_per_token
        dtype = torch.uint8 if mixtures[0].moe_config.num_logical_experts <= 256 else torch.int16
        slots = runner.kv_cache_config.num_blocks * self._block_size
        # padding has slot −1, the last one, which belongs to no token
        self._kept = torch.zeros((slots + 1, *of_token), dtype=dtype, device=runner.device)
        self._step = torch.zeros(
            (runner.max_num_tokens, *of_token), dtype=dtype, device=runner.device
        )
        self._forward = runner._model_forward
        runner._model_forward = self._model_forward

    def _capture(self, layer_id: int, experts: Tensor) -> None:
        rows = self._whole(experts)
        self._step[: len(rows), self._places[layer_id]] = rows.to(self._step.dtype)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        slots = self._context().slot_mapping[self._layer]
        self._kept[slots] = self._step[: len(slots)]
        return output

    def of_request(self, request_id: str) -> NDArray[Any]:
        """Returns the routing of a request that has just finished, [tokens up to a whole block, layers, k]."""
        blocks = self._runner.requests[request_id].block_ids[self._group]
        starts = torch.tensor(blocks, device=self._kept.device)[:, None] * self._block_size
        found = (
            self._kept[(starts + torch.arange(self._block_size, device=starts.device)).flatten()]
            .cpu()
            .numpy()
        )
        return found.view(np.uint16) if found.dtype == np.int16 else found


def deliver(core: Any, of_requests: Callable[[Sequence[str]], Sequence[NDArray[Any]]]) -> None:
    """Adds the routing to all requests that vLLM's engine core finishes, as enable_return_routed_experts does.

    core: the engine's core, in this process. of_requests: `Routing.of_request` of each, in the worker.
    """
    get_output = core.get_output

    def with_routing() -> Any:
        outputs = get_output()
        finished = [output for output in outputs.outputs if output.finished]
        found = of_requests([output.request_id for output in finished]) if finished else ()
        for output, experts in zip(finished, found, strict=True):
            output.routed_experts = experts
        return outputs

    core.get_output = with_routing
