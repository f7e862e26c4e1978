"""Sums over the trained tokens of a step for its metrics, computed on the CPU once per step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.mismatch import BY_LENGTH, CAUSES, MEASURES

SumFunction = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # named tensors -> named scalars

# The policy's sums. With importance_sampling_level "sequence", a token's ratio is its completion's.
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

    shapes: dict[str, torch.Size]  # of the tensors, in their order in `flat`
    flat: Tensor
    compute_sums: SumFunction

    def sums(self) -> Mapping[str, Tensor]:
        """Returns the sums by name, after waiting for the device that holds the tensors."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = self.flat.cpu().split(sizes)
        tensors = {}
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            tensors[name] = piece.view(shape)
        return self.compute_sums(tensors)


class Sums:
    """Named float64 sums of this rank since the last `drain`.

    `add` copies all given tensors into one tensor on their device. It neither waits for the device
    nor computes sums there, because the hundred small kernels of a micro-batch's sums would take
    longer on a GPU than the kernels of a layer. `drain` computes the sums on the CPU.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._copies: list[_Copy] = []

    def add(self, tensors: Mapping[str, Tensor], compute_sums: SumFunction = dict) -> None:
        """Adds scalars that are computed from these tensors to the sums of the same names.

        compute_sums: called by `drain` with the tensors on the CPU. It returns the scalars by name,
        and may leave names out. By default, the tensors are the scalars.
        """
        if not tensors:  # router replay gives no sums for a micro-batch without recorded routing
            return
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
        self._copies.append(_Copy(shapes, flat, compute_sums))

    def drain(self) -> dict[str, float]:
        """Returns the sums by name, and sets them to 0."""
        totals = dict.fromkeys(self._names, 0.0)
        for copy in self._copies:
            for name, value in copy.sums().items():
                totals[name] += float(value)
        self._copies.clear()
        return totals
