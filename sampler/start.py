"""Starts a sampler from a checked config: cheap checks, then the reference model, then vLLM."""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any

from common import bfloat16, durable
from common.config import Config
from common.errors import Retryable, UserError
from common.files.shared_memory import remove_orphans
from common.processes import out_of_memory
from common.processes.certain_errors import raising_permanent_errors
from common.processes.exits import RETRYABLE, USER_ERROR
from common.processes.watchdog import Watchdog, progress_heard_by
from common.wire import wire
from model.files.folder import require_downloaded, require_models, vocabulary
from model.tokenizer import check_vocabulary, tokenizer_of
from rewards.pool import RewardPool
from sampler.data_source import DataSource, columns_for_rewards, load_sources
from sampler.link import Link
from sampler.prompts.dataset import fingerprint
from sampler.prompts.many_prompts import Prompts
from sampler.prompts.reading import logged_reader
from sampler.turns.task import Task, parts_of


def run(config: Config, sampler_id: str) -> None:
    """Samples until the trainer says goodbye. Raises UserError, Retryable or PeerEnded.

    A sampler locks its id in the run folder, which all samplers share, because two samplers of one
    id would receive each other's messages.
    """
    require_models(config)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", sampler_id):
        raise UserError(
            f"--id {sampler_id!r}: use at most 64 letters, digits, '.', '_' and '-', such as "
            "sampler-1"
        )
    lock = durable.lock(
        config.run.output_dir / f"lock.{sampler_id}",
        lambda holder: UserError(
            f"a sampler with the id {sampler_id!r} serves this run already ({holder}); "
            f"give this one another: --id {sampler_id}-b"
        ),
    )
    limits = config.channel
    watchdog = Watchdog(
        f"sampler {sampler_id}",
        limits.stall_timeout_s,
        limits.connect_timeout_s,
        config.run.output_dir / "logs" / "trainer.log",
    )
    with lock, watchdog:
        _run(config, sampler_id)


def _run(config: Config, sampler_id: str) -> None:
    link = Link(config, sampler_id)
    with contextlib.ExitStack() as resources:
        with progress_heard_by(link.prepare):
            sources = load_sources(config)
            pool = resources.enter_context(_open_rewards(config, sources))
            for source in sources:
                source.check_rows(pool)
            with raising_permanent_errors(f"the tokenizer of {config.model.path} does not load"):
                tokenizer = tokenizer_of(config.model)
            require_downloaded(config)
            for source in sources:
                source.make_prompts(tokenizer, resources)
            train = Prompts.joined({source.name: source.train_prompts for source in sources})
            held_out = Prompts.joined({source.name: source.held_out_prompts for source in sources})
            shares = parts_of(config, train.problems)
            task = Task(train, held_out, logged_reader(config, tokenizer), shares)
            link.hello = _hello(config, train, held_out, tokenizer)
        vocab_size = min(len(tokenizer), vocabulary(config.model))
        try:
            with out_of_memory.with_memory_advice("sampler"):
                _sample(config, task, link, pool, sources, vocab_size)
        except UserError as error:
            link.say_goodbye(str(error), USER_ERROR)
            raise
        except (Retryable, KeyboardInterrupt) as error:
            link.say_goodbye(str(error) or "interrupted", RETRYABLE)
            raise


def _open_rewards(config: Config, sources: Sequence[DataSource]) -> RewardPool:
    columns = columns_for_rewards(config, sources)
    return RewardPool(config.rewards, columns, config.trainer.max_steps, config.data.image_key)


def _hello(config: Config, train: Prompts, held_out: Prompts, tokenizer: Any) -> wire.Hello:
    """Returns the sampler's first message. The trainer compares it with its own task."""
    return wire.Hello(
        pid=os.getpid(),
        dataset_fingerprint=fingerprint(train.problems, config.data),
        tokenizer_hash=_fingerprint_tokenizer(tokenizer),
        num_problems=len(train),
        num_eval_problems=len(held_out),
        scores_reference=config.reference_on == "sampler",
        incarnation=secrets.token_hex(8),
        eval_fingerprint=fingerprint(held_out.problems, config.data),
    )


def _sample(
    config: Config,
    task: Task,
    link: Link,
    pool: RewardPool,
    sources: Sequence[DataSource],
    vocab_size: int,
) -> None:
    """Loads the reference and the engine, tries both, and samples until the trainer ends the run.

    vocab_size: the number of tokens that both the tokenizer and the policy have.
    """
    from model import devices
    from model.reference import Reference
    from sampler.engine.engine import Engine
    from sampler.engine.fetch import remove_scratch
    from sampler.loop import Sampler
    from sampler.rehearsal import rehearse
    from sampler.turns.scheduler import Turns

    remove_scratch(config)
    remove_orphans()  # shared memory of an engine that was killed
    reference = None
    with raising_permanent_errors(f"the sampler does not start with {config.model.path}"):
        # The reference is loaded first, because the engine takes its share of the memory left.
        if config.reference_on == "sampler":
            capability = devices.compute_capability(devices.first())
            bfloat16.require("model.dtype", config.model.dtype, "the sampler's GPU", capability)
            reference = Reference(config, devices.first())
            check_vocabulary(reference.model, vocab_size, "reference")
        engine = Engine(config, devices.count())
        rehearse(config, task, engine, reference)
        multi_turns = {source.name: source.multi_turn for source in sources}
        turns = Turns(engine, task.decode, multi_turns)
    try:
        Sampler(config, task, engine, link, pool, reference, turns).run()
    finally:
        remove_scratch(config)


def _fingerprint_tokenizer(tokenizer: Any) -> str:
    """Returns a hash that differs if two processes would decode the same ids to different texts."""
    tokens_by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(tokens_by_id).encode()).hexdigest()[:16]
