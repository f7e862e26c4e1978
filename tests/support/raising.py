"""A function that fails in the place of a real one."""

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """Raises the error whatever it is called with."""

    def failed(*_: Any, **__: Any) -> Any:
        raise error

    return failed
