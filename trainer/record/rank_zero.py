"""The objects that only rank 0 has: the source of groups, the run's records and its display."""

import contextlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from common import durable
from common.config import Config, world_size
from common.files import weights
from common.files.run_folder import CHECKPOINTS
from common.redact import redacted
from common.wire.group_limits import ImageLimits, Limits
from model.files.folder import expert_counts, expert_warnings, vocabulary
from model.files.images import vision_of
from report.display import StepDisplay
from report.run_log import MetricsLog, read_jsonl
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger
from trainer.link.recording import FILE, Recorder, Replay
from trainer.link.source import GroupSource


@dataclass(frozen=True)
class RankZero:
    source: GroupSource
    recorder: Recorder | None  # records the groups that are trained
    log: MetricsLog
    display: StepDisplay

    def sync(self) -> None:
        """Makes the records of all steps so far survive a crash of the machine."""
        self.log.sync()
        if self.recorder:
            self.recorder.sync()


def open_rank_zero(
    stack: contextlib.ExitStack,
    config: Config,
    run_id: str,
    batch: int,
    cursor: int,
    resumed_at: tuple[int | None, int | None],
) -> RankZero:
    """Opens the records, the display, and the link to the samplers or a recording; `stack` closes them.

    batch, cursor: numbers of trained batches and groups. resumed_at: step and policy version of the checkpoint, if any.
    """
    output_dir = config.run.output_dir
    weights_dir = weights.default_dir(config)
    durable.make_private(weights_dir)
    for folder in (weights_dir, output_dir, output_dir / CHECKPOINTS):
        durable.remove_leftovers(folder)
    weights.remove_versions(weights_dir)  # those of an earlier start: this one publishes its own first
    public = redacted(config.model_dump(mode="json"))
    durable.write_file(output_dir / "config.json", json.dumps(public, indent=1, ensure_ascii=False).encode())
    log = MetricsLog(output_dir, config.run.report_to, *resumed_at)
    stack.callback(log.close)
    display = StepDisplay(config)
    display.recall(read_jsonl(output_dir / "metrics.jsonl"), read_jsonl(output_dir / "eval.jsonl"))
    for note in filter(None, [config.uneven_work(world_size()), *expert_warnings(config)]):
        display.note(note)
    stack.callback(_remove_versions, weights_dir)
    records = config.run.record and config.run.replay is None  # a recording must not be cut while it is replayed
    recorder = Recorder(output_dir / FILE, cursor) if records else None
    if recorder is not None:
        stack.callback(recorder.close)
    incarnation = secrets.token_hex(8)
    if config.run.replay is not None:
        needs_reference = config.reference_on == "sampler"
        replay = Replay(config.run.replay, incarnation, needs_reference, config.algorithm.router_replay)
        return RankZero(replay, recorder, log, display)
    ledger = Ledger(cursor + config.groups_after(batch), config.window, cursor)
    inbox = Inbox(config, run_id, incarnation, _limits(config), ledger, display.note)
    return RankZero(stack.enter_context(inbox), recorder, log, display)


def _remove_versions(weights_dir: Path) -> None:
    with contextlib.suppress(OSError):  # a failing disk must not hide why the run ends; the next start tries again
        weights.remove_versions(weights_dir)


def _limits(config: Config) -> Limits:
    replays, vision, images = config.algorithm.router_replay, vision_of(config), None
    if vision is not None:
        sizes = config.data.limit_images, config.data.max_pixels
        images = ImageLimits(*sizes, vision.form.patch_size, vision.form.merge_size, vision.image)
    return Limits(
        vocab_size=vocabulary(config.model),
        num_generations=config.sampler.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.sampler.max_completion_length,
        needs_ref_logprobs=config.reference_on == "sampler",
        reward_funcs=tuple(config.rewards.names),
        max_sampling_mask=config.sampler.max_sampling_mask,
        images=images,
        max_turns=config.max_turns,
        in_flight_updates=config.sampler.in_flight_updates,
        experts=expert_counts(config.model) if replays else None,
    )
