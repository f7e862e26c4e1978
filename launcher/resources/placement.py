"""Assigns GPUs and cores to processes: a pure function of the configuration and of the devices that are visible.

Each gets CUDA_VISIBLE_DEVICES, which names a GPU twice if two ranks share it over gloo (ranks.py). A single GPU is
shared by both processes, in the parts that shares.py chooses. Several hosts are left to hosts.py; MIG is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.config import Config
from common.errors import UserError
from launcher.resources.machine import Gpu, is_cpu_build, listed_gpus
from model import cpu

_WRITE_NUMBERS = "Tandem takes numbers of whole GPUs, as `nvidia-smi -L` has them: CUDA_VISIBLE_DEVICES=0,1"


@dataclass(frozen=True)
class SamplerPlace:
    """The devices of one sampler. Its environment is a default, except for CUDA_VISIBLE_DEVICES."""

    env: Mapping[str, str]
    cores: tuple[int, ...]  # empty = not pinned
    where: str  # for people: "GPU 1"


@dataclass(frozen=True)
class Placement:
    """A run's devices. 2 cores, 1 rank, run-ahead: samplers[0].cores=(0,), trainer_cores=(1,), OMP_NUM_THREADS=1."""

    num_ranks: int
    samplers: tuple[SamplerPlace, ...]
    trainer_env: Mapping[str, str]  # for every rank; defaults
    trainer_cores: tuple[int, ...]  # shared by all ranks; empty = not pinned
    sampler_place: str  # all samplers, for people: "GPU 0", "core 0"
    trainer_place: str
    sampler_gpus: tuple[int, ...] = ()  # GPUs of all samplers
    trainer_gpus: tuple[int, ...] = ()  # GPU of each rank

    @property
    def shares_gpu(self) -> bool:
        """Returns whether both processes run on one GPU."""
        return bool(set(self.sampler_gpus) & set(self.trainer_gpus))

    @property
    def ranks_per_gpu(self) -> int:
        """Returns the largest number of trainer ranks that run on one GPU; 1 without GPUs."""
        return max(Counter(self.trainer_gpus).values(), default=1)


def placement(config: Config, gpus: Sequence[int], cores: Sequence[int]) -> Placement:
    """Gives every process its devices. Raises UserError if the configuration asks for devices that do not exist.

    gpus: numbers of the visible GPUs, as nvidia-smi counts; config.*.devices index into them.
    cores: CPU cores this process may use.
    """
    place = _on_gpus(config, gpus, cores) if gpus else _on_cpu(config, cores)
    if config.vllm.get("enable_sleep_mode") and not place.shares_gpu:
        raise UserError(
            "vllm.enable_sleep_mode frees vLLM's cache for a trainer on the same GPU, and here the sampler is on "
            f"{place.sampler_place}, the trainer on {place.trainer_place}; set vllm.enable_sleep_mode=false"
        )
    return place


def _on_cpu(config: Config, cores: Sequence[int]) -> Placement:
    for name, devices in (("sampler", config.sampler.devices), ("trainer", config.trainer.devices)):
        if devices:
            raise UserError(f"{name}.devices is {devices}, but no GPU is visible; remove it, or see `nvidia-smi -L`")
    ranks = config.trainer.num_ranks or 1
    lent: dict[str, str] = {}
    sampler: list[int] = []  # not pinned
    trainer: list[int] = []
    sampler_threads = threads = 1
    takes_turns = config.trainer.max_staleness == 0 and len(cores) > ranks
    if len(cores) <= ranks:  # too few to give every process its own: the scheduler shares them better than we would
        pass
    elif takes_turns:  # mostly one process waits for the other, so each may use all cores
        sampler_threads, threads = len(cores), len(cores) // ranks
    else:
        threads = max(1, len(cores) // 2 // ranks)
        sampler, trainer = list(cores[: -ranks * threads]), list(cores[-ranks * threads :])
        sampler_threads = len(sampler)
        if cpu.is_on():
            lent = {"TANDEM_LENT_CORES": ",".join(map(str, sampler))}
    of_sampler = cpu.environment(takes_turns, cpu.SAMPLERS_MEMORY)
    samplers = _cpu_samplers(config.sampler.num_samplers, sampler, sampler_threads, of_sampler)
    ranks_text = f"{ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)}"
    return Placement(
        num_ranks=ranks,
        samplers=samplers,
        trainer_env=cpu.environment(takes_turns) | lent | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"},
        trainer_cores=tuple(trainer),
        sampler_place=_each(samplers) if sampler else f"CPU, {len(cores)} shared cores" + _count(len(samplers)),
        trainer_place=(_named("CPU core", trainer) if trainer else f"CPU, {len(cores)} shared cores")
        + f", {ranks_text}",
    )


def _cpu_samplers(
    count: int, cores: Sequence[int], threads: int, environment: Mapping[str, str]
) -> tuple[SamplerPlace, ...]:
    """Divides the samplers' cores, or their threads if not pinned, into equal parts. Too few cores are shared."""
    parts = [list(cores)] * count
    if len(cores) >= count:
        parts = [list(cores[len(cores) * i // count : len(cores) * (i + 1) // count]) for i in range(count)]
    found = []
    for part in parts:
        # vLLM would otherwise reserve cores and bind its threads itself, whatever the affinity says.
        env = {"OMP_NUM_THREADS": str(len(part) or max(1, threads // count)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        found.append(SamplerPlace({**environment, **env}, tuple(part), _named("CPU core", part)))
    return tuple(found)


def _on_gpus(config: Config, gpus: Sequence[int], cores: Sequence[int]) -> Placement:
    sampler, trainer = _split_gpus(config, len(gpus))
    ranks = config.trainer.num_ranks or len(trainer)
    if ranks > len(trainer) and config.trainer.dist_backend != "gloo":
        raise UserError(
            f"trainer.num_ranks {ranks} needs as many GPUs and the trainer has {len(trainer)} of {len(gpus)}; "
            f"set trainer.num_ranks={len(trainer)}, or trainer.dist_backend=gloo: NCCL refuses two ranks on one GPU"
        )
    width, count = config.engine_gpus, config.sampler.num_samplers
    if width > len(sampler):
        raise UserError(
            f"vllm.tensor_parallel_size {width} needs as many GPUs and the sampler has {len(sampler)}; "
            f"set vllm.tensor_parallel_size={len(sampler)} or give it more sampler.devices"
        )
    if width * count > len(sampler):
        raise UserError(
            f"sampler.num_samplers {count} of {width} GPU{'s' * (width > 1)} each need{'s' * (width * count == 1)} "
            f"{width * count} GPUs and the samplers have {len(sampler)} of {len(gpus)}; set "
            f"sampler.num_samplers={len(sampler) // width}, or give them more sampler.devices"
        )
    used = sampler[: width * count]
    sampler_ids = [gpus[i] for i in used]
    parts = [sampler_ids[i : i + width] for i in range(0, len(sampler_ids), width)]
    samplers = tuple(SamplerPlace(_seeing(ids), (), _named("GPU", ids)) for ids in parts)
    trainer_ids = [gpus[trainer[rank % len(trainer)]] for rank in range(ranks)]
    place = f"{_named('GPU', list(dict.fromkeys(trainer_ids)))}, {ranks} rank{'s' * (ranks > 1)}"
    return Placement(
        num_ranks=ranks,
        samplers=samplers,
        trainer_env=_seeing(trainer_ids) | {"OMP_NUM_THREADS": str(max(1, len(cores) // (ranks + 1)))},
        trainer_cores=(),
        sampler_place=_each(samplers),
        trainer_place=place + (", shared with the sampler" if set(sampler) & set(trainer) else ""),
        sampler_gpus=tuple(sampler_ids),
        trainer_gpus=tuple(trainer_ids),
    )


def _seeing(ids: Sequence[int]) -> dict[str, str]:
    """Returns variables that number GPUs by the bus, as nvidia-smi does; CUDA would number the fastest GPU 0."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}


def _split_gpus(config: Config, count: int) -> tuple[list[int], list[int]]:
    """Returns both sides' indexes into the visible GPUs. If neither names any, the sampler takes the first ones."""
    sampler, trainer = list(config.sampler.devices), list(config.trainer.devices)
    for name, devices in (("sampler", sampler), ("trainer", trainer)):
        missing = [i for i in devices if not 0 <= i < count]
        if missing:
            raise UserError(
                f"{name}.devices {devices}: there is no GPU {missing[0]}; visible are {count}, "
                f"numbered 0 to {count - 1} (see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES)"
            )
    if count == 1:
        return [0], [0]
    if not sampler:
        free = [i for i in range(count) if i not in trainer]
        sampler = free if trainer else free[: config.engine_gpus * config.sampler.num_samplers]
    trainer = trainer or [i for i in range(count) if i not in sampler]
    for name, devices, other in (("sampler", sampler, "trainer"), ("trainer", trainer, "sampler")):
        if not devices:
            raise UserError(f"no GPU is left for the {name}: the {other} has all {count}; set {other}.devices")
    return sampler, trainer


def visible_gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves; () without GPUs or with the CPU build of torch.

    Asks nvidia-smi, not torch, whose import takes longer than a user error may take to show. A UUID becomes the number
    of its GPU, because devices of a config are numbers. Raises UserError for an unknown UUID, for MIG devices,
    which have no number, and for a GPU that is divided into MIG devices.
    """
    if is_cpu_build():
        return ()
    listed, named = listed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        numbers = [gpu.number for gpu in listed]
    else:
        names = [name.strip() for name in named.split(",") if name.strip()]
        numbers = [_number(name, listed) for name in names]
        numbers = numbers[: numbers.index(-1)] if -1 in numbers else numbers  # CUDA stops reading at -1
    if cut := [gpu.number for gpu in listed if gpu.number in numbers and gpu.is_cut]:
        raise UserError(f"GPU {cut[0]} is cut into MIG devices; {_WRITE_NUMBERS}")
    return tuple(numbers)


def _number(name: str, listed: Sequence[Gpu]) -> int:
    """Returns the GPU of an entry of CUDA_VISIBLE_DEVICES: a number, or as much of a UUID as makes it unique."""
    if name.lstrip("-").isdigit():
        return int(name)
    found = [gpu.number for gpu in listed if gpu.uuid.startswith(name)]
    if len(found) != 1:
        raise UserError(f"CUDA_VISIBLE_DEVICES={name} is not the UUID of one GPU; {_WRITE_NUMBERS}")
    return found[0]


def _named(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {','.join(map(str, numbers))}"


def _each(samplers: Sequence[SamplerPlace]) -> str:
    """Returns "GPU 0", or for several samplers "GPU 0 · GPU 1 (2 samplers)"."""
    return " · ".join(one.where for one in samplers) + _count(len(samplers))


def _count(samplers: int) -> str:
    return f" ({samplers} samplers)" if samplers > 1 else ""
