"""The launcher of the ranks: whatever comes at whatever moment, all end together, with the code that says why."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from common.paths import ROOT
from common.processes.exits import INTERRUPTED
from tests.support.own_process import alive, run
from tests.support.speed import is_gone, overdue, until

HEAD = "import os, sys, time; from common.processes import exits; rank = int(os.environ['RANK'])"
WAITS = "exits.die_with_parent(); exits.end_in_time(); open(f'up{rank}', 'w'); time.sleep(60)"


def start(folder: Path, body: str) -> tuple[subprocess.Popen[bytes], str]:
    program, tag = folder / "rank.py", uuid.uuid4().hex
    program.write_text(f"{HEAD}\ndef main():\n    {body}\nexits.leave(exits.run('rank', main))")
    command = [sys.executable, "-m", "launcher.hosts.ranks", "0", "2", "2", "127.0.0.1", "1", str(program)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TANDEM_TEST_TAG": tag}
    return subprocess.Popen(command, cwd=folder, env=env), tag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.3, None])
def test_a_signal_at_any_moment_ends_all(tmp_path: Path, number: int, after_s: float | None) -> None:
    process, tag = start(tmp_path, WAITS)
    if after_s is None:
        until(lambda: len(list(tmp_path.glob("up*"))) == 2, 20)
        process.send_signal(signal.SIGUSR1)  # which shows stacks
    time.sleep(after_s or 0.0)
    process.send_signal(number)
    begun = time.monotonic()
    code = process.wait()
    assert not overdue(time.monotonic() - begun, 5) and not alive(tag)
    # before its first line a process dies of the signal itself, or of Python's own handler among imports
    assert code == INTERRUPTED or (after_s is not None and code in (-number, 1))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f"sys.exit(75) if rank else None; {WAITS}", 75),
        (f"os.kill(os.getpid(), 9) if rank else None; {WAITS}", 247),
        (f"os.kill(os.getpid(), 15) if rank else None; {WAITS}", 130),
        ("time.sleep(0.2 * (1 - rank)); sys.exit(1 if rank else 75)", 75),  # rank 1 broke with rank 0
        ("time.sleep(0.2 * rank); sys.exit(2 if rank else 1)", 2),
        ("time.sleep(0.2 * rank)", 0),
    ],
)
def test_all_end_as_the_rank_that_knows_why(tmp_path: Path, body: str, code: int) -> None:
    process, tag = start(tmp_path, body)
    assert process.wait(timeout=60) == code and not alive(tag)


def test_a_rank_whose_launcher_is_gone_before_it_listens_ends() -> None:
    code = f"{HEAD}\nexits.leave(exits.run('rank', lambda: exits.end_in_time('deepspeed.launcher.launch')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"RANK": "0"})
    assert done.returncode == INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_is_built_ends_what_builds_it(number: int) -> None:
    building = "run.subprocess.run([sys.executable, '-c', 'import time; print(flush=True); time.sleep(60)'])"
    code = f"import sys; from launcher import run; run.load = lambda *_: {building}; sys.exit(run.main(['a.yaml']))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        [child] = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # one that comes meanwhile is heard when the system call returns
        process.send_signal(number)
        assert process.wait(timeout=30) == INTERRUPTED
    until(lambda: is_gone(child.pid))


def test_a_bug_on_rank_0_that_the_others_hear_of_is_not_called_temporary(tmp_path: Path) -> None:
    exchange = "from trainer.engine.ranks import connect; from tests.support.configs import config_of"
    meet = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=rank, world_size=2)"
    body = f"import torch.distributed as dist; {exchange}; {meet}; connect(config_of()).run_on_rank_0(lambda: 1 / 0)"
    assert start(tmp_path, body)[0].wait(timeout=120) == 1


# ---- the memory of a rank

# what torch reads when it is first needed, which is after everything that a rank checks before
SETTINGS_OF_TORCH = """
import sys, types
import training_worker
def run(config):
    import torch
    print(torch._C._accelerator_getAllocatorSettings())
sys.modules["trainer.start"] = types.SimpleNamespace(run=run)
sys.argv[1:] = ["--config", "configs/quickstart.yaml"]
training_worker.main()
"""


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_of_a_rank_s_memory_grow_unless_the_user_says_how_memory_is_allocated(name: str | None) -> None:
    chosen = {name: "max_split_size_mb:64"} if name else {}
    env = {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")} | chosen
    expected = "max_split_size_mb:64" if name else "expandable_segments:True"
    assert run([sys.executable, "-c", SETTINGS_OF_TORCH], env=env).strip() == expected
