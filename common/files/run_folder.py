"""Names inside a run folder that several packages need, and the errors for a folder that contradicts run.resume.

runs/my_task/  checkpoints/step_000040/commit.json    best/commit.json    final/
"""

import re
from pathlib import Path

from common.errors import UserError

CHECKPOINTS, BEST, FINAL = "checkpoints", "best", "final"
TRAINER_LOCK = "lock.trainer"  # held by rank 0, whoever started it
COMMIT = "commit.json"  # in a checkpoint and in best/: written last, with the digest of every file
_STEP_NAME = re.compile(r"step_([0-9]+)")


def step_dir(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def step_dirs(checkpoints: Path) -> list[Path]:
    """Returns the folders of all checkpoints, whole or damaged, oldest first."""
    named = [(_STEP_NAME.fullmatch(path.name), path) for path in checkpoints.glob("step_*") if path.is_dir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def checkpoints(run_folder: Path) -> list[Path]:
    """Returns the committed checkpoints of a run, oldest first: one that is being written has another name."""
    return step_dirs(run_folder / CHECKPOINTS)


def earlier_run(folder: Path, what: str) -> UserError:
    """Returns the error for a fresh start in another run's folder. what: "a run of 40 steps", "checkpoints"."""
    other = f"start another with run.output_dir={folder}-2"
    return UserError(f"{folder} already holds {what}. Continue it with run.resume=true, or {other}")


def no_checkpoint(folder: Path, kind: str = "", *, is_empty: bool) -> UserError:
    """Returns the error for a resume without a checkpoint. is_empty: no run has left its steps in the folder."""
    anew = "leave run.resume out" if is_empty else f"set run.output_dir={folder}-2 and leave run.resume out"
    return UserError(f"run.resume is true but {folder / CHECKPOINTS} holds no {kind}checkpoint; {anew} to start anew")


def sampler_log(run_folder: Path, sampler_id: str) -> Path:
    """Returns the file to which launch.sh writes a sampler's log: sampler.1.log, or sampler.log of the only one."""
    own = run_folder / "logs" / f"{sampler_id}.log"
    return own if own.exists() else run_folder / "logs" / "sampler.log"
