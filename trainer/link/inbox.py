"""The training loop's interface to the samplers. The socket's thread does the rest (socket_thread.py).

    training loop ──commit(cursor, weights)──►  state  ──CREDIT each second and on change──►  samplers
    training loop ◄──receive(group ids)───────  state  ◄──GROUP, EVAL, BEAT, HELLO──────────  samplers

Every wait of the loop reports what is missing, and ends the process with exit code 75 when its deadline expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.config import Config
from common.errors import Interrupted, Retryable, WireError, with_type
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
from trainer.link.evaluation import problems_per_chunk, split_evaluation
from trainer.link.kept import Kept
from trainer.link.ledger import Ledger
from trainer.link.peers import SharedState, describe
from trainer.link.socket_thread import SocketThread
from trainer.link.source import GroupSource, Statistics

_SAY_EVERY_S = 10.0


class Inbox(GroupSource):
    """A source of groups from samplers. Use it as a context manager: leaving says goodbye to them and joins the thread.

    transport: the default is ZeroMQ with the config's address.
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
        self.config, self.incarnation, self.say = config, incarnation, say
        self.state = SharedState(ledger, Kept(config, run_id, say))
        envelope = wire.Envelope(run_id, incarnation, "")
        self.thread = SocketThread(config, envelope, limits, self.state, transport or channel.bind(config), say)

    def __enter__(self) -> Inbox:
        self.thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.thread.end()
            self.state.kept.clear()
        else:
            reason = f"the trainer ended: {with_type(error)}"[:500]
            self.thread.end(wire.Bye(reason, code_of(error)))

    def commit(self, cursor: int, published: Published, eval_id: str | None = None, num_problems: int = 0) -> None:
        """Updates cursor, version and evaluation at once, so that no sampler sees a lease without its version."""
        with self.state.changed:
            assert self.state.evaluation is None or eval_id is None, "finish_eval comes before the next evaluation"
            self.state.ledger.advance(cursor)
            self.state.published = published
            self.state.progress += 1
            self.state.kept.begin(published)
            self._accept_kept()
            if eval_id is not None:
                self.state.evaluation = split_evaluation(eval_id, num_problems, problems_per_chunk(self.config))
        self.thread.transport.wake()  # samplers hear of it at once
        failpoint("trainer.credited")

    def refill(self, count: int) -> None:
        with self.state.changed:
            self.state.ledger.refill(count)
            self.state.progress += 1
            self._accept_kept()
        self.thread.transport.wake()  # samplers hear of it at once

    def forget(self, version: int) -> None:
        with self.state.changed:
            self.state.kept.forget(version - self.thread.max_version_lag)

    def _accept_kept(self) -> None:
        """Accepts kept groups of an earlier start that are admitted now, by the checks of newly received groups."""
        ledger, waiting = self.state.ledger, self.state.kept.waiting
        num_accepted = 0
        for group_id in [g for g in waiting if g < ledger.admitted.stop]:
            received = waiting.pop(group_id)
            if group_id < ledger.cursor:
                continue
            try:
                self.thread.check(received.group)
            except WireError as error:
                self.thread.count(error)
            else:
                ledger.accept(received, "")
                self.state.counters["kept"] += 1
                num_accepted += 1
        # no later version comes before the batch at the cursor is trained
        batch_end = ledger.cursor + self.config.prompts_per_batch + ledger.refilled
        ledger.reserved.difference_update(range(ledger.cursor, batch_end))
        if num_accepted:
            begun = ledger.admitted
            if not self.state.kept.was_published_before:  # no earlier start admitted the window's last batch
                begun = range(ledger.cursor, ledger.cursor + ledger.window - self.config.prompts_per_batch)
            ledger.note_interrupted(group_id for group_id in ledger.free if group_id in begun)

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups, in this order, once all have arrived. They stay held until `commit` passes them."""

        def missing() -> str:
            have = sum(g in self.state.ledger.held for g in group_ids)
            if have == len(group_ids):
                return ""
            return f"groups {group_ids[0]}…{group_ids[-1]} (have {have} of {len(group_ids)})"

        self._wait(missing)
        with self.state.changed:
            return [self.state.ledger.held[g] for g in group_ids]

    def samplers_are_idle(self) -> bool:
        with self.state.changed:
            evaluation = self.state.evaluation
            return self.state.ledger.is_complete and (evaluation is None or not evaluation.num_missing)

    def finish_eval(self) -> list[EvalResult]:
        evaluation = self.state.evaluation
        if evaluation is None:
            return []

        def missing() -> str:
            left = evaluation.num_missing
            return f"{left} of {len(evaluation.requests)} evaluation chunks" if left else ""

        try:
            self._wait(missing)
            return [evaluation.results[chunk] for chunk in sorted(evaluation.results)]
        finally:  # after an interrupt, too: no other version may answer the remaining chunks
            with self.state.changed:
                self.state.evaluation = None

    def wait_for_sampler(self) -> wire.Hello:
        def missing() -> str:
            """Returns a text that changes with progress: loading a million rows may take longer than the timeout."""
            if self.state.peers:
                return ""
            return f"a sampler to connect; {self.state.preparing}".removesuffix("; ")

        self._wait(missing, self.config.channel.connect_timeout_s)
        return next(iter(self.state.peers.values())).hello

    def versions_in_use(self) -> list[int]:
        peers = self.state.peers.values()
        return [p.loaded_version for p in peers if not p.lost and p.loaded_version is not None]

    def drain_statistics(self) -> Statistics:
        with self.state.changed:
            live = {name for name, peer in self.state.peers.items() if not peer.lost}
            return Statistics(*self.state.reports.drain(live), self.state.counters.copy())

    def _wait(self, missing: Callable[[], str], timeout_s: float | None = None) -> None:
        """Waits until missing() is empty, and reports what is missing. Raises the error that the thread raised.

        Raises Retryable if for timeout_s, by default channel.stall_timeout_s, missing() has not changed and
        the samplers together have not got further than before: one completion may take longer than that.
        Raises Interrupted if the process shall end meanwhile, because a sampler may take minutes to deliver.
        """
        start = moved = time.monotonic()
        is_due = every(_SAY_EVERY_S)
        last_missing, furthest = "", 0
        before = {peer.process: peer.progress for peer in self.state.peers.values()}
        deadline = timeout_s or self.config.channel.stall_timeout_s
        while True:
            with self.state.changed:
                if self.state.failure is not None:
                    raise self.state.failure
                if not (what := missing()):
                    return
                if interrupted():
                    raise Interrupted
                self.state.changed.wait(timeout=0.5)
                known = describe(self.state.peers, time.monotonic(), self.state.works())
            peers = known or f"no sampler on {endpoint(self.config)} yet: normal while vLLM starts"
            report_progress(f"waiting for {what}")  # this wait has a deadline of its own; other ranks may hear of it
            now = time.monotonic()
            progress = sum(p.progress - before.get(p.process, 0) for p in self.state.peers.values())
            if what != last_missing or progress > furthest:
                last_missing, furthest, moved = what, progress, now
            if now - moved > deadline:
                log = last_lines(sampler_log(self.config.run.output_dir, "sampler.0"))
                log = log or " Is `python sampling.py` running with the same --config?"
                raise Retryable(f"waited {now - start:.0f} s for {what}; {peers}.{log}")
            if is_due():
                self.say(f"waiting {now - start:.0f} s for {what}; {peers}")
