"""From a checked config to a running trainer: cheap checks, process group, checkpoint, model, then the loop."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import address, durable, exits, out_of_memory, weights
from common.config import Config, world_size
from common.errors import UserError
from common.group_limits import ImageLimits, Limits
from common.redact import redacted
from common.run_folder import CHECKPOINTS, sampler_log
from common.watchdog import Watchdog
from model.folder import load_config, require_models
from model.images import vision_of
from model.tokenizer import load_tokenizer
from report.display import StepDisplay
from report.environment import write_environment
from report.run_log import MetricsLog, read_jsonl
from trainer.engine.deepspeed_config import deepspeed_config, gloo_warning
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger
from trainer.link.recording import FILE, Recorder, Replay

if TYPE_CHECKING:
    from model.reference import Reference
    from trainer.engine.critic import Critic
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.ranks import Exchange
    from trainer.record.rank_zero import RankZero
    from trainer.save.checkpoint import Progress


def run(config: Config) -> None:
    """Trains to the end. Raises UserError, Retryable or PeerEnded."""
    config.require_training()
    require_models(config)
    rank, limits = int(os.environ.get("RANK", "0")), config.channel
    timeout_s = limits.rank_patience_s if rank else limits.stall_timeout_s
    log = sampler_log(config.run.output_dir, "sampler.0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(f"trainer rank {rank}", timeout_s, limits.connect_timeout_s, log))
        if rank == 0:
            stack.enter_context(durable.lock(config.run.output_dir / "lock.trainer", _taken(config)))
            if config.run.replay is None:
                address.require_free(config)
        _run(config)


def _taken(config: Config) -> Any:
    return lambda holder: UserError(
        f"{config.run.output_dir} is used by another trainer ({holder}); stop it, or set run.output_dir to a new folder"
    )


def _run(config: Config) -> None:
    """Rank 0 opens what only it has first: a taken port or a wrong checkpoint must not cost the start of all ranks."""
    from trainer.algorithm.advantages import try_own_estimator
    from trainer.algorithm.losses import try_own_objective
    from trainer.engine.deepspeed_model import init_distributed
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.ranks import Exchange
    from trainer.loop import Trainer
    from trainer.save import checkpoint, resume

    rank, ranks = int(os.environ.get("RANK", "0")), world_size()
    try_own_estimator(config)
    try_own_objective(config.algorithm)
    stage = deepspeed_config(config, ranks)["zero_optimization"]["stage"]
    tokenizer = _tokenizer_to_save(config)

    def progress_of(resumed: str, run_id: str) -> Progress:
        if resumed:
            return resume.read_progress(Path(resumed), ranks, stage, resume.stream_settings(config))
        return checkpoint.Progress(run_id, 0, 0, 0, 0, 0, 0, resume.stream_settings(config))

    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory.with_memory_advice("trainer"))
        resume_from, run_id, rank_zero = "", secrets.token_hex(8), None
        if rank == 0:
            resume_from = resume.find_checkpoint(config, lambda text: print(f"tandem: {text}", flush=True))
            rank_zero = _open_rank_zero(stack, config, progress_of(resume_from, run_id), is_resumed=bool(resume_from))
        init_distributed(config)
        exchange = Exchange(config)
        resume_from, run_id = exchange.text(resume_from), exchange.text(run_id)
        engine = PolicyEngine(config, exchange.world_size, exchange.sequence_group)
        if rank_zero is not None:
            _note_devices(config, rank_zero, engine)
        critic = _critic(config, exchange, len(tokenizer))
        if resume_from:
            checkpoint.restore(engine, Path(resume_from), critic)
        reference = _reference(config, engine, exchange, len(tokenizer))
        progress = progress_of(resume_from, run_id)
        trainer = Trainer(config, engine, exchange, tokenizer, progress, rank_zero, reference, critic)
        exits.limit_time(config.trainer.max_hours if rank == 0 else None)  # its clock decides for all
        exits.defer_interrupts(rank == 0, "stopping after this step, with a checkpoint; again to stop at once")
        trainer.run()


def _critic(config: Config, exchange: Exchange, vocab_size: int) -> Critic | None:
    from trainer.engine.critic import Critic

    if not config.algorithm.needs_critic:
        return None
    critic = Critic(config, exchange.world_size, exchange.sequence_group)
    critic.check_vocabulary(vocab_size)
    return critic


def _reference(config: Config, engine: PolicyEngine, exchange: Exchange, vocab_size: int) -> Reference | None:
    from model.reference import Reference

    if config.reference_on != "trainer":
        return None
    # Under ZeRO-3 a forward gathers weights from all ranks, and ranks score different numbers of micro-batches.
    policy = engine.model if config.reference_is_base and engine.stage < 3 else None
    reference = Reference(config, engine.device, policy, exchange.sequence_group)
    reference.check_vocabulary(vocab_size)
    return reference


def _note_devices(config: Config, rank_zero: RankZero, engine: PolicyEngine) -> None:
    """What is known once the model is where it trains: the machine, for the record, and whether gloo will be slow."""
    import torch

    from model import devices

    write_environment(config.run.output_dir, engine.world_size, devices.name(engine.device))
    if slow := gloo_warning(config, engine.world_size, torch.distributed.get_backend(), engine.num_trained):
        rank_zero.display.note(slow)


def _tokenizer_to_save(config: Config) -> Any:
    """With the chat template that the model is trained on, or a base model's final folder could not chat."""
    tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
    if config.prompt.chat_template is not None:
        tokenizer.chat_template = config.prompt.chat_template.read_text(encoding="utf-8")
    return tokenizer


def _open_rank_zero(stack: contextlib.ExitStack, config: Config, progress: Progress, is_resumed: bool) -> RankZero:
    """What only rank 0 has, closed by the stack: records, display, and the link to the samplers or a recording."""
    from trainer.record.rank_zero import RankZero

    output_dir = config.run.output_dir
    weights_dir = weights.default_dir(config)
    durable.make_private(weights_dir)
    for folder in (weights_dir, output_dir, output_dir / CHECKPOINTS):
        durable.remove_leftovers(folder)
    weights.remove_versions(weights_dir)  # of an earlier start: this one publishes its own first
    public = redacted(config.model_dump(mode="json"))
    durable.write_file(output_dir / "config.json", json.dumps(public, indent=1, ensure_ascii=False).encode())
    resumed_at = (progress.step, progress.policy_version) if is_resumed else (None, None)
    log = MetricsLog(output_dir, config.run.report_to, *resumed_at)
    stack.callback(log.close)
    display = StepDisplay(config)
    stack.callback(display.close)
    display.recall(read_jsonl(output_dir / "metrics.jsonl"), read_jsonl(output_dir / "eval.jsonl"))
    if uneven := config.uneven_work(world_size()):
        display.note(uneven)
    stack.callback(_leave_no_versions, weights_dir)
    records = config.run.record and config.run.replay is None  # a recording must not be cut while it is replayed
    recorder = Recorder(output_dir / FILE, progress.cursor) if records else None
    if recorder is not None:
        stack.callback(recorder.close)
    incarnation = secrets.token_hex(8)
    if config.run.replay is not None:
        needs_reference = config.reference_on == "sampler"
        return RankZero(Replay(config.run.replay, incarnation, needs_reference), recorder, log, display)
    ledger = Ledger(progress.cursor + config.groups_after(progress.batch), config.window, progress.cursor)
    inbox = Inbox(config, progress.run_id, incarnation, _limits(config), ledger, display.waiting)
    return RankZero(stack.enter_context(inbox), recorder, log, display)


def _leave_no_versions(weights_dir: Path) -> None:
    with contextlib.suppress(OSError):  # a failing disk must not hide why the run ends; the next start tries again
        weights.remove_versions(weights_dir)


def _limits(config: Config) -> Limits:
    return Limits(
        vocab_size=load_config(config.model).get_text_config().vocab_size,
        num_generations=config.sampler.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.sampler.max_completion_length,
        needs_ref_logprobs=config.reference_on == "sampler",
        reward_funcs=tuple(config.rewards.names),
        max_sampling_mask=config.sampler.max_sampling_mask,
        images=_image_limits(config),
        max_turns=config.rollout.max_turns if config.rollout.is_multi_turn else 0,
        in_flight_updates=config.sampler.in_flight_updates,
    )


def _image_limits(config: Config) -> ImageLimits | None:
    vision = vision_of(config)
    if vision is None:
        return None
    sizes = config.data.limit_images, config.data.max_pixels
    return ImageLimits(*sizes, vision.form.patch_size, vision.form.merge_size, vision.image)
