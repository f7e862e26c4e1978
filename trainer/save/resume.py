"""What a resumed run must have in common with the run that saved its checkpoint.

A group is a number: which problem it asks follows from the seed, the rows that are left after filtering, and the sizes
of batches. So these are compared, before a model is loaded, with what the checkpoint recorded:

    settings       every field of `data` and `prompt` unless it is in _HARMLESS, and those of _OTHERS
    files          of a template its contents, wherever it lies
    layout         ranks, ZeRO stage, shape of the adapters: DeepSpeed shards its state by them

and by fingerprints, before the first step: the rows and the tokenizer of the samplers, as their first one says, and the
frozen weights under adapters, which a checkpoint does not hold. Left out: what decides no problem, such as sampling,
learning rate, rewards and a user's own functions, which may change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3

from common.config import Config
from common.errors import UserError
from common.redact import redacted
from common.run_folder import CHECKPOINTS, COMMIT, earlier_run, no_checkpoint, step_dir, step_dirs
from trainer.engine.policy import PolicyEngine
from trainer.save.checkpoint import Progress, digest, file_record

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
    """Settings that define which groups come, in which order, by dotted name, without secrets and as JSON has them."""
    names = [f"{s}.{field}" for s in _SECTIONS for field in type(getattr(config, s)).model_fields]
    given = {name: _recorded(name, config) for name in (*_OTHERS, *names) if name not in _HARMLESS}
    lora = config.lora  # a checkpoint with adapters has no other weights
    given |= {
        "lora.r": lora.r or None,
        "lora.alpha": lora.scale or None,
        "lora.target_modules": lora.target_modules if lora.r else None,
        "model.path": config.model.path if lora.r else None,
    }
    return json.loads(json.dumps(given))


def _recorded(name: str, config: Config) -> Any:
    section, _, field = name.partition(".")
    value = getattr(getattr(config, section), field)
    return _contents(value) if isinstance(value, Path) else redacted(value, field)


def _contents(file: Path) -> str:
    try:
        return f"a file with BLAKE3 {blake3.blake3(file.expanduser().read_bytes()).hexdigest()[:16]}"
    except OSError:
        return "a file that is not here"  # the process that needs it says so


def find_checkpoint(config: Config, say: Callable[[str], None] = print) -> str:
    """The checkpoint to resume from, "" for a fresh start. Raises UserError rather than guess."""
    output_dir = config.run.output_dir
    checkpoints = output_dir / CHECKPOINTS
    if not config.run.resume:
        if step_dirs(checkpoints):
            raise earlier_run(output_dir, "checkpoints")
        return ""
    folder = newest_valid(checkpoints, say)
    if folder is None:
        raise no_checkpoint(output_dir, "valid ", is_empty=not step_dirs(checkpoints))
    return str(folder)


def _read_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / COMMIT).read_text())


def newest_valid(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every file is as committed. Says which ones it skips and why."""
    for folder in reversed(step_dirs(checkpoints)):
        problem = _problem(folder)
        if problem is None:
            return folder
        say(f"checkpoint {folder} is skipped: {problem}")
    return None


def _problem(folder: Path) -> str | None:
    try:
        record = _read_record(folder)
        expected_digest, expected = record.pop("blake3"), record["files"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{COMMIT} cannot be read: {error!r}"
    if digest(record) != expected_digest:
        return f"{COMMIT} differs from what was committed"
    for name, info in expected.items():
        try:
            if file_record(folder / name) != info:
                return f"{name} differs from what was committed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def read_progress(folder: Path, world_size: int, zero_stage: int, stream: dict[str, Any]) -> Progress:
    """Raises UserError if the checkpoint belongs to another layout or another stream of groups."""
    commit = _read_record(folder)
    for name, now in (("world_size", world_size), ("zero_stage", zero_stage)):
        if commit[name] != now:
            raise UserError(f"{folder} was saved with {name} {commit[name]}, this run has {now}; resume with the same")
    before = commit["stream"]
    changed = [f"{name}={now!r} (was {before.get(name)!r})" for name, now in stream.items() if before.get(name) != now]
    if changed:
        raise UserError(
            f"{folder}: these settings define which groups come next and may not change on resume: {', '.join(changed)}"
        )
    return Progress(**{name: commit[name] for name in Progress.__dataclass_fields__} | {"stream": stream})


def base_fingerprint(engine: PolicyEngine) -> str:
    """Of the frozen weights under adapters. Every rank calls it; the result is rank 0's."""
    return digest(engine.base_checksums())[:32]


def with_fingerprints(progress: Progress, found: dict[str, Any], output_dir: Path) -> Progress:
    """The progress with these fingerprints. Raises UserError if a resumed run's changed.

    found: by name; "" is not known, as a replay knows neither rows nor tokenizer: what the checkpoint knows stays.
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
