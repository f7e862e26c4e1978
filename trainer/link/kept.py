"""Finished groups on disk, so that groups which a trainer had accepted when it died are not sampled again.

    run folder/kept/00000012-3f9a…-77c1…     accepted while version 12 was the newest, as in a recording (recording.py)
                             │      └ digest of its tensors
                             └ digest of the run and of what decides how groups are sampled and scored

As long as a restarted trainer publishes the versions of these files, one after the other and bit for bit, it accepts
their groups by the checks of any received group. The first version that differs, for instance because a processor adds
in another order, drops its file and all later ones, so that no group of another history is trained. Groups of later
versions are `reserved`: they are leased to no sampler meanwhile.

Training does not wait for this disk: if it fails, or a power cut damages a file, groups are sampled again. Groups that
could not be produced are not kept, but tried again.
"""

import contextlib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from common.config import Config
from common.errors import UserError
from common.files.weights import Published
from common.wire.wire import Received
from trainer.link import recording
from trainer.link.recording import Recorder

FOLDER = "kept"
_NOT_SAMPLING = {"run", "channel", "weights", "eval", "trainer", "critic", "deepspeed"}  # settings' sections


class Kept:
    """The kept groups of a run. Callers of its methods hold the lock that guards the ledger."""

    def __init__(self, config: Config, run_id: str, say: Callable[[str], None]):
        self._folder, self._say = config.run.output_dir / FOLDER, say
        self._is_enabled = config.trainer.saves_checkpoints  # without checkpoints no restart could use the files
        maker = self._sampling_digest = _sampling_digest(config, run_id)
        self._newest: Path | None = None  # the file of the newest version
        self._recorder: Recorder | None = None
        self.was_published_before = False  # an earlier start published the newest version too
        self.waiting: dict[int, Received] = {}  # groups of versions that were published again, until they are admitted
        files = {path: {one.group.group_id for one in _undamaged(path)} for path in sorted(self._folder.glob("*-*-*"))}
        self._expected = {p: ids for p, ids in files.items() if self._is_enabled and p.name.split("-")[1] == maker}
        self.reserved: set[int] = set().union(*self._expected.values())
        self._drop({p: ids for p, ids in files.items() if p not in self._expected}, "settings of sampling have changed")

    def begin(self, published: Published) -> None:
        """Starts the newest version's file; groups accepted under this version by an earlier start become `waiting`."""
        version, digest = published.version, published.tensors_sha256[:16]
        path = self._folder / f"{version:08d}-{self._sampling_digest}-{digest}"
        if path == self._newest or not (self._is_enabled and digest):
            return
        is_first, self._newest = self._newest is None, path
        earlier = [p for p in self._expected if is_first and _version(p) < version]
        rest = [p for p in self._expected if p not in earlier]
        self.was_published_before = path in rest
        matching = [*earlier, *rest[:1]] if rest[:1] == [path] or (is_first and not rest) else []
        for old in matching:
            self.waiting |= {one.group.group_id: one for one in _undamaged(old)}
        if not matching:
            self._drop(self._expected, f"version {version} differs from that of the earlier start")
        self._expected = {p: self._expected[p] for p in rest if matching and p != path}
        self.reserved.intersection_update(set().union(*self._expected.values()))
        self.close()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recorder = Recorder(path, sys.maxsize if path in matching else 0, syncs=False)
        except (OSError, UserError) as error:
            self._say(f"finished groups are not kept, and sampled again if the trainer dies: {error}")

    def add(self, received: Received) -> None:
        if self._recorder:
            self._recorder.append([received])

    def forget(self, version: int) -> None:
        """Deletes the files of older versions, because no checkpoint needs groups that were accepted under those."""
        _remove(path for path in self._folder.glob("*-*-*") if _version(path) < version)

    def close(self) -> None:
        if self._recorder:
            with contextlib.suppress(OSError):
                self._recorder.close()
        self._recorder = None

    def clear(self) -> None:
        """Deletes all kept groups, because the run is done."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, files: Mapping[Path, Collection[int]], why: str) -> None:
        if count := len(set().union(*files.values())):
            self._say(f"{why}: {count} finished groups of an earlier start of the trainer are sampled again")
        _remove(files)


def _remove(files: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            path.unlink(missing_ok=True)


def _undamaged(path: Path) -> list[Received]:
    """Returns the groups of a file, up to the first record that a crash damaged."""
    found: list[Received] = []
    with contextlib.suppress(UserError):
        found.extend(one for one, _ in recording.read(path))
    return found


def _version(path: Path) -> int:
    return int(path.name.split("-")[0])


def _sampling_digest(config: Config, run_id: str) -> str:
    """Returns a digest of the run, of all settings that decide what is sampled, and of the files that they name."""
    settings = json.dumps(config.model_dump(mode="json", exclude=_NOT_SAMPLING), sort_keys=True, ensure_ascii=False)
    files = [Path(name).expanduser() for name in re.findall(r'"([^":]+\.(?:py|m?js|ts|sh|jinja|md|txt))[":]', settings)]
    contents = [path.read_text(errors="replace") for path in files if path.is_file()]
    return hashlib.sha256("\0".join([run_id, settings, *contents]).encode()).hexdigest()[:16]
