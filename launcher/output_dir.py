"""The run folder before a run: is it free, and does it agree with run.resume?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from common.config import Config
from common.durable import lock
from common.errors import UserError
from common.run_folder import checkpoints, earlier_run, no_checkpoint
from report.run_log import read_jsonl

LOCK = "lock.supervisor"


def check_folder(config: Config) -> None:
    """Raises UserError if the run folder contradicts run.resume, before two processes have been started to say so."""
    folder, resume = config.run.output_dir, config.run.resume
    steps = len(read_jsonl(folder / "metrics.jsonl"))
    if steps and not resume:
        raise earlier_run(folder, f"a run of {steps} steps", is_resumable=bool(checkpoints(folder)))
    if resume and not checkpoints(folder):
        raise no_checkpoint(folder, is_empty=not steps)


def move_aside(folder: Path) -> Path | None:
    """Renames a run folder that holds anything to folder-1, -2, … Returns the new name, None if nothing was there."""
    if not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir()):
        return None
    with lock(folder / LOCK, in_use(folder)):
        number = 1
        while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(aside)
    print(f"tandem: the earlier {folder} is now {aside}", file=sys.stderr)
    return aside


def in_use(folder: Path) -> Callable[[str], UserError]:
    """What to raise when another process, named by the argument, holds the folder's lock."""
    return lambda holder: UserError(
        f"{folder} belongs to a run that is going on ({holder}); stop it, or set another run.output_dir"
    )
