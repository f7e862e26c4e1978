"""Tries the work of a run on a small scale before the first step, so that a failure comes early.

    longest row   Policy and critic run forward and backward over the longest prompt and completion
                  that the settings allow, and the reference scores them. Their loss has weight 0,
                  so that nothing is added to the gradients of the first step. If a GPU cannot
                  compile a kind of attention, all ranks compute this kind uncompiled from then on.
    save          Every file of a checkpoint and of final/ is written, but with one tensor per
                  model. The folder is renamed, read back and removed.
    room          The disk must have room for the model and one checkpoint.

Some work is not rehearsed. Writing all weights and optimizer states would take as long as a save.
An optimizer step would change the weights, and the first one follows within seconds. Weights are
published and loaded as version 0 before any group is sampled. The sampler rehearses its own part
(sampler/rehearsal.py). A resumed run rehearses nothing, because it has done all of this before.
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

_OPTIMIZER_BYTES = 12  # per parameter: AdamW's two moments and the float32 master weight
_SAMPLE = "1 + 1 = 2, and <b>é</b>\n"  # digits, markup, a letter beyond ASCII, and a line end


def rehearse(trainer: Trainer) -> None:
    """Tries to train the longest row and to save the models. Every rank calls it.

    Raises UserError on a rank on which something fails.
    """
    start = time.monotonic()
    _train_longest(trainer)
    _save(trainer)
    if trainer.collectives.rank == 0:
        say(f"rehearsal: the longest row and a save work ({time.monotonic() - start:.1f} s)")


def _train_longest(trainer: Trainer) -> None:
    """Runs every model on the longest row that the settings allow, with weight 0.

    Raises UserError if a log-prob of the policy is not finite.
    """
    report_progress("rehearsing the longest row")
    config = trainer.config
    models = trainer.step_trainer.models

    # A whole group shows on a GPU whether memory suffices. On a CPU it would only take long.
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
        trainer.critic.backward(ValueBatch(row, old_values=zeros, returns=zeros, weights=zeros))
    batch = MicroBatch(
        row=row,
        old_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        weights=zeros,
        policy_versions=zeros.long(),
    )
    logprobs = trainer.engine.backward(batch)
    if devices.count():
        share_uncompiled_kinds(trainer.collectives, failed_kinds())
    if not logprobs.isfinite().all():
        raise UserError(
            f"{config.model.path} has no finite log-probs for {config.data.max_prompt_length} + "
            f"{config.sampler.max_completion_length} tokens (data.max_prompt_length, "
            "sampler.max_completion_length): smaller lengths or a different model.dtype may work"
        )


def _save(trainer: Trainer) -> None:
    """Tries to save the models. Raises UserError if a file cannot be written or is missing."""
    report_progress("rehearsing a save")
    config = trainer.config
    output_dir = config.run.output_dir
    try:
        missing = _save_one_tensor(trainer, output_dir / f"{durable.TEMPORARY}rehearsal")
    except (OSError, DiskTrouble) as error:
        raise UserError(
            f"nothing can be saved in {output_dir}: {error}; set a different run.output_dir"
        ) from error
    if missing:
        raise UserError(
            f"final/ would be incomplete: {'; '.join(missing)}. "
            f"Repair the files of {config.model.path}"
        )


def _save_one_tensor(trainer: Trainer, folder: Path) -> list[str]:
    """Saves one tensor of each model, and every other file of final/, into a temporary folder.

    At the end, rank 0 removes the folder. Returns a text for each file that could be neither
    written nor copied from the initial model; it names the file and the reason.
    """
    collectives = trainer.collectives
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            _make_folders(trainer.config, folder)
    saved = save_model(trainer.engine, collectives, trainer.tokenizer, folder, max_tensors=1)
    missing = saved.missing
    if trainer.critic:
        saved = save_model(
            trainer.critic, collectives, trainer.tokenizer, folder / CRITIC, max_tensors=1
        )
        missing += saved.missing
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            _finish_save(trainer, folder)
    return missing


def _make_folders(config: Config, folder: Path) -> None:
    """Makes an empty folder, and tries to write among the checkpoints.

    The folder of checkpoints may be on a different disk.
    """
    durable.remove_dir(folder)
    durable.make_dir(folder)
    if config.trainer.saves_checkpoints:
        checkpoint = folder.parent / CHECKPOINTS / folder.name
        durable.make_dir(checkpoint)
        durable.write_file(checkpoint / COMMIT, b"{}")
        durable.remove_dir(checkpoint)


def _finish_save(trainer: Trainer, folder: Path) -> None:
    """Writes the model card and the commit record, then renames the folder and removes it.

    If the folder holds a whole model, its tokenizer is read back, and room on the disk is checked.
    """
    write_model_card(folder.parent, folder, version=0)
    durable.write_file(folder / COMMIT, b"{}")
    renamed = folder.with_name(f"{folder.name}-renamed")
    durable.replace_dir(folder, renamed)
    if not trainer.config.lora.r:  # adapters need little room, and are no model to load
        _read_back(trainer, renamed)
        _require_room(trainer)
    durable.remove_dir(renamed)


def _read_back(trainer: Trainer, folder: Path) -> None:
    """Warns if the saved tokenizer cannot be loaded, or tokenizes a sample text differently."""
    difference = ""
    trust_remote_code = trainer.config.model.trust_remote_code
    try:
        loaded = load_tokenizer(str(folder), revision=None, trust_remote_code=trust_remote_code)
        if loaded(_SAMPLE)["input_ids"] != trainer.tokenizer(_SAMPLE)["input_ids"]:
            difference = "it splits texts into different tokens"
    except Exception as error:  # a tokenizer's own code may raise any exception
        difference = with_type(error)
    if difference:
        say(
            "the tokenizer that is saved with the model differs from that of model.path: "
            f"{difference[:300]}"
        )


def _require_room(trainer: Trainer) -> None:
    """Raises UserError if a disk has too little room for final/, or for a checkpoint."""
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

    A file system that does not report its size passes the check.
    """
    usage = shutil.disk_usage(folder)
    is_size_known = usage.total > 0
    if is_size_known and usage.free < size:
        raise UserError(
            f"{folder} has {usage.free / 1e9:.1f} GB free, but saving there takes up to "
            f"{size / 1e9:.1f} GB; make room, or set a different run.output_dir"
        )
