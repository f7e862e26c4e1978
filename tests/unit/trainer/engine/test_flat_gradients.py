"""Gradients in buckets and one norm for all parameters, beside the same arithmetic parameter by parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.engine import flat_gradients
from trainer.engine.flat_gradients import FlatGradientOptimizer, Slot

SHAPES = [[(3, 4), (5,), (2, 2)], [(7,), (1, 3)]]  # of two groups
CLIP, RATE = 0.5, 0.1


class Optimizer(FlatGradientOptimizer):
    """Has the attributes of DeepSpeed's on one rank, and an SGD of its flat masters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.bf16_groups = [[torch.nn.Parameter(torch.randn(s).bfloat16()) for s in group] for group in SHAPES]
        sizes = [[p.numel() for p in group] for group in self.bf16_groups]
        self.fp32_groups_gradients_flat = [torch.full((sum(n),), torch.nan) for n in sizes]  # never read unset
        self.fp32_groups_actual_gradients_flat = self.fp32_groups_gradient_flat_partition = (
            self.fp32_groups_gradients_flat
        )
        self.fp32_groups_gradients = [
            [part for part in flat.split(n)] for flat, n in zip(self.fp32_groups_gradients_flat, sizes, strict=True)
        ]
        self.fp32_groups_flat_partition = [
            torch.cat([p.detach().float().flatten() for p in group]).requires_grad_() for group in self.bf16_groups
        ]
        self.optimizer = torch.optim.SGD(self.fp32_groups_flat_partition, RATE)
        self.clip_grad, self.partition_count, self._grad_acc_hooks = CLIP, [1, 1], list[Any]()
        self._lazy_init_hp_params_optimizer_state = self.update_lp_params = lambda: None
        self.clear_hp_grads()
        self.create_grad_acc_hooks()


def losses(optimizer: Optimizer, step: int) -> list[Tensor]:
    """Returns the losses of three micro-batches. None of the second step depends on the second parameter."""
    parameters = [p for group in optimizer.bf16_groups for p in group]
    seen = [p for i, p in enumerate(parameters) if (step, i) != (1, 1)]
    return [sum((k + 1) * (p.float() ** 2).sum() for p in seen) for k in range(3)]  # type: ignore[misc]


def step_as_engine(optimizer: Optimizer) -> None:
    """Steps as DeepSpeed's engine does, which reduces gradients first."""
    optimizer.get_grads_for_reduction()
    optimizer.step()


@pytest.mark.parametrize("bucket", [1, 10, 1 << 26])
def test_buckets_of_any_size_add_up_clip_and_step_as_single_parameters_do(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_gradients, "GRADIENTS_AT_ONCE", bucket)
    optimizer = Optimizer()
    for step in range(2):
        before = [flat.detach().clone() for flat in optimizer.fp32_groups_flat_partition]
        expected = [[torch.zeros(p.numel()) for p in group] for group in optimizer.bf16_groups]
        for loss in losses(optimizer, step):
            found = torch.autograd.grad(
                loss, [p for group in optimizer.bf16_groups for p in group], retain_graph=True, allow_unused=True
            )
            gradients = iter(found)
            for total in (total for group in expected for total in group):
                if (gradient := next(gradients)) is not None:
                    total += gradient.float().flatten()
            loss.backward()
            optimizer.update_hp_grads()
        assert all(p.grad is None for group in optimizer.bf16_groups for p in group)
        step_as_engine(optimizer)
        flat = [torch.cat(group) for group in expected]
        norm = torch.cat(flat).norm()
        assert optimizer._global_grad_norm == pytest.approx(float(norm), rel=1e-6)
        for start, gradient, weights in zip(before, flat, optimizer.fp32_groups_flat_partition, strict=True):
            torch.testing.assert_close(weights.detach(), start - RATE * CLIP / (norm + 1e-6) * gradient)


def test_a_gradient_that_is_not_finite_changes_nothing_and_leaves_nothing_for_the_next_step() -> None:
    optimizer = Optimizer()
    before = [flat.detach().clone() for flat in optimizer.fp32_groups_flat_partition]
    (losses(optimizer, 0)[0] * torch.inf).backward()
    optimizer.update_hp_grads()
    step_as_engine(optimizer)
    assert optimizer.overflow and optimizer._global_grad_norm == torch.inf
    assert all(map(torch.equal, before, optimizer.fp32_groups_flat_partition))
    step_as_engine(optimizer)
    assert not optimizer.overflow and optimizer._global_grad_norm == 0


def test_a_run_of_a_bucket_lies_in_one_piece_of_a_flat_buffer_and_is_all_new_or_all_old() -> None:
    slots = [Slot(0, 1), Slot(0, 2), Slot(0, 4), Slot(1, 0), Slot(1, 1)]
    has_gradients = [[False] * 5, [False, True]]
    expected = [[(0, 1), (0, 2)], [(0, 4)], [(1, 0)], [(1, 1)]]
    assert flat_gradients._runs(slots, has_gradients) == expected
