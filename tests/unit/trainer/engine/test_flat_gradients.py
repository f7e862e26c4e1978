"""Gradients in buckets and one norm for all parameters, beside the same arithmetic parameter by parameter."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.engine import flat_gradients
from trainer.engine.flat_gradients import FlatGradientOptimizer

SHAPES = [[(3, 4), (5,), (2, 2)], [(7,), (1, 3)]]  # of two groups
CLIP, RATE = 0.5, 0.1
# steps: the scale of their losses, and for each of three micro-batches the parameters without a gradient
STEPS = [(1.0, [(), (), ()]), (2**-10, [(1, 4), (1,), (1,)])]


class Optimizer(FlatGradientOptimizer):
    """Has the attributes of DeepSpeed's on one rank, and an SGD of its flat masters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.bf16_groups, self.fp32_groups_flat_partition = [], []
        self.fp32_groups_gradients_flat, self.fp32_groups_gradients = [], []
        for shapes in SHAPES:
            group = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
            masters = torch.cat([p.detach().float().flatten() for p in group])
            flat = torch.full_like(masters, torch.nan)  # never read unset
            self.bf16_groups.append(group)
            self.fp32_groups_flat_partition.append(masters)
            self.fp32_groups_gradients_flat.append(flat)
            self.fp32_groups_gradients.append(list(flat.split([p.numel() for p in group])))
        self.fp32_groups_actual_gradients_flat = self.fp32_groups_gradients_flat
        self.fp32_groups_gradient_flat_partition = self.fp32_groups_gradients_flat
        self.optimizer = torch.optim.SGD(self.fp32_groups_flat_partition, RATE)
        self.clip_grad, self.partition_count, self._grad_acc_hooks = CLIP, [1, 1], list[Any]()
        self._lazy_init_hp_params_optimizer_state = self.update_lp_params = lambda: None
        self.clear_hp_grads()
        self.create_grad_acc_hooks()

    def masters(self) -> Tensor:
        return torch.cat(self.fp32_groups_flat_partition)

    def step_as_engine(self) -> None:
        """Steps as DeepSpeed's engine does, which reduces gradients first."""
        self.get_grads_for_reduction()
        self.step()


@pytest.mark.parametrize("bucket", [1, 10, 1 << 26])
def test_buckets_of_any_size_add_up_clip_and_step_as_single_parameters_do(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_gradients, "GRADIENTS_AT_ONCE", bucket)
    optimizer = Optimizer()
    parameters = list(itertools.chain(*optimizer.bf16_groups))
    for scale, micro_batches in STEPS:
        before = optimizer.masters()
        expected = [torch.zeros(p.shape) for p in parameters]
        for missing in micro_batches:
            loss = torch.zeros(())
            for i, parameter in enumerate(parameters):
                if i not in missing:
                    loss = loss + scale * (parameter.float() ** 2).sum()
                    expected[i] += 2 * scale * parameter.detach()
            loss.backward()
            optimizer.update_hp_grads()
        assert all(p.grad is None for p in parameters)
        optimizer.step_as_engine()
        gradient = torch.cat([g.flatten() for g in expected])
        norm = gradient.norm()
        assert optimizer._global_grad_norm == pytest.approx(float(norm), rel=1e-6)
        clipped = gradient * min(1, CLIP / (norm + 1e-6))
        torch.testing.assert_close(optimizer.masters(), before - RATE * clipped)


def test_a_gradient_that_is_not_finite_changes_nothing_and_leaves_nothing_for_the_next_step() -> None:
    optimizer = Optimizer()
    before = optimizer.masters()
    (optimizer.bf16_groups[0][0].sum() * torch.inf).backward()
    optimizer.update_hp_grads()
    optimizer.step_as_engine()
    assert optimizer.overflow and optimizer._global_grad_norm == torch.inf
    assert torch.equal(optimizer.masters(), before)
    optimizer.step_as_engine()
    assert not optimizer.overflow and optimizer._global_grad_norm == 0
