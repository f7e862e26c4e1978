"""Rehearsal of a run's later work, once and small, before its first step: what cannot work ends the run now.

    longest row   forward and backward of the longest prompt and completion, by policy, critic and reference; its weight
                  is 0, so that it adds nothing to the first step. Attention that a GPU cannot compile, forward or
                  backward, is computed without a compiler from then on, by all ranks
    save          every file of a checkpoint and of final/, with one tensor in the place of all, in a folder beside them
                  that is renamed, read back and removed
    room          on the disk, for the model and one checkpoint

Not rehearsed: the bytes of weights and optimizer, which cost as much as a save; an optimizer step, which changes the
weights and comes seconds later; publishing, reload and proof, which version 0 goes through before any group. The
sampler rehearses its own part (sampler/rehearsal.py). A resumed run has done all of it.
"""

import shutil
import time
from functools import partial
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
from trainer.engine.abandoned_kinds import agree_on_kinds
from trainer.loop import Trainer
from trainer.save.checkpoint import CRITIC, save_model
from trainer.save.disk import DiskTrouble, on_rank_0

_OPTIMIZER = 12  # bytes per parameter: AdamW's moments and float32 weights
_SAMPLE = "1 + 1 = 2, and <b>é</b>\n"


def rehearse(trainer: Trainer) -> None:
    """Rehearses the longest row and a save. Every rank calls it. Raises UserError, on the rank that failed."""
    start = time.monotonic()
    _train_longest(trainer)
    _save(trainer)
    if trainer.exchange.rank == 0:
        say(f"rehearsal: the longest row and a save work ({time.monotonic() - start:.1f} s)")


def _train_longest(trainer: Trainer) -> None:
    report_progress("rehearsing the longest row")
    config, models = trainer.config, trainer.batch.models
    # on a CPU one completion suffices: the row tests time there, and memory on a GPU
    count = config.sampler.num_generations if devices.count() else 1
    completion = [0] * config.sampler.max_completion_length
    row = pack([([0] * config.data.max_prompt_length, [completion] * count)], models.packing)
    zeros = torch.zeros(sum(row.lengths))
    if models.reference:
        models.reference.score(row)
    if trainer.critic:
        trainer.critic.backward(ValueBatch(row, zeros, zeros, zeros))
    found = trainer.engine.backward(MicroBatch(row, zeros, None, zeros, zeros, zeros.long()))
    if devices.count():
        agree_on_kinds(trainer.exchange, failed_kinds())
    if not found.isfinite().all():
        raise UserError(
            f"{config.model.path} has no finite log-probs for {config.data.max_prompt_length} + "
            f"{config.sampler.max_completion_length} tokens (data.max_prompt_length, sampler.max_completion_length): "
            "smaller ones, or another model.dtype, may work"
        )


def _save(trainer: Trainer) -> None:
    report_progress("rehearsing a save")
    config, exchange, output_dir = trainer.config, trainer.exchange, trainer.config.run.output_dir
    folder, lacks = output_dir / f"{durable.TEMPORARY}rehearsal", list[str]()
    save = partial(save_model, exchange=exchange, tokenizer=trainer.tokenizer, tensors=slice(1))
    try:
        on_rank_0(exchange, partial(_prepare, config, folder))
        lacks += save(trainer.engine, folder=folder)[1]
        lacks += save(trainer.critic, folder=folder / CRITIC)[1] if trainer.critic else []
        on_rank_0(exchange, partial(_finish, trainer, folder))
    except (OSError, DiskTrouble) as error:
        raise UserError(f"nothing can be saved in {output_dir}: {error}; set another run.output_dir") from error
    if lacks:
        raise UserError(f"final/ would be incomplete: {'; '.join(lacks)}. Mend the files of {config.model.path}")


def _prepare(config: Config, folder: Path) -> None:
    durable.remove_dir(folder)
    durable.make_dir(folder)
    if config.trainer.saves_checkpoints:  # checkpoints may be on another disk
        other = folder.parent / CHECKPOINTS / folder.name
        durable.make_dir(other)
        durable.write_file(other / COMMIT, b"{}")
        durable.remove_dir(other)


def _finish(trainer: Trainer, folder: Path) -> None:
    """Finishes the rehearsed save with model card, commit record and rename, then reads it back and removes it."""
    write_model_card(folder.parent, folder, version=0)
    durable.write_file(folder / COMMIT, b"{}")
    renamed = folder.with_name(f"{folder.name}-renamed")
    durable.replace_dir(folder, renamed)
    if not trainer.config.lora.r:  # adapters are small, and not a model on their own
        _read_back(trainer, renamed)
        _require_room(trainer)
    durable.remove_dir(renamed)


def _read_back(trainer: Trainer, folder: Path) -> None:
    try:
        again = load_tokenizer(str(folder), None, trainer.config.model.trust_remote_code)
        same = again(_SAMPLE)["input_ids"] == trainer.tokenizer(_SAMPLE)["input_ids"]
        wrong = "" if same else "it reads texts as other tokens"
    except Exception as error:  # a tokenizer's own code may raise what it likes
        wrong = with_type(error)
    if wrong:
        say(f"the tokenizer that is saved with the model differs from that of model.path: {wrong[:300]}")


def _require_room(trainer: Trainer) -> None:
    """Raises UserError if the disk has no room for final/ and, if checkpoints are saved, for one of them."""
    output_dir, models = trainer.config.run.output_dir, [trainer.engine, *filter(None, [trainer.critic])]
    tensors = [tensor for model in models for tensor in model.tensors]
    weights, trained = sum(tensor.form.nbytes for tensor in tensors), sum(tensor.form.numel() for tensor in tensors)
    needs = {output_dir: weights}
    if trainer.config.trainer.saves_checkpoints:
        needs[output_dir / CHECKPOINTS] = weights + _OPTIMIZER * trained
    for place, size in needs.items():
        usage = shutil.disk_usage(place)
        if usage.total and usage.free < size:
            has, needed = f"{usage.free / 1e9:.1f} GB free", f"{size / 1e9:.1f}"
            raise UserError(
                f"{place} has {has}, and what is saved there takes {needed}; make room, or set another run.output_dir"
            )
