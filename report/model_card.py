"""README.md of a trained model: the hub's model card, made of what the run left. It has no number that the run has not.

    write_model_card(Path("runs/quickstart"), Path("runs/quickstart/final"), version=60)

Reads config.json, environment.json, metrics.jsonl and eval.jsonl of the run folder. Metadata and format are those of
huggingface_hub; the text is model_card.md.jinja. Settings are shown without secrets and without this machine's folders:
the card is made to be published. Left out: the hub's sections on intended use and risks, which only a person can write.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.config import Config
from common.durable import write_file
from report.curves import Rows, history_of, share_of_full_marks
from report.environment import read_environment
from report.escape import strip_escapes
from report.public_settings import SOURCE, base_model, code, hub_id, listed, public_settings, shown_path
from report.training_facts import facts

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

FILE = "README.md"
ADAPTERS = "adapter_config.json"  # peft's
_TAGS = {
    "grpo": "grpo",
    "dr_grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce-plus-plus",
    "reinforce_plus_plus_baseline": "reinforce-plus-plus",
    "gae": "ppo",
    "group_ppo": "group-ppo",
}


@dataclass(frozen=True)
class Trained:
    """One version of the policy and the run it comes from."""

    name: str  # of the run
    config: Config
    environment: dict[str, Any]  # report/environment.py
    rows: Rows  # of metrics.jsonl, up to this version; like the evaluations without accuracies of unknown full marks
    before: dict[str, Any] | None  # the first evaluation, of an earlier version
    after: dict[str, Any] | None  # the evaluation of this version
    version: int
    is_adapter: bool  # the folder holds adapters, not a whole model


def write_model_card(run_folder: Path, folder: Path, version: int) -> None:
    """Writes folder/README.md. The model is worth more than its card: what is wrong with the card is only said.

    Raises OSError if the disk does not take it.
    """
    try:
        text = model_card(trained(run_folder, folder, version))
    except OSError:
        raise
    except Exception as error:
        print(f"tandem: {folder} gets no model card: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return
    write_file(folder / FILE, text.encode(errors="replace"))


def trained(run_folder: Path, folder: Path, version: int) -> Trained:
    """What the run left of the version in `folder`. Raises ValueError for a config.json that is not of this Tandem."""
    rows, all_evaluations = history_of(run_folder)
    evaluations = {record["step"]: record for record in all_evaluations if record["step"] <= version}
    first = min(evaluations, default=version)
    return Trained(
        name=run_folder.resolve().name,
        config=Config.model_validate(json.loads((run_folder / "config.json").read_text())),
        environment=read_environment(run_folder),
        rows=[row for row in rows if row.get("policy_version", version) <= version],
        before=evaluations[first] if first < version else None,
        after=evaluations.get(version),
        version=version,
        is_adapter=(folder / ADAPTERS).is_file(),
    )


def model_card(run: Trained) -> str:
    """The whole README.md."""
    from huggingface_hub import ModelCard

    config, settings = run.config, public_settings(run.config)
    return str(
        ModelCard.from_template(
            metadata(run),
            template_path=str(Path(__file__).with_name("model_card.md.jinja")),
            run=run,
            config=config,
            base=code(base_model(config.model.path)),
            facts=[(name, _cell(text)) for name, text in facts(config, run.rows, run.environment)],
            results=[_result(run, name) for name in _functions(run)],
            measured=_measured(run),
            settings=settings,
            fence="`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0)),
            commit=(run.environment.get("commit") or "").partition(" ")[0],
        )
    )


def metadata(run: Trained) -> ModelCardData:
    """The front matter: what the hub filters by, and the held-out results as its model-index."""
    from huggingface_hub import ModelCardData

    config = run.config
    base, inherited = hub_id(config.model.path), _card_of(config.model.path, config.model.revision)
    results = [result for name in _functions(run) if (result := _eval_result(run, name))]
    sources = [name for source in listed(config.data.train) if (name := hub_id(source))]
    method = _TAGS.get(config.algorithm.adv_estimator)
    return ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if run.is_adapter else "finetune") if base else None,
        datasets=list(dict.fromkeys(sources)) or None,
        library_name="peft" if run.is_adapter else "transformers",
        license=inherited.get("license"),
        license_name=inherited.get("license_name"),
        license_link=inherited.get("license_link"),
        language=inherited.get("language"),
        pipeline_tag="text-generation",
        tags=["tandem", "reinforcement-learning", *([method] if method else []), *(["lora"] if config.lora.r else [])],
        model_name=run.name if results else None,
        eval_results=results or None,
    )


def _card_of(path: str, revision: str | None) -> dict[str, Any]:
    """Metadata of the base model's own card, where that is on this machine; {} otherwise. Asks no network."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    folder = Path(path).expanduser()
    if folder.is_dir():
        file = folder / FILE
    else:
        cached = try_to_load_from_cache(hub_id(path) or path, FILE, revision=revision) if hub_id(path) else None
        file = Path(cached) if isinstance(cached, str) else folder / FILE
    try:
        return dict(ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()) if file.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # somebody else's card, and badly formed


def _functions(run: Trained) -> list[str]:
    """Reward functions that were evaluated, in the order of the settings."""
    record = run.after or run.before
    return [name for name in run.config.rewards.names if record and name in record["full_marks"] | record["mean"]]


def _measured(run: Trained) -> str:
    """ "`openai/gsm8k:main@test`: 512 completions of 512 problems, temperature 0" """
    record = run.after or run.before
    if record is None:
        return ""
    sources = ", ".join(code(shown_path(source)) for source in listed(run.config.data.eval))
    problems, temperature = record.get("problems", record["n"]), run.config.eval.temperature
    return f"{sources}: {record['n']} completions of {problems} problems, temperature {temperature:g}"


def _result(run: Trained, name: str) -> dict[str, str]:
    """A line of the table of results; "–" where there was no evaluation, or no completion ever had full marks."""
    records = {"before": run.before, "after": run.after}
    has_marks = any(record and name in record["full_marks"] for record in records.values())
    line = {"name": _cell(name), "full_mark": f"{run.config.rewards.full_mark(name):g}" if has_marks else ""}
    for when, record in records.items():
        line[when] = line[f"mean_{when}"] = "–"
        if record and name in record["full_marks"]:
            share, low, high = share_of_full_marks(record, name)
            line[when] = f"{share:.1%} [{100 * low:.1f}, {100 * high:.1f}]".replace("%", " %")
        if record and name in record["mean"]:
            line[f"mean_{when}"] = f"{record['mean'][name]:.3g}"
    return line


def _eval_result(run: Trained, name: str) -> EvalResult | None:
    """The share of full marks; the mean score where nobody knows what full marks are. None without a result."""
    from huggingface_hub import EvalResult

    record, sources = run.after, listed(run.config.data.eval)
    if record is None or name not in record["full_marks"] | record["mean"]:
        return None
    kind, value, label = "mean", record["mean"].get(name), "mean score"
    if name in record["full_marks"]:
        share, low, high = share_of_full_marks(record, name)
        kind, value, label = "accuracy", round(share, 4), f"accuracy, 95 % interval [{low:.3f}, {high:.3f}]"
    found = SOURCE.match(sources[0]) if len(sources) == 1 and hub_id(sources[0]) else None
    return EvalResult(
        task_type="text-generation",
        dataset_type=found["name"] if found else "custom",
        dataset_name=found["name"] if found else ", ".join(map(shown_path, sources)),
        dataset_config=found["subset"] if found else None,
        dataset_split=found["split"] if found else None,
        metric_type=kind,
        metric_value=value,
        metric_name=f"{name}: {label}, n = {record['n']}",
    )


def _cell(text: object) -> str:
    """One line of a table of Markdown."""
    return strip_escapes(text).replace("|", "\\|")
