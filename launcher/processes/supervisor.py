"""Starts the trainer and its samplers, shows their output, restarts what may be restarted, and leaves nothing behind.

Meaning of the exit codes:
    0    trainer: the run is done, the sampler gets 30 s to leave.  sampler: the trainer decides how the run ends,
         within the same time, or it is killed and counts as a crash if the run is not done
    2    the user has something to change: all stop, 2
    75   start it again, at most 5 times without a new step in between, after 1, 2, 4 … s; from the trainer's second
         time on with new samplers, which may be what it waits for
         once trainer.max_hours is over no process is started again: all stop, 75
    130  somebody interrupted it: all stop, 130
    else the sampler holds no state and counts as 75; the trainer too if it has a checkpoint, otherwise all stop, 1
A SIGKILL is explained (killed.py). If it was the kernel's for want of memory and nothing may be started again,
or the same process was killed so before without a new step in between, the settings must change: all stop, 2.
A trainer restarts from its newest checkpoint. Without one it may start anew only while metrics.jsonl has no step:
later, that would silently repeat steps that were already reported. In a run over several hosts the children are
processes of over_hosts.py, which hold the connections.
"""

import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.processes.exits import DONE, INTERRUPTED, RETRYABLE, SIGKILLED, USER_ERROR, ends, meaning, of_child, say
from common.processes.out_of_memory import less_memory
from common.processes.transcript import tail
from launcher.processes.killed import OomKills
from launcher.processes.processes import Child, Guard, Running, remove


@dataclass(frozen=True)
class Rules:
    """The functions by which the supervisor asks about the state of the run, and its limits."""

    restart_trainer: Callable[[int], Child | str]  # exit code -> the process to start, or why none can be
    progress: Callable[[], int]  # grows with every optimizer step
    finished: Callable[[], bool]  # the trainer's final weights are on disk
    out_of_time: Callable[[], bool] = lambda: False  # trainer.max_hours is over
    is_host_of_gpus: bool = False  # then a process killed for memory lacked the host's, not the GPU's
    max_restarts: int = 5
    backoff_s: float = 1.0  # doubles with every restart
    grace_s: float = 30.0  # at least, from the request to end until SIGKILL
    batch_s: Callable[[], float] = lambda: 0.0  # the time to train and save a batch that has started


@dataclass
class _Slot:
    """A process of the run over all its attempts."""

    child: Child
    running: Running | None = None
    killed_for_memory: bool = False  # since the last progress
    attempt: int = 0
    restarts: int = 0  # since the last progress
    progress: int = 0
    start_at: float | None = None  # monotonic; None = not waiting to start
    end_by: float | None = None  # monotonic; None = it may run as long as it likes


class Supervisor:
    """The parent of a run's processes: `Supervisor(samplers, trainer, rules).run()` returns the run's exit code."""

    def __init__(self, samplers: Sequence[Child], trainer: Child, rules: Rules) -> None:
        self._rules = rules
        # The trainer first: when all have ended, its exit code decides.
        self._slots = {"trainer": _Slot(trainer)} | {sampler.name: _Slot(sampler) for sampler in samplers}
        self._guard, self._kills = Guard(), OomKills()
        self._interrupts = 0

    def run(self) -> int:
        previous = {number: signal.signal(number, self._on_signal) for number in ends()}
        try:
            with self._guard:
                for slot in self._slots.values():
                    self._start(slot)
                try:
                    return self._watch()
                finally:
                    self._stop(signal.SIGKILL)
                    remove(self._slots["trainer"].child.scratch)  # last: a sampler that looks for it creates it anew
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        while True:
            self._relay(0.1)
            self._kills.look()
            if self._interrupts:
                who = "both" if len(self._slots) == 2 else "all"
                say(f"stopping {who}, within {self._grace_s(signal.SIGINT):.0f} s; Ctrl-C again stops at once")
                self._stop(signal.SIGINT)
                return INTERRUPTED
            for name, slot in self._slots.items():
                code = slot.running.process.poll() if slot.running is not None else None
                if code is None and slot.end_by is not None and time.monotonic() >= slot.end_by:
                    say(f"{name} did not end within {self._rules.grace_s:g} s of the sampler, and is killed")
                    code = DONE  # as if it had ended by itself: the disk tells whether the run is done
                if code is not None:
                    self._close(slot)
                    verdict = self._ended(name, of_child(code, is_asked=False))
                    if verdict is not None:
                        return verdict
                elif slot.start_at is not None and time.monotonic() >= slot.start_at:
                    self._start(slot)

    def _ended(self, name: str, code: int) -> int | None:
        """Acts on the end of a process. Returns the exit code of the run, or None to go on."""
        out_of_time = code == RETRYABLE and self._rules.out_of_time()  # an orderly end, which it has reported itself
        if name != "trainer" and (code == DONE or out_of_time):
            self._slots["trainer"].end_by = time.monotonic() + self._rules.grace_s
            return None
        if code == DONE and self._rules.finished():
            self._stop(None)
            return DONE
        if out_of_time or code in (USER_ERROR, INTERRUPTED):
            if not out_of_time:
                self._explain(name, code)
            self._stop(signal.SIGINT)
            return code
        for_memory = code in SIGKILLED and self._explain_kill(name, code)
        reason = self._retry(name, code, for_memory)
        if reason is None:
            return None
        self._explain(name, code)
        say(f"not started again: {reason}")
        self._stop(signal.SIGINT)
        return RETRYABLE if code == RETRYABLE else USER_ERROR if for_memory else 1

    def _explain_kill(self, name: str, code: int) -> bool:
        """Reports who sent the SIGKILL. Returns True if it was this host's kernel, for want of memory."""
        if self._slots[name].child.on_other_hosts and code > 0:  # of that host; below 0, over_hosts.py was killed
            return False
        advice = less_memory("trainer" if name == "trainer" else "sampler", self._rules.is_host_of_gpus)
        for_memory, message = self._kills.why_killed(name, advice)
        say(message)
        return for_memory

    def _retry(self, name: str, code: int, for_memory: bool) -> str | None:
        """Plans the next attempt and returns None, or returns why there is none."""
        slot, progress = self._slots[name], self._rules.progress()
        if progress > slot.progress:
            slot.restarts, slot.progress, slot.killed_for_memory = 0, progress, False
        if self._rules.out_of_time():
            return "trainer.max_hours is over"
        if for_memory and slot.killed_for_memory:
            return "it ran out of memory twice without a new step in between, and would need as much again"
        slot.killed_for_memory |= for_memory
        if slot.restarts >= self._rules.max_restarts:
            return f"{slot.restarts} restarts in a row without a new step"
        replacement = slot.child if name != "trainer" else self._rules.restart_trainer(code)
        if isinstance(replacement, str):
            return replacement
        if slot.restarts == 0 and code != RETRYABLE:
            self._explain(name, code)  # only the first in a row: a second crash usually has the same cause
        wait_s = self._rules.backoff_s * 2**slot.restarts
        slot.child, slot.restarts, slot.start_at = replacement, slot.restarts + 1, time.monotonic() + wait_s
        say(f"{name} {meaning(code)}; restart {slot.restarts} of {self._rules.max_restarts} in {wait_s:g} s")
        if name == "trainer":
            self._renew_samplers(slot, waited_in_vain=code == RETRYABLE and slot.restarts > 1)
        return None

    def _renew_samplers(self, trainer: _Slot, waited_in_vain: bool) -> None:
        """Starts samplers with the trainer if they ended with it, or if the trainer has waited in vain once more."""
        for name, sampler in self._slots.items():  # neither holds for the trainer: it has ended and is due
            if waited_in_vain and sampler.running is not None:
                say(f"{name} is started again too: perhaps it is what the trainer waited for")
                self._close(sampler)
            if sampler.running is None and sampler.start_at is None:
                sampler.start_at = trainer.start_at

    def _start(self, slot: _Slot) -> None:
        slot.attempt, slot.start_at, slot.end_by = slot.attempt + 1, None, None
        slot.running = Running(slot.child, self._guard.mark, slot.attempt)
        self._guard.tell(slot.running, slot.running.scratch)

    def _close(self, slot: _Slot) -> None:
        assert slot.running is not None
        slot.running.close()
        self._guard.tell(slot.running, None)
        slot.running, slot.end_by = None, None

    def _stop(self, number: int | None) -> None:
        """Asks everything that runs to end, waits for it, and kills the rest.

        number: the signal that asks; None = it ends by itself and SIGTERM comes only after the wait.
        """
        live = {name: slot.running for name, slot in self._slots.items() if slot.running is not None}
        steps = [] if number == signal.SIGKILL else [number] if number is not None else [None, signal.SIGTERM]
        limit = self._interrupts + 1
        for step in steps:
            for running in live.values():
                if step is not None:
                    running.process.send_signal(step)
            grace_s = self._grace_s(step)
            deadline = time.monotonic() + grace_s
            while self._interrupts < limit and time.monotonic() < deadline:
                if all(running.process.poll() is not None for running in live.values()):
                    break
                self._relay(0.05)
        for name, running in live.items():
            if steps and running.process.poll() is None and self._interrupts < limit:
                say(f"{name} did not end within {grace_s:.0f} s, and is killed")
            self._close(self._slots[name])

    def _grace_s(self, number: int | None) -> float:
        """Returns the seconds until SIGKILL; after SIGINT the trainer first finishes its batch and saves it."""
        return max(self._rules.grace_s, self._rules.batch_s() if number == signal.SIGINT else 0.0)

    def _relay(self, timeout_s: float) -> None:
        running = [slot.running for slot in self._slots.values() if slot.running is not None]
        streams = {descriptor: child for child in running for descriptor in child.streams}
        for descriptor in select.select(list(streams), [], [], timeout_s)[0]:
            streams[descriptor].relay(descriptor)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._interrupts += 1

    def _explain(self, name: str, code: int) -> None:
        log = self._slots[name].child.log
        say(f"{name} {meaning(code)}. The last lines of its log:")
        with suppress(OSError):
            print("".join(f"    {line}\n" for line in tail(log, 15)), file=sys.stderr, end="", flush=True)
        say(f"full log: {log}")
