"""Estimates whether a run fits its devices, as lines and problems for people to read. Pure functions.

Several kinds of GPU in one machine are not told apart: the smallest is taken for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.config import Config
from launcher.resources.machine import Machine, gib
from launcher.resources.memory import SamplerMemory, TrainerMemory, published_bytes, sampler_memory, trainer_memory
from launcher.resources.placement import Placement
from launcher.resources.shares import is_undivided, longest_sequence, problem, shares, trainer_problem
from launcher.resources.workload import Workload


@dataclass(frozen=True)
class Fit:
    lines: tuple[tuple[str, str], ...]  # (what, text)
    problems: tuple[str, ...]  # each with the nearest settings that work; empty = it fits


def fit(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    trainer = trainer_memory(work)
    together = f", {work.ranks_per_gpu} ranks on one GPU" if work.ranks_per_gpu > 1 else ""
    lines = [("trainer", f"{gib(trainer.total)} per rank{together}: {_trainer_parts(trainer)}")]
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


def _trainer_parts(memory: TrainerMemory) -> str:
    """Returns the permanent parts of the memory and those that the peak of a step adds, in words."""
    always = ("weights", "gradients", "optimizer", "critic", "reference", "copies", "context", "spare")
    largest = ("reducing",) if memory.reducing == memory.peak else ("activations", "logits", "buckets")
    return ", ".join(f"{name} {gib(getattr(memory, name))}" for name in (*always, *largest) if getattr(memory, name))


def _sampler_parts(memory: SamplerMemory) -> str:
    reference = f", reference {gib(memory.reference)}" if memory.reference else ""
    return f"weights {gib(memory.weights)}{reference}, cache {gib(memory.cache_per_sequence)} per sequence"


def _on_gpus(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    sampler = sampler_memory(work, config.engine_gpus)
    parts = _sampler_parts(sampler)
    if not machine.gpu_bytes:
        return Fit((("sampler", f"{parts}; the memory of the GPUs is not known, see --gpus"),), ())
    taken = float(config.vllm.get("gpu_memory_utilization", 0.92)) * machine.gpu_bytes  # 0.92: vLLM's own default
    if cache := config.vllm.get("kv_cache_memory_bytes"):
        taken = sampler.weights + sampler.overhead + float(cache)
    at_once, share = sampler.sequences_that_fit(taken), taken / machine.gpu_bytes
    wanted = min(work.max_num_seqs, work.groups_per_batch * work.num_generations)
    text = f"{parts}; in {share:.2f} × {gib(machine.gpu_bytes)} {min(at_once, wanted)} of {wanted} decode at once"
    problems = [*_sampler_problems(sampler, taken, machine)]
    budget = machine.gpu_bytes - (taken + sampler.reference if place.shares_gpu else 0)
    if work.ranks_per_gpu * trainer_memory(work).total > budget:
        beside = " beside the sampler" if place.shares_gpu else ""
        problems.append(trainer_problem(work, budget, f"a trainer GPU has {gib(budget)}{beside}"))
    return Fit((("sampler", text),), tuple(problems))


def on_host(config: Config, work: Workload, machine: Machine) -> Fit:
    """Checks the host memory of a GPU machine: permanent pinned copies of published weights, and their versions."""
    pinned, versions = published_bytes(work)
    place = config.weights.dir or "/dev/shm"
    line = "host", f"{gib(pinned)} pinned for published weights; their versions take {gib(versions)} in {place}"
    if (needed := pinned + (0 if config.weights.dir else versions)) <= machine.memory:
        return Fit((line,), ())
    way = "" if config.weights.dir else f"; set weights.dir={config.run.output_dir}/weights"
    return Fit((line,), (f"the published weights need {gib(needed)} of the host's {gib(machine.memory)}{way}",))


def _sampler_problems(sampler: SamplerMemory, taken: float, machine: Machine) -> Iterator[str]:
    """Yields why the sampler does not fit. taken: bytes of its GPU that vLLM uses, without the reference model."""
    if sampler.sequences_that_fit(taken) < 1:
        needed = (sampler.weights + sampler.overhead + sampler.cache_per_sequence) / machine.gpu_bytes
        have = f"the sampler's weights and one sequence need {needed:.2f} of {gib(machine.gpu_bytes)}"
        more = f"set vllm.gpu_memory_utilization={needed + 0.05:.2f}"
        yield f"{have}; {more if needed < 0.95 else 'set vllm.tensor_parallel_size=2, with as many sampler.devices'}"
    left = machine.gpu_bytes - taken
    if sampler.reference > left:
        below = max(0.05, 1 - sampler.reference / machine.gpu_bytes)
        yield (
            f"the reference model needs {gib(sampler.reference)} on the sampler's GPU and vLLM leaves "
            f"{gib(left)}; set vllm.gpu_memory_utilization={below - 0.005:.2f}"
        )


def _on_one_gpu(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    """Checks both processes on one GPU, with a key-value cache whose size shares.py chooses."""
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
