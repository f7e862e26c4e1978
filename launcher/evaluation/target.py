"""Which model an evaluation is of, and with whose settings: a run folder, a checkpoint, adapters, or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.run_folder import FINAL, checkpoints
from model import lora
from model.folder import looks_local, require_model
from model.hub import read_json


@dataclass(frozen=True)
class Target:
    """What is evaluated, with which settings."""

    model: str  # a folder or a hub id; with adapters their folder
    config: Path
    output: Path  # parent of the results
    rank: int = 0  # of adapters, which need the config's own model.path as their base

    def overrides(self) -> list[str]:
        """What makes the config's model this one."""
        if self.rank:
            return [f"lora={{r: {self.rank}}}"]
        return [f"model.path={json.dumps(self.model)}", "lora={}"]


def find_target(checkpoint: str, config: str | None) -> Target:
    """The model folder and the config of a run folder, a checkpoint or a hub id. Raises UserError."""
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
    """0 = there are none, or they stand beside a whole model."""
    if (folder / "config.json").is_file() or not (folder / lora.SETTINGS).is_file():
        return 0
    try:
        return int(json.loads((folder / lora.SETTINGS).read_text())["r"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / lora.SETTINGS} is not peft's: {error!r}; save the adapters again") from None


def is_run(folder: Path) -> bool:
    """A run's config.json has our sections; a model's has others."""
    return "sampler" in (read_json(folder / "config.json") or {})


def _newest_model(run_folder: Path) -> Path:
    final, saved = run_folder / FINAL, checkpoints(run_folder)
    if not final.is_dir() and not saved:
        raise UserError(
            f"{run_folder} holds no final/ and no checkpoint; the run has not saved yet (trainer.save_steps)"
        )
    return final if final.is_dir() else saved[-1]
