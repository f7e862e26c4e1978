"""A reward that hangs, dies, forks, prints or raises costs its group and nothing else."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from common.config import Rewards, Rollouts
from common.errors import UserError
from common.paths import ROOT
from common.types import Problem
from environments.pool import EnvironmentPool
from rewards.load import Load
from rewards.pool import RewardFailure, RewardPool
from sampler.row_checks import try_rewards
from tests.support.configs import config_of
from tests.support.python_file import python_file
from tests.support.speed import is_gone, limit, overdue, until

pytestmark = pytest.mark.timeout(60)

COLUMNS = {"question": "2+2?", "answer": "#### 4"}
# Does what the completion says.
REWARD = """
import os, signal, subprocess, sys, time

def act(completions, question, **columns):
    for completion in completions:
        exec(completion)
    return [float(len(completions))] * len(completions)

def returns(completions, **columns):
    return eval(completions[0])

def named(completions, question):
    return [1.0] * len(completions)

def sees(completions, images):
    return [float(len(completions))] * len(completions)
"""


file = python_file(REWARD)


@pytest.fixture(scope="module")
def pool(file):
    """For what needs no deadline: a busy machine may stop a good reward for a second."""
    with RewardPool(Rewards(reward_funcs=[f"{file}:act"], timeout_s=limit(10)), columns=COLUMNS) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty(file):
    with RewardPool(Rewards(reward_funcs=[f"{file}:act"], timeout_s=limit(0.5)), columns=COLUMNS) as pool:
        yield pool


@pytest.fixture(scope="module")
def returning(file):
    """Returns what the first completion says."""
    with RewardPool(Rewards(reward_funcs=[f"{file}:returns"])) as pool:
        yield pool


def submit(pool, key, *completions, columns=COLUMNS):
    pool.submit(key, "2+2?", completions, [[1]] * len(completions), columns)


def one(pool):
    [(key, result)] = pool.ready(timeout_s=limit(20))
    return key, result


def test_jobs_come_back_with_their_keys_and_scores():
    with RewardPool(Rewards(reward_weights=[1.0, 0.5]), columns=COLUMNS) as pool:
        assert pool.ready(timeout_s=60) == [], "at once when nothing is pending"
        good = "<think>a</think><answer>4</answer>"
        pool.submit(("group", 7), "2+2?", [good, "5"], [np.array([1], np.int32)] * 2, COLUMNS)
        assert pool.pending == 1
        key, scores = one(pool)
        assert pool.pending == 0
    assert key == ("group", 7)
    assert scores == [({"answer": 1.0, "format": 1.25}, 1.625), ({"answer": -1.0, "format": -1.0}, -1.5)]


SPINS = "while True: pass"


@pytest.mark.parametrize(
    ("completion", "kind", "words"),
    [
        ("time.sleep(60)", "timeout", " s, killed. First completion: 'time.sleep(60)'"),
        (SPINS, "timeout", "killed"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", "timeout", "killed"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "died of signal 11"),
        ("os._exit(3)", "crash", "ended with exit code 3"),
        ("os.fork() and os.kill(os.getpid(), 9) or time.sleep(60)", "crash", "died of signal 9"),
        ("raise ValueError('bad value')", "error", "act raised ValueError: bad value"),
        ("b'x' * 10**10", "error", "allow more: rewards.max_memory_gib="),
    ],
)
def test_a_bad_reward_is_reported_in_time_and_the_next_job_is_scored(request, figure, completion, kind, words):
    """Reported by the deadline, if not at once, and a good job behind it within one second of that."""
    pool = request.getfixturevalue("hasty" if kind == "timeout" else "pool")
    begun, results = time.monotonic(), {}
    submit(pool, "bad", completion)
    submit(pool, "good", "pass")
    while pool.pending:
        results.update(pool.ready(timeout_s=limit(20)))
    seconds = time.monotonic() - begun
    assert not overdue(seconds - (limit(0.5) if kind == "timeout" else 0.2), 1.0)
    assert results["bad"].kind == kind and words in results["bad"].reason
    assert results["good"][0][1] == 1.0
    if completion == SPINS:
        said = f"a reward that spins, deadline {limit(0.5):.1f} s: the next group is scored after {seconds:.2f} s"
        figure("R12", said)


def test_nothing_that_a_reward_forked_outlives_its_timeout(hasty, tmp_path):
    children = "[subprocess.Popen(['sleep', '61'], start_new_session=new).pid for new in (False, True)]"
    submit(hasty, 1, f"open({str(tmp_path / 'pids')!r}, 'w').write(repr({children})); time.sleep(60)")
    assert one(hasty)[1].kind == "timeout"
    assert_gone(*eval((tmp_path / "pids").read_text()))


def test_an_end_of_its_own_is_named_however_late_the_machine_tells_of_it(pool):
    server = pool._workers._server._process.pid
    submit(pool, 1, f"os.kill({server}, signal.SIGSTOP); os._exit(3)")  # its channel is closed, and nobody says why
    time.sleep(0.2)
    os.kill(server, signal.SIGCONT)
    assert "the reward process ended with exit code 3" in one(pool)[1].reason


def assert_gone(*pids):
    for pid in pids:
        until(lambda pid=pid: is_gone(pid), 2.0)


def test_prints_go_to_stderr_and_never_into_the_protocol(file, capfd):
    with RewardPool(Rewards(reward_funcs=[f"{file}:act"])) as pool:
        submit(pool, 1, "print('hello'); os.write(1, b'raw'); subprocess.run(['echo', 'child']); input")
        assert one(pool)[1][0][1] == 1.0
    out, err = capfd.readouterr()
    assert out == ""
    assert all(word in err for word in ("hello", "raw", "child"))


def test_a_flood_of_prints_is_kept_up_to_a_limit_and_counted(file, capfd):
    with RewardPool(Rewards(reward_funcs=[f"{file}:act"])) as pool:
        for i in range(3):
            submit(pool, i, "print('x' * 99 * 1000)\nfor _ in range(30): print('y' * 99_999)")
            assert one(pool)[1][0][1] == 1.0
    err = capfd.readouterr().err
    assert 1 << 20 <= len(err) < (1 << 20) + 500
    assert err.count("tandem: rewards printed more than 1 MiB: what follows is counted, and not kept\n") == 1
    assert re.search(r"tandem: rewards printed 9,[0-9,]+ bytes, of which 1,048,576 were kept\n$", err)


def pid_of(pool):
    submit(pool, "pid", "[float(os.getpid())]")
    return int(one(pool)[1][0][1])


def test_a_process_killed_while_idle_is_replaced_without_failing_a_job(returning):
    for victim in (pid_of(returning), returning._workers._server._process.pid):
        until(lambda: returning._idle, 5.0)
        os.kill(victim, signal.SIGKILL)
        until(lambda victim=victim: is_gone(victim), 5.0)
        assert returning._idle[0].has_ended(limit(5.0))
        assert pid_of(returning) != victim


def test_columns_arrive_once_per_completion_and_what_cannot_be_sent_is_an_error(returning):
    row = {"levels": np.array([1, 2]), "when": None}
    seen = {"levels": [[1, 2]], "when": [None], "prompts": ["2+2?"], "completion_ids": [[1]]}
    submit(returning, 1, f"[float({seen!r}.items() <= columns.items())]", columns=row)
    assert one(returning)[1][0][1] == 1.0
    submit(returning, 2, "[1.0]", columns={"image": object()})
    assert "object cannot be sent" in one(returning)[1].reason
    submit(returning, 3, "\ud800")
    assert "surrogates not allowed" in one(returning)[1].reason
    submit(returning, 4, "[1.0] * 2 #", "x" * 3_000_000)  # larger than a pipe
    assert one(returning)[1][1][1] == 1.0


@pytest.mark.parametrize(
    ("name", "row", "fails"),
    [
        ("named", {"test_cases": object(), "images": object()}, False),  # an error tells that it was sent
        ("sees", {"test_cases": object(), "images": [b"large"]}, False),
        ("act", {"images": object()}, False),
        ("act", {"test_cases": object()}, True),
        ("sees", {"images": object()}, True),
    ],
)
def test_of_a_row_the_process_gets_what_the_functions_name_and_images_never_unasked(file, name, row, fails):
    with RewardPool(Rewards(reward_funcs=[f"{file}:{name}"]), columns=COLUMNS, image_key="images") as pool:
        submit(pool, 1, "4", columns=COLUMNS | row)
        assert isinstance(one(pool)[1], RewardFailure) is fails


def test_integers_of_any_size_and_halves_of_characters_travel_and_files_to_those_that_name_them(file):
    """As in JSON, where an answer may be 30!, and as `datasets` gives a picture of a text data set."""
    large, half = [math.factorial(30), -(2**64), 2**63, {"a": 2**64}], "a\ud83d"
    given = {"question": "?", "large": large, "half": half, "file": {"bytes": b"x"}}
    act = f"assert columns['large'] == [{large!r}] * 2 and columns['half'] == [{half!r}] * 2 and 'file' not in columns"
    with RewardPool(Rewards(reward_funcs=[f"{file}:act"]), columns=given) as pool:
        submit(pool, 1, act, "", columns=given)
        assert not isinstance(result := one(pool)[1], RewardFailure), result
        submit(pool, 2, "raise ValueError(columns['half'][0])", "", columns=given)
        assert (result := one(pool)[1]).kind == "error" and "ValueError: a\\ud83d" in result.reason
    with RewardPool(Rewards(reward_funcs=[f"{file}:sees"]), columns=["images"]) as pool:
        submit(pool, 1, "a", "b", columns={"images": [{"bytes": memoryview(b"x")}]})
        assert not isinstance(result := one(pool)[1], RewardFailure), result


def test_what_the_user_can_fix_stops_the_start(file, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    for names, words in (
        (["anser"], "Did you mean answer?"),
        ([f"{file}:act"], "wants 'question'"),
        ([f"{tmp_path}/dies.py:f"], "died of signal 11"),
    ):
        pool = RewardPool(Rewards(reward_funcs=names), columns=["answer"])
        with pytest.raises(UserError, match=re.escape(words)), pool:
            pass


def test_leaving_the_pool_kills_a_busy_reward_at_once(file):
    with RewardPool(Rewards(reward_funcs=[f"{file}:returns"])) as pool:
        worker, server = pid_of(pool), pool._workers._server._process.pid
        submit(pool, 1, "time.sleep(60)")
        time.sleep(0.1)
        start = time.monotonic()
    assert not overdue(time.monotonic() - start, 1.0)
    assert_gone(worker, server)


@pytest.mark.parametrize(
    ("does", "number", "code"), [(SPINS, signal.SIGKILL, -9), ("time.sleep(60)", signal.SIGINT, 130)]
)
def test_a_worker_ends_with_its_parent_even_inside_a_reward_and_without_a_word(file, does, number, code):
    script = f"""
        import psutil, signal, sys, time
        from common.config import Rewards, Rollouts
        from rewards.pool import RewardPool
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIGINT ignored
        with RewardPool(Rewards(reward_funcs=["{file}:act"])) as pool:
            try:
                pool.submit(1, "", [{does!r}], [[1]], {{"question": ""}})
                time.sleep(0.1)
                server = psutil.Process(pool._workers._server._process.pid)
                print(server.pid, *[worker.pid for worker in server.children()], flush=True)
                time.sleep(60)
            except KeyboardInterrupt:
                sys.exit(130)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    started = [int(pid) for pid in parent.stdout.readline().split()]
    os.killpg(parent.pid, number)
    _, err = parent.communicate(timeout=limit(10))
    assert (parent.returncode, err, len(started)) == (code, "", 2)
    assert_gone(*started)


def test_the_worker_imports_neither_torch_nor_vllm_and_is_up_fast(file):
    code = "bad = {'torch', 'vllm', 'transformers', 'numpy', 'datasets'} & set(sys.modules); assert not bad, bad"
    start = time.monotonic()
    with RewardPool(Rewards(reward_funcs=["answer", "format", f"{file}:act"])) as pool:
        assert not overdue(time.monotonic() - start, 2.0)
        submit(pool, 1, code)
        assert not isinstance(result := one(pool)[1], RewardFailure), result


SLEEPS = """
import os, time

def judge(completions, seconds, **columns):
    time.sleep(seconds[0])
    return [float(os.getpid())] * len(completions)

def counts(completions, seconds, log_metric, **columns):
    log_metric(completions[0], seconds[0])
    return [1.0]
"""


sleeps = python_file(SLEEPS)


def time_of(pool, jobs, seconds):
    """(seconds until all are scored, in how many processes)."""
    begun, found = time.monotonic(), []
    for i in range(jobs):
        pool.submit(i, "", ["a"], [[1]], {"seconds": seconds})
    while pool.pending:
        found += pool.ready(timeout_s=limit(20))
    assert sorted(key for key, _ in found) == list(range(jobs))
    return time.monotonic() - begun, len({scores[0][1] for _, scores in found})


def test_groups_are_scored_side_by_side_in_as_many_processes_as_are_asked_for(sleeps):
    with RewardPool(Rewards(reward_funcs=[f"{sleeps}:judge"], num_workers=4)) as pool:
        time_of(pool, 4, 0.3)  # starts the others
        seconds, processes = time_of(pool, 12, 0.5)
        assert processes == 4 and not overdue(seconds, 3.0), "one after the other it is 6 s"
    with RewardPool(Rewards(reward_funcs=[f"{sleeps}:judge"], num_workers=1)) as pool:
        assert time_of(pool, 3, 0.3)[1] == 1


def test_a_judge_that_waits_costs_seconds_and_quick_functions_need_no_second_process(sleeps):
    with RewardPool(Rewards(reward_funcs=[f"{sleeps}:judge"])) as pool:
        assert time_of(pool, 64, 0.0)[1] == 1
        time_of(pool, 1, 0.5)  # as the trial before a run
        seconds, processes = time_of(pool, 64, 0.5)
    assert processes > 4 and not overdue(seconds, 12.0), "one after the other it is 32 s"


@pytest.mark.parametrize("hangs", [1, 3])
def test_groups_do_not_wait_behind_those_that_hang(sleeps, hangs):
    with RewardPool(Rewards(reward_funcs=[f"{sleeps}:judge"], timeout_s=limit(12))) as pool:
        time_of(pool, 2, 0.0)  # quick functions: one process is enough
        begun = time.monotonic()
        for key in range(40):
            pool.submit(key, "", ["a"], [[1]], {"seconds": 60 if key < hangs else 0.0})
        while pool.pending > hangs:
            assert not any(isinstance(scores, RewardFailure) for _, scores in pool.ready(timeout_s=0.5))
        assert not overdue(time.monotonic() - begun, 3.0 + 2 * hangs)


def test_functions_that_compute_get_a_process_a_core_even_on_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for cpu_s, most in ((1.9, 2), (0.3, 2), (0.01, 16)):
        load = Load(2.0, cpu_s)
        assert (load.num_worth(1, 64), load.num_worth(9, 64), load.num_worth(1, 0)) == (most, max(9, most), 1)


def test_a_file_that_one_process_alone_can_import_is_served_by_that_one(tmp_path, capfd):
    takes = f"\nimport socket\nport = socket.socket(socket.AF_UNIX)\nport.bind('\\0tandem-test-{os.getpid()}')\n"
    (tmp_path / "alone.py").write_text(SLEEPS + takes)
    with RewardPool(Rewards(reward_funcs=[f"{tmp_path}/alone.py:judge"], num_workers=4)) as pool:
        assert time_of(pool, 6, 0.2)[1] == 1
    assert "rewards: no more than 1 processes" in capfd.readouterr().err


def test_metrics_appear_with_the_jobs_that_logged_them_and_never_while_the_caller_reads(sleeps):
    with RewardPool(Rewards(reward_funcs=[f"{sleeps}:counts"])) as pool:
        pool.submit(1, "", ["new"], [[1]], {"seconds": 2.0})
        until(lambda: not pool._workers._results.empty(), limit(10))
        assert pool.logged == {}
        assert one(pool)[0] == 1 and pool.logged == {"new": 2.0}


def test_algebra_that_never_ends_costs_its_group_seconds_and_no_right_answer():
    hostile = [rf"\boxed{{{n}^{{9^{{9^{{9}}}}}}}}" for n in range(3, 18)]
    with RewardPool(Rewards(reward_funcs=["answer", "gated_format", "boxed"])) as pool:
        submit(pool, 1, *hostile, r"\boxed{\sqrt{12}}", columns={"answer": r"2\sqrt{3}"})
        _, scores = one(pool)
        submit(pool, 2, "4", columns={"answer": r"\angle A = 30^\circ"})
        assert one(pool)[1].reason.endswith("Of the gold answer: math-verify cannot read it")
    assert [total for _, total in scores] == [-1.0] * 15 + [2.0]


def test_an_import_that_takes_too_long_names_its_setting(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    for pool, name in (
        (RewardPool(Rewards(reward_funcs=[f"{tmp_path}/slow.py:f"], import_timeout_s=0.5)), "rewards"),
        (EnvironmentPool(Rollouts(tools=[f"{tmp_path}/slow.py:f"], import_timeout_s=0.5), columns=[]), "rollout"),
    ):
        with pytest.raises(UserError, match=rf"0.5 s.* importing.*; allow more: {name}.import_timeout_s=1"), pool:
            pass


def test_the_trial_before_a_run_scores_texts_and_tokens_that_a_run_can_make(tmp_path):
    lines = """
        def divides(completions, completion_ids, answer):
            return [len(text.split()[0]) / len(text) + 1 / len(ids) for text, ids in zip(completions, completion_ids)]
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(lines))
    config = config_of(rewards={"reward_funcs": [f"{tmp_path}/mine.py:divides"]})
    for gold in ("4", None):
        with RewardPool(config.rewards, columns=["question", "answer"]) as pool:
            try_rewards(pool, [Problem(0, {"question": "2+2?", "answer": gold})], config)


def nested(depth):
    value = 10**30
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_too_deeply_to_be_sent_is_answered_like_any_error(returning):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": nested(2000)}}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]}]  # as a model may write it
    returning.submit(3, [{"role": "user", "content": "?"}], [said], [[1]], {"what": "[1.0]"})
    key, failure = one(returning)
    assert (key, failure.kind) == (3, "error") and returning.pending == 0
