"""reference.sync_steps: which policy is the reference of a step, that it was published, and what a resume finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.errors import Retryable, UserError
from common.run_folder import step_dir
from model.reference import Reference
from tests.support.configs import config_in
from tests.support.plain_policy import OneRank, PlainPolicy
from tests.support.tiny import tiny_model
from trainer.save import moving_reference
from trainer.save.write_version import Changes

PROMPT, COMPLETION = [5, 6, 7], [8, 9, 10, 11]


class Follower:
    def __init__(self, folder: Path) -> None:
        model, self.folder = {"path": str(tiny_model(folder / "model")), "dtype": "float32"}, folder
        self.config = config_in(folder, model=model, algorithm={"beta": 0.1}, reference={"sync_steps": 2})
        self.policy: Any = PlainPolicy(folder / "model", changes=Changes(full_every=2))
        self.restart()

    def restart(self) -> None:
        self.reference, tokenizer = (
            Reference(self.config, torch.device("cpu")),
            AutoTokenizer.from_pretrained(self.config.model.path),
        )
        ranks: Any = OneRank()
        self.moving = moving_reference.MovingReference(self.config, self.policy, ranks, tokenizer, self.reference)

    def follow(self, step: int, moves: bool = True) -> tuple[list[float], list[float]]:
        """(log-probs of the policy, of the reference) after this step."""
        if moves:
            self.policy.disturb(step)
        if self.moving.is_due(step):
            self.moving.follow(step, self.policy.publish(self.folder / "weights", step))
        [reference] = self.reference.logprobs(np.array(PROMPT, np.int32), [np.array(COMPLETION, np.int32)])
        return self.policy.logprobs(PROMPT, COMPLETION, 1.0).tolist(), reference.tolist()


def test_every_second_policy_is_the_reference_of_the_steps_behind_it_also_of_a_resumed_run(tmp_path: Path) -> None:
    follower, checkpoint = Follower(tmp_path), step_dir(tmp_path / "run" / "checkpoints", 3)
    begun, seen = follower.follow(0, moves=False), {step: follower.follow(step) for step in (1, 2, 3)}
    checkpoint.mkdir(parents=True)
    seen[4] = follower.follow(4)
    assert [seen[step][1] for step in (1, 2, 3, 4)] == [begun[1], seen[2][0], seen[2][0], seen[4][0]]
    assert seen[1][0] != begun[0] == begun[1] and seen[3][0] != seen[3][1]
    follower.restart()
    assert follower.follow(3, moves=False)[1] == seen[2][0], "what a checkpoint would resume with is kept"
    follower.restart()
    assert follower.follow(4, moves=False)[1] == seen[4][0], "saved on the way out, before anything was published"
    checkpoint.rmdir()
    follower.follow(6)
    assert [path.name for path in (tmp_path / "run" / "reference").iterdir()] == ["step_000006"]
    follower.restart()
    with pytest.raises(UserError, match="step_000004 is gone, the reference since step 4"):
        follower.follow(5)


def test_a_reference_that_is_not_what_was_published_ends_the_run_with_the_tensors_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, keep = Follower(tmp_path), moving_reference.keep_version

    def damaged(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.norm.weight"][3] += 2**-20
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(moving_reference, "keep_version", damaged)
    with pytest.raises(Retryable, match=r"model\.norm\.weight is .*, published was"):
        follower.follow(2)
