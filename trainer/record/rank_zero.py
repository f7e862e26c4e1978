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
    """The objects that only rank 0 has."""

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
    """Opens the records, the display, and the link to the samplers or to a recording.

    stack: closes them all. batch, cursor: the numbers of trained batches and of trained groups.
    resumed_at: the checkpoint's step and policy version, (None, None) without a checkpoint.
    """
    output_dir = config.run.output_dir
    weights_dir = weights.default_dir(config)
    durable.make_private(weights_dir)
    for folder in (weights_dir, output_dir, output_dir / CHECKPOINTS):
        durable.remove_leftovers(folder)
    weights.remove_versions(weights_dir)  # of an earlier start, as this start publishes its own
    public = redacted(config.model_dump(mode="json"))
    public_json = json.dumps(public, indent=1, ensure_ascii=False)
    durable.write_file(output_dir / "config.json", public_json.encode())
    log = MetricsLog(output_dir, config.run.report_to, *resumed_at)
    stack.callback(log.close)
    display = StepDisplay(config)
    steps = read_jsonl(output_dir / "metrics.jsonl")
    evaluations = read_jsonl(output_dir / "eval.jsonl")
    display.recall(steps, evaluations)
    for note in [config.uneven_work(world_size()), *expert_warnings(config)]:
        if note:
            display.note(note)
    stack.callback(_remove_versions, weights_dir)
    recorder = None
    if (
        config.run.record and config.run.replay is None
    ):  # a recording is not cut while it is replayed
        recorder = Recorder(output_dir / FILE, cursor)
        stack.callback(recorder.close)
    incarnation = secrets.token_hex(8)
    if config.run.replay is not None:
        needs_reference = config.reference_on == "sampler"
        needs_routing = config.algorithm.router_replay
        replay = Replay(config.run.replay, incarnation, needs_reference, needs_routing)
        return RankZero(replay, recorder, log, display)
    ledger = Ledger(cursor + config.groups_after(batch), config.window, cursor)
    inbox = Inbox(config, run_id, incarnation, _limits(config), ledger, display.note)
    return RankZero(stack.enter_context(inbox), recorder, log, display)


def _remove_versions(weights_dir: Path) -> None:
    # a failing disk must not hide why the run ends, and the next start tries again
    with contextlib.suppress(OSError):
        weights.remove_versions(weights_dir)


def _limits(config: Config) -> Limits:
    images = None
    vision = vision_of(config)
    if vision is not None:
        images = ImageLimits(
            max_images=config.data.limit_images,
            max_pixels=config.data.max_pixels,
            patch_size=vision.form.patch_size,
            merge_size=vision.form.merge_size,
            image_token=vision.image,
        )
    experts = None
    if config.algorithm.router_replay:
        experts = expert_counts(config.model)
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
        experts=experts,
    )
