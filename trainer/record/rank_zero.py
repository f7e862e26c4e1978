"""What only rank 0 has: where groups come from, and where the run is recorded and shown."""

from __future__ import annotations

from dataclasses import dataclass

from report.display import StepDisplay
from report.run_log import MetricsLog
from trainer.link.recording import Recorder
from trainer.link.source import GroupSource


@dataclass(frozen=True)
class RankZero:
    source: GroupSource
    recorder: Recorder | None  # of the groups that are trained
    log: MetricsLog
    display: StepDisplay
