"""Finds the model of an evaluation and its settings: of a run folder, a checkpoint, adapters, or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files.run_folder import FINAL, checkpoints
from model.files import lora
from model.files.folder import looks_local, require_model
from model.files.hub import read_json


@dataclass(frozen=True)
class Target:
    """A model to evaluate, with its config and the folder of its results."""

    model: str  # a folder or a hub id; with adapters their folder
    config: Path
    output: Path  # parent of the results
    rank: int = 0  # of LoRA adapters, whose base is the config's own model.path; 0 = a whole model

    def overrides(self) -> list[str]:
        """Returns the overrides that make this model the model of the config."""
        if self.rank:
            return [f"lora={{r: {self.rank}}}"]
        of_no_hub = ["model.revision=null"] if Path(self.model).is_dir() else []
        return [f"model.path={json.dumps(self.model)}", "lora={}", *of_no_hub]


def find_target(checkpoint: str, config: str | None) -> Target:
    """Returns the model and config of a run folder, a checkpoint or a hub id. Raises UserError if there are none."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        if checkpoint.endswith(".gguf"):
            require_model(checkpoint)  # says how to convert it
        if looks_local(checkpoint) or checkpoint.startswith("runs/"):
            raise UserError(f"{checkpoint} is no folder; name a run folder, a checkpoint in it, or a model on the hub")
        if config is None:
            raise UserError("which prompts and rewards? Add --config, for example --config configs/quickstart.yaml")
        return Target(checkpoint, Path(config), Path("runs/evaluations"))
    run_folder = next((f for f in (folder, *folder.resolve().parents[:2]) if is_run(f)), None)
    settings = Path(config) if config else run_folder / "config.json" if run_folder else None
    if settings is None:
        raise UserError(f"{folder} is in no run folder; which prompts and rewards? Add --config configs/….yaml")
    model = _newest_model(folder) if is_run(folder) else folder
    rank = _rank_of_adapters(model)
    if not rank and not (model / "config.json").is_file():
        raise UserError(f"{model} is no model: it has no config.json and no {lora.SETTINGS}")
    return Target(str(model), settings, (run_folder or Path("runs")) / "evaluations", rank)


def _rank_of_adapters(folder: Path) -> int:
    """Returns the rank of the LoRA adapters in `folder`; 0 if there are none, or a whole model lies beside them."""
    if (folder / "config.json").is_file() or not (folder / lora.SETTINGS).is_file():
        return 0
    try:
        return int(json.loads((folder / lora.SETTINGS).read_text())["r"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / lora.SETTINGS} is not peft's: {error!r}; save the adapters again") from None


def is_run(folder: Path) -> bool:
    """Returns whether the folder's config.json has the sections of a run; a model's config.json has others."""
    return "sampler" in (read_json(folder / "config.json") or {})


def _newest_model(run_folder: Path) -> Path:
    final, saved = run_folder / FINAL, checkpoints(run_folder)
    if not final.is_dir() and not saved:
        raise UserError(
            f"{run_folder} holds no final/ and no checkpoint; the run has not saved yet (trainer.save_steps)"
        )
    return final if final.is_dir() else saved[-1]
