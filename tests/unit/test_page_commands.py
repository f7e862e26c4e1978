"""Every command on every page is executed: here, or by a test that is named here; or the page says what it needs.

What is executed here, and how: page_desk.py.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from common.config import load
from tests.support.page_commands import PAGES, ROOT, commands, without_comment
from tests.support.page_desk import Desk, given, takes
from tests.support.speed import limit

README = "tests/e2e/test_stories.py::test_the_task_of_the_readme_is_checked_and_trains_with_its_own_words"
DATA = "tests/processes/test_data_and_rewards_docs.py::test_the_commands_of_the_page_run_from_an_empty_folder"
ADAPTERS = "tests/e2e/test_stories.py::test_adapters_alone_on_the_warm_started_model"
BASE = "tests/e2e/test_stories.py::test_a_base_model_without_a_chat_template_and_a_template_file"
REWARDS = "tests/e2e/test_stories.py::test_own_rows_and_an_own_reward_file"
RESUMED = "tests/e2e/test_stories.py::test_a_run_on_own_rows_is_resumed_and_begun_anew_from_its_weights"
JOB = "tests/unit/test_page_commands.py::test_the_job_of_the_page_hands_itself_in_again_until_it_is_done"

# command → the test that executes it, and words of that test which show it
HELD: dict[str, tuple[str, str]] = {
    "bash launch.sh setup": ("tests/unit/test_launch.py::test_setup_installs_once_and_then_starts_at_once", '"setup"'),
    "bash launch.sh test": (
        "tests/unit/test_launch.py::test_each_command_starts_its_program_with_the_callers_paths",
        '"test --all"',
    ),
    "bash launch.sh check my.yaml": (README, '"README.md"'),
    "bash launch.sh plan my.yaml": (README, '"README.md"'),
    "bash launch.sh run my.yaml": (README, '"README.md"'),
    "bash launch.sh check my_task/run.yaml": (DATA, '("data.md", 2)'),
    "bash launch.sh check my_task/verl.yaml": (DATA, '("data.md", 2)'),
    "bash launch.sh check my_task/colours.yaml": (DATA, '("images.md", 1)'),
    "bash launch.sh check my_task/reward.yaml": (DATA, '("rewards.md", 4)'),
    'bash launch.sh check my_task/reward.yaml --rows 100 "rewards.reward_funcs=[answer, format]" '
    "rewards.reward_weights=null": (DATA, '("rewards.md", 4)'),
    "bash launch.sh check my_task/reward.yaml my_task/completions.jsonl": (DATA, '("rewards.md", 4)'),
    "bash launch.sh run my_task/run.yaml": (RESUMED, 'commands("data.md"'),
    "bash launch.sh run my_task/run.yaml run.output_dir=runs/long trainer.save_steps=2": (
        RESUMED,
        'commands("running.md"',
    ),
    "bash launch.sh run my_task/run.yaml run.output_dir=runs/long trainer.save_steps=2 trainer.max_steps=8 "
    "run.resume=true": (RESUMED, 'commands("running.md"'),
    "bash launch.sh run my_task/run.yaml model.path=runs/my_task/final run.output_dir=runs/my_task_2": (
        RESUMED,
        'commands("running.md"',
    ),
    "bash launch.sh run my_task/reward.yaml": (REWARDS, 'commands("rewards.md"'),
    "bash launch.sh plan my_task/base.yaml": (BASE, 'commands("model.md"'),
    "bash launch.sh run my_task/base.yaml": (BASE, 'commands("model.md"'),
    "bash launch.sh samples runs/my_base --best -n 1": (BASE, 'commands("model.md"'),
    "bash launch.sh plan configs/quickstart_lora.yaml": (ADAPTERS, 'commands("lora.md"'),
    "bash launch.sh run configs/quickstart_lora.yaml": (ADAPTERS, 'commands("lora.md"'),
    "bash launch.sh eval runs/quickstart_lora n=4 temperature=1.0 k=1,4": (ADAPTERS, 'commands("lora.md"'),
    "bash launch.sh gpu-check --cpu": (
        "tests/unit/test_gpu_check.py::test_the_whole_command_runs_on_a_cpu_at_toy_size_within_three_minutes",
        '"--cpu"',
    ),
    "resume=false": (JOB, "resume=false"),
    "ls -d runs/long/checkpoints/step_* >/dev/null 2>&1 && resume=true": (JOB, "resume=false"),
    "code=0": (JOB, "resume=false"),
    "bash launch.sh run my_task/run.yaml run.output_dir=runs/long trainer.max_hours=11.8 run.resume=$resume "
    "|| code=$?": (JOB, "resume=false"),
    '[ "$code" = 75 ] && sbatch job.sh': (JOB, "resume=false"),
    'exit "$code"': (JOB, "resume=false"),
}
SAID = (
    "is executed by no test. Write behind it what it needs (# needs a GPU, the hub, a hub account, a network, Docker, "
    "Slurm, Kubernetes; # takes minutes), or name the test that executes it in HELD of tests/unit/test_page_commands.py"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_executed_or_the_page_says_what_it_needs(page: Path) -> None:
    for command in commands(page):
        ways = [bool(command.needs), command.text in HELD, takes(command)]
        assert any(ways), f"{command.page}: {command.text!r} {SAID}"
        assert not command.needs or command.text not in HELD, f"{command.page}: {command.text!r} is executed: no mark"


def test_every_test_that_executes_a_command_exists_and_every_command_stands_on_a_page() -> None:
    typed = {command.text for page in PAGES for command in commands(page)}
    assert sorted(set(HELD) - typed) == [], "on no page any more: remove it"
    for test, shown in HELD.values():
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
        lines = source.splitlines()[found.decorator_list[0].lineno - 1 if found.decorator_list else found.lineno - 1 :]
        assert shown in "\n".join(lines[: (found.end_lineno or 0) - found.lineno + 20]), f"{test}: {shown}"


def test_a_line_is_read_as_the_shell_reads_it() -> None:
    assert without_comment("ls 'a # b'  # c") == ("ls 'a # b'", "# c")
    assert without_comment("echo a#b") == ("echo a#b", "")
    assert without_comment("# alone") == ("", "# alone")
    texts = [command.text for command in commands(ROOT / "docs" / "data.md")]
    assert any(text.startswith("python3 - <<'EOF'\nimport json\n") and text.endswith("\nEOF") for text in texts)
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) >= 80 and {"a GPU", "the hub", "Docker"} <= {command.needs for command in found}


# --- the folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.cache, with the models that the quick starts build, hardly taught."""
    from examples.example import build
    from tests.support.examples import TINY

    folder = tmp_path_factory.mktemp("made")
    (folder / ".cache").mkdir()
    for example in TINY.values():
        build(example, folder / example.folder, print)
    return folder / ".cache"


@pytest.mark.processes
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(takes, commands(page)))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_commands_of_the_page_do_what_they_are_for(
    page: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, made, monkeypatch)
    given(desk, page)
    for command in commands(page):
        if not command.needs and command.text not in HELD:
            print(command.text)
            desk.type(command)


@pytest.mark.processes
def test_what_needs_more_than_a_laptop_has_settings_that_load(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo in a key or in a file's name of a command that no test can execute."""
    desk = Desk(tmp_path, made, monkeypatch)
    given(desk, ROOT / "docs" / "hosts.md")
    count = 0
    for command in (command for page in PAGES for command in commands(page) if command.needs):
        words = ["configs/quickstart.yaml" if word == "CONFIG" else word for word in command.words]
        files = [word for word in words if word.endswith(".yaml") and not word.startswith("docs/")]
        if files:
            load(files[0], [word for word in words if re.match(r"[a-z]+\.\w+=", word)])
            count += 1
    assert count >= 10


# --- the job of a batch system


@pytest.mark.parametrize(("code", "asked_again"), [(75, True), (0, False), (2, False)])
def test_the_job_of_the_page_hands_itself_in_again_until_it_is_done(
    code: int, asked_again: bool, tmp_path: Path
) -> None:
    block = re.compile(r"^```bash\n(resume=false\n.*?)^```", re.MULTILINE | re.DOTALL)
    (job,) = (job for page in PAGES for job in block.findall(page.read_text()))
    (tmp_path / "launch.sh").write_text(f'echo "$@" >>said\nexit {code}\n')
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho sbatch "$@" >>said\n')
    (tmp_path / "sbatch").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for resume in ("false", "true"):
        done = subprocess.run(["bash", "-c", job], cwd=tmp_path, env=env, timeout=limit(60))
        assert done.returncode == code
        words = f"run my_task/run.yaml run.output_dir=runs/long trainer.max_hours=11.8 run.resume={resume}"
        assert (tmp_path / "said").read_text().splitlines() == [words, *(["sbatch job.sh"] if asked_again else [])]
        (tmp_path / "said").unlink()
        (tmp_path / "runs" / "long" / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
