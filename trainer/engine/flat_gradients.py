"""Gradients of a bfloat16 model in ZeRO 1, added up and clipped for many parameters at once.

DeepSpeed's BF16_Optimizer adds each gradient up by a cast and an addition, and clips by a norm and a product for each
parameter. On a GPU these are four kernels for each of some hundred parameters, and take longer than the arithmetic.
"""

import functools
import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from trainer.engine.deepspeed_config import GRADIENTS_AT_ONCE
from trainer.engine.deepspeed_insides import total_norm

_Optimizer: Any = object  # stands for DeepSpeed's, which only add_up_in_buckets imports


def add_up_in_buckets() -> None:
    """Makes DeepSpeed create its optimizer of ZeRO 1 in bfloat16 with FlatGradients, from now on."""
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    if not issubclass(engine.BF16_Optimizer, FlatGradients):
        engine.BF16_Optimizer = type("FlatOptimizer", (FlatGradients, engine.BF16_Optimizer), {})


class FlatGradients(_Optimizer):
    """Adds bfloat16 gradients to DeepSpeed's flat float32 buffers once per bucket of parameters.

    The first gradient of a step is copied. `fp32_groups_has_gradients` says which parameters have one.
    """

    bf16_groups: list[list[Tensor]]  # parameters; a group has one flat buffer of each kind
    fp32_groups_gradients: list[list[Tensor]]  # views of the flat buffers, one for each parameter
    fp32_groups_gradients_flat: list[Tensor]
    fp32_groups_actual_gradients_flat: list[Tensor]  # without the padding at their ends
    fp32_groups_gradient_flat_partition: list[Tensor]  # this rank's part
    fp32_groups_flat_partition: list[Tensor]  # masters, this rank's part

    def create_grad_acc_hooks(self) -> None:
        self._waiting: dict[tuple[int, int], Tensor] = {}  # by (group, index in it): parameters with a gradient
        self._num_waiting = 0  # numbers in these gradients
        for i, group in enumerate(self.bf16_groups):
            for j, parameter in enumerate(group):
                collect = functools.partial(self._collect, (i, j))
                self._grad_acc_hooks.append(parameter.register_post_accumulate_grad_hook(collect))

    def _collect(self, place: tuple[int, int], parameter: Tensor) -> None:
        self._waiting[place] = parameter
        self._num_waiting += parameter.numel()
        if self._num_waiting >= GRADIENTS_AT_ONCE:
            self.update_hp_grads()

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Adds the waiting gradients up, and frees them. DeepSpeed calls it after each backward."""
        waiting, self._waiting, self._num_waiting = self._waiting, {}, 0
        for places in _runs(sorted(waiting), self.fp32_groups_has_gradients):
            (i, first), (_, last) = places[0], places[-1]
            gradients = [grad for place in places if (grad := waiting[place].grad) is not None]
            new = torch.cat([gradient.flatten() for gradient in gradients])
            begin = self.fp32_groups_gradients[i][first].storage_offset()
            total = self.fp32_groups_gradients_flat[i].narrow(0, begin, len(new))
            total.add_(new) if self.fp32_groups_has_gradients[i][first] else total.copy_(new)
            self.fp32_groups_has_gradients[i][first : last + 1] = [True] * len(places)
        for parameter in waiting.values():
            parameter.grad = None

    def clear_hp_grads(self) -> None:
        self._waiting, self._num_waiting = {}, 0
        self.fp32_groups_has_gradients = [[False] * len(group) for group in self.bf16_groups]

    def get_grads_for_reduction(self) -> Any:
        """Returns the flat buffers that ranks add up. DeepSpeed calls it before each step, on one rank too."""
        self._clear_unset()
        return ([], {}) if max(self.partition_count) == 1 else super().get_grads_for_reduction()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clips the reduced gradients, and steps. Reads one number from the device: the norm before clipping.

        A buffer that this rank did not set holds what the reduction brought from other ranks.
        """
        gradients = itertools.chain(*self.fp32_groups_gradients)
        norm = total_norm([*itertools.chain(*self.bf16_groups)], [*gradients]).item()
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            if 0 < self.clip_grad < norm:
                torch._foreach_mul_(self.fp32_groups_actual_gradients_flat, self.clip_grad / (norm + 1e-6))
            parts = self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition
            for weights, gradient in zip(*parts, strict=True):
                weights.grad = gradient
            self.optimizer.step()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        self.clear_hp_grads()

    def _clear_unset(self) -> None:
        """Zeroes the buffers of parameters that got no gradient in this step: they hold an earlier step's."""
        for gradients, is_set in zip(self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True):
            if unset := [gradient for gradient, known in zip(gradients, is_set, strict=True) if not known]:
                torch._foreach_zero_(unset)


def _runs(places: list[tuple[int, int]], is_set: list[list[bool]]) -> list[list[tuple[int, int]]]:
    """Splits sorted places where they do not follow each other in a flat buffer, or where is_set changes.

    [(0, 1), (0, 2), (0, 4), (1, 0)] -> [[(0, 1), (0, 2)], [(0, 4)], [(1, 0)]]
    """
    numbered = [(n, place) for n, place in enumerate(places)]
    runs = itertools.groupby(numbered, lambda at: (at[1][0], at[1][1] - at[0], is_set[at[1][0]][at[1][1]]))
    return [[place for _, place in run] for _, run in runs]
