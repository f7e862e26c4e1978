"""What a test does to this process's environment variables ends with its file."""

import os

import pytest

from tests.support.environment import restored_environment


def test_variables_that_a_file_sets_changes_or_removes_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_CHANGED", "1")
    monkeypatch.setenv("TANDEM_TEST_REMOVED", "2")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), restored_environment():
        os.environ["TANDEM_TEST_CHANGED"] = "3"
        os.environ["TANDEM_TEST_ADDED"] = "4"
        del os.environ["TANDEM_TEST_REMOVED"]
        raise ZeroDivisionError
    assert dict(os.environ) == before
