"""Schedule of checkpoints: every so many steps, or every ten minutes, and before an end that somebody asked for.

They are always saved between two batches of rollouts, where cursor and weights agree. Saving leaves no trace in the
run, which trains to the same bits with or without it. Minutes are those of rank 0's clock, which decides for all ranks.
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
from trainer.engine.ranks import Exchange
from trainer.save import checkpoint
from trainer.save.checkpoint import Progress
from trainer.save.disk import on_rank_0, retry_on_disk_trouble


class Saver:
    """Saves checkpoints when due. Every rank calls every method. Minutes count from the last save, or from creation."""

    def __init__(  # noqa: PLR0913 two models, and all that a checkpoint is made of
        self,
        config: Config,
        engine: PolicyEngine,
        critic: Critic | None,
        exchange: Exchange,
        tokenizer: Any,
        say: Callable[[str], None],
        sync_history: Callable[[], None],  # on rank 0: makes records of the steps so far survive a crash
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
        step: int,
    ):
        self.config, self.engine, self.critic, self.exchange = config, engine, critic, exchange
        self.tokenizer, self._say = tokenizer, say
        self._sync_history, self._seconds = sync_history, seconds
        self.saved_step = step  # the step of the newest checkpoint, or of the start
        self._saved_at = time.monotonic()

    def save_if_due(self, progress: Progress) -> None:
        """Saves after a batch if a step of it reached a multiple of save_steps, or without those every ten minutes."""
        every, step = self.config.trainer.save_steps, progress.step
        if every is None:
            is_due = self.exchange.agree(time.monotonic() - self._saved_at >= 600)
        else:
            is_due = every > 0 and step // every > (step - self.config.algorithm.steps_per_batch) // every
        if is_due:
            self._save(progress)

    def save_before_the_end(self, progress: Progress, is_between_batches: bool) -> None:
        """Saves the state after the last whole batch, unless a step of the next one has moved the weights already."""
        if not self.config.trainer.saves_checkpoints or progress.step == self.saved_step:
            return
        if is_between_batches:
            self._save(progress)
        elif self.exchange.rank == 0:
            done = f"interrupted inside a batch of {self.config.algorithm.steps_per_batch} steps"
            self._say(f"{done}: the newest checkpoint is still that of step {self.saved_step}")

    def _save(self, progress: Progress) -> None:
        report_progress(f"saving the checkpoint of step {progress.step}")
        start = time.monotonic()
        # a checkpoint must not outlive the records of the steps before it
        retry_on_disk_trouble(self.exchange, "the run's history", lambda: on_rank_0(self.exchange, self._sync_history))
        folder, keep = self.config.run.output_dir / CHECKPOINTS, self.config.trainer.save_limit
        checkpoint.save(self.engine, self.exchange, self.tokenizer, folder, progress, keep, self.critic)
        self.saved_step, self._saved_at = progress.step, time.monotonic()
        self._seconds["timing/checkpoint_s"] += time.monotonic() - start
