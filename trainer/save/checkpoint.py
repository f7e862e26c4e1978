"""Checkpoints: each is whole or invisible, and a model that transformers and vLLM load as it is.

    checkpoints/step_000040/  config.json  model.safetensors  tokenizer…      a Hugging Face folder; with LoRA peft's
                              trainer/state/…                                 DeepSpeed: optimizer, scheduler, weights
                              critic/                                         where there is one, the same of it
                              commit.json                                     cursor, version, digest of every file

commit.json is written last and the folder becomes visible by one rename; DeepSpeed's own `latest` file is written
before all ranks have saved, so it is neither written nor read. trainer/save/resume.py chooses the one to go on from.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import torch

from common import durable
from common.errors import UserError
from common.failpoints import failpoint
from common.files import pieces
from common.files.run_folder import COMMIT, step_dir, step_dirs
from model.files import lora
from trainer.engine import other_layout
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_insides import STATE_TAG, load_state, state_to_save
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import adapters
from trainer.engine.optimizer import keeping_settings
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.save.disk import on_all_ranks, on_rank_0, reporting_failed_deletion, write_folder
from trainer.save.model_files import files_of, tensor_file, write_index, write_side_files

CRITIC = "critic"
Written = dict[Path, dict[str, Any]]  # file records by path, as pieces.record returns them


@dataclass(frozen=True)
class Progress:
    """The state that a resumed trainer needs beside tensors."""

    run_id: str
    batch: int  # batches of rollouts trained
    cursor: int  # groups trained
    policy_version: int  # optimizer steps applied
    step: int  # optimizer steps tried
    num_tokens: int  # completion tokens trained
    tombstones: int
    stream: dict[str, Any]  # settings that define the stream of groups; they may not change on resume
    skipped_in_a_row: int = 0  # consecutive steps, up to the last one tried, that were not finite
    skipped_steps: int = 0  # steps tried and not applied, because something was not finite
    threshold: float | None = None  # τ of group_ppo's next batch; None = group_variance_threshold
    dataset_fingerprint: str = ""  # identifies the samplers' training rows; "" = unknown, as in a replay
    tokenizer_hash: str = ""  # identifies the samplers' tokenizer; "" = unknown
    base_fingerprint: str = ""  # identifies the frozen weights under adapters; "" if all are trained


def save(
    engine: PolicyEngine,
    exchange: Exchange,
    tokenizer: Any,
    checkpoints: Path,
    progress: Progress,
    keep: int,
    critic: Critic | None = None,
) -> None:
    """Saves a checkpoint that survives a crash, on every rank. Raises DiskTrouble or Interrupted."""
    final = step_dir(checkpoints, progress.step)
    of_ranks: list[str] = []

    def fill(folder: Path) -> None:
        nonlocal of_ranks
        if exchange.rank == 0:
            failpoint("checkpoint.started")
        written = _save_state(engine, exchange, folder / "trainer")
        if critic:
            written |= _save_state(critic, exchange, folder / CRITIC / "trainer")
        failpoint("checkpoint.engine")
        written |= save_models(engine, critic, exchange, tokenizer, folder)
        of_ranks = exchange.gather(json.dumps({str(path.relative_to(folder)): of for path, of in written.items()}))

    def commit(folder: Path) -> None:
        # files that were digested while they were written; the others are small
        written = {name: of for own in of_ranks for name, of in json.loads(own).items()}
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMMIT)
        names = {str(path.relative_to(folder)): path for path in paths}
        files = {name: written.get(name) or pieces.record(path) for name, path in names.items()}
        layout = {"world_size": exchange.world_size, "zero_stage": engine.stage, "tensor_parallel_size": engine.tp_size}
        record = asdict(progress) | {"files": files} | layout
        durable.write_file(folder / COMMIT, json.dumps(record | {"blake3": digest(record)}, indent=1).encode())

    write_folder(exchange, final, commit, fill)  # an existing folder is damaged, or its rename did not reach the disk
    if exchange.rank == 0:
        failpoint("checkpoint.committed")
        with reporting_failed_deletion("an old checkpoint"):
            _prune(checkpoints, progress.step, keep)


def _save_state(engine: DeepSpeedModel, exchange: Exchange, folder: Path) -> Written:
    """Writes this rank's part of DeepSpeed's state. Returns the written files."""
    states = state_to_save(engine.ds, folder, adapters_alone=engine.adapter_settings is not None)
    written: Written = {}

    def write() -> None:
        for path, state in states.items():
            written[path] = pieces.write(path, partial(torch.save, state))

    on_rank_0(exchange, partial(durable.make_dir, folder / STATE_TAG))
    on_all_ranks(exchange, write)
    return written


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the commit record of a checkpoint, as it was written."""
    return json.loads((folder / COMMIT).read_text())


def digest(record: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _prune(checkpoints: Path, newest: int, keep: int) -> None:
    """Keeps the `keep` newest. Folders beyond `newest` were skipped as damaged on resuming, and are removed, too."""
    folders = step_dirs(checkpoints)
    end = folders.index(step_dir(checkpoints, newest)) + 1
    for old in folders[end:] + folders[: max(0, end - keep)]:
        durable.remove_dir(old)


def save_models(
    engine: PolicyEngine, critic: Critic | None, exchange: Exchange, tokenizer: Any, folder: Path
) -> Written:
    """Writes the policy's folder and the critic's in it, each as `save_model`. Returns the files of weights."""
    written, _ = save_model(engine, exchange, tokenizer, folder)
    if critic:
        written |= save_model(critic, exchange, tokenizer, folder / CRITIC)[0]
    return written


def save_model(
    engine: DeepSpeedModel, exchange: Exchange, tokenizer: Any, folder: Path, tensors: slice = slice(None)
) -> tuple[Written, list[str]]:
    """Writes a Hugging Face folder: weights, config, generation config, tokenizer. Every rank calls it, and writes its
    files of the weights; rank 0 writes the others.

    With LoRA a peft folder: adapters, their config and the tokenizer, for PeftModel.from_pretrained(base, folder).
    tensors: those to write. Returns this rank's files of weights, and what the folder lacks, as `write_side_files`.
    """
    settings, written, lacks = engine.adapter_settings, Written(), list[str]()
    wanted = (engine.tensors if settings is None else adapters(engine.model))[tensors]
    files = files_of(wanted, exchange.world_size) if settings is None else {lora.WEIGHTS: wanted}
    own = dict(list(files.items())[exchange.rank :: exchange.world_size])
    names = {tensor.name for of_file in own.values() for tensor in of_file}
    state = dict(engine.gathered_tensors(wanted, names.__contains__))

    def write() -> None:
        for name, of_file in own.items():
            content = tensor_file({tensor.name: state[tensor.name] for tensor in of_file})
            written[folder / name] = pieces.write(folder / name, content)

    def write_others() -> None:
        if settings is not None:
            durable.write_file(folder / lora.SETTINGS, settings)
        elif len(files) > 1:
            file_of = {tensor.name: name for name, of_file in files.items() for tensor in of_file}
            write_index(folder, file_of, sum(tensor.form.nbytes for tensor in wanted))
        lacks.extend(write_side_files(engine, tokenizer, folder, is_whole=settings is None))

    on_rank_0(exchange, partial(folder.mkdir, exist_ok=True))
    on_all_ranks(exchange, write)
    on_rank_0(exchange, write_others)
    return written, lacks


def restore(engine: PolicyEngine, folder: Path, critic: Critic | None = None) -> None:
    """Restores weights, Adam's moments and the number of steps; the optimizers keep this run's settings.

    Every rank calls it. The ranks and the ZeRO stage may be others than those that saved it. Raises UserError if the
    checkpoint lacks a critic that the run needs.
    """
    record = read_record(folder)
    saved_by = record["zero_stage"], record["world_size"], record.get("tensor_parallel_size", 1)
    _restore_state(engine, folder, *saved_by)
    if critic:
        if not (folder / CRITIC).is_dir():
            raise UserError(
                f"{folder} holds no critic: that run had no algorithm.adv_estimator=gae. Start a new run from its "
                f"policy: model.path={folder} run.resume=false, with another run.output_dir"
            )
        _restore_state(critic, folder / CRITIC, *saved_by)


def _restore_state(engine: DeepSpeedModel, folder: Path, stage: int, ranks: int, tp_size: int) -> None:
    is_lora = engine.adapter_settings is not None  # the frozen weights are those of model.path, and not in the file
    with keeping_settings(engine.optimizer, engine.ds.lr_scheduler):
        is_same = (engine.stage, engine.tp_size) == (stage, tp_size) and (engine.world_size == ranks or stage == 0)
        if not is_same:
            other_layout.restore(engine, folder / "trainer", stage, ranks, tp_size)
        elif not load_state(engine.ds, folder / "trainer", adapters_alone=is_lora):
            raise UserError(f"{folder} holds no DeepSpeed state for this rank")
