"""Files of a user's functions."""

from pathlib import Path
from typing import Any

import pytest


def python_file(text: str) -> Any:
    """A fixture of a test file: the path of a file of Python with this text."""

    @pytest.fixture(scope="module")
    def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("python") / "mine.py"
        path.write_text(text)
        return path

    return file
