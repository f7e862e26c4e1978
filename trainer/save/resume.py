"""Choice of the checkpoint to resume from, and checks that the run continues its stream of groups.

A group is a number. Its problem follows from the seed, the rows that are left after filtering, and
the sizes of batches. So these are compared with what the checkpoint recorded, before a model loads:

    settings       every field of `data` and `prompt` but those in _HARMLESS, and those in _OTHERS
    files          the contents of template files, wherever they lie
    adapters       their shape

Before the first step fingerprints are compared: of the samplers' rows and tokenizer, which the
first sampler reports, and of the frozen weights under adapters, which a checkpoint does not hold.
All other settings may change, as docs/running.md says.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3

from common.config import Config
from common.errors import PeerEnded, UserError
from common.files import pieces
from common.files.run_folder import (
    CHECKPOINTS,
    COMMIT,
    earlier_run,
    no_checkpoint,
    step_dir,
    step_dirs,
)
from common.processes.exits import USER_ERROR
from common.processes.watchdog import report_progress
from common.redact import redacted
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save.checkpoint import FileRecords, RunState, digest, read_record
from trainer.save.disk import sharing_disk_trouble

_FINGERPRINTS = {
    "dataset_fingerprint": (
        "rows of data.train have changed, or more of them are too long or have no answer"
    ),
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
    """Returns the settings that define which groups come in which order.

    The keys are dotted names; the values can be written as JSON and hold no secrets.
    """
    names = list(_OTHERS)
    for section in _SECTIONS:
        fields = type(getattr(config, section)).model_fields
        names += [f"{section}.{field}" for field in fields]
    settings = {name: _setting_value(name, config) for name in names if name not in _HARMLESS}
    settings |= _adapter_settings(config)
    return json.loads(json.dumps(settings))


def _adapter_settings(config: Config) -> dict[str, Any]:
    """Returns the LoRA settings that a run must have in common with the checkpoint it resumes from.

    With LoRA a checkpoint holds only adapters, which fit no other base model and no other shape.
    """
    lora = config.lora
    target_modules = None
    base_model = None
    if lora.r:
        target_modules = lora.target_modules
        base_model = config.model.path
    return {
        "lora.r": lora.r or None,
        "lora.alpha": lora.scale or None,
        "lora.target_modules": target_modules,
        "model.path": base_model,
    }


def _setting_value(name: str, config: Config) -> Any:
    section_name, _, field = name.partition(".")
    section = getattr(config, section_name)
    value = getattr(section, field)
    if isinstance(value, Path):
        return _file_contents(value)
    plain_value = section.model_dump(mode="json", include={field})[field]
    return redacted(plain_value, field)


def _file_contents(path: Path) -> str:
    """Returns a description of a file that is the same wherever the file lies."""
    try:
        contents = path.expanduser().read_bytes()
    except OSError:
        return "a file that is not here"  # the process that needs the file reports it
    return f"a file with BLAKE3 {blake3.blake3(contents).hexdigest()[:16]}"


def find_checkpoint(config: Config, say: Callable[[str], None] = print) -> str:
    """Returns the newest checkpoint whose files have the right sizes, or "" for a fresh start.

    `verified` reads the files later, when there are ranks to do so together. Raises UserError if
    run.resume contradicts what the run folder holds.
    """
    output_dir = config.run.output_dir
    folders = step_dirs(output_dir / CHECKPOINTS)
    if not config.run.resume:
        if folders:
            raise earlier_run(output_dir, "checkpoints")
        return ""
    folder = next(_committed(folders, say), None)
    if folder is None:
        raise no_checkpoint(output_dir, "valid ", is_empty=not folders)
    return str(folder)


def verified(config: Config, newest: str, ranks: Collectives, say: Callable[[str], None]) -> str:
    """Returns the checkpoint to resume from: the newest one, or an older one if a file is damaged.

    newest: the result of `find_checkpoint` on rank 0, "" on other ranks. Every rank calls it and
    gets the same result, "" for a fresh start. If no checkpoint is valid, it raises UserError on
    rank 0 and PeerEnded on the others.
    """
    if not ranks.agree(bool(newest)):
        return ""
    output_dir = config.run.output_dir
    newest_folder = Path(newest) if newest else None
    folder = newest_valid(output_dir / CHECKPOINTS, ranks, say, newest_folder)
    if folder is None:
        if ranks.rank == 0:
            raise no_checkpoint(output_dir, "valid ", is_empty=False)
        raise PeerEnded("rank 0 ended", USER_ERROR)
    report_progress("starting", starts=True)
    return str(folder)


def newest_valid(
    checkpoints: Path, ranks: Collectives, say: Callable[[str], None], newest: Path | None = None
) -> Path | None:
    """Returns the newest checkpoint whose every file is as it was committed, or None.

    newest: on rank 0, the newest checkpoint that may be chosen. Every rank calls it and reads its
    share of the files; rank 0 chooses the folder. Rank 0 says which checkpoints it skips and why.
    """
    folders: list[Path] = []
    if ranks.rank == 0:
        folders = step_dirs(checkpoints)
        if newest in folders:
            folders = folders[: folders.index(newest) + 1]
    candidates = _committed(folders, say)
    while True:
        candidate = next(candidates, None)  # always None on other ranks than rank 0
        name = ranks.broadcast_text("" if candidate is None else candidate.name)
        if not name:
            return None
        folder = checkpoints / name
        with sharing_disk_trouble(ranks):
            damage = _damage_in_share(folder, ranks)
        damages = [text for text in ranks.gather(damage) if text]  # on rank 0
        if damages:
            say(f"checkpoint {folder} is skipped: {damages[0]}")
        if ranks.agree(not damages):
            return folder


def _committed(folders: Sequence[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the folders with an intact commit record whose files have its sizes, newest first."""
    for folder in reversed(folders):
        damage = _visible_damage(folder)
        if damage:
            say(f"checkpoint {folder} is skipped: {damage}")
        else:
            yield folder


def _visible_damage(folder: Path) -> str:
    """Returns the first fault of the folder's commit record and of its files' sizes, or ""."""
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
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size}


def _damage_in_share(folder: Path, ranks: Collectives) -> str:
    """Reads this rank's share of a checkpoint. Returns the first difference found, or ""."""
    files = read_record(folder)["files"]
    names = _shares(files, ranks.world_size)[ranks.rank]
    return _first_difference(folder, {name: files[name] for name in names}, pieces.record)


def _first_difference(
    folder: Path, files: FileRecords, describe: Callable[[Path], dict[str, Any]]
) -> str:
    """Returns how the first file that differs from its record does so, or "".

    describe: returns some entries of a file's record.
    """
    for name, expected in files.items():
        try:
            actual = describe(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if not actual.items() <= expected.items():
            return f"{name} differs from what was committed"
    return ""


def _shares(files: FileRecords, count: int) -> list[list[str]]:
    """Returns the names of the files that each of `count` ranks reads.

    A rank reads its own state, which it loads next. Each other file, the largest first, goes to the
    rank with the fewest bytes so far.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    num_bytes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        rank = num_bytes.index(min(num_bytes))
        rank_in_name = re.search(r"pp_rank_(\d+)_", name)
        if rank_in_name is not None and int(rank_in_name[1]) < count:
            rank = int(rank_in_name[1])
        shares[rank].append(name)
        num_bytes[rank] += files[name]["size"]
    return shares


def read_run_state(folder: Path, stream: dict[str, Any]) -> RunState:
    """Returns a checkpoint's run state. Raises UserError if its stream of groups is another one."""
    record = read_record(folder)
    recorded = record["stream"]
    changed = []
    for name, value in stream.items():
        if recorded.get(name) != value:
            changed.append(f"{name}={value!r} (was {recorded.get(name)!r})")
    if changed:
        raise UserError(
            f"{folder}: these settings define which groups come next and may not change on resume: "
            f"{', '.join(changed)}"
        )
    fields = {name: record[name] for name in RunState.__dataclass_fields__}
    fields["stream"] = stream
    return RunState(**fields)


def base_fingerprint(engine: PolicyEngine) -> str:
    """Returns on rank 0 a fingerprint of the frozen weights under adapters. All ranks call it."""
    return digest(engine.base_checksums())[:32]


def with_fingerprints(
    run_state: RunState, fingerprints: dict[str, Any], output_dir: Path
) -> RunState:
    """Returns the run state with these fingerprints. Raises UserError if one of them has changed.

    fingerprints: by name. An empty string keeps the checkpoint's value, because a replay knows
    neither rows nor tokenizer.
    """
    for name, now in fingerprints.items():
        before = getattr(run_state, name)
        if before and now and before != now:
            folder = step_dir(output_dir / CHECKPOINTS, run_state.step)
            raise UserError(
                f"the checkpoint of step {run_state.step} was trained with the {name} {before}, "
                f"now it is {now}: {_FINGERPRINTS[name]}. Bring the old one back; "
                "or start a new run from its weights: "
                f"model.path={folder} run.resume=false run.output_dir={output_dir}-2"
            )
        if now:
            run_state = replace(run_state, **{name: now})
    return run_state
