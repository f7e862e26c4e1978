"""Start of the trainer from a checked config.

The order is: cheap checks, process group, checkpoint, models, rehearsal, then the loop.
"""

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
    from trainer.engine.ranks import Collectives
    from trainer.engine.sharded_reference import ShardedReference
    from trainer.loop import Trainer


def run(config: Config) -> None:
    """Trains until the end of the run. Raises UserError, Retryable or PeerEnded."""
    if config.trainer.epochs is not None:
        raise UserError(
            "trainer.epochs is counted by bash launch.sh run; here set trainer.max_steps"
        )
    require_models(config)
    rank = int(os.environ.get("RANK", "0"))
    limits = config.channel
    peer_log = sampler_log(config.run.output_dir, "sampler.0")
    watchdog = Watchdog(
        f"trainer rank {rank}", limits.stall_timeout_s, limits.connect_timeout_s, peer_log
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(watchdog)
        if rank == 0:
            _reserve(config, stack)
        stack.enter_context(out_of_memory.with_memory_advice("trainer"))
        trainer = _start(config, rank, stack)
        # rank 0's clock decides for all ranks, and rank 0 answers an interrupt for all
        exits.limit_time(config.trainer.max_hours if rank == 0 else None)
        exits.defer_interrupts(_interrupt_note(config) if rank == 0 else "")
        trainer.run()


def _reserve(config: Config, stack: contextlib.ExitStack) -> None:
    """Makes sure that no other trainer works in the run folder, as long as `stack` is open.

    Raises UserError if another trainer has locked the folder, or if another process uses the port
    at which the samplers will connect.
    """
    output_dir = config.run.output_dir

    def in_use(holder: str) -> UserError:
        return UserError(
            f"{output_dir} is used by another trainer ({holder}); "
            "stop it, or set run.output_dir to a new folder"
        )

    stack.enter_context(durable.lock(output_dir / TRAINER_LOCK, in_use))
    if config.run.replay is None:
        address.require_free(config)


def _interrupt_note(config: Config) -> str:
    """Returns the message to the user at the first interrupt."""
    saved = "with a checkpoint"
    if not config.trainer.saves_checkpoints:
        saved = "without one (trainer.save_steps=0)"
    return f"stopping after this step, {saved}; again to stop at once"


def _start(config: Config, rank: int, stack: contextlib.ExitStack) -> Trainer:
    """Builds the trainer. On rank 0 an error that the next start would repeat becomes a UserError.

    Another rank may fail only because rank 0 did, so its error says nothing about the next start.
    """
    if rank != 0:
        return _build_trainer(config, rank, stack)
    with raising_permanent_errors(f"the trainer does not start with {config.model.path}"):
        return _build_trainer(config, rank, stack)


def _build_trainer(config: Config, rank: int, stack: contextlib.ExitStack) -> Trainer:
    """Builds a trainer, and fails early.

    A wrong checkpoint is reported before ranks meet, and a taken port before models load.
    """
    from trainer.algorithm.advantages import try_own_estimator
    from trainer.algorithm.losses import try_own_objective
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.process_group import init_distributed
    from trainer.engine.ranks import connect
    from trainer.loop import Trainer
    from trainer.record.rank_zero import open_rank_zero
    from trainer.rehearsal import rehearse
    from trainer.save import checkpoint, resume

    try_own_estimator(config)
    try_own_objective(config.algorithm)
    tokenizer = _tokenizer_to_save(config)

    stream = resume.stream_settings(config)
    resume_from = ""
    if rank == 0:
        resume_from = resume.find_checkpoint(config, exits.say)
        if resume_from:
            resume.read_run_state(Path(resume_from), stream)
    init_distributed(config)
    collectives = connect(config)
    resume_from = resume.verified(config, resume_from, collectives, exits.say)
    run_id = collectives.broadcast_text(secrets.token_hex(8))
    run_state = checkpoint.RunState(run_id, 0, 0, 0, 0, 0, 0, stream)
    resumed_at: tuple[int | None, int | None] = (None, None)
    if resume_from:
        run_state = resume.read_run_state(Path(resume_from), stream)
        resumed_at = (run_state.step, run_state.policy_version)
    rank_zero = None
    if rank == 0:
        rank_zero = open_rank_zero(
            stack, config, run_state.run_id, run_state.batch, run_state.cursor, resumed_at
        )

    engine = PolicyEngine(config, collectives.world_size, collectives.sequence_group).start()
    vocab_size = min(len(tokenizer), vocabulary(config.model))
    critic = _critic(config, collectives, vocab_size)
    if resume_from:
        checkpoint.restore(engine, Path(resume_from), critic)
    reference = _reference(config, engine, collectives, vocab_size)
    if rank == 0 and engine.packing == "separate":
        exits.say("rows are separate: the layers of this model cannot share a group's prompt")
    trainer = Trainer(
        config, engine, collectives, tokenizer, run_state, rank_zero, reference, critic
    )
    if run_state.step == 0:
        rehearse(trainer)
    return trainer


def _critic(config: Config, collectives: Collectives, vocab_size: int) -> Critic | None:
    from trainer.engine.critic import Critic

    if not config.algorithm.needs_critic:
        return None
    critic = Critic(config, collectives.world_size, collectives.sequence_group).start()
    check_vocabulary(critic.model, vocab_size, "critic")
    return critic


def _reference(
    config: Config, engine: PolicyEngine, collectives: Collectives, vocab_size: int
) -> Reference | ShardedReference | None:
    from model.reference import Reference
    from trainer.engine.sharded_reference import ShardedReference

    if config.reference_on != "trainer":
        return None
    reference: Reference | ShardedReference
    if engine.stage == 3 or engine.tp_size > 1:
        reference = ShardedReference(config, collectives, engine)
    else:
        policy = engine.model if config.reference_is_base else None
        reference = Reference(config, engine.device, policy, collectives.sequence_group)
    check_vocabulary(reference.model, vocab_size, "reference")
    return reference


def _tokenizer_to_save(config: Config) -> Any:
    """Returns the tokenizer with the chat template of training.

    Without the template a base model's final/ could not chat.
    """
    tokenizer = tokenizer_of(config.model)
    if config.prompt.chat_template is not None:
        tokenizer.chat_template = config.prompt.chat_template.read_text(encoding="utf-8")
    return tokenizer
