"""Checkpoints: each is complete or invisible, and is a model that transformers and vLLM load.

    checkpoints/step_000040/
        config.json  model.safetensors  tokenizer…    a Hugging Face folder, or peft's with LoRA
        trainer/state/…                               DeepSpeed: optimizer, scheduler, weights
        critic/                                       the same for the critic, if there is one
        commit.json                                   RunState, layout, digest of every file

commit.json is written last, and the folder becomes visible by one rename. DeepSpeed would write its
own `latest` file before all ranks have saved, so that file is neither written nor read.
trainer/save/resume.py chooses the checkpoint from which a run resumes.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import blake3
import torch

from common import durable
from common.errors import UserError
from common.failpoints import failpoint
from common.files import pieces
from common.files.run_folder import COMMIT, step_dir, step_dirs
from trainer.engine import other_layout
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_insides import STATE_TAG, load_state, state_to_save
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.optimizer import keeping_settings
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save.disk import (
    make_empty_folder,
    reporting_failed_deletion,
    retry_on_disk_trouble,
    sharing_disk_trouble,
    temporary_name,
)
from trainer.save.model_files import weight_files, write_other_files, write_safetensors

CRITIC = "critic"
# size and digest of each file, as `pieces.record` returns them
FileRecords = dict[str, dict[str, Any]]  # by the file's path within the checkpoint
Written = dict[Path, dict[str, Any]]  # by the file's full path


@dataclass(frozen=True)
class RunState:
    """What a resumed trainer needs besides tensors: counters, settings and fingerprints."""

    run_id: str
    batch: int  # batches of rollouts trained
    cursor: int  # groups trained
    policy_version: int  # optimizer steps applied
    step: int  # optimizer steps tried
    num_tokens: int  # completion tokens trained
    tombstones: int  # groups that failed and were left out
    stream: dict[str, Any]  # settings that may not change on resume, as from `stream_settings`
    skipped_in_a_row: int = 0  # consecutive steps, up to the last one tried, that were not finite
    skipped_steps: int = 0  # steps tried and not applied, because something was not finite
    # the variance threshold τ of group_ppo's next batch (segments.py); None: the setting's value
    threshold: float | None = None
    dataset_fingerprint: str = ""  # of the samplers' training rows; "" = unknown, as in a replay
    tokenizer_hash: str = ""  # of the samplers' tokenizer; "" = unknown
    base_fingerprint: str = ""  # of the frozen weights under adapters; "" if all are trained


def save(
    engine: PolicyEngine,
    collectives: Collectives,
    tokenizer: Any,
    checkpoints: Path,
    run_state: RunState,
    keep: int,
    critic: Critic | None = None,
) -> None:
    """Saves a checkpoint that survives a crash, and deletes old ones. Every rank calls it.

    checkpoints: the folder of all checkpoints. keep: how many checkpoints stay, including this one.
    Raises DiskTrouble or Interrupted.
    """
    # a folder that has this name already is damaged, or its rename did not reach the disk
    final = step_dir(checkpoints, run_state.step)
    attempt = partial(_save_once, engine, critic, collectives, tokenizer, run_state, final)
    retry_on_disk_trouble(collectives, final.name, attempt, temporary_name(final))
    if collectives.rank == 0:
        failpoint("checkpoint.committed")
        with reporting_failed_deletion("an old checkpoint"):
            _prune(checkpoints, run_state.step, keep)


def _save_once(
    engine: PolicyEngine,
    critic: Critic | None,
    collectives: Collectives,
    tokenizer: Any,
    run_state: RunState,
    final: Path,
) -> None:
    """Writes a checkpoint under a temporary name, and renames the complete folder to `final`."""
    folder = temporary_name(final)
    make_empty_folder(collectives, folder)
    if collectives.rank == 0:
        failpoint("checkpoint.started")

    written = _save_state(engine, collectives, folder / "trainer")
    if critic is not None:
        written |= _save_state(critic, collectives, folder / CRITIC / "trainer")
    failpoint("checkpoint.engine")
    written |= save_models(engine, critic, collectives, tokenizer, folder)

    records = {str(path.relative_to(folder)): record for path, record in written.items()}
    records_by_rank = collectives.gather(json.dumps(records))
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            _write_commit(folder, run_state, engine, collectives.world_size, records_by_rank)
            durable.replace_dir(folder, final)


def _save_state(engine: DeepSpeedModel, collectives: Collectives, folder: Path) -> Written:
    """Writes this rank's part of a model's DeepSpeed state. Returns the files it wrote."""
    only_adapters = engine.adapter_settings is not None
    states = state_to_save(engine.ds, folder, adapters_alone=only_adapters)
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            durable.make_dir(folder / STATE_TAG)
    written: Written = {}
    with sharing_disk_trouble(collectives):
        for path, state in states.items():
            written[path] = pieces.write(path, partial(torch.save, state))
    return written


def _write_commit(
    folder: Path,
    run_state: RunState,
    engine: PolicyEngine,
    world_size: int,
    records_by_rank: list[str],
) -> None:
    """Writes commit.json.

    records_by_rank: each rank's FileRecords as JSON, of the large files that the rank digested
    while it wrote them. All other files are small, and are read again for their digests.
    """
    records: FileRecords = {}
    for text in records_by_rank:
        records |= json.loads(text)
    files: FileRecords = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != COMMIT:
            name = str(path.relative_to(folder))
            files[name] = records.get(name) or pieces.record(path)
    commit_record = asdict(run_state) | {
        "files": files,
        "world_size": world_size,
        "zero_stage": engine.stage,
        "tensor_parallel_size": engine.tp_size,
    }
    commit_record["blake3"] = digest(commit_record)
    durable.write_file(folder / COMMIT, json.dumps(commit_record, indent=1).encode())


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint's commit.json, without checking its digest."""
    return json.loads((folder / COMMIT).read_text())


def digest(record: dict[str, Any]) -> str:
    """Returns the BLAKE3 digest of a record as JSON, in hexadecimal digits."""
    return blake3.blake3(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _prune(checkpoints: Path, newest_step: int, keep: int) -> None:
    """Deletes all checkpoints except the `keep` newest ones up to `newest_step`.

    Checkpoints of later steps are also deleted, because they were skipped as damaged when the run
    resumed.
    """
    folders = step_dirs(checkpoints)
    num_valid = folders.index(step_dir(checkpoints, newest_step)) + 1
    damaged = folders[num_valid:]
    old = folders[: max(0, num_valid - keep)]
    for folder in damaged + old:
        durable.remove_dir(folder)


def save_models(
    engine: PolicyEngine,
    critic: Critic | None,
    collectives: Collectives,
    tokenizer: Any,
    folder: Path,
) -> Written:
    """Writes the policy into `folder`, and the critic, if there is one, into folder/critic.

    Every rank calls it. Returns the weight files that this rank wrote. Raises DiskTrouble.
    """
    written = save_model(engine, collectives, tokenizer, folder).written
    if critic is not None:
        written |= save_model(critic, collectives, tokenizer, folder / CRITIC).written
    return written


@dataclass(frozen=True)
class SavedModel:
    """What `save_model` wrote on this rank, and what it could not write."""

    written: Written  # the weight files that this rank wrote
    missing: list[str]  # on rank 0: what the folder lacks, with reasons, as from `write_side_files`


def save_model(
    engine: DeepSpeedModel,
    collectives: Collectives,
    tokenizer: Any,
    folder: Path,
    max_tensors: int | None = None,
) -> SavedModel:
    """Writes a model as a Hugging Face folder: weights, config, generation config, tokenizer.

    With LoRA it is a peft folder with adapters, their config and the tokenizer, for
    PeftModel.from_pretrained(base, folder). Every rank calls it and writes its share of the weight
    files; rank 0 writes the other files. max_tensors: how many tensors are written, None = all.
    Raises DiskTrouble.
    """
    files = weight_files(engine, collectives.world_size, max_tensors)
    own_files = list(files)[collectives.rank :: collectives.world_size]
    own_names: set[str] = set()
    for file in own_files:
        own_names.update(tensor.name for tensor in files[file])
    all_tensors = list(chain.from_iterable(files.values()))  # gathering is a collective
    on_host = dict(engine.gathered_tensors(all_tensors, own_names.__contains__))

    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            folder.mkdir(exist_ok=True)
    written: Written = {}
    with sharing_disk_trouble(collectives):
        for file in own_files:
            content = {tensor.name: on_host[tensor.name] for tensor in files[file]}
            write_content = partial(write_safetensors, content)
            written[folder / file] = pieces.write(folder / file, write_content)
    missing: list[str] = []
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            missing = write_other_files(engine, tokenizer, folder, files)
    return SavedModel(written, missing)


def restore(engine: PolicyEngine, folder: Path, critic: Critic | None = None) -> None:
    """Restores weights, Adam's moments and the number of steps from a checkpoint.

    The optimizers keep this run's settings, such as the learning rate. Every rank calls it. The
    number of ranks and the ZeRO stage may differ from those of the saving run. Raises UserError if
    the checkpoint lacks a critic that this run needs.
    """
    record = read_record(folder)
    stage = record["zero_stage"]
    num_ranks = record["world_size"]
    tp_size = record.get("tensor_parallel_size", 1)  # checkpoints of older versions lack it
    _restore_state(engine, folder, stage, num_ranks, tp_size)
    if critic is None:
        return
    if not (folder / CRITIC).is_dir():
        raise UserError(
            f"{folder} holds no critic, because its run did not set algorithm.adv_estimator=gae. "
            f"Start a new run from its policy: model.path={folder} run.resume=false, "
            "with a different run.output_dir"
        )
    _restore_state(critic, folder / CRITIC, stage, num_ranks, tp_size)


def _restore_state(
    engine: DeepSpeedModel, folder: Path, stage: int, num_ranks: int, tp_size: int
) -> None:
    """Restores one model and its optimizer from the folder of a checkpoint.

    stage, num_ranks, tp_size: the saving run's ZeRO stage, number of ranks and number of ranks that
    shared each layer (tensor parallelism). This run's own values are those of the engine.
    """
    # with adapters the frozen weights come from model.path, not from the file
    only_adapters = engine.adapter_settings is not None
    has_same_stage = (engine.stage, engine.tp_size) == (stage, tp_size)
    # ZeRO 0 divides nothing between ranks, so any number of ranks can load what it saved
    has_same_shards = has_same_stage and (engine.world_size == num_ranks or stage == 0)
    with keeping_settings(engine.optimizer, engine.ds.lr_scheduler):
        if has_same_shards:
            is_loaded = load_state(engine.ds, folder / "trainer", adapters_alone=only_adapters)
            if not is_loaded:
                raise UserError(f"{folder} holds no DeepSpeed state for this rank")
        else:
            other_layout.restore(engine, folder / "trainer", stage, num_ranks, tp_size)
