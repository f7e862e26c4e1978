"""Accumulation and clipping of bfloat16 gradients in ZeRO 1, for many parameters at once.

DeepSpeed's BF16_Optimizer handles each parameter by itself: a cast and an addition accumulate its
gradient, and a norm and a product clip it. On a GPU these are four kernels for each of some hundred
parameters, and launching them takes longer than the arithmetic. Here gradients wait until a bucket
is full. Then they are joined, and added to DeepSpeed's flat float32 buffer by a single kernel.
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
    """The position of a parameter, and of its gradient, in DeepSpeed's lists."""

    group: int  # index of the parameter group
    parameter: int  # index of the parameter in its group


def add_up_in_buckets() -> None:
    """Makes DeepSpeed accumulate gradients with FlatGradientOptimizer, for ZeRO 1 in bfloat16.

    It replaces BF16_Optimizer with a subclass, for the rest of this process. It must run before
    deepspeed.initialize, which creates the optimizer.
    """
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    if not issubclass(engine.BF16_Optimizer, FlatGradientOptimizer):
        bases = (FlatGradientOptimizer, engine.BF16_Optimizer)
        engine.BF16_Optimizer = type("FlatOptimizer", bases, {})


class FlatGradientOptimizer(_Optimizer):
    """Adds bfloat16 gradients to DeepSpeed's flat float32 buffers, many parameters at once.

    `add_up_in_buckets` combines it with DeepSpeed's BF16_Optimizer, whose methods it overrides.
    """

    # DeepSpeed's attributes: a list with one item for each parameter group
    bf16_groups: list[list[Tensor]]  # the parameters
    fp32_groups_gradients_flat: list[Tensor]  # a flat buffer with the gradients of the whole group
    fp32_groups_gradients: list[list[Tensor]]  # views of this buffer, one for each parameter
    fp32_groups_has_gradients: list[list[bool]]  # whether the buffer has a gradient of this step
    fp32_groups_actual_gradients_flat: list[Tensor]  # the buffer without the padding at its end
    fp32_groups_gradient_flat_partition: list[Tensor]  # this rank's shard of the buffer
    fp32_groups_flat_partition: list[Tensor]  # this rank's shard of the master weights

    def create_grad_acc_hooks(self) -> None:
        """Registers a hook with each parameter, which collects the parameter's gradients.

        DeepSpeed calls this method when it creates the optimizer.
        """
        self._waiting: dict[Slot, Tensor] = {}  # parameters whose gradients wait to be added
        self._num_waiting = 0  # how many numbers these gradients have
        for group_index, group in enumerate(self.bf16_groups):
            for index, parameter in enumerate(group):
                collect = functools.partial(self._collect, Slot(group_index, index))
                handle = parameter.register_post_accumulate_grad_hook(collect)
                self._grad_acc_hooks.append(handle)

    def _collect(self, slot: Slot, parameter: Tensor) -> None:
        """Lets a parameter's gradient wait. Adds all waiting gradients once they fill a bucket."""
        self._waiting[slot] = parameter
        self._num_waiting += parameter.numel()
        if self._num_waiting >= GRADIENTS_AT_ONCE:
            self.update_hp_grads()

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Adds the waiting gradients to the flat buffers, and frees them.

        DeepSpeed calls it after each backward. Gradients are freed whatever clear_lp_grads says.
        """
        waiting = self._waiting
        self._waiting = {}
        self._num_waiting = 0
        for run in _runs(sorted(waiting), self.fp32_groups_has_gradients):
            gradients = [waiting[slot].grad for slot in run]
            self._add_to_buffer(run, [gradient for gradient in gradients if gradient is not None])
        for parameter in waiting.values():
            parameter.grad = None

    def _add_to_buffer(self, run: list[Slot], gradients: list[Tensor]) -> None:
        """Adds the gradients of adjacent parameters to the sums in their group's flat buffer.

        run: the parameters' slots, which `_runs` has found to be adjacent in the buffer.
        gradients: the gradient of each parameter of the run.
        A step's first gradients replace the values that an earlier step has left in the buffer.
        """
        group, first = run[0]
        new = torch.cat([gradient.flatten() for gradient in gradients])
        # each parameter's view begins where its gradient lies in the buffer
        begin = self.fp32_groups_gradients[group][first].storage_offset()
        total = self.fp32_groups_gradients_flat[group].narrow(0, begin, len(new))
        has_gradients = self.fp32_groups_has_gradients[group]
        if has_gradients[first]:  # then all parameters of the run have one
            total.add_(new)
        else:
            total.copy_(new)
        for slot in run:
            has_gradients[slot.parameter] = True

    def clear_hp_grads(self) -> None:
        """Marks all gradients as missing. The flat buffers are overwritten or zeroed later."""
        self._waiting = {}
        self._num_waiting = 0
        self.fp32_groups_has_gradients = [[False] * len(group) for group in self.bf16_groups]

    def get_grads_for_reduction(self) -> Any:
        """Returns the flat buffers that DeepSpeed sums over ranks: of dense layers, and of experts.

        DeepSpeed calls it before each step. Buffers of parameters without a gradient are zeroed.
        """
        self._zero_missing_gradients()
        is_single_rank = max(self.partition_count) == 1
        if is_single_rank:
            return [], {}
        return super().get_grads_for_reduction()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clips the gradients and steps, or skips the step if a gradient is not finite.

        DeepSpeed has summed the gradients over ranks before. The method waits for the device only
        once, to read the norm.
        """
        # A parameter without a gradient on this rank counts, too: its buffer now holds the sum of
        # the gradients from the other ranks.
        parameters = list(itertools.chain.from_iterable(self.bf16_groups))
        gradients = list(itertools.chain.from_iterable(self.fp32_groups_gradients))
        norm = total_norm(parameters, gradients).item()
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            self._clip_and_step(norm)
        self.clear_hp_grads()

    def _clip_and_step(self, norm: float) -> None:
        """Clips the gradients to the norm clip_grad, if it is set, and updates the weights.

        norm: the norm of all gradients.
        """
        if 0 < self.clip_grad < norm:
            factor = self.clip_grad / (norm + 1e-6)
            torch._foreach_mul_(self.fp32_groups_actual_gradients_flat, factor)
        for masters, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            masters.grad = gradient
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()  # links parameters to their moments, once
        self.update_lp_params()  # rounds the masters to the bfloat16 weights of all ranks

    def _zero_missing_gradients(self) -> None:
        """Zeroes the buffers of parameters without a gradient in this step.

        They still hold the gradients of an earlier step.
        """
        for gradients, has_gradients in zip(
            self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True
        ):
            missing = []
            for gradient, has_gradient in zip(gradients, has_gradients, strict=True):
                if not has_gradient:
                    missing.append(gradient)
            if missing:
                torch._foreach_zero_(missing)


def _runs(slots: list[Slot], has_gradients: list[list[bool]]) -> list[list[Slot]]:
    """Splits sorted slots into runs, whose parameters are adjacent in one flat buffer.

    Either all parameters of a run have a gradient in the buffer already, or none of them has.
    has_gradients: whether a parameter has one, by parameter group and parameter.

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
    """Returns whether `slot` directly follows `last`, so that both can be in one range.

    has_gradients: whether each parameter has a gradient, by group and parameter.
    """
    is_adjacent = slot == (last.group, last.parameter + 1)
    if not is_adjacent:
        return False
    flags = has_gradients[slot.group]
    return flags[last.parameter] == flags[slot.parameter]
