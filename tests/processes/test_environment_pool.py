"""Each rollout's environment in a process of its own: what it does to itself, the others do not notice."""

import ctypes
import os
import signal
import time

import psutil
import pytest

from common.config import Rollouts
from common.errors import UserError
from common.worker import owner
from environments import Done, Failed, Turn
from environments.pool import EnvironmentPool
from tests.support.own_process import alive
from tests.support.python_file import python_file
from tests.support.speed import limit, overdue, until
from tests.support.tier import count

pytestmark = pytest.mark.timeout(120)

CAN_CONFINE_SIGNALS = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6  # Landlock's version
PATIENT_S = 1.5  # a busy machine may stop a good environment for a second
ROW = {"question": "Guess.", "answer": "4"}
# Does what the completion says.
ENVIRONMENT = """
import asyncio, os, random, signal, subprocess, sys, time
from environments import Done

class Obeys:
    def __init__(self, greeting="Hello"):
        self.greeting, self.seen, self.draw = greeting, 0, random.random()

    def reset(self, question, **row):
        if question == "sleep":
            time.sleep(60)
        return self.greeting + " " + question

    def step(self, completion):
        self.seen += 1
        given = {}
        exec(completion, globals(), given | {"self": self})
        return globals().pop("answer", f"step {self.seen}")

class Waits(Obeys):
    async def reset(self, question, **row):
        await asyncio.sleep(0)
        return [{"role": "user", "content": question}]

    async def step(self, completion):
        await asyncio.sleep(float(completion))
        return Done(0.5, "bye")

    async def get_reward(self):
        return 0.25

class Cleans(Obeys):
    def close(self):
        open(self.greeting, "w").write(str(os.getpid()))

def raises():
    raise ValueError("no game today")
"""


file = python_file(ENVIRONMENT)


def settings(file, name="Obeys", **more):
    return Rollouts(environment=f"{file}:{name}", timeout_s=more.pop("timeout_s", limit(10)), **more)


@pytest.fixture(scope="module")
def shared(file):
    with EnvironmentPool(settings(file, timeout_s=max(PATIENT_S, limit(0.5))), columns=ROW) as pool:
        yield pool


@pytest.fixture
def pool(shared):
    """Empty, whatever the test before it left."""
    shared.close_all()
    return shared


def one(pool):
    [(key, reply)] = pool.ready(timeout_s=limit(30))
    return key, reply


def started(pool, *keys, **row):
    for key in keys:
        pool.start(key, ROW | row)
    replies = {}
    while len(replies) < len(keys):
        replies.update(pool.ready(timeout_s=limit(30)))
    return replies


def stepped(pool, key, completion):
    pool.step(key, completion)
    return one(pool)[1]


def plain(reply):
    """Without its seconds, which differ, and the state of a class that has more than it needs."""
    return type(reply)(**{name: value for name, value in vars(reply).items() if name not in ("seconds", "state")})


def test_a_rollout_is_reset_stepped_and_done_and_every_rollout_has_an_instance_of_its_own(file):
    with EnvironmentPool(settings(file, environment_kwargs={"greeting": "Hi"}), columns=ROW) as pool:
        assert (pool.tools, pool.ready()) == ([], [])
        replies = started(pool, "a", ("b", 1))
        assert plain(replies["a"]) == plain(replies["b", 1]) == Turn([{"role": "user", "content": "Hi Guess."}])
        assert [plain(stepped(pool, "a", "")).messages[0]["content"] for _ in range(2)] == ["step 1", "step 2"]
        assert stepped(pool, ("b", 1), "").messages == [{"role": "user", "content": "step 1"}]
        assert plain(stepped(pool, "a", "global answer; answer = Done(1)")) == Done(1.0)
        pool.finish(("b", 1))
        assert plain(one(pool)[1]) == Done(0.0)  # it gave no reward before a limit ended it
        assert pool.pending == 0


def test_async_environments_and_rewards_at_the_end(file):
    with EnvironmentPool(settings(file, "Waits"), columns=ROW) as pool:
        started(pool, 1, 2)
        assert plain(stepped(pool, 1, "0.01")) == Done(0.5, [{"role": "user", "content": "bye"}])
        pool.finish(2)
        assert plain(one(pool)[1]) == Done(0.25)


@pytest.mark.parametrize(
    ("completion", "kind", "words"),
    [
        ("time.sleep(60)", "timeout", "killed. Completion: 'time.sleep(60)'"),
        ("os._exit(3)", "crash", "ended with exit code 3"),
        (  # a well-formed answer, to another request than the one that was asked
            "f = b'\\x81\\xa4turn\\x81\\xa8messages\\x90'\n"
            "for fd in range(3, 30):\n try: os.write(fd, bytes([len(f), 0, 0, 0, 99, 0, 0, 0]) + f)\n"
            " except OSError: pass",
            "crash",
            "broke the protocol",
        ),
        ("raise ValueError('bad value')", "error", "step raised ValueError: bad value"),
        ("global answer; answer = None", "error", "step returned None, expected text, messages, either with a"),
        ("global answer; answer = [{'role': 'user'}]", "error", "as a message, expected"),
        ("global answer; answer = Done(float('nan'))", "error", "gave the reward nan"),
        ("global answer; answer = 'x' * 2_000_000", "error", "bytes, more than"),
        ("global answer; answer = [{'role': 'user', 'content': [{'text': ''}]}]", "error", "as a message, expected"),
        ("global answer; answer = [{'role': 'user', 'content': '', 'more': object()}]", "error", "cannot be sent"),
    ],
)
def test_a_step_that_goes_wrong_fails_its_rollout_in_time_and_no_other(pool, completion, kind, words):
    started(pool, "bad", "good")
    begun = time.monotonic()
    reply = stepped(pool, "bad", completion)
    took_s = time.monotonic() - begun
    assert isinstance(reply, Failed) and reply.kind == kind and words in reply.reason
    assert not overdue(took_s - max(PATIENT_S, limit(0.5)), 1.0)
    assert stepped(pool, "good", "").messages == [{"role": "user", "content": "step 1"}]
    pool.close("good")
    assert (pool.pending, pool.ready()) == (0, [])


def test_a_slow_step_holds_no_other_rollout(file):
    with EnvironmentPool(settings(file, timeout_s=limit(60)), columns=ROW) as pool:
        started(pool, *range(4))
        pool.step(0, "time.sleep(600)")
        for key in (1, 2, 3):
            assert stepped(pool, key, "").messages[0]["content"] == "step 1"
        pool.close(0)  # and the one that sleeps is dropped at once
        assert pool.pending == 0


def test_a_slow_reset_and_a_row_that_cannot_be_sent_fail_their_rollout(pool):
    reply = started(pool, 1, question="sleep")[1]
    assert reply.kind == "timeout" and "did not answer reset" in reply.reason
    reply = started(pool, 1, answer=object())[1]
    assert reply.kind == "error" and "cannot be sent" in reply.reason
    nested = 10**30
    for _ in range(2000):
        nested = [nested]
    reply = started(pool, 1, answer=nested)[1]
    assert reply.kind == "error", "what is nested too deeply was not lost by the machine"
    assert pool.pending == 0


def test_when_the_fork_server_dies_its_rollouts_are_lost_once_and_the_next_start_has_another(file):
    with EnvironmentPool(settings(file), columns=ROW) as pool:
        started(pool, 1, 2)
        pool.step(1, "time.sleep(600)")
        server = pool._workers._server._process.pid
        os.kill(server, signal.SIGKILL)
        assert one(pool)[1].kind == "lost"
        reply = stepped(pool, 2, "")
        assert reply.kind == "lost" and "forked from died of signal 9" in reply.reason
        assert isinstance(started(pool, 3)[3], Turn)
        assert pool._workers._server._process.pid != server


def test_a_fork_server_that_is_stopped_is_killed_and_replaced(file, monkeypatch):
    monkeypatch.setattr(owner, "_FORK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(owner, "_KILL_PATIENCE_S", 0.5)
    with EnvironmentPool(settings(file, timeout_s=0.5), columns=ROW) as pool:
        started(pool, 1)
        for fails in (lambda: stepped(pool, 1, "time.sleep(600)").kind, lambda: started(pool, 2)[2].kind):
            server = psutil.Process(pool._workers._server._process.pid)
            server.suspend()
            assert fails() in ("timeout", "lost")
            until(lambda server=server: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 5.0)
            assert isinstance(started(pool, 3)[3], Turn)
            pool.close(3)


def test_rollouts_beyond_the_limit_wait_for_a_place_in_order(file, monkeypatch):
    monkeypatch.setattr("environments.pool.MAX_ENVIRONMENTS", 2)
    with EnvironmentPool(settings(file), columns=ROW) as pool:
        for key in range(4):
            pool.start(key, ROW)
        first = dict(pool.ready(timeout_s=limit(30)))
        while len(first) < 2:
            first.update(pool.ready(timeout_s=limit(30)))
        assert set(first) == {0, 1}
        assert pool.ready(timeout_s=0.2) == [] and pool.pending == 2
        pool.close(2)  # while it waits
        pool.close(0)
        assert one(pool)[0] == 3
        pool.close_all()


def test_seeds_make_environments_equal_and_their_absence_different(file):
    with EnvironmentPool(settings(file), columns=ROW) as pool:
        for key, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
            pool.start(key, ROW, seed=seed)
        while pool.pending:
            pool.ready(timeout_s=limit(30))
        draw = "global answer; answer = str(random.random())"
        drawn = [stepped(pool, key, draw).messages[0]["content"] for key in "abcde"]
        assert drawn[0] == drawn[1] and len(set(drawn)) == 4


def test_close_is_called_when_a_rollout_ends_and_nothing_outlives_it_that_it_started(file, tmp_path):
    note = tmp_path / "closed"
    given = settings(file, "Cleans", environment_kwargs={"greeting": str(note)})
    with EnvironmentPool(given, columns=ROW) as pool:
        until(note.exists, 5.0)  # of the instance that was tried
        started(pool, 1)
        starts = "subprocess.Popen(['sleep', '61']).pid, subprocess.Popen(['setsid', 'sleep', '62']).pid"
        pids = eval(stepped(pool, 1, f"global answer; answer = str([{starts}, os.getpid()])").messages[0]["content"])
        assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
        note.unlink()
        pool.close(1)
        until(note.exists, 5.0)
        assert int(note.read_text()) == pids[2]
        until(lambda: not any(map(psutil.pid_exists, pids)), 5.0)


def test_a_deadline_that_is_over_before_the_process_runs_still_ends_it(file):
    with EnvironmentPool(settings(file, timeout_s=1e-4), columns=ROW) as pool:
        assert [reply.kind for reply in started(pool, *range(20), question="sleep").values()] == ["timeout"] * 20
        server = psutil.Process(pool._workers._server._process.pid)
        until(lambda: not server.children(), 5.0)


@pytest.mark.skipif(not CAN_CONFINE_SIGNALS, reason="this kernel cannot confine signals (Linux 6.12)")
def test_an_environment_cannot_signal_the_run(pool):
    started(pool, 1, 2)
    for victims in ("os.getppid()", str(os.getpid())):
        started(pool, victims)
        reply = stepped(pool, victims, f"os.kill({victims}, signal.SIGKILL)")
        assert reply.kind == "error" and "PermissionError" in reply.reason
    pool.step(1, "os.kill(-1, signal.SIGKILL)")
    one(pool)
    assert isinstance(stepped(pool, 2, ""), Turn)
    pool.close_all()


def test_what_the_user_can_mend_stops_the_start(file, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    (tmp_path / "kinds.py").write_text(
        "class Empty: pass\n"
        "class NoTools:\n    def reset(self): pass\n"
        "class Wants:\n    def reset(self, level): pass\n    def step(self, completion): pass\n"
        "class Alone:\n    def reset(self): pass\n    def step(self): pass\n"
        "def times(a, b):\n    return a * b\n"
    )
    kinds = f"{tmp_path}/kinds.py"
    for given, words in (
        ({"environment": f"{tmp_path}/dies.py:Obeys"}, "died of signal 11"),
        ({"environment": f"{file}:raises"}, "raised ValueError: no game today"),
        ({"environment": f"{file}:Obeys", "environment_kwargs": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"environment": f"{kinds}:Empty"}, "has no reset; write def reset(self, **row)"),
        ({"environment": f"{kinds}:NoTools"}, "has neither step nor methods that are tools"),
        ({"environment": f"{kinds}:Wants"}, "reset wants 'level'; it gets question, answer"),
        ({"environment": f"{kinds}:Alone"}, "step is called with the completion alone (too many positional arguments)"),
        ({"tools": [f"{kinds}:times"]}, "tool 'times' cannot be described to the model"),
    ):
        with pytest.raises(UserError) as error, EnvironmentPool(Rollouts(**given), columns=ROW):
            pass
        assert words in str(error.value), str(error.value)


# what an environment does in its n-th bad step -> (how often in 10,000 steps, what the pool must say of it)
PLAN = {
    "global answer; answer = [None, 7, {'a': 1}, [7], [{'role': 1, 'content': 'x'}], Done('x'), Done(float('inf')), "
    "b'x', object(), []][n % 10]": (400, "error"),
    "raise [ValueError, SystemExit, MemoryError, RecursionError][n % 4]('x' * 1000)": (200, "error"),
    "global answer; answer = 'x' * 3_000_000; sys.stdout.write('x' * 200_000)": (20, "error"),
    "self.kept = bytearray(1 << 40)": (20, "error"),
    "os._exit(n % 3)": (60, "crash"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (20, "crash"),
    "for fd in range(3, 64):\n try: os.write(fd, b'\\xff' * 100)\n except OSError: pass": (20, "crash"),
    "os.closerange(3, 64)": (10, "crash"),
    "time.sleep(600)": (24, "timeout"),
    "while True: pass": (6, "timeout"),
    "[subprocess.Popen(['sleep', '600'], start_new_session=new) for new in (False, True)]": (20, ""),
    "os.fork()": (20, ""),
}
KILLS = {"os.kill(os.getppid(), signal.SIGKILL)": (20, "error")} if CAN_CONFINE_SIGNALS else {}
STEPS, AT_ONCE = count(1_000, 10_000), 16


def hostile_run(pool, commands):
    """Every command once, in up to AT_ONCE rollouts: what each was answered, and how long it took."""
    replies, asked, todo = [], {}, list(commands)
    for key in range(AT_ONCE):
        pool.start(key, ROW)
    while todo or asked:
        for key, reply in pool.ready(timeout_s=limit(60)):
            if key in asked:
                command, begun = asked.pop(key)
                replies.append((command, reply, time.monotonic() - begun))
            if isinstance(reply, Turn) and todo:
                asked[key] = todo.pop(), time.monotonic()
                pool.step(key, asked[key][0])
            elif isinstance(reply, Failed) and todo:
                pool.start(key, ROW)
    return replies


@pytest.mark.timeout(500)  # its deadlines are as long as the machine is slow
def test_ten_thousand_steps_of_a_hostile_environment(file, tmp_path, monkeypatch, figure):
    """Every failure is told once and by its kind, each within a second after its deadline, and nothing is left."""
    plan = PLAN | KILLS
    bad = [f"n = {i}\n{does}" for does, (times, _) in plan.items() for i in range(max(2, times * STEPS // 10_000))]
    commands = [""] * STEPS
    for i, command in enumerate(sorted(bad)):
        commands[int(i * STEPS / len(bad))] = command
    monkeypatch.setenv("TANDEM_TEST_TAG", str(tmp_path))
    deadline_s = max(PATIENT_S, limit(0.5))
    begun = time.monotonic()
    with EnvironmentPool(settings(file, timeout_s=deadline_s), columns=ROW) as pool:
        replies = hostile_run(pool, commands)
    took_s = time.monotonic() - begun
    assert len(replies) == STEPS
    for command, reply, _ in replies:
        expected = plan.get(command.partition("\n")[2], (0, ""))[1]
        assert getattr(reply, "kind", "") == expected, (command, reply)
    slowest = max(seconds for _, _, seconds in replies)
    assert not overdue(slowest - deadline_s, 1.0)
    until(lambda: not alive(str(tmp_path)), 5.0)
    failures = sum(isinstance(reply, Failed) for _, reply, _ in replies)
    figure(
        "R15",
        f"{STEPS:,} steps, {len(bad)} hostile, {failures} failures in {took_s:.0f} s; slowest reply "
        f"{slowest - deadline_s:+.2f} s after its deadline",
    )
