"""A version that is written behind the next step holds the weights of its own, also where it becomes the reference."""

import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from trainer.save.write_version import DeltaWriter, Snapshot


class Bench:
    """A publisher of a plain policy in `folder`, and the CREDITs that it sends: (cursor, version, evaluation)."""

    def __init__(self, folder: Path, vllm: dict[str, Any] | None = None, max_staleness: int = 1) -> None:
        trainer = {"max_staleness": max_staleness}
        config = make_config(folder, trainer=trainer, weights={"dir": folder / "weights"}, vllm=vllm or {})
        self.policy: Any = PlainPolicy(tiny_model(folder / "model"))
        self.credited: list[tuple[int, int, str | None]] = []
        source: Any = SimpleNamespace(incarnation="ab12", versions_in_use=list, commit=self.commit)
        self.seconds = defaultdict[str, float](float)
        ranks: Any = OneRank()
        behind = ranks if writes_behind(config) else None
        self.publisher = Publisher(config, self.policy, ranks, behind, source, self.seconds)
        self.publish(0)

    def commit(self, cursor: int, new: weights.Published, eval_id: str | None, _num_problems: int) -> None:
        self.credited.append((cursor, new.version, eval_id))

    def publish(self, version: int, cursor: int | None = None) -> None:
        self.publisher.publish(version, "run", 300, 8 * version if cursor is None else cursor, f"v{version}", 4)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.model.named_parameters()}


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is clear, no version is written."""
    event = threading.Event()
    event.set()
    write = Snapshot.write

    def slow(*arguments: Any) -> weights.Published:
        assert event.wait(20)
        return write(*arguments)

    monkeypatch.setattr(Snapshot, "write", slow)
    return event


def test_a_version_being_written_does_not_notice_the_next_step(tmp_path: Path, may_write: threading.Event) -> None:
    begun = time.monotonic()
    bench = Bench(tmp_path)
    assert bench.credited == [(0, 0, "v0")], "the first version of a life is waited for"
    may_write.clear()
    before = bench.parameters()
    bench.publish(1)
    bench.policy.disturb(1)  # the next optimizer step
    assert bench.credited == [(0, 0, "v0")], "nobody hears of a version that is not whole"
    may_write.set()
    bench.publisher.finish()
    assert bench.credited[1:] == [(8, 1, "v1")]
    written = load_file(Path(bench.publisher.published.weights_dir) / "model-00001-of-00001.safetensors")
    assert written.keys() == before.keys() and all(torch.equal(written[k], before[k]) for k in before)
    assert bench.seconds.keys() == {"sync/snapshot_s", "sync/write_s", "sync/publish_s"}
    assert all(0 < seconds <= time.monotonic() - begun for seconds in bench.seconds.values())


def test_any_end_waits_for_the_last_version(tmp_path: Path, may_write: threading.Event) -> None:
    bench = Bench(tmp_path)
    may_write.clear()
    bench.publish(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        bench.publisher.finish()
    signal.signal(signal.SIGALRM, before)
    threading.Timer(0.3, may_write.set).start()
    bench.publisher.close()
    assert bench.credited[1:] == [(8, 1, "v1")]


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_is_freed_before_a_sleeper_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    bench = Bench(tmp_path, {"enable_sleep_mode": sleeps}, max_staleness=0)
    heard: list[int] = []
    monkeypatch.setattr(devices, "release_cache", lambda: heard.append(len(bench.credited)))
    bench.publish(1)
    assert heard == ([1] if sleeps else [])
    assert len(bench.credited) == 2


def test_what_ends_the_writing_is_raised_where_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(weights, "commit", raising(PermissionError("weights.dir is gone")))
    bench.publish(1)
    with pytest.raises(PermissionError, match=r"weights\.dir is gone"):
        bench.publish(2)
    assert bench.credited == [(0, 0, "v0")]


def test_a_version_after_a_skipped_step_is_credited_again_and_not_written_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish(0, cursor=8)
    bench.publisher.finish()
    assert bench.credited == [(0, 0, "v0"), (8, 0, "v0")]


def test_who_changes_the_ledger_during_a_batch_writes_no_version_behind_it(tmp_path: Path) -> None:
    assert writes_behind(make_config(tmp_path, trainer={"max_staleness": 1}))
    assert not writes_behind(make_config(tmp_path, trainer={"max_staleness": 1}, algorithm={"dead_groups": "resample"}))


# ---- reference.sync_steps: which policy is the reference of a step, that it was published, and what a resume finds


class Follower:
    """A run whose reference is the policy of every second step, without the steps themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = {"path": str(tiny_model(folder / "model")), "dtype": "float32"}
        self.config = config_in(folder, model=model, algorithm={"beta": 0.1}, reference={"sync_steps": 2})
        self.policy: Any = PlainPolicy(folder / "model", delta_writer=DeltaWriter(full_every=2))
        self.restart()

    def restart(self) -> None:
        self.reference = Reference(self.config, torch.device("cpu"))
        tokenizer = AutoTokenizer.from_pretrained(self.config.model.path)
        ranks: Any = OneRank()
        self.moving = moving_reference.MovingReference(self.config, self.policy, ranks, tokenizer, self.reference)

    def train(self, step: int) -> list[float]:
        """Returns weights of the policy after this step, to which the reference was told to follow."""
        self.policy.disturb(step)
        self.follow(step)
        return self.policy.model.model.norm.weight.tolist()

    def follow(self, step: int) -> list[float]:
        """Returns weights of the reference after this step."""
        if self.moving.is_due(step):
            self.moving.follow(step, self.policy.publish(self.folder / "weights", step))
        return self.reference.model.model.norm.weight.tolist()


def test_every_second_policy_is_the_reference_of_the_steps_behind_it_also_of_a_resumed_run(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    checkpoint = step_dir(tmp_path / "run" / "checkpoints", 3)
    begun = follower.follow(0)
    policies = {}
    references = {}
    for step in (1, 2, 3):
        policies[step] = follower.train(step)
        references[step] = follower.follow(step)
    checkpoint.mkdir(parents=True)
    policies[4] = follower.train(4)
    references[4] = follower.follow(4)
    assert policies[1] != begun
    assert references == {1: begun, 2: policies[2], 3: policies[2], 4: policies[4]}
    follower.restart()
    assert follower.follow(3) == policies[2], "what a checkpoint would resume with is kept"
    follower.restart()
    assert follower.follow(4) == policies[4], "saved on the way out, before anything was published"
    checkpoint.rmdir()
    follower.train(6)
    assert [path.name for path in (tmp_path / "run" / "reference").iterdir()] == ["step_000006"]
    follower.restart()
    with pytest.raises(UserError, match="step_000004 is gone"):
        follower.follow(5)


def test_a_reference_other_than_the_published_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = moving_reference.keep_version

    def damaged(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.norm.weight"][3] += 2**-20
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(moving_reference, "keep_version", damaged)
    with pytest.raises(Retryable, match=r"model\.norm\.weight is .*, published was"):
        Follower(tmp_path).train(2)
