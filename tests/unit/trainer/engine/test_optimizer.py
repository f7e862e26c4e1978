"""AdamW and its learning rate: what the settings ask for, and what a resumed run takes from where."""

import copy
from typing import Any, get_args

import pytest
import torch

from common.config.training import LrSchedule
from common.errors import UserError
from tests.support.configs import config_of
from trainer.engine.deepspeed_config import policy_optimizer
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
    assert (type(optimizer), group["fused"]) == (torch.optim.AdamW, True)  # one pass over the memory
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    train(model, optimizer, schedule, 10)


def test_the_kwargs_reach_the_schedule() -> None:
    """cos(π) = −1 at the end, so what is left is the least rate: 0.1 · 0.25."""
    kwargs = {"min_lr_rate": 0.25}
    model, optimizer, schedule = made(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=kwargs)
    train(model, optimizer, schedule, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("warmup_stable_decay", {}, "num_decay_steps"),
        ("cosine_with_min_lr", {}, "min_lr or min_lr_rate"),
        ("linear", {"least": 1}, "least"),
    ],
)
def test_kwargs_that_the_schedule_does_not_take_are_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"trainer.lr_scheduler_type {name}: .*{message}.*; see trainer.lr_scheduler_"):
        made(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)


def test_a_resumed_optimizer_has_its_own_settings_and_the_moments_and_steps_of_the_one_before() -> None:
    """Compared with the optimizer of before, whose settings are changed by hand."""
    model, optimizer, schedule = made(lr_scheduler_type="linear")
    train(model, optimizer, schedule, 4)
    states = [copy.deepcopy(state) for state in (model.state_dict(), optimizer.state_dict(), schedule.state_dict())]

    resumed = made(lr_scheduler_type="linear", learning_rate=0.02, weight_decay=0.3)
    with keeping_settings(resumed[1], resumed[2]):
        for of, state in zip(resumed, states, strict=True):
            of.load_state_dict(state)
    rate = 0.02 * 6 / 10  # linear: four of ten steps are made
    assert [group["lr"] for group in resumed[1].param_groups] == pytest.approx([rate, rate])

    schedule.base_lrs = [0.02, 0.02]
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):  # matrices, and vectors
        group |= {"lr": rate, "weight_decay": decay}
    for of in ((model, optimizer, schedule), resumed):
        train(*of, steps=3)
    torch.testing.assert_close(resumed[0].state_dict(), model.state_dict(), rtol=0, atol=0)


# ---- master weights between the numbers of bfloat16: the same model, and small steps that show in the mean


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.05, 1.0, 300.0])
def test_the_model_at_the_start_is_the_same_to_the_bit(scale: float) -> None:
    weights = (torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    found = dither_master_weights(weights, 0)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), weights)
    assert (found != weights.float()).float().mean() > 0.98  # all but powers of two, half of which keep theirs


@pytest.mark.parametrize(
    ("weight", "below", "above"),
    # between 0.5 and 1 numbers are 2⁻⁸ apart, so half of that on both sides; below 0.5 they are 2⁻⁹ apart
    [(0.75, 0.75 - 2**-9, 0.75 + 2**-9), (-3.0, -3 - 2**-7, -3 + 2**-7), (0.5, 0.5 - 2**-10, 0.5 + 2**-9)],
)
def test_masters_fill_what_is_rounded_to_their_weight(weight: float, below: float, above: float) -> None:
    found = dither_master_weights(torch.full((20_000,), weight, dtype=torch.bfloat16), 0)
    width = above - below
    assert below <= found.min() < below + 0.01 * width
    assert above - 0.01 * width < found.max() <= above
    if weight != 0.5:
        assert found.mean().item() == pytest.approx(weight, abs=0.01 * width)


def test_zero_stays_zero_and_a_seed_gives_the_same_masters() -> None:
    assert dither_master_weights(torch.zeros(10, dtype=torch.bfloat16), 0).tolist() == [0.0] * 10
    weights = torch.randn(50).bfloat16()
    assert torch.equal(dither_master_weights(weights, 0), dither_master_weights(weights, 0))
    assert not torch.equal(dither_master_weights(weights, 0), dither_master_weights(weights, 1))


@pytest.mark.parametrize("step", [2e-5, -2e-5, 2e-4])
def test_a_step_far_below_the_spacing_moves_the_model_by_itself_in_the_mean(step: float) -> None:
    weights = (torch.rand(400_000, generator=torch.Generator().manual_seed(2)) * 0.06 + 0.065).bfloat16()
    plain = (weights.float() + step).bfloat16().float() - weights.float()
    moved = (dither_master_weights(weights, 0) + step).bfloat16().float() - weights.float()
    assert moved.mean().item() == pytest.approx(step, rel=0.05)
    if abs(step) < 2**-12:  # half of the 2⁻¹¹ between two numbers
        assert plain.abs().max().item() == 0, "a model whose masters are numbers of bfloat16 stands still"
