"""From a checked config to a running sampler: cheap checks first, then the reference model, then vLLM."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from common.config import Config, UserError
from common.exits import RETRYABLE, USER_ERROR, Retryable
from common.tokenizer import load_tokenizer
from common.types import Problem, Prompt
from common.watchdog import Watchdog
from rewards.pool import RewardPool
from sampler.dataset import fingerprint, load_data
from sampler.link import Link, hello
from sampler.loop import Task
from sampler.prompts import make_prompts


def run(config: Config, sampler_id: str) -> None:
    """Samples until the trainer says goodbye. Raises UserError, Retryable or PeerEnded."""
    config.require_training()
    limits, log = config.channel, config.run.output_dir / "logs" / "trainer.log"
    with Watchdog(f"sampler {sampler_id}", limits.stall_timeout_s, limits.connect_timeout_s, log):
        _run(config, sampler_id)


def _run(config: Config, sampler_id: str) -> None:
    problems = load_data("data.train", config.data.train, config.data)
    held_out = load_data("data.eval", config.data.eval, config.data) if config.data.eval else []
    with RewardPool(config.rewards, columns=problems[0].columns, max_steps=config.trainer.max_steps) as pool:
        tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
        train_prompts = prompts_of("data.train", problems, tokenizer, config)
        held_out_prompts = prompts_of("data.eval", held_out, tokenizer, config)[: config.data.eval_size]
        task = Task(train_prompts, held_out_prompts, lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True))
        data, vocabulary = fingerprint(problems + held_out), _fingerprint_tokenizer(tokenizer)
        link = Link(config, sampler_id, hello(data, vocabulary, len(train_prompts), len(held_out_prompts)))
        try:
            _sample(config, task, link, pool, len(tokenizer))
        except UserError as error:
            link.say_goodbye(str(error), USER_ERROR)
            raise
        except (Retryable, KeyboardInterrupt) as error:
            link.say_goodbye(str(error) or "interrupted", RETRYABLE)
            raise


def _sample(config: Config, task: Task, link: Link, pool: RewardPool, vocabulary_size: int) -> None:
    import torch

    from sampler.engine import Engine
    from sampler.loop import Sampler
    from sampler.reference import Reference
    from sampler.reload import remove_stale_scratch

    remove_stale_scratch(config)
    num_gpus = torch.cuda.device_count()
    reference = None
    if config.algorithm.beta > 0:  # before the engine, which takes its share of the memory that is left
        reference = Reference(config, torch.device("cuda" if num_gpus else "cpu"))
        reference.check_vocabulary(vocabulary_size)
    Sampler(config, task, Engine(config, num_gpus), link, pool, reference).run()


def prompts_of(source: str, problems: list[Problem], tokenizer: Any, config: Config) -> list[Prompt]:
    """Problems as prompts; says how many were too long."""
    if not problems:
        return []
    prompts, num_filtered = make_prompts(problems, tokenizer, config.data, config.prompt)
    if num_filtered:
        limit = config.data.max_prompt_length
        print(
            f"tandem: {source}: {num_filtered} of {len(problems)} prompts have more than {limit} tokens "
            "(data.max_prompt_length) and are left out",
            file=sys.stderr,
            flush=True,
        )
    return prompts


def _fingerprint_tokenizer(tokenizer: Any) -> str:
    """Differs when two processes would read the same ids as different text."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
