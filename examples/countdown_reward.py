"""A reward of one's own for Countdown: an equation of exactly the row's numbers that makes its target."""

import re

from tandem.rewards import text_of

EQUATION = re.compile(r"<answer>\s*([\d(][\d\s()+*/-]*)(?:=.*)?</answer>\s*\Z")


def equation(completions, target, nums, **columns):
    """Returns 1.0 per completion whose answer uses each number once and makes the target, else 0.0."""
    return [float(solves(text_of(c), t, n)) for c, t, n in zip(completions, target, nums, strict=True)]


def solves(text, target, nums):
    found = EQUATION.search(text)
    written = found[1] if found else ""
    if re.search(r"\*\*|//", written) or sorted(map(int, re.findall(r"\d+", written))) != sorted(nums):
        return False
    try:
        return abs(eval(written, {"__builtins__": {}}) - target) < 1e-6  # noqa: S307  numbers, signs and brackets alone
    except (ArithmeticError, SyntaxError, TypeError):
        return False
