"""What `bash launch.sh test` leaves to `bash launch.sh test --all`.

A test or a set of parameters marked `@full` runs with --all alone; `count(30, 200)` is 30, and 200 with --all.
"""

import os

import pytest

ALL = os.environ.get("TANDEM_TEST_ALL") == "1"  # set by tests/conftest.py
full = pytest.mark.full


def count(short: int, long: int) -> int:
    """How many times, in the short command and in the long one."""
    return long if ALL else short
