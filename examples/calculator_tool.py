"""The calculator of the quick start with tools, and a reward that charges a price for each call. A run with tools needs
no other code of its own."""

from __future__ import annotations

import re
from typing import Any

_OPERATION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")
COST = 0.2  # price of a call, where a right answer earns 1 and a wrong one −1


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
    """Returns −0.2 for each answer of the calculator. A completion without tools is a text, and costs nothing."""
    return [-COST * sum(m["role"] == "tool" for m in c) if isinstance(c, list) else 0.0 for c in completions]
