"""What tests ask of a real engine, and the damaged versions that they show it."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.config import Config
from sampler.engine.completions import Completion, SamplingParams
from sampler.engine.engine import Engine
from tests.support.mixtures import mixture_folder
from tests.support.tiny import tiny_model

PROMPT = [5, 9, 17, 33, 8, 21] * 12  # 72 tokens: two blocks of 32 that a second request would find in the cache
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32"},
    "data": {"train": "none.jsonl", "max_prompt_length": 450},
    # top_k allows params that return what they kept; each test gives its own
    "sampler": {"num_generations": 4, "max_completion_length": 24, "temperature": 0.7, "top_k": 12},
    "trainer": {"prompts_per_step": 4},
}
_made: dict[str, tuple[Config, Engine]] = {}
_kept: list[Engine] = []


def engine_of(settings: dict[str, Any]) -> tuple[Config, Engine]:
    """One for all files that ask for these settings, as long as the process lives.

    vocab, untied and family are the model's.
    """
    import torch._dynamo  # noqa: F401  read its settings before the engine sets them

    key = json.dumps(settings, sort_keys=True)
    if key not in _made:
        folder = Path(tempfile.mkdtemp(prefix="tandem-engine-"))
        if "family" in settings:
            model = mixture_folder(folder / "model", settings["family"])
        else:
            model = _model(folder / "model", settings.get("vocab"), settings.get("untied", False))
        given = {name: section for name, section in settings.items() if name not in ("vocab", "untied", "family")}
        sections = {name: SECTIONS.get(name, {}) | given.get(name, {}) for name in SECTIONS.keys() | given.keys()}
        sections["model"] = sections["model"] | {"path": str(model)}
        config = Config.model_validate({"run": {"output_dir": str(folder / "run")}, **sections})
        _made[key] = config, kept(Engine(config, num_gpus=0))
    return _made[key]


def kept(engine: Engine) -> Engine:
    """One that is freed would end vLLM's groups of ranks for the others of this process, too.

    A process whose first model is dense has no group for experts: one rank is one rank.
    """
    from vllm.distributed import parallel_state

    parallel_state._EP = parallel_state._EP or parallel_state._TP
    _kept.append(engine)
    return engine


def _model(folder: Path, vocab: int | None, untied: bool) -> Path:
    """With what Qwen2.5-Instruct ships: none of it may reach the sampling params."""
    tiny_model(folder, vocab=vocab)
    path = folder / "generation_config.json"
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | {"do_sample": True, "temperature": 0.1, "top_k": 3, "repetition_penalty": 1.3}))
    if untied:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
        model.save_pretrained(folder)
    return folder


def finished(engine: Engine) -> dict[Any, list[Completion]]:
    """By key, what the engine has when nothing is left to do."""
    found: dict[Any, list[Completion]] = {}
    while engine.num_running:
        found |= dict(engine.step())
    return found


def complete(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[Completion]:
    engine.submit("key", prompt, params)
    return finished(engine)["key"]


def greedy(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return complete(engine, SamplingParams(0.0, 16, 1, None), prompt)[0].token_ids.tolist()


def edit(shard: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


def given_instead(engine: Engine, folder: Path | str, monkeypatch: Any) -> None:
    """From now on each load gets another folder than the verified one, as if its files had changed since."""
    load = engine.weights.load
    monkeypatch.setattr(
        engine.weights, "load", lambda _, expected, __, version: load(Path(folder), expected, None, version)
    )


def worker_of(engine: Engine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
