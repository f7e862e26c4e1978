"""Rollout Routing Replay: the sampler's experts in the trainer's forward (R3; Ma et al., arXiv 2510.11370, section 4).

    s = router(x; θ)              scores of all E experts under the trainer's own weights, with gradient
    I = recorded                  the k experts that the sampler sent the token to; without replay the top k of s
    y = Σ_{i ∈ I} g(s, I)_i · expert_i(x)      g: what the model makes of chosen scores, such as a division by their sum

No list of model families is needed: every router calls torch.topk for k of E scores. One forward at load finds these
modules. While one of them runs, topk's result is replaced, also when gradient checkpointing runs it again. Routers with
groups choose these first, by other sizes, and score the chosen experts themselves. Left out: choices without topk,
which are refused.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.errors import UserError
from model.files.dims import experts_of

Whole = Callable[[list[torch.nn.Parameter]], contextlib.AbstractContextManager[None]]
_TOPK = (torch.topk, torch.Tensor.topk)


class _TopK(TorchFunctionMode):
    """A torch function mode that replaces the results of topk, k of E scores, by `answer(scores, result)`."""

    def __init__(self, num_experts: int, per_token: int, answer: Callable[[Tensor, Any], Any]):
        super().__init__()
        self._sizes, self._answer = (num_experts, per_token), answer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in _TOPK or (args[0].shape[-1], found.indices.shape[-1]) != self._sizes:
            return found
        return self._answer(args[0], found)


class RouterReplay:
    """The routing replay of a model: after `use`, its forwards, recomputed ones too, use the sampler's experts."""

    def __init__(self, model: Any, run: Callable[[], Any], whole: Whole = lambda _: contextlib.nullcontext()):
        """Wraps the routers that `run`, any forward, calls. Raises UserError if none exist or they do not use topk.

        whole: makes parameters of which ranks hold parts whole in a context.
        """
        sizes = experts_of(model.config.get_text_config().to_dict())
        kind, remedy = type(model).__name__, "set algorithm.router_replay=false"
        if sizes is None:
            raise UserError(f"algorithm.router_replay: {kind} has no experts that tokens are sent to; {remedy}")
        self._sizes = sizes
        self._recorded: Tensor | None = None
        self._differing = dict[int, Tensor]()  # by layer
        inputs = _routers(model, run, *sizes)
        for i, router in enumerate(inputs):
            router.forward = self._replaying(i, router.forward)
        self.num_layers = len(inputs)
        follows = [self._follows_replay(i, router, given, whole) for i, (router, given) in enumerate(inputs.items())]
        if not 0 < sum(follows) == len(blocks(model)):
            raise UserError(
                f"algorithm.router_replay: {sum(follows)} of the {len(blocks(model))} mixtures of {kind} choose "
                f"experts by torch.topk of {sizes[1]} in {sizes[0]}, where the choice can be replaced; {remedy}"
            )

    def use(self, recorded: Tensor | None) -> None:
        """Sets the next forward's experts, [T, layers, k] of the flattened row; −1 or None = the router's own choice.

        Raises UserError if `recorded` has another number of layers than the model.
        """
        if recorded is not None and recorded.shape[1] != self.num_layers:
            raise UserError(
                f"the sampler's engine sends tokens to experts in {recorded.shape[1]} layers, the trainer's model in "
                f"{self.num_layers}; set algorithm.router_replay=false"
            )
        self._recorded = recorded
        self._differing = {}

    def sums(self) -> dict[str, Tensor]:
        """Counts recorded tokens × layers of the last forward, and those where the own top k was another set."""
        if self._recorded is None:
            return {}
        tokens = (self._recorded[:, 0, 0] >= 0).sum()
        return {"routed": tokens * self.num_layers, "rerouted": sum(self._differing.values(), torch.zeros_like(tokens))}

    def _replaying(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self._recorded is None:
                return forward(*args, **kwargs)
            with _TopK(*self._sizes, lambda scores, own: self._chosen(layer, scores, own)):
                return forward(*args, **kwargs)

        return replayed

    def _chosen(self, layer: int, scores: Tensor, own: Any) -> Any:
        assert self._recorded is not None
        recorded = self._recorded[:, layer].long().reshape(own.indices.shape)
        indices = torch.where(recorded < 0, own.indices, recorded)
        differs = indices.sort(-1).values != own.indices.sort(-1).values
        self._differing[layer] = differs.any(-1).sum()
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    @torch.no_grad()
    def _follows_replay(self, layer: int, router: Any, given: Any, whole: Whole) -> bool:
        """Returns whether the router's output for one input differs between the first and the last k experts."""
        num_experts, per_token = self._sizes
        hidden = given[0][0]
        outputs = []
        for first in (0, num_experts - per_token):
            experts = torch.arange(first, first + per_token, device=hidden.device)
            self._recorded = experts.expand(hidden.shape[:-1].numel(), self.num_layers, per_token)
            with whole(list(router.parameters())):
                output = router.forward(*given[0], **given[1])
            outputs.append([x for x in (output if isinstance(output, tuple) else [output]) if isinstance(x, Tensor)])
        self.use(None)
        return any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules that hold E experts, as tensors [E, …] or as a list of modules; [] without a mixture."""
    sizes = experts_of(model.config.get_text_config().to_dict())  # type: ignore[union-attr, operator]
    found = {m for m in model.modules() if sizes and _holds_experts(m, sizes[0])}
    # a model of as many layers as experts has a list of E layers, each with its own experts inside
    return [m for m in model.modules() if m in found and not any(c in found for c in m.modules() if c is not m)]


def _holds_experts(module: torch.nn.Module, num_experts: int) -> bool:
    shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]  # ZeRO 3 leaves p itself empty
    fused = any(len(shape) == 3 and shape[0] == num_experts for shape in shapes)
    return fused or (isinstance(module, torch.nn.ModuleList) and len(module) == num_experts)


@torch.no_grad()
def _routers(model: torch.nn.Module, run: Callable[[], Any], num_experts: int, per_token: int) -> dict[Any, Any]:
    """Returns {innermost module that calls topk, k of E: (args, kwargs) of its call}, in the order of the layers."""
    entered, found = list[tuple[Any, Any]](), dict[Any, Any]()

    def note_call(scores: Tensor, own: Any) -> Any:
        module, given = entered[-1]
        found[module] = given
        return own

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        entered.append((module, (args, kwargs)))

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda *_: entered.pop() and None))
    try:
        with _TopK(num_experts, per_token, note_call):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found
