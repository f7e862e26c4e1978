"""Low-rank adapters, on which both processes must agree. peft makes them, so a run's folders have peft's own format.

    W' = W + (alpha / r) · B A        A [r, in], random at the start; B [out, r], zero: version 0 is the base model

(Hu et al., arXiv 2106.09685). `expected` derives every name, shape and setting of a version from the config alone; a
sampler requires them of a folder before its engine loads it. Left out: variants of LoRA that vLLM does not apply (DoRA,
biases, whole modules beside adapters); adapters of experts; those in a vision tower, which stays frozen.
"""

import functools
import json
from pathlib import Path
from typing import Any

from common.config import MAX_LORA_RANK, Config
from common.errors import UserError
from common.files.weights import BadWeights, TensorInfo
from model.files.dims import experts_of
from model.files.folder import VISION_FAMILIES, causal_lm_class, load_config

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"  # as peft and vLLM call them
_LEGAL_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_LORA_RANK)  # values of vLLM's max_lora_rank
_EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "shared_expert_gate")
_BASE_MODEL_SETTINGS = ("base_model_name_or_path", "revision")  # hosts may have the base model elsewhere


def max_rank(r: int) -> int:
    """Returns vLLM's max_lora_rank for adapters of rank r: the next that it allows.  16 -> 16, 20 -> 32"""
    return next(rank for rank in _LEGAL_RANKS if rank >= r)


def engine_arguments(config: Config) -> dict[str, Any]:
    """Returns vLLM's arguments for applying adapters; none if whole weights are published.

    They name only the layers that get an adapter: with adapters, vLLM's experts need Triton and its output head cannot
    score prompts, and neither works on a CPU.
    """
    if not config.lora.publishes_adapters:
        return {}
    targets = {name.split(".")[-3] for name in expected(config)[0]}
    sizes = {"max_lora_rank": max_rank(config.lora.r), "max_loras": 1}
    return {"enable_lora": True, "lora_target_modules": sorted(targets)} | sizes


def add_adapters(model: Any, config: Config) -> Any:
    """Freezes the model, puts adapters beside its linear layers, in place, and returns peft's LoraConfig.

    The same seed gives the same A on every rank. Raises UserError if no layer has a name of lora.target_modules.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    lora = config.lora
    sees = model.config.model_type in VISION_FAMILIES
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.scale,
        target_modules=targets(model, lora.target_modules),
        exclude_modules=r"(.*\.)?visual\..*" if sees else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.path,
        revision=config.model.revision,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        try:
            # float32 adapters beside bfloat16 weights would be another network than the one vLLM runs
            made = get_peft_model(model, settings, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UserError(f"lora.target_modules {lora.target_modules}: {str(error).splitlines()[0]}") from None
    tuner: Any = made.base_model
    found = [f".{name}" for name in tuner.targeted_module_names]  # peft takes one that exists as enough
    for wanted in lora.target_modules if isinstance(lora.target_modules, list) else ():
        if not any(name.endswith(f".{wanted}") for name in found):
            raise UserError(f"lora.target_modules {wanted}: no layer of the language model has this name; remove it")
    return made.peft_config["default"]


def targets(model: Any, wanted: str | list[str]) -> str | list[str]:
    """Returns the wanted layers; in a mixture only those beside experts: peft applies MLP names to experts, too."""
    import torch

    if experts_of(model.config.get_text_config().to_dict()) is None:
        return wanted
    if wanted == "all-linear":
        head = model.get_output_embeddings()
        mixtures = tuple(n.removesuffix("experts") for n, _ in model.named_modules() if n.endswith(".experts"))
        linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
        beside = {n.rpartition(".")[2] for n in linear if not n.startswith(mixtures)}
        return sorted(beside - {n.rpartition(".")[2] for n in linear if n.startswith(mixtures)} - set(_EXPERT_MODULES))
    if experts := [name for name in wanted if name.rpartition(".")[2] in _EXPERT_MODULES]:
        raise UserError(
            f"lora.target_modules {experts[0]}: in a mixture adapters stand beside the attention alone; write "
            "target_modules: all-linear, or [q_proj, v_proj]"
        )
    return wanted


def settings_file(settings: Any) -> bytes:
    """Returns adapter_config.json, equal for equal settings, while peft's own writer depends on the order of sets."""
    values = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.to_dict().items()}
    return json.dumps(values | {"inference_mode": True}, indent=2, sort_keys=True).encode()


def published_name(parameter: str) -> str | None:
    """Returns peft's name in a file for a parameter of a model with adapters; None for a weight of the base.

    "model.layers.0.mlp.up_proj.lora_A.default.weight" -> "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    """
    is_adapter = ".lora_A.default." in parameter or ".lora_B.default." in parameter
    return f"base_model.model.{parameter.replace('.default.', '.')}" if is_adapter else None


def expected(config: Config) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Returns (shapes, adapter_config.json) of every version of this run, from a model on the meta device."""
    return _expected(config.model_dump_json())


@functools.lru_cache(maxsize=1)
def _expected(text: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Computes `expected` once per process: reloads ask, and building large models is slow even on the meta device."""
    import torch

    config = Config.model_validate_json(text)
    given = config.model
    loaded = load_config(given)
    with torch.device("meta"):
        model = causal_lm_class(loaded).from_config(loaded, trust_remote_code=given.trust_remote_code)
    settings = add_adapters(model, config)
    named = {published_name(name): list(p.shape) for name, p in model.named_parameters()}
    return {name: shape for name, shape in named.items() if name}, json.loads(settings_file(settings))


def require_expected(folder: Path, tensors: dict[str, TensorInfo], config: Config) -> None:
    """Raises BadWeights unless a folder's adapters are such as this config makes, in every name, shape and setting."""
    wanted, settings = expected(config)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise BadWeights(
            f"adapters missing {missing[:3]} or not expected {extra[:3]}: the lora section of both differs"
        )
    for name, shape in wanted.items():
        found, made = (tensors[name].dtype, tensors[name].shape), (config.model.dtype, shape)
        if found != made:
            raise BadWeights(f"adapter {name} is {found}, this run's settings make {made}")
    try:
        given = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise BadWeights(f"{SETTINGS} cannot be read: {error}") from None
    for name in settings.keys() | given.keys():
        if name not in _BASE_MODEL_SETTINGS and given.get(name) != settings.get(name):
            raise BadWeights(
                f"{SETTINGS} has {name} {given.get(name)!r}, this run's settings make {settings.get(name)!r}"
            )
