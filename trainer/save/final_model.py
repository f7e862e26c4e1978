"""The model at the end of a run, in the folder `final` of the run's folder."""

from functools import partial
from typing import Any

from common.config import Config
from common.files.run_folder import FINAL
from report.model_card import write_model_card
from trainer.engine.critic import Critic
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save.best import Best
from trainer.save.checkpoint import save_models
from trainer.save.disk import write_folder


def write_final_model(
    config: Config,
    best: Best,
    engine: PolicyEngine,
    critic: Critic | None,
    collectives: Collectives,
    tokenizer: Any,
    policy_version: int,
) -> None:
    """Writes the best version as the final model, or the present version if none is the best.

    Every rank calls it. Raises DiskTrouble or Interrupted.
    """
    folder = config.run.output_dir
    if best.commit_as_final(partial(write_model_card, folder)):
        return
    card = partial(write_model_card, folder, version=policy_version)
    save = partial(save_models, engine, critic, collectives, tokenizer)
    write_folder(collectives, folder / FINAL, card, save)
