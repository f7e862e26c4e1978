"""Publisher of weight versions: at once, or in a thread while training goes on with groups that are already wanted.

    max_staleness 0    train n ─► snapshot ─► write ─► CREDIT ─► train n + 1        the sampler waits for these weights
    above 0            train n ─► snapshot ─┬─────────────► train n + 1 ─► finish ─► snapshot …
                                            └► write ─► CREDIT      a thread of every rank

The second way is safe, because a sampler knows nothing before CREDIT, which carries version and cursor as ever, so a
crash in between is a crash before publishing. The thread owns a copy of the parameters, a process group of its own,
and the ledger until `finish`: groups of batch n + 1 are admitted already, and `refill`, which would change the ledger
meanwhile, keeps to the first way. Left out: more than one version in flight.
"""

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from common.config import Config
from common.files import weights
from common.files.weights import Published, VersionName
from common.processes.watchdog import report_progress
from model import devices
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.link.source import GroupSource
from trainer.save.disk import reporting_failed_deletion
from trainer.save.host_copies import HostCopies
from trainer.save.write_version import Changes, snapshot


def writes_behind(config: Config) -> bool:
    """Returns whether samplers have work while a version is written, and nothing else changes the ledger then."""
    return config.trainer.max_staleness > 0 and config.algorithm.dead_groups != "resample"


class Publisher:
    """The publisher of versions, called on every rank. `published`: the newest one. Only rank 0 has a source."""

    def __init__(
        self,
        config: Config,
        engine: PolicyEngine,
        exchange: Exchange,
        exchange_behind: Exchange | None,  # collectives of two threads must not mix: the writing one has its own
        source: GroupSource | None,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
    ):
        self.config, self.engine, self.exchange, self.source = config, engine, exchange, source
        self._seconds = seconds
        self.dir: Path = weights.default_dir(config)
        self.incarnation = exchange.broadcast_text(source.incarnation if source else None)
        self.published = Published(-1, "", "")
        self._copies = HostCopies()
        self._changes = Changes(config.weights.full_every)
        self._exchange_behind = exchange_behind
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._behind: Future[float] | None = None  # the version in flight; its result: the seconds of writing it

    def is_writing(self) -> bool:
        """Returns whether a version is being written while training goes on."""
        return self._behind is not None and not self._behind.done()

    def publish(
        self, version: int, run_id: str, vocab_size: int, cursor: int, eval_id: str | None, num_problems: int
    ) -> None:
        """Sends version and cursor to the samplers in one message, with the evaluation that is due if there is one.

        The version may be the newest one again, after a step that was skipped. Raises DiskTrouble or Interrupted.
        """
        self.finish()
        start = time.monotonic()
        report_progress(f"publishing version {version}")
        if self.config.vllm.get("enable_sleep_mode"):  # vLLM's cache wakes for this version, and needs our free blocks
            devices.release_cache()
        is_first = self.published.version < 0  # nothing can be trained meanwhile
        ranks = self.exchange if is_first else self._exchange_behind or self.exchange
        behind = ranks is self._exchange_behind
        new_version = None  # None: the newest version is announced again
        if version != self.published.version:
            name = VersionName(self.dir, run_id, self.incarnation, version)
            new_version = snapshot(self.engine, self.exchange, name, vocab_size, copies=behind, memory=self._copies)
        self._seconds["sync/snapshot_s"] += time.monotonic() - start

        def deliver() -> float:
            started_s = time.monotonic()
            self.published = new_version.write(ranks, self._changes) if new_version else self.published
            if self.source is not None:
                self.source.commit(cursor, self.published, eval_id, num_problems)
                with reporting_failed_deletion("an old version of the weights"):
                    weights.prune(self.dir, self.source.versions_in_use())
            return time.monotonic() - started_s

        if behind:
            self._behind = self._thread.submit(deliver)
        else:
            self._seconds["sync/write_s"] += deliver()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def finish(self) -> None:
        """Waits for the version that is being written. Raises the error that ended it."""
        behind = self._behind
        if behind is None:
            return
        start = time.monotonic()
        if not behind.done():
            report_progress("waiting for the newest version to be written")
        wait([behind])  # a slow or failing disk reports progress; the watchdog ends a disk that hangs
        self._behind = None  # only now: after an interrupt `close` waits for it
        self._seconds["sync/write_s"] += behind.result()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def close(self) -> None:
        """Waits a while for a version in flight, however the run ends: no folder may appear after others clean up."""
        if self._behind is not None:
            wait([self._behind], timeout=10.0)
