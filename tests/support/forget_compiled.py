"""What this process has compiled, and what did not compile, forgotten between tests."""

import torch

from model import compiled
from model.attention import _block_mask  # by name: a test may replace the module's


def forget_compiled() -> None:
    """Forgets all compiled code, and all failures to compile."""
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    _block_mask.cache_clear()
    forget_failures()


def forget_failures() -> None:
    """Forgets what did not compile; compiled code stays."""
    compiled._uncompiled.clear()
    compiled._failed_kinds.clear()
    compiled._abandoned_kinds.clear()
    compiled._abandoned_in_row.clear()
    compiled._failed_with_attention.clear()
    compiled._said_once.clear()
