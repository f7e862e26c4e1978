"""Gradients of a bfloat16 model in ZeRO 1, added up and clipped for many parameters at once.

DeepSpeed's BF16_Optimizer adds each gradient up by a cast and an addition, and clips by a norm and
a product for each parameter. On a GPU these are four kernels for each of some hundred parameters,
and take longer than the arithmetic.
"""

import functools
import importlib
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.engine.deepspeed_config import GRADIENTS_AT_ONCE
from trainer.engine.deepspeed_insides import total_norm

_Optimizer: Any = object  # stands for DeepSpeed's class, which only add_up_in_buckets imports


class Slot(NamedTuple):
    """Where a parameter's gradient lies in the flat buffers."""

    group: int  # index of the parameter group, which has one flat buffer of each kind
    parameter: int  # index of the parameter in its group


def add_up_in_buckets() -> None:
    """Replaces DeepSpeed's BF16_Optimizer by a subclass of it with FlatGradientOptimizer.

    It must run before deepspeed.initialize, which creates this optimizer for ZeRO 1 in bfloat16.
    The class stays replaced in this process.
    """
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    if not issubclass(engine.BF16_Optimizer, FlatGradientOptimizer):
        bases = (FlatGradientOptimizer, engine.BF16_Optimizer)
        engine.BF16_Optimizer = type("FlatOptimizer", bases, {})


class FlatGradientOptimizer(_Optimizer):
    """Adds bfloat16 gradients to DeepSpeed's flat float32 buffers once per bucket of parameters.

    A step's first gradient is copied. `fp32_groups_has_gradients` tells which parameters have
    one in the buffers.
    """

    bf16_groups: list[list[Tensor]]  # parameters; a group has one flat buffer of each kind
    fp32_groups_gradients: list[list[Tensor]]  # views of the flat buffers, one for each parameter
    fp32_groups_gradients_flat: list[Tensor]
    fp32_groups_actual_gradients_flat: list[Tensor]  # without the padding at their ends
    fp32_groups_gradient_flat_partition: list[Tensor]  # this rank's shard
    fp32_groups_flat_partition: list[Tensor]  # masters, this rank's shard

    def create_grad_acc_hooks(self) -> None:
        """Registers a hook with each parameter that collects its gradient. DeepSpeed calls it."""
        self._waiting: dict[Slot, Tensor] = {}  # parameters with a gradient
        self._num_waiting = 0  # numbers in these gradients
        for group_index, group in enumerate(self.bf16_groups):
            for index, parameter in enumerate(group):
                collect = functools.partial(self._collect, Slot(group_index, index))
                handle = parameter.register_post_accumulate_grad_hook(collect)
                self._grad_acc_hooks.append(handle)

    def _collect(self, slot: Slot, parameter: Tensor) -> None:
        self._waiting[slot] = parameter
        self._num_waiting += parameter.numel()
        if self._num_waiting >= GRADIENTS_AT_ONCE:
            self.update_hp_grads()

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Adds the waiting gradients up, and frees them. DeepSpeed calls it after each backward."""
        waiting = self._waiting
        self._waiting = {}
        self._num_waiting = 0
        for run in _runs(sorted(waiting), self.fp32_groups_has_gradients):
            gradients = [waiting[slot].grad for slot in run]
            self._add_to_buffer(run, [gradient for gradient in gradients if gradient is not None])
        for parameter in waiting.values():
            parameter.grad = None

    def _add_to_buffer(self, run: list[Slot], gradients: list[Tensor]) -> None:
        """Adds the gradients of consecutive parameters to the sums in a flat buffer.

        run: slots that follow each other in the buffer, as from `_runs`. gradients: one for each.
        A step's first gradients replace the values that an earlier step has left in the buffer.
        """
        group, first = run[0]
        new = torch.cat([gradient.flatten() for gradient in gradients])
        begin = self.fp32_groups_gradients[group][first].storage_offset()
        total = self.fp32_groups_gradients_flat[group].narrow(0, begin, len(new))
        has_gradients = self.fp32_groups_has_gradients[group]
        if has_gradients[first]:
            total.add_(new)
        else:
            total.copy_(new)
        for slot in run:
            has_gradients[slot.parameter] = True

    def clear_hp_grads(self) -> None:
        """Forgets all gradients. DeepSpeed's buffers are zeroed or overwritten later."""
        self._waiting = {}
        self._num_waiting = 0
        self.fp32_groups_has_gradients = [[False] * len(group) for group in self.bf16_groups]

    def get_grads_for_reduction(self) -> Any:
        """Returns the flat buffers that ranks add up.

        DeepSpeed calls it before each step, also if there is only one rank.
        """
        self._clear_unset()
        if max(self.partition_count) == 1:
            return [], {}
        return super().get_grads_for_reduction()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clips the reduced gradients, and steps, unless one of them is not finite.

        It reads one number from the device, the norm before clipping. Where this rank had no
        gradient, the buffer holds the sum of the other ranks' gradients.
        """
        parameters = [*itertools.chain(*self.bf16_groups)]
        gradients = [*itertools.chain(*self.fp32_groups_gradients)]
        norm = total_norm(parameters, gradients).item()
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            self._clip_and_step(norm)
        self.clear_hp_grads()

    def _clip_and_step(self, norm: float) -> None:
        if 0 < self.clip_grad < norm:
            factor = self.clip_grad / (norm + 1e-6)
            torch._foreach_mul_(self.fp32_groups_actual_gradients_flat, factor)
        for masters, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            masters.grad = gradient
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()

    def _clear_unset(self) -> None:
        """Zeroes the buffers of parameters without a gradient, which hold an earlier step's."""
        for gradients, has_gradients in zip(
            self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True
        ):
            unset = []
            for gradient, has_gradient in zip(gradients, has_gradients, strict=True):
                if not has_gradient:
                    unset.append(gradient)
            if unset:
                torch._foreach_zero_(unset)


def _runs(slots: list[Slot], has_gradients: list[list[bool]]) -> list[list[Slot]]:
    """Splits sorted slots into runs that follow each other in a flat buffer.

    Either all slots of a run have a gradient in the buffer, or none has.

    [(0, 1), (0, 2), (0, 4), (1, 0)] -> [[(0, 1), (0, 2)], [(0, 4)], [(1, 0)]]
    """
    runs: list[list[Slot]] = []
    for slot in slots:
        if runs and _continues(runs[-1][-1], slot, has_gradients):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _continues(last: Slot, slot: Slot, has_gradients: list[list[bool]]) -> bool:
    """Returns whether a slot can be added to a run that ends with the slot `last`."""
    if slot != (last.group, last.parameter + 1):
        return False
    flags = has_gradients[slot.group]
    return flags[last.parameter] == flags[slot.parameter]
