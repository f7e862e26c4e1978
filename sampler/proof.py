"""What comparing an engine with a version found. sampler/engine_tensors.py compares, inside vLLM's worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Expected:
    """A published tensor."""

    dtype: str  # "F32", "BF16"
    shape: list[int]
    checksum: str
    is_base: bool = False  # stands under adapters: not published, and the checksum is that of the tensor + 0


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


def of_parts(one: Proof, other: Proof) -> Proof:
    """Of two parts of what an engine holds, compared one after the other."""
    return replace(of_ranks([one, other]), seconds=one.seconds + other.seconds)
