"""A journal of finished groups on disk, so that a crash of the trainer does not lose the groups.

    run folder/kept/00000012-3f9a…-77c1…     groups accepted while version 12 was the newest
                             │      └ digest of the version's tensors
                             └ digest of the run and of everything that decides how it samples

Each file has the format of a recording (recording.py).

A restarted trainer publishes the policy versions since its checkpoint again. While each version
equals, bit for bit, the version of the next file, the trainer accepts the groups of that file after
the same checks as for newly received groups. A version may differ, for example because a processor
adds numbers in a different order. Then the file of that version and all later files are deleted, so
that training uses no group that different weights sampled. The groups of later versions are
`reserved` until their version is published, that is, they are not leased to any sampler.

Training does not wait for this disk. If the disk fails, or a power cut damages a file, the groups
are sampled again. A group that could not be produced is not in the journal, so it is tried again.
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
# sections of the settings that do not influence how groups are sampled and scored
_NOT_SAMPLING = {"run", "channel", "weights", "eval", "trainer", "critic", "deepspeed"}
# a Recorder's cursor that is above every group id, so that the Recorder keeps all groups of a file
_AFTER_EVERY_GROUP = sys.maxsize
# the name of a user's file in the settings, written as JSON: "rewards.py" or "rewards.py:function"
_FILE_NAME = re.compile(r'"([^":]+\.(?:py|m?js|ts|sh|jinja|md|txt))[":]')


class GroupJournal:
    """The journal of a run. The caller of a method must hold the lock that guards the ledger."""

    def __init__(self, config: Config, run_id: str, say: Callable[[str], None]):
        """Reads the journal of an earlier start, and deletes files whose groups cannot be used."""
        self._folder = config.run.output_dir / FOLDER
        self._say = say
        # without checkpoints, no restart could use the files
        self._is_enabled = config.trainer.saves_checkpoints
        self._sampling_digest = _sampling_digest(config, run_id)
        self._newest: Path | None = None  # the file of the newest version
        self._recorder: Recorder | None = None
        self.was_published_before = False  # whether an earlier start published the newest version
        # group id -> a group whose version was published again, until the ledger admits the group
        self.waiting: dict[int, Received] = {}
        # file of an earlier start whose version may be published again -> the ids of its groups;
        # ascending by version, because the files' names begin with the version
        self._expected: dict[Path, set[int]] = {}
        unusable: dict[Path, set[int]] = {}
        for path in sorted(self._folder.glob("*-*-*")):
            is_usable = self._is_enabled and path.name.split("-")[1] == self._sampling_digest
            group_ids = {received.group.group_id for received in _undamaged(path)}
            if is_usable:
                self._expected[path] = group_ids
            else:
                unusable[path] = group_ids
        # ids of the groups in these files; the ledger uses this set, so it is changed in place
        self.reserved: set[int] = set().union(*self._expected.values())
        self._drop(unusable, "the settings that influence sampling have changed")

    def begin(self, published: Published) -> None:
        """Opens the file of the newly published version, to which `add` then appends groups.

        If an earlier start of the trainer published the same version bit for bit, `waiting` gets
        the groups that the earlier start accepted under this version.
        """
        version = published.version
        digest = published.tensors_sha256[:16]
        path = self._folder / f"{version:08d}-{self._sampling_digest}-{digest}"
        is_new = path != self._newest  # a skipped step publishes the same version again
        if not is_new or not self._is_enabled or not digest:
            return
        is_first = self._newest is None
        self._newest = path
        is_next = self._match(path, is_first)
        cursor = 0
        if is_next:  # the file already exists, and its groups stay in it
            cursor = _AFTER_EVERY_GROUP
        self._open_recorder(path, cursor)

    def _open_recorder(self, path: Path, cursor: int) -> None:
        """Opens the file to append groups to, and keeps only its groups below `cursor`.

        If the disk fails, a message is shown, and no group is kept until the next version.
        """
        self.close()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recorder = Recorder(path, cursor, syncs=False)
        except (OSError, UserError) as error:
            self._say(
                "finished groups are not kept on disk, so they will be sampled again if the "
                f"trainer crashes: {error}"
            )

    def _match(self, path: Path, is_first: bool) -> bool:
        """Returns whether the trainer, before it restarted, published the same version next.

        If so, the groups of that version's file are moved to `waiting`. If it published a different
        version, all expected files are deleted.

        path: the file of the newest version; its name identifies the version's contents.
        is_first: whether the trainer has published no version since it restarted.
        """
        version = _version(path)
        before_checkpoint = []
        upcoming = list(self._expected)
        if is_first:  # the steps that led to the first version are in the resumed checkpoint
            before_checkpoint = [file for file in self._expected if _version(file) < version]
            upcoming = [file for file in self._expected if _version(file) >= version]
        is_next = bool(upcoming) and upcoming[0] == path
        self.was_published_before = path in upcoming
        # the earlier start may have saved the checkpoint and ended before it published the version
        ended_before = is_first and not upcoming

        if is_next or ended_before:
            for file in before_checkpoint + upcoming[:1]:
                for received in _undamaged(file):
                    self.waiting[received.group.group_id] = received
            self._expected = {file: self._expected[file] for file in upcoming[1:]}
        else:
            why = f"version {version} differs from the one that the earlier start published"
            self._drop(self._expected, why)
            self._expected = {}
        self.reserved.intersection_update(set().union(*self._expected.values()))
        return is_next

    def add(self, received: Received) -> None:
        """Appends a group to the newest version's file, if that file could be opened."""
        if self._recorder:
            self._recorder.append([received])

    def forget(self, version: int) -> None:
        """Deletes the files of versions before `version`, whose groups no restart will need."""
        _remove(path for path in self._folder.glob("*-*-*") if _version(path) < version)

    def close(self) -> None:
        """Closes the newest version's file, and ignores errors of the disk."""
        if self._recorder:
            with contextlib.suppress(OSError):
                self._recorder.close()
        self._recorder = None

    def clear(self) -> None:
        """Deletes the whole journal. To be called when the run is complete."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, files: Mapping[Path, Collection[int]], why: str) -> None:
        """Deletes files of an earlier start, and shows the user how many groups they contained.

        files: the ids of each file's groups. why: the beginning of the message.
        """
        count = len(set().union(*files.values()))
        if count:
            self._say(
                f"{why}, so {count} finished groups of an earlier start of the trainer "
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
    """Returns the policy version of a journal file, with which the file's name begins."""
    return int(path.name.split("-")[0])


def _sampling_digest(config: Config, run_id: str) -> str:
    """Returns a digest of everything that decides how the run's groups are sampled and scored.

    This is the run's id, the settings, and the contents of the files that the settings name.
    """
    sampling = config.model_dump(mode="json", exclude=_NOT_SAMPLING)
    settings = json.dumps(sampling, sort_keys=True, ensure_ascii=False)
    texts = [run_id, settings]
    for name in _FILE_NAME.findall(settings):
        path = Path(name).expanduser()
        if path.is_file():
            texts.append(path.read_text(errors="replace"))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
