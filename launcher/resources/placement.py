"""Assigns GPUs and cores to processes: a pure function of the configuration and of the devices that are visible.

Each gets CUDA_VISIBLE_DEVICES, which names a GPU twice if two ranks share it over gloo (ranks.py). A single GPU is
shared by both processes, in the parts that fit.py chooses. Several hosts are left to hosts.py; MIG is refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.config import Config
from common.errors import UserError
from launcher.resources.batch_plan import counted
from launcher.resources.machine import Gpu, is_cpu_build, listed_gpus
from model import cpu

_WRITE_NUMBERS = "Tandem takes numbers of whole GPUs, as `nvidia-smi -L` has them: CUDA_VISIBLE_DEVICES=0,1"


class SamplerPlace(NamedTuple):
    """The devices of one sampler. Its environment is a default, except for CUDA_VISIBLE_DEVICES."""

    env: Mapping[str, str]
    cores: tuple[int, ...]  # empty = not pinned
    where: str  # for people: "GPU 1"


class Placement(NamedTuple):
    """A run's devices. 2 cores, 1 rank, run-ahead: samplers[0].cores=(0,), trainer_cores=(1,), OMP_NUM_THREADS=1."""

    num_ranks: int
    samplers: tuple[SamplerPlace, ...]
    trainer_env: Mapping[str, str]  # for every rank; defaults
    trainer_cores: tuple[int, ...]  # shared by all ranks; empty = not pinned
    trainer_place: str  # for people: "GPUs 1,2, 2 ranks"
    sampler_gpus: tuple[int, ...] = ()  # GPUs of all samplers
    trainer_gpus: tuple[int, ...] = ()  # GPU of each rank

    @property
    def sampler_place(self) -> str:
        """Returns where the samplers are, for people: "GPU 0 · GPU 1", or "CPU, 8 shared cores (2 samplers)"."""
        counts = Counter(sampler.where for sampler in self.samplers)
        return " · ".join(where + f" ({count} samplers)" * (count > 1) for where, count in counts.items())

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
    sampler, trainer = cores[:0], cores[:0]  # not pinned
    sampler_threads = threads = 1
    takes_turns = config.trainer.max_staleness == 0 and len(cores) > ranks
    if takes_turns:  # mostly one process waits for the other, so each may use all cores
        sampler_threads, threads = len(cores), len(cores) // ranks
    elif len(cores) > ranks:  # the scheduler shares fewer better than we would
        threads = max(1, len(cores) // 2 // ranks)
        sampler, trainer = cores[: -ranks * threads], cores[-ranks * threads :]
    count, num_threads = config.sampler.num_samplers, {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    shared_cores = f"CPU, {len(cores)} shared cores"
    samplers = []
    for part in _equal_parts(sampler, count):
        # vLLM would otherwise reserve cores and bind its threads itself, whatever the affinity says.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | cpu.environment(takes_turns, cpu.SAMPLERS_MEMORY)
        env["OMP_NUM_THREADS"] = str(len(part) or max(1, sampler_threads // count))
        samplers.append(SamplerPlace(env, tuple(part), _numbered("CPU core", part) if part else shared_cores))
    ranks_text = f"{counted(ranks, 'rank')} × {counted(threads, 'thread')}"
    return Placement(
        num_ranks=ranks,
        samplers=tuple(samplers),
        trainer_env=cpu.environment(takes_turns) | num_threads,
        trainer_cores=tuple(trainer),
        trainer_place=f"{_numbered('CPU core', trainer) if trainer else shared_cores}, {ranks_text}",
    )


def _equal_parts(cores: Sequence[int], count: int) -> list[Sequence[int]]:
    """Divides the samplers' cores into equal parts; fewer cores than samplers are shared by all."""
    if len(cores) < count:
        return [cores] * count
    return [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]


def _on_gpus(config: Config, gpus: Sequence[int], cores: Sequence[int]) -> Placement:
    sampler, trainer = _split_gpus(config, len(gpus))
    ranks = config.trainer.num_ranks or len(trainer)
    if ranks > len(trainer) and config.trainer.dist_backend != "gloo":
        raise UserError(
            f"trainer.num_ranks {ranks} needs as many GPUs and the trainer has {len(trainer)} of {len(gpus)}; "
            f"set trainer.num_ranks={len(trainer)}, or trainer.dist_backend=gloo: NCCL refuses two ranks on one GPU"
        )
    width, count = config.engine_gpus, config.sampler.num_samplers
    if width * count > len(sampler):
        fewer = f"sampler.num_samplers={len(sampler) // width}"
        narrower = f"vllm.tensor_parallel_size={len(sampler) // count or 1}"
        raise UserError(
            f"sampler.num_samplers {count} with vllm.tensor_parallel_size {width} needs {width * count} GPUs and the "
            f"samplers have {len(sampler)} of {len(gpus)}; set {fewer if width <= len(sampler) else narrower}, or give "
            "them more sampler.devices"
        )
    sampler_ids = [gpus[i] for i in sampler[: width * count]]
    parts = [sampler_ids[i : i + width] for i in range(0, len(sampler_ids), width)]
    samplers = tuple(SamplerPlace(_visible_devices(ids), (), _numbered("GPU", ids)) for ids in parts)
    trainer_ids = [gpus[trainer[rank % len(trainer)]] for rank in range(ranks)]
    place = f"{_numbered('GPU', list(dict.fromkeys(trainer_ids)))}, {counted(ranks, 'rank')}"
    return Placement(
        num_ranks=ranks,
        samplers=samplers,
        trainer_env=_visible_devices(trainer_ids) | {"OMP_NUM_THREADS": str(max(1, len(cores) // (ranks + 1)))},
        trainer_cores=(),
        trainer_place=place + (", shared with the sampler" if set(sampler) & set(trainer) else ""),
        sampler_gpus=tuple(sampler_ids),
        trainer_gpus=tuple(trainer_ids),
    )


def _visible_devices(ids: Sequence[int]) -> dict[str, str]:
    """Returns variables that number GPUs by the bus, as nvidia-smi does; CUDA would number the fastest GPU 0."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}


def _split_gpus(config: Config, count: int) -> tuple[list[int], list[int]]:
    """Returns both sides' indexes into the visible GPUs. If neither names any, the sampler takes the first ones."""
    sampler, trainer = list(config.sampler.devices), list(config.trainer.devices)
    for name, devices in (("sampler", sampler), ("trainer", trainer)):
        if missing := [i for i in devices if not 0 <= i < count]:
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


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {','.join(map(str, numbers))}"
