"""The training loop's interface to the samplers, whose messages a thread reads (socket_thread.py).

    training loop ──commit(cursor, weights)──► state ──CREDIT each second and on change──► samplers
    training loop ◄──receive(group ids)─────── state ◄──GROUP, EVAL, BEAT, HELLO────────── samplers

While the loop waits for samplers, it tells the user what is missing. If nothing arrives before a
deadline, the process ends with exit code 75.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.config import Config
from common.errors import Interrupted, Retryable, with_type
from common.failpoints import failpoint
from common.files.run_folder import sampler_log
from common.files.weights import Published
from common.processes.exits import code_of, every, interrupted
from common.processes.transcript import last_lines
from common.processes.watchdog import report_progress
from common.types import EvalResult
from common.wire import channel, wire
from common.wire.address import endpoint
from common.wire.channel import Transport
from common.wire.group_limits import Limits
from trainer.link.acceptor import Acceptor
from trainer.link.evaluation import Evaluation, problems_per_chunk, split_evaluation
from trainer.link.group_journal import GroupJournal
from trainer.link.ledger import Ledger
from trainer.link.peers import Peer, SharedState, describe
from trainer.link.socket_thread import MAX_REASON, SocketThread
from trainer.link.source import GroupSource, Statistics

_SAY_EVERY_S = 10.0  # seconds between two messages to the user while the training loop waits


@dataclass
class _Wait:
    """A wait of the training loop for the samplers. Times are monotonic seconds."""

    started_at: float
    progress_at_start: dict[tuple[int, str], int]  # by `Peer.process`
    # when `missing` last changed or the samplers last made progress
    advanced_at: float = field(init=False)
    missing: str = ""  # what has not arrived yet, in words
    most_progress: int = 0  # the highest progress since the start, summed over the samplers

    def __post_init__(self) -> None:
        self.advanced_at = self.started_at

    def update(self, now: float, missing: str, peers: Iterable[Peer]) -> None:
        """Notes what is missing now, and whether the samplers have made progress."""
        progress = 0
        for peer in peers:
            # a process that has started since begins to count at 0
            progress += peer.progress - self.progress_at_start.get(peer.process, 0)
        if missing != self.missing or progress > self.most_progress:
            self.missing = missing
            self.most_progress = progress
            self.advanced_at = now


class Inbox(GroupSource):
    """A source of groups from samplers.

    As a context manager, it starts the socket's thread. At the end it says goodbye to the samplers
    and joins the thread.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        incarnation: str,
        limits: Limits,
        ledger: Ledger,
        say: Callable[[str], None],
        transport: Transport | None = None,
    ):
        """Binds the socket.

        incarnation: a random id of this start of the trainer. limits: what a valid group must
        satisfy. transport: by default ZeroMQ at the address in the config.
        """
        self.config = config
        self.incarnation = incarnation
        self.say = say
        self.state = SharedState(ledger, GroupJournal(config, run_id, say))
        envelope = wire.Envelope(run_id, incarnation, sampler_id="")  # the trainer is no sampler
        if transport is None:
            transport = channel.bind(config)
        self.acceptor = Acceptor(config, envelope, limits, self.state, say)
        self.thread = SocketThread(config, envelope, self.acceptor, self.state, transport, say)

    def __enter__(self) -> Inbox:
        self.thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.thread.end()
            self.state.journal.clear()
        else:
            reason = f"the trainer ended: {with_type(error)}"
            self.thread.end(wire.Bye(reason[:MAX_REASON], code_of(error)))

    def commit(
        self,
        cursor: int,
        published: Published,
        eval_id: str | None = None,
        num_problems: int = 0,
    ) -> None:
        """Updates cursor, version and evaluation under one lock.

        Otherwise, a sampler could get a lease on new groups together with the old version.
        """
        with self.state.changed:
            may_start = self.state.evaluation is None or eval_id is None
            assert may_start, "finish_eval comes before the next evaluation"
            self.state.ledger.advance(cursor)
            self.state.published = published
            self.state.change_count += 1
            self.state.journal.begin(published)
            self.acceptor.accept_journal()
            if eval_id is not None:
                per_chunk = problems_per_chunk(self.config)
                self.state.evaluation = split_evaluation(eval_id, num_problems, per_chunk)
        self.thread.transport.wake()  # samplers hear of the change at once
        failpoint("trainer.credited")

    def refill(self, count: int) -> None:
        with self.state.changed:
            self.state.ledger.refill(count)
            self.state.change_count += 1
            self.acceptor.accept_journal()
        self.thread.transport.wake()  # samplers hear of the change at once

    def forget(self, version: int) -> None:
        with self.state.changed:
            self.state.journal.forget(version - self.acceptor.max_version_lag)

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Waits until the groups with these ids have arrived, and returns them in this order.

        Each group stays in the ledger until `commit` moves the cursor beyond the group's id. Raises
        the same errors as `_wait`.
        """
        self._wait(lambda: self._missing_groups(group_ids))
        with self.state.changed:
            return [self.state.ledger.received[group_id] for group_id in group_ids]

    def _missing_groups(self, group_ids: Sequence[int]) -> str:
        received = self.state.ledger.received
        num_received = sum(group_id in received for group_id in group_ids)
        if num_received == len(group_ids):
            return ""
        return f"groups {group_ids[0]}…{group_ids[-1]} (have {num_received} of {len(group_ids)})"

    def finish_eval(self) -> list[EvalResult]:
        evaluation = self.state.evaluation
        if evaluation is None:
            return []
        try:
            self._wait(lambda: _missing_chunks(evaluation))
            return [evaluation.results[chunk] for chunk in sorted(evaluation.results)]
        finally:
            # also after an interrupt, because a later version must not answer the missing chunks
            with self.state.changed:
                self.state.evaluation = None

    def wait_for_sampler(self) -> wire.Hello:
        self._wait(self._missing_sampler, self.config.channel.connect_timeout_s)
        return next(iter(self.state.peers.values())).hello

    def _missing_sampler(self) -> str:
        """Returns "" if a sampler has connected, and otherwise what the wait is for, in words.

        The text contains the progress of a sampler that prepares its data. The deadline of the wait
        starts again when the text changes, so a sampler may take long to load a million rows.
        """
        if self.state.peers:
            return ""
        if not self.state.preparing:
            return "a sampler to connect"
        return f"a sampler to connect; {self.state.preparing}"

    def versions_in_use(self) -> list[int]:
        versions = []
        for peer in self.state.peers.values():
            if not peer.lost and peer.loaded_version is not None:
                versions.append(peer.loaded_version)
        return versions

    def drain_statistics(self) -> Statistics:
        with self.state.changed:
            values, num_samplers = self.state.reports.drain(self.state.live_peers())
            counters = self.state.counters.copy()
            return Statistics(samplers=values, num_samplers=num_samplers, counters=counters)

    def _wait(self, missing: Callable[[], str], timeout_s: float | None = None) -> None:
        """Blocks the training loop until nothing is missing, and tells the user what it waits for.

        missing: a function that returns in words what has not arrived yet, and "" when everything
        has arrived. timeout_s: by default channel.stall_timeout_s. The time starts again when the
        text of missing() changes, and when the samplers' total progress reaches a new maximum,
        because a single completion may take longer than the timeout.

        Raises Retryable when the time is over, `SharedState.failure` if there is one, and
        Interrupted if the process was asked to end.
        """
        progress = {peer.process: peer.progress for peer in self.state.peers.values()}
        wait = _Wait(started_at=time.monotonic(), progress_at_start=progress)
        message_is_due = every(_SAY_EVERY_S)
        if timeout_s is None:
            timeout_s = self.config.channel.stall_timeout_s
        while True:
            with self.state.changed:
                if self.state.failure is not None:
                    raise self.state.failure
                what = missing()
                if not what:
                    return
                if interrupted():
                    raise Interrupted
                self.state.changed.wait(timeout=0.5)
                now = time.monotonic()
                peers = describe(self.state.peers, now, self.state.works())
            if not peers:
                peers = f"no sampler on {endpoint(self.config)} yet: normal while vLLM starts"
            # neither this rank nor the ranks that wait for it are stuck: this wait has a deadline
            report_progress(f"waiting for {what}")

            wait.update(now, what, self.state.peers.values())
            waited = f"{now - wait.started_at:.0f} s for {what}; {peers}"
            if now - wait.advanced_at > timeout_s:
                raise Retryable(f"waited {waited}.{self._advice_after_timeout()}")
            if message_is_due():
                self.say(f"waiting {waited}")

    def _advice_after_timeout(self) -> str:
        """Returns the end of the first sampler's log, or a question to the user without a log."""
        log = last_lines(sampler_log(self.config.run.output_dir, "sampler.0"))
        if log:
            return log
        return " Is `python sampling.py` running with the same --config?"


def _missing_chunks(evaluation: Evaluation) -> str:
    if not evaluation.num_missing:
        return ""
    return f"{evaluation.num_missing} of {len(evaluation.requests)} evaluation chunks"
