"""The values that a user's functions return: they are awaited, read as numbers, and shown in messages."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any


def outcome_of(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls a user's function and returns its result, still to be awaited if it is async, or the error it raises."""
    try:
        return function(*arguments, **named)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: a user's function must not end its process in silence
        return error


def await_all(outcomes: Sequence[Any]) -> list[Any]:
    """Returns the outcomes; those of async functions are awaited together, so that their waiting overlaps.

    An exception that one of them raises is returned in its place.
    """

    async def settled(outcome: Any) -> Any:
        try:
            return await outcome if inspect.isawaitable(outcome) else outcome
        except BaseException as error:
            return error

    if not any(map(inspect.isawaitable, outcomes)):
        return list(outcomes)
    import asyncio  # a third of a reward process's imports, for the few functions that wait

    async def all_settled() -> list[Any]:
        return await asyncio.gather(*map(settled, outcomes))

    return _event_loop().run(all_settled())


@functools.cache
def _event_loop() -> Any:
    """Returns the process's one event loop, because the clients that a user's code keeps open belong to it."""
    import asyncio

    return asyncio.Runner()


def finite_number(value: Any) -> float | None:
    """Returns a number, 0-d numpy array or torch tensor as a float; None if it is none of these, or not finite."""
    with contextlib.suppress(ValueError, OverflowError, RuntimeError):
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real) and math.isfinite(number := float(plain)):
            return number
    return None


def is_whole(text: str) -> bool:
    """Returns whether a text can be UTF-8: JSON may hold half a surrogate, as where an emoji was cut in two."""
    return text.encode(errors="replace").decode() == text


def shorten(value: Any) -> str:
    """Returns the repr of a value, at most 201 characters of it, for messages."""
    try:
        text = repr(value)
    except Exception:  # an integer with thousands of digits, or an object of a user's class
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "…"
