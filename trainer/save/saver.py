"""Schedule of checkpoints: every so many steps, or every ten minutes, and when the run must end.

Checkpoints are always saved between two batches of rollouts, where the cursor and the weights
belong together. Saving has no effect on training: the weights are equal to the bit with or without
it. Rank 0's clock measures the ten minutes for all ranks.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common.config import Config
from common.files.run_folder import CHECKPOINTS
from common.processes.watchdog import report_progress
from trainer.engine.critic import Critic
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save import checkpoint
from trainer.save.checkpoint import RunState
from trainer.save.disk import retry_on_disk_trouble, sharing_disk_trouble

_INTERVAL_S = 600  # seconds between checkpoints, if trainer.save_steps is not set


class Saver:
    """Saves checkpoints when they are due. Every rank calls every method.

    The ten minutes are counted from the last save, or from this object's creation.
    """

    def __init__(  # noqa: PLR0913 two models, and everything else that a checkpoint contains
        self,
        config: Config,
        engine: PolicyEngine,
        critic: Critic | None,
        collectives: Collectives,
        tokenizer: Any,
        say: Callable[[str], None],
        sync_history: Callable[[], None],  # on rank 0: writes the records of all steps to the disk
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
        step: int,  # the step from which the run starts
    ):
        self.config = config
        self.engine = engine
        self.critic = critic
        self.collectives = collectives
        self.tokenizer = tokenizer
        self._say = say
        self._sync_history = sync_history
        self._seconds = seconds
        self.saved_step = step  # the step of the newest checkpoint, or the first `step`
        self._saved_at = time.monotonic()

    def save_if_due(self, run_state: RunState) -> None:
        """Saves a checkpoint if one is due after the batch that was just trained.

        That is so if the batch's steps include a multiple of trainer.save_steps, or, if this
        setting is null, if the last checkpoint is at least ten minutes old.
        """
        save_steps = self.config.trainer.save_steps
        if save_steps is None:
            is_due = self.collectives.agree(time.monotonic() - self._saved_at >= _INTERVAL_S)
        elif save_steps == 0:
            is_due = False
        else:
            step_before = run_state.step - self.config.algorithm.steps_per_batch
            is_due = run_state.step // save_steps > step_before // save_steps
        if is_due:
            self._save(run_state)

    def save_before_the_end(self, run_state: RunState, is_between_batches: bool) -> None:
        """Saves a last checkpoint if the run is between two batches and saves checkpoints at all.

        Inside a batch it only tells the user which checkpoint is the newest. It cannot save there,
        because the batch's first steps have already changed the weights, and a resumed run would
        repeat them.
        """
        if not self.config.trainer.saves_checkpoints or run_state.step == self.saved_step:
            return
        if is_between_batches:
            self._save(run_state)
        elif self.collectives.rank == 0:
            num_steps = self.config.algorithm.steps_per_batch
            self._say(
                f"interrupted inside a batch of {num_steps} steps, where nothing can be saved: "
                f"the newest checkpoint is still that of step {self.saved_step}"
            )

    def _save(self, run_state: RunState) -> None:
        report_progress(f"saving the checkpoint of step {run_state.step}")
        start = time.monotonic()
        # first, because after a crash no checkpoint may be newer than the records of its steps
        retry_on_disk_trouble(self.collectives, "the run's history", self._sync_history_on_rank_0)
        checkpoint.save(
            self.engine,
            self.collectives,
            self.tokenizer,
            self.config.run.output_dir / CHECKPOINTS,
            run_state,
            keep=self.config.trainer.save_limit,
            critic=self.critic,
        )
        self.saved_step = run_state.step
        self._saved_at = time.monotonic()
        self._seconds["timing/checkpoint_s"] += time.monotonic() - start

    def _sync_history_on_rank_0(self) -> None:
        with sharing_disk_trouble(self.collectives):
            if self.collectives.rank == 0:
                self._sync_history()
