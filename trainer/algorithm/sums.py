"""Sums over a step's completion tokens for its metrics, computed on the CPU once a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.mismatch import BY_LENGTH, CAUSES, MEASURES

SumsOf = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

# The policy's sums. With importance_sampling_level "sequence", ratio is the sequence's.
TOKEN_SUMS = (
    *("loss", "entropy", "kl", "ratio", "clipped", "correction", "corrected", "abs_log_ratio"),
    *MEASURES,
    *(f"{cause}_{measure}" for cause in CAUSES for measure in MEASURES),
    *BY_LENGTH,
    *("routed", "rerouted"),  # counts of (token, layer) pairs: router_replay.py
)
VALUE_SUMS = ("tokens", "loss", "clipped")  # the critic's sums


@dataclass(frozen=True)
class _Copy:
    """Named tensors that were copied into one flat tensor, and the function that sums them."""

    shapes: dict[str, torch.Size]
    flat: Tensor
    sums_of: SumsOf

    def sums(self) -> Mapping[str, Tensor]:
        """Returns the function's sums by name. This waits for the device of the tensors."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = self.flat.cpu().split(sizes)
        tensors = {}
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            tensors[name] = piece.view(shape)
        return self.sums_of(tensors)


class Sums:
    """Named float64 sums of this rank since the last `drain`.

    `add` only copies tensors into one. It neither waits for their device nor computes on it,
    because the hundred small kernels of a micro-batch's sums would take longer on a GPU than those
    of a layer. `drain` computes the sums.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._copies: list[_Copy] = []

    def add(self, tensors: Mapping[str, Tensor], sums_of: SumsOf = dict) -> None:
        """Adds to the sums the scalars that sums_of will return for these tensors on the CPU.

        sums_of need not return every name.
        """
        if not tensors:  # a micro-batch without recorded routing has none
            return
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
        self._copies.append(_Copy(shapes, flat, sums_of))

    def drain(self) -> dict[str, float]:
        """Returns the sums by name, and starts again from 0."""
        totals = dict.fromkeys(self._names, 0.0)
        for copy in self._copies:
            for name, value in copy.sums().items():
                totals[name] += float(value)
        self._copies.clear()
        return totals
