"""Training runs from Python, and the `tandem` command: both call launch.sh in the caller's folder.

No other module of ours is imported: the caller may be the kernel of a notebook, with modules of its own. The run uses
the interpreter of `bash launch.sh setup`, or else the caller's. Reward functions are passed as files: their own or, for
a function of a notebook or script, a closure or an object, a file with the cloudpickled value and its source to read.
"""

import base64
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "launch.sh").exists() else _HERE.parent  # installed by pip, or a clone
_LAUNCH = ["bash", str(ROOT / "launch.sh")]
_REWARD_FILE = """import base64, sys
import cloudpickle
if sys.version_info[:2] != {version}:
    raise ImportError("it was given by Python %s.%s; give it again by this one" % {version})
sys.path += {path}
{name} = cloudpickle.loads(base64.b64decode("{pickled}"))
# {source}
"""


class RunError(RuntimeError):
    """An error for a run that does not finish. exit_code: launch.sh's; 2 needs a change, 75 may be resumed."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunFolder:
    """The results of a run so far: RunFolder("runs/mine"). A notebook shows its curves."""

    path: str | Path

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Returns rows of metrics (docs/metrics.md), eval or samples, oldest first, without one being written."""
        lines = Path(self.path, f"{name}.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def report(self) -> str:
        """Returns the report of `launch.sh report`, and draws the curves anew."""
        return subprocess.check_output([*_LAUNCH, "report", self.path], env=_environment(), text=True)

    def _repr_png_(self) -> bytes | None:
        return curves.read_bytes() if (curves := Path(self.path, "curves.png")).exists() else None


def train(
    config: str | Path | Mapping[str, Any], *overrides: str, rewards: Sequence[str | Callable[..., Any]] = ()
) -> RunFolder:
    """Trains as `bash launch.sh run config overrides…` does, but paths count from the current folder.

    config: a YAML file, or its sections. overrides: "trainer.max_steps=20". rewards: functions or names, instead
    of rewards.reward_funcs. Raises RunError, and KeyboardInterrupt when its step is saved.
    """
    is_path, names = isinstance(config, str | Path), [_reward_name(reward) for reward in rewards]
    settings = json.dumps(config, indent=1, default=str)  # as YAML, which does not join an emoji's surrogates
    settings = re.sub(r"\\ud[89ab]..\\ud[c-f]..", lambda pair: str(json.loads(f'"{pair[0]}"')), settings)
    file = str(config) if is_path else _write_by_digest("settings", ".yaml", settings)
    words = [file, *overrides, *([f"rewards.reward_funcs={json.dumps(names, ensure_ascii=False)}"] if names else [])]
    process = subprocess.Popen(
        [*_LAUNCH, "run", *words], env=_environment() | {"TANDEM_OF_PYTHON": "1"}, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal is passed on by us: of two the second would not wait
    )  # fmt: skip
    assert process.stdout is not None
    output = ""
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                output += line
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    code = process.wait()
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        messages = re.split("^tandem: ", output, flags=re.MULTILINE)
        reports_of_end = [text for text in messages if ("trainer: " if code == 75 else "lines of its log:\n") in text]
        reason = (reports_of_end or messages)[-1].strip()  # the other processes also print how they end
        raise RunError(reason.rpartition("\n    tandem: ")[2] if code == 2 else reason, code)
    [folder] = re.findall(r"^tandem: trainer on .*; log (.*)/logs/trainer\.log$", output, re.MULTILINE)
    return RunFolder(Path(folder).absolute())


def command() -> NoReturn:
    """Runs the command `tandem words…` as `bash launch.sh words…`, with the launch.sh that pip installed."""
    os.execvpe("bash", [*_LAUNCH, *sys.argv[1:]], _environment())


def _environment() -> dict[str, str]:
    own, path = ROOT / ".venv/bin/python", filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    ours = {"PYTHONPATH": os.pathsep.join(path), "MPLBACKEND": "agg"}  # a notebook's backend may need its own package
    return {**os.environ, "TANDEM_PYTHON": str(own) if own.exists() else sys.executable, **ours}


def _reward_name(function: Callable[..., Any] | str) -> str:
    """Returns a function's name for rewards.reward_funcs. Raises RunError if the function cannot be moved."""
    if isinstance(function, str):
        return function
    name, home = getattr(function, "__name__", type(function).__name__), getattr(function, "__module__", None) or ""
    file = getattr(module := sys.modules.get(home), "__file__", None) or ""
    if home.isidentifier() and home != "__main__" and file.endswith(".py") and vars(module).get(name) is function:
        return f"{os.path.abspath(file)}:{name}"
    name = name if name.isidentifier() else "reward"
    try:
        import cloudpickle

        for key, other in list(sys.modules.items()):
            is_ours = str(getattr(other, "__file__", ROOT)).startswith(str(ROOT))
            if not is_ours and (ROOT / key.partition(".")[0]).is_dir():
                cloudpickle.register_pickle_by_value(other)  # by its name it would be ours in the run
        pickled = base64.b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:
        raise RunError(
            f"reward {name} cannot be moved to its own process: {error}. Make what it uses inside the function, or "
            f'write it into a file: rewards=["my_reward.py:{name}"]'
        ) from error
    source = "an object, or typed at a prompt: no source"
    with suppress(OSError, TypeError):
        source = inspect.getsource(function).replace("\n", "\n# ")
    installed = tuple(sysconfig.get_paths().values())
    path = [place for place in map(os.path.abspath, sys.path) if not place.startswith(installed)]  # to find its modules
    values = {"version": sys.version_info[:2], "path": path, "name": name, "pickled": pickled, "source": source}
    return _write_by_digest(name, ".py", _REWARD_FILE.format(**values)) + f":{name}"


def _write_by_digest(name: str, ending: str, text: str) -> str:
    """Writes the text to a file that no other text replaces, so that an earlier run finds its own. Returns the path."""
    file = Path(".cache/given", f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}{ending}").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(text)
    return str(file)
