"""Models in parts: each rank's memory, the files that it writes, and one run on several shapes, also when killed."""

import gc
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3nTextConfig,
    GraniteSWAConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

from common.errors import UserError
from common.files import run_folder
from model.files.tensor_parallel import layer_specs
from report.run_log import read_jsonl
from tests.support.gloo_data import VOCAB_SIZE, bare, settings
from tests.support.memory_of_ranks import forget_peak, measured, resident
from tests.support.mixtures import mixture_folder
from tests.support.rank import Worker
from tests.support.replay_worker import RankEnds, stack
from tests.support.tier import ALL, full
from tests.support.tiny import tiny_model


def work(folder: Path) -> None:
    from trainer.engine.policy import PolicyEngine
    from trainer.save import checkpoint, model_files

    worker, model_files._MIN_FILE_SIZE = Worker(folder), 1 << 20  # type: ignore[attr-defined]
    for stage in (1, 3):
        forget_peak()
        before = resident("VmHWM", "RssAnon")
        engine = PolicyEngine(settings(folder, "run", stage), 2)
        worker.seen[f"loaded{stage}"] = [b - a for a, b in zip(before, resident("VmHWM", "RssAnon"), strict=True)]
        checkpoint.save_model(engine.start(), worker.collectives, worker.tokenizer, folder / f"saved{stage}")
    worker.tell()


def test_a_rank_loads_its_part_and_one_tensor_or_shares_the_file_and_writes_its_shard() -> None:
    folder = stack().folder / "large"
    model = load_file(tiny_model(folder / "model", hidden=512, layers=12, vocab=VOCAB_SIZE) / "model.safetensors")
    size, largest = sum(t.nbytes for t in model.values()), max(t.nbytes for t in model.values())
    for rank in stack().seen(__name__, folder.name, 2).ranks:
        assert rank["loaded3"][0] <= 1.2 * (size / 2 + largest)
        assert rank["loaded1"][1] <= 0.1 * size, "a private copy"
    for stage in (1, 3):
        shards = [load_file(file) for file in sorted((folder / f"saved{stage}").glob("model-*-of-00002.safetensors"))]
        assert len(shards) == 2 and all(sum(t.nbytes for t in shard.values()) < 0.6 * size for shard in shards)
        found = shards[0] | shards[1]
        assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


# ---- a reference that follows the policy: there is no room for two of its parts


def follow(folder: Path) -> None:
    import trainer.engine.sharded_reference as loading
    from trainer.engine.policy import PolicyEngine

    worker = Worker(folder)
    gc.disable()  # as between a collector's looks at old objects, with thousands of steps
    for shape in ("zero3", "tensor"):
        _, stage, sharing = SHAPES[shape]
        left: list[int] = []
        earlier: list[weakref.ref[Any]] = []

        def watched(*given: Any, left: Any = left, earlier: Any = earlier, **named: Any) -> PolicyEngine:
            left.append(sum(parameter() is not None for parameter in earlier))
            engine = PolicyEngine(*given, **named)
            earlier += [weakref.ref(parameter) for parameter in engine.model.parameters()]
            return engine

        loading.PolicyEngine = watched  # type: ignore[misc, assignment]
        moving = {"reference": {"on": "trainer", "sync_steps": 1}, "trainer": {"tensor_parallel_size": sharing}}
        trainer = worker.trainer(settings(folder, shape, stage, **moving), bare)
        for _ in range(2):
            trainer.train_batch()
            trainer.publish(evaluate=False)
        worker.seen[shape] = left
    worker.tell()


def test_a_part_of_a_reference_is_gone_before_that_of_the_next_one_loads() -> None:
    tiny_model(stack().folder / "followed" / "model", hidden=128)
    for rank in stack().seen(__name__, "followed", 2, "follow").ranks:
        assert rank == {"zero3": [0, 0, 0], "tensor": [0, 0, 0]}


# ---- one run on several shapes

SHAPES = {"one": (1, 0, 1), "zero3": (4, 3, 1), "tensor": (4, 1, 2)}  # ranks, ZeRO stage, how many share each layer
# Apertus has an activation with parameters. Granite divides and nanochat caps the logits of a head that ranks share.
FAMILIES = ("apertus", "granite", "nanochat") if ALL else ("apertus", "nanochat")
# In the middle of each phase: the shape of that life, what kills it, and the steps that are saved by then.
LIVES: list[tuple[str, dict[str, str], list[int]]] = [
    ("zero3", {"TANDEM_TEST_DIES_LOADING": "9"}, []),
    ("zero3", {"TANDEM_FAILPOINT": "trainer.micro_batch:2:kill"}, [1]),
    ("tensor", {"TANDEM_FAILPOINT": "weights.shard:2:kill"}, [1]),
    ("one", {"TANDEM_FAILPOINT": "checkpoint.engine:1:kill"}, [1]),
    ("tensor", {"TANDEM_FAILPOINT": "trainer.micro_batch:3:kill"}, [1, 2]),
]


def lived(name: str, shape: str, killed: dict[str, str], family: str = "") -> RankEnds:
    """One life of a run of three steps."""
    folder = stack().folder / f"four-heads-{family}"
    model = mixture_folder(folder, family) if family else tiny_model(folder, hidden=128)
    ranks, stage, sharing = SHAPES[shape]
    trainer = {"max_steps": 3, "save_steps": 1, "save_limit": 3, "tensor_parallel_size": sharing}
    resume = bool(run_folder.step_dirs(stack().folder / name / "checkpoints"))
    sections = {"model": {"path": str(model)}, "trainer": trainer, "run": {"resume": resume}}
    return stack().run(name, ranks, stage, {ranks - 1: killed}, **sections)


def require_same(name: str, family: str = "") -> None:
    """The run ended as one rank's: losses, norms and weights to 1e-5."""
    folder, alone = stack().folder / name, stack().folder / f"shape-one{family}"
    if not (alone / "final").exists():
        assert lived(alone.name, "one", {}, family).codes == [0]
    rows = [read_jsonl(each / "metrics.jsonl") for each in (folder, alone)]
    for ours, theirs in zip(*rows, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    ours, theirs = (load_file(each / "final" / "model.safetensors") for each in (folder, alone))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_on_ranks_that_share_layers_are_those_of_one_rank(family: str) -> None:
    ends = lived(f"shape-tensor-{family}", "tensor", {}, family)
    assert set(ends.codes) == {0}, ends.logs[0][-3000:]
    require_same(f"shape-tensor-{family}", family)


def test_a_run_killed_in_each_phase_goes_on_in_another_shape() -> None:
    folder = stack().folder / "shapes"
    for shape, killed, saved in LIVES:
        ends = lived("shapes", shape, killed)
        assert -signal.SIGKILL in ends.codes, f"{killed}: {ends.codes} {ends.logs[0][-3000:]}"
        assert [path.name for path in run_folder.step_dirs(folder / "checkpoints")] == [f"step_{n:06}" for n in saved]
    ends = lived("shapes", "zero3", {})
    assert set(ends.codes) == {0}, ends.logs[0][-3000:]
    require_same("shapes")


@full
def test_the_most_memory_of_a_rank_is_within_15_percent_of_the_plan() -> None:
    """Of 149M parameters; docs/memory.md has more."""
    layouts = [(2, 3, 1), (2, 1, 2)]
    found = [(layout, max(peaks.values()) / planned) for layout, peaks, planned in measured(2, layouts)]
    assert [layout for layout, _ in found] == layouts, "this machine has too little memory for some"
    assert all(0.85 < share < 1.15 for _, share in found), found


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Qwen2Config(num_attention_heads=14, num_key_value_heads=2),
            "4 does not divide its 14 num_attention_heads and 2",
        ),
        (Qwen3MoeConfig(), "it has experts"),
        (GraniteSWAConfig(), "its attention has sinks"),
        (
            Gemma3nTextConfig(num_hidden_layers=2, num_kv_shared_layers=0, intermediate_size=[256, 258]),
            r"\[256, 258\] intermediate_size",
        ),
        (Phi3Config(), "transformers splits it by rowwise_split_input"),
        (Qwen3NextConfig(), "it has layers of linear_attention"),
        (Qwen2_5_VLConfig(), "it sees images"),
    ],
)
def test_a_family_whose_layers_cannot_be_shared_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"tensor_parallel_size 4: the layers of a {config.model_type} .*{reason}"):
        layer_specs(config, 4)
