"""The moving reference (reference.sync_steps): the policy of every n-th step (TR-DPO, arXiv 2404.09656, with α = 1).

    RUN/reference/step_000040/     a Hugging Face folder of the version that the samplers got, with its manifest

Every rank loads it from this folder and compares its tensors with the manifest's checksums, as samplers do. The step's
number determines the reference of a step, so a resumed run loads the one that its checkpoint trained with.
"""

import shutil
from pathlib import Path
from typing import Any

from common import durable
from common.config import Config
from common.errors import Retryable, UserError
from common.files.run_folder import checkpoints, step_dir, step_dirs
from common.files.weights import MANIFEST, Published, tensors_of
from common.processes.watchdog import report_progress
from model.checksum import describe
from trainer.engine.deepspeed_insides import gathered
from trainer.engine.exported import exported
from trainer.engine.ranks import Exchange
from trainer.save.best import keep_version
from trainer.save.disk import reporting_failed_deletion, write_folder


class MovingReference:
    """The reference that is replaced by the policy of every n-th step. Every rank calls every method."""

    def __init__(self, config: Config, engine: Any, ranks: Exchange, tokenizer: Any, reference: Any):
        self.config, self._engine, self._ranks, self._tokenizer = config, engine, ranks, tokenizer
        self._reference, self._every = reference, config.reference.sync_steps
        self._folder, self._present = config.run.output_dir / "reference", 0

    def _step_for(self, step: int) -> int:
        """Returns the step whose policy is the reference after `step`; 0: the policy that the run started with."""
        return step // self._every * self._every if self._every else 0

    def is_due(self, step: int) -> bool:
        return self._step_for(step) != self._present

    def follow(self, step: int, published: Published) -> None:
        """Replaces the reference. published: `step`'s version, on disk. Raises UserError if a needed one is gone."""
        self._present = self._step_for(step)
        folder = step_dir(self._folder, self._present)
        report_progress(f"making the policy of step {self._present} the reference")
        if self._present == step:
            write_folder(self._ranks, folder, lambda new: self._keep(new, published))
        elif not self._ranks.agree(folder.is_dir()):
            raise UserError(f"{folder} is gone, the reference since step {self._present}; start a run without resume")
        assert self._reference is not None
        self._reference.replace(str(folder))
        expected, found = tensors_of(folder), {}
        for tensor in exported(self._reference.model, self.config.lora):
            with gathered(tensor.parameters):
                found[tensor.name] = describe(tensor.make())
        if wrong := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
            raise Retryable(f"{folder}: {wrong[0]} is {found.get(wrong[0])}, published was {expected.get(wrong[0])}")
        if self._ranks.rank == 0:
            with reporting_failed_deletion("an old reference"):
                self._prune()

    def _keep(self, folder: Path, published: Published) -> None:
        keep_version(folder, published, self._engine, self._tokenizer)
        shutil.copyfile(Path(published.weights_dir) / MANIFEST, folder / MANIFEST)

    def _prune(self) -> None:
        """Removes references with which no kept checkpoint would resume."""
        resumed = (int(path.name.removeprefix("step_")) for path in checkpoints(self.config.run.output_dir))
        needed = {step_dir(self._folder, step) for step in (self._present, *map(self._step_for, resumed))}
        for path in {*step_dirs(self._folder)} - needed:
            durable.remove_dir(path)
