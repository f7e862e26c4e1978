"""What users' files import: their own helpers, whatever these are called, and Tandem's packages under one name."""

import sys
import textwrap
from pathlib import Path

import pytest

from common.config import Rewards, Rollouts
from common.errors import UserError
from common.user_code.functions import Contract
from common.user_code.user_modules import OURS
from environments import Done
from environments.pool import EnvironmentPool
from environments.tools import Call
from rewards.pool import RewardFailure, RewardPool
from tests.support.own_process import run
from tests.support.speed import limit
from tests.unit.test_imports import PACKAGES

pytestmark = pytest.mark.timeout(120)
BODY = "\ndef f(completions, **columns):\n    return [float({})] * len(completions)\n"


def files(folder: Path, **texts: str) -> Path:
    """my_pack__x="…" is the file my_pack/x.py; my_pack="" beside it an empty my_pack/__init__.py."""
    for name, text in texts.items():
        is_package = any(other.startswith(f"{name}__") for other in texts)
        path = folder / (name.replace("__", "/") + ("/__init__.py" if is_package else ".py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def scores(*names: str) -> dict[str, float]:
    """Of "<answer>4</answer>" for 4, in the process of the rewards."""
    with RewardPool(Rewards(reward_funcs=list(names), timeout_s=limit(20))) as pool:
        pool.submit(1, "2+2?", ["<answer>4</answer>"], [[1, 2]], {"answer": "4"})
        [(_, found)] = pool.ready(timeout_s=limit(30))
    assert not isinstance(found, RewardFailure), found
    return found[0][0]


def test_every_package_of_ours_is_known() -> None:
    assert set(PACKAGES) == OURS | {"tandem"}


@pytest.mark.parametrize("name", ["helpers", *sorted(OURS), "tests", "queue", "msgspec", "numpy"])
def test_a_helper_beside_the_file_is_the_files_alone_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    files(tmp_path, **{name: "number = 7", "mine": f"from {name} import number{BODY.format('number')}"})
    assert scores(f"{tmp_path}/mine.py:f", "answer", "base_acc") == {"f": 7.0, "answer": 1.0, "base_acc": 1.0}


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("import common.limits as limits; number = limits.number", {"common": "", "common__limits": "number = 7"}),
        ("import common.limits; number = common.limits.number", {"common__limits": "number = 7"}),  # no __init__.py
        ("from common import number", {"common": "from common.limits import number", "common__limits": "number = 7"}),
        ("from common import limits; number = limits.number",
         {"common": "", "common__limits": "from report import number", "report": "number = 7"}),
        ("from other import number", {"other": "import report\nnumber = report.number", "report": "number = 7"}),
        ("from .report import number", {"report": "number = 7"}),
        ("import importlib; number = importlib.import_module('report').number", {"report": "number = 7"}),
        ("import json; number = 7", {"json__data": ""}),  # a folder of data is no module
        ("from tandem.rewards import text_of as t; from rewards import text_of\nnumber = 7 * (t is text_of)", {}),
        ("import report, pickle\nnumber = pickle.loads(pickle.dumps(report.Number(7))).n",
         {"report": "class Number:\n    def __init__(self, n): self.n = n"}),
        ("def late():\n    from model import number\n    return number\nnumber = late()", {"model": "number = 7"}),
    ],
)  # fmt: skip
def test_packages_late_imports_and_helpers_own_find_the_same(tmp_path: Path, lines: str, texts: dict[str, str]) -> None:
    files(tmp_path, mine=lines + BODY.format("number"), **texts)
    assert scores(f"{tmp_path}/mine.py:f", "format")["f"] == 7.0


def test_two_folders_have_each_their_own_helper(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        late = BODY.format("number + other()").replace("def f", f"def {name}")
        mine = f"from helpers import number\ndef other():\n    import helpers\n    return helpers.number{late}"
        files(tmp_path / name, helpers=f"number = {number}", mine=mine)
    assert scores(f"{tmp_path}/a/mine.py:a", f"{tmp_path}/b/mine.py:b") == {"a": 2.0, "b": 4.0}


def test_what_a_file_puts_on_the_path_is_found_before_ours_and_leaves_ours_alone(tmp_path: Path) -> None:
    files(tmp_path, common="from common.limits import number", common__limits="from report import number")
    files(tmp_path, report="number = 7", rewards="raise RuntimeError('not asked for')")
    insert = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from common import number"
    files(tmp_path / "deep", mine=insert + BODY.format("number"))
    assert scores(f"{tmp_path}/deep/mine.py:f", "answer", "boxed") == {"f": 7.0, "answer": 1.0, "boxed": 0.0}


def test_a_file_with_the_name_of_our_package_still_gets_ours(tmp_path: Path) -> None:
    imports = "from rewards import text_of\nfrom rewards.built_in import answer"
    files(tmp_path, rewards=imports + BODY.format("text_of('7')"))
    assert scores(f"{tmp_path}/rewards.py:f") == {"f": 7.0}


@pytest.mark.parametrize("name", ["rewards", "rewards.built_in"])
def test_where_ours_was_meant_and_theirs_is_there_the_line_to_write_is_said(tmp_path: Path, name: str) -> None:
    files(tmp_path, rewards="", mine=f"from {name} import text_of{BODY.format(1)}")
    with pytest.raises(UserError, match=rf"\(mine.py:1\)\. .* Tandem's is tandem\.{name}"):
        scores(f"{tmp_path}/mine.py:f")


def test_tools_and_environments_have_their_helpers_and_our_done(tmp_path: Path) -> None:
    lines = """
        from environments import start
        from report import number
        from tandem.environments import Done

        class Game:
            def reset(self, **row):
                return start

            def step(self, completion):
                return Done(number)

        def tool() -> int:
            "Seven."
            return number
    """
    files(tmp_path, environments="start = 'Go.'", report="number = 7", game=lines)
    with EnvironmentPool(Rollouts(environment=f"{tmp_path}/game.py:Game", timeout_s=limit(20)), columns=[]) as pool:
        pool.start(1, {})
        assert pool.ready(limit(30))[0][1].messages == [{"role": "user", "content": "Go."}]  # type: ignore[union-attr]
        pool.step(1, "")
        [(_, done)] = pool.ready(limit(30))
        assert isinstance(done, Done) and done.reward == 7.0
    with EnvironmentPool(Rollouts(tools=[f"{tmp_path}/game.py:tool"], timeout_s=limit(20)), columns=[]) as pool:
        pool.start(1, {})
        pool.ready(limit(30))
        pool.step(1, "", ("", [Call("tool")]))
        assert pool.ready(limit(30))[0][1].messages[0]["content"] == "7"  # type: ignore[union-attr]


def test_losses_estimators_and_sinks_have_helpers_too_beside_our_own_packages(tmp_path: Path) -> None:
    files(tmp_path, common="number = 7", mine="from common import number\ndef f(rewards): return number")
    code = f"""
        from common.user_code.functions import Contract
        function = Contract("algorithm.loss", ("rewards",), (), "").load("{tmp_path}/mine.py:f")
        assert function(rewards=1) == 7
        from common.durable import write_file
        import tandem.common.errors, common.errors
        assert tandem.common.errors is common.errors and common.errors.__spec__.name == "common.errors"
    """
    run([sys.executable, "-c", textwrap.dedent(code)])


def test_a_package_is_looked_for_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, my_pack="raise RuntimeError", my_pack__sub__module="")
    monkeypatch.syspath_prepend(tmp_path)
    Contract("run.report_to", (), (), "").require("my_pack.sub.module.f")
