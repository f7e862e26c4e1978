"""Copies of the run's numbers for other programs: TensorBoard, Weights & Biases, or a function of the user's.

metrics.jsonl stays authoritative. A sink's package is imported only when run.report_to names it; one that is missing,
or does not start, is an error before any model is loaded. A sink that fails later or hangs is dropped with a printed
line, because a lost copy must not end a run. A resumed run continues under its name at the sink, kept in the run
folder's sinks.json. Samples are sent to somebody else's server only if run.log_completions is true. Left out: files.
"""

import importlib
import importlib.util
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.durable import write_file
from common.errors import UserError, with_type
from common.processes.exits import say
from common.processes.time_limits import WALL_TIME, within
from common.processes.watchdog import report_progress
from common.user_code.functions import Contract

_COLUMNS = ("step", "problem_index", "which", "prompt", "completion", "finish_reason", "reward")
Write = Callable[[int, Mapping[str, float]], None]
Close = Callable[[], None]
T = TypeVar("T")
OWN = Contract("run.report_to", ("folder", "config"), (), "def sink(folder, config)")


def require_packages(report_to: Iterable[str]) -> None:
    """Raises UserError with the pip line if a package is missing, or if a user's own sink is. Imports none of them."""
    for name in report_to:
        if not name.isidentifier():  # path/file.py:function or package.module.function
            OWN.require(name)
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of logs named wandb/ is no package
            rest = [other for other in report_to if other != name]
            raise UserError(
                f"run.report_to names {name}, whose package is not installed; install it: "
                f".venv/bin/python -m pip install {name}, or leave it out: run.report_to=[{', '.join(rest)}]"
            )


class Sinks:
    """The sinks of one process. `is_resumed`: continue what an earlier process of this run began.

    last_step: the last step of the kept history; later steps of a crashed process are hidden if a sink can do that.
    """

    def __init__(self, folder: Path, report_to: Sequence[str], last_step: int, is_resumed: bool) -> None:
        require_packages(report_to)
        self._open: dict[str, tuple[Write, Close]] = {}
        config = saved_settings(folder)
        self._sends_samples = config.get("run", {}).get("log_completions", False)
        self._patience_s = config.get("channel", {}).get("stall_timeout_s", 1800.0) / 6
        known = {"tensorboard": partial(_tensorboard, folder, last_step), "wandb": partial(_wandb, folder, is_resumed)}
        for name in report_to:
            try:
                self._open[name] = self._soon(known.get(name) or partial(_own, name, folder))
            except UserError:
                raise
            except Exception as error:
                raise UserError(
                    f"run.report_to: {name} does not start: {with_type(error)}; "
                    f"log in as its documentation says, or leave {name} out of run.report_to"
                ) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        for name, (write, _) in list(self._open.items()):
            self._guard(name, partial(write, step, numbers))

    def write_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Sends a table of a step's completions, as MetricsLog.log_samples takes them, if they may leave this host."""
        if self._sends_samples and records and "wandb" in self._open:
            wandb = importlib.import_module("wandb")
            columns = [*_COLUMNS, *records[0]["rewards"]]
            rows = [[*(record.get(name) for name in _COLUMNS), *record["rewards"].values()] for record in records]
            table = {"completions": wandb.Table(columns=columns, data=rows), "step": records[0]["step"]}
            self._guard("wandb", lambda: wandb.run.log(table))

    def close(self) -> None:
        for name, (_, close) in list(self._open.items()):
            self._guard(name, close)
        self._open.clear()

    def _guard(self, name: str, act: Close) -> None:
        report_progress(f"writing to {name}")
        try:
            self._soon(act)
        except Exception as error:
            del self._open[name]
            say(
                f"{name} failed ({with_type(error)}) and gets nothing more from this process; "
                "metrics.jsonl has everything"
            )

    def _soon(self, act: Callable[[], T]) -> T:
        """Returns the result of `act`. Raises TimeoutError if that takes too long, because no run waits for a copy."""
        late = TimeoutError(f"no answer for {self._patience_s:g} s")
        done = within(self._patience_s, act, late, WALL_TIME)
        if isinstance(done, TimeoutError):
            raise done
        return done


def saved_settings(folder: Path) -> dict[str, Any]:
    """Returns the run's settings, which were written without secrets; {} if it has not begun."""
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _own(name: str, folder: Path) -> tuple[Write, Close]:
    """Opens a user's `def sink(folder, config)`, which returns write(step, values) and close()."""
    sink = OWN.load(name)
    opened = sink(folder=folder, config=saved_settings(folder))
    if not (isinstance(opened, tuple) and len(opened) == 2 and all(map(callable, opened))):
        raise UserError(
            f"{sink.label} returned {type(opened).__name__}; return two functions: write(step, values), close()"
        )
    return opened


def _tensorboard(folder: Path, last_step: int) -> tuple[Write, Close]:
    module = importlib.import_module("torch.utils.tensorboard")
    # purge_step hides events that a crashed process of this run wrote beyond its checkpoint.
    writer = module.SummaryWriter(str(folder / "tb"), purge_step=last_step + 1, flush_secs=10)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, is_resumed: bool) -> tuple[Write, Close]:
    wandb = importlib.import_module("wandb")
    kept = folder / "sinks.json"  # the run's id at wandb, for processes that continue the run
    if not is_resumed or not kept.exists():
        write_file(kept, json.dumps({"id": secrets.token_hex(11)}).encode())
    identity = str(json.loads(kept.read_text())["id"])
    name = f"{folder.resolve().name}-{identity[:6]}"
    where: dict[str, Any] = {"project": "tandem", "id": identity, "name": name, "dir": str(folder)}
    run = wandb.init(**where, resume="allow", config=saved_settings(folder), save_code=False)
    # wandb's own counter only grows and drops late values: evaluations, and steps that a resumed run makes again
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda step, values: run.log({**values, "step": step}), run.finish
