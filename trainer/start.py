"""Starts the trainer from a config that has been checked.

The order is: cheap checks, process group, checkpoint, models, rehearsal, and then the training
loop. Modules that import torch are imported inside functions, after the cheap checks.
"""

from __future__ import annotations

import contextlib
import functools
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
    from trainer.record.rank_zero import RankZero
    from trainer.save.checkpoint import RunState


def run(config: Config) -> None:
    """Trains until the end of the run.

    Raises UserError if the user has to change something, Retryable if a new start may succeed, and
    PeerEnded if a different process of the run has ended.
    """
    if config.trainer.epochs is not None:
        raise UserError(
            "only bash launch.sh run converts trainer.epochs into a number of steps; to start the "
            "trainer without it, set trainer.max_steps instead"
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
        if rank == 0:
            exits.limit_time(config.trainer.max_hours)
            exits.defer_interrupts(_interrupt_note(config))
        else:  # rank 0's clock decides for all ranks, and rank 0 prints the message for all ranks
            exits.limit_time(None)
            exits.defer_interrupts("")
        trainer.run()


def _reserve(config: Config, stack: contextlib.ExitStack) -> None:
    """Locks the run folder against other trainers until `stack` is closed.

    Raises UserError if a different trainer has locked the folder, or if the port at which the
    samplers will connect is taken.
    """
    output_dir = config.run.output_dir
    in_use = functools.partial(_folder_in_use, output_dir)
    stack.enter_context(durable.lock(output_dir / TRAINER_LOCK, in_use))
    if config.run.replay is None:
        address.require_free(config)


def _folder_in_use(output_dir: Path, holder: str) -> UserError:
    return UserError(
        f"{output_dir} is in use by another trainer ({holder}); "
        "stop that trainer, or set run.output_dir to a new folder"
    )


def _interrupt_note(config: Config) -> str:
    """Returns the message that the user sees at the first interrupt."""
    saved = "with a checkpoint"
    if not config.trainer.saves_checkpoints:
        saved = "without a checkpoint (trainer.save_steps=0)"
    return f"stopping after this step {saved}; interrupt again to stop immediately"


def _start(config: Config, rank: int, stack: contextlib.ExitStack) -> Trainer:
    """Builds the trainer. On rank 0, an error that every restart would meet becomes a UserError.

    The other ranks may fail merely because rank 0 has failed, so their errors do not tell whether a
    restart would fail.
    """
    if rank != 0:
        return _build_trainer(config, rank, stack)
    with raising_permanent_errors(f"the trainer does not start with {config.model.path}"):
        return _build_trainer(config, rank, stack)


def _build_trainer(config: Config, rank: int, stack: contextlib.ExitStack) -> Trainer:
    """Builds the trainer of this rank, with the cheapest checks first.

    A checkpoint that does not fit the settings is reported before the process group is formed, and
    a port that is taken before models are loaded.
    """
    from trainer.algorithm.advantages import try_own_estimator
    from trainer.algorithm.losses import try_own_objective
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.process_group import init_distributed
    from trainer.engine.ranks import connect
    from trainer.loop import Trainer
    from trainer.rehearsal import rehearse
    from trainer.save import checkpoint, resume

    # cheap checks
    try_own_estimator(config)
    try_own_objective(config.algorithm)
    tokenizer = _tokenizer_to_save(config)
    stream = resume.stream_settings(config)
    newest_checkpoint = ""
    if rank == 0:
        newest_checkpoint = _find_checkpoint(config, stream)

    # process group
    init_distributed(config)
    collectives = connect(config)

    # checkpoint
    resume_from = resume.verified(config, newest_checkpoint, collectives, exits.say)
    run_id = collectives.broadcast_text(secrets.token_hex(8))
    run_state = _run_state(resume_from, stream, new_run_id=run_id)
    rank_zero = None
    if rank == 0:
        rank_zero = _open_rank_zero(config, run_state, is_resumed=bool(resume_from), stack=stack)

    # models
    engine = PolicyEngine(config, collectives.world_size, collectives.sequence_group).start()
    vocab_size = min(len(tokenizer), vocabulary(config.model))
    critic = _critic(config, collectives, vocab_size)
    if resume_from:
        checkpoint.restore(engine, Path(resume_from), critic)
    reference = _reference(config, engine, collectives, vocab_size)
    if rank == 0 and engine.packing == "separate":
        exits.say(
            "every completion is trained in a separate row with its prompt, because the layers of "
            "this model cannot share one prompt among the completions of a group"
        )

    # rehearsal
    trainer = Trainer(
        config, engine, collectives, tokenizer, run_state, rank_zero, reference, critic
    )
    if run_state.step == 0:  # a resumed run has already done what the rehearsal tries
        rehearse(trainer)
    return trainer


def _find_checkpoint(config: Config, stream: dict[str, Any]) -> str:
    """Returns the newest checkpoint whose files have the recorded sizes, or "" for a new run.

    stream: the settings that define the stream of groups, from `stream_settings`. Raises UserError
    if the checkpoint was made with different ones, or if run.resume contradicts the run folder.
    """
    from trainer.save import resume

    newest_checkpoint = resume.find_checkpoint(config, exits.say)
    if newest_checkpoint:
        # Only the check of the stream counts here. If a file turns out to be damaged when all ranks
        # read the checkpoint, the run resumes from an older one.
        resume.read_run_state(Path(newest_checkpoint), stream)
    return newest_checkpoint


def _run_state(resume_from: str, stream: dict[str, Any], new_run_id: str) -> RunState:
    """Returns the run state of the checkpoint `resume_from`, or a new run's if this is ""."""
    from trainer.save import resume
    from trainer.save.checkpoint import RunState

    if resume_from:
        return resume.read_run_state(Path(resume_from), stream)
    return RunState(
        run_id=new_run_id,
        batch=0,
        cursor=0,
        policy_version=0,
        step=0,
        num_tokens=0,
        tombstones=0,
        stream=stream,
    )


def _open_rank_zero(
    config: Config, run_state: RunState, is_resumed: bool, stack: contextlib.ExitStack
) -> RankZero:
    """Opens what only rank 0 has: the source of groups, the records and the display."""
    from trainer.record.rank_zero import open_rank_zero

    resumed_at: tuple[int | None, int | None] = (None, None)
    if is_resumed:
        resumed_at = (run_state.step, run_state.policy_version)
    return open_rank_zero(
        stack, config, run_state.run_id, run_state.batch, run_state.cursor, resumed_at
    )


def _critic(config: Config, collectives: Collectives, vocab_size: int) -> Critic | None:
    """Returns the critic with its optimizer, or None if the estimator needs no critic."""
    from trainer.engine.critic import Critic

    if not config.algorithm.needs_critic:
        return None
    critic = Critic(config, collectives.world_size, collectives.sequence_group).start()
    check_vocabulary(critic.model, vocab_size, "critic")
    return critic


def _reference(
    config: Config, engine: PolicyEngine, collectives: Collectives, vocab_size: int
) -> Reference | ShardedReference | None:
    """Returns the reference model, or None if no trainer rank scores with one."""
    from model.reference import Reference
    from trainer.engine.sharded_reference import ShardedReference

    if config.reference_on != "trainer":
        return None
    reference: Reference | ShardedReference
    if engine.stage == 3 or engine.tp_size > 1:
        reference = ShardedReference(config, collectives, engine)
    else:
        policy = None
        if config.reference_is_base:  # the policy's frozen weights without their adapters
            policy = engine.model
        reference = Reference(config, engine.device, policy, collectives.sequence_group)
    check_vocabulary(reference.model, vocab_size, "reference")
    return reference


def _tokenizer_to_save(config: Config) -> Any:
    """Returns the tokenizer that is saved with the model, with the chat template of the training.

    A base model has no template of its own, and the saved model could not chat without one.
    """
    tokenizer = tokenizer_of(config.model)
    if config.prompt.chat_template is not None:
        tokenizer.chat_template = config.prompt.chat_template.read_text(encoding="utf-8")
    return tokenizer
