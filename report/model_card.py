"""The README.md of a trained model: the hub's model card, made of the run's files, from which all its numbers come.

    write_model_card(Path("runs/quickstart"), Path("runs/quickstart/final"), version=60)

It reads config.json, metrics.jsonl and eval.jsonl of the run folder; the text is model_card.md.jinja.
Left out: the licence, intended use and risks, which only a person can say.
"""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from common.config import Config
from common.config.data import entries
from common.durable import disk_trouble, write_file
from common.errors import with_type
from common.processes.exits import say
from common.redact import redacted
from report.curves import history_of
from report.display import clock, comparison, wall_s
from report.full_marks import Records
from report.versions import choice

FILE = "README.md"
ADAPTERS = "adapter_config.json"  # peft's
PACKAGES = ("torch", "vllm", "deepspeed", "transformers", "peft")
_TAGS = {"gae": "ppo"}  # the hub's words, if they differ
_OF_THE_MACHINE: Any = {  # settings of one machine, for pydantic's `exclude`
    "channel": True,
    "weights": {"dir"},
    "run": {"output_dir", "report_to", "resume", "record", "replay"},
}
_FILES = (".jsonl", ".json", ".parquet", ".gguf")


def write_model_card(run_folder: Path, folder: Path, version: int) -> None:
    """Writes folder/README.md. Errors of the card are only printed, because the model is worth more than its card.

    Raises OSError if the disk is in trouble.
    """
    try:
        write_file(folder / FILE, model_card(run_folder, folder, version).encode(errors="replace"))
    except Exception as error:
        if disk_trouble(error) is not None:
            raise
        say(f"{folder} gets no model card: {with_type(error)}")


def model_card(run_folder: Path, folder: Path, version: int) -> str:
    """Returns the card of the version in `folder`. Raises ValueError if this Tandem cannot read the config.json."""
    from huggingface_hub import ModelCard, ModelCardData

    config = Config.model_validate(json.loads((run_folder / "config.json").read_text()))
    rows, evaluations = history_of(run_folder)
    measured: Records = [record for record in evaluations if record["step"] in (evaluations[0]["step"], version)]
    told_of_choice = ""
    chosen = choice(evaluations, config.eval) if config.eval.load_best_model_at_end else None
    if chosen is not None:
        estimate, sentence = chosen
        if estimate["step"] == version:
            told_of_choice = sentence
            measured = [*measured[:-1], estimate]
    is_adapter = (folder / ADAPTERS).is_file()
    settings, estimator = public_settings(config), config.algorithm.adv_estimator
    base, train = hub_id(config.model.path), [entry.path for entry in entries(config.data.train)]
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        datasets=list(dict.fromkeys(filter(None, map(hub_id, train)))) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["tandem", "reinforcement-learning", _TAGS.get(estimator, estimator), *["lora"] * bool(config.lora.r)],
    )
    return str(
        ModelCard.from_template(
            data,
            template_path=str(Path(__file__).with_name("model_card.md.jinja")),
            name=run_folder.resolve().name,
            version=version,
            is_adapter=is_adapter,
            base=shown_path(config.model.path),
            config=config,
            results=comparison(measured),
            measured=" and ".join(str(record["step"]) for record in measured),
            told_of_choice=told_of_choice,
            held_out=", ".join(map(shown_path, (entry.path for entry in entries(config.data.eval)))),
            train=", ".join(map(shown_path, train)),
            trained=_trained([row for row in rows if row.get("policy_version", version) <= version]),
            versions=versions(),
            settings=settings,
            fence="`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0)),
        )
    )


def versions() -> str:
    """Returns the versions of the installed PACKAGES, such as "torch 2.13.0, vllm 0.32.0"."""
    installed = {one.name.lower(): one.version for one in metadata.distributions()}
    found = {name: installed.get(name) or installed.get(f"{name}-cpu") for name in PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _trained(rows: Records) -> str:
    """Returns "60 optimizer steps, 245,760 completion tokens, 1:00"."""
    if not rows:
        return "0 optimizer steps"
    tokens, time = rows[-1].get("num_tokens") or 0, clock(sum(map(wall_s, rows)))
    return f"{rows[-1]['step']} optimizer steps, {tokens:,} completion tokens, {time}"


def hub_id(source: str) -> str | None:
    """Returns a source's hub id, openai/gsm8k:main@train[:512] → openai/gsm8k; None for a local file or folder."""
    name = re.split(r"[:@\[]", source, maxsplit=1)[0]
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_FILES)
    return None if is_local or "://" in source or Path(name).exists() else name


def shown_path(value: str) -> str:
    """Hides the folders of this machine: "/home/me/models/qwen" → "…/qwen". Other values are unchanged."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if value.startswith(("/", "~")) else value


def public_settings(config: Config) -> str:
    """Returns YAML of all settings that are not defaults, for `launch.sh run`, without secrets and machine settings."""
    given = redacted(config.model_dump(mode="json", exclude_defaults=True, exclude=_OF_THE_MACHINE))
    kept = {section: value for section, value in given.items() if value != {}}
    return str(yaml.safe_dump(_without_folders(kept), sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown_path(value) if isinstance(value, str) else value
