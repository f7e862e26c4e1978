"""A process that is stuck ends itself with its stacks; one that moves, waits lawfully or still starts does not."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config
from common.errors import Interrupted
from common.paths import ROOT
from tests.support.protocol_helpers import (
    FakeSampler,
    changed,
    hurried_config,
    make_group,
    make_inbox,
    published,
    train,
)
from tests.support.speed import limit, overdue, until

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 0.6
PATIENT_S = 1.5  # where it must not end: a busy machine may stop a process for a second
HEAD = """
import re, sys, tempfile, threading, time
from pathlib import Path
from common.processes import exits
from common.errors import Interrupted, Retryable
from common.processes.watchdog import Watchdog, report_progress, waiting_for
from tests.support.protocol_helpers import make_config, make_inbox, published
log, limit_s, startup_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
def main():
    with Watchdog("trainer rank 1", timeout_s=limit_s, startup_s=startup_s, peer_log=log):
"""


def run(log: Path, body: str, startup_s: float = 0.0, limit_s: float = LIMIT_S) -> tuple[int, str, float]:
    """(exit code, stderr, seconds) of a process with this body under a watchdog of `limit_s`."""
    limit_s = max(limit_s, limit(limit_s / 3))
    code = HEAD + "".join(f"        {line}\n" for line in body.splitlines()) + "exits.leave(exits.run('trainer', main))"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(log), str(limit_s), str(limit(startup_s))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    return done.returncode, done.stderr, time.monotonic() - begun


STUCK = "def stuck_in_a_collective(): threading.Lock().acquire(); time.sleep(60)\n"


def test_a_stuck_process_ends_with_75_its_stacks_what_it_did_and_the_peers_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    log.write_text("early\n" * 9 + "vllm: \x1b[31mout of memory\n")
    thread = "def beside(): time.sleep(60)\nthreading.Thread(target=beside, daemon=True).start()\n"
    body = STUCK + thread + "report_progress('making optimizer step 7')\nstuck_in_a_collective()"
    code, said, seconds = run(log, body, startup_s=50.0)  # the limit of the start is over
    assert code == 75
    assert re.search(r"trainer rank 1: no progress for \d+ s while making optimizer step 7", said)
    assert "stuck_in_a_collective" in said and "beside" in said
    assert f"Last lines of {log}:" in said and "vllm: [31mout of memory" in said
    assert said.count("early") == 4  # five lines
    assert not overdue(seconds, 5)


def test_a_stuck_process_ends_where_nobody_can_read_why(tmp_path: Path) -> None:
    assert run(tmp_path / "none", "import os\nos.dup2(os.open('/dev/full', 1), 2)\ntime.sleep(20)")[0] == 75


JUMPS = "real = time.time\ntime.time = lambda: real() + 3600 * (1 if time.monotonic() % 0.2 < 0.1 else -1)\n"
GROUPS = """
with make_inbox(make_config(Path(tempfile.mkdtemp()), channel={"stall_timeout_s": 2 * limit_s})) as inbox:
    inbox.commit(0, published(0))
    report_progress("training")
    try:
        inbox.receive([0])
    except Retryable as error:
        assert re.match(r"waited \\d+ s for groups 0…0 \\(have 0 of 1\\)", str(error)), error
"""


@pytest.mark.parametrize(
    ("body", "startup_s"),
    [
        ("for _ in range(10): report_progress('sampling'); time.sleep(limit_s / 4)", 0.0),
        (JUMPS + "for _ in range(6): report_progress('sampling'); time.sleep(limit_s / 4)", 0.0),
        ("time.sleep(2 * limit_s)\nreport_progress('stepping')", 4.0),
        ("with waiting_for('ranks', 9 * limit_s, False): time.sleep(3 * limit_s)", 0.0),
        (GROUPS.strip(), 0.0),  # the wait looks twice a second, twice as long as the limit: each look must count
    ],
    ids=["progress", "a clock that jumps", "a slow start", "a library's wait", "a wait with a deadline of its own"],
)
def test_a_process_that_moves_starts_or_waits_lawfully_goes_on(tmp_path: Path, body: str, startup_s: float) -> None:
    code, said, _ = run(tmp_path / "none", body, startup_s, PATIENT_S)
    assert (code, said) == (0, "")


def test_a_start_that_takes_too_long_ends(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path / "none", "time.sleep(60)", startup_s=0.5)
    assert code == 75 and "while starting" in said
    assert "Last lines of" not in said  # a run by hand has no log of its peer


def test_a_wait_in_a_library_that_outlasts_its_limit_ends(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path / "none", "with waiting_for('ranks', 0.5, False): time.sleep(60)")
    assert code == 75 and "while waiting for ranks" in said


# ---- a sampler that beats and does not work ---------------------------------------------------------------------


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    yield from hurried_config(monkeypatch)


def test_a_sampler_that_beats_without_progress_is_sent_away_and_its_work_goes_to_another(config: Config) -> None:
    said: list[str] = []
    (config.run.output_dir / "logs").mkdir(parents=True)
    (config.run.output_dir / "logs" / "sampler.log").write_text("vllm: step 4711\n")
    with make_inbox(changed(config, channel={"stall_timeout_s": limit(0.3)}), say=said.append) as inbox:
        with FakeSampler(config, "stuck", make=lambda g, v: make_group(60, v)) as stuck:
            inbox.commit(0, published(0))
            until(lambda: stuck.ended)
            assert stuck.ended.exit_code == 75  # its supervisor starts it again
            assert re.search(r"its work has not moved for \d+ s \(phase: sampling\)", str(stuck.ended))
        inbox.config = inbox.thread.config = config  # the one that works is given time
        with FakeSampler(config, "s0"):
            assert train(inbox, 5) == list(range(10))
    [line] = [line for line in said if "sent away" in line]
    assert "its 4 unfinished groups are reassigned" in line and "vllm: step 4711" in line


def test_a_sampler_that_has_nothing_to_do_is_left_alone(config: Config) -> None:
    """One whose work moves: test_long_work.py."""
    said: list[str] = []
    stall_s = limit(0.3)
    impatient = changed(config, channel={"stall_timeout_s": stall_s})
    with make_inbox(impatient, say=said.append) as inbox, FakeSampler(config, "s0") as idle:
        inbox.commit(0, published(0))
        until(lambda: len(inbox.state.ledger.received) == 4)
        time.sleep(2 * stall_s)  # the trainer trains
        assert not idle.ended
    assert not [line for line in said if "sent away" in line]


# ---- an interrupt


def test_an_interrupt_ends_the_wait_for_groups_at_once_but_what_is_here_is_taken(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeSampler(config) as sampler:
        with pytest.raises(Interrupted), make_inbox(config) as inbox:
            inbox.commit(0, published(0))
            until(lambda: len(inbox.state.ledger.received) == 4)
            monkeypatch.setattr("trainer.link.inbox.interrupted", lambda: True)
            assert [one.group.group_id for one in inbox.receive([0, 1])] == [0, 1]
            inbox.receive([2, 3, 4])
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == 130
