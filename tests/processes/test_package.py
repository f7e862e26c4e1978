"""What `pip install .` leaves: one name, files that are read at run time, and `tandem` in the caller's folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.clone import MADE_HERE, ROOT

TRAIN = "import tandem; from tandem.rewards import text_of; tandem.train({'model': {}, 'data': {}}, 'data.train=x')"
ASKED = {  # the words, and what is said, beside a module with the name of a package of ours
    ("tandem", "run", "my.yaml"): "tandem: config my.yaml: No such file or directory. Paths count from",
    ("tandem", "plan", "configs/smollm2_135m.yaml", "prompt.chat_template=configs/templates/chatml.jinja"): "not there",
    ("tandem", "test"): "tandem: this needs a clone of the repository; there: bash launch.sh test",
    ("tandem", "help"): "Installs, starts and tests Tandem",
    (sys.executable, "-P", "-c", TRAIN): "tandem.start.RunError: /tmp",
}


def test_a_package_is_one_name_and_its_command_stays_in_the_callers_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT, clone := tmp_path / "clone", ignore=shutil.ignore_patterns(*MADE_HERE))
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    subprocess.run([*pip, site := tmp_path / "site", clone], check=True)
    assert {path.name for path in site.iterdir()} == {"tandem", "tandem-0.1.0.dist-info", "bin"}
    assert all((site / "tandem" / read).is_file() for read in ("report/model_card.md.jinja", "launcher/slurm.sbatch"))
    (here := tmp_path / "here").mkdir()
    (here / "common.py").write_text("raise ImportError('not ours')")
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site}/bin:{os.environ['PATH']}"}
    for words, said in ASKED.items():
        done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True)
        assert said in done.stdout + done.stderr and done.returncode == {"help": 0, TRAIN: 1}.get(words[-1], 2)
