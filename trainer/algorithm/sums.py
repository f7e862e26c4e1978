"""Sums over an optimizer step's completion tokens for its metrics, computed on the CPU once a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.algorithm.mismatch import BY_LENGTH, CAUSES, MEASURES

SumsOf = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

# The policy's sums. ratio is the token's, or its sequence's with importance_sampling_level: sequence
TOKEN_SUMS = (
    *("loss", "entropy", "kl", "ratio", "clipped", "correction", "corrected", "abs_log_ratio", *MEASURES),
    *(f"{cause}_{measure}" for cause in CAUSES for measure in MEASURES),
    *BY_LENGTH,
    *("routed", "rerouted"),  # counts of (token, layer) pairs: router_replay.py
)
VALUE_SUMS = ("tokens", "loss", "clipped")  # the critic's sums


class Sums:
    """Named float64 sums of this rank since the last `drain`.

    Adding copies the tensors into one, and neither waits for their device nor computes there: on a GPU the hundred
    small kernels of a micro-batch's sums would take longer than those of a layer. They are computed by `drain`.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._later: list[tuple[dict[str, torch.Size], Tensor, SumsOf]] = []

    def add(self, tensors: Mapping[str, Tensor], sums_of: SumsOf = dict) -> None:
        """Adds what sums_of returns for these tensors on the CPU: scalars by name; names may be left out."""
        if not tensors:  # as of a micro-batch without recorded routing
            return
        copied = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
        self._later.append(({name: tensor.shape for name, tensor in tensors.items()}, copied, sums_of))

    def drain(self) -> dict[str, float]:
        found = dict.fromkeys(self._names, 0.0)
        for shapes, copied, sums_of in self._later:
            parts = copied.cpu().split([shape.numel() for shape in shapes.values()])
            tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
            for name, value in sums_of(tensors).items():
                found[name] += float(value)
        self._later.clear()
        return found
