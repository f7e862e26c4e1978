"""What the quick start with tools builds. Part of the stamp: a change here rebuilds it. No torch here.

The values were chosen as those of examples/quickstart/settings.py: the model knows how to call and how to copy, and at
temperature 1 calls for less than half of the problems, whether they need it or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.quickstart.settings import QuickStart, WarmStart


@dataclass(frozen=True)
class ToolWarmStart(WarmStart):
    """Lesson one is right in all it shows; lesson two guesses products, and slips in the form of calls."""

    num_clean_steps: int = 440
    num_careless_steps: int = 40
    batch_size: int = 32
    wrong_fraction: float = 0.5  # of the products of lesson two that are guessed
    malformed_fraction: float = 0.1  # of the calls of lesson two
    sums_by_heart: float = 0.7  # the others are computed by a call
    without_tools: float = 0.2  # of all prompts, so that the same model can be asked without its calculator


@dataclass(frozen=True)
class QuickStartTools(QuickStart):
    vocab_size: int = 640  # at most
    warm_start: ToolWarmStart = field(default_factory=ToolWarmStart)
