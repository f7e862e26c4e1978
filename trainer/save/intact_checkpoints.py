"""Search for the newest checkpoint that is intact, by the records of its files in commit.json.

The sizes of the files are compared first, because this takes no time. Then the ranks divide the
files between them, read them, and compare their digests.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.files import pieces
from common.files.run_folder import COMMIT, step_dirs
from trainer.engine.ranks import Collectives
from trainer.save.checkpoint import FileRecords, digest, read_record
from trainer.save.disk import sharing_disk_trouble


def newest_valid(
    checkpoints: Path,
    collectives: Collectives,
    say: Callable[[str], None],
    newest: Path | None = None,
) -> Path | None:
    """Returns the newest checkpoint in which every file matches its digest, or None if none does.

    newest: on rank 0, the newest checkpoint that may be chosen; None: any may be. Every rank calls
    it and reads its share of the files. Rank 0 tells the user which checkpoints it skips and why.
    """
    folders: list[Path] = []  # only rank 0 looks for checkpoints
    if collectives.rank == 0:
        folders = step_dirs(checkpoints)
        if newest in folders:
            folders = folders[: folders.index(newest) + 1]
    candidates = with_right_sizes(folders, say)
    while True:
        candidate = next(candidates, None)
        name = collectives.broadcast_text("" if candidate is None else candidate.name)
        if not name:
            return None
        folder = checkpoints / name
        with sharing_disk_trouble(collectives):
            damage = _damage_in_share(folder, collectives)
        damages = [text for text in collectives.gather(damage) if text]  # on rank 0
        if damages:
            say(f"checkpoint {folder} is skipped: {damages[0]}")
        is_valid = collectives.agree(not damages)
        if is_valid:
            return folder


def with_right_sizes(folders: Sequence[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the checkpoints whose commit.json is intact and whose files have the recorded sizes.

    The newest comes first. `say` gets the reason for each checkpoint that is skipped.
    """
    for folder in reversed(folders):
        damage = _visible_damage(folder)
        if damage:
            say(f"checkpoint {folder} is skipped: {damage}")
        else:
            yield folder


def _visible_damage(folder: Path) -> str:
    """Describes what is wrong with a checkpoint's commit.json or with the sizes of its files.

    Returns "" if nothing is wrong. The files are not read.
    """
    try:
        record = read_record(folder)
        expected_digest = record.pop("blake3")
        files = record["files"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{COMMIT} cannot be read: {error!r}"
    if digest(record) != expected_digest:
        return f"{COMMIT} differs from what was committed"
    return _first_difference(folder, files, _size)


def _size(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:  # opened, so that a file that cannot be read is noticed, too
        return {"size": os.fstat(file.fileno()).st_size}


def _damage_in_share(folder: Path, collectives: Collectives) -> str:
    """Reads this rank's share of the files. Describes the first damaged file, or returns ""."""
    files = read_record(folder)["files"]
    names = _shares(files, collectives.world_size)[collectives.rank]
    share = {name: files[name] for name in names}
    return _first_difference(folder, share, pieces.record)


def _first_difference(
    folder: Path, files: FileRecords, measure: Callable[[Path], dict[str, Any]]
) -> str:
    """Describes the first file that does not match its record, or returns "" if all files match.

    measure: computes the entries of a record to compare from a file on the disk, such as its size.
    """
    for name, expected in files.items():
        try:
            actual = measure(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        matches = actual.items() <= expected.items()
        if not matches:
            return f"{name} differs from what was committed"
    return ""


def _shares(files: FileRecords, count: int) -> list[list[str]]:
    """Divides the files of a checkpoint between `count` ranks. Returns file names by rank.

    A rank reads the file of its own optimizer state, because it loads this file next. Every other
    file goes to the rank that has the fewest bytes so far; the largest files come first.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    num_bytes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        rank = num_bytes.index(min(num_bytes))
        owner = re.search(r"pp_rank_(\d+)_", name)  # in the names of DeepSpeed's optimizer states
        if owner is not None and int(owner[1]) < count:  # more ranks may have saved than read
            rank = int(owner[1])
        shares[rank].append(name)
        num_bytes[rank] += files[name]["size"]
    return shares
