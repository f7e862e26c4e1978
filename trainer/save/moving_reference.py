"""The moving reference (reference.sync_steps): the policy of every n-th step.

This is the hard update of TR-DPO (arXiv 2404.09656), with α = 1.

    RUN/reference/step_000040/     a Hugging Face folder of the version that the samplers got,
                                   with its manifest

Every rank loads the reference from this folder and compares its tensors with the manifest's
checksums, as samplers do. The number of the step alone determines which policy is the reference, so
a resumed run loads the same reference that its checkpoint trained with.
"""

import shutil
from functools import partial
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
from trainer.engine.ranks import Collectives
from trainer.save.best import keep_version
from trainer.save.disk import reporting_failed_deletion, write_folder


class MovingReference:
    """The reference that is replaced by the policy of every n-th step.

    Every rank calls every method.
    """

    def __init__(
        self, config: Config, engine: Any, collectives: Collectives, tokenizer: Any, reference: Any
    ):
        self.config = config
        self._engine = engine
        self._collectives = collectives
        self._tokenizer = tokenizer
        self._reference = reference
        self._sync_steps = config.reference.sync_steps
        self._folder = config.run.output_dir / "reference"
        self._reference_step = 0  # the step whose policy is the reference; 0 = the initial policy

    def _reference_step_after(self, step: int) -> int:
        """Returns the step whose policy must be the reference after `step`; 0 = the initial one."""
        if not self._sync_steps:
            return 0
        return step // self._sync_steps * self._sync_steps

    def is_due(self, step: int) -> bool:
        """Returns whether the reference has to be replaced after this optimizer step."""
        return self._reference_step_after(step) != self._reference_step

    def follow(self, step: int, published: Published) -> None:
        """Replaces the reference by the policy of the latest multiple of sync_steps up to `step`.

        If that multiple is `step` itself, its policy is first written to a folder of reference/.
        Otherwise the run was resumed between two multiples, and the folder must exist already.
        published: the version of `step`, which must be complete on the disk. Raises UserError if
        the folder does not exist, and Retryable if the loaded tensors differ from those that were
        published.
        """
        self._reference_step = self._reference_step_after(step)
        folder = step_dir(self._folder, self._reference_step)
        report_progress(f"making the policy of step {self._reference_step} the reference")
        if self._reference_step == step:
            write_files = partial(self._write_files, published)
            write_folder(self._collectives, folder, finish=write_files)
        else:
            self._require_folder(folder)

        assert self._reference is not None
        self._reference.replace(str(folder))
        self._require_published_tensors(folder)
        if self._collectives.rank == 0:
            with reporting_failed_deletion("an old reference"):
                self._prune()

    def _require_folder(self, folder: Path) -> None:
        """Raises UserError on every rank if rank 0 does not find the reference's folder."""
        exists = self._collectives.agree(folder.is_dir())
        if not exists:
            raise UserError(
                f"{folder} is gone, the reference since step {self._reference_step}; "
                "start a new run, without run.resume"
            )

    def _write_files(self, published: Published, folder: Path) -> None:
        """Writes a published version into `folder`, from which every rank will load the reference.

        The version's manifest is also copied, because it has the checksums of the tensors.
        """
        keep_version(folder, published, self._engine, self._tokenizer)
        shutil.copyfile(Path(published.weights_dir) / MANIFEST, folder / MANIFEST)

    def _require_published_tensors(self, folder: Path) -> None:
        """Raises Retryable if the reference's tensors differ from the manifest in its folder."""
        expected = tensors_of(folder)
        loaded = {}
        for tensor in exported(self._reference.model, self.config.lora):
            with gathered(tensor.parameters):
                loaded[tensor.name] = describe(tensor.make())
        for name in sorted({*loaded, *expected}):
            if loaded.get(name) != expected.get(name):
                raise Retryable(
                    f"{folder}: {name} is {loaded.get(name)}, published was {expected.get(name)}"
                )

    def _prune(self) -> None:
        """Deletes the references that neither this run nor a resume from a checkpoint needs."""
        needed = {step_dir(self._folder, self._reference_step)}
        for checkpoint in checkpoints(self.config.run.output_dir):
            step = int(checkpoint.name.removeprefix("step_"))
            needed.add(step_dir(self._folder, self._reference_step_after(step)))
        for folder in step_dirs(self._folder):
            if folder not in needed:
                durable.remove_dir(folder)
