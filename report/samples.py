"""Prints what the model wrote:  bash launch.sh samples runs/quickstart [--step 12] [--worst | --best] [-n 5] [--full]

Text from a model is escaped: invisible characters become visible marks, so that no completion can control or fake a
terminal's output. Left out: searching; samples.jsonl is one JSON record per line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.processes import exits
from report.escape import one_line, visible
from report.full_marks import Record
from report.run_log import read_jsonl

SHOWN = 2000  # characters of a text without --full


def select_records(records: Sequence[Record], step: int | None, which: str | None, count: int) -> list[Record]:
    """Returns at most `count` records of a step, worst or best first; by default of the newest, with `which` of all.

    Raises UserError if there are none.
    """
    steps = sorted({record["step"] for record in records})
    if not steps:
        raise UserError("samples.jsonl is empty: no step has ended yet")
    if step is not None and step not in steps:
        near = min(steps, key=lambda other: abs(other - step))
        raise UserError(f"samples.jsonl has no step {step}, but {steps[0]} to {steps[-1]}; nearest: --step {near}")
    if step is None and which is None:
        step = steps[-1]
    kept = [record for record in records if step is None or record["step"] == step]
    if which is not None:
        kept = [record for record in kept if record["reward"] is not None]
        sign = -1 if which == "best" else 1
        kept.sort(key=lambda record: (sign * record["reward"], -record["step"]))  # the newest first among equals
    return kept[:count]


def sample_text(record: Record, full: bool = False) -> str:
    """Returns a sample as lines; every line that the model or its tools wrote follows its writer's name and a bar."""
    parts = [f"{one_line(name)} {_score_text(value)}" for name, value in record["rewards"].items()]
    facts = [f"step {record['step']}", f"group {record['group_id']}", f"v{record['policy_version']}"]
    cut = ["cut off"] if record["finish_reason"] == "length" else []
    head = " · ".join([f"reward {_score_text(record['reward'])} ({', '.join(parts)})", *facts, *cut])
    images = [
        "  image  │ " + one_line(f"{image['width']} × {image['height']} pixels, {image['digest']}")
        for image in record.get("images", ())
    ]
    lines = [head, *images, *_barred_lines("prompt", record["prompt"], full)]
    names = {"model": "model ", "environment": "tool  ", "history": "again "}
    for part in record.get("turns", [{"by": "model", "text": record["completion"]}]):
        lines += _barred_lines(names[part["by"]], part["text"], full)
        lines += [f"  reward │ {_score_text(part['reward'])}"] if "reward" in part else []
    return "\n".join(lines)


def _score_text(value: float | None) -> str:
    return "does not apply" if value is None else f"{value:.2f}"


def _barred_lines(name: str, text: str, full: bool) -> list[str]:
    shown = text if full else text[:SHOWN]
    rest = len(text) - len(shown)
    lines = [f"  {name} │ {line}" for line in visible(shown).split("\n")]
    return lines + ([f"  … and {rest:,} more characters; show them with --full"] if rest else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the samples that the command line asks for. Raises UserError."""
    parser = argparse.ArgumentParser(prog="launch.sh samples", description="Print what the model wrote.")
    parser.add_argument("output_dir", type=Path, help="a run folder, such as runs/quickstart")
    parser.add_argument("--step", type=int, help="an optimizer step; default: the newest")
    extreme = parser.add_mutually_exclusive_group()
    extreme.add_argument("--worst", dest="which", action="store_const", const="worst", help="lowest reward first")
    extreme.add_argument("--best", dest="which", action="store_const", const="best", help="highest reward first")
    parser.add_argument("-n", type=int, default=5, help="how many; default 5")
    parser.add_argument("--full", action="store_true", help="texts of any length")
    given = parser.parse_args(arguments)
    path = given.output_dir / "samples.jsonl"
    if not path.exists():
        raise UserError(f"{one_line(path)} does not exist; name a run folder such as runs/quickstart")
    try:
        for record in select_records(read_jsonl(path), given.step, given.which, given.n):
            print(sample_text(record, given.full) + "\n")
    except BrokenPipeError:  # `| head`
        sys.stderr.close()


if __name__ == "__main__":
    sys.exit(exits.run("samples", main))
