"""reference.sync_steps: which policy is the reference of a step, that it was published, and what a resume finds."""

from pathlib import Path
from typing import Any

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
from trainer.save.moving_reference import MovingReference

ROW = ([5, 6, 7], [8, 9, 10, 11])


class Bench:
    def __init__(self, folder: Path, every: int = 2) -> None:
        model = {"path": str(tiny_model(folder / "model")), "dtype": "float32"}
        self.config = config_in(folder, model=model, algorithm={"beta": 0.1}, reference={"sync_steps": every})
        self.policy: Any = PlainPolicy(folder / "model")
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder / "model")
        self.restart()

    def restart(self) -> None:
        """As a resumed process begins: with the reference of the run's start."""
        self.reference = Reference(self.config, torch.device("cpu"))
        self.moving = MovingReference(self.config, self.policy, OneRank(), self.tokenizer, self.reference)

    def reach(self, step: int) -> None:
        self.policy.disturb(step)
        self.follow(step)

    def follow(self, step: int) -> None:
        if self.moving.is_due(step):
            self.moving.follow(step, self.policy.publish(self.folder / "weights", step))

    def of_policy(self) -> list[float]:
        return self.policy.logprobs(*ROW, 1.0).tolist()

    def of_reference(self) -> list[float]:
        prompt, completion = (torch.tensor(ids).numpy() for ids in ROW)
        return self.reference.logprobs(prompt, [completion])[0].tolist()

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run" / "reference").iterdir())


def test_every_second_policy_is_the_reference_of_the_steps_behind_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.of_reference()
    bench.reach(1)
    assert bench.of_reference() == first != bench.of_policy()
    bench.reach(2)
    second = bench.of_policy()
    bench.reach(3)
    assert bench.of_reference() == second != bench.of_policy()
    bench.reach(4)
    assert bench.of_reference() == bench.of_policy() and bench.kept() == ["step_000004"]


def test_a_resumed_run_has_the_reference_of_its_checkpoint_and_none_that_a_checkpoint_needs_is_removed(
    tmp_path: Path,
) -> None:
    bench, checkpoints = Bench(tmp_path), tmp_path / "run" / "checkpoints"
    bench.reach(2)
    second = bench.of_policy()
    step_dir(checkpoints, 3).mkdir(parents=True)
    bench.reach(4)
    assert bench.kept() == ["step_000002", "step_000004"]
    bench.restart()
    bench.follow(3)
    assert bench.of_reference() == second
    bench.restart()
    bench.follow(4)  # saved on the way out, before anything was published: made again of the checkpoint's weights
    assert bench.of_reference() == bench.of_policy()
    bench.restart()
    with pytest.raises(UserError, match="step_000006 is gone, the reference since step 6"):
        bench.follow(7)


def test_a_reference_that_is_not_what_was_published_ends_the_run_with_the_tensors_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, keep = Bench(tmp_path), moving_reference.keep_version

    def damaged(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.norm.weight"][3] += 2**-20
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(moving_reference, "keep_version", damaged)
    with pytest.raises(Retryable, match=r"model\.norm\.weight is .*, published was"):
        bench.reach(2)
