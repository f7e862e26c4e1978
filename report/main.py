"""Draws a run's curves.png, and prints a few lines that say what the run learned.

It reads only the run folder, so it works during a run, after a crash and on another machine.
"""

import argparse
import contextlib
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from common.config import Eval
from common.processes import exits
from common.user_code.paid_calls import PaidCalls
from report.curves import history_of, write_curves
from report.display import clock, comparison, wall_s
from report.escape import one_line
from report.full_marks import Records
from report.sinks import saved_settings
from report.versions import choice


def final_summary(folder: Path) -> str:
    """Returns every reward function's first and last held-out evaluation, the best version, sources, costs and pace."""
    rows, evaluations = history_of(folder)
    lines = comparison(evaluations) or ["no held-out evaluation was made; set data.eval to measure one"]
    chosen = choice(evaluations, Eval.model_construct(**saved_settings(folder).get("eval", {})))
    if chosen:
        lines.append(one_line(chosen[1]))
    return "\n".join([*lines, *source_lines(rows), *cost_lines(folder), *_pace(rows)])


def source_lines(rows: Records) -> list[str]:
    """Compares each source's first and last step: "source math: reward 0.31 → 0.62, length 24 → 20; of 96 groups …"."""
    lines = []
    rows = [row for row in rows if not row.get("iteration")]  # later passes train the same groups again
    for name in sorted({key.split("/")[1] for row in rows for key in row if key.startswith("sources/")}):
        groups, kept, reward, length = (
            [row[f"sources/{name}/{what}"] for row in rows if f"sources/{name}/{what}" in row]
            for what in ("groups", "kept", "reward", "mean_length")
        )
        lines.append(
            f"source {one_line(name)}: reward {reward[0]:.2f} → {reward[-1]:.2f}, length {length[0]:.0f} → "
            f"{length[-1]:.0f}; of {sum(groups):.0f} groups {sum(kept) / sum(groups):.0%} had an advantage"
        )
    return lines


def cost_lines(folder: Path) -> list[str]:
    """Returns "judge: 1,000 calls, 120,000 tokens in, 9,000 out, 0.42 USD (all in .cache/judges/judge.sqlite)"."""
    lines = []
    for name, given in saved_settings(folder).get("rewards", {}).get("reward_kwargs", {}).items():
        with contextlib.suppress(OSError, sqlite3.Error, TypeError):
            if (path := Path(given.get("cache", "")).expanduser()).is_file():
                spent = PaidCalls(path).spent()
                tokens = f"{spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
                lines.append(f"{one_line(name)}: {spent.calls:,} calls, {tokens}, {spent.usd:.2f} USD (all in {path})")
    return lines


def _pace(rows: Records) -> list[str]:
    """Returns "60 steps in 1:02, the first 41 s after the start; 4,762 tok/s; the trainer waited 53 %, …"."""
    total = sum(map(wall_s, rows))
    if not total:
        return []
    first = rows[0].get("timing/first_step_s")
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    waits = {who: sum(row.get(f"wait/{who}_s") or 0.0 for row in rows) / total for who in ("trainer", "sampler")}
    parts = [
        f"{len(rows)} steps in {clock(total)}" + (f", the first {first:.0f} s after the start" if first else ""),
        f"{median(speeds):,.0f} tok/s" if speeds else "",
        ", ".join(f"the {who} waited {share:.0%}" for who, share in waits.items() if share > 0),
    ]
    return ["; ".join(part for part in parts if part)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws and prints the report of the folder on the command line. Raises UserError."""
    parser = argparse.ArgumentParser(prog="launch.sh report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output_dir", type=Path, help="a run folder, such as runs/quickstart")
    folder = parser.parse_args(arguments).output_dir
    picture = write_curves(folder)
    print(f"{final_summary(folder)}\ncurves: {one_line(picture)}")


if __name__ == "__main__":
    sys.exit(exits.run("report", main))
