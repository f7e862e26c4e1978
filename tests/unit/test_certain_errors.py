"""An error that the next start would repeat is told by what a library says of it, and where."""

import re
from typing import Any

import pytest
from pydantic import BaseModel

from common.errors import UserError
from common.processes.certain_errors import raising_permanent_errors


class Zero(BaseModel, extra="forbid"):
    stage: int = 0
    inner: dict[str, int] = {}


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: Zero(stage="x"), "ValidationError: stage = 'x': Input should be a valid integer, unable to parse"),
        (lambda: Zero(inner={"a": "b"}), "ValidationError: inner.a = 'b': Input should be a valid integer"),
        (lambda: Zero(offload={}), "ValidationError: offload = {}: Extra inputs are not permitted"),
        (lambda: exec("assert 2 == 1"), "AssertionError: `` in <string>, line 1"),
        (lambda: int("a\nreason"), "ValueError: invalid literal for int() with base 10: 'a\\nreason'"),
    ],
)
def test_its_message_has_the_value(act: Any, said: str) -> None:
    with (
        pytest.raises(UserError, match=re.escape(f"it does not start: {said}")),
        raising_permanent_errors("it does not start"),
    ):
        act()
