"""Runs the same random tensors through TRL's GRPOTrainer and this trainer's own code, and prints the differences.

    python tools/benchmarks/trl_formulas.py    installs TRL beside the project, prints what docs/algorithm.md sums up

The exit code is 1 if a row that must agree does not. TRL is no dependency: it gets a virtual environment of its own
under .cache/, which sees the project's packages through a .pth file, so that both sides run on the same torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRL = "1.16.0"
ENVIRONMENT = ROOT / ".cache" / f"trl-{TRL}"
PYTHON = ENVIRONMENT / "bin" / "python"


def install() -> None:
    """Makes a virtual environment once, with TRL in it and access to the running interpreter's packages."""
    marker = ENVIRONMENT / ".complete"
    if marker.exists():
        return
    print(f"installing TRL {TRL} into {ENVIRONMENT.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    (packages,) = ENVIRONMENT.glob("lib/python3*/site-packages")
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"trl=={TRL}"]
    done = subprocess.run(pip, capture_output=True, text=True)  # on success it only warns of the project's own pins
    if done.returncode:
        sys.exit(f"tandem: TRL {TRL} could not be installed by {' '.join(pip)}:\n{done.stderr}")
    marker.touch()


if __name__ == "__main__":
    install()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    os.execve(PYTHON, [str(PYTHON), "-W", "ignore", "-m", "tools.benchmarks.trl_comparison"], environment)
