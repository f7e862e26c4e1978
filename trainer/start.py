"""Start of the trainer from a checked config: cheap checks, process group, checkpoint, model, then the loop."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import durable
from common.config import Config
from common.errors import UserError
from common.files.run_folder import TRAINER_LOCK, sampler_log
from common.processes import exits, out_of_memory
from common.processes.certain_errors import raising_permanent_errors
from common.processes.watchdog import Watchdog
from common.wire import address
from model.files.folder import require_models, vocabulary
from model.tokenizer import check_vocabulary, tokenizer_of

if TYPE_CHECKING:
    from model.reference import Reference
    from trainer.engine.critic import Critic
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.ranks import Exchange
    from trainer.engine.sharded_reference import ShardedReference
    from trainer.loop import Trainer


def run(config: Config) -> None:
    """Trains until the end of the run. Raises UserError, Retryable or PeerEnded."""
    if config.trainer.epochs is not None:
        raise UserError("trainer.epochs is counted by bash launch.sh run; here set trainer.max_steps")
    require_models(config)
    output_dir = config.run.output_dir
    rank, limits = int(os.environ.get("RANK", "0")), config.channel
    log = sampler_log(output_dir, "sampler.0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(f"trainer rank {rank}", limits.stall_timeout_s, limits.connect_timeout_s, log))
        if rank == 0:
            in_use = lambda holder: UserError(  # noqa: E731
                f"{output_dir} is used by another trainer ({holder}); stop it, or set run.output_dir to a new folder"
            )
            stack.enter_context(durable.lock(output_dir / TRAINER_LOCK, in_use))
            if config.run.replay is None:
                address.require_free(config)
        stack.enter_context(out_of_memory.with_memory_advice("trainer"))
        what = f"the trainer does not start with {config.model.path}"
        # another rank may fail because rank 0 did
        with raising_permanent_errors(what) if rank == 0 else contextlib.nullcontext():
            trainer = _build_trainer(config, rank, stack)
        exits.limit_time(config.trainer.max_hours if rank == 0 else None)  # rank 0's clock decides for all ranks
        saved = "with a checkpoint" if config.trainer.saves_checkpoints else "without one (trainer.save_steps=0)"
        exits.defer_interrupts(f"stopping after this step, {saved}; again to stop at once" if rank == 0 else "")
        trainer.run()


def _build_trainer(config: Config, rank: int, stack: contextlib.ExitStack) -> Trainer:
    """Builds a trainer and fails early: on a wrong checkpoint before ranks meet, on a taken port before models load."""
    from trainer.algorithm.advantages import try_own_estimator
    from trainer.algorithm.losses import try_own_objective
    from trainer.engine.deepspeed_model import init_distributed
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.ranks import connect
    from trainer.loop import Trainer
    from trainer.record.rank_zero import open_rank_zero
    from trainer.rehearsal import rehearse
    from trainer.save import checkpoint, resume

    try_own_estimator(config)
    try_own_objective(config.algorithm)
    tokenizer = _tokenizer_to_save(config)

    stream = resume.stream_settings(config)
    resume_from, run_id, rank_zero = "", secrets.token_hex(8), None
    if rank == 0:
        resume_from = resume.find_checkpoint(config, exits.say)
        if resume_from:
            resume.read_progress(Path(resume_from), stream)
    init_distributed(config)
    exchange = connect(config)
    resume_from, run_id = resume.verified(config, resume_from, exchange, exits.say), exchange.broadcast_text(run_id)
    progress = checkpoint.Progress(run_id, 0, 0, 0, 0, 0, 0, stream)
    if resume_from:
        progress = resume.read_progress(Path(resume_from), stream)
    if rank == 0:
        resumed_at = (progress.step, progress.policy_version) if resume_from else (None, None)
        rank_zero = open_rank_zero(stack, config, progress.run_id, progress.batch, progress.cursor, resumed_at)
    engine = PolicyEngine(config, exchange.world_size, exchange.sequence_group).start()
    tokens = min(len(tokenizer), vocabulary(config.model))
    critic = _critic(config, exchange, tokens)
    if resume_from:
        checkpoint.restore(engine, Path(resume_from), critic)
    reference = _reference(config, engine, exchange, tokens)
    if rank == 0 and engine.packing == "separate":
        exits.say("rows are separate: the layers of this model cannot share a group's prompt")
    trainer = Trainer(config, engine, exchange, tokenizer, progress, rank_zero, reference, critic)
    if progress.step == 0:
        rehearse(trainer)
    return trainer


def _critic(config: Config, exchange: Exchange, vocab_size: int) -> Critic | None:
    from trainer.engine.critic import Critic

    if not config.algorithm.needs_critic:
        return None
    critic = Critic(config, exchange.world_size, exchange.sequence_group).start()
    check_vocabulary(critic.model, vocab_size, "critic")
    return critic


def _reference(
    config: Config, engine: PolicyEngine, exchange: Exchange, vocab_size: int
) -> Reference | ShardedReference | None:
    from model.reference import Reference
    from trainer.engine.sharded_reference import ShardedReference

    if config.reference_on != "trainer":
        return None
    reference: Reference | ShardedReference
    if engine.stage == 3 or engine.tp_size > 1:
        reference = ShardedReference(config, exchange, engine)
    else:
        policy = engine.model if config.reference_is_base else None
        reference = Reference(config, engine.device, policy, exchange.sequence_group)
    check_vocabulary(reference.model, vocab_size, "reference")
    return reference


def _tokenizer_to_save(config: Config) -> Any:
    """Loads the tokenizer with the chat template of training, without which a base model's final/ could not chat."""
    tokenizer = tokenizer_of(config.model)
    if config.prompt.chat_template is not None:
        tokenizer.chat_template = config.prompt.chat_template.read_text(encoding="utf-8")
    return tokenizer
