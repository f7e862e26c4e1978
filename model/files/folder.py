"""Checks of a model before transformers or vLLM read its weights.

They are that it exists, that it has a chat template, and that its index names only files of the folder: transformers
joins the shard names of `*.index.json` to the folder unchecked, so that "../../x" would be opened. Left out: files of
models by hub id, which the hub's own client places.
"""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from common.config import Config, CriticSettings, Model, ReferenceSettings
from common.errors import UserError, first_line
from common.paths import did_you_mean
from model.files.dims import experts_of
from model.files.engine_models import is_unknown, require_engine_arguments
from model.files.hub import model_json, not_available_error, present_file, read_json
from model.files.tensor_parallel import layer_specs

SHARD_NAME = re.compile(r"(?![.])[A-Za-z0-9._-]{1,128}")
# model_type of the families whose images are supported
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")

NO_CHAT_TEMPLATE = (
    "the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml.jinja or use an -Instruct "
    "model"
)


def require_models(config: Config) -> None:
    """Raises UserError if a model plainly does not exist, or prompts cannot be made without a chat template.

    It accepts what only the network or the tokenizer itself can tell; `require_downloaded` asks again later.
    """
    require_model(config.model.path, config.model.revision)
    for other in _other_models(config).values():
        require_model(*config.model_source(other))
    template, folder = config.prompt.chat_template, Path(config.model.path).expanduser()
    if template is not None and not template.is_file():
        raise UserError(f"prompt.chat_template {template}: no such file. Templates of ours: configs/templates/")
    if template is None and folder.is_dir() and not config.model.trust_remote_code and not _has_chat_template(folder):
        raise UserError(NO_CHAT_TEMPLATE)
    require_engine_arguments(config.vllm)
    require_settings(config)


def _other_models(config: Config) -> dict[str, CriticSettings | ReferenceSettings]:
    """Returns the sections whose models the run loads beside the policy's, if they name one."""
    used: dict[str, CriticSettings | ReferenceSettings] = {}
    if config.algorithm.beta > 0:
        used["reference"] = config.reference
    if config.algorithm.needs_critic:
        used["critic"] = config.critic
    return {section: settings for section, settings in used.items() if settings.path is not None}


def require_downloaded(config: Config) -> None:
    """Downloads the policy's config.json if need be, and checks it as `require_settings` does."""
    model_json(config.model.path, "config.json", config.model.revision)
    require_settings(config)


def require_settings(config: Config) -> None:
    """Checks config.json for `require_models`, if it is in a folder or the hub's cache. Raises UserError."""
    settings = _settings(config.model.path, config.model.revision)
    _require_supported_vision(config, settings)
    _require_engine_model(config.model.path, settings)
    _require_positions(config, settings)
    _require_image_column(config, settings)
    _require_same_vision_family(config, settings)
    _require_shared_rows(config, settings)
    if config.algorithm.router_replay and settings and experts_of(settings) is None:
        raise UserError(
            f"algorithm.router_replay is for mixtures of experts, and {config.model.path} names none in its "
            "config.json; set algorithm.router_replay=false"
        )


def expert_warnings(config: Config) -> list[str]:
    """Returns warnings about a mixture of experts before it trains; [] for any other model."""
    settings, warnings = _settings(config.model.path, config.model.revision), []
    if experts_of(settings) is None:
        return []
    if config.model.dtype == "bfloat16" and not config.algorithm.router_replay:
        warnings.append(
            "in bfloat16 sampler and trainer send some tokens to different experts, and their log-probs differ by "
            "more than rounding (mismatch/*): algorithm.router_replay=true makes the trainer follow the sampler"
        )
    if weight := settings.get("router_aux_loss_coef"):
        warnings.append(
            f"router_aux_loss_coef {weight} of the model is not part of the objective: no loss balances experts"
        )
    return warnings


def _require_shared_rows(config: Config, policy: dict[str, Any]) -> None:
    """Raises UserError if a row, or the layers, of one of the trainer's models cannot be shared by ranks."""
    size, split = config.trainer.sequence_parallel_size, config.trainer.tensor_parallel_size
    others = _other_models(config)
    if config.reference_on == "sampler":
        others.pop("reference", None)
    if split > 1 and policy:
        for path, revision in [config.model_source(other) for other in others.values()]:
            layer_specs(load_config(config.model.model_copy(update={"path": path, "revision": revision})), split)
        layer_specs(load_config(config.model), split)
    if size == 1:
        return
    if "vision_config" in policy:
        raise UserError(
            f"trainer.sequence_parallel_size {size}: rows of a model that sees images are not split over ranks; set "
            "trainer.sequence_parallel_size=1, or model.path to a text model"
        )
    for settings in (policy, *(_settings(*config.model_source(other)) for other in others.values())):
        if (heads := settings.get("num_attention_heads", size)) % size:
            raise UserError(uneven_heads(heads, size))


def uneven_heads(heads: int, size: int) -> str:
    """Returns the message why a model with so many attention heads cannot be on `size` sequence-parallel ranks."""
    fitting = [str(n) for n in range(1, size) if heads % n == 0]
    return (
        f"trainer.sequence_parallel_size {size} does not divide the model's {heads} attention heads, of which every "
        f"rank takes as many; set trainer.sequence_parallel_size={' or '.join(fitting)}"
    )


def _require_same_vision_family(config: Config, policy: dict[str, Any]) -> None:
    """Raises UserError if another model is of another vision family, with other image tokens and positions."""
    for section, other in _other_models(config).items():
        path, revision = config.model_source(other)
        found = _settings(path, revision)
        kinds = policy.get("model_type"), found.get("model_type")
        if policy and found and kinds[0] != kinds[1] and not set(kinds).isdisjoint(VISION_FAMILIES):
            raise UserError(
                f"{section}.path {path} is a {kinds[1]}, and the policy a {kinds[0]}: with images both must be of one "
                f"family; remove {section}.path, which is then the policy's own start"
            )


def _require_image_column(config: Config, settings: dict[str, Any]) -> None:
    """Raises UserError for images to a text model, or none to a vision model unless data.limit_images is 0."""
    if not settings:
        return
    sees = "vision_config" in settings
    if config.data.image_key is not None and not sees:
        raise UserError(
            f"data.image_key {config.data.image_key!r} gives images to {config.model.path}, a text model; set "
            "data.image_key: null, or model.path to a vision model such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    if config.data.image_key is None and sees and config.data.limit_images > 0:
        raise UserError(
            f"{config.model.path} is a vision model, and data.image_key names no column with images; set "
            "data.image_key: images, or data.limit_images: 0 to train it on text alone"
        )


def _settings(path: str, revision: str | None) -> dict[str, Any]:
    """Returns config.json of a model in a folder or the hub's cache, its language model's settings on top, or {}.

    Nothing is downloaded.
    """
    try:
        file = present_file(path, "config.json", revision)
    except ValueError:  # no valid hub id
        return {}
    if file is None or (settings := read_json(file)) is None:
        return {}
    language = settings.get("text_config")
    return settings | (language if isinstance(language, dict) else {}) | {"model_type": settings.get("model_type")}


def _require_supported_vision(config: Config, settings: dict[str, Any]) -> None:
    """Raises UserError for images that would be read otherwise than by vLLM, or a frozen tower that does not exist."""
    kind, path = settings.get("model_type"), config.model.path
    if "vision_config" in settings and kind not in VISION_FAMILIES:
        raise UserError(
            f"model {path!r} is a {kind}: of models that see images Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 are "
            f"supported ({', '.join(VISION_FAMILIES)}), not this one; set model.path to one of them"
        )
    if config.model.freeze_vision_tower and settings and kind not in VISION_FAMILIES:
        raise UserError(
            f"model.freeze_vision_tower is true, and model {path!r} is a {kind} without a vision tower; remove it, or "
            "set model.path to a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5"
        )


def _require_engine_model(path: str, settings: dict[str, Any]) -> None:
    """Raises UserError for a model that vLLM cannot run."""
    names = settings.get("architectures")
    if isinstance(names, list) and names and "auto_map" not in settings and is_unknown(map(str, names)):
        raise UserError(
            f"model {path!r} is a {names[0]}: the installed vLLM has no such model, and its Transformers back end does "
            "not take it; set model.path to another model (docs/model.md)"
        )


def _require_positions(config: Config, settings: dict[str, Any]) -> None:
    """Raises UserError for a length beyond the model's unscaled positions, before vLLM does after its imports."""
    try:
        limit, rope = settings["max_position_embeddings"], settings.get("rope_parameters") or {}
        is_scaled = rope.get("rope_type", "default") != "default"
        if scaling := settings.get("rope_scaling"):  # "mrope" are the axes of images, not a scale
            is_scaled |= scaling.get("rope_type", scaling.get("type")) not in ("default", "mrope")
    except (LookupError, AttributeError):
        return
    prompt = config.data.max_prompt_length
    completion = config.sampler.max_completion_length
    if prompt + completion > limit and not is_scaled and "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ:
        remedy = (
            f"data.max_prompt_length={limit - completion}"
            if limit > completion
            else f"sampler.max_completion_length={limit // 2} and data.max_prompt_length={limit // 2}"
        )
        raise UserError(
            f"data.max_prompt_length {prompt} + max_completion_length {completion} = {prompt + completion} tokens > "
            f"the {limit} positions of {config.model.path}; set {remedy}"
        )


def looks_local(path: str) -> bool:
    """Returns whether the path cannot be a hub id."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def require_model(path: str, revision: str | None = None) -> None:
    """Raises UserError if there is no such folder, or the hub is offline and nothing is in the cache."""
    if Path(path).expanduser().is_dir():
        check_model_folder(path)
        return
    if path.endswith(".gguf"):
        folder = path.removesuffix(".gguf")
        raise UserError(
            f"model {path!r} is a GGUF file; make a folder of it: bash launch.sh convert {path} {folder}, and set "
            f"model.path: {folder}"
        )
    if looks_local(path):
        raise UserError(
            f"model {path!r}: no such folder.{did_you_mean(Path(path).expanduser())} "
            "Set model.path to a folder or a hub id"
        )
    from huggingface_hub import constants

    try:
        if constants.HF_HUB_OFFLINE and present_file(path, "config.json", revision) is None:
            raise not_available_error(path, "no config.json in the cache")
    except ValueError as error:  # no valid hub id
        raise not_available_error(path, error) from None


def expert_counts(model: Model) -> tuple[int, int] | None:
    """Returns (experts of a layer, experts per token) of the policy; None without a mixture."""
    return experts_of(load_config(model).get_text_config().to_dict())


def load_config(model: Model) -> Any:
    """Loads transformers' configuration of the policy. Raises UserError if there is none that it knows."""
    from transformers import AutoConfig  # the import takes seconds

    try:
        return AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {model.path!r}: no config.json of a model that transformers knows: {first_line(error)}"
        ) from error


@functools.lru_cache(maxsize=4)
def vocabulary(model: Model) -> int:
    """Returns the rows of the embedding; a tokenizer may know fewer tokens, or more, which no prompt may hold."""
    return int(load_config(model).get_text_config().vocab_size)


def causal_lm_class(config: Any) -> Any:
    """Returns transformers' Auto class for a model of this configuration with output head and vision tower, if any."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM


def _has_chat_template(folder: Path) -> bool:
    """Returns whether transformers would find a chat template; True without a tokenizer, which fails by itself."""
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((folder / name).exists() for name in names):
        return True
    settings = read_json(folder / "tokenizer_config.json")
    return settings is None or settings.get("chat_template") is not None


def check_model_folder(path: str) -> None:
    """Raises UserError for a folder of adapters, an unreadable file, or an index that names other than its files."""
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds LoRA adapters, not a model; merge them first, see docs/lora.md")
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.is_file() and not os.access(file, os.R_OK):
            raise UserError(f"{file} is another user's and cannot be read; have them run: chmod a+r {file.parent}/*")
    for index in sorted(folder.glob("*.index.json")) if folder.is_dir() else []:
        for name in _shard_names(index):
            if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
                raise UserError(
                    f"{index} names the file {str(name)[:200]!r}: a shard's name has only letters, digits, '.', '_' "
                    "and '-', and does not start with a dot. Do not use this model before you know who made it"
                )


def _shard_names(index: Path) -> list[object]:
    try:
        if index.stat().st_size > 64 << 20:
            raise ValueError(f"{index.stat().st_size} bytes")
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()), key=str)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not an index of a model's shards ({error}); download the model again") from None
