"""report.html: everything a run left, on one page that needs no network, no script and no other file.

What models, data sets and reward functions wrote is shown and never obeyed: the template escapes every value, `visible`
marks what cannot be seen, and the page's own policy forbids scripts and requests. Reads the run folder alone. Left out:
comparison of runs, and samples beyond the best and worst that samples.jsonl has.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.durable import write_file
from common.errors import UserError
from common.redact import redacted
from common.run_folder import FINAL
from report.advice import Adviser, replay
from report.curves import Rows, compared, history_of, share_of_full_marks
from report.escape import visible
from report.history import AdviceSettings
from report.images import caption, data_uri
from report.run_log import read_jsonl
from report.step_text import wall_s

SAMPLES = 6  # of the best and of the worst
SHOWN = 3000  # characters of a text; the rest is counted
TROUBLE = (  # totals that are 0 in a quiet run
    ("tombstones", "groups that could not be produced and trained nothing"),
    ("skipped_steps", "optimizer steps that were not finite and were skipped"),
    ("disk_retries", "file operations that had to be repeated"),
)
TRAINER_TIME = {  # of a step's wall time on rank 0, in the order in which a step spends it
    "waiting for groups": "wait/trainer_s",
    "scoring": "timing/score_s",
    "forward and backward": "timing/backward_s",
    "optimizer": "timing/step_s",
    "publishing weights": "sync/publish_s",
    "evaluation": "timing/evaluation_s",
    "checkpoints": "timing/checkpoint_s",
}
SAMPLER_TIME = {
    "generating": "timing/sampler_generate_s",
    "reference model": "timing/sampler_reference_s",
    "loading weights": "sync/stall_s",
    "waiting for the trainer": "wait/sampler_s",
}
CROSSED = "link/refused/eval_duplicate"  # an evaluation's answer and a reminder of it met: happens in the best of runs


def write_report(output_dir: Path) -> Path:
    """Writes report.html into the run folder. Raises UserError without a run."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def harmless(value: Any) -> Any:
        return value if hasattr(value, "__html__") else visible(value)  # a macro's output

    folder = Path(output_dir)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=harmless,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(content_of(folder))
    write_file(folder / "report.html", page.encode())
    return folder / "report.html"


def content_of(folder: Path) -> dict[str, Any]:
    """What the page says, as plain data with nothing escaped yet."""
    rows, evaluations = history_of(folder)
    if not rows and not evaluations:
        raise UserError(f"{folder}: no metrics.jsonl and no eval.jsonl; name a run folder such as runs/quickstart")
    config = _config(folder)
    samples = [record for record in read_jsonl(folder / "samples.jsonl") if "reward" in record]
    return {
        "name": folder.resolve().name,
        "state": _state(folder, rows, config),
        "advice": _advice(rows, evaluations, config),
        "functions": [_before_after(name, evaluations) for name in compared(evaluations)],
        "problems": evaluations[-1].get("problems", evaluations[-1]["n"]) if evaluations else 0,
        "curves": _png(folder / "curves.png"),
        "time": time_split(rows),
        "trouble": _trouble(rows),
        "failed_rollouts": int(sum(row.get("rollout/failures") or 0 for row in rows)),
        "dead": _dead(samples),
        "samples": chosen_samples(samples),
        "settings": sorted(_flat(redacted(config))),
    }


def _png(path: Path) -> str:
    """As the address of an image on the page; "" where nothing was drawn."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() if path.exists() else ""


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError:
        raise UserError(f"{path}: not JSON; remove it: the report then leaves the settings out") from None


def _state(folder: Path, rows: Rows, config: Mapping[str, Any]) -> dict[str, Any]:
    steps, planned = (rows[-1]["step"] if rows else 0), config.get("trainer", {}).get("max_steps")
    ended = rows[-1].get("time") if rows else None
    return {
        "steps": steps,
        "planned": planned,
        "is_done": (folder / FINAL).is_dir(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(ended)) if ended else "",
        "tokens": rows[-1].get("num_tokens") if rows else None,
        "model": config.get("model", {}).get("path", ""),
    }


def _advice(rows: Rows, evaluations: Rows, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every cause, with its newest sentence and the steps in which it held."""
    by_cause: dict[str, dict[str, Any]] = {}
    for step, holding in replay(Adviser(AdviceSettings.of(config)), rows, evaluations):
        for cause, sentence in holding.items():
            entry = by_cause.setdefault(cause, {"cause": cause.replace("_", " "), "first": step, "steps": set()})
            entry["steps"].add(step)
            entry |= {"sentence": sentence, "last": step}
    return [entry | {"steps": len(entry["steps"])} for entry in by_cause.values()]


def _before_after(name: str, evaluations: Rows) -> dict[str, Any]:
    """Shares of full marks in the first and the last evaluation, in percent, with 95 % intervals; or only the means."""
    having = [record for record in evaluations if name in record["full_marks"]]
    is_share = bool(having)
    having = having or [record for record in evaluations if name in record["mean"]]
    ends = (having[0], having[-1])
    shares = [[100 * x for x in share_of_full_marks(record, name)] if is_share else None for record in ends]
    versions = (having[0]["step"], having[-1]["step"])
    means = [record["mean"].get(name) for record in (having[0], having[-1])]
    return {"name": name, "before": shares[0], "after": shares[1], "versions": versions, "means": means}


def time_split(rows: Rows) -> list[dict[str, Any]]:
    """Seconds by activity over the whole run, for each process; the rest is what no part accounts for."""
    total = sum(map(wall_s, rows))
    bars = []
    for who, parts in (("trainer (rank 0)", TRAINER_TIME), ("sampler", SAMPLER_TIME)):
        seconds = {name: sum(row.get(key) or 0.0 for row in rows) for name, key in parts.items()}
        if not total or not sum(seconds.values()):
            continue
        seconds["rest"] = max(0.0, total - sum(seconds.values()))
        scale = max(total, sum(seconds.values()))
        colors = [*range(len(parts)), 7]  # of the page's classes f0 … f7
        shown = [(n, s, 100 * s / scale, c) for (n, s), c in zip(seconds.items(), colors, strict=True) if s > 0.05]
        bars.append({"who": who, "total": total, "parts": shown})
    return bars


def _trouble(rows: Rows) -> list[tuple[str, str, str]]:
    """(metric, total, meaning) of everything that is not 0 and should be."""
    newest = rows[-1] if rows else {}
    totals = [(key, f"{newest[key]:g}", text) for key, text in TROUBLE if newest.get(key)]
    if bad := sum(row.get("num_non_finite", 0) for row in rows):
        totals.append(("num_non_finite", str(bad), "metrics that were not finite numbers"))
    counters = {key: value for key, value in newest.items() if key.startswith("link/") and value and key != CROSSED}
    return totals + [(key, f"{value:g}", "counter of the link") for key, value in counters.items()]


def _dead(samples: Rows) -> dict[str, Any]:
    """How many groups are in samples.jsonl, how many had a best and a worst of the same score, the last of these."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in samples:
        groups.setdefault((record["step"], record["group_id"]), []).append(record)
    dead = [group for group in groups.values() if len(group) > 1 and len({r["reward"] for r in group}) == 1]
    return {"logged": len(groups), "dead": len(dead), "example": shortened(dead[-1][0]) if dead else None}


def chosen_samples(samples: Rows) -> list[tuple[str, list[dict[str, Any]]]]:
    """The worst and the best of the last quarter of the steps, each with all its rewards."""
    last = max((record["step"] for record in samples), default=0)
    recent = [record for record in samples if record["step"] > 0.75 * last]
    ranked = sorted((r for r in recent if r["reward"] is not None), key=lambda r: r["reward"])
    half = min(SAMPLES, len(ranked) // 2)
    worst, best = ranked[:half], ranked[::-1][: min(SAMPLES, len(ranked) - half)]
    return [("worst", [shortened(r) for r in worst]), ("best", [shortened(r) for r in best])]


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """A sample with texts of at most SHOWN characters; `…_more` counts what was left out."""
    texts = {key: str(record.get(key, "")) for key in ("prompt", "completion")}
    cut = {key: text[:SHOWN] for key, text in texts.items()}
    more = {f"{key}_more": max(0, len(text) - SHOWN) for key, text in texts.items()}
    given = record.get("images")
    images = [(data_uri(image), caption(image)) for image in (given if isinstance(given, list) else [])]
    return {**record, **cut, "images": images, "turns": _turns(record)} | more


def _turns(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(by, text) of the first SHOWN characters of a completion of several turns; [] of a single one."""
    left, parts = SHOWN, []
    given = record.get("turns")
    for part in given if isinstance(given, list) else []:
        text = str(part["text"])[: max(left, 0)]
        left -= len(text)
        parts.append((str(part["by"]), text))
    return [(by, text) for by, text in parts if text]


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """{"run": {"seed": 0}} → ("run.seed", "0"); empty sections are left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, ensure_ascii=False)
