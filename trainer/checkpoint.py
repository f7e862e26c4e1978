"""Checkpoints: whole or invisible, and each one a model that transformers and vLLM load as it is.

    checkpoints/step_000040/  config.json  model.safetensors  tokenizer…      a Hugging Face folder
                              trainer/state/…                                 DeepSpeed: optimizer, scheduler, weights
                              commit.json                                     cursor, version, digest of every file

commit.json is written last and the folder becomes visible by one rename; DeepSpeed's own `latest` file is written
before all ranks have saved, so it is neither written nor read. Resuming takes the newest folder whose digests hold
and names every one it skips. DeepSpeed's pickles are read with weights_only=True and three allowed classes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common import durable, weights
from common.config import UserError
from trainer.engine import Engine
from trainer.exchange import Exchange

COMMIT = "commit.json"
_STATE_TAG = "state"


@dataclass(frozen=True)
class Progress:
    """Everything a resumed trainer needs beside tensors."""

    run_id: str
    batch: int  # batches of rollouts trained
    cursor: int  # groups trained
    policy_version: int  # optimizer steps applied
    step: int  # optimizer steps tried
    num_tokens: int  # completion tokens trained
    tombstones: int
    stream: dict[str, Any]  # settings that define the stream of groups; they may not change on resume


def step_dir(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def save(engine: Engine, exchange: Exchange, tokenizer: Any, checkpoints: Path, progress: Progress, keep: int) -> None:
    """Every rank calls it. When it returns, the checkpoint survives a crash."""
    temporary = checkpoints / f"{durable.TEMPORARY}step_{progress.step:06d}"
    if exchange.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        durable.failpoint("checkpoint.started")
    exchange.barrier()
    engine.ds.save_checkpoint(str(temporary / "trainer"), tag=_STATE_TAG, save_latest=False)
    durable.failpoint("checkpoint.engine")
    save_model(engine, exchange, tokenizer, temporary)
    exchange.barrier()
    if exchange.rank == 0:
        files = {str(p.relative_to(temporary)): asdict(weights.file_info(p)) for p in _files(temporary)}
        commit = asdict(progress) | {"files": files, "world_size": exchange.world_size, "zero_stage": engine.stage}
        durable.write_file(temporary / COMMIT, json.dumps(commit, indent=1).encode())
        final = step_dir(checkpoints, progress.step)
        if final.exists():  # a resumed run reaches the same step again
            durable.remove_dir(final)
        durable.commit_dir(temporary, final)
        durable.failpoint("checkpoint.committed")
        for old in sorted(checkpoints.glob("step_*"))[:-keep]:
            durable.remove_dir(old)
    exchange.barrier()


def save_model(engine: Engine, exchange: Exchange, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder: weights, config, generation config, tokenizer. Every rank calls it; rank 0 writes."""
    state = dict(engine.full_parameters(lambda _: exchange.rank == 0))
    if exchange.rank == 0:
        if engine.tied_embeddings and "lm_head.weight" not in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]  # save_pretrained drops it again, knowingly
        engine.model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)


def commit_final(engine: Engine, exchange: Exchange, tokenizer: Any, output_dir: Path) -> None:
    """The trained model as output_dir/final, replaced as a whole."""
    temporary, final = output_dir / f"{durable.TEMPORARY}final", output_dir / "final"
    if exchange.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    exchange.barrier()
    save_model(engine, exchange, tokenizer, temporary)
    if exchange.rank == 0:
        if final.exists():
            durable.remove_dir(final)
        durable.commit_dir(temporary, final)
    exchange.barrier()


def newest_valid(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every file is as committed. Says which ones it skips and why."""
    for folder in sorted(checkpoints.glob("step_*"), reverse=True):
        problem = _problem(folder)
        if problem is None:
            return folder
        say(f"checkpoint {folder} is skipped: {problem}")
    return None


def read_progress(folder: Path, world_size: int, zero_stage: int, stream: dict[str, Any]) -> Progress:
    """Raises UserError if the checkpoint belongs to another layout or another stream of groups."""
    commit = json.loads((folder / COMMIT).read_text())
    for name, now in (("world_size", world_size), ("zero_stage", zero_stage)):
        if commit[name] != now:
            raise UserError(f"{folder} was saved with {name} {commit[name]}, this run has {now}; resume with the same")
    changed = [
        f"{k}={now!r} (was {commit['stream'].get(k)!r})" for k, now in stream.items() if commit["stream"].get(k) != now
    ]
    if changed:
        raise UserError(
            f"{folder}: these settings define which groups come next and may not change on resume: {', '.join(changed)}"
        )
    return Progress(**{name: commit[name] for name in Progress.__dataclass_fields__})


def load(engine: Engine, folder: Path) -> None:
    """Restores weights, optimizer and scheduler. Every rank calls it."""
    engine.ds.checkpoint_engine.load = _load_without_code
    path, _ = engine.ds.load_checkpoint(str(folder / "trainer"), tag=_STATE_TAG)
    if path is None:
        raise UserError(f"{folder} holds no DeepSpeed state for this rank")


def _load_without_code(path: str, map_location: Any = None) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != COMMIT)


def _problem(folder: Path) -> str | None:
    try:
        expected = json.loads((folder / COMMIT).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{COMMIT} cannot be read: {error}"
    for name, info in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if asdict(weights.file_info(path)) != info:
            return f"{name} differs from what was committed"
    return None
