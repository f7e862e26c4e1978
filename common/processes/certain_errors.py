"""Errors that the next start would repeat: they are reported once, with exit code 2, instead of a restart."""

import contextlib
import traceback
from pathlib import Path

from pydantic import ValidationError

from common.durable import disk_trouble
from common.errors import Retryable, UserError
from common.outcomes import shorten
from common.processes.out_of_memory import memory_advice, raising_instead

_CERTAIN = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, TypeError, ValueError)
_DEVICE_SIGNS = ("cuda error", "cublas", "nccl", "gloo")  # in a RuntimeError's text: it may not occur again
_REMEDY = "Another model.dtype, lora.sync=merged, other arguments in vllm: or another model (docs/model.md) may work"


def would_repeat(error: Exception) -> bool:
    """Returns whether an error comes from the model and settings alone, not from memory, files or connections.

    torch and vLLM raise a plain RuntimeError for shapes and kernels that they do not have.
    """
    if isinstance(error, UserError | Retryable) or memory_advice("sampler", error) or disk_trouble(error) is not None:
        return False
    if type(error) in (RuntimeError, NotImplementedError):
        return not any(sign in str(error).lower() for sign in _DEVICE_SIGNS)
    return isinstance(error, _CERTAIN)


def raising_permanent_errors(what: str, remedy: str = _REMEDY) -> contextlib.AbstractContextManager[None]:
    """Raises the error of `permanent_error` in place of an error inside the block that the next start would repeat."""
    return raising_instead(lambda error: permanent_error(what, error, remedy) if would_repeat(error) else None)


def permanent_error(what: str, error: Exception | None = None, remedy: str = _REMEDY) -> UserError:
    """Returns the UserError that says what happened ("vLLM does not start"), and the last line of `error` as reason.

    The reason of pydantic's error, whose last line is an address, is what it says of the first value.
    """
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip(" .")]
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)[0]
        lines = [f"{'.'.join(map(str, found['loc']))} = {shorten(found['input'])}: {found['msg']}".removeprefix(" = ")]
    if error and not lines and error.__traceback__:  # an error without a text, such as `assert x` in a library
        raised = traceback.extract_tb(error.__traceback__)[-1]
        lines = [f"`{raised.line}` in {Path(raised.filename).name}, line {raised.lineno}"]
    why = f": {type(error).__name__}: {lines[-1] if lines else ''}"[:300] if error else ""
    return UserError(f"{what}{why}. The next start would end the same. {remedy}")
