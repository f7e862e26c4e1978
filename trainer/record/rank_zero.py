"""The objects that only rank 0 has: the source of groups, the run's records and the display."""

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
    recorder: Recorder | None  # records the groups that are trained; None: run.record is off
    log: MetricsLog
    display: StepDisplay

    def sync(self) -> None:
        """Ensures that the records of all steps so far survive a crash of the machine."""
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

    stack: the exit stack that will close them. batch, cursor: how many batches and how many groups
    have been trained so far. resumed_at: the checkpoint's step and policy version, (None, None)
    without a checkpoint.
    """
    output_dir = config.run.output_dir
    weights_dir = weights.default_dir(config)
    _prepare_folders(config, weights_dir)
    resume_step, resume_version = resumed_at
    log = MetricsLog(output_dir, config.run.report_to, resume_step, resume_version)
    stack.callback(log.close)
    display = _open_display(config)
    stack.callback(_remove_versions, weights_dir)

    is_replay = config.run.replay is not None
    recorder = None
    if config.run.record and not is_replay:  # a replay must not truncate what it may be reading
        recorder = Recorder(output_dir / FILE, cursor)
        stack.callback(recorder.close)
    source = _open_source(stack, config, run_id, batch, cursor, display)
    return RankZero(source, recorder, log, display)


def _prepare_folders(config: Config, weights_dir: Path) -> None:
    """Removes the temporary files and the weights of an earlier start, and writes config.json."""
    output_dir = config.run.output_dir
    durable.make_private(weights_dir)
    for folder in (weights_dir, output_dir, output_dir / CHECKPOINTS):
        durable.remove_leftovers(folder)
    weights.remove_versions(weights_dir)
    public = redacted(config.model_dump(mode="json"))
    public_json = json.dumps(public, indent=1, ensure_ascii=False)
    durable.write_file(output_dir / "config.json", public_json.encode())


def _open_display(config: Config) -> StepDisplay:
    """Returns the display, which has read the run's recorded steps and shown warnings."""
    output_dir = config.run.output_dir
    display = StepDisplay(config)
    steps = read_jsonl(output_dir / "metrics.jsonl")
    evaluations = read_jsonl(output_dir / "eval.jsonl")
    display.recall(steps, evaluations)
    for note in [config.uneven_work(world_size()), *expert_warnings(config)]:
        if note:
            display.note(note)
    return display


def _open_source(
    stack: contextlib.ExitStack,
    config: Config,
    run_id: str,
    batch: int,
    cursor: int,
    display: StepDisplay,
) -> GroupSource:
    """Opens the recording to replay, or else the link to the samplers."""
    incarnation = secrets.token_hex(8)
    if config.run.replay is not None:
        return Replay(
            config.run.replay,
            incarnation,
            needs_reference=config.reference_on == "sampler",
            needs_routing=config.algorithm.router_replay,
        )
    num_groups = cursor + config.groups_after(batch)
    ledger = Ledger(total=num_groups, window=config.window, cursor=cursor)
    inbox = Inbox(config, run_id, incarnation, _limits(config), ledger, display.note)
    return stack.enter_context(inbox)


def _remove_versions(weights_dir: Path) -> None:
    # an error of the disk must not hide why the run ends, and the next start tries again
    with contextlib.suppress(OSError):
        weights.remove_versions(weights_dir)


def _limits(config: Config) -> Limits:
    """Returns what a received group must satisfy, by the config and the model's files."""
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
