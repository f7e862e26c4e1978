"""The same random tensors through TRL's GRPOTrainer and through this trainer's own code: how far are they apart?

    python tools/benchmarks/trl_formulas.py    installs TRL beside the project, prints what docs/algorithm.md sums up

The exit code is 1 if a row that must agree does not.

TRL is no dependency. It gets a virtual environment of its own under .cache/, which sees the project's packages through
a .pth file, so that both sides run on the same torch and little is downloaded. TRL's side is its own code path,
`GRPOTrainer._compute_loss` and `_generate_and_score_completions` on padded tensors, with log-probs put where its model
would put them; ours is trainer.losses and trainer.advantages, fed packed. Left out: models, whose log-probs differ by
kernels and not by formula.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRL = "1.16.0"
ENVIRONMENT = ROOT / ".cache" / f"trl-{TRL}"
TOLERANCE = 1e-6


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        install()
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.execv(python(), [str(python()), "-W", "ignore", __file__, *sys.argv[1:]])
    sys.path.insert(0, str(ROOT))
    from tools.benchmarks.trl_comparison import agrees, compare, table

    rows = compare()
    print(table(rows, TOLERANCE))
    if not all(agrees(row, TOLERANCE) for row in rows):
        sys.exit(f"tandem: a row that must agree differs by more than {TOLERANCE:g}")


def python() -> Path:
    return ENVIRONMENT / "bin" / "python"


def install() -> None:
    """A virtual environment with TRL in it and the running interpreter's packages behind it."""
    marker = ENVIRONMENT / ".complete"
    if marker.exists():
        return
    print(f"installing TRL {TRL} into {ENVIRONMENT.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    site_packages = [str(python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(site_packages, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"trl=={TRL}"]
    done = subprocess.run(pip, capture_output=True, text=True)  # on success it only warns of the project's own pins
    if done.returncode:
        sys.exit(f"tandem: TRL {TRL} could not be installed by {' '.join(pip)}:\n{done.stderr}")
    marker.touch()


if __name__ == "__main__":
    main()
