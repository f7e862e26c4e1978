"""A checkpoint is whole or invisible, whichever file operation is the last one or fails.

Two searches after SQLite's manner. One lets the n-th file operation of a save fail, for n = 1, 2, 3 … until a save is
clean. The other cuts the power before every operation and keeps only what was fsynced by then. DeepSpeed and the model
are stand-ins that write small files as the real ones do.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common import durable, failpoints
from common.errors import Retryable, UserError
from common.files import run_folder
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank
from tests.support.raising import raising
from trainer.engine.exported import Exported
from trainer.save import checkpoint, resume
from trainer.save.checkpoint import RunState

KEEP = 2
ONE_RANK: Any = OneRank()
CLEAN, ENDED = 0, 3  # a save that met no fault; one that the disk did not take
TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("[]"))


class SmallEngine:
    """Saves its one number as DeepSpeed and transformers save a model: through the hooks, and behind our back."""

    def __init__(self, number: int):
        self.number, self.stage, self.tp_size = number, 1, 1
        self.ds = SimpleNamespace(checkpoint_engine=SimpleNamespace(), save_checkpoint=self._save_state)
        self.adapter_settings, self.layout = None, None
        config = SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("{}"))
        self.model = SimpleNamespace(
            config=config,
            dtype=torch.float32,
            is_remote_code=lambda: False,
            can_generate=lambda: False,
            _keys_to_ignore_on_save=None,
        )
        self.tensors = [Exported("number", (), lambda: torch.full((50,), number), torch.empty(50, device="meta"))]

    def gathered_tensors(self, tensors: list[Exported], wanted: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((tensor.name, tensor.make()) for tensor in tensors)

    def _save_state(self, folder: str, tag: str, **_: bool) -> None:
        hooks = self.ds.checkpoint_engine
        for name in ("model_states.pt", "optim_states.pt"):
            hooks.makedirs(f"{folder}/{tag}", exist_ok=True)
            hooks.save({"number": torch.full((50,), self.number)}, f"{folder}/{tag}/{name}")


def progress(step: int) -> RunState:
    return RunState("run", step, 4 * step, step, step, 100 * step, 0, {})


def save(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(SmallEngine(step), ONE_RANK, TOKENIZER, checkpoints, progress(step), KEEP)  # type: ignore[arg-type]


def resumed_step(output_dir: Path) -> int:
    """What a trainer that is started again does: the step that it finds, whose every file must be of that step."""
    durable.remove_leftovers(output_dir / "checkpoints")
    config = config_of(run={"output_dir": output_dir, "resume": True})
    found = Path(resume.verified(config, resume.find_checkpoint(config), ONE_RANK, print))
    read = resume.read_run_state(found, {})
    assert read == progress(read.step)
    assert load_file(found / "model.safetensors")["number"].tolist() == [read.step] * 50
    for path in (found / "trainer" / "state").iterdir():
        assert torch.load(path, weights_only=True)["number"].tolist() == [read.step] * 50
    return read.step


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: thousands of folders are made and removed, for which a disk takes its time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote, synced or not; the power cuts have an fsync of their own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A run folder with the checkpoints 1 and 2, and a damaged 3 that a resumed run skips and saves again."""
    checkpoints = tmp_path / "start" / "checkpoints"
    save(checkpoints, 1, 2)
    shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000003")
    (checkpoints / "step_000003" / "model.safetensors").write_bytes(b"cut off")
    assert resumed_step(tmp_path / "start") == 2
    return tmp_path / "start"


@contextlib.contextmanager
def armed(fault: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_FAULT", fault)
        patch.setattr(failpoints, "_operations", 0)
        yield


def with_fault(fault: str, work: Callable[[], object]) -> int:
    """Does this with a fault armed: CLEAN or ENDED."""
    with armed(fault), contextlib.suppress(Retryable, OSError):
        work()
        return CLEAN
    return ENDED


def in_a_child(fault: str, work: Callable[[], object]) -> int:
    """Exit code of a child that does this with a fault armed; negative if a signal ended it."""
    pid = os.fork()
    if pid != 0:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        code = with_fault(fault, work)
    os._exit(code)


@pytest.mark.parametrize("action", ["kill", "torn", "enospc", "eio"])
def test_whichever_file_operation_fails_there_is_a_whole_checkpoint_and_the_next_save_is_clean(
    tmp_path: Path, start: Path, figure: Callable[[str, str], None], action: str
) -> None:
    dies = action in ("kill", "torn")
    attempt = in_a_child if dies else with_fault
    steps_found = set()
    for n in itertools.count(1):
        run = tmp_path / f"{action}-{n}"
        shutil.copytree(start, run)
        code = attempt(f"{n}:{action}", partial(save, run / "checkpoints", 3))
        if code == CLEAN:
            break
        assert code == (-signal.SIGKILL if dies else ENDED), f"operation {n}"
        found = resumed_step(run)
        steps_found.add(found)
        save(run / "checkpoints", found + 1)
        assert resumed_step(run) == found + 1
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert kept == [f"step_{step:06d}" for step in (found, found + 1)], f"operation {n}"
        shutil.rmtree(run)
    assert n > 30, "a save has more operations than that"
    assert steps_found == {2, 3}
    figure("R2", f"each of {n - 1} file operations killed, torn, or failed by EIO or ENOSPC: 0 checkpoints lost")


# ---- power cuts --------------------------------------------------------------------------------------------


class Platter:
    """What a power cut leaves of a folder: for each inode what its last fsync wrote, however it is called by now."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root = root
        self.contents: dict[int, bytes] = {}  # of files, by inode
        self.entries: dict[int, dict[str, Path]] = {}  # of folders, by inode; a name leads to /proc/self/fd/n
        self._opened: dict[int, Path] = {}  # keeps every inode alive, so that no number is used twice
        monkeypatch.setattr(os, "fsync", lambda descriptor: self.fsync(Path(f"/proc/self/fd/{descriptor}")))
        self.fsync(root)

    def fsync(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self.entries[number] = {child.name: self._open(child) for child in path.iterdir()}
        else:
            self.contents[number] = path.read_bytes()

    def _open(self, path: Path) -> Path:
        number = path.stat().st_ino
        if number not in self._opened:
            self._opened[number] = Path(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}")
        return self._opened[number]

    def after_a_cut(self, source: Path, target: Path, choose: Callable[[Any, Any], Any]) -> None:
        """Builds in `target` what is left of `source`. choose(synced, current) decides what the disk kept."""
        number = source.stat().st_ino
        if not source.is_dir():
            target.write_bytes(choose(self.contents.get(number, b""), source.read_bytes()))
            return
        target.mkdir()
        synced = self.entries.get(number, {})
        current = {child.name: self._open(child) for child in source.iterdir()}
        for name in sorted(synced.keys() | current.keys()):
            child = choose(synced.get(name), current.get(name))
            if child is not None:
                self.after_a_cut(child, target / name, choose)

    def close(self) -> None:
        for path in self._opened.values():
            os.close(int(path.name))


def names_reach_the_disk_first(synced: Any, current: Any) -> Any:
    """As file systems do that journal names but not contents: a renamed file may be empty."""
    return synced if isinstance(current, bytes) else current


def at_random(seed: int) -> Callable[[Any, Any], Any]:
    rng = random.Random(seed)

    def choose(synced: Any, current: Any) -> Any:
        if synced == current:
            return current
        half = current[: len(current) // 2] if isinstance(current, bytes) else current
        return rng.choice([synced, current, half])

    return choose


def power_cuts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """(last step whose save had returned, step found after the cut) for a cut before each file operation."""
    run, returned, found = folder / "run", 0, list[tuple[int, int | None]]()
    run.mkdir()
    platter = Platter(run, monkeypatch)

    def cut(name: str, path: Path) -> bool:
        for choose in (lambda synced, _: synced, names_reach_the_disk_first, *map(at_random, range(3))):
            remains = folder / "remains"
            platter.after_a_cut(run, remains, choose)
            whole = resume.newest_valid(remains / "checkpoints", ONE_RANK, lambda _: None)
            found.append((returned, int(whole.name.removeprefix("step_")) if whole else None))
            shutil.rmtree(remains)
        return False

    monkeypatch.setattr(durable, "file_operation", cut)
    for step in (1, 2, 3, 4):
        save(run / "checkpoints", step)
        returned = step
    cut("the end", run)
    platter.close()
    return found


def test_a_power_cut_before_any_file_operation_never_costs_a_checkpoint_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, str], None]
) -> None:
    cuts = power_cuts(tmp_path, monkeypatch)
    wrong = [(returned, found) for returned, found in cuts if (found or 0) not in (returned, returned + 1)]
    assert wrong == []
    assert len(cuts) > 4 * 30 * 5
    figure("R2", f"{len(cuts)} power cuts, unsynced data lost: 0 saved checkpoints lost")


# ---- what a resume believes --------------------------------------------------------------------------------


def test_any_flipped_bit_of_the_commit_record_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 7)
    path = tmp_path / "step_000007" / run_folder.COMMIT
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    said: list[str] = []
    for record in (*flipped, b"", b"[]", b"{}", b"null", b"\xff", b'{"blake3": "", "files": []}'):
        path.write_bytes(record)
        assert resume.newest_valid(tmp_path, ONE_RANK, said.append) is None, record
    assert "step_000007 is skipped: commit.json" in said[0]
    path.write_bytes(whole)
    assert resume.newest_valid(tmp_path, ONE_RANK, said.append) == tmp_path / "step_000007"


def test_a_file_that_cannot_be_read_is_a_reason_to_skip_not_to_crash(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    broken = tmp_path / "step_000002" / "model.safetensors"
    broken.unlink()
    broken.mkdir()
    said: list[str] = []
    assert resume.newest_valid(tmp_path, ONE_RANK, said.append) == tmp_path / "step_000001"
    assert "model.safetensors cannot be read" in said[0]


def test_pruning_never_prefers_a_damaged_checkpoint_of_an_abandoned_future(tmp_path: Path) -> None:
    """Resumed at 1, because 5 and 6 are damaged: the two that stay must be 1 and 2."""
    save(tmp_path, 1)
    for step in (5, 6):
        run_folder.step_dir(tmp_path, step).mkdir()
    save(tmp_path, 2)
    assert [path.name for path in run_folder.step_dirs(tmp_path)] == ["step_000001", "step_000002"]


def test_checkpoints_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    save(tmp_path, 999_999, 1_000_000, 1_000_001)
    (tmp_path / "step_of_mine").mkdir()
    assert [p.name for p in run_folder.step_dirs(tmp_path)] == ["step_1000000", "step_1000001"]
    assert resume.newest_valid(tmp_path, ONE_RANK, print) == tmp_path / "step_1000001"


@pytest.mark.parametrize(
    ("saved", "now", "is_converted"),
    [
        ((0, 4), (0, 2), False),  # stage and ranks; ZeRO 0 divides nothing
        ((1, 4), (1, 2), True),
    ],
)
def test_only_another_stage_or_shards_of_other_ranks_are_converted(
    saved: tuple[int, int], now: tuple[int, int], is_converted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded as it is must be there for this rank."""
    record = {"zero_stage": saved[0], "world_size": saved[1]}
    (tmp_path / run_folder.COMMIT).write_text(json.dumps(record))
    engine: Any = SmallEngine(1)
    engine.stage, engine.world_size = now
    engine.optimizer = SimpleNamespace(param_groups=[])
    engine.ds.lr_scheduler = SimpleNamespace(base_lrs=[], lr_lambdas=[])
    engine.ds.load_checkpoint = lambda *_, **__: (None, {})
    monkeypatch.setattr(checkpoint.other_layout, "restore", raising(UserError("converted")))
    said = "converted" if is_converted else "no DeepSpeed state for this rank"
    with pytest.raises(UserError, match=said):
        checkpoint.restore(engine, tmp_path)
