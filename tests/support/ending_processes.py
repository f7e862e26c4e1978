"""The two processes of a run without torch and vLLM, for tests of how runs end.

    python -m tests.support.ending_processes ROLE …

Real: exit codes, watchdogs, deferred interrupts, locks, Link, Inbox, Ledger, weights, metrics, checkpoints by rename.
Fake: the engines, and the launcher of two ranks that exchange a byte per step over pipes. TANDEM_ENDING says
what goes wrong by itself: role:what:once|always. TANDEM_ENDING_SLOWNESS multiplies what the launcher waits for.

A run that will be disturbed from outside goes on after step HOLD_AT only when the file `disturbed` lies in its folder:
the moment is an event, however slow this machine or whoever disturbs it is. Everything is imported before a watchdog
starts to look; the ranks are forked from a launcher that has imported it all.
"""

import contextlib
import json
import multiprocessing.context
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common import config, durable
from common.config import Config
from common.errors import Interrupted, OutOfTime, Retryable, UserError
from common.files import weights
from common.files.weights import BadWeights, Published
from common.processes import exits
from common.processes.watchdog import Watchdog, report_progress
from common.wire import channel
from launcher.hosts import ranks
from report.run_log import MetricsLog
from sampler.link import Link
from tests.support.protocol_helpers import HELLO, LIMITS, make_group
from tests.support.protocol_weights import publish
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

STEP_S, SAVE_STEPS, NUM_STEPS, PER_STEP = 0.04, 4, 40, 2
HOLD_AT = 9
SLOWNESS = float(os.environ.get("TANDEM_ENDING_SLOWNESS", "1"))
channel.LOST_AFTER_S = 0.5 * SLOWNESS


def misbehave(settings: Config, role: str, when: str) -> None:
    """What TANDEM_ENDING asks of this role at this point: start, or work (after a few steps)."""
    asked = os.environ.get("TANDEM_ENDING", "")
    if not asked.startswith(f"{role}:{when}-"):
        return
    what, how_often = asked.split("-", 1)[1].split(":")
    flag = settings.run.output_dir.parent / "misbehaved"
    if how_often == "once" and flag.exists():
        return
    flag.touch()
    errors = {"user": UserError("change it"), "retry": Retryable("try again"), "bug": ZeroDivisionError("a bug")}
    if what in errors:
        raise errors[what]
    assert what == "hang", what
    time.sleep(600)


def watchdog(settings: Config, name: str, timeout_s: float) -> Watchdog:
    limits = settings.channel
    return Watchdog(name, timeout_s, limits.connect_timeout_s, settings.run.output_dir / "logs" / "none.log")


# ---- the sampler ---------------------------------------------------------------------------------------------


def sampler(settings: Config) -> None:
    with watchdog(settings, "sampler", settings.channel.stall_timeout_s):
        misbehave(settings, "sampler", "start")
        link, version, progress = Link(settings, "s0", HELLO), None, 0
        try:
            while True:
                report_progress("sampling")
                if link.receive(0.02):
                    version = None
                credit = link.credit
                if credit is not None and credit.version != version:
                    published = Published(credit.version, credit.weights_dir, credit.manifest_sha256)
                    with contextlib.suppress(BadWeights):  # pruned meanwhile: a newer credit is on its way
                        weights.read_manifest(published)
                        version = credit.version
                if credit is not None and credit.version == version:
                    progress += produce(settings, link)
                link.beat("sampling", progress, version, {}, now=False)
        except UserError as error:
            link.say_goodbye(str(error), exits.USER_ERROR)
            raise
        except (Retryable, KeyboardInterrupt) as error:
            link.say_goodbye(str(error) or "interrupted", exits.RETRYABLE)
            raise


def produce(settings: Config, link: Any) -> int:
    """Makes what is leased. Returns how many groups."""
    credit, made = link.credit, 0
    for group_id in credit.lease:
        if group_id >= 6 * PER_STEP:
            misbehave(settings, "sampler", "work")
        if not link.has_result(group_id):
            link.send_result(make_group(group_id, credit.version))
            made += 1
    return made


# ---- the trainer ---------------------------------------------------------------------------------------------


def rank(number: int, pipes: Sequence[tuple[int, int]], arguments: Sequence[str]) -> NoReturn:
    """A fork of the launcher. pipes: what each rank reads and writes."""
    exits.die_with_parent()
    for other in [descriptor for n, both in enumerate(pipes) if n != number for descriptor in both]:
        os.close(other)  # or nobody would see the end of it
    file = Path(arguments[0]).parent / f"rank {number}.pid"
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    work = (rank_0, rank_1)[number]
    exits.leave(run(f"rank {number}", arguments, lambda settings: work(settings, *pipes[number])))
    raise AssertionError("unreachable")


def rank_1(settings: Config, reader: int, writer: int) -> None:
    with watchdog(settings, "trainer rank 1", settings.channel.stall_timeout_s + 60):
        exits.defer_interrupts("")
        while (word := os.read(reader, 1)) == b"s":
            report_progress("stepping")
            os.write(writer, b"s")
        if word == b"o":
            raise OutOfTime("time is over")
        if word != b"e":
            raise Interrupted if word == b"i" else RuntimeError("rank 0 is gone")


def rank_0(settings: Config, reader: int, writer: int) -> None:
    output_dir, incarnation = settings.run.output_dir, secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watchdog(settings, "trainer rank 0", settings.channel.stall_timeout_s))
        stack.enter_context(durable.lock(output_dir / "lock.trainer", UserError))
        misbehave(settings, "trainer", "start")
        weights_dir = weights.default_dir(settings)
        durable.make_private(weights_dir)
        stack.callback(weights.remove_versions, weights_dir)
        for folder in (weights_dir, output_dir, output_dir / "checkpoints"):
            durable.remove_leftovers(folder)
        weights.remove_versions(weights_dir)
        saved = sorted((output_dir / "checkpoints").glob("step_*"))
        step = json.loads((saved[-1] / "state.json").read_text())["step"] if settings.run.resume else 0
        log = MetricsLog(output_dir, (), step if settings.run.resume else None)
        stack.callback(log.close)
        ledger = Ledger(NUM_STEPS * PER_STEP, PER_STEP, step * PER_STEP)
        inbox = stack.enter_context(Inbox(settings, "run", incarnation, LIMITS, ledger, print))
        exits.limit_time(settings.trainer.max_hours)
        inbox.wait_for_sampler()
        exits.defer_interrupts("stopping after this step; again to stop at once")
        train(settings, inbox, log, step, (reader, writer))
        save(output_dir, "final", NUM_STEPS)
        os.write(writer, b"e")


def train(settings: Config, inbox: Any, log: Any, step: int, rank_1: tuple[int, int]) -> None:
    """To the last step. Raises Interrupted, after a checkpoint if there are any."""
    weights_dir, checkpoints = weights.default_dir(settings), settings.run.output_dir / "checkpoints"
    while True:
        durable.make_private(weights_dir)
        inbox.commit(step * PER_STEP, publish(weights_dir, step, inbox.incarnation))
        weights.prune(weights_dir, inbox.versions_in_use(), keep=2)
        if step == NUM_STEPS:
            return
        try:
            inbox.receive(range(step * PER_STEP, (step + 1) * PER_STEP))
            exchange(*rank_1)
            step += 1
            log.log(step, {"reward": 1.0})
            hold(settings, step)
            if step >= 6:
                misbehave(settings, "trainer", "work")
            if exits.interrupted():
                raise Interrupted
        except Interrupted:
            out_of_time = exits.out_of_time()
            if settings.trainer.saves_checkpoints:
                save(checkpoints, f"step_{step:06d}", step)
            os.write(rank_1[1], b"o" if out_of_time else b"i")  # last: the launcher ends who is left when one has ended
            if out_of_time:
                raise OutOfTime("trainer.max_hours is over") from None
            raise
        if settings.trainer.save_steps and step % SAVE_STEPS == 0:
            save(checkpoints, f"step_{step:06d}", step)


def hold(settings: Config, step: int) -> None:
    """Waits for the disturbance, if one is meant to come; an interrupt is one."""
    folder = settings.run.output_dir.parent
    while step == HOLD_AT and (folder / "hold").exists() and not (folder / "disturbed").exists():
        if exits.out_of_time():
            return
        report_progress("waiting to be disturbed")
        time.sleep(0.005)


def exchange(reader: int, writer: int) -> None:
    report_progress("waiting for rank 1")
    time.sleep(STEP_S)
    os.write(writer, b"s")
    if os.read(reader, 1) != b"s":
        raise RuntimeError("rank 1 is gone")


def save(parent: Path, name: str, step: int) -> None:
    if (parent / name).exists():
        return
    temporary = parent / f"{durable.TEMPORARY}{name}"
    temporary.mkdir(parents=True)
    durable.write_file(temporary / "state.json", json.dumps({"step": step}).encode())
    durable.commit_dir(temporary, parent / name)


# ---- the launcher of the ranks ---------------------------------------------------------------------------------


class Fork(multiprocessing.context.ForkProcess):
    """As of subprocess."""

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid or 0, number)


def launcher(arguments: Sequence[str]) -> NoReturn:
    """launcher/hosts/ranks.py with its ranks forked."""
    to_1, to_0 = os.pipe(), os.pipe()
    pipes = (to_0[0], to_1[1]), (to_1[0], to_0[1])
    forks = [Fork(target=rank, args=(number, pipes, arguments)) for number in (0, 1)]
    for process in forks:
        process.start()
    for descriptor in (*to_1, *to_0):
        os.close(descriptor)
    asked: list[int] = []
    for number in exits.ENDS:
        signal.signal(number, lambda number, _: asked.append(number))
    ranks.END_S = 2 * SLOWNESS
    exits.leave(ranks.watch(forks, asked) % 256)
    raise AssertionError("unreachable")


def run(name: str, arguments: Sequence[str], work: Callable[[Config], None]) -> int:
    path, *overrides = arguments
    settings = config.load(path, overrides)
    return exits.run(name, lambda: work(settings))


def main() -> None:
    role, _, *arguments = sys.argv[1:]  # as the real command lines: --config path key=value …
    channel.BEAT_S = 0.05
    if role == "launcher":
        launcher(arguments)
    exits.leave(run(role, arguments, sampler))


if __name__ == "__main__":
    main()
