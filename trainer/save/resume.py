"""Choice of the checkpoint to resume from, and checks that the run continues its stream of groups.

Groups are numbered. The problem of a group follows from its number, the seed, the rows that are
left after filtering, and the sizes of batches. So these are compared with what the checkpoint
recorded, before a model loads:

    settings       those of `data` and `prompt` except _MAY_CHANGE, and _OTHER_SETTINGS
    files          the contents of template files, whatever their paths are
    adapters       their shape

Before the first step, fingerprints are compared, too: those of the samplers' rows and tokenizer,
which the first sampler reports, and that of the frozen weights under adapters, which a checkpoint
does not hold. All other settings may change, as docs/running.md says. intact_checkpoints.py finds
out which checkpoints are damaged.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3

from common.config import Config
from common.errors import PeerEnded, UserError
from common.files.run_folder import CHECKPOINTS, earlier_run, no_checkpoint, step_dir, step_dirs
from common.processes.exits import USER_ERROR
from common.processes.watchdog import report_progress
from common.redact import redacted
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save.checkpoint import RunState, digest, read_record
from trainer.save.intact_checkpoints import newest_valid, with_right_sizes

# why a fingerprint differs, by its name in RunState
_REASONS = {
    "dataset_fingerprint": (
        "rows of data.train have changed, or more of them are too long or have no answer"
    ),
    "tokenizer_hash": "model.path has a different tokenizer",
    "base_fingerprint": "model.path, model.revision or the files there have changed",
}
_SECTIONS = ("data", "prompt")
_MAY_CHANGE = ("data.eval",)  # fields of these sections that do not affect training
_OTHER_SETTINGS = (  # single settings of other sections
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

    The keys are dotted names, such as "run.seed". The values can be written as JSON and hold no
    secrets.
    """
    names = list(_OTHER_SETTINGS)
    for section in _SECTIONS:
        fields = type(getattr(config, section)).model_fields
        names += [f"{section}.{field}" for field in fields]
    settings = {name: _setting_value(name, config) for name in names if name not in _MAY_CHANGE}
    settings |= _adapter_settings(config)
    # tuples become lists, so that the values equal those that are read from a commit.json
    return json.loads(json.dumps(settings))


def _adapter_settings(config: Config) -> dict[str, Any]:
    """Returns the LoRA settings that may not change on resume. Without LoRA they are null.

    With LoRA a checkpoint holds only adapters, which fit only their own base model and shape.
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
    """Returns the value of a setting such as "algorithm.beta", as it is written to a checkpoint."""
    section_name, _, field = name.partition(".")
    section = getattr(config, section_name)
    value = getattr(section, field)
    if isinstance(value, Path):
        return _contents_digest(value)
    plain_value = section.model_dump(mode="json", include={field})[field]
    return redacted(plain_value, field)


def _contents_digest(path: Path) -> str:
    """Returns a text that tells files of different contents apart, wherever the files are."""
    try:
        contents = path.expanduser().read_bytes()
    except OSError:
        return "a file that is not here"  # the process that needs the file reports it
    return f"a file with BLAKE3 {blake3.blake3(contents).hexdigest()[:16]}"


def find_checkpoint(config: Config, say: Callable[[str], None] = print) -> str:
    """Returns the newest checkpoint whose files have the right sizes, or "" for a fresh start.

    Rank 0 calls it, before the ranks are connected. `verified` then reads the files on all ranks.
    Raises UserError if run.resume is not set but there are checkpoints, or if it is set but there
    is no valid checkpoint.
    """
    output_dir = config.run.output_dir
    folders = step_dirs(output_dir / CHECKPOINTS)
    if not config.run.resume:
        if folders:
            raise earlier_run(output_dir, "checkpoints")
        return ""
    newest = next(with_right_sizes(folders, say), None)
    if newest is None:
        raise no_checkpoint(output_dir, kind="valid ", is_empty=not folders)
    return str(newest)


def verified(
    config: Config, newest: str, collectives: Collectives, say: Callable[[str], None]
) -> str:
    """Returns the checkpoint to resume from, after all its files were read; "" for a fresh start.

    It is `newest`, or an older checkpoint if `newest` is damaged. newest: the result of
    `find_checkpoint` on rank 0, "" on the other ranks. Every rank calls it and gets the same
    result. If no checkpoint is valid, rank 0 raises UserError and the other ranks PeerEnded.
    """
    if not collectives.agree(bool(newest)):
        return ""
    output_dir = config.run.output_dir
    newest_folder = Path(newest) if newest else None
    folder = newest_valid(output_dir / CHECKPOINTS, collectives, say, newest_folder)
    if folder is None:
        if collectives.rank == 0:
            raise no_checkpoint(output_dir, kind="valid ", is_empty=False)
        raise PeerEnded("rank 0 ended", exit_code=USER_ERROR)
    # the models load next, for which the watchdog allows as much time as for the start
    report_progress("starting", starts=True)
    return str(folder)


def read_run_state(folder: Path, stream: dict[str, Any]) -> RunState:
    """Returns a checkpoint's run state, if this run continues the checkpoint's stream of groups.

    stream: this run's `stream_settings`. Raises UserError if they differ from those recorded.
    """
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
    """Returns a fingerprint of the frozen weights under adapters. Only rank 0's result counts.

    Every rank calls it.
    """
    return digest(engine.base_checksums())[:32]


def with_fingerprints(
    run_state: RunState, fingerprints: dict[str, Any], output_dir: Path
) -> RunState:
    """Returns the run state with these fingerprints. Raises UserError if any of them has changed.

    fingerprints: by name in RunState. An empty one is unknown, as in a replay, which has neither
    rows nor a tokenizer; the run state then keeps its own.
    """
    for name, now in fingerprints.items():
        before = getattr(run_state, name)
        if before and now and before != now:
            folder = step_dir(output_dir / CHECKPOINTS, run_state.step)
            raise UserError(
                f"the checkpoint of step {run_state.step} was trained with the {name} {before}, "
                f"now it is {now}: {_REASONS[name]}. Restore what has changed, "
                "or start a new run from the checkpoint's weights: "
                f"model.path={folder} run.resume=false run.output_dir={output_dir}-2"
            )
        if now:
            run_state = replace(run_state, **{name: now})
    return run_state
