"""What the quick start with images builds. Part of the stamp: a change here rebuilds it. No torch here.

The values were chosen as those of examples/quickstart/settings.py: sampled at temperature 1 the model is right about a
third of the time, though it sees what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.quickstart.settings import QuickStart, WarmStart


@dataclass(frozen=True)
class SeeingWarmStart(WarmStart):
    """A warm start with a vision tower before the language model."""

    num_clean_steps: int = 360
    num_careless_steps: int = 60
    batch_size: int = 48
    wrong_fraction: float = 0.4
    malformed_fraction: float = 0.5
    num_layers: int = 3
    vision_hidden_size: int = 64
    vision_layers: int = 2


@dataclass(frozen=True)
class QuickStartVlm(QuickStart):
    num_train: int = 2048
    vocab_size: int = 400
    warm_start: SeeingWarmStart = field(default_factory=SeeingWarmStart)
