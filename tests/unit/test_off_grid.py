"""Master weights between the numbers of bfloat16: the same model, and small steps that show in the mean."""

import pytest
import torch

from trainer.engine.off_grid import off_the_grid


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.05, 1.0, 300.0])
def test_the_model_at_the_start_is_the_same_to_the_bit(scale: float) -> None:
    weights = (torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    found = off_the_grid(weights, 0)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), weights)
    assert (found != weights.float()).float().mean() > 0.98  # all but powers of two, half of which keep theirs


@pytest.mark.parametrize(
    ("weight", "below", "above"),
    # between 0.5 and 1 numbers are 2⁻⁸ apart, so half of that on both sides; below 0.5 they are 2⁻⁹ apart
    [(0.75, 0.75 - 2**-9, 0.75 + 2**-9), (-3.0, -3 - 2**-7, -3 + 2**-7), (0.5, 0.5 - 2**-10, 0.5 + 2**-9)],
)
def test_masters_fill_what_is_rounded_to_their_weight(weight: float, below: float, above: float) -> None:
    found = off_the_grid(torch.full((20_000,), weight, dtype=torch.bfloat16), 0)
    width = above - below
    assert below <= found.min() < below + 0.01 * width
    assert above - 0.01 * width < found.max() <= above
    if weight != 0.5:
        assert found.mean().item() == pytest.approx(weight, abs=0.01 * width)


def test_zero_stays_zero_and_a_seed_gives_the_same_masters() -> None:
    assert off_the_grid(torch.zeros(10, dtype=torch.bfloat16), 0).tolist() == [0.0] * 10
    weights = torch.randn(50).bfloat16()
    assert torch.equal(off_the_grid(weights, 0), off_the_grid(weights, 0))
    assert not torch.equal(off_the_grid(weights, 0), off_the_grid(weights, 1))


@pytest.mark.parametrize("step", [2e-5, -2e-5, 2e-4])
def test_a_step_far_below_the_spacing_moves_the_model_by_itself_in_the_mean(step: float) -> None:
    weights = (torch.rand(400_000, generator=torch.Generator().manual_seed(2)) * 0.06 + 0.065).bfloat16()
    plain = (weights.float() + step).bfloat16().float() - weights.float()
    moved = (off_the_grid(weights, 0) + step).bfloat16().float() - weights.float()
    assert moved.mean().item() == pytest.approx(step, rel=0.05)
    if abs(step) < 2**-12:  # half of the 2⁻¹¹ between two numbers
        assert plain.abs().max().item() == 0, "a model whose masters are numbers of bfloat16 stands still"
