"""A run that is killed and resumed equals one that never was: every file of every checkpoint, by SHA-256.

Real DeepSpeed ranks train from a recording. A run is killed again and again, resumed each time, and in the end compared
with a straight one: weights, optimizer, learning rates, cursor, metrics, samples and the final model.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common import run_folder
from common.failpoints import FAILPOINTS
from report.run_log import read_jsonl
from tests.support.gloo_data import GROUPS_PER_STEP, half_dead
from tests.support.protocol_helpers import received
from tests.support.replay_worker import MODEL_CARD, Life, Stack, stack
from tests.support.tier import ALL, count, full
from trainer.link.recording import Recorder
from trainer.save import resume

STEPS = 10
Layout = tuple[int, int, str]  # ranks, ZeRO stage, dtype
LAYOUTS = [(ranks, stage, dtype) for ranks in (1, 2) for stage in (1, 2) for dtype in ("float32", "bfloat16")]
SHORT = [(1, 1, "bfloat16"), (2, 2, "float32")]

# What no two runs share: times, and what is computed from them.
TIMES = ("time", "step_time", "tokens_per_second")
CLOCKED = ("_s", "_tps", "_waits")  # seconds, throughputs, and advice on them


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


def train(
    trainers: Stack,
    name: str,
    layout: Layout,
    armed: dict[int, str],
    algorithm: dict[str, Any] | None = None,
    **trainer: Any,
) -> Life:
    """One life. armed: TANDEM_FAILPOINT by rank. It resumes if the run has a checkpoint."""
    ranks, stage, dtype = layout
    return trainers.run(
        name,
        ranks,
        stage,
        {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()},
        run={"resume": bool(steps_saved(trainers.folder / name))},
        model={"dtype": dtype},
        algorithm=algorithm or {},
        trainer={"max_steps": STEPS, "save_steps": 1, "save_limit": STEPS, "dist_backend": "gloo"} | trainer,
    )


def steps_saved(output_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in run_folder.step_dirs(output_dir / "checkpoints")]


@cache
def straight(trainers: Stack, layout: Layout) -> Path:
    """The run that nobody interrupts."""
    name = "straight-" + "-".join(map(str, layout))
    life = train(trainers, name, layout, {})
    assert set(life.codes) == {0}, life.logs[0][-3000:]
    return trainers.folder / name


def sha256_of_tree(folder: Path) -> dict[str, str]:
    """By file name. The record of a checkpoint counts without the run's random id and the digest over it."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MODEL_CARD):
        data = path.read_bytes()
        if path.name == run_folder.COMMIT:
            record = json.loads(data)
            data = json.dumps({k: v for k, v in record.items() if k not in ("run_id", "blake3")}).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    assert found, f"{folder} is empty"
    return found


def history(path: Path) -> str:
    """SHA-256 of a record file without what depends on the clock."""
    kept = [
        {k: v for k, v in record.items() if k not in TIMES and not k.endswith(CLOCKED)} for record in read_jsonl(path)
    ]
    assert len(kept) >= STEPS
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def require_equal(found: Path, expected: Path, steps: list[int]) -> None:
    for step in steps:
        folders = [run_folder.step_dir(run / "checkpoints", step) for run in (found, expected)]
        assert sha256_of_tree(folders[0]) == sha256_of_tree(folders[1]), f"step {step}"
    final = [sha256_of_tree(run / "final") for run in (found, expected)]
    assert final[0] == final[1]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert history(found / name) == history(expected / name), name


# ---- R3: 20 interruption points ----------------------------------------------------------------------------

# Inside and at the end of every step; the end is before its checkpoint in odd steps and after it in even ones.
POINTS = [
    (step, point)
    for step in range(1, STEPS + 1)
    for point in ("trainer.micro_batch", "trainer.stepped" if step % 2 else "checkpoint.committed")
]


def points_of(layout: Layout) -> list[tuple[int, str]]:
    """A quarter of the points, so that the four layouts of each number of ranks meet all of them."""
    mine = LAYOUTS.index(layout) % 4
    return [point for i, point in enumerate(POINTS) if (i + i // 4) % 4 == mine]


def arm(step: int, point: str, saved: int, ranks: int) -> dict[int, str]:
    """TANDEM_FAILPOINT by rank, for a life that begins after `saved` steps. Both ranks take turns where both pass."""
    hits = step - saved
    if point == "trainer.micro_batch":
        hits = (hits - 1) * GROUPS_PER_STEP // ranks + 2  # the second micro-batch of that step
    rank = 0 if point == "checkpoint.committed" else step // 2 % ranks
    return {rank: f"{point}:{hits}:kill"}


def test_the_layouts_of_each_number_of_ranks_meet_all_20_points() -> None:
    for half in (LAYOUTS[:4], LAYOUTS[4:]):
        assert sorted(point for layout in half for point in points_of(layout)) == sorted(POINTS)
    assert len(POINTS) == 20
    for layout in SHORT:
        assert {point for _, point in points_of(layout)} == {point for _, point in POINTS}


@cache
def interrupted(trainers: Stack, layout: Layout) -> Path:
    """The run that is killed at each of its points and resumed each time. Every kill must have happened."""
    name = "interrupted-" + "-".join(map(str, layout))
    output_dir = trainers.folder / name
    for step, point in points_of(layout):
        saved = max(steps_saved(output_dir), default=0)
        life = train(trainers, name, layout, arm(step, point, saved, layout[0]))
        assert -signal.SIGKILL in life.codes, f"step {step}, {point}: {life.codes}\n{life.logs[0][-3000:]}"
        assert max(steps_saved(output_dir), default=0) == step - (point != "checkpoint.committed")
    life = train(trainers, name, layout, {})
    assert set(life.codes) == {0}, life.logs[0][-3000:]
    return output_dir


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout in SHORT else full) for layout in LAYOUTS],
    ids=lambda layout: f"{layout[0]}rank-zero{layout[1]}-{layout[2]}",
)
def test_a_run_interrupted_at_five_points_equals_a_straight_one(trainers: Stack, layout: Layout) -> None:
    require_equal(interrupted(trainers, layout), straight(trainers, layout), list(range(1, STEPS + 1)))


WITH_A_CRITIC = {"adv_estimator": "gae", "kl_in_reward": True, "lam": 0.95, "num_iterations": 2}


def test_a_run_with_a_critic_interrupted_at_its_points_equals_a_straight_one(trainers: Stack) -> None:
    layout = (2, 1, "float32")
    life = train(trainers, "critic-straight", layout, {}, algorithm=WITH_A_CRITIC)
    assert set(life.codes) == {0}, life.logs[0][-3000:]
    kills = {1: "trainer.stepped:3:kill"}, {0: "checkpoint.committed:2:kill"}, {0: "trainer.micro_batch:2:kill"}
    for armed in (*kills[: count(1, 3)], {}):
        life = train(trainers, "critic", layout, armed, algorithm=WITH_A_CRITIC)
        assert (-signal.SIGKILL in life.codes) == bool(armed), f"{armed}: {life.codes}\n{life.logs[0][-3000:]}"
    found, expected = trainers.folder / "critic", trainers.folder / "critic-straight"
    require_equal(found, expected, list(range(2, STEPS + 1, 2)))
    assert {"critic/config.json", "critic/model.safetensors"} <= set(sha256_of_tree(found / "final"))
    first, last = (sha256_of_tree(run_folder.step_dir(found / "checkpoints", step)) for step in (2, STEPS))
    assert first["critic/model.safetensors"] != last["critic/model.safetensors"]


def test_every_step_moves_weights_and_optimizer_so_that_equal_files_mean_something(trainers: Stack) -> None:
    checkpoints = straight(trainers, SHORT[0]) / "checkpoints"
    trees = [sha256_of_tree(run_folder.step_dir(checkpoints, step)) for step in range(1, STEPS + 1)]
    for changing in ("model.safetensors", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        (name,) = (name for name in trees[0] if name.endswith(changing))
        # the learning rate of the first step is 0, by the warm-up
        assert len({tree[name] for tree in trees}) >= STEPS - 1, changing


@full
def test_the_20_points_are_met_by_one_rank_and_by_two(figure: Callable[[str, str], None], trainers: Stack) -> None:
    equal, checkpoints = 0, 0
    for layout in LAYOUTS:
        require_equal(interrupted(trainers, layout), straight(trainers, layout), list(range(1, STEPS + 1)))
        equal, checkpoints = equal + len(points_of(layout)), checkpoints + STEPS
    assert equal == 2 * len(POINTS)
    figure(
        "R3",
        f"{equal} SIGKILLs at {len(POINTS)} points, 1 and 2 ranks, ZeRO 1 and 2, float32 and bfloat16: {checkpoints} "
        "checkpoints, metrics and final models equal by SHA-256",
    )


def test_when_checkpoints_are_written_changes_nothing_that_is_trained(trainers: Stack) -> None:
    """After every step, and never."""
    layout, name = SHORT[1], "never-saved"
    life = train(trainers, name, layout, {}, save_steps=0)
    assert set(life.codes) == {0}, life.logs[0][-3000:]
    assert steps_saved(trainers.folder / name) == []
    require_equal(trainers.folder / name, straight(trainers, layout), [])


# ---- what else a checkpoint must hold -----------------------------------------------------------------------

MINI_BATCHES = {"steps_per_generation": 2, "shuffle_mini_batches": True, "loss_type": "dapo", "kl_in_reward": True}


def replayed(trainers: Stack, name: str, ranks: int, armed: dict[int, str], **sections: Any) -> Life:
    output_dir = trainers.folder / name
    trainer = {"max_steps": STEPS, "save_steps": 1, "save_limit": STEPS, "lr_scheduler_type": "constant"}
    run = {"resume": bool(steps_saved(output_dir))} | sections.pop("run", {})
    environment = {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()}
    return trainers.run(name, ranks, 1, environment, run=run, trainer=trainer, **sections)


def require_exact_resume(trainers: Stack, name: str, ranks: int, armed: dict[int, str], **sections: Any) -> list[int]:
    """A run that is killed once and resumed equals a straight one. Returns the steps of its checkpoints."""
    runs = [trainers.folder / f"{name}-{which}" for which in ("straight", "killed")]
    assert set(replayed(trainers, runs[0].name, ranks, {}, **sections).codes) == {0}
    killed = replayed(trainers, runs[1].name, ranks, armed, **sections)
    assert -signal.SIGKILL in killed.codes, killed.logs[0][-3000:]
    assert 0 < len(steps_saved(runs[1])) < len(steps_saved(runs[0]))
    life = replayed(trainers, runs[1].name, ranks, {}, **sections)
    assert set(life.codes) == {0}, life.logs[0][-3000:]
    steps = steps_saved(runs[0])
    require_equal(runs[1], runs[0], steps)
    return steps


def test_a_run_killed_inside_a_batch_of_shuffled_mini_batches_resumes_at_its_begin(
    trainers: Stack,
) -> None:
    """The fifth step is the first one of the third batch."""
    saved = require_exact_resume(trainers, "mini-batches", 1, {0: "trainer.stepped:5:kill"}, algorithm=MINI_BATCHES)
    assert saved == [2, 4, 6, 8, 10]
    checkpoints = trainers.folder / "mini-batches-killed" / "checkpoints"
    commits = [json.loads((folder / run_folder.COMMIT).read_text()) for folder in run_folder.step_dirs(checkpoints)]
    assert [c["cursor"] for c in commits] == [2 * GROUPS_PER_STEP * n for n in range(1, 6)]


def test_a_run_that_resamples_dead_groups_and_is_killed_inside_a_batch_resumes_exactly(trainers: Stack) -> None:
    recorder = Recorder(trainers.folder / "half-dead", cursor=0)
    recorder.append([received(half_dead(g)) for g in range(2 * STEPS * GROUPS_PER_STEP)])
    recorder.close()
    sections = {"run": {"replay": str(trainers.folder / "half-dead")}, "algorithm": {"dead_groups": "resample"}}
    require_exact_resume(trainers, "resampled", 2, {1: "trainer.micro_batch:9:kill"}, **sections)
    rows = read_jsonl(trainers.folder / "resampled-killed" / "metrics.jsonl")
    assert [row["resampled_groups"] for row in rows] == [3.0] + [4.0] * (STEPS - 1)  # the first begins with a live one
    assert {row["empty_slots"] for row in rows} == {0.0}


@full  # a step from a checkpoint of adapters is test_lora_training's
def test_a_run_that_trains_adapters_and_is_killed_inside_a_step_resumes_exactly(trainers: Stack) -> None:
    require_exact_resume(trainers, "lora", 2, {1: "trainer.micro_batch:7:kill"}, lora={"r": 4})
    files = sha256_of_tree(trainers.folder / "lora-killed" / "final")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    assert "model.safetensors" not in files and "config.json" not in files


# ---- what a checkpoint must not hold: settings that may change -----------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "stage"), [(2, 3), *(pytest.param(*layout, marks=full) for layout in ((1, 0), (2, 1)))]
)
def test_a_run_resumed_with_another_learning_rate_goes_on_with_it(trainers: Stack, ranks: int, stage: int) -> None:
    trainer = {"save_steps": 1, "lr_scheduler_type": "linear", "dist_backend": "gloo", "warmup_steps": 0}
    for steps, rate in ((2, 1e-2), (6, 6e-4)):
        own = {"max_steps": steps, "learning_rate": rate}
        run = {"resume": steps == 6}
        life = trainers.run(f"rate-{ranks}-{stage}", ranks, stage, {}, run=run, trainer=trainer | own)
        assert set(life.codes) == {0}, life.logs[0][-3000:]
    rows = read_jsonl(trainers.folder / f"rate-{ranks}-{stage}" / "metrics.jsonl")
    # 6e-4 · (6 − steps so far) / 6
    assert [row["learning_rate"] for row in rows[2:]] == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4])


def test_a_run_resumed_with_fewer_steps_than_it_has_made_leaves_its_final_model(trainers: Stack) -> None:
    for steps in (3, 2):
        life = train(trainers, "fewer", (1, 1, "float32"), {}, max_steps=steps)
        assert set(life.codes) == {0}, life.logs[0][-3000:]
        (trainers.folder / "fewer" / "final").rename(trainers.folder / f"fewer-{steps}")
    assert steps_saved(trainers.folder / "fewer") == [1, 2, 3]
    first, second = (sha256_of_tree(trainers.folder / f"fewer-{steps}") for steps in (3, 2))
    assert first["model.safetensors"] == second["model.safetensors"]


# ---- R1: SIGKILL at every failpoint of a checkpoint, with two ranks ----------------------------------------

KILLED = (2, 2, "float32")
# Files of a life before its checkpoint, on rank 0: config.json and two versions' manifests. Then the checkpoint's:
# DeepSpeed's model, the optimizer shard, which is rank 1's only one, and commit.json.
KILLS: list[tuple[int, str, int]] = [
    *((1, f"file.{what}", 1) for what in ("written", "synced", "renamed")),
    *((0, f"file.{what}", hits) for what in ("written", "synced", "renamed") for hits in (4, 5, 6)),
    *((0, f"checkpoint.{what}", 1) for what in ("started", "engine", "committed")),
    (1, "checkpoint.engine", 1),
    *((0, f"dir.{what}", 3) for what in ("synced", "renamed", "committed")),
    (0, "dir.trashed", 1),
    *((rank, "weights.shard", 2) for rank in (0, 1)),
    (0, "weights.manifest", 2),
]


def test_the_kill_list_names_every_failpoint_of_files_checkpoints_and_weights() -> None:
    families = ("file.", "dir.", "checkpoint.", "weights.")
    assert {point for _, point, _ in KILLS} == {point for point in FAILPOINTS if point.startswith(families)}


def kills() -> list[tuple[int, str, int]]:
    """In the short command each failpoint once, as the last of its list."""
    return KILLS if ALL else list({point: kill for kill in KILLS for point in [kill[1]]}.values())


def test_two_ranks_killed_at_every_checkpoint_failpoint_lose_nothing(
    figure: Callable[[str, str], None], trainers: Stack
) -> None:
    output_dir, said = trainers.folder / "killed", []
    train(trainers, "killed", KILLED, {0: "checkpoint.started:2:kill"}, save_limit=2)
    assert steps_saved(output_dir) == [1]
    for rank, point, hits in kills():
        saved = steps_saved(output_dir)
        life = train(trainers, "killed", KILLED, {rank: f"{point}:{hits}:kill"}, save_limit=2)
        assert f"failpoint {point} hit {hits}: kill" in life.logs[rank], life.logs[rank][-3000:]
        assert life.codes[rank] == -signal.SIGKILL and life.codes[1 - rank] != 0
        newest = resume.newest_valid(output_dir / "checkpoints", said.append)
        assert newest is not None
        assert saved[-1] <= int(newest.name.removeprefix("step_")) <= saved[-1] + 1
    assert said == [], "a kill made a checkpoint visible that is not whole"
    life = train(trainers, "killed", KILLED, {}, save_limit=2)
    assert life.codes == [0, 0], life.logs[0][-3000:]
    require_equal(output_dir, straight(trainers, KILLED), [STEPS - 1, STEPS])
    assert not list(output_dir.rglob(".t*"))
    num_points = len({(rank, point) for rank, point, _ in kills()})
    figure(
        "R1",
        f"{len(kills()) + 1} SIGKILLs of two DeepSpeed ranks at {num_points} places of a save: at most one step "
        "trained again, then all state as in a straight run",
    )
