"""From a checked config to a running trainer: cheap checks, process group, checkpoint, model, then the loop."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import durable, weights, wire
from common.config import Config, UserError
from common.metrics import MetricsLog
from common.panel import StepDisplay
from common.tokenizer import load_tokenizer
from trainer.deepspeed_config import deepspeed_config
from trainer.inbox import Inbox
from trainer.ledger import Ledger
from trainer.recording import FILE, Recorder, Replay

if TYPE_CHECKING:
    from trainer.checkpoint import Progress
    from trainer.engine import Engine
    from trainer.exchange import Exchange


def run(config: Config) -> None:
    """Trains to the end. Raises UserError, Retryable or PeerEnded."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        with durable.lock(config.run.output_dir / "lock.trainer", _taken(config)):
            _run(config)
    else:
        _run(config)


def _taken(config: Config) -> Any:
    return lambda holder: UserError(
        f"{config.run.output_dir} is used by another trainer ({holder}); stop it, or set run.output_dir to a new folder"
    )


def _run(config: Config) -> None:
    from trainer import checkpoint
    from trainer.engine import Engine, init_distributed
    from trainer.exchange import Exchange
    from trainer.loop import Trainer

    tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
    init_distributed(config)
    exchange = Exchange(config)
    stage = deepspeed_config(config, exchange.world_size)["zero_optimization"]["stage"]
    checkpoints = config.run.output_dir / "checkpoints"
    found = _find_checkpoint(config, checkpoints) if exchange.rank == 0 else None
    resumed = exchange.text(str(found) if found else None)
    if resumed:
        progress = checkpoint.read_progress(Path(resumed), exchange.world_size, stage, _stream(config))
    else:
        run_id = exchange.text(secrets.token_hex(8) if exchange.rank == 0 else None)
        progress = checkpoint.Progress(run_id, 0, 0, 0, 0, 0, 0, _stream(config))
    engine = Engine(config, exchange.world_size)
    if resumed:
        checkpoint.load(engine, Path(resumed))
    if exchange.rank != 0:
        Trainer(config, engine, exchange, tokenizer, progress, None).run()
        return
    _run_rank_0(config, engine, exchange, tokenizer, progress, bool(resumed))


def _run_rank_0(
    config: Config, engine: Engine, exchange: Exchange, tokenizer: Any, progress: Progress, resumed: bool
) -> None:
    from trainer.loop import Desk, Trainer

    output_dir, per_step = config.run.output_dir, config.trainer.prompts_per_step
    weights_dir = weights.default_dir(config)
    durable.make_private(weights_dir)
    durable.remove_leftovers(weights_dir)
    weights.remove_versions(weights_dir)  # of an earlier life: this one publishes its own first
    durable.write_file(output_dir / "config.json", config.model_dump_json(indent=1).encode())
    with contextlib.ExitStack() as stack:
        log = MetricsLog(output_dir, config.run.report_to, progress.step if resumed else None)
        stack.callback(log.close)
        display = StepDisplay(config)
        stack.callback(display.close)
        stack.callback(weights.remove_versions, weights_dir)
        recorder = Recorder(output_dir / FILE, progress.cursor) if config.run.record else None
        if recorder is not None:
            stack.callback(recorder.close)
        incarnation, num_eval_problems = secrets.token_hex(8), 0
        inbox: Inbox | Replay
        if config.run.replay is not None:
            inbox = Replay(config.run.replay, incarnation)
        else:
            limits = _limits(config, engine.model.config.vocab_size)
            ledger = Ledger(
                config.num_batches * per_step, per_step * (1 + config.trainer.max_staleness), progress.cursor
            )
            inbox = stack.enter_context(Inbox(config, progress.run_id, incarnation, limits, ledger, display.waiting))
            num_eval_problems = inbox.wait_for_sampler().num_eval_problems
        desk = Desk(inbox, recorder, log, display, num_eval_problems)
        Trainer(config, engine, exchange, tokenizer, progress, desk).run()


def _limits(config: Config, vocab_size: int) -> wire.Limits:
    return wire.Limits(
        vocab_size=vocab_size,
        num_generations=config.sampler.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.sampler.max_completion_length,
        needs_ref_logprobs=config.algorithm.beta > 0,
        reward_funcs=tuple(config.rewards.names),
    )


def _find_checkpoint(config: Config, checkpoints: Path) -> Path | None:
    """The checkpoint to resume from; None for a fresh start. Raises UserError rather than guess."""
    from trainer.checkpoint import newest_valid

    if not config.run.resume:
        if checkpoints.is_dir() and any(checkpoints.glob("step_*")):
            raise UserError(
                f"{config.run.output_dir} holds checkpoints of an earlier run. Continue it with run.resume=true, "
                "or start a new one with run.output_dir=another folder"
            )
        return None
    found = newest_valid(checkpoints, lambda text: print(f"tandem: {text}", flush=True))
    if found is None:
        raise UserError(f"run.resume is true but {checkpoints} holds no valid checkpoint; start with run.resume=false")
    return found


def _stream(config: Config) -> dict[str, Any]:
    """Settings that define which groups come, in which order."""
    return json.loads(
        json.dumps(
            {
                "run.seed": config.run.seed,
                "data.train": config.data.train,
                "data.shuffle": config.data.shuffle,
                "data.max_prompt_length": config.data.max_prompt_length,
                "trainer.prompts_per_step": config.trainer.prompts_per_step,
                "sampler.num_generations": config.sampler.num_generations,
                "algorithm.num_iterations": config.algorithm.num_iterations,
            }
        )
    )
