"""What comparing an engine with a version found. sampler/engine_tensors.py compares, inside vLLM's worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Proof:
    """What was found out about the published tensors."""

    proven: set[str] = field(default_factory=set)
    unproven: dict[str, str] = field(default_factory=dict)  # name -> why it can not be compared
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def of_ranks(proofs: Sequence[Proof]) -> Proof:
    """Of the ranks of one engine."""
    return Proof(
        set().union(*(p.proven for p in proofs)),
        {name: why for p in proofs for name, why in p.unproven.items()},
        [text for p in proofs for text in p.wrong],
        max(p.seconds for p in proofs),
    )
