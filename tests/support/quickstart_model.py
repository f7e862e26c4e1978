"""The quick start's problems and model where its configs look for them."""

from __future__ import annotations

from pathlib import Path

from examples.example import build
from examples.quickstart import QuickStart

ROOT = Path(__file__).resolve().parents[2]


def build_once() -> None:
    """Waits while another process of the tests builds it."""
    quickstart = QuickStart()
    build(quickstart, ROOT / quickstart.folder, print)
