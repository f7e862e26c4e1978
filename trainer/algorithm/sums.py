"""Sums over an optimizer step's completion tokens for its metrics, accumulated on the device and read once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.algorithm.mismatch import CAUSES, MEASURES

# The policy's sums. ratio is the token's, or its sequence's with importance_sampling_level: sequence
TOKEN_SUMS = (
    *("loss", "entropy", "kl", "ratio", "clipped", "correction", "corrected", "abs_log_ratio", *MEASURES),
    *(f"{cause}_{measure}" for cause in CAUSES for measure in MEASURES),
    *("routed", "rerouted"),  # counts of (token, layer) pairs: router_replay.py
)
VALUE_SUMS = ("tokens", "loss", "clipped")  # the critic's sums


class Sums:
    """Named float64 sums of this rank since the last `drain`. Adding does not wait for the device."""

    def __init__(self, names: Sequence[str], device: torch.device):
        self._names = names
        self._values = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Adds scalar tensors on the device to the sums of the same names; names may be left out."""
        unknown = parts.keys() - set(self._names)
        assert not unknown, f"no such sums: {unknown}"
        zero = self._values.new_zeros(())
        self._values += torch.stack([parts.get(name, zero).detach().double() for name in self._names])

    def drain(self) -> dict[str, float]:
        found = dict(zip(self._names, self._values.tolist(), strict=True))
        self._values.zero_()
        return found
