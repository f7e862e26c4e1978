"""What a rank of test_gloo.py does: every scenario for the stages of ZeRO, and then everything from its checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import PeerEnded, UserError
from tests.support import gloo_data
from tests.support.gloo_data import GAE, MANY, VARIANTS, WHOLE_LAYOUTS, Item, Stream, group, settings
from tests.support.rank import Case, Worker, master_weights, run_hash, state_hash

HALF = {"model": {"dtype": "bfloat16"}}
STREAMS: dict[str, Stream] = dict.fromkeys(("skip", "resample"), gloo_data.half_dead)  # of variants; most train `group`


class CalledCollectives(TorchDispatchMode):
    """Writes down which are called, on which dtypes, where torch hands them to a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.called |= {(func._schema.name.split("::")[1], str(tensor.dtype)) for tensor in tensors}
        return func(*args, **(kwargs or {}))


class GlooWorker(Worker):
    def skip(self, name: str, stage: int, stream: Stream, **sections: dict[str, Any]) -> None:
        """A step that is not finite, then a good one; and the good one alone."""
        config = settings(self.folder, f"{name}{stage}", stage, **{"trainer": gloo_data.CONSTANT_RATE} | sections)
        trainer = self.trainer(config, stream)
        hashes = [run_hash(trainer, has_moments=False)]
        trainer.train_batch()
        hashes.append(run_hash(trainer, has_moments=False))
        trainer.train_batch()
        hashes.append(run_hash(trainer))
        alone = self.trainer(config, group)
        alone.train_batch()
        self.tell_steps(f"{name}{stage}", trainer, hashes=hashes, alone=run_hash(alone))

    def begin(self, stage: int) -> None:
        """bfloat16, before the first step: what the optimizer steps, and the model."""
        name = f"begin{stage}"
        engine = self.trainer(settings(self.folder, name, stage, **HALF), group).engine
        self.write(f"{name}/masters", master_weights(engine))
        self.write(f"{name}/model", dict(engine.gathered_tensors(engine.tensors, lambda _: True)))

    def accumulate(self, stage: int) -> None:
        """bfloat16: the gradient of the same 32 groups in 1, 4 and 16 micro-batches per rank."""
        for count in gloo_data.MICRO_BATCHES:
            at_once = 32 // (self.collectives.world_size * count)
            trainer = {"prompts_per_step": 32, "groups_per_micro_batch": at_once, "logprob_chunk_size": 1024}
            self.one_batch(Case(f"sum{stage}_{count}", stage, sections=HALF | {"trainer": trainer}))

    def run_out_of_memory(self) -> None:
        """bfloat16: the last rank's memory runs out behind its first backward; and with enough for half as much."""
        hashes = []
        for name, tokens in (("short", 200), ("enough", 100)):
            trainer = {"prompts_per_step": 8, "max_tokens_per_micro_batch": tokens}
            sections = HALF | {"trainer": trainer, "algorithm": {"loss_type": "dapo"}}  # one plan over all groups
            made = self.trainer(settings(self.folder, f"memory_{name}", 1, **sections), group)
            if name == "short" and self.collectives.rank == self.collectives.world_size - 1:
                fail_once(made.engine)
            made.train_batch()
            hashes.append(run_hash(made))
        self.seen["memory"] = hashes

    def warm_up(self) -> None:
        """Two batches of two updates; in the first three updates only the critic learns."""
        sections = {
            "algorithm": GAE["algorithm"] | {"num_iterations": 2},
            "critic": GAE["critic"] | {"critic_warmup_steps": 3},
            "trainer": gloo_data.FOUR_STEPS,
        }
        trainer = self.trainer(settings(self.folder, "warm_up", 1, **sections), group)
        hashes = [[state_hash(m, has_moments=False) for m in (trainer.engine, trainer.critic)]]
        for _ in range(2):
            trainer.publish(evaluate=False)
            trainer.train_batch()
            hashes.append([state_hash(m, has_moments=False) for m in (trainer.engine, trainer.critic)])
        self.tell_steps("warm_up", trainer, hashes=hashes)

    def end(self) -> None:
        """Rank 0 finds that the user must change something while the others wait for groups."""

        def stream(group_id: int) -> Item:
            raise UserError(f"group {group_id}: the rewards file is gone")

        try:
            self.trainer(settings(self.folder, "end", 1), stream).train_batch()
        except (UserError, PeerEnded) as error:
            self.seen["ended"] = [type(error).__name__, getattr(error, "exit_code", None)]

    def at_stage(self, stage: int) -> None:
        """What depends on it."""
        no_kl = {"algorithm": {"beta": 0.0}}
        self.begin(stage or 1)
        self.one_batch(Case(f"uneven{stage}", stage, gloo_data.uneven, no_kl))
        self.one_batch(Case(f"dead{stage}", stage, gloo_data.dead, no_kl))
        self.skip("nan", stage, gloo_data.poisoned)
        self.skip("inf", stage, gloo_data.infinite_loss)
        self.skip("critic_inf", stage, gloo_data.infinite_loss, algorithm={"adv_estimator": "gae"})
        self.skip("value_inf", stage, gloo_data.enormous, **GAE)

    def at_one_stage(self) -> None:
        """What does not, at the default one of several ranks; and what gathers under ZeRO-3."""
        for stage in (1, 3):
            sections = {"algorithm": {"beta": 0.0, "adv_estimator": "gae"}, "trainer": {"max_grad_norm": 1e9}}
            self.one_batch(Case(f"critic_uneven{stage}", stage, gloo_data.uneven, sections))
        self.skip("critic_nan_half", 1, gloo_data.poisoned, **HALF, **GAE)
        self.warm_up()
        for name, sections in VARIANTS.items():
            stream = gloo_data.bare if "reference" in sections else STREAMS.get(name, group)
            self.one_batch(Case(name, 1, stream, sections))
        for stage in gloo_data.SUM_STAGES:
            self.accumulate(stage)
        self.run_out_of_memory()
        self.end()


def fail_once(engine: Any) -> None:
    """Lets the first backward pass end as if the GPU's memory had run out behind it."""
    backward = engine.backward

    def fails(*arguments: Any) -> Any:
        engine.backward = backward
        backward(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.backward = fails


def trained(ranks: int) -> list[tuple[str, int, dict[str, Any]]]:
    """(name, ZeRO stage, settings) of three steps with a checkpoint after each."""
    stages = [stage for of, stage in gloo_data.LAYOUTS if of == ranks]
    found = [(f"train{stage}", stage, {}) for stage in stages]
    found += [(f"critic{stage}", stage, GAE) for stage in stages if (ranks, stage) in WHOLE_LAYOUTS]
    if ranks in MANY:
        found += [(f"half{stage}", stage, HALF) for stage in gloo_data.HALF_STAGES]
        found += [("critic_half1", 1, HALF | GAE), ("segments1", 1, gloo_data.GROUP_PPO)]
    return found


def first(folder: Path) -> None:
    worker = GlooWorker(folder)
    ranks = worker.collectives.world_size
    with CalledCollectives() as called_collectives:
        for name, stage, sections in trained(ranks):
            worker.train(name, stage, **sections)
    worker.seen["collectives"] = sorted(called_collectives.called)
    for stage in [stage for of, stage in WHOLE_LAYOUTS if of == ranks]:
        worker.at_stage(stage)
    if ranks in MANY:
        worker.at_one_stage()
    worker.tell()


def resume(folder: Path) -> None:
    worker, flags = GlooWorker(folder), watch_loading()
    for name, stage, sections in trained(worker.collectives.world_size):
        worker.resume(name, stage, **sections)
    worker.seen["weights_only"] = flags
    worker.tell()


def watch_loading() -> list[Any]:
    """From now on, the `weights_only` of every torch.load."""
    flags: list[Any] = []
    load = torch.load

    def watched(*arguments: Any, **options: Any) -> Any:
        flags.append(options.get("weights_only"))
        return load(*arguments, **options)

    torch.load = watched
    return flags
