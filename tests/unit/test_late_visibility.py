"""A shared file system that shows a published version late: the sampler waits, says for what, and never uses a part."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Retryable
from common.files.weights import MANIFEST, Published
from sampler import loop
from sampler.engine.engine_tensors import Proof
from sampler.loop import Sampler
from tests.support.protocol_helpers import make_config
from tests.support.versions import SHARDS, publish
from tests.unit.sampler.engine.test_reload import Engine

VERSION = 8


class IdleEngine(Engine):
    """What the sampling loop asks of an engine that has nothing to do; notes what each load found."""

    num_running, on_cpu = 0, True

    def __init__(self) -> None:
        super().__init__(score=-0.5)  # what the canary of `publish` expects
        self.found: list[list[str]] = []

    def load(self, folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        self.found.append(sorted(path.name for path in folder.iterdir()))
        return super().load(folder, expected, tensors, version)


class SlowShare:
    """A clock, and a published version that others see in parts as its time passes."""

    def __init__(self, published: Published, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.published, self.folder = 0.0, published, Path(published.weights_dir)
        self.whole = self.folder.with_name("on-the-server")
        self.folder.rename(self.whole)
        self.parts: list[tuple[float, str, float]] = []  # when, which file, how much of it
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self.parts and self.now_s >= self.parts[0][0]:
            self.show(*self.parts.pop(0)[1:])

    def show(self, name: str, part: float) -> None:
        self.folder.mkdir(exist_ok=True)
        shutil.copy(self.whole / name, self.folder)
        os.truncate(self.folder / name, int(part * (self.whole / name).stat().st_size))


@pytest.fixture
def share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SlowShare:
    return SlowShare(publish(folder / "weights", VERSION), monkeypatch)


@pytest.fixture
def sampler(folder: Path, share: SlowShare) -> Sampler:
    """The real loop, credited with the version."""
    config = make_config(folder, model={"path": "m", "dtype": "float32"})
    credit = SimpleNamespace(**dataclasses.asdict(share.published))
    link: Any = SimpleNamespace(credit=credit, beat=lambda *_, now=False: None)
    engine: Any = IdleEngine()
    pool: Any = SimpleNamespace(pending=0)
    return Sampler(config, loop.Task([], [], str), engine, link, pool, None)


def test_a_version_that_appears_in_parts_within_90_s_is_waited_for_by_name_and_used_only_whole(
    share: SlowShare, sampler: Sampler, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, str], None]
) -> None:
    read, listdir = [], os.listdir
    monkeypatch.setattr("common.files.weights.os.listdir", lambda path: read.append(path) or listdir(path))
    shown = ((MANIFEST, 0.0), (MANIFEST, 0.6), (MANIFEST, 1.0), (SHARDS[0], 1.0), (SHARDS[1], 0.5), (SHARDS[1], 1.0))
    share.parts = [(15.0 * i, *part) for i, part in enumerate(shown, 1)]
    said: dict[str, None] = {}
    while sampler.engine.version != VERSION:
        assert sampler.engine.num_loads == 0, "the engine was touched"
        sampler.reload_if_credited()
        said[sampler.phase.rpartition(f"{VERSION}: ")[2]] = None
    assert 90.0 <= share.now_s < 91.0
    path = share.folder
    waits = [text for text in said if text.startswith(str(path)) or "cannot copy" in text]
    assert [os.strerror(errno.ENOENT) in text for text in waits] == [True, False, False, True, True, False], waits
    assert [text.split()[0].rpartition("/")[2].rstrip(":") for text in waits] == [MANIFEST] * 3 + [*SHARDS, SHARDS[1]]
    assert sampler.engine.found == [list(SHARDS)]
    assert read.count(path.parent) > 90, "NFS looks again only for who reads the folder above"
    assert sampler._invisible_since is None, "the next version has the whole time again"
    figure("R14", f"a version seen in {len(waits) + 1} stages over 90 s: 0 loads of a part")


@pytest.mark.parametrize("lie", [errno.ENOENT, errno.ESTALE, errno.EIO])
def test_a_stat_that_lies_for_90_s_is_waited_out(
    share: SlowShare, sampler: Sampler, monkeypatch: pytest.MonkeyPatch, lie: int
) -> None:
    truth = Path.read_bytes
    share.whole.rename(share.folder)  # it is all there; only the answers are wrong

    def lying(path: Path) -> bytes:
        if share.now_s < 90.0:
            raise OSError(lie, os.strerror(lie), str(path))
        return truth(path)

    monkeypatch.setattr(Path, "read_bytes", lying)
    while sampler.engine.version != VERSION:
        sampler.reload_if_credited()
        assert share.now_s >= 90.0 or os.strerror(lie) in sampler.phase
    assert share.now_s < 91.0


def test_a_version_that_never_appears_ends_the_sampler_retryable_with_the_path(
    share: SlowShare, sampler: Sampler
) -> None:
    with pytest.raises(Retryable) as ended:
        while True:
            sampler.reload_if_credited()
    assert 90.0 < loop._VISIBLE_WITHIN_S < share.now_s < loop._VISIBLE_WITHIN_S + 1
    said = str(ended.value)
    assert f"version {VERSION}: {share.folder / MANIFEST}: No such file or directory. Is weights.dir" in said
    assert "on a file system that both hosts share?" in said
    assert sampler.engine.num_loads == 0
