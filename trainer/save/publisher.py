"""Publisher of weight versions: at once, or in a thread while training goes on.

    max_staleness 0    train n ─► snapshot ─► write ─► CREDIT ─► train n + 1
    above 0            train n ─► snapshot ─┬─────────────► train n + 1 ─► finish ─► snapshot …
                                            └► write ─► CREDIT      a thread of every rank

With max_staleness 0 the sampler waits for these weights. Above 0 training goes on meanwhile with
groups that are already wanted. This is safe, because a sampler knows nothing of a version before
CREDIT, which carries version and cursor as always: a crash while a version is written is a crash
before publishing.

The thread owns a copy of the parameters and a process group of its own. It also owns the ledger
until `finish`: the groups of batch n + 1 are admitted already. `refill` would change the ledger
meanwhile, so a run with algorithm.dead_groups=resample publishes at once.

Not supported: more than one version in flight.
"""

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from common.config import Config
from common.files import weights
from common.files.weights import Published, VersionName
from common.processes.watchdog import report_progress
from model import devices
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.link.source import GroupSource
from trainer.save.disk import reporting_failed_deletion
from trainer.save.host_copies import HostCopies
from trainer.save.write_version import DeltaWriter, Snapshot, snapshot


def writes_behind(config: Config) -> bool:
    """Returns whether a thread writes each new version of the weights while training goes on.

    This needs max_staleness > 0, with which the samplers have groups to sample meanwhile. It
    excludes dead_groups=resample, which changes the ledger (the state of all groups, ledger.py)
    while the thread owns it.
    """
    return config.trainer.max_staleness > 0 and config.algorithm.dead_groups != "resample"


class Publisher:
    """Sends new weights of the policy to the samplers, as numbered versions.

    All ranks write the files, so every rank calls every method. `source`, through which samplers
    learn of a version, is None except on rank 0.
    """

    def __init__(
        self,
        config: Config,
        engine: PolicyEngine,
        collectives: Collectives,
        thread_collectives: Collectives
        | None,  # the thread's: collectives of two threads must not mix
        source: GroupSource | None,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
    ):
        self.config = config
        self.engine = engine
        self.collectives = collectives
        self.source = source
        self._seconds = seconds
        self.dir: Path = weights.default_dir(config)
        self.incarnation = collectives.broadcast_text(source.incarnation if source else None)
        self.published = Published(-1, "", "")  # the newest version that is complete
        self._copies = HostCopies()
        self._delta_writer = DeltaWriter(config.weights.full_every)
        self._exchange_behind = thread_collectives
        self._thread = ThreadPoolExecutor(1, "publisher")
        # the version in flight; its result is the seconds that it took to write
        self._behind: Future[float] | None = None

    def is_writing(self) -> bool:
        """Returns whether a version is being written while training goes on."""
        return self._behind is not None and not self._behind.done()

    def publish(
        self,
        version: int,
        run_id: str,
        vocab_size: int,
        cursor: int,
        eval_id: str | None,
        num_problems: int,
    ) -> None:
        """Sends version, cursor and an evaluation that is due to the samplers in one message.

        After a step that was skipped, the newest version is announced again. eval_id: None if no
        evaluation is due. num_problems: of an evaluation. Raises DiskTrouble or Interrupted.
        """
        self.finish()
        start = time.monotonic()
        report_progress(f"publishing version {version}")
        if self.config.vllm.get("enable_sleep_mode"):
            devices.release_cache()  # vLLM's cache wakes for this version and needs free blocks
        ranks = self.collectives
        is_behind = False
        is_first = self.published.version < 0  # then nothing can be trained meanwhile
        if self._exchange_behind is not None and not is_first:
            ranks = self._exchange_behind
            is_behind = True
        taken = None  # None: there is no new version
        if version != self.published.version:
            name = VersionName(self.dir, run_id, self.incarnation, version)
            taken = snapshot(
                self.engine,
                self.collectives,
                name,
                vocab_size,
                copies=is_behind,
                memory=self._copies,
            )
        self._seconds["sync/snapshot_s"] += time.monotonic() - start
        deliver = partial(self._deliver, ranks, taken, cursor, eval_id, num_problems)
        if is_behind:
            self._behind = self._thread.submit(deliver)
        else:
            self._seconds["sync/write_s"] += deliver()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def _deliver(
        self,
        ranks: Collectives,
        taken: Snapshot | None,
        cursor: int,
        eval_id: str | None,
        num_problems: int,
    ) -> float:
        """Writes the version that was taken, if there is one, and sends CREDIT.

        Returns the seconds it took.
        """
        start = time.monotonic()
        if taken is not None:
            self.published = taken.write(ranks, self._delta_writer)
        if self.source is not None:
            self.source.commit(cursor, self.published, eval_id, num_problems)
            with reporting_failed_deletion("an old version of the weights"):
                weights.prune(self.dir, self.source.versions_in_use())
        return time.monotonic() - start

    def finish(self) -> None:
        """Waits for the version that is being written. Raises the error that ended the writing."""
        behind = self._behind
        if behind is None:
            return
        start = time.monotonic()
        if not behind.done():
            report_progress("waiting for the newest version to be written")
        wait(
            [behind]
        )  # a slow or failing disk reports progress; the watchdog ends a disk that hangs
        self._behind = None  # not before the wait, so that `close` waits for it after an interrupt
        self._seconds["sync/write_s"] += behind.result()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def close(self) -> None:
        """Waits at most ten seconds for a version in flight, however the run ends.

        No folder may appear after other processes have cleaned up.
        """
        if self._behind is not None:
            wait([self._behind], timeout=10.0)
