"""Starts a sampler from a checked config: cheap checks first, then the reference model, then vLLM."""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from common import bfloat16, durable
from common.config import Config
from common.errors import Retryable, UserError
from common.files.shared_memory import remove_orphans
from common.processes import out_of_memory
from common.processes.certain_errors import raising_permanent_errors
from common.processes.exits import RETRYABLE, USER_ERROR, say
from common.processes.watchdog import Watchdog, progress_heard_by
from common.types import Problem, Prompt
from common.wire import wire
from common.wire.group_limits import too_many
from model.files.folder import require_downloaded, require_models, vocabulary
from model.files.images import vision_of
from model.tokenizer import check_vocabulary, tokenizer_of
from rewards.find import FORMS, JUDGES
from rewards.mathematics.gold import unreadable
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import probes
from sampler.link import Link
from sampler.prompts.dataset import fingerprint, load_data, whole_row
from sampler.prompts.many_prompts import Prompts, make_prompts
from sampler.prompts.messages import shown_to_rewards
from sampler.prompts.reading import logged_reader
from sampler.turns.multi_turn import MultiTurn, open_multi_turn
from sampler.turns.task import Task, parts_of

_ROWS_TRIED = 4
_ROWS_NAMED = 10


def run(config: Config, sampler_id: str) -> None:
    """Samples until the trainer says goodbye. Raises UserError, Retryable or PeerEnded.

    It locks its id: two samplers would take each other's messages. The lock is shared through the run folder.
    """
    require_models(config)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", sampler_id):
        raise UserError(f"--id {sampler_id!r}: use at most 64 letters, digits, '.', '_' and '-', such as sampler-1")
    lock = durable.lock(
        config.run.output_dir / f"lock.{sampler_id}",
        lambda holder: UserError(
            f"a sampler with the id {sampler_id!r} serves this run already ({holder}); "
            f"give this one another: --id {sampler_id}-b"
        ),
    )
    limits, log = config.channel, config.run.output_dir / "logs" / "trainer.log"
    with lock, Watchdog(f"sampler {sampler_id}", limits.stall_timeout_s, limits.connect_timeout_s, log):
        _run(config, sampler_id)


def _run(config: Config, sampler_id: str) -> None:
    link = Link(config, sampler_id)
    with contextlib.ExitStack() as stack:
        preparation = stack.enter_context(contextlib.ExitStack())
        preparation.enter_context(progress_heard_by(link.prepare))
        problems = load_data("data.train", config.data.train, config.data)
        held_out = load_data("data.eval", config.data.eval, config.data) if config.data.eval else []
        parts_of(config, problems)
        parts_of(config, held_out, "eval")
        sources = config.of_sources
        rows = {label: [[p for p in some if p.source == label] for some in (problems, held_out)] for label in sources}
        columns = {  # a source need not have held-out rows
            label: [name for name in (own or others)[0].columns if not others or name in others[0].columns]
            for label, (own, others) in rows.items()
        }
        wanted = [columns[label] for label, one in sources.items() if one.rewards.names == config.rewards.names]
        offered = [name for name in dict.fromkeys(chain(*columns.values())) if all(name in own for own in wanted)]
        steps, image_key = config.trainer.max_steps, config.data.image_key
        pool = stack.enter_context(RewardPool(config.rewards, offered, steps, image_key))
        for label, (own, others) in rows.items():
            rows[label] = [
                rows_with_gold("data.train", own, sources[label]),
                rows_with_gold("data.eval", others, sources[label]),
            ]
            for some in filter(None, rows[label]):
                try_rewards(pool, some, sources[label])
        with raising_permanent_errors(f"the tokenizer of {config.model.path} does not load"):
            tokenizer = tokenizer_of(config.model)
        require_downloaded(config)
        multi_turns, train, evaluation = dict[str, MultiTurn | None](), dict[str, Prompts](), dict[str, Prompts]()
        for label, (own, others) in rows.items():
            settings, [first, *_] = sources[label], [*own, *others]
            opening = open_multi_turn(settings, tokenizer, first, columns[label])
            multi_turns[label] = multi_turn = stack.enter_context(opening)
            train[label] = prompts_of("data.train", own, tokenizer, settings, multi_turn)
            evaluation[label] = prompts_of("data.eval", others, tokenizer, settings, multi_turn)
        train_prompts, held_out_prompts = Prompts.joined(train), Prompts.joined(evaluation)
        parts = parts_of(config, train_prompts.problems)
        task = Task(train_prompts, held_out_prompts, logged_reader(config, tokenizer), parts)
        link.hello = wire.Hello(
            pid=os.getpid(),
            dataset_fingerprint=fingerprint(train_prompts.problems, config.data),
            tokenizer_hash=_fingerprint_tokenizer(tokenizer),
            num_problems=len(train_prompts),
            num_eval_problems=len(held_out_prompts),
            scores_reference=config.reference_on == "sampler",
            incarnation=secrets.token_hex(8),
            eval_fingerprint=fingerprint(held_out_prompts.problems, config.data),
        )
        preparation.close()
        try:
            with out_of_memory.with_memory_advice("sampler"):
                _sample(config, task, link, pool, multi_turns, min(len(tokenizer), vocabulary(config.model)))
        except (UserError, Retryable, KeyboardInterrupt) as error:
            link.say_goodbye(str(error) or "interrupted", USER_ERROR if isinstance(error, UserError) else RETRYABLE)
            raise


def _sample(
    config: Config,
    task: Task,
    link: Link,
    pool: RewardPool,
    multi_turns: Mapping[str, MultiTurn | None],
    vocab_size: int,
) -> None:
    from model import devices
    from model.reference import Reference
    from sampler.engine.engine import Engine
    from sampler.engine.fetch import remove_scratch
    from sampler.loop import Sampler
    from sampler.rehearsal import rehearse
    from sampler.turns.mixed_turns import turns_of

    remove_scratch(config)
    remove_orphans()  # shared memory of an engine that was killed
    reference = None
    with raising_permanent_errors(f"the sampler does not start with {config.model.path}"):
        if config.reference_on == "sampler":  # before the engine, which takes its share of the memory that is left
            capability = devices.compute_capability(devices.first())
            bfloat16.require("model.dtype", config.model.dtype, "the sampler's GPU", capability)
            reference = Reference(config, devices.first())
            check_vocabulary(reference.model, vocab_size, "reference")
        engine = Engine(config, devices.count())
        rehearse(config, task, engine, reference)
        turns = turns_of(engine, task.decode, multi_turns)
    try:
        Sampler(config, task, engine, link, pool, reference, turns).run()
    finally:
        remove_scratch(config)


def rows_with_gold(option: str, problems: list[Problem], config: Config) -> list[Problem]:
    """Returns the problems without rows of which only the form could be rewarded. Raises UserError if these are all."""
    names = config.rewards.reward_funcs
    judges = [name for name in names if name in JUDGES]
    columns = dict.fromkeys(JUDGES[name] for name in judges)
    reasons = ([unreadable(problem.columns.get(column)) for column in columns] for problem in problems)
    why = {place: given[0] for place, given in enumerate(reasons) if given and all(given)}
    if not why:
        return problems
    rows = "; ".join(f"row {problems[place].index}: {reason}" for place, reason in [*why.items()][:3])
    able = f"{' and '.join(judges)} can judge {len(problems) - len(why)} of {len(problems)} gold answers"
    count = f"{option}: {able} ({rows})"
    if len(why) == len(problems):
        raise UserError(
            f"{count}. Set data.answer_key to the column of the answers, or name a reward of your own in "
            "rewards.reward_funcs (docs/rewards.md)"
        )
    if any(name not in JUDGES and name not in FORMS for name in names):  # an unknown function may judge anything
        say(f"{count}: it is None for the others, of which the other rewards decide")
        return problems
    say(f"{count}: the others are left out, for only their form could be rewarded")
    return [problem for place, problem in enumerate(problems) if place not in why]


def try_rewards(pool: RewardPool, problems: list[Problem], config: Config) -> None:
    """Scores made-up completions of a few rows before anything heavy is imported; words and an end stand for tokens.

    Raises UserError when the functions raise, or return something else than numbers, on every row that is tried. Logs a
    line when right, wrong and cut-off completions all score the same. Functions of environments' states are not tried.
    """
    if "environments" in pool.wanted.names:
        return  # they cannot be called without one
    tried, reason = problems[:: max(1, len(problems) // _ROWS_TRIED)][:_ROWS_TRIED], ""
    for problem in tried:
        made_up = probes(problem.columns.get("answer"))
        count = max(len(made_up), config.sampler.num_generations)
        texts = [made_up[i % len(made_up)].text or "I" for i in range(count)]
        ids = [list(range(len(text.split()) + 1)) for text in texts]
        options: dict[str, Any] = {"scored_by": problem.scored_by}
        if config.rollout.is_multi_turn:  # rewards of an environment that likes every second completion
            options["environment_rewards"] = [float(i % 2) for i in range(count)]
        row = whole_row(problem, pool.image_key)
        pool.submit("trial", shown_to_rewards(problem, config), texts, ids, row, **options)
        [(_, scores)] = pool.ready(timeout_s=pool.patience_s)
        if not isinstance(scores, RewardFailure):
            if len(made_up) > 1 and len({total for _, total in scores}) == 1 and config.learns_from_rewards:
                say(
                    f"rewards: right, wrong and cut-off completions of row {problem.index} all score {scores[0][1]:g}: "
                    "such a group has no gradient. bash launch.sh check CONFIG tries more rows"
                )
            return
        if scores.kind != "error":
            return  # the machine may cause slow or dying processes: the run has a budget for them
        reason = scores.reason
    raise UserError(f"rewards: {reason} (all {len(tried)} rows tried before sampling fail)")


def prompts_of(
    source: str, problems: Sequence[Problem], tokenizer: Any, config: Config, multi_turn: MultiTurn | None = None
) -> Prompts:
    """Returns problems as prompts, with the tools of several turns. Logs how many were too long."""
    if not problems:
        return Prompts([], np.array([], np.int64), lambda problem: Prompt(problem, "", "", np.array([], np.int32)))
    tools = multi_turn.pool.tools if multi_turn else None
    prompts, num_filtered = make_prompts(problems, tokenizer, config, vision_of(config), tools)
    if num_filtered:
        limit = config.data.max_prompt_length
        say(
            f"{source}: {num_filtered} of {len(problems)} prompts have more than {limit} tokens "
            "(data.max_prompt_length) and are left out"
        )
    return _embedded(source, prompts, tokenizer, config)


def _embedded(source: str, prompts: Prompts, tokenizer: Any, config: Config) -> Prompts:
    """Returns the prompts whose tokens all have an embedding. Raises UserError if the others are many.

    A token that was added to the tokenizer alone has no row of the embedding: an engine would read beyond its end.
    """
    rows = vocabulary(config.model)
    unknown = np.flatnonzero(prompts.largest_ids >= rows)
    if not len(unknown):
        return prompts
    token = tokenizer.convert_ids_to_tokens(int(prompts.largest_ids[unknown[0]]))
    more = ", …" if len(unknown) > _ROWS_NAMED else ""
    named = ", ".join(str(prompts.problems[i].index) for i in unknown[:_ROWS_NAMED]) + more
    what = (
        f"prompts of {source} hold a token that the tokenizer has and the model's embedding of {rows} rows has not, "
        f"such as {token!r} (rows {named})"
    )
    if (text := too_many(len(unknown), len(prompts), what)) or len(unknown) == len(prompts):
        raise UserError(
            f"{text or what}. Take it out of the data and the chat template; or make a model that has it, and set "
            f'model.path to that: model = AutoModelForCausalLM.from_pretrained("{config.model.path}"); '
            f'model.resize_token_embeddings({len(tokenizer)}); model.save_pretrained("resized"), the tokenizer likewise'
        )
    say(f"{len(unknown)} {what}: they are left out")
    return prompts.only(np.flatnonzero(prompts.largest_ids < rows))


def _fingerprint_tokenizer(tokenizer: Any) -> str:
    """Returns a hash that differs if two processes would decode the same ids to different texts."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
