"""The model at the end of a run, in output_dir/final."""

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
    """Writes the best version as the final model, or the current version if there is no best one.

    policy_version: the current version, for its model card. Every rank calls it. Raises DiskTrouble
    or Interrupted.
    """
    run_folder = config.run.output_dir
    if best.commit_as_final(partial(write_model_card, run_folder)):
        return
    save = partial(save_models, engine, critic, collectives, tokenizer)
    write_card = partial(write_model_card, run_folder, version=policy_version)
    write_folder(collectives, run_folder / FINAL, fill=save, finish=write_card)
