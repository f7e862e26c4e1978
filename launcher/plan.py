"""Prints all that follows from a config, before anything starts:  bash launch.sh plan [config.yaml] [key=value …]

Batches, devices, memory, and the first prompt as the model sees it. Loads no weights. docs/plan.md has the exit codes.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from common.config import Config, load
from common.errors import UserError
from common.processes import exits
from common.types import Problem
from launcher.resources.batch_plan import batch_line, run_line, settings_of_epochs
from launcher.resources.fit import Fit, fit, tokens_per_micro_batch, with_tokens
from launcher.resources.machine import GIB, Machine, gib, this_machine, usable_cores
from launcher.resources.placement import Placement, placement, visible_gpus
from launcher.resources.precision import require_bfloat16
from launcher.resources.workload import workload_of
from launcher.run import outside_memory, parse, require_built
from model.files.counted_dims import read_dims
from model.files.folder import expert_warnings, require_models, require_settings
from model.files.images import digest, vision_of
from model.tokenizer import tokenizer_of
from report.escape import one_line
from sampler.data_source import prompts_of
from sampler.prompts.dataset import by_source, load_data
from sampler.prompts.reading import logged_reader, stop_conditions
from sampler.turns.multi_turn import open_multi_turn
from trainer.algorithm.user_functions import require_user_functions
from trainer.engine.deepspeed_config import deepspeed_config

CANNOT = 1
_ROWS = 1000  # rows of which prompts are made


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.sh plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", metavar="[HOSTSx]COUNTxGIB", help="plan for other GPUs: 8x80, or 2x8x80")
    options, rest = parser.parse_known_args(arguments)
    path, overrides, _ = parse(rest, "plan")
    try:
        config = load(path, overrides)
        machine = _machine(options.gpus)
        if options.gpus is None:
            overrides = [*overrides, *outside_memory(config)]
        config = load(path, [*overrides, *settings_of_epochs(config)])
        place = placement(config, range(machine.gpus), usable_cores())
        if options.gpus is None:
            numbers = visible_gpus(os.environ)
            sampler = [numbers[gpu] for gpu in place.sampler_gpus]
            trainer = [numbers[gpu] for gpu in place.trainer_gpus]
            require_bfloat16(config, sampler, trainer)
        return _plan(config, place, machine)
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return exits.USER_ERROR


def _plan(config: Config, place: Placement, machine: Machine) -> int:
    require_built(config)
    require_models(config)
    require_user_functions(config.algorithm)
    deepspeed_config(config, place.num_ranks)  # early: contradictions are reported before the data is read
    model = read_dims(config.model.path, config.model.revision)
    require_settings(config)  # again, because a hub id's config.json may have come only now
    tokens = tokens_per_micro_batch(config, model, place, machine)
    config = with_tokens(config, tokens)
    problems = load_data("data.train", config.data.train, config.data)
    _print("batch", [("each", batch_line(config, place.num_ranks)), ("run", run_line(config, len(problems)))])
    if tokens:
        why = f"the most of a rank's step that fits {gib(machine.gpu_bytes)}; or set trainer.max_tokens_per_micro_batch"
        _print("micro-batch", [("tokens", f"{tokens:,}: {why}")])
    for note in filter(None, [config.uneven_work(place.num_ranks), *expert_warnings(config)]):
        print(f"tandem: {note}", file=sys.stderr)
    _print("devices", [("sampler", place.sampler_place), ("trainer", place.trainer_place)])
    found = Fit((("memory", f"{config.model.path} is no decoder of transformers' own: no estimate"),), ())
    if model is not None:
        work = workload_of(config, place.num_ranks, model, machine.gpus > 0, place.ranks_per_gpu)
        found = fit(config, work, place, machine)
    _print("estimates", found.lines)
    for settings, own in by_source(problems, config):
        _print(f"first prompt {own[0].source}".strip(), _prompt_lines(settings, own))
    for problem in found.problems:
        print(f"tandem: does not fit: {problem}", file=sys.stderr)
    return CANNOT if found.problems else exits.DONE


def _prompt_lines(config: Config, problems: Sequence[Problem]) -> Iterator[tuple[str, str]]:
    """Yields lines on a prompt as the model sees it and on a completion's ends. Raises UserError as the run would."""
    tokenizer = tokenizer_of(config.model)
    vision = vision_of(config)
    tried = problems[:1] if vision else problems[:: -(-len(problems) // _ROWS)]  # images take long
    limit = config.data.max_prompt_length
    with open_multi_turn(config, tokenizer, problems[0], problems[0].columns) as multi_turn:
        prompts = prompts_of(f"data.train (of {len(tried)} rows tried)", tried, tokenizer, config, multi_turn)
    logged_reader(config, tokenizer)
    prompt = prompts[0]
    yield "prompt", f"row {prompt.problem.index}, {len(prompt.token_ids)} tokens of at most {limit}"
    yield from (("", f"| {one_line(line)}") for line in prompt.text.split("\n"))
    if prompt.turn_prefix:
        yield "begun", f"the model's turn begins with {prompt.turn_prefix!r}, which rewards read before what it writes"
    if not config.sampler.ignore_eos:
        ends = stop_conditions(config, tokenizer)
        names = [*map(str, tokenizer.convert_ids_to_tokens(list(ends.ids))), *map(repr, ends.texts)]
        yield "ends", f"a completion ends at {' or '.join(names)}"
    if vision is None:
        return
    for image in prompt.images:
        _, rows, columns = (n * vision.form.patch_size for n in image.grid_thw)
        facts = f"{columns} × {rows} pixels, {vision.form.num_tokens(image)} tokens, PNG of {len(image.png):,} bytes"
        yield "image", f"{facts}, {digest(image)}"


def _machine(wanted: str | None) -> Machine:
    """Returns this machine, or the one of --gpus, of which nothing else is known."""
    if wanted is None:
        return this_machine(len(visible_gpus(os.environ)))
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)", wanted)
    if match is None:
        raise UserError(f"--gpus {wanted} is not [HOSTSx]COUNTxGIB; write for example --gpus 8x80")
    return Machine(int(match[1] or 1) * int(match[2]), int(match[3]) * GIB, memory=math.inf)


def _print(title: str, rows: Iterable[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for name, text in rows:
        print(f"  {name:<14}{text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
