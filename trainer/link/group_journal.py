"""A journal of finished groups on disk, which need not be sampled again if the trainer crashes.

    run folder/kept/00000012-3f9a…-77c1…     groups accepted while version 12 was the newest
                             │      └ digest of the version's tensors
                             └ digest of the run and of what decides how groups are sampled

A file has the format of a recording (recording.py).

A restarted trainer accepts the groups of these files, by the checks of any received group, as long
as it publishes the files' versions one after the other and bit for bit. The first version that
differs, for instance because a processor adds in another order, drops its file and all later ones,
so that no group of another history is trained. Groups of later versions are `reserved` meanwhile:
they are leased to no sampler.

Training does not wait for this disk. If the disk fails, or a power cut damages a file, groups are
sampled again. Groups that could not be produced are not in the journal, but tried again.
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
# sections of the settings that do not decide how groups are sampled and scored
_NOT_SAMPLING = {"run", "channel", "weights", "eval", "trainer", "critic", "deepspeed"}
# a Recorder's cursor above every group id, with which it keeps all groups of its file
_AFTER_EVERY_GROUP = sys.maxsize
_FILE_NAME = re.compile(r'"([^":]+\.(?:py|m?js|ts|sh|jinja|md|txt))[":]')  # in settings as JSON


class GroupJournal:
    """The journal of a run. Callers of its methods hold the lock that guards the ledger."""

    def __init__(self, config: Config, run_id: str, say: Callable[[str], None]):
        self._folder = config.run.output_dir / FOLDER
        self._say = say
        # without checkpoints no restart could use the files
        self._is_enabled = config.trainer.saves_checkpoints
        self._sampling_digest = _sampling_digest(config, run_id)
        self._newest: Path | None = None  # the file of the newest version
        self._recorder: Recorder | None = None
        self.was_published_before = False  # whether an earlier start published the newest version
        # by group id: groups of versions that were published again, until they are admitted
        self.waiting: dict[int, Received] = {}
        # the group ids of each file of an earlier start whose version may be published again
        self._expected: dict[Path, set[int]] = {}
        unusable: dict[Path, set[int]] = {}
        for path in sorted(self._folder.glob("*-*-*")):
            is_usable = self._is_enabled and path.name.split("-")[1] == self._sampling_digest
            group_ids = {received.group.group_id for received in _undamaged(path)}
            if is_usable:
                self._expected[path] = group_ids
            else:
                unusable[path] = group_ids
        self.reserved: set[int] = set().union(*self._expected.values())
        self._drop(unusable, "settings of sampling have changed")

    def begin(self, published: Published) -> None:
        """Starts the file of the newest version, to which `add` appends groups.

        If an earlier start of the trainer published the same version bit for bit, the groups that
        it accepted under this version become `waiting`.
        """
        version = published.version
        digest = published.tensors_sha256[:16]
        path = self._folder / f"{version:08d}-{self._sampling_digest}-{digest}"
        if path == self._newest or not self._is_enabled or not digest:
            return
        is_first = self._newest is None
        self._newest = path
        is_next = self._match(path, is_first)
        # the next expected file holds this version's groups already, and others are added to them
        cursor = _AFTER_EVERY_GROUP if is_next else 0
        self._open_recorder(path, cursor)

    def _open_recorder(self, path: Path, cursor: int) -> None:
        """Opens the file to which groups are appended, after its groups below `cursor`.

        If the disk fails, it says so, and no group is kept until the next version.
        """
        self.close()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recorder = Recorder(path, cursor, syncs=False)
        except (OSError, UserError) as error:
            self._say(
                f"finished groups are not kept, and sampled again if the trainer dies: {error}"
            )

    def _match(self, path: Path, is_first: bool) -> bool:
        """Returns whether `path`, the newest version's file, is the next expected one.

        A file's name holds the version and the digests of its tensors and of what decides how
        groups are sampled. So if an expected file has this name, an earlier start of the trainer
        went through the same history, and its groups become `waiting`. If the version has another
        history, all expected files are dropped.
        """
        version = _version(path)
        earlier = []
        later = list(self._expected)
        if is_first:  # the checkpoint that was resumed contains the steps of earlier versions
            earlier = [file for file in self._expected if _version(file) < version]
            later = [file for file in self._expected if _version(file) >= version]
        is_next = later[:1] == [path]
        self.was_published_before = path in later
        if is_next or (is_first and not later):
            for file in earlier + later[:1]:
                for received in _undamaged(file):
                    self.waiting[received.group.group_id] = received
            self._expected = {file: self._expected[file] for file in later[1:]}
        else:
            self._drop(self._expected, f"version {version} differs from that of the earlier start")
            self._expected = {}
        self.reserved.intersection_update(set().union(*self._expected.values()))
        return is_next

    def add(self, received: Received) -> None:
        if self._recorder:
            self._recorder.append([received])

    def forget(self, version: int) -> None:
        """Deletes the files of versions before `version`: no checkpoint needs their groups."""
        _remove(path for path in self._folder.glob("*-*-*") if _version(path) < version)

    def close(self) -> None:
        if self._recorder:
            with contextlib.suppress(OSError):
                self._recorder.close()
        self._recorder = None

    def clear(self) -> None:
        """Deletes the whole journal, because the run is done."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, files: Mapping[Path, Collection[int]], why: str) -> None:
        """Deletes files of an earlier start, and says how many of its groups that loses, if any."""
        count = len(set().union(*files.values()))
        if count:
            self._say(
                f"{why}: {count} finished groups of an earlier start of the trainer "
                "are sampled again"
            )
        _remove(files)


def _remove(files: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            path.unlink(missing_ok=True)


def _undamaged(path: Path) -> list[Received]:
    """Returns the groups of a file, up to the first record that a crash damaged."""
    groups: list[Received] = []
    with contextlib.suppress(UserError):
        for received, _ in recording.read(path):
            groups.append(received)
    return groups


def _version(path: Path) -> int:
    """Returns the policy version that the name of a journal's file begins with."""
    return int(path.name.split("-")[0])


def _sampling_digest(config: Config, run_id: str) -> str:
    """Returns a digest of the run and of what decides how its groups are sampled and scored.

    These are settings, and the contents of the files that they name.
    """
    sampling = config.model_dump(mode="json", exclude=_NOT_SAMPLING)
    settings = json.dumps(sampling, sort_keys=True, ensure_ascii=False)
    texts = [run_id, settings]
    for name in _FILE_NAME.findall(settings):
        path = Path(name).expanduser()
        if path.is_file():
            texts.append(path.read_text(errors="replace"))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
