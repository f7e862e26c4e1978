"""README.md of a trained model: the hub's model card, made of what the run left. It has no number that the run has not.

    write_model_card(Path("runs/quickstart"), Path("runs/quickstart/final"), version=60)

Reads config.json, environment.json, metrics.jsonl and eval.jsonl of the run folder; the text is model_card.md.jinja.
Left out: the licence, intended use and risks, which only a person can say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import Config
from common.durable import write_file
from report.curves import history_of
from report.environment import read_environment
from report.escape import strip_escapes
from report.full_marks import Records, compared, share_of_full_marks
from report.public_settings import base_model, hub_id, public_settings, shown_path
from report.step_text import clock, wall_s

FILE = "README.md"
ADAPTERS = "adapter_config.json"  # peft's
_TAGS = {"gae": "ppo"}  # where the hub's word is another one


def write_model_card(run_folder: Path, folder: Path, version: int) -> None:
    """Writes folder/README.md. The model is worth more than its card: what is wrong with the card is only said.

    Raises OSError if the disk does not take it.
    """
    try:
        text = model_card(run_folder, folder, version)
    except OSError:
        raise
    except Exception as error:
        print(f"tandem: {folder} gets no model card: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return
    write_file(folder / FILE, text.encode(errors="replace"))


def model_card(run_folder: Path, folder: Path, version: int) -> str:
    """Of the version in `folder`. Raises ValueError for a config.json that is not of this Tandem."""
    from huggingface_hub import ModelCard, ModelCardData

    config = Config.model_validate(json.loads((run_folder / "config.json").read_text()))
    rows, all_evaluations = history_of(run_folder)
    evaluations = {record["step"]: record for record in all_evaluations if record["step"] <= version}
    first, is_adapter = min(evaluations, default=version), (folder / ADAPTERS).is_file()
    settings, estimator = public_settings(config), config.algorithm.adv_estimator
    before, after = evaluations[first] if first < version else None, evaluations.get(version)
    base, train = hub_id(config.model.path), _listed(config.data.train)
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        datasets=list(dict.fromkeys(filter(None, map(hub_id, train)))) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[
            "tandem",
            "reinforcement-learning",
            _TAGS.get(estimator, estimator),
            *(["lora"] if config.lora.r else []),
        ],
    )
    return str(
        ModelCard.from_template(
            data,
            template_path=str(Path(__file__).with_name("model_card.md.jinja")),
            name=run_folder.resolve().name,
            version=version,
            is_adapter=is_adapter,
            base=base_model(config.model.path),
            config=config,
            results=[_result(config, name, before, after) for name in compared([r for r in (before, after) if r])],
            measured=_measured(config, after or before),
            before=before,
            after=after,
            train=", ".join(map(shown_path, train)),
            trained=_trained([row for row in rows if row.get("policy_version", version) <= version]),
            environment=read_environment(run_folder),
            settings=settings,
            fence="`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0)),
        )
    )


def _trained(rows: Records) -> str:
    """ "60 optimizer steps, 245,760 completion tokens, 1:00" """
    if not rows:
        return "0 optimizer steps"
    tokens, time = rows[-1].get("num_tokens") or 0, clock(sum(map(wall_s, rows)))
    return f"{rows[-1]['step']} optimizer steps, {tokens:,} completion tokens, {time}"


def _measured(config: Config, record: Mapping[str, Any] | None) -> str:
    """ "openai/gsm8k:main@test: 512 completions of 512 problems, temperature 0" """
    if record is None:
        return ""
    sources = ", ".join(map(shown_path, _listed(config.data.eval)))
    problems = record.get("problems", record["n"])
    return f"{sources}: {record['n']} completions of {problems} problems, temperature {config.eval.temperature:g}"


def _result(config: Config, name: str, *records: Mapping[str, Any] | None) -> str:
    """A line of the table, before and after; "–" where there was no evaluation, or nothing ever had full marks."""
    shares, means = ["–", "–"], ["–", "–"]
    for i, record in enumerate(records):
        if record and name in record["full_marks"]:
            share, low, high = (100 * x for x in share_of_full_marks(record, name))
            shares[i] = f"{share:.1f} % [{low:.1f}, {high:.1f}]"
        if record and name in record["mean"]:
            means[i] = f"{record['mean'][name]:.3g}"
    known = f" (full mark {config.rewards.full_mark(name):g})" if shares != ["–", "–"] else ""
    shown = strip_escapes(name).replace("|", "\\|")
    return f"| {' | '.join([shown + known, *shares, *means])} |"


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
