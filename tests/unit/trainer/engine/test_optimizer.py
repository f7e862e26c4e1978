"""AdamW and its learning rate: what the settings ask for, and what a resumed run takes from where."""

import copy
from typing import Any, get_args

import pytest
import torch

from common.config.training import LrSchedule
from common.errors import UserError
from tests.support.configs import config_of
from trainer.engine.deepspeed_config import optimizer_settings, policy_optimizer
from trainer.engine.master_weights import dither_master_weights
from trainer.engine.optimizer import adamw, keeping_settings, parameter_groups, scheduler

KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


def made(**trainer: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    given = {"max_steps": 10, "warmup_steps": 0, "learning_rate": 0.1} | trainer
    config = config_of({"dtype": "float32"}, trainer=given)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = adamw(policy_optimizer(config))(parameter_groups(model, config.trainer.weight_decay))
    return model, optimizer, scheduler(config, policy_optimizer(config))(optimizer)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1.0, 2.0, step])).square().sum().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", get_args(LrSchedule))
def test_every_schedule_that_is_offered_begins_near_the_peak_and_takes_all_steps(name: str) -> None:
    model, optimizer, schedule = made(lr_scheduler_type=name, lr_scheduler_kwargs=KWARGS.get(name, {}))
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.1, rel=0.03)
    assert group["fused"], "one pass over the memory"
    train(model, optimizer, schedule, 10)


def test_the_critic_learns_from_its_first_step_and_the_policy_after_the_critics_warmup() -> None:
    of_trainer = {"max_steps": 10, "warmup_steps": 2, "learning_rate": 0.1}
    config = config_of(algorithm={"adv_estimator": "gae"}, trainer=of_trainer, critic={"critic_warmup_steps": 4})
    policy, critic = optimizer_settings(config)
    assert (policy.warmup_steps, policy.num_steps) == (2, 6)
    assert (critic.warmup_steps, critic.num_steps) == (0, 10)


def test_the_kwargs_reach_the_schedule() -> None:
    """cos(π) = −1 at the end, so what is left is the least rate: 0.1 · 0.25."""
    kwargs = {"min_lr_rate": 0.25}
    model, optimizer, schedule = made(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=kwargs)
    train(model, optimizer, schedule, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [("cosine_with_min_lr", {}, "min_lr or min_lr_rate"), ("linear", {"least": 1}, "least")],
)
def test_kwargs_that_the_schedule_does_not_take_are_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"trainer.lr_scheduler_type {name}: .*{message}.*; see trainer.lr_scheduler_"):
        made(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)


def test_a_resumed_optimizer_has_its_own_settings_and_the_moments_and_steps_of_the_one_before() -> None:
    """Compared with the optimizer of before, whose settings are changed by hand."""
    before = made(lr_scheduler_type="linear")
    train(*before, steps=4)
    resumed = made(lr_scheduler_type="linear", learning_rate=0.02, weight_decay=0.3)
    with keeping_settings(resumed[1], resumed[2]):
        for new, old in zip(resumed, before, strict=True):
            new.load_state_dict(copy.deepcopy(old.state_dict()))
    rate = 0.02 * 6 / 10  # linear: four of ten steps are made
    assert [group["lr"] for group in resumed[1].param_groups] == pytest.approx([rate, rate])

    model, optimizer, schedule = before
    schedule.base_lrs = [0.02, 0.02]
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):  # matrices, and vectors
        group |= {"lr": rate, "weight_decay": decay}
    train(*before, steps=3)
    train(*resumed, steps=3)
    torch.testing.assert_close(resumed[0].state_dict(), model.state_dict(), rtol=0, atol=0)


# ---- master weights between the numbers of bfloat16: the same model, and small steps that show in the mean


@pytest.mark.parametrize("scale", [1e-30, 1.0, 300.0])
def test_the_model_at_the_start_is_the_same_to_the_bit(scale: float) -> None:
    weights = (torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    weights[0] = 0
    found = dither_master_weights(weights, 0)
    assert found.dtype == torch.float32 and found[0] == 0
    assert torch.equal(found.bfloat16(), weights)
    assert (found != weights.float()).float().mean() > 0.98  # all but powers of two, half of which keep theirs
    assert torch.equal(found, dither_master_weights(weights, 0))
    assert not torch.equal(found, dither_master_weights(weights, 1))


@pytest.mark.parametrize(
    ("weight", "below", "above"),
    # between 0.5 and 1 numbers are 2⁻⁸ apart, so half of that on both sides; below 0.5 they are 2⁻⁹ apart
    [(0.75, 0.75 - 2**-9, 0.75 + 2**-9), (0.5, 0.5 - 2**-10, 0.5 + 2**-9)],
)
def test_masters_fill_what_is_rounded_to_their_weight(weight: float, below: float, above: float) -> None:
    found = dither_master_weights(torch.full((20_000,), weight, dtype=torch.bfloat16), 0)
    assert found.min().item() == pytest.approx(below, abs=2e-5)
    assert found.max().item() == pytest.approx(above, abs=2e-5)


def test_a_step_far_below_the_spacing_moves_the_model_by_itself_in_the_mean() -> None:
    """One of 2e-5, where numbers are 2⁻¹¹ apart: a model whose masters are numbers of bfloat16 stands still."""
    weights = (torch.rand(400_000, generator=torch.Generator().manual_seed(2)) * 0.06 + 0.065).bfloat16()
    assert torch.equal((weights.float() + 2e-5).bfloat16(), weights)
    moved = (dither_master_weights(weights, 0) + 2e-5).bfloat16().float() - weights.float()
    assert moved.mean().item() == pytest.approx(2e-5, rel=0.05)
