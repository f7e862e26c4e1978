"""Choice of the checkpoint to resume from, and checks that the run continues the stream of groups of that checkpoint.

A group is a number: its problem follows from the seed, the rows that are left after filtering, and the sizes of
batches. So these are compared, before a model is loaded, with what the checkpoint recorded:

    settings       every field of `data` and `prompt` unless it is in _HARMLESS, and those of _OTHERS
    files          of a template its contents, wherever it lies
    adapters       their shape

and by fingerprints, before the first step: the rows and the tokenizer of the samplers, as their first one says, and the
frozen weights under adapters, which a checkpoint does not hold. All other settings may change: docs/running.md.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import blake3

from common.config import Config
from common.errors import PeerEnded, UserError
from common.files import pieces
from common.files.run_folder import CHECKPOINTS, COMMIT, earlier_run, no_checkpoint, step_dir, step_dirs
from common.processes.exits import USER_ERROR
from common.processes.watchdog import report_progress
from common.redact import redacted
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.save.checkpoint import Progress, digest, read_record
from trainer.save.disk import on_all_ranks

_FINGERPRINTS = {
    "dataset_fingerprint": "rows of data.train have changed, or more of them are too long or have no answer",
    "tokenizer_hash": "model.path has another tokenizer",
    "base_fingerprint": "model.path, model.revision or what lies there has changed",
}
_SECTIONS = ("data", "prompt")
_HARMLESS = ("data.eval",)
_OTHERS = (
    "run.seed",
    "trainer.prompts_per_step",
    "sampler.num_generations",
    "algorithm.num_iterations",
    "algorithm.dead_groups",
    "algorithm.max_resamples",
    "algorithm.steps_per_generation",
    "algorithm.shuffle_mini_batches",
)


def stream_settings(config: Config) -> dict[str, Any]:
    """Returns settings that define which groups come, in which order, by dotted name, without secrets, as JSON."""
    names = [f"{s}.{field}" for s in _SECTIONS for field in type(getattr(config, s)).model_fields]
    given = {name: _setting_value(name, config) for name in (*_OTHERS, *names) if name not in _HARMLESS}
    lora = config.lora  # a checkpoint with adapters has no other weights
    given |= {
        "lora.r": lora.r or None,
        "lora.alpha": lora.scale or None,
        "lora.target_modules": lora.target_modules if lora.r else None,
        "model.path": config.model.path if lora.r else None,
    }
    return json.loads(json.dumps(given))


def _setting_value(name: str, config: Config) -> Any:
    section, _, field = name.partition(".")
    value = getattr(getattr(config, section), field)
    if not isinstance(value, Path):
        return redacted(getattr(config, section).model_dump(mode="json", include={field})[field], field)
    try:
        return f"a file with BLAKE3 {blake3.blake3(value.expanduser().read_bytes()).hexdigest()[:16]}"
    except OSError:
        return "a file that is not here"  # the process that needs the file says so


def find_checkpoint(config: Config, say: Callable[[str], None] = print) -> str:
    """Returns the checkpoint to resume from, judged by files' sizes; "" for a fresh start. Raises UserError, no guess.

    `verified` reads the files, when there are ranks to do so together.
    """
    output_dir = config.run.output_dir
    checkpoints = output_dir / CHECKPOINTS
    if not config.run.resume:
        if step_dirs(checkpoints):
            raise earlier_run(output_dir, "checkpoints")
        return ""
    folder = next(_committed(step_dirs(checkpoints), say), None)
    if folder is None:
        raise no_checkpoint(output_dir, "valid ", is_empty=not step_dirs(checkpoints))
    return str(folder)


def verified(config: Config, found: str, ranks: Exchange, say: Callable[[str], None]) -> str:
    """Returns rank 0's checkpoint on every rank, or an older valid one if a file is damaged. Every rank calls it."""
    if not ranks.agree(bool(found)):
        return ""
    output_dir = config.run.output_dir
    folder = newest_valid(output_dir / CHECKPOINTS, ranks, say, Path(found) if found else None)
    if folder is None:
        error = no_checkpoint(output_dir, "valid ", is_empty=False)
        raise error if ranks.rank == 0 else PeerEnded("rank 0 ended", USER_ERROR)
    report_progress("starting", starts=True)
    return str(folder)


def newest_valid(
    checkpoints: Path, ranks: Exchange, say: Callable[[str], None], newest: Path | None = None
) -> Path | None:
    """Returns the newest checkpoint up to `newest` whose every file is as committed. Says which ones it skips and why.

    Every rank calls it and reads its part of the files; rank 0 says in which folder.
    """
    folders = step_dirs(checkpoints) if ranks.rank == 0 else []
    candidates = _committed(folders[: folders.index(newest) + 1] if newest in folders else folders, say)
    while name := ranks.broadcast_text(next((folder.name for folder in candidates), "")):
        folder, problems = checkpoints / name, list[str]()
        on_all_ranks(ranks, partial(_read_share, folder, ranks, problems))
        problem = next(filter(None, ranks.gather("".join(problems))), "")
        if problem:
            say(f"checkpoint {folder} is skipped: {problem}")
        if ranks.agree(not problem):
            return folder
    return None


def _committed(folders: Sequence[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """Yields folders whose record is whole and whose files have its sizes, newest first."""
    for folder in reversed(folders):
        if problem := _problem(folder):
            say(f"checkpoint {folder} is skipped: {problem}")
        else:
            yield folder


def _problem(folder: Path) -> str:
    """Returns the first problem found in the folder's record and file sizes; "" if there is none."""
    try:
        record = read_record(folder)
        expected_digest, expected = record.pop("blake3"), record["files"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{COMMIT} cannot be read: {error!r}"
    if digest(record) != expected_digest:
        return f"{COMMIT} differs from what was committed"
    return next(filter(None, (_difference(folder / name, name, info, _size) for name, info in expected.items())), "")


def _size(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size}


def _read_share(folder: Path, ranks: Exchange, problems: list[str]) -> None:
    """Reads this rank's part of a committed checkpoint up to the first problem."""
    files = read_record(folder)["files"]
    differ = (_difference(folder / n, n, files[n], pieces.record) for n in _shares(files, ranks.world_size)[ranks.rank])
    problems.extend(itertools.islice(filter(None, differ), 1))


def _difference(path: Path, name: str, expected: dict[str, Any], describe: Callable[[Path], dict[str, Any]]) -> str:
    try:
        found = describe(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return "" if found.items() <= expected.items() else f"{name} differs from what was committed"


def _shares(files: dict[str, Any], count: int) -> list[list[str]]:
    """Balances files over ranks: each reads its own state, which it loads next; the least loaded read other files."""
    shares, sizes = [list[str]() for _ in range(count)], [0] * count
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        own = re.search(r"pp_rank_(\d+)_", name)
        rank = int(own[1]) if own and int(own[1]) < count else sizes.index(min(sizes))
        shares[rank].append(name)
        sizes[rank] += files[name]["size"]
    return shares


def read_progress(folder: Path, stream: dict[str, Any]) -> Progress:
    """Reads a checkpoint's progress. Raises UserError if it belongs to another stream of groups."""
    commit = read_record(folder)
    before = commit["stream"]
    changed = [f"{name}={now!r} (was {before.get(name)!r})" for name, now in stream.items() if before.get(name) != now]
    if changed:
        raise UserError(
            f"{folder}: these settings define which groups come next and may not change on resume: {', '.join(changed)}"
        )
    return Progress(**{name: commit[name] for name in Progress.__dataclass_fields__} | {"stream": stream})


def base_fingerprint(engine: PolicyEngine) -> str:
    """Returns a fingerprint of the frozen weights under adapters. Every rank calls it; rank 0 has the result."""
    return digest(engine.base_checksums())[:32]


def with_fingerprints(progress: Progress, found: dict[str, Any], output_dir: Path) -> Progress:
    """Returns the progress with these fingerprints. Raises UserError if a resumed run's have changed.

    found: by name; "" is unknown, as a replay knows neither rows nor tokenizer: the checkpoint's value stays.
    """
    for name, now in found.items():
        was = getattr(progress, name)
        if was and now and was != now:
            folder = step_dir(output_dir / CHECKPOINTS, progress.step)
            raise UserError(
                f"the checkpoint of step {progress.step} was trained with the {name} {was}, now it is {now}: "
                f"{_FINGERPRINTS[name]}. Bring the old one back; or start a new run from its weights: "
                f"model.path={folder} run.resume=false run.output_dir={output_dir}-2"
            )
        progress = replace(progress, **{name: now or was})
    return progress
