"""Does a run fit its devices, and where does the reference go? Lines and problems for people, from the estimates. Pure.

Left out: several kinds of GPU in one machine; the smallest is taken for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import Config
from launcher.machine import Machine, gib
from launcher.memory import (
    SamplerMemory,
    TrainerMemory,
    published_versions,
    resident_sampler,
    sampler_memory,
    smaller,
    tower_activations,
    trainer_memory,
)
from launcher.placement import Placement
from launcher.shares import are_chosen, longest_sequence, problem, ranks_need, shares
from launcher.who_waits import seconds_of_sides, times, vllm_bytes
from launcher.workload import Workload


@dataclass(frozen=True)
class Fit:
    lines: tuple[tuple[str, str], ...]  # (what, text)
    problems: tuple[str, ...]  # each with the nearest settings that work; empty = it fits


def fit(config: Config, work: Workload, place: Placement, machine: Machine) -> Fit:
    trainer = trainer_memory(work)
    sampler = sampler_memory(work, config.engine_gpus)
    together = f", {work.ranks_per_gpu} ranks on one GPU" if work.ranks_per_gpu > 1 else ""
    lines = [("trainer", f"{gib(trainer.total)} per rank{together}: {_parts(trainer)}")]
    if work.adapters is not None:
        share = work.adapters / work.model.parameters
        counts = f"{work.adapters:,} beside {work.model.parameters:,} frozen parameters ({100 * share:.2g} %)"
        lines.append(("adapters", f"rank {config.lora.r}: {counts}"))
    lines += _images(work)
    on_devices = _on_gpus if machine.gpus else _on_cpu
    if are_chosen(config, place, machine):
        on_devices = _on_one_gpu
    more, problems = on_devices(config, work, place, machine, trainer, sampler)
    return Fit((*lines, *more, *times(config, work, place, machine)), tuple(problems))


def _images(work: Workload) -> list[tuple[str, str]]:
    """What a model that sees images has to see."""
    tower = work.model.vision
    if tower is None or not work.images:
        return []
    size = f"{work.images} in a prompt, each of at most {tower.tokens(work.patches):,} tokens, {work.patches:,} patches"
    kept = tower_activations(work, tower)
    frozen = "" if work.trains_tower else ", frozen"
    cost = f"{tower.flops(work.patches) / 1e12:.3g} TFLOP to look at one, activations {gib(kept)}"
    return [("images", size), ("", f"vision tower of {tower.parameters:,} parameters{frozen}; {cost}")]


def _parts(memory: TrainerMemory) -> str:
    """What is there all the time, and what the peak of a step adds."""
    always = ("weights", "gradients", "optimizer", "critic", "reference", "copies", "context", "spare")
    largest = ("reducing",) if memory.reducing == memory.peak else ("activations", "logits", "buckets")
    return ", ".join(f"{name} {gib(getattr(memory, name))}" for name in (*always, *largest) if getattr(memory, name))


LinesAndProblems = tuple[list[tuple[str, str]], list[str]]  # lines, problems


def _on_gpus(
    config: Config, work: Workload, place: Placement, machine: Machine, trainer: TrainerMemory, sampler: SamplerMemory
) -> LinesAndProblems:
    taken = vllm_bytes(config, sampler, machine)
    wanted = min(work.max_num_seqs, work.groups_per_batch * work.num_generations)
    if not machine.gpu_bytes:
        text = f"weights {gib(sampler.weights)}, cache {gib(sampler.cache_per_sequence)} per sequence"
        return [("sampler", f"{text}; the memory of the GPUs is not known, see --gpus")], []
    at_once, share = sampler.sequences_that_fit(taken), taken / machine.gpu_bytes
    text = (
        f"of {share:.2f} × {gib(machine.gpu_bytes)} weights {gib(sampler.weights)}, cache "
        f"{gib(sampler.cache_per_sequence)} per sequence: {min(at_once, wanted)} of {wanted} decode at once"
    )
    problems = []
    if at_once < 1:
        needed = (sampler.weights + sampler.overhead + sampler.cache_per_sequence) / machine.gpu_bytes
        problems.append(_sampler_is_too_small(needed, sampler, machine))
    if work.reference_of("sampler") is not None:
        text += f"; reference {gib(sampler.reference)} beside it"
        left = (1 - share) * machine.gpu_bytes
        if sampler.reference > left:
            below = max(0.05, 1 - sampler.reference / machine.gpu_bytes)
            problems.append(
                f"the reference model needs {gib(sampler.reference)} on the sampler's GPU and vLLM leaves "
                f"{gib(left)}; set vllm.gpu_memory_utilization={below - 0.005:.2f}"
            )
    budget = machine.gpu_bytes
    if place.shares_gpu:
        budget -= taken + sampler.reference
    if work.ranks_per_gpu * trainer.total > budget:
        what = f"a trainer GPU has {gib(budget)}" + (" beside the sampler" if place.shares_gpu else "")
        problems.append(_trainer_is_too_large(work, trainer.total, budget, what))
    return [("sampler", text)], problems


def _on_one_gpu(
    config: Config, work: Workload, place: Placement, machine: Machine, trainer: TrainerMemory, sampler: SamplerMemory
) -> LinesAndProblems:
    """Both processes, with a cache that shares.py chooses."""
    found = shares(work, machine, longest_sequence(config))
    text = f"weights {gib(sampler.weights)}, cache {gib(sampler.cache_per_sequence)} per sequence"
    if work.reference_of("sampler") is not None:
        text += f", reference {gib(sampler.reference)}"
    if trouble := problem(work, found, sampler):
        return [("sampler", text)], [trouble]
    text += f"; cache {gib(found.cache)} in all: {min(found.sequences, found.wanted)} of {found.wanted} decode at once"
    together = f"{gib(found.trainer + found.sampler + found.cache)} of {gib(machine.gpu_bytes)}"
    return [("sampler", text), ("one GPU", f"{together}; {' '.join(found.settings)}")], []


def _on_cpu(
    config: Config, work: Workload, place: Placement, machine: Machine, trainer: TrainerMemory, sampler: SamplerMemory
) -> LinesAndProblems:
    """All processes share the host's memory."""
    of_sampler, versions, count = resident_sampler(work, sampler), published_versions(work), config.sampler.num_samplers
    text = (
        f"{gib(of_sampler)}{' each' * (count > 1)}: weights {gib(sampler.weights)}, cache "
        f"{gib(sampler.cache_per_sequence)} per sequence; published versions {gib(versions)} in /dev/shm"
    )
    budget = (machine.memory - count * of_sampler - versions) / place.num_ranks
    if trainer.total <= budget:
        return [("sampler", text)], []
    what = f"the host's {gib(machine.memory)} leave {gib(budget)} per rank beside the sampler{'s' * (count > 1)}"
    return [("sampler", text)], [_trainer_is_too_large(work, trainer.total, budget, what)]


def _sampler_is_too_small(needed: float, sampler: SamplerMemory, machine: Machine) -> str:
    have = f"the sampler's weights and one sequence need {needed:.2f} of {gib(machine.gpu_bytes)}"
    if needed < 0.95:
        return f"{have}; set vllm.gpu_memory_utilization={needed + 0.05:.2f}"
    width = 2
    while (sampler.weights / width + sampler.overhead) > 0.9 * machine.gpu_bytes and width < 64:
        width *= 2
    return f"{have}; set vllm.tensor_parallel_size={width}, with as many sampler.devices"


def _trainer_is_too_large(work: Workload, total: float, budget: float, what: str) -> str:
    change = smaller(work, budget / work.ranks_per_gpu)
    head = f"{ranks_need(work, work.ranks_per_gpu * total)} and {what}"
    if change is None:
        return (
            f"{head}; nothing here makes it small enough: set lora.r=16, or use more or larger GPUs or a smaller model"
        )
    settings, changed = change
    return f"{head}; set {' '.join(settings)}, which needs {gib(work.ranks_per_gpu * trainer_memory(changed).total)}"


def takes_turns(config: Config, place: Placement) -> bool:
    """Whether both processes compute on the same cores, mostly one after the other. Then no speed decides anything."""
    return config.trainer.max_staleness == 0 and place.shares_cores


def reference_side(config: Config, work: Workload, place: Placement, machine: Machine) -> str:
    """Where the reference model goes: to the side whose addition leaves the slower of the two the faster.

    The sampler gets it if that makes no difference, if only there is room for it, if rewards need it, or if there is no
    estimate. On policy on the same cores the trainer gets it: in the sampler it would take the cores from the
    micro-batches of the groups before, with threads of two processes waiting for each other's.
    """
    if work.reference is None or config.algorithm.kl_in_reward:
        return "sampler"
    choices = {side: replace(work, reference_on=side) for side in ("sampler", "trainer")}
    fitting = [side for side in choices if not fit(config, choices[side], place, machine).problems] or list(choices)
    if takes_turns(config, place) and "trainer" in fitting:
        return "trainer"
    slower = {side: max(seconds_of_sides(config, choices[side], place, machine) or (0.0,)) for side in choices}
    return min(fitting, key=slower.__getitem__)
