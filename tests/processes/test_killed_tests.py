"""A killed test run ends what its tests started, and the next removes its files. With --all every case is collected."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.paths import ROOT
from tests.support import own_process
from tests.support.speed import is_gone, until

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "python_functions=victim", __file__)
TOLD = "TANDEM_TEST_VICTIM"


def victim() -> None:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(os.environ[TOLD]).write_text(f"{process.pid} {tempfile.gettempdir()} .")
    process.wait()


def test_a_test_run_that_is_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    told = tmp_path / "told"
    pytest = subprocess.Popen(PYTEST, cwd=ROOT, env={**os.environ, TOLD: str(told)}, stdout=subprocess.DEVNULL)
    until(lambda: told.exists() and told.read_text().endswith("."), 60.0)
    pid, folder, _ = told.read_text().split()
    pytest.kill()
    pytest.wait()
    until(lambda: is_gone(int(pid)), 10.0)
    assert Path(folder).is_dir()
    own_process.run([*PYTEST, "--collect-only"], 60)
    assert not Path(folder).exists()


def test_a_file_that_is_named_has_all_its_cases_with_all() -> None:
    words = ("--all", "--collect-only", "-q", "tests/gloo/test_mixture_ranks.py")
    assert "one_rank_does[zero2]" in own_process.run([*PYTEST[:5], *words], 60)
