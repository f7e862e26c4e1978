"""Rehearsal of a run's later work, once and small, before its first step.

What cannot work ends the run now.

    longest row   forward and backward of the longest prompt and completion, by policy, critic and
                  reference. Its weight is 0, so that it adds nothing to the first step. Attention
                  that a GPU cannot compile, forward or backward, is computed without a compiler
                  from then on, by all ranks
    save          every file of a checkpoint and of final/, with one tensor in place of all tensors,
                  in a folder beside them that is renamed, read back and removed
    room          on the disk, for the model and one checkpoint

These are not rehearsed: the bytes of weights and optimizer, which cost as much as a save; an
optimizer step, which changes the weights and comes seconds later; publishing, reload and proof,
which version 0 goes through before any group. The sampler rehearses its own part
(sampler/rehearsal.py). A resumed run has done all of it.
"""

import shutil
import time
from pathlib import Path

import torch

from common import durable
from common.config import Config
from common.errors import UserError, with_type
from common.files.run_folder import CHECKPOINTS, COMMIT
from common.processes.exits import say
from common.processes.watchdog import report_progress
from model import devices
from model.compiled import failed_kinds
from model.packing import pack
from model.tokenizer import load_tokenizer
from report.model_card import write_model_card
from trainer.data.tensors import MicroBatch, ValueBatch
from trainer.engine.uncompiled_kinds import share_uncompiled_kinds
from trainer.loop import Trainer
from trainer.save.checkpoint import CRITIC, save_model
from trainer.save.disk import DiskTrouble, sharing_disk_trouble

_OPTIMIZER_BYTES = 12  # per parameter: AdamW's moments and float32 weights
_SAMPLE = "1 + 1 = 2, and <b>é</b>\n"


def rehearse(trainer: Trainer) -> None:
    """Rehearses the longest row and a save. Every rank calls it.

    Raises UserError on the rank that failed.
    """
    start = time.monotonic()
    _train_longest(trainer)
    _save(trainer)
    if trainer.collectives.rank == 0:
        say(f"rehearsal: the longest row and a save work ({time.monotonic() - start:.1f} s)")


def _train_longest(trainer: Trainer) -> None:
    """Trains the longest row with weight 0. Raises UserError if a log-prob is not finite."""
    report_progress("rehearsing the longest row")
    config = trainer.config
    models = trainer.step_trainer.models
    # on a CPU one completion suffices, because the row tests time there, and memory on a GPU
    num_completions = 1
    if devices.count():
        num_completions = config.sampler.num_generations
    prompt = [0] * config.data.max_prompt_length
    completion = [0] * config.sampler.max_completion_length
    row = pack([(prompt, [completion] * num_completions)], models.packing)
    zeros = torch.zeros(sum(row.lengths))
    if models.reference:
        models.reference.score(row)
    if trainer.critic:
        trainer.critic.backward(ValueBatch(row, zeros, zeros, zeros))
    logprobs = trainer.engine.backward(MicroBatch(row, zeros, None, zeros, zeros, zeros.long()))
    if devices.count():
        share_uncompiled_kinds(trainer.collectives, failed_kinds())
    if not logprobs.isfinite().all():
        raise UserError(
            f"{config.model.path} has no finite log-probs for {config.data.max_prompt_length} + "
            f"{config.sampler.max_completion_length} tokens (data.max_prompt_length, "
            "sampler.max_completion_length): smaller ones, or another model.dtype, may work"
        )


def _save(trainer: Trainer) -> None:
    """Rehearses a save. Raises UserError if a file cannot be written or would be missing."""
    report_progress("rehearsing a save")
    config = trainer.config
    output_dir = config.run.output_dir
    try:
        missing = _save_one_tensor(trainer, output_dir / f"{durable.TEMPORARY}rehearsal")
    except (OSError, DiskTrouble) as error:
        raise UserError(
            f"nothing can be saved in {output_dir}: {error}; set another run.output_dir"
        ) from error
    if missing:
        raise UserError(
            f"final/ would be incomplete: {'; '.join(missing)}. "
            f"Mend the files of {config.model.path}"
        )


def _save_one_tensor(trainer: Trainer, folder: Path) -> list[str]:
    """Tries a save into `folder` with one tensor of each model and all other files of final/.

    At the end, rank 0 removes the folder. Returns a text about each file that could be neither
    written nor copied from the initial model, with the reason.
    """
    collectives = trainer.collectives
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            _prepare(trainer.config, folder)
    saved = save_model(trainer.engine, collectives, trainer.tokenizer, folder, max_tensors=1)
    missing = saved.missing
    if trainer.critic:
        saved = save_model(
            trainer.critic, collectives, trainer.tokenizer, folder / CRITIC, max_tensors=1
        )
        missing += saved.missing
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            _finish(trainer, folder)
    return missing


def _prepare(config: Config, folder: Path) -> None:
    """Makes an empty folder, and tries one among the checkpoints, which may be on another disk."""
    durable.remove_dir(folder)
    durable.make_dir(folder)
    if config.trainer.saves_checkpoints:
        other = folder.parent / CHECKPOINTS / folder.name
        durable.make_dir(other)
        durable.write_file(other / COMMIT, b"{}")
        durable.remove_dir(other)


def _finish(trainer: Trainer, folder: Path) -> None:
    """Writes model card and commit record, renames the folder, reads it back and removes it."""
    write_model_card(folder.parent, folder, version=0)
    durable.write_file(folder / COMMIT, b"{}")
    renamed = folder.with_name(f"{folder.name}-renamed")
    durable.replace_dir(folder, renamed)
    if not trainer.config.lora.r:  # adapters are small, and not a model on their own
        _read_back(trainer, renamed)
        _require_room(trainer)
    durable.remove_dir(renamed)


def _read_back(trainer: Trainer, folder: Path) -> None:
    """Warns if the saved tokenizer cannot be loaded, or tokenizes a sample in another way."""
    try:
        loaded = load_tokenizer(str(folder), None, trainer.config.model.trust_remote_code)
        is_same = loaded(_SAMPLE)["input_ids"] == trainer.tokenizer(_SAMPLE)["input_ids"]
        difference = "" if is_same else "it reads texts as other tokens"
    except Exception as error:  # a tokenizer's own code may raise what it likes
        difference = with_type(error)
    if difference:
        say(
            "the tokenizer that is saved with the model differs from that of model.path: "
            f"{difference[:300]}"
        )


def _require_room(trainer: Trainer) -> None:
    """Raises UserError if the disk lacks room for final/, or for a checkpoint if one is saved."""
    tensors = list(trainer.engine.tensors)
    if trainer.critic:
        tensors += trainer.critic.tensors
    model_bytes = sum(tensor.form.nbytes for tensor in tensors)
    num_parameters = sum(tensor.form.numel() for tensor in tensors)
    output_dir = trainer.config.run.output_dir
    _require_free(output_dir, model_bytes)
    if trainer.config.trainer.saves_checkpoints:
        _require_free(output_dir / CHECKPOINTS, model_bytes + _OPTIMIZER_BYTES * num_parameters)


def _require_free(folder: Path, size: int) -> None:
    """Raises UserError if the folder's disk has less than `size` free bytes.

    Some file systems report none at all.
    """
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < size:
        raise UserError(
            f"{folder} has {usage.free / 1e9:.1f} GB free, and what is saved there takes "
            f"{size / 1e9:.1f}; make room, or set another run.output_dir"
        )
