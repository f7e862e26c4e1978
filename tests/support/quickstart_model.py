"""The quick start's problems and model where its configs look for them, for tests in several processes at once."""

from __future__ import annotations

import fcntl
from pathlib import Path

from examples.quickstart.build import FOLDER, build
from examples.quickstart.settings import QuickStart

ROOT = Path(__file__).resolve().parents[2]


def build_once() -> None:
    """Waits while another process of the tests builds it; `build` itself would refuse."""
    (ROOT / FOLDER).parent.mkdir(exist_ok=True)
    with open(ROOT / FOLDER.with_name("quickstart.tests-lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(ROOT / FOLDER, QuickStart(), print)
