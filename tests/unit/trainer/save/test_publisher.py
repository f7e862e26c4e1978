"""A version that is written behind the next step holds the weights of its own, also where it becomes the reference."""

import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.errors import Retryable, UserError
from common.files import weights
from common.files.run_folder import step_dir
from model import devices
from model.reference import Reference
from tests.support.configs import config_in
from tests.support.plain_policy import OneRank, PlainPolicy
from tests.support.protocol_helpers import make_config
from tests.support.raising import raising
from tests.support.tiny import tiny_model
from trainer.save import moving_reference
from trainer.save.publisher import Publisher, writes_behind
from trainer.save.write_version import DeltaWriter


class Bench:
    """A publisher of a plain policy in `folder`, and all that it says and counts."""

    def __init__(self, folder: Path, vllm: dict[str, Any] | None = None, **trainer: Any) -> None:
        config = make_config(folder, trainer=trainer, weights={"dir": folder / "weights"}, vllm=vllm or {})
        self.policy: Any = PlainPolicy(tiny_model(folder / "model"))
        self.policy.device = torch.device("cpu")
        credited = list[tuple[int, int, str | None]]()  # (cursor, version, eval_id)
        self.rank_zero: Any = SimpleNamespace(incarnation="ab12", versions_in_use=list, credited=credited)
        self.rank_zero.commit = lambda cursor, new, eval_id, _: credited.append((cursor, new.version, eval_id))
        self.seconds = defaultdict[str, float](float)
        ranks: Any = OneRank()
        behind: Any = OneRank() if writes_behind(config) else None
        self.publisher = Publisher(config, self.policy, ranks, behind, self.rank_zero, self.seconds)
        self.publish(0)

    def publish(self, version: int, eval_id: str | None = None) -> None:
        self.publisher.publish(version, "run", 300, 8 * version, eval_id, 4)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.model.named_parameters()}

    def written(self) -> dict[str, torch.Tensor]:
        return load_file(Path(self.publisher.published.weights_dir) / "model-00001-of-00001.safetensors")


def test_a_version_being_written_does_not_notice_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, begun = Bench(tmp_path, max_staleness=1), time.monotonic()
    assert bench.rank_zero.credited == [(0, 0, None)], "the first version of a life is waited for"
    may_commit, commit = threading.Event(), weights.commit

    def slow(*arguments: Any) -> weights.Published:
        assert may_commit.wait(20)
        return commit(*arguments)

    monkeypatch.setattr(weights, "commit", slow)
    before, spent_s = bench.parameters(), bench.seconds["sync/publish_s"]
    assert not bench.publisher.is_writing()
    bench.publish(1, "v1")
    assert bench.publisher.is_writing()
    bench.policy.disturb(1)  # the next optimizer step
    assert bench.rank_zero.credited == [(0, 0, None)], "nobody hears of a version that is not whole"
    assert bench.seconds.keys() == {"sync/snapshot_s", "sync/write_s", "sync/publish_s"}
    assert 0 <= bench.seconds["sync/publish_s"] - spent_s <= time.monotonic() - begun
    bench.seconds.clear()
    may_commit.set()
    bench.publisher.finish()
    assert not bench.publisher.is_writing()
    assert bench.rank_zero.credited[1:] == [(8, 1, "v1")]
    written = bench.written()
    assert written.keys() == before.keys() and all(torch.equal(written[k], before[k]) for k in before)
    assert not torch.equal(before["model.norm.weight"], bench.parameters()["model.norm.weight"])
    assert bench.seconds.keys() == {"sync/write_s", "sync/publish_s"}, "it was waited for"
    assert all(0 <= seconds <= time.monotonic() - begun for seconds in bench.seconds.values())


@pytest.mark.parametrize("interrupts", [0, 1])
def test_any_end_waits_for_the_last_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupts: int) -> None:
    bench, commit = Bench(tmp_path, max_staleness=1), weights.commit
    monkeypatch.setattr(weights, "commit", lambda *given: (time.sleep(0.3), commit(*given))[1])
    bench.publish(1)
    for _ in range(interrupts):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            bench.publisher.finish()
        signal.signal(signal.SIGALRM, before)
    bench.publisher.close()
    assert not bench.publisher.is_writing() and bench.rank_zero.credited[1:] == [(8, 1, None)]


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_is_freed_before_a_sleeper_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    bench = Bench(tmp_path, {"enable_sleep_mode": sleeps}, max_staleness=0)
    credited: list[int] = []
    monkeypatch.setattr(devices, "release_cache", lambda: credited.append(len(bench.rank_zero.credited)))
    bench.publish(1)
    bench.publish(1)  # after a step that was skipped
    assert credited == ([1, 2] if sleeps else [])
    assert len(bench.rank_zero.credited) == 3


def test_what_ends_the_writing_is_raised_where_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, max_staleness=1)
    monkeypatch.setattr(weights, "commit", raising(PermissionError("weights.dir is gone")))
    bench.publish(1)
    with pytest.raises(PermissionError, match=r"weights\.dir is gone"):
        bench.publish(2)
    assert bench.rank_zero.credited == [(0, 0, None)]


def test_a_version_after_a_skipped_step_is_credited_again_and_not_written_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_staleness=1)
    bench.publisher.publish(0, "run", 300, 8, None, 4)
    bench.publisher.finish()
    assert bench.rank_zero.credited == [(0, 0, None), (8, 0, None)]


@pytest.mark.parametrize(
    ("max_staleness", "dead_groups", "is_behind"),
    [(1, "skip", True), (0, "skip", False), (1, "resample", False)],  # refills belong to the cursor
)
def test_who_runs_ahead_may_write_behind(tmp_path: Path, max_staleness: int, dead_groups: str, is_behind: bool) -> None:
    trainer, algorithm = {"max_staleness": max_staleness}, {"dead_groups": dead_groups}
    assert writes_behind(make_config(tmp_path, trainer=trainer, algorithm=algorithm)) == is_behind


# ---- reference.sync_steps: which policy is the reference of a step, that it was published, and what a resume finds


PROMPT, COMPLETION = [5, 6, 7], [8, 9, 10, 11]


class Follower:
    def __init__(self, folder: Path) -> None:
        model, self.folder = {"path": str(tiny_model(folder / "model")), "dtype": "float32"}, folder
        self.config = config_in(folder, model=model, algorithm={"beta": 0.1}, reference={"sync_steps": 2})
        self.policy: Any = PlainPolicy(folder / "model", delta_writer=DeltaWriter(full_every=2))
        self.restart()

    def restart(self) -> None:
        self.reference = Reference(self.config, torch.device("cpu"))
        tokenizer = AutoTokenizer.from_pretrained(self.config.model.path)
        ranks: Any = OneRank()
        self.moving = moving_reference.MovingReference(self.config, self.policy, ranks, tokenizer, self.reference)

    def follow(self, step: int, moves: bool = True) -> tuple[list[float], list[float]]:
        """(log-probs of the policy, of the reference) after this step."""
        if moves:
            self.policy.disturb(step)
        if self.moving.is_due(step):
            self.moving.follow(step, self.policy.publish(self.folder / "weights", step))
        [reference] = self.reference.logprobs(np.array(PROMPT, np.int32), [np.array(COMPLETION, np.int32)])
        return self.policy.logprobs(PROMPT, COMPLETION, 1.0).tolist(), reference.tolist()


def test_every_second_policy_is_the_reference_of_the_steps_behind_it_also_of_a_resumed_run(tmp_path: Path) -> None:
    follower, checkpoint = Follower(tmp_path), step_dir(tmp_path / "run" / "checkpoints", 3)
    begun, seen = follower.follow(0, moves=False), {step: follower.follow(step) for step in (1, 2, 3)}
    checkpoint.mkdir(parents=True)
    seen[4] = follower.follow(4)
    assert [seen[step][1] for step in (1, 2, 3, 4)] == [begun[1], seen[2][0], seen[2][0], seen[4][0]]
    assert seen[1][0] != begun[0] == begun[1] and seen[3][0] != seen[3][1]
    follower.restart()
    assert follower.follow(3, moves=False)[1] == seen[2][0], "what a checkpoint would resume with is kept"
    follower.restart()
    assert follower.follow(4, moves=False)[1] == seen[4][0], "saved on the way out, before anything was published"
    checkpoint.rmdir()
    follower.follow(6)
    assert [path.name for path in (tmp_path / "run" / "reference").iterdir()] == ["step_000006"]
    follower.restart()
    with pytest.raises(UserError, match="step_000004 is gone, the reference since step 4"):
        follower.follow(5)


def test_a_reference_other_than_the_published_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, keep = Follower(tmp_path), moving_reference.keep_version

    def damaged(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.norm.weight"][3] += 2**-20
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(moving_reference, "keep_version", damaged)
    with pytest.raises(Retryable, match=r"model\.norm\.weight is .*, published was"):
        follower.follow(2)
