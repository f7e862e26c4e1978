"""A run that is killed and resumed equals one that never was: every file of every checkpoint, by SHA-256.

Real DeepSpeed ranks train from a recording. A run is killed again and again, resumed each time, and in the end compared
with a straight one: weights, optimizer, learning rates, cursor, metrics, samples and the final model.
"""

import hashlib
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.failpoints import FAILPOINTS
from common.files import run_folder
from report.run_log import read_jsonl
from tests.support.gloo_data import GROUP_PPO, GROUPS_PER_STEP, half_dead
from tests.support.plain_policy import OneRank
from tests.support.protocol_helpers import received
from tests.support.replay_worker import MODEL_CARD, RankEnds, Trainers
from tests.support.tier import ALL, count, full
from trainer.link.recording import Recorder
from trainer.save import resume

STEPS = 10
Layout = tuple[int, int, str]  # ranks, ZeRO stage, dtype
Armed = dict[int, str]  # TANDEM_FAILPOINT by rank
LAYOUTS = [(ranks, stage, dtype) for ranks in (1, 2) for stage in (1, 2) for dtype in ("float32", "bfloat16")]
SHORT = [(1, 1, "bfloat16"), (2, 2, "float32")]
# with the log-probs of a reference, values and score norms: every forward there is
EVERY_FORWARD: dict[str, Any] = {
    "reference": {"on": "trainer"},
    "algorithm": GROUP_PPO["algorithm"] | {"num_iterations": 2, "kl_in_reward": False},
    "critic": {"learning_rate": 2e-3},
}
TWO_KILLS: list[Armed] = [{1: "trainer.micro_batch:6:kill"}, {0: "checkpoint.committed:2:kill"}]

# What no two runs share: times, and what is computed from them.
TIMES = ("time", "step_time", "tokens_per_second")
CLOCKED = ("_s", "_tps", "_waits")  # seconds, throughputs, and advice on them


def train(trainers: Trainers, name: str, layout: Layout, armed: Armed, **sections: Any) -> RankEnds:
    """One life. It resumes if the run has a checkpoint."""
    ranks, stage, dtype = layout
    common = {
        "run": {"resume": bool(steps_saved(trainers.folder / name))},
        "model": {"dtype": dtype},
        "trainer": {"max_steps": STEPS, "save_steps": 1, "save_limit": STEPS},
    }
    chosen = sections | {section: given | sections.get(section, {}) for section, given in common.items()}
    environment = {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()}
    return trainers.run(name, ranks, stage, environment, **chosen)


def finished(trainers: Trainers, name: str, layout: Layout, **sections: Any) -> Path:
    """The folder of a run after a life that nobody interrupts."""
    if not (trainers.folder / name / "final").is_dir():
        life = train(trainers, name, layout, {}, **sections)
        assert set(life.codes) == {0}, life.logs[0][-3000:]
    return trainers.folder / name


def straight(trainers: Trainers, layout: Layout) -> Path:
    return finished(trainers, "-".join(map(str, (*layout, "straight"))), layout)


def steps_saved(output_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in run_folder.step_dirs(output_dir / "checkpoints")]


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


def require_equal(found: Path, expected: Path, steps: Sequence[int]) -> None:
    folders = [run_folder.step_dir(Path("checkpoints"), step) for step in steps]
    for folder in (*folders, "final"):
        assert sha256_of_tree(found / folder) == sha256_of_tree(expected / folder), folder
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert history(found / name) == history(expected / name), name


def require_exact_resume(
    trainers: Trainers, name: str, layout: Layout, kills: Sequence[Armed], **sections: Any
) -> Path:
    """A run that is killed at each of these points and resumed equals a straight one. Returns its folder."""
    expected = finished(trainers, f"{name}-straight", layout, **sections)
    for armed in kills:
        life = train(trainers, f"{name}-killed", layout, armed, **sections)
        assert -signal.SIGKILL in life.codes, f"{armed}: {life.codes}\n{life.logs[0][-3000:]}"
    found = finished(trainers, f"{name}-killed", layout, **sections)
    require_equal(found, expected, steps_saved(expected))
    return found


# ---- R3 ------------------------------------------------------------------------------------------------------


def five_kills(ranks: int) -> list[Armed]:
    """Inside steps, and at their ends before and after a checkpoint; the points are counted anew in each life."""
    return [
        {0: "trainer.micro_batch:2:kill"},
        {ranks - 1: "trainer.stepped:2:kill"},
        {0: "checkpoint.committed:2:kill"},
        {ranks - 1: "trainer.micro_batch:6:kill"},
        {0: "trainer.stepped:3:kill"},
    ]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout in SHORT else full) for layout in LAYOUTS],
    ids=lambda layout: f"{layout[0]}rank-zero{layout[1]}-{layout[2]}",
)
def test_a_run_interrupted_at_five_points_equals_a_straight_one(
    figure: Callable[[str, str], None], trainers: Trainers, layout: Layout
) -> None:
    kills = five_kills(layout[0])
    require_exact_resume(trainers, "-".join(map(str, layout)), layout, kills)
    figure("R3", f"{layout}: {len(kills)} SIGKILLs, checkpoints, metrics and final models equal by SHA-256")


def test_when_checkpoints_are_written_changes_nothing_that_is_trained(trainers: Trainers) -> None:
    """After every step, and never."""
    never = finished(trainers, "never-saved", SHORT[1], trainer={"save_steps": 0})
    assert steps_saved(never) == []
    require_equal(never, straight(trainers, SHORT[1]), [])


# ---- what else a checkpoint must hold -----------------------------------------------------------------------

MINI_BATCHES = {"steps_per_generation": 2, "shuffle_mini_batches": True, "loss_type": "dapo", "kl_in_reward": True}
WITH_A_CRITIC = {"adv_estimator": "gae", "kl_in_reward": True, "lam": 0.95, "num_iterations": 2}
CRITICS_KILLS: list[Armed] = [
    {1: "trainer.stepped:3:kill"},
    {0: "checkpoint.committed:2:kill"},
    {0: "trainer.micro_batch:2:kill"},
]


# ranks, kills, settings, and the groups of a step
BATCHES: dict[str, tuple[int, list[Armed], dict[str, Any], int]] = {
    "critic": (2, CRITICS_KILLS[: count(1, 3)], WITH_A_CRITIC, GROUPS_PER_STEP // 2),
    # the fifth step is the first one of the third batch
    "shuffled": (1, [{0: "trainer.stepped:5:kill"}], MINI_BATCHES, GROUPS_PER_STEP),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_run_killed_inside_a_batch_resumes_at_its_begin(trainers: Trainers, name: str) -> None:
    ranks, kills, algorithm, groups_a_step = BATCHES[name]
    found = require_exact_resume(trainers, name, (ranks, 1, "float32"), kills, algorithm=algorithm)
    assert (found / "final" / "critic" / "model.safetensors").exists() == (name == "critic")
    commits = [json.loads((f / run_folder.COMMIT).read_text()) for f in run_folder.step_dirs(found / "checkpoints")]
    assert [c["cursor"] for c in commits] == [groups_a_step * step for step in steps_saved(found)]


def test_a_run_whose_reference_moves_and_that_is_killed_around_its_refresh_resumes_exactly(trainers: Trainers) -> None:
    moving = {"reference": {"on": "trainer", "sync_steps": 3}, "algorithm": {"beta": 0.1}}
    kills: list[Armed] = [{0: "weights.manifest:4:kill"}, {0: "checkpoint.started:2:kill"}, TWO_KILLS[0]]
    require_exact_resume(trainers, "moving", SHORT[1], kills, **moving)


def test_a_run_that_resamples_dead_groups_and_is_killed_inside_a_batch_resumes_exactly(trainers: Trainers) -> None:
    recorder = Recorder(trainers.folder / "half-dead", cursor=0)
    recorder.append([received(half_dead(g)) for g in range(2 * STEPS * GROUPS_PER_STEP)])
    recorder.close()
    sections = {"run": {"replay": str(trainers.folder / "half-dead")}, "algorithm": {"dead_groups": "resample"}}
    kills = [{1: "trainer.micro_batch:9:kill"}]
    found = require_exact_resume(trainers, "resampled", (2, 1, "float32"), kills, **sections)
    rows = read_jsonl(found / "metrics.jsonl")
    assert [row["resampled_groups"] for row in rows] == [3.0] + [4.0] * (STEPS - 1)  # the first begins with a live one


# ---- what a checkpoint must not hold: settings that may change -----------------------------------------------


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), pytest.param(1, 0, marks=full)])
def test_a_run_resumed_with_another_learning_rate_goes_on_with_it(trainers: Trainers, ranks: int, stage: int) -> None:
    name = f"rate-{ranks}-{stage}"
    for steps, rate in ((2, 1e-2), (6, 6e-4)):
        trainer = {"max_steps": steps, "learning_rate": rate, "warmup_steps": 0}
        life = train(trainers, name, (ranks, stage, "float32"), {}, trainer=trainer)
        assert set(life.codes) == {0}, life.logs[0][-3000:]
    rows = read_jsonl(trainers.folder / name / "metrics.jsonl")
    # 6e-4 · (6 − steps so far) / 6
    assert [row["learning_rate"] for row in rows[2:]] == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4])


def test_a_run_resumed_with_fewer_steps_than_it_has_made_leaves_its_final_model(trainers: Trainers) -> None:
    models = []
    for steps in (3, 2):
        final = finished(trainers, "fewer", (1, 1, "float32"), trainer={"max_steps": steps}) / "final"
        models.append((final / "model.safetensors").read_bytes())
        final.rename(final.with_name(f"final-{steps}"))
    assert steps_saved(trainers.folder / "fewer") == [1, 2, 3]
    assert models[0] == models[1]


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
# in the short command each failpoint once, as the last of its list
CHOSEN = KILLS if ALL else list({point: (rank, point, hits) for rank, point, hits in KILLS}.values())


def test_the_kill_list_names_every_failpoint_of_files_checkpoints_and_weights() -> None:
    families = ("file.", "dir.", "checkpoint.", "weights.")
    assert {point for _, point, _ in KILLS} == {point for point in FAILPOINTS if point.startswith(families)}


def test_two_ranks_killed_at_every_checkpoint_failpoint_lose_nothing(
    figure: Callable[[str, str], None], trainers: Trainers
) -> None:
    output_dir, said = trainers.folder / "killed", []
    two = {"save_limit": 2}
    train(trainers, "killed", KILLED, {0: "checkpoint.started:2:kill"}, trainer=two)
    assert steps_saved(output_dir) == [1]
    for rank, point, hits in CHOSEN:
        saved = steps_saved(output_dir)
        life = train(trainers, "killed", KILLED, {rank: f"{point}:{hits}:kill"}, trainer=two)
        assert f"failpoint {point} hit {hits}: kill" in life.logs[rank], life.logs[rank][-3000:]
        assert life.codes[rank] == -signal.SIGKILL and life.codes[1 - rank] != 0
        newest = resume.newest_valid(output_dir / "checkpoints", OneRank(), said.append)
        assert newest is not None
        assert saved[-1] <= int(newest.name.removeprefix("step_")) <= saved[-1] + 1
    assert said == [], "a kill made a checkpoint visible that is not whole"
    finished(trainers, "killed", KILLED, trainer=two)
    require_equal(output_dir, straight(trainers, KILLED), [STEPS - 1, STEPS])
    assert not list(output_dir.rglob(".t*"))
    num_points = len({(rank, point) for rank, point, _ in CHOSEN})
    figure(
        "R1",
        f"{len(CHOSEN) + 1} SIGKILLs of two DeepSpeed ranks at {num_points} places of a save: at most one step "
        "trained again, then all state as in a straight run",
    )
