"""tandem.train up to the two processes: rewards that reach another process, errors, interrupts."""

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tandem
from common.config.loading import parse
from common.paths import ROOT
from tandem import start

SCRIPT = f"""
import functools, helpers, json, re, sys; from rewards import twice
sys.path += [{str(ROOT)!r}]; from tandem.start import _reward_name
WORD = re.compile("a+")
def plain(completions, **columns): return [len(WORD.findall(text)) for text in completions]
def neighbour(completions, **columns): return [helpers.count(text) + twice([])[0] - 2 for text in completions]
def late(completions): import helpers; return [helpers.count(text) for text in completions]
def maker(scale): return lambda completions: [scale * len(text) for text in completions]
@lambda function: functools.wraps(function)(lambda **given: function(**given))
async def waits(completions): return plain(completions)
class Judge(int):
    def __call__(self, completions): return [self + 0] * len(completions)
    def method(self, completions): return self(completions)
first = plain
exec("def plain(completions): return [9, 9]")  # as a cell that is run again
print(json.dumps([_reward_name(function) for function in (first, plain, neighbour, late, maker(2), maker(3),
    waits, Judge(5), Judge(7).method, twice, functools.partial(first, unused=1), "answer")]))
"""
EXPECTED = [[1, 2], [9, 9], [1, 3], [1, 3], [2, 6], [3, 9], [9, 9], [5, 5], [7, 7], [2, 2], [1, 2]]
SCORE = f"""import asyncio, json, sys; sys.path.insert(0, {str(ROOT)!r}); from rewards.find import resolve
found = [resolve(name)(completions=["a", "aba"]) for name in json.loads(sys.argv[1])]
print([asyncio.run(one) if asyncio.iscoroutine(one) else one for one in found])"""
SETTINGS: Any = {"data": {"train": "a"}, "prompt": {"system": "é 😀 \\ud83d\\ude00 \x7f \u2028 😀😀"}}


@pytest.mark.parametrize("words", [["script.py"], ["-c", SCRIPT]], ids=["script", "python -c"])
def test_every_kind_of_function_gives_in_another_process_what_it_gives_here(tmp_path: Path, words: list[str]) -> None:
    helpers = {"helpers.py": "def count(text): return len(text)", "rewards.py": "def twice(completions): return [2, 2]"}
    for name, text in (helpers | {"script.py": SCRIPT}).items():
        (tmp_path / name).write_text(text)
    *names, built_in = json.loads(subprocess.check_output([sys.executable, *words], cwd=tmp_path))
    assert built_in == "answer" and names[9] == f"{tmp_path}/rewards.py:twice"
    assert len({name.rpartition(":")[0] for name in names}) == len(names), "none replaces another's file"
    assert json.loads(subprocess.check_output([sys.executable, "-P", "-c", SCORE, json.dumps(names)])) == EXPECTED


@pytest.mark.parametrize("used", [threading.Lock(), (n for n in "ab"), sys.__stdout__], ids=["lock", "generator", "io"])
def test_what_cannot_be_moved_is_said_before_anything_starts(used: Any) -> None:
    with pytest.raises(tandem.RunError, match=r"reward reward cannot be moved .*: .*pickle.* Make what it") as raised:
        tandem.train("my.yaml", rewards=[lambda completions: [used] * len(completions)])
    assert raised.value.exit_code == 2


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "_LAUNCH", ["bash", "launch.sh"])
    return Path("launch.sh").write_text


def test_a_run_from_a_thread_with_a_loop_is_its_folder_and_its_rows(launch: Any) -> None:
    launch('echo "tandem: trainer on a; log a b/logs/trainer.log"; mkdir "a b"; printf "%s\\n" "$@" $MPLBACKEND >words')

    async def train() -> tandem.RunFolder:
        return tandem.train(SETTINGS | {"data": {"train": Path("a")}}, "a.b=2", rewards=["answer"])

    run = ThreadPoolExecutor().submit(asyncio.run, train()).result()
    _, settings, *more = Path("words").read_text().splitlines()
    written = parse(Path(settings).read_text())
    assert [written, *more] == [SETTINGS, "a.b=2", 'rewards.reward_funcs=["answer"]', "agg"]
    Path("a b/metrics.jsonl").write_text('{"reward": 1}\n{"rew')
    assert run == tandem.RunFolder(Path("a b").absolute()) and run.rows() == [{"reward": 1}]


LOG = "tandem: sampler ended with exit code 2 (user error). The last lines of its log:\n    tandem: sampler: a\n    b\n"
ERRORS = [
    ("tandem: a is now a-1\ntandem: b.yaml:3: no x\nb.yaml:4: no y\n", 2, "b.yaml:3: no x\nb.yaml:4: no y"),
    (f"{LOG}tandem: full log: l\ntandem: trainer: interrupted\n", 2, "sampler: a\n    b"),
    ("tandem: trainer: it is time\ntandem: sampler: done\ntandem: continue\n", 75, "trainer: it is time"),
]


@pytest.mark.parametrize(("said", "code", "error"), ERRORS)
def test_an_error_has_the_message_of_the_shell(launch: Any, capsys: Any, said: str, code: int, error: str) -> None:
    launch(f"cat <<'EOF'\n{said}EOF\nexit {code}")
    with pytest.raises(tandem.RunError) as raised:
        tandem.train("my.yaml")
    assert (str(raised.value), raised.value.exit_code, capsys.readouterr().out) == (error, code, said)


def test_an_interrupt_is_passed_on_and_one_when_the_step_is_saved(launch: Any, capsys: Any) -> None:
    launch('trap "echo saved; exit 130" INT; sleep 0.5; kill -INT $PPID; while :; do sleep 0.05; done')
    with pytest.raises(KeyboardInterrupt):
        tandem.train("my.yaml")
    assert capsys.readouterr().out == "saved\n"
