"""Environment variables that end with the block that set them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_environment() -> Iterator[None]:
    """Gives this process the environment variables back that it had before the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
