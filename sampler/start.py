"""From a checked config to a running sampler: cheap checks first, then the reference model, then vLLM."""

from __future__ import annotations

from typing import Any

from common.config import Config, UserError
from common.exits import PeerEnded, Retryable
from rewards.pool import RewardPool
from sampler.dataset import fingerprint, load_problems
from sampler.link import Link, hello
from sampler.prompts import load_tokenizer, make_prompts


def run(config: Config, sampler_id: str) -> None:
    """Samples until the trainer says goodbye. Raises UserError, Retryable or PeerEnded."""
    problems = load_problems(config.data.train, config.data.prompt_key, config.data.answer_key)
    held_out = load_held_out(config)
    tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
    prompts, num_filtered = make_prompts(problems, tokenizer, config.data, config.prompt)
    if num_filtered:
        print(f"tandem: {num_filtered} of {len(problems)} prompts are longer than data.max_prompt_length", flush=True)
    held_out_prompts = make_prompts(held_out, tokenizer, config.data, config.prompt)[0] if held_out else []
    columns = prompts[0].problem.columns
    with RewardPool(config.rewards, columns=columns) as pool:
        link = Link(
            config,
            sampler_id,
            hello(
                fingerprint(problems + held_out), fingerprint_tokenizer(tokenizer), len(prompts), len(held_out_prompts)
            ),
        )
        try:
            _sample(config, link, pool, tokenizer, prompts, held_out_prompts)
        except PeerEnded:
            raise
        except UserError as error:
            link.say_goodbye(str(error), 2)
            raise
        except (Retryable, KeyboardInterrupt) as error:
            link.say_goodbye(str(error) or "interrupted", 75)
            raise


def _sample(config: Config, link: Link, pool: RewardPool, tokenizer: Any, train: list, held_out: list) -> None:
    import torch

    from sampler.engine import Engine
    from sampler.loop import Sampler, Task
    from sampler.reference import Reference

    num_gpus = torch.cuda.device_count()
    engine = Engine(config, num_gpus)
    reference = None
    if config.algorithm.beta > 0:
        reference = Reference(config, torch.device("cuda" if num_gpus else "cpu"))
        reference.check_vocabulary(len(tokenizer))
    task = Task(train, held_out, lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True))
    Sampler(config, task, engine, link, pool, reference).run()


def load_held_out(config: Config) -> list:
    if config.data.eval is None:
        return []
    problems = load_problems(config.data.eval, config.data.prompt_key, config.data.answer_key)
    return problems[: config.data.eval_size]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Differs when two processes would read the same ids as different text."""
    import hashlib
    import json

    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
