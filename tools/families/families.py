"""Measures what works with which model, on tiny random models of many families.  `bash launch.sh families`

    bash launch.sh families                       every family: an hour and a half on two cores
    bash launch.sh families lfm2 qwen3_moe        some
    bash launch.sh families --only loop           some columns: exact, proof, loop, resume, lora
    bash launch.sh families --table               measures nothing: the table of what was measured before
    bash launch.sh families --write               and into docs/model.md

    exact    the layout that is chosen, its log-probs and its gradient beside the model's own forward   exact.py
    loop     three steps of launch.sh run on the quick start's problems, with what the sampler proves of every reload
    proof    which damages of weights the sampler finds, also with fewer of the processor's instructions   proof.py
    resume   the loop's groups again, from the checkpoint of its second step: the same final model, bit for bit
    lora     two steps with adapters, or where vLLM cannot apply them, with lora.sync=merged

Each column runs in a process with a time limit, in runs/families/NAME, and its failure ends no other column. Facts are
kept in that folder; the table has those that were found on this machine with these versions.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import with_type
from common.wire.ports import free_port
from report.model_card import versions
from report.run_log import read_jsonl
from tools.benchmarks.bench import machine
from tools.benchmarks.cells import ROOT
from tools.families.models import BFLOAT16, FAMILIES, build

RUNS, CONFIG, PAGE = ROOT / "runs" / "families", "configs/quickstart.yaml", ROOT / "docs" / "model.md"
QUICKSTART = ROOT / ".cache" / "quickstart" / "model"
MARKS = ("<!-- written by: bash launch.sh families --write -->\n", "<!-- the end of what it wrote -->\n")
LIMIT_S = 1200  # for one command; the proof of a family takes minutes, and longer beside other work
NARROWER = {  # variables that let torch, MKL, oneDNN and vLLM use fewer of the processor's instructions
    side: {"ATEN_CPU_CAPABILITY": side, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn,
           "PYTHONPATH": str(Path(__file__).parent / "narrower")}
    for side, mkl, onednn in (("avx2", "AVX2", "AVX2"), ("default", "SSE4_2", "SSE41"))
}  # fmt: skip
_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
Facts = dict[str, Any]


def _settings(family: str, folder: Path, steps: int) -> list[str]:
    return [
        f"model.path={folder.parent / 'model'}", f"run.output_dir={folder}", f"trainer.max_steps={steps}",
        f"model.dtype={'bfloat16' if family in BFLOAT16 else 'float32'}", "trainer.prompts_per_step=4",
        "sampler.num_generations=4", "data.eval=null", "run.record=true", "trainer.save_steps=2",
        "rewards.reward_funcs=[tools/benchmarks/cells.py:even]",  # differs inside every group
    ]  # fmt: skip


def _process(argv: Sequence[str], log: Path, **environment: str) -> tuple[int, str]:
    """Runs a command and returns (exit code, its output), which also goes to a file; the code is 124 after LIMIT_S."""
    try:
        with open(log, "w") as file:
            own = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
            code = subprocess.run(argv, cwd=ROOT, env=own, stdout=file, stderr=file, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        code = 124
    return code, log.read_text(errors="replace")


def exact(family: str, folder: Path) -> Facts:
    argv = [sys.executable, "-m", "tools.families.exact", str(folder / "model")]
    code, output = _process(argv, folder / "exact.log")
    return json.loads(output.splitlines()[-1]) if code == 0 else {"layout": why(output)}


def proof(family: str, folder: Path) -> Facts:
    dtype = "bfloat16" if family in BFLOAT16 else "float32"
    argv, found = [sys.executable, "-m", "tools.families.proof", str(folder / "model"), dtype], dict[str, Any]()
    for side, environment in {"all": {}, **NARROWER}.items():
        code, output = _process(argv, folder / f"proof-{side}.log", **environment)
        if code:
            return {"proof": f"{side}: exit {code}: {why(output)}"}
        found[side] = json.loads(output.splitlines()[-1])
    return {"proof": found}


def loop(family: str, folder: Path) -> Facts:
    return _run(family, folder / "loop", 3, "loop")


def lora(family: str, folder: Path) -> Facts:
    settings = "lora.r=8", "trainer.learning_rate=1.0e-3"
    found = _run(family, folder / "lora", 2, "lora", *settings)
    if found["loop"] == "yes":
        return {"lora": "yes", "lora_canary": found["canary"]}
    merged = _run(family, folder / "merged", 2, "merged", *settings, "lora.sync=merged")
    return {"lora": "merged" if merged["loop"] == "yes" else merged["loop"], "adapters": found["loop"]}


def _run(family: str, run: Path, steps: int, name: str, *more: str) -> Facts:
    """Runs the whole loop for `steps` steps and returns its facts."""
    shutil.rmtree(run, ignore_errors=True)
    argv = [sys.executable, "-m", "launcher.run", CONFIG, *_settings(family, run, steps), *more]
    code, output = _process(argv, run.parent / f"{name}.log")
    metrics = read_jsonl(run / "metrics.jsonl")
    facts: Facts = {"loop": "yes" if code == 0 and len(metrics) == steps else f"exit {code}: {why(output)}"}
    if metrics:
        facts["canary"] = max(m["sync/canary_max_diff"] for m in metrics)
        facts["unproven"] = int(max(m["sync/unproven_tensors"] for m in metrics))
        facts["gradient_norm"] = min(m["grad_norm"] for m in metrics)
    if (final := run / "final" / "model.safetensors").is_file():
        with safe_open(final, "pt") as opened:
            facts["tensors"] = len(opened.keys())
    return facts


def resume(family: str, folder: Path) -> Facts:
    """Runs two trainers on the loop's recording: one straight, one from the straight one's checkpoint of step 2."""
    straight, resumed = folder / "straight", folder / "resumed"
    given = ["training_worker.py", "--config", CONFIG, *_settings(family, straight, 3)]
    given += [f"run.replay={folder / 'loop' / 'groups.recording'}", "run.record=false"]
    for run, more in ((straight, ["run.resume=false"]), (resumed, ["run.resume=true"])):
        shutil.rmtree(run, ignore_errors=True)
        if run is resumed:
            kept = shutil.ignore_patterns("step_*3", "final", "best")
            shutil.copytree(straight, resumed, ignore=kept)
        argv = [sys.executable, *given, f"run.output_dir={run}", *more]
        code, output = _process(argv, folder / f"{run.name}.log", MASTER_PORT=str(free_port()), **_RANK)
        if code:
            return {"resume": f"exit {code}: {why(output)}"}
    final = [(run / "final" / "model.safetensors").read_bytes() for run in (folder / "loop", straight, resumed)]
    return {"resume": "bit for bit" if final[0] == final[1] == final[2] else "other bits"}


COLUMNS: dict[str, Callable[[str, Path], Facts]] = {each.__name__: each for each in (exact, proof, loop, resume, lora)}


def why(output: str) -> str:
    """Returns the line of a log that says why it ended, in at most 200 characters."""
    lines = [line.strip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"tandem: (sampler[.\d]*|trainer): ", line)]
    errors += [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)] or lines[-1:]
    return errors[0].removeprefix("tandem: ")[:200] if errors else "it printed nothing"


def measure(family: str, columns: Sequence[str], folder: Path) -> None:
    """Measures these columns and writes their facts into the family's folder, in the place of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build(family, QUICKSTART, folder / "model")
    except Exception as error:  # one family's error must not end the others
        return _keep(folder, "exact", {"layout": f"not built: {with_type(error)}"[:200]})
    for column in columns:
        _keep(folder, column, found := COLUMNS[column](family, folder))
        print(f"families: {family}: {column}: {json.dumps(found)}", flush=True)


def _keep(folder: Path, column: str, found: Facts) -> None:
    facts = _columns(folder) | {column: found | {"where": where()}}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def _columns(folder: Path) -> dict[str, Facts]:
    """Returns the facts of each column that was measured on this machine with these versions."""
    file = folder / "facts.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: facts for name, facts in found.items() if facts["where"] == where()}


def where() -> str:
    """Returns the machine and the versions that a row holds for."""
    return f"{machine()}; {versions()}"


ROUNDING = 1e-5  # a column of differences that are all smaller is one sentence


def table(facts: dict[str, Facts]) -> str:
    """Returns Markdown: a line for each family, then what is alike for all, and the failures of each family in full."""
    if not facts:
        return ""
    notes, shared = list[str](), list[str]()

    def cell(family: str, value: Any) -> str:
        if value is None:
            return "–"
        if isinstance(value, float):
            return f"{value:.0e}"
        if len(text := str(value)) <= 12:
            return text
        if (note := f"{family}: {text.replace('|', '/')}") not in notes:
            notes.append(note)
        return "no"

    rows = {family: _row(found) for family, found in facts.items()}
    columns = {"family": [f"{family} (bfloat16)" if family in BFLOAT16 else family for family in rows]}
    for head in next(iter(rows.values())):
        column = [row[head] for row in rows.values()]
        texts = [cell(family, value) for family, value in zip(rows, column, strict=True)]
        if len(rows) > 1 and all(isinstance(value, float) and value <= ROUNDING for value in column):
            shared.append(f"{head} at most {max(column):.0e}")
        elif len(rows) > 1 and len({*texts}) == 1:
            shared.append(f"{head} {texts[0]}")
        else:
            columns[head] = texts
    lines = [[*columns], ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    if shared:
        text += ["", f"For every family: {', '.join(shared)}."]
    return "\n".join([*text, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def _row(found: Facts) -> dict[str, Any]:
    """Returns a family's cells by their heads."""
    row = {key: found.get(key.replace("-", "")) for key in ("layout", "log-probs", "gradient", "loop", "canary")}
    row["proven"] = f"{found['tensors'] - found['unproven']}/{found['tensors']}" if "tensors" in found else None
    row |= {"not packed": found.get("proof"), "damages": None}
    if isinstance(sides := found.get("proof"), dict):  # else the sentence of a failure
        proven, unproven = sides["default"]["proven"], sum(sides["default"]["unproven"].values())
        damages = sum(side["damages"] for side in sides.values())
        missed = sum(len(side["missed"]) for side in sides.values())
        row |= {"not packed": f"{proven}/{proven + unproven}", "damages": f"{damages - missed}/{damages}"}
    is_exact = found.get("planned") and found["planned"] == found["parameters"]
    return row | {
        "resume": found.get("resume"),
        "LoRA": found.get("lora"),
        "plan": "exact" if is_exact else found.get("planned"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family", help="default: all")
    parser.add_argument("--only", choices=COLUMNS, nargs="+", default=list(COLUMNS))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="put the table into docs/model.md")
    parser.add_argument("--runs", type=Path, default=RUNS, help="models, runs and facts; default: %(default)s")
    arguments = parser.parse_intermixed_args()
    chosen = arguments.families or list(FAMILIES)
    if unknown := [name for name in chosen if name not in FAMILIES]:
        parser.error(f"{unknown[0]}: not one of {', '.join(FAMILIES)}; a family is a line of tools/families/models.py")
    if not arguments.table:
        subprocess.run([sys.executable, "-m", "examples.quickstart"], cwd=ROOT, check=True)
        for family in chosen:
            measure(family, arguments.only, arguments.runs / family)
    facts = {family: dict(ChainMap(*_columns(arguments.runs / family).values())) for family in FAMILIES}
    text = f"On {where()}.\n\n{table({family: found for family, found in facts.items() if found})}"
    if missing := [family for family, found in facts.items() if not found]:
        text += f"\nNot measured: {', '.join(missing)}.\n"
    print(text)
    if arguments.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
