"""What a user's functions return: awaited, read as a number, shown in a message."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


def await_all(outcomes: Sequence[Any]) -> list[Any]:
    """The outcomes, those of async functions awaited together, so that their waiting overlaps.

    What one of them raises stands in its place.
    """

    async def settled(outcome: Any) -> Any:
        try:
            return await outcome if inspect.isawaitable(outcome) else outcome
        except BaseException as error:
            return error

    if not any(map(inspect.isawaitable, outcomes)):
        return list(outcomes)
    import asyncio  # a third of what a reward process imports, for the few that wait

    async def all_settled() -> list[Any]:
        return await asyncio.gather(*map(settled, outcomes))

    return _event_loop().run(all_settled())


@functools.cache
def _event_loop() -> asyncio.Runner:
    """One loop as long as the process runs: the clients that a user's code keeps open belong to it."""
    import asyncio

    return asyncio.Runner()


def finite_number(value: Any) -> float | None:
    """A number, 0-d numpy array or torch tensor as a float; None of what is none, or not finite."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real) and math.isfinite(number := float(plain)):
            return number
    except (ValueError, OverflowError, RuntimeError):
        pass
    return None


def is_whole(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold half a surrogate, as where an emoji was cut in two."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(value: Any) -> str:
    """The repr of a value, at most 201 characters of it, for messages."""
    try:
        text = repr(value)
    except Exception:  # of an integer with thousands of digits, or of a class of the user's
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "…"
