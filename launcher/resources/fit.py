"""Estimates whether a run fits its devices, and divides one GPU between sampler and trainer. Pure functions.

Several kinds of GPU in one machine are not told apart: the smallest is taken for all. One GPU for both processes is
divided by the size of vLLM's key-value cache in bytes; docs/gpu.md has the formula. By default vLLM sizes its cache
from the free memory that it measures, and a trainer that starts at the same time moves that number while it is
measured. With `kv_cache_memory_bytes` vLLM measures nothing (vllm 0.32, v1/worker/gpu_worker.py,
determine_available_memory); `gpu_memory_utilization` then only says how much must be free when the engine starts. A
user's own value of either is kept. A cache that sleeps while only the trainer works (vllm.enable_sleep_mode,
cache_sleep.py) is counted all the same: training starts on the first group while the last ones still decode, and
held-out problems decode while it trains, so both are needed at once.
"""

import math
from dataclasses import dataclass, replace

from common.config import Config
from common.errors import UserError
from launcher.resources.machine import Machine, gib
from launcher.resources.memory import (
    SamplerMemory,
    offloaded_bytes,
    published_bytes,
    sampler_memory,
    settings_that_fit,
    trainer_memory,
)
from launcher.resources.placement import Placement
from launcher.resources.workload import Workload, workload_of
from model.files.dims import ModelDims

# Share of the GPU for what neither estimate counts, such as the driver's own memory and fragmentation.
_RESERVE = 0.04
_VLLMS_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_SPEEDS = (5e9, 2e9)  # bytes per second of /dev/shm, and of a network file system over 25 Gbit/s
_NETWORK = 25e9  # bytes per second between GPUs of two hosts, at 200 Gbit/s
_BLOCK = 16  # tokens of a block of vLLM's cache
_BY_HAND = "to divide it by hand add vllm.gpu_memory_utilization=0.4"


@dataclass(frozen=True)
class Fit:
    lines: tuple[tuple[str, str], ...]  # (what, text)
    problems: tuple[str, ...]  # each with the nearest settings that work; empty = it fits


def fit(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    trainer = trainer_memory(work)
    together = f", {work.ranks_per_gpu} ranks on one GPU" if work.ranks_per_gpu > 1 else ""
    always = ("weights", "gradients", "optimizer", "critic", "reference", "copies", "context", "spare")
    at_peak = ("reducing",) if trainer.reducing == trainer.peak else ("activations", "logits", "buckets")
    sizes = {name: getattr(trainer, name) for name in (*always, *at_peak)}
    parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
    lines = [("trainer", f"{gib(trainer.total)} per rank{together}: {parts}")]
    if experts := work.model.experts:
        counts = f"{work.model.active_parameters:,} of {work.model.parameters:,} parameters"
        lines.append(("experts", f"a token meets {experts[1]} of {experts[0]}, {counts}"))
    if work.adapters is not None:
        share = work.adapters / work.model.parameters
        counts = f"{work.adapters:,} beside {work.model.parameters:,} frozen parameters ({100 * share:.2g} %)"
        lines.append(("adapters", f"rank {config.lora.r}: {counts}"))
    if work.reference:
        lines.append(("reference", f"scored by the {work.reference_on} (reference.on)"))
    on_devices = _on_gpus if machine.gpus else _on_cpu
    if is_undivided(config, place) and machine.gpu_bytes:
        on_devices = _on_one_gpu
    found = on_devices(config, work, place, machine)
    host = on_host(config, work, machine) if machine.gpus else Fit((), ())
    return Fit((*lines, *found.lines, *host.lines), (*found.problems, *host.problems))


def _sampler_parts(memory: SamplerMemory) -> str:
    reference = f", reference {gib(memory.reference)}" if memory.reference else ""
    return f"weights {gib(memory.weights)}{reference}, cache {gib(memory.cache_per_sequence)} per sequence"


def _on_gpus(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    sampler, width = sampler_memory(work, config.engine_gpus), config.engine_gpus
    parts = _sampler_parts(sampler)
    if not machine.gpu_bytes:
        return Fit((("sampler", f"{parts}; the memory of the GPUs is not known, see --gpus"),), ())
    taken = float(config.vllm.get("gpu_memory_utilization", _VLLMS_SHARE)) * machine.gpu_bytes
    if cache := config.vllm.get("kv_cache_memory_bytes"):
        taken = sampler.weights + sampler.overhead + float(cache)
    at_once, share = sampler.sequences_that_fit(taken), taken / machine.gpu_bytes
    wanted = min(work.max_num_seqs, work.groups_per_batch * work.num_generations)
    text = f"{parts}; in {share:.2f} × {gib(machine.gpu_bytes)} {min(at_once, wanted)} of {wanted} decode at once"
    if at_once < wanted and (more := sampler_memory(work, 2 * width).sequences_that_fit(taken)):
        text += f"; {min(more, wanted)} with vllm.tensor_parallel_size={2 * width}"
    problems, left = [], machine.gpu_bytes - taken
    if at_once < 1:
        needed = (sampler.weights + sampler.overhead + sampler.cache_per_sequence) / machine.gpu_bytes
        have = f"the sampler's weights and one sequence need {needed:.2f} of {gib(machine.gpu_bytes)}"
        remedy = f"set vllm.gpu_memory_utilization={needed + 0.05:.2f}"
        if needed >= 0.95:
            most = _VLLMS_SHARE * machine.gpu_bytes
            wider = next((w for w in (2, 4, 8) if sampler_memory(work, w).sequences_that_fit(most)), 8)
            remedy = f"set vllm.tensor_parallel_size={wider}, with as many sampler.devices if they are set"
            work = replace(work, ranks=max(1, work.ranks - wider + width))  # those that are left for the trainer
        problems.append(f"{have}; {remedy}")
    if sampler.reference > left:
        below = max(0.05, 1 - sampler.reference / machine.gpu_bytes)
        have = f"the reference model needs {gib(sampler.reference)} on the sampler's GPU and vLLM leaves {gib(left)}"
        problems.append(f"{have}; set vllm.gpu_memory_utilization={below - 0.005:.2f}")
    budget = machine.gpu_bytes - (taken + sampler.reference if place.shares_gpu else 0)
    if work.ranks_per_gpu * trainer_memory(work).total > budget:
        beside = " beside the sampler" if place.shares_gpu else ""
        problems.append(trainer_problem(work, budget, f"a trainer GPU has {gib(budget)}{beside}"))
    return Fit((("sampler", text),), tuple(problems))


def on_host(config: Config, work: Workload, machine: Machine) -> Fit:
    """Checks the host memory of a GPU machine: permanent pinned copies of published weights, and their versions."""
    pinned, versions = published_bytes(work)
    place, offloaded = config.weights.dir or "/dev/shm", offloaded_bytes(work)
    text = f"{gib(pinned)} pinned for published weights; their versions take {gib(versions)} in {place}"
    lines = [("host", text + (f"; {gib(offloaded)} are offloaded" if offloaded else ""))]
    held = pinned / work.tp_size / (work.zero_ranks if work.zero_stage == 3 else 1)  # without the other ranks' parts
    gathers = f"gathers {gib(pinned - held)}, {(pinned - held) / _NETWORK:.2g} s at 25 GB/s, and " * (held < pinned)
    reads = config.sampler.num_samplers  # at most, because samplers of a host share what it has read
    seconds = [f"{pinned * (1 + reads) / speed:.2g} s at {speed / 1e9:.0f} GB/s" for speed in _SPEEDS]
    of_all = f"all is written once and read {reads} ×, {seconds[0]} (memory), {seconds[1]} (shared folder)"
    lines.append(("hand-over", f"a rank {gathers}writes {gib(pinned / work.ranks)}; {of_all}"))
    if (needed := pinned + offloaded + (0 if config.weights.dir else versions)) <= machine.memory:
        return Fit(tuple(lines), ())
    way = "" if config.weights.dir else f"; set weights.dir={config.run.output_dir}/weights"
    what = "weights and what is offloaded" if offloaded else "weights"
    return Fit(tuple(lines), (f"the published {what} need {gib(needed)} of the host's {gib(machine.memory)}{way}",))


def _on_one_gpu(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    """Checks both processes on one GPU, with a key-value cache whose size `shares` chooses."""
    sampler, found = sampler_memory(work), shares(work, machine, longest_sequence(config))
    text, wanted = _sampler_parts(sampler), work.max_num_seqs
    if trouble := problem(work, found):
        return Fit((("sampler", text),), (trouble,))
    text += f"; cache {gib(found.cache)} in all: {min(found.sequences, wanted)} of {wanted} decode at once"
    together = f"{gib(found.trainer + found.sampler + found.cache)} of {gib(machine.gpu_bytes)}"
    return Fit((("sampler", text), ("one GPU", f"{together}; {' '.join(found.settings)}")), ())


def _on_cpu(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    """Checks all processes together, because they share the host's memory."""
    sampler, count = sampler_memory(work), config.sampler.num_samplers
    of_sampler, (_, versions) = sampler.resident(work.max_num_seqs), published_bytes(work)
    published = f"published versions {gib(versions)} in {config.weights.dir or '/dev/shm'}"
    text = f"{gib(of_sampler)}{' each' * (count > 1)}: {_sampler_parts(sampler)}; {published}"
    in_memory = 0 if config.weights.dir else versions
    budget = (machine.memory - count * of_sampler - in_memory) / place.num_ranks
    if trainer_memory(work).total <= budget:
        return Fit((("sampler", text),), ())
    have = f"the host's {gib(machine.memory)} leave {gib(budget)} per rank beside the sampler{'s' * (count > 1)}"
    return Fit((("sampler", text),), (trainer_problem(work, budget, have),))


@dataclass(frozen=True)
class Shares:
    """Bytes of one GPU; their sum is at most the GPU."""

    trainer: float  # all ranks of the trainer
    sampler: float  # weights, overhead and the reference model where the sampler has it
    weights: float  # the part of `sampler` that is weights
    cache: int  # 0: there is no room for the longest sequence
    sequences: int  # how many of the longest sequences the cache holds
    total: float

    @property
    def settings(self) -> list[str]:
        """Returns the overrides for both processes. The engine's start needs room for weights and cache only."""
        share = max(0.01, math.floor(100 * (self.weights + self.cache) / self.total) / 100)
        return [f"vllm.kv_cache_memory_bytes={self.cache}", f"vllm.gpu_memory_utilization={share:.2f}"]


def is_undivided(config: Config, place: Placement) -> bool:
    """Returns whether both processes are on one GPU and the user has not divided it."""
    return place.shares_gpu and config.vllm.keys().isdisjoint({"kv_cache_memory_bytes", "gpu_memory_utilization"})


def shares(work: Workload, machine: Machine, longest: int) -> Shares:
    """Divides the memory of a GPU. longest: tokens of the longest sequence that the engine takes, `max_model_len`."""
    sampler, trainer = sampler_memory(work), work.ranks_per_gpu * trainer_memory(work).total
    per_token = sampler.cache_per_sequence / (work.prompt + work.completion)
    per_sequence = per_token * _BLOCK * math.ceil((work.prompt + work.completion) / _BLOCK)
    fixed = sampler.weights + sampler.reference + sampler.overhead
    wanted = work.max_num_seqs * per_sequence  # at least a batch of rollouts; evaluations fill more
    least = per_token * _BLOCK * (math.ceil(longest / _BLOCK) + 1)  # vLLM keeps one block for itself
    room = (1 - _RESERVE) * machine.gpu_bytes - trainer - fixed
    cache = 0 if room < least else int(min(room, max(least, wanted)))
    return Shares(trainer, fixed, sampler.weights, cache, int(cache // per_sequence), machine.gpu_bytes)


def problem(work: Workload, found: Shares) -> str:
    """Returns why sampler and trainer do not fit on the GPU and what to change; empty if they fit."""
    if found.cache:
        return ""
    budget = (1 - _RESERVE) * found.total - found.sampler - sampler_memory(work).cache_per_sequence
    limits = f"the sampler {gib(found.sampler)} and a cache"
    return f"one GPU of {gib(found.total)} for both: {trainer_problem(work, budget, limits)}"


def trainer_problem(work: Workload, budget: float, limits: str) -> str:
    """Returns what the ranks of one GPU need, what limits them, and the settings by which they fit into the budget."""
    ranks = work.ranks_per_gpu
    who = "a trainer rank needs" if ranks == 1 else f"{ranks} trainer ranks on it need"
    change = settings_that_fit(work, budget / ranks)
    remedy = "no other setting makes it small enough: set lora.r=16, or use more or larger GPUs or a smaller model"
    if change is not None:
        settings, changed = change
        remedy = f"set {' '.join(settings)}, with which the trainer needs {gib(ranks * trainer_memory(changed).total)}"
    return f"{who} about {gib(ranks * trainer_memory(work).total)} and {limits}; {remedy}"


def settings_of_one_gpu(config: Config, model: ModelDims | None, place: Placement, machine: Machine) -> list[str]:
    """Returns the overrides that launch.sh adds for both processes, if they share a GPU that the user has not divided.

    Raises UserError if they do not fit, or if the size of the GPU or of the model (None) is not known.
    """
    if model is None:
        raise UserError(f"one GPU for both processes, and no estimate for {config.model.path}; {_BY_HAND}")
    if not machine.gpu_bytes:
        raise UserError(f"one GPU for both processes, and nvidia-smi does not say how large it is; {_BY_HAND}")
    work = workload_of(config, place.num_ranks, model, ranks_per_gpu=place.ranks_per_gpu)
    found = shares(work, machine, longest_sequence(config))
    if trouble := problem(work, found):
        raise UserError(f"{trouble}; {_BY_HAND}")
    return found.settings


def tokens_per_micro_batch(config: Config, model: ModelDims | None, place: Placement, machine: Machine) -> int | None:
    """Returns how many tokens a rank's micro-batch has on GPUs; None if the settings say it, or nothing is known.

    It is a rank's whole step if that fits, else the largest half, quarter … that fits, and at least one group. On one
    GPU for both processes the sequences that decode at once come first.
    """
    given = config.trainer.model_fields_set & {"groups_per_micro_batch", "max_tokens_per_micro_batch"}
    if given or model is None or not place.trainer_gpus or not machine.gpu_bytes:
        return None
    work = workload_of(config, place.num_ranks, model, ranks_per_gpu=place.ranks_per_gpu)
    free, one_group = replace(machine, gpu_bytes=(1 - _RESERVE) * machine.gpu_bytes), config.longest_group
    tokens = math.ceil(config.trainer.prompts_per_step / config.dp_size(place.num_ranks)) * one_group
    while tokens > one_group:
        tried = replace(work, groups_per_micro_batch=tokens / one_group)
        if is_undivided(config, place):
            fits = shares(tried, machine, longest_sequence(config)).sequences >= work.max_num_seqs
        else:
            fits = not _on_gpus(config, tried, place, free).problems
        if fits:
            return tokens
        tokens //= 2
    return one_group


def with_tokens(config: Config, tokens: int | None) -> Config:
    """Returns the config with micro-batches of so many tokens; None: the config as it is."""
    trainer = config.trainer.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"trainer": trainer}) if tokens else config


def longest_sequence(config: Config) -> int:
    """Returns the tokens of the longest sequence; vLLM refuses a cache that does not hold one such sequence."""
    from sampler.engine.engine_arguments import max_model_len  # imports a tokenizer

    return int(config.vllm.get("max_model_len") or max_model_len(config))
