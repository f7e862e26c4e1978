"""Evaluates a model, without a trainer:  bash launch.sh eval CHECKPOINT [DATA] [eval.num_generations=8] [key=value …]

docs/evaluation.md says what each may be; a folder of LoRA adapters counts as a model, on the base model of the config.
Evaluating several models at once is not supported.
"""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from common import durable
from common.config import Config, load
from common.errors import UserError
from common.files.run_folder import FINAL, checkpoints
from common.processes import exits
from common.processes.certain_errors import raising_permanent_errors
from common.redact import redacted
from common.types import Prompt
from launcher.evaluation.results import report, table
from model.files import lora
from model.files.folder import looks_local, require_model
from model.files.hub import read_json
from model.tokenizer import tokenizer_of
from report.escape import one_line
from rewards.pool import RewardFailure, RewardPool
from sampler.data_source import prompts_of
from sampler.prompts.dataset import by_source, load_data
from sampler.prompts.many_prompts import Prompts
from sampler.prompts.reading import logged_reader
from sampler.row_checks import rows_with_gold
from sampler.turns.failures import with_failures
from sampler.turns.multi_turn import open_multi_turn
from sampler.turns.sampled import Sampled, submit_rewards, too_few_reason
from sampler.turns.scheduler import Turns
from sampler.turns.task import Decode, held_out_params

_OVERRIDE = re.compile(r"[a-z_]+(\.[A-Za-z_]+)*=")


class Target(NamedTuple):
    """A model to evaluate, with its config and the folder of its results."""

    model: str  # a folder or a hub id; with adapters their folder
    config: Path
    output: Path  # parent of the results
    rank: int = 0  # of LoRA adapters, whose base is the config's own model.path; 0 = a whole model

    def overrides(self) -> list[str]:
        """Returns the overrides that make this model the model of the config."""
        if self.rank:
            return [f"lora={{r: {self.rank}}}"]
        of_no_hub = ["model.revision=null"] if Path(self.model).is_dir() else []
        return [f"model.path={json.dumps(self.model)}", "lora={}", *of_no_hub]


def find_target(checkpoint: str, config: str | None) -> Target:
    """Returns the model and config of a run folder, a checkpoint or a hub id. Raises UserError if there are none."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        if checkpoint.endswith(".gguf"):
            require_model(checkpoint)  # says how to convert it
        if looks_local(checkpoint) or checkpoint.startswith("runs/"):
            raise UserError(f"{checkpoint} is no folder; name a run folder, a checkpoint in it, or a model on the hub")
        if config is None:
            raise UserError("which prompts and rewards? Add --config, for example --config configs/quickstart.yaml")
        return Target(checkpoint, Path(config), Path("runs/evaluations"))
    runs = [f for f in (folder, *folder.resolve().parents[:2]) if "sampler" in (read_json(f / "config.json") or {})]
    run_folder = runs[0] if runs else None  # a model's config.json has other sections than a run's
    settings = Path(config) if config else run_folder / "config.json" if run_folder else None
    if settings is None:
        raise UserError(f"{folder} is in no run folder; which prompts and rewards? Add --config configs/….yaml")
    saved = [*checkpoints(folder), *filter(Path.is_dir, [folder / FINAL])] if run_folder == folder else [folder]
    if not saved:
        raise UserError(f"{folder} holds no final/ and no checkpoint; the run has not saved yet (trainer.save_steps)")
    model = saved[-1]
    rank = _rank_of_adapters(model)
    if not rank and not (model / "config.json").is_file():
        raise UserError(f"{model} is no model: it has no config.json and no {lora.SETTINGS}")
    return Target(str(model), settings, (run_folder or Path("runs")) / "evaluations", rank)


def _rank_of_adapters(folder: Path) -> int:
    """Returns the rank of the LoRA adapters in `folder`; 0 if there are none, or a whole model lies beside them."""
    if (folder / "config.json").is_file() or not (folder / lora.SETTINGS).is_file():
        return 0
    try:
        return int(json.loads((folder / lora.SETTINGS).read_text())["r"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / lora.SETTINGS} is not peft's: {error!r}; save the adapters again") from None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="launch.sh eval", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arguments", nargs="+", metavar="CHECKPOINT [DATA] [key=value …]")
    parser.add_argument("--config", help="settings of the prompts and rewards, for a model that no run folder holds")
    given = parser.parse_intermixed_args(arguments)
    plain = [argument for argument in given.arguments if not _OVERRIDE.match(argument)]
    overrides = [argument for argument in given.arguments if _OVERRIDE.match(argument)]
    if not 1 <= len(plain) <= 2:
        raise UserError(f"expected CHECKPOINT and perhaps DATA, got {' '.join(plain) or 'neither'}")
    target = find_target(plain[0], given.config)
    overrides += target.overrides()
    if len(plain) > 1:  # the data need not contain the set by which the run chose its best policy
        no_best = ["metric_for_best_model=null", "early_stopping_patience=null", "load_best_model_at_end=false"]
        overrides += [f"data.eval={json.dumps(plain[1])}", *(f"eval.{setting}" for setting in no_best)]
    config = load(target.config, overrides)
    if config.data.eval is None:
        raise UserError("no held-out data: name it after the checkpoint, for example openai/gsm8k:main@test")
    run(config, target)


def run(config: Config, target: Target) -> None:
    rows = load_data("data.eval", config.data.eval or [], config.data)
    each = [(settings, rows_with_gold("data.eval", own, settings)) for settings, own in by_source(rows, config)]
    columns, multi_turns, parts = rows[0].columns, dict[str, Any](), dict[str, Any]()
    with contextlib.ExitStack() as stack:
        steps, image_key = config.trainer.max_steps, config.data.image_key
        fits_rows = any(one.rewards.names == config.rewards.names for one, _ in each)  # else perhaps no row has all
        pool = stack.enter_context(RewardPool(config.rewards, columns if fits_rows else None, steps, image_key))
        tokenizer = tokenizer_of(config.model)
        for settings, own in each:
            multi_turn = stack.enter_context(open_multi_turn(settings, tokenizer, own[0], columns))
            multi_turns[own[0].source] = multi_turn
            parts[own[0].source] = prompts_of("data.eval", own, tokenizer, settings, multi_turn)
        prompts = Prompts.joined(parts)
        model = f"{config.model.path} with the adapters {target.model}" if target.rank else target.model
        exits.say(f"{len(prompts)} problems × {config.eval.num_generations} completions of {model}")
        started_s = time.monotonic()
        from model import devices  # imports torch, as the engine does: users' errors come before
        from sampler.engine.engine import Engine
        from sampler.engine.fetch import remove_scratch

        stack.callback(remove_scratch, config)
        engine = Engine(config, devices.count())
        if target.rank:
            remedy = "Evaluate them on the base model that they were trained on: model.path"
            with raising_permanent_errors(f"{target.model}: these adapters do not fit the model", remedy):
                engine.weights.load(Path(target.model).absolute())
        decode = logged_reader(config, tokenizer)
        turns = Turns(engine, decode, multi_turns)
        samples, failures = sample(config, prompts, pool, decode, turns)
    if not samples:
        raise UserError(f"none of the {len(prompts)} problems could be scored; the first: {failures[0]}")
    result = report(samples, len(failures), config.rewards)
    data = config.data.eval if isinstance(config.data.eval, str) else "data"
    label = f"{Path(target.model).name}-{Path(data).stem}-n{config.eval.num_generations}-t{config.eval.temperature:g}"
    folder = target.output / re.sub(r"[^A-Za-z0-9._-]+", "_", label)  # for example step_000040-test-n8-t0.6
    _write(folder, config, model, samples, result | {"seconds": time.monotonic() - started_s})
    for reason in failures[:3]:
        exits.say(f"left out: {one_line(reason)}")
    print(table(result))
    print(f"{folder}/eval.json  {folder}/completions.jsonl", flush=True)


def _write(folder: Path, config: Config, model: str, samples: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    data = config.data.model_dump(mode="json")["eval"]
    settings = config.eval.model_dump(mode="json") | {"model": model, "data": data}
    durable.make_dir(folder)
    record = json.dumps({"settings": redacted(settings)} | result, indent=1, ensure_ascii=False)
    durable.write_file(folder / "eval.json", record.encode(errors="replace"))
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    durable.write_file(folder / "completions.jsonl", lines.encode(errors="replace"))


def sample(
    config: Config, prompts: Sequence[Prompt], pool: RewardPool, decode: Decode, turns: Turns
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a record for each completion of every scored problem, and the reasons why other problems failed.

    A problem fails if its reward fails, or an environment before the first token; a rollout that fails later counts as
    wrong. Rewards run while the engine samples. Seeds are those of a run.
    """
    finished: dict[int, Sampled] = {}
    samples: dict[int, list[dict[str, Any]]] = {}
    failures: list[str] = []
    is_due = exits.every(10.0)
    for i, prompt in enumerate(prompts):
        turns.start(i, prompt, held_out_params(config, i))
    while turns.num_running or pool.pending:
        for i, sampled in turns.step() if turns.num_running else []:
            finished[i] = sampled
            if (reason := too_few_reason(i, sampled)) is not None:
                failures.append(reason)
            elif sampled.to_score:
                submit_rewards(pool, i, sampled, decode)
            else:
                samples[i] = _completion_records(finished.pop(i), decode, [], config)
        for key, scores in pool.ready(timeout_s=0.0 if turns.num_running else 0.5):
            i = cast(int, key)
            if isinstance(scores, RewardFailure):
                failures.append(scores.reason)
            else:
                samples[i] = _completion_records(finished.pop(i), decode, scores, config)
        if is_due():
            exits.say(f"{len(samples) + len(failures)} of {len(prompts)} problems are scored")
    return [record for i in sorted(samples) for record in samples[i]], failures


def _completion_records(sampled: Sampled, decode: Decode, scores: Any, config: Config) -> list[dict[str, Any]]:
    prompt, texts = sampled.prompt, decode([c.token_ids.tolist() for c in sampled.completions])
    scores = with_failures(sampled.completions, scores, config, prompt.problem)
    return [
        {
            "problem_index": prompt.problem.index,
            "source": prompt.problem.source,
            "prompt": prompt.text,
            "completion": text,
            "rewards": {name: None if value != value else value for name, value in rewards.items()},
            "reward": reward,
            "num_tokens": completion.num_sampled,
            "finish_reason": completion.finish_reason,
        }
        | ({"failure": asdict(completion.failure)} if completion.failure else {})
        for completion, text, (rewards, reward) in zip(sampled.completions, texts, scores, strict=True)
    ]


if __name__ == "__main__":
    exits.leave(exits.run("eval", main))
