"""Sinks, with packages made here that write down every call: what they are given, and what a resume continues."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from report.run_log import MetricsLog
from report.sinks import _COLUMNS, OWN, require_packages
from tests.unit.trainer.algorithm.test_user_functions import write

# A module whose every attribute is a function that records its call, and an object for `run`.
FAKE = """
import json, os
from types import SimpleNamespace

def _called(name, answer=None):
    def call(*args, **kwargs):
        if os.environ.get("FAILS") == name:
            raise RuntimeError("no network")
        with open({calls!r}, "a") as file:
            file.write(json.dumps([name, list(args), kwargs]) + "\\n")
        return answer
    return call

_run = SimpleNamespace(log=_called("run.log"), finish=_called("run.finish"), define_metric=_called("define_metric"))
init = _called("init", _run)
run, Table = _run, lambda **given: given
"""
SETTINGS = {"trainer": {"max_steps": 3}}


class Sink:
    def __init__(self, folder: Path) -> None:
        self.run, self._calls = folder / "my-run", folder / "calls"
        (folder / "wandb").mkdir()
        (folder / "wandb" / "__init__.py").write_text(FAKE.format(calls=str(self._calls)))
        self.run.mkdir()
        (self.run / "config.json").write_text(json.dumps(SETTINGS))

    def log(self, *steps: int, resume_step: int | None = None, evaluation: bool = False) -> list[list[Any]]:
        """The calls that a process makes which logs these steps, without the `finish` at the end."""
        self._calls.write_text("")
        log = MetricsLog(self.run, ["wandb"], resume_step)
        for step in steps:
            log.log(step, {"reward": step / 2, "kl": None})
        if evaluation:
            log.log_eval({"step": 0, "n": 4, "full_marks": {"answer": 3}, "mean": {"answer": 0.5}})
        log.close()
        *calls, last = self.calls()
        assert last[0] == "run.finish"
        return calls

    def calls(self) -> list[list[Any]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield Sink(tmp_path)
    sys.modules.pop("wandb", None)


def test_wandb_gets_the_step_as_a_value_because_its_own_counter_drops_what_comes_late(sink: Sink):
    (_, _, init), *rest = sink.log(1, 2, evaluation=True)
    identity = json.loads((sink.run / "sinks.json").read_text())["id"]
    assert init == {
        "project": "tandem",
        "id": identity,
        "name": f"my-run-{identity[:6]}",
        "resume": "allow",
        "dir": str(sink.run),
        "config": SETTINGS,
        "save_code": False,
    }
    assert rest == [
        ["define_metric", ["step"], {}],
        ["define_metric", ["*"], {"step_metric": "step"}],
        ["run.log", [{"reward": 0.5, "step": 1}], {}],
        ["run.log", [{"reward": 1.0, "step": 2}], {}],
        ["run.log", [{"eval/answer/accuracy": 0.75, "eval/answer/mean": 0.5, "step": 0}], {}],
    ]
    resumed = sink.log(2, 3, resume_step=1)
    assert resumed[0] == ["init", [], init] and resumed[-1] == ["run.log", [{"reward": 1.5, "step": 3}], {}]


@pytest.mark.parametrize("may_leave", [True, False])
def test_samples_are_a_table_in_wandb_where_they_may_leave_the_machine(sink: Sink, may_leave: bool) -> None:
    (sink.run / "config.json").write_text(json.dumps({"run": {"log_completions": may_leave}}))
    log, told = MetricsLog(sink.run, ["wandb"]), len(sink.calls())
    sample = dict.fromkeys(_COLUMNS, "x") | {"step": 3}
    log.log_samples([sample | {"rewards": {"answer": 1.0, "format": 0.5}, "group_id": 9}])
    table = {"columns": [*_COLUMNS, "answer", "format"], "data": [[3, *"xxxxxx", 1.0, 0.5]]}
    assert sink.calls()[told:] == [["run.log", [{"completions": table, "step": 3}], {}]] * may_leave


def test_a_new_run_in_a_folder_gets_a_name_of_its_own(sink: Sink):
    names = [sink.log(evaluation=True)[0][2]["name"] for _ in range(2)]  # neither made a step: the second starts anew
    assert names[0] != names[1]


def test_a_sink_that_does_not_start_is_refused_and_one_that_fails_later_costs_a_line(sink: Sink, monkeypatch, capsys):
    monkeypatch.setenv("FAILS", "init")
    with pytest.raises(UserError, match=r"wandb does not start: RuntimeError: no network; log in .* or leave"):
        MetricsLog(sink.run, ["wandb"])
    monkeypatch.setenv("FAILS", "run.log")
    log = MetricsLog(sink.run, ["wandb"])
    for step in (1, 2, 3):
        log.log(step, {"reward": 1.0})
    log.close()
    assert len((sink.run / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().err.count("wandb failed (RuntimeError: no network)") == 1
    assert [name for name, *_ in sink.calls()] == ["init", "define_metric", "define_metric"]


def own_sink(folder: Path, *lines: str) -> str:
    return f"{write(folder, *lines)}:sink"


def test_a_sink_of_a_file_gets_the_folder_the_settings_and_every_number(tmp_path: Path) -> None:
    spec = own_sink(
        tmp_path,
        "calls = []",
        "def sink(folder, config):",
        "    calls.append((folder.name, config))",
        "    return lambda step, values: calls.append((step, values)), lambda: calls.append('closed')",
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(SETTINGS))
    log = MetricsLog(tmp_path / "run", [spec])
    log.log(1, {"reward": 0.5})
    log.close()
    first, (step, values), last = OWN.load(spec).function.__globals__["calls"]
    assert (first, step, values["reward"], last) == (("run", SETTINGS), 1, 0.5, "closed")


# as a server that accepts and is silent, and a client that tries again whatever comes
HANGS = {"silent": "time.sleep(60)", "stubborn": "[one() for _ in range(60)]"}


@pytest.mark.parametrize("at", ["open", "write", "close"])
@pytest.mark.parametrize("how", HANGS.values(), ids=HANGS)
def test_a_sink_that_hangs_does_not_hold_up_the_run(how: str, at: str, tmp_path: Path, capsys) -> None:
    lines = ["import time", "def one():", "    try: time.sleep(1)", "    except Exception: pass", f"def hang(): {how}"]
    opens, write, close = ("hang()" if at == name else "None" for name in ("open", "write", "close"))
    lines += ["def sink(folder, config):", f"    {opens}", f"    return lambda step, values: {write}, lambda: {close}"]
    spec = own_sink(tmp_path, *lines)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"channel": {"stall_timeout_s": 3.0}}))
    if at == "open":
        with pytest.raises(UserError, match=r"does not start: TimeoutError: no answer for 0\.5 s"):
            MetricsLog(tmp_path / "run", [spec])
        return
    log = MetricsLog(tmp_path / "run", [spec])
    for step in (1, 2):
        log.log(step, {"reward": 1.0})
    log.close()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert capsys.readouterr().err.count("failed (TimeoutError: no answer for 0.5 s)") == 1


def test_a_sink_of_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run.report_to '.*mine.py:sink' wants 'key'; it gets folder, config"):
        MetricsLog(tmp_path, [own_sink(tmp_path, "def sink(key): ...")])
    with pytest.raises(UserError, match=r"no file .*/absent.py"):
        require_packages([f"{tmp_path}/absent.py:sink"])
    said = r"mine.py:sink' returned NoneType; return two functions: write\(step, values\)"
    with pytest.raises(UserError, match=said):
        MetricsLog(tmp_path, [own_sink(tmp_path, "def sink(): ...")])


def test_a_missing_package_is_told_with_the_pip_line_and_a_folder_of_logs_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "some_sink").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("no_such_sink", "some_sink"):
        with pytest.raises(UserError, match=rf"python -m pip install {name}, or .* run\.report_to=\[tensorboard\]"):
            require_packages(["tensorboard", name])
