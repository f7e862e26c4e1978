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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.config import Config
from common.durable import write_file
from common.redact import redacted
from report.curves import Rows, evaluations_of, share_of_full_marks
from report.environment import read_environment
from report.escape import strip_escapes
from report.run_log import read_jsonl
from report.step_text import clock
from report.svg import wall_s

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
_OF_THE_MACHINE = (
    "channel",
    "weights.dir",
    "run.output_dir",
    "run.report_to",
    "run.resume",
    "run.record",
    "run.replay",
)
_DATA_FILES = (".jsonl", ".json", ".parquet")
_SOURCE = re.compile(r"(?P<name>[^:@\[]+)(?::(?P<subset>[^@]+))?(?:@(?P<split>.+))?")


@dataclass(frozen=True)
class Trained:
    """One version of the policy and the run it comes from."""

    name: str  # of the run
    config: Config
    environment: dict[str, Any]  # report/environment.py
    rows: Rows  # of metrics.jsonl, up to this version
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
    evaluations = {record["step"]: record for record in evaluations_of(run_folder) if record["step"] <= version}
    first, rows = min(evaluations, default=version), read_jsonl(run_folder / "metrics.jsonl")
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
            base=_code(base_model(config.model.path)),
            facts=[(name, _cell(text)) for name, text in facts(run)],
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
    sources = [name for source in _listed(config.data.train) if (name := hub_id(source))]
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


def hub_id(source: str) -> str | None:
    """openai/gsm8k:main@train[:512] → openai/gsm8k; None for what is a file or folder of this machine."""
    found = _SOURCE.match(source)
    name = found["name"] if found else source
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((*_DATA_FILES, ".gguf"))
    return None if is_local or Path(name).exists() else name


def shown_path(value: str) -> str:
    """Folders of this machine are nobody's business: "/home/me/models/qwen" → "…/qwen". Others as they are."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if value.startswith(("/", "~")) else value


def base_model(path: str) -> str:
    """A hub id, a folder as shown_path has it, or the GGUF file that a folder was converted from (model/gguf.py)."""
    try:
        source = json.loads((Path(path).expanduser() / "source.json").read_text())
        return f"{source['file']}, sha256 {source['sha256']}"
    except (OSError, ValueError, LookupError, TypeError):
        return shown_path(path)


def public_settings(config: Config) -> str:
    """YAML of all that differs from the defaults, for `launch.sh run`, without what only concerned one machine."""
    given = redacted(config.model_dump(mode="json", exclude_defaults=True))
    for name in _OF_THE_MACHINE:
        section, _, key = name.partition(".")
        if key:
            given.get(section, {}).pop(key, None)
        else:
            given.pop(section, None)
    kept = {section: value for section, value in given.items() if value != {}}
    return str(yaml.safe_dump(_without_folders(kept), sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown_path(value) if isinstance(value, str) else value


def _functions(run: Trained) -> list[str]:
    """Reward functions that were evaluated, in the order of the settings."""
    record = run.after or run.before
    return [name for name in run.config.rewards.names if record and name in record["full_marks"]]


def _measured(run: Trained) -> str:
    """ "`openai/gsm8k:main@test`: 512 completions of 512 problems, temperature 0" """
    record = run.after or run.before
    if record is None:
        return ""
    sources = ", ".join(_code(shown_path(source)) for source in _listed(run.config.data.eval))
    problems, temperature = record.get("problems", record["n"]), run.config.eval.temperature
    return f"{sources}: {record['n']} completions of {problems} problems, temperature {temperature:g}"


def _result(run: Trained, name: str) -> dict[str, str]:
    """A line of the table of results; "–" where there was no evaluation."""
    line = {"name": _cell(name), "full_mark": f"{run.config.rewards.full_mark(name):g}"}
    for when, record in (("before", run.before), ("after", run.after)):
        known = record is not None and name in record["full_marks"]
        share, low, high = share_of_full_marks(record, name) if record and known else (0.0, 0.0, 0.0)
        mean = record["mean"].get(name) if record and known else None
        line[when] = f"{share:.1%} [{100 * low:.1f}, {100 * high:.1f}]".replace("%", " %") if known else "–"
        line[f"mean_{when}"] = "–" if mean is None else f"{mean:.3g}"
    return line


def _eval_result(run: Trained, name: str) -> EvalResult | None:
    """The share of full marks; the mean score of a function whose scores never are that high. None without a result."""
    from huggingface_hub import EvalResult

    record, sources = run.after, _listed(run.config.data.eval)
    if record is None or name not in record["full_marks"]:
        return None
    share, low, high = share_of_full_marks(record, name)
    has_marks = any(r and r["full_marks"].get(name) for r in (run.before, run.after))
    kind, value, label = "accuracy", round(share, 4), f"accuracy, 95 % interval [{low:.3f}, {high:.3f}]"
    if not has_marks and name not in run.config.rewards.full_marks:
        kind, value, label = "mean", record["mean"].get(name), "mean score"
    found = _SOURCE.match(sources[0]) if len(sources) == 1 and hub_id(sources[0]) else None
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


def facts(run: Trained) -> Iterable[tuple[str, str]]:
    """The table of the training, one line after the other."""
    c = run.config
    revision = f", revision {c.model.revision}" if c.model.revision else ""
    yield "Base model", f"{_code(base_model(c.model.path))}{revision}, {c.model.dtype}"
    if c.lora.r:
        yield "Adapters", f"LoRA of rank {c.lora.r}, alpha {c.lora.scale}, on {_code(c.lora.target_modules)}"
    yield "Data", ", ".join(_code(shown_path(source)) for source in _listed(c.data.train))
    weights = zip(c.rewards.names, c.rewards.weights, strict=True)
    yield "Rewards", ", ".join(f"{_code(name)} × {weight:g}" for name, weight in weights)
    yield from _objective(run)
    t, s = c.trainer, c.sampler
    steps = f", {c.algorithm.steps_per_batch} optimizer steps on each batch" if c.algorithm.steps_per_batch > 1 else ""
    behind = f"the sampler up to {t.max_staleness} × a batch ahead" if t.max_staleness else "on policy"
    yield "Batch", f"{t.prompts_per_step} problems × {s.num_generations} completions a step{steps}, {behind}"
    lengths = f"prompts up to {c.data.max_prompt_length} tokens, completions up to {s.max_completion_length}"
    yield "Sampling", f"temperature {s.temperature:g}, {lengths}"
    schedule = f"{t.lr_scheduler_type}, {t.warmup_steps} warmup steps, gradient norm up to {t.max_grad_norm:g}"
    given = c.deepspeed.get("optimizer", {}).get("type", "AdamW") if isinstance(c.deepspeed, dict) else "AdamW"
    yield "Optimizer", f"{given}, learning rate {t.learning_rate:g}, {schedule}, weight decay {t.weight_decay:g}"
    if run.rows:
        newest, time = run.rows[-1], clock(sum(map(wall_s, run.rows)))
        tokens = f", {newest['num_tokens']:,} completion tokens" if newest.get("num_tokens") else ""
        yield "Trained", f"{newest['step']} of {t.max_steps} optimizer steps{tokens}, {time}"
    if run.environment:
        ranks = run.environment["ranks"]
        yield "Hardware", f"trainer: {ranks} rank{'s' if ranks > 1 else ''}, {run.environment['device']}"
        versions = [f"{name} {known}" for name, known in run.environment["packages"].items() if known]
        commit = f" at commit {run.environment['commit']}" if run.environment["commit"] else ""
        yield "Software", ", ".join([f"Tandem{commit}", *versions, f"Python {run.environment['python']}"])


def _objective(run: Trained) -> Iterable[tuple[str, str]]:
    a = run.config.algorithm
    high = a.epsilon if a.epsilon_high is None else a.epsilon_high
    yield "Advantages", f"{_code(a.adv_estimator)}, scaled by {a.reward_scale}"
    clip = f"{a.importance_sampling_level} ratios clipped to [{1 - a.epsilon:g}, {1 + high:g}]"
    if a.loss:
        clip = f"own objective {_code(a.loss)}"
    elif a.loss_type == "cispo":
        clip = f"ratios capped at {high:g}"
    dual = f", dual clip {a.delta:g}" if a.delta is not None else ""
    yield "Loss", f"{_code(a.loss_type)}, {clip}{dual}"
    if a.beta:
        where = "subtracted from the reward" if a.kl_in_reward else "in the loss"
        reference = run.config.reference.path
        to = _code(shown_path(reference)) if reference else "the base model"
        yield "KL", f"beta {a.beta:g}, {a.kl_estimator}, {where}, to {to}"
    else:
        yield "KL", "none (beta 0)"
    if a.needs_critic:
        yield "Critic", f"learning rate {run.config.critic.learning_rate:g}, gamma {a.gamma:g}, lambda {a.lam:g}"


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _code(text: object) -> str:
    return f"`{text}`"


def _cell(text: object) -> str:
    """One line of a table of Markdown."""
    return strip_escapes(text).replace("|", "\\|")
