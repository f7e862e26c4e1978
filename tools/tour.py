"""Follows one group of rollouts through the files that a training step consists of, with its data at every stop.

    python -m tools.tour [CONFIG]     default: the quick start, whose model and rows `bash launch.sh` makes

Every stop calls the code that a run calls, on the config's own rows and model. Two stand-ins keep it to a few seconds:
transformers samples four short completions in the place of vLLM, and the gradient is not given to DeepSpeed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from common.config import Config, load
from common.errors import UserError
from common.processes import exits
from common.types import Group, Prompt
from common.wire.wire import Envelope, decode, encode
from model.checksum import describe
from model.layout import own_attention, packing_of
from model.logprobs import load_causal_lm, score_terms
from model.tokenizer import load_tokenizer
from rewards.pool import RewardFailure, RewardPool
from sampler.engine.completions import Completion
from sampler.prompts.dataset import load_data
from sampler.prompts.prompts import make_prompt
from sampler.prompts.reading import reader, stop_conditions
from sampler.turns.episode import as_rollout
from sampler.turns.sampled import Sampled, submit_rewards
from trainer.algorithm.losses import loss, token_objective
from trainer.data.tensors import micro_batch, step_denominator
from trainer.data.training_group import TrainingGroup, set_advantages_from_rewards

G = 4  # completions


def stop(title: str, files: str, *lines: str) -> None:
    print("\n".join([f"\n{title}   [{files}]", *(f"    {line}" for line in lines)]))


def sample(model: Any, prompt: Prompt, config: Config, ends: Sequence[int]) -> list[Completion]:
    """Returns G completions that transformers samples from softmax(logits / temperature), a token at a time."""
    torch.manual_seed(config.run.seed)
    completions, temperature = [], config.sampler.temperature
    with own_attention(model), torch.no_grad():
        for _ in range(G):
            ids, logprobs = prompt.token_ids.tolist(), list[float]()
            while len(logprobs) < config.sampler.max_completion_length and (not logprobs or ids[-1] not in ends):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                distribution = (logits / temperature).log_softmax(-1)
                ids.append(int(distribution.exp().multinomial(1)))
                logprobs.append(float(distribution[ids[-1]]))
            new = np.array(ids[len(prompt.token_ids) :], np.int32)
            reason: Any = "stop" if new[-1] in ends else "length"
            completions.append(Completion(new, np.array(logprobs, np.float32), reason))
    return completions


def sampled_group(model: Any, tokenizer: Any, config: Config) -> Group:
    """Follows a row to the group that the sampler sends: the stops of the sampler's process."""
    problem = load_data("data.train", config.data.train, config.data)[0]
    stop("1. a row", "sampler/prompts/sources.py, dataset.py", *(f"{k}: {v!r}" for k, v in problem.columns.items()))
    prompt = make_prompt(problem, tokenizer, config)
    ids = prompt.token_ids
    stop("2. a prompt", "sampler/prompts/messages.py, chat_template.py, prompts.py", repr(prompt.text),
         f"token ids [{len(ids)}]: {' '.join(map(str, ids[:12]))} …")  # fmt: skip
    completions = sample(model, prompt, config, stop_conditions(config, tokenizer).ids)
    read = reader(config, tokenizer)
    texts = read([c.token_ids.tolist() for c in completions])
    stop("3. completions", "sampler/engine/engine.py, completions.py, sampler/turns/scheduler.py",
         *(f"{text!r}, {len(c.token_ids)} tokens, Σ log π_old {c.logprobs.sum():.2f}, {c.finish_reason}"
           for text, c in zip(texts, completions, strict=True)))  # fmt: skip
    with RewardPool(config.rewards, columns=list(problem.columns)) as pool:
        submit_rewards(pool, 0, Sampled(prompt, completions), read)
        [(_, scores)] = pool.ready(timeout_s=pool.patience_s)
    if isinstance(scores, RewardFailure):
        raise UserError(scores.reason)
    stop("4. rewards", "rewards/pool.py, service.py, answers.py, built_in.py",
         *(f"{dict(rewards)} → reward {reward:g}" for rewards, reward in scores))  # fmt: skip
    rollouts = [as_rollout(c, c.logprobs, r, total) for c, (r, total) in zip(completions, scores, strict=True)]
    return Group(0, 0, problem.index, ids, tuple(rollouts))


def train(model: Any, group: Group, config: Config) -> None:
    """Follows a group to a gradient: the stops of the trainer's process."""
    taken = TrainingGroup(group, config.algorithm)
    set_advantages_from_rewards([taken], config)
    assert taken.advantages is not None
    of_completions = taken.advantages.split(taken.policy_tokens.lengths)
    advantages = "  ".join(f"{float(of_tokens[0]):+.3f}" for of_tokens in of_completions)
    stop("6. advantages", "trainer/link/inbox.py, trainer/data/slots.py, trainer/algorithm/advantages.py",
         f"{config.algorithm.adv_estimator}: {advantages}")  # fmt: skip
    algorithm, denominator = config.algorithm, step_denominator([taken], 1, config)
    batch = micro_batch([taken], denominator, algorithm, packing_of(model))
    prompt, tokens = len(group.prompt_ids), sum(batch.row.lengths)
    stop("7. a micro-batch", "trainer/data/micro_batches.py, tensors.py, model/packing.py",
         f"row {list(batch.row.input_ids.shape)} for {len(batch.row.lengths)} sequences of {prompt} + C tokens",
         f"targets [{tokens}], completions of {', '.join(map(str, batch.row.lengths))} tokens")  # fmt: skip
    logprobs, entropy, _ = score_terms(model, batch.row, config.sampler.temperature, 64)
    gap = (logprobs.detach() - batch.old_logprobs).abs().max()
    stop("8. log-probs", "model/layout.py, attention.py, logprobs.py",
         f"log π_θ [{len(logprobs)}], at most {gap:.1e} from the sampler's; entropy {entropy.mean():.2f}")  # fmt: skip
    given = batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.row.lengths
    objective, _ = token_objective(logprobs, *given, algorithm, entropy)
    value = loss(objective, batch.weights)
    value.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    stop("9. the loss", "trainer/algorithm/losses.py, trainer/engine/policy.py",
         f"{algorithm.loss_type} over {tokens} tokens: {value:+.4f}; gradient norm {norm:.3f}")  # fmt: skip
    name, parameter = next(iter(model.named_parameters()))
    info = describe(parameter)
    stop("10. a version", "trainer/save/publisher.py, write_version.py, common/files/weights.py",
         f"{len(list(model.parameters()))} tensors, such as {name} {info.shape} {info.dtype} {info.checksum}",
         "the sampler compares each checksum: sampler/engine/fetch.py, verify.py, engine_tensors.py")  # fmt: skip


def main(argv: Sequence[str]) -> None:
    config = load(Path(argv[0] if argv else "configs/quickstart.yaml"), [f"sampler.num_generations={G}"])
    tokenizer = load_tokenizer(config.model.path)
    model = load_causal_lm(config.model.path, config.model.dtype, None, False)
    group = sampled_group(model, tokenizer, config)
    frames = encode(Envelope("tour", "first", "sampler-0"), group)
    _, received = decode(frames)
    stop("5. on the wire", "sampler/link.py, common/wire/wire.py, group_frames.py",
         f"header {len(frames[0])} bytes, arrays {len(frames[1])} bytes, digest {len(frames[2])} bytes")  # fmt: skip
    assert isinstance(received, Group)
    train(model, received, config)


if __name__ == "__main__":
    sys.exit(exits.run("tour", lambda: main(sys.argv[1:])))
