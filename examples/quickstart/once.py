"""A folder that is made once: it appears whole or not at all, and again only when what decides it has changed.

Its stamp is a digest of the settings and of the sources that make it; when it matches, nothing is done and torch is not
imported. Library versions are not part of it: they change the last digits only.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from common import durable
from common.errors import UserError

ROOM = Path(__file__).parent


def stamp(settings: object, *rooms: Path) -> str:
    """Digest of the settings and of every source file of the rooms: everything of ours that decides what is made."""
    digest = hashlib.sha256(repr(settings).encode())
    for room in rooms:
        for source in sorted(room.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def make_once(folder: Path, wanted: str, fill: Callable[[Path], None], report: Callable[[str], None]) -> bool:
    """Has `fill` write the folder unless it carries the stamp `wanted`. Returns whether it did.

    Raises UserError while another process makes it.
    """
    if is_made(folder, wanted):
        return False

    def taken(holder: str) -> UserError:
        return UserError(f"{folder} is being built by another process ({holder}); start again when it is done")

    with durable.lock(folder.with_name(f"{folder.name}.lock"), taken):
        if is_made(folder, wanted):
            return False
        began = time.perf_counter()
        report(f"building {folder}, once; a minute or two on two cores")
        temporary = folder.with_name(f"{durable.TEMPORARY}{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed build left
        temporary.mkdir()
        fill(temporary)
        (temporary / "stamp").write_text(wanted)
        durable.remove_dir(folder)
        durable.commit_dir(temporary, folder)
        report(f"built {folder} in {time.perf_counter() - began:.0f} s")
    return True


def is_made(folder: Path, wanted: str) -> bool:
    """Whether the folder carries this stamp."""
    try:
        return (folder / "stamp").read_text() == wanted
    except OSError:
        return False
