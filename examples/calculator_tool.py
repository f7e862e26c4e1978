"""The tool of the quick start, and the reward that makes calls worth thinking about. Files like this one are all that a
run with tools needs of its own."""

from __future__ import annotations

import re
from typing import Any

_OPERATION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")
COST = 0.2  # of a call, where a right answer earns 1 and a wrong one −1


def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: two numbers
    """
    found = _OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError("write two numbers with +, - or * between them")
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])


def thrift(completions: list[Any], **columns: Any) -> list[float]:
    """−0.2 for each answer of the calculator. Without tools a completion is a text, and costs nothing."""
    return [-COST * sum(m["role"] == "tool" for m in c) if isinstance(c, list) else 0.0 for c in completions]
