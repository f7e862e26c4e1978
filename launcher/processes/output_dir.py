"""Checks the run folder before a run: it must be free and agree with run.resume, by one rule (docs/running.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.config import Config
from common.durable import lock
from common.errors import UserError
from common.files.run_folder import FINAL, TRAINER_LOCK, checkpoints, earlier_run, no_checkpoint
from common.processes.exits import say
from report.run_log import read_jsonl

LOCK = "lock.supervisor"


def make_room(config: Config) -> None:
    """Moves an earlier run aside. Raises UserError if it can go on, or if run.resume finds no checkpoint."""
    folder = config.run.output_dir
    steps, saved = len(read_jsonl(folder / "metrics.jsonl")), checkpoints(folder)
    is_finished = (folder / FINAL).is_dir()
    if config.run.resume:
        if not saved:
            raise no_checkpoint(folder, is_empty=not steps)
    elif saved and not is_finished:
        raise earlier_run(folder, f"a run of {steps} steps")
    elif steps or is_finished:
        _move_aside(folder)


def _move_aside(folder: Path) -> None:
    with lock(folder / LOCK, in_use(folder)), lock(folder / TRAINER_LOCK, in_use(folder)):  # a trainer started by hand
        number = 1
        while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        try:
            folder.rename(aside)
        except OSError as error:  # for example a mount point
            why = f"holds an earlier run and cannot be renamed to {aside.name}: {error.strerror}"
            raise UserError(f"{folder} {why}; set run.output_dir={folder}/2") from None
    say(f"the earlier {folder} is now {aside}")


def in_use(folder: Path) -> Callable[[str], UserError]:
    """Returns a function that makes the error for a lock of the folder, from the name of the process that holds it."""
    return lambda holder: UserError(
        f"{folder} belongs to a run that is going on ({holder}); stop it, or set another run.output_dir"
    )
