"""Publisher of weight versions: before training goes on, or in a thread while it goes on.

    max_staleness 0    train n ─► snapshot ─► write ─► CREDIT ─► train n + 1
    above 0            train n ─► snapshot ─┬─────────────► train n + 1 ─► finish ─► snapshot …
                                            └► write ─► CREDIT      a thread of every rank

CREDIT is the message that tells samplers of a version and of the cursor. With max_staleness 0 the
samplers wait for these weights. Above 0 the trainer meanwhile trains on groups that were sampled by
older versions. This is safe, because a sampler knows nothing of a version before CREDIT: a crash
while a version is written is the same as a crash before publishing.

The thread has its own copy of the parameters and its own process group. Until `finish` it also owns
the ledger (the state of all groups, ledger.py), because CREDIT changes it. `refill` would change
the ledger while batch n + 1 trains, so a run with algorithm.dead_groups=resample does not use the
thread.

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

    This needs max_staleness > 0, because otherwise the trainer has no groups to train on before the
    samplers get the new version. It excludes dead_groups=resample, which changes the ledger (the
    state of all groups, ledger.py) while the thread owns it.
    """
    return config.trainer.max_staleness > 0 and config.algorithm.dead_groups != "resample"


# stands for the newest version until the first one is published
_NOTHING_PUBLISHED = Published(version=-1, weights_dir="", manifest_sha256="")


class Publisher:
    """Sends new weights of the policy to the samplers, as numbered versions.

    All ranks write the files, so every rank calls every method.
    """

    def __init__(
        self,
        config: Config,
        engine: PolicyEngine,
        collectives: Collectives,
        # used only by the writing thread, because collectives of two threads must not mix;
        # None: versions are never written in a thread
        thread_collectives: Collectives | None,
        source: GroupSource | None,  # tells the samplers of versions; None except on rank 0
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
    ):
        self.config = config
        self.engine = engine
        self.collectives = collectives
        self.source = source
        self._seconds = seconds
        self.dir: Path = weights.default_dir(config)
        self.incarnation = collectives.broadcast_text(source.incarnation if source else None)
        self.published = _NOTHING_PUBLISHED  # the newest version that is complete
        self._copies = HostCopies()
        self._delta_writer = DeltaWriter(config.weights.full_every)
        self._thread_collectives = thread_collectives
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        # the version that the thread writes; the result is the seconds that writing took
        self._in_flight: Future[float] | None = None

    def publish(
        self,
        version: int,
        run_id: str,
        vocab_size: int,
        cursor: int,
        eval_id: str | None,
        num_problems: int,
    ) -> None:
        """Publishes a version of the weights, the cursor and, if one is due, an evaluation.

        version: the policy version of the engine's weights. If it is the newest published version,
        because the last step was skipped, it is announced again and not written again. cursor: the
        first group that is not trained. eval_id: names the evaluation that the samplers shall do;
        None if no evaluation is due. num_problems: the number of problems of an evaluation. Raises
        DiskTrouble or Interrupted.
        """
        self.finish()
        start = time.monotonic()
        report_progress(f"publishing version {version}")
        if self.config.vllm.get("enable_sleep_mode"):
            # vLLM wakes its cache for this version, and needs the memory that torch keeps unused
            devices.release_cache()

        writer_collectives = self.collectives
        uses_thread = False
        is_first = self.published.version < 0  # then there are no groups to train on meanwhile
        if self._thread_collectives is not None and not is_first:
            writer_collectives = self._thread_collectives
            uses_thread = True

        taken = None
        is_new = version != self.published.version
        if is_new:
            taken = snapshot(
                self.engine,
                self.collectives,
                VersionName(self.dir, run_id, self.incarnation, version),
                vocab_size,
                copies=uses_thread,
                memory=self._copies,
            )
        self._seconds["sync/snapshot_s"] += time.monotonic() - start

        deliver = partial(self._deliver, writer_collectives, taken, cursor, eval_id, num_problems)
        if uses_thread:
            self._in_flight = self._thread.submit(deliver)
        else:
            self._seconds["sync/write_s"] += deliver()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def _deliver(
        self,
        collectives: Collectives,
        taken: Snapshot | None,
        cursor: int,
        eval_id: str | None,
        num_problems: int,
    ) -> float:
        """Writes the new version, if there is one, and sends CREDIT to the samplers.

        collectives: those of the calling thread. taken: the version to write; None: the newest
        published version is announced again. Returns the seconds that this took.
        """
        start = time.monotonic()
        if taken is not None:
            self.published = taken.write(collectives, self._delta_writer)
        if self.source is not None:
            self.source.commit(cursor, self.published, eval_id, num_problems)
            with reporting_failed_deletion("an old version of the weights"):
                weights.prune(self.dir, self.source.versions_in_use())
        return time.monotonic() - start

    def finish(self) -> None:
        """Waits until the thread has written its version. Raises the error if writing failed."""
        in_flight = self._in_flight
        if in_flight is None:
            return
        start = time.monotonic()
        if not in_flight.done():
            report_progress("waiting for the newest version to be written")
        # There is no time limit, because a slow or failing disk reports progress, and the watchdog
        # ends the process if the disk hangs.
        wait([in_flight])
        # after the wait, so that `close` still waits for the version if an interrupt ends this wait
        self._in_flight = None
        self._seconds["sync/write_s"] += in_flight.result()
        self._seconds["sync/publish_s"] += time.monotonic() - start

    def close(self) -> None:
        """Waits at most ten seconds for a version in flight, however the run ends.

        Otherwise the version's folder could appear after other processes have cleaned up.
        """
        if self._in_flight is not None:
            wait([self._in_flight], timeout=10.0)
