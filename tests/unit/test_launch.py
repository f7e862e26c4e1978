"""launch.sh with a recorded Python in the place of pip and torch, and its table of commands."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from common.paths import ROOT
from launcher.__main__ import COMMANDS, command, program

TOOLS = ("bash", "cat", "chmod", "cp", "dirname", "flock", "grep", "mkdir", "rm", "sed", "sha256sum", "readlink")
TOOLS += ("tail", "touch")
# Records what it is asked, makes a .venv around itself, and fails where the test says so.
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case $* in
  "-c import sys"*) [[ ${OLD_PYTHON:-} != yes ]] ;;
  -V*) echo "Python 3.11.7" ;;
  "-m venv --clear .venv")
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/bin/pip && chmod +x .venv/bin/pip
    echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate ;;
  *"$FAILS_ON"*) echo "no luck with: $*" >&2; exit 1 ;;
  "-m launcher run") echo "usage stats: $VLLM_NO_USAGE_STATS, called from: $TANDEM_CALLED_FROM"
    echo "ops: $TORCH_EXTENSIONS_DIR, home: $HOME, caches: ${XDG_CACHE_HOME:-}, user: $USER" ;;
esac
"""


class Copy:
    """A copy of what launch.sh reads, and a PATH with nothing but the tools it may rely on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls_file = folder / "copy", folder / "bin", folder / "calls"
        self.folder.mkdir()
        self.bin.mkdir()
        for name in ("launch.sh", "requirements.txt", "tools/locks/cpu.lock", "tools/locks/gpu.lock"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, self.folder / name)
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None, tool
            (self.bin / tool).symlink_to(path)
        self.add("python3.11", PYTHON)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def launch(
        self, *arguments: str, cwd: Path | None = None, through: Sequence[str] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """through: a command that starts it."""
        self.calls_file.write_text("")
        base = {"PATH": str(self.bin), "CALLS": str(self.calls_file), "FAILS_ON": "nothing", "HOME": str(self.folder)}
        return subprocess.run(
            [*through, "bash", str(self.folder / "launch.sh"), *arguments],
            cwd=cwd or self.folder,
            env={name: value for name, value in (base | environment).items() if value},
            capture_output=True,
            text=True,
        )

    def calls(self) -> list[str]:
        """What Python was asked to install, build or start, without the version questions."""
        lines = self.calls_file.read_text().splitlines()
        wanted = [line for line in lines if line.startswith(("-m", "-c import torch")) and "--known" not in line]
        return [re.sub("--disable-pip.*?off ", "", line) for line in wanted]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


DOCTOR = "-m launcher.doctor --before-install"
PACKAGES = [
    "-m pip install --no-deps torch==2.13.0+cpu",
    "-m pip install --no-deps -r tools/locks/cpu.lock",
    "-c import torch, vllm, deepspeed",
]
AGAIN = [f"{DOCTOR} cpu", *PACKAGES, "-m launcher setup"]
INSTALL = [f"{DOCTOR} cpu", "-m venv --clear .venv", *PACKAGES, "-m launcher setup"]
ON_GPU = [
    f"{DOCTOR} gpu",
    "-m venv --clear .venv",
    "-m pip install -r requirements.txt -c tools/locks/gpu.lock",
    *[PACKAGES[-1], "-m launcher setup"],
]


def change_lock(copy: Copy) -> None:
    with open(copy.folder / "tools/locks/cpu.lock", "a") as lock:
        lock.write("# one line more\n")


def move(copy: Copy) -> None:
    copy.folder = copy.folder.rename(copy.folder.with_name("moved"))


def install_for_cpu(copy: Copy) -> None:
    (copy.folder / ".venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)


def add_a_gpu(copy: Copy) -> None:
    shutil.rmtree(copy.folder / ".venv")
    copy.add("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: one'\n")


@pytest.mark.parametrize(
    ("change", "environment", "calls"),
    [
        (lambda copy: None, {}, ["-m launcher setup"]),
        (change_lock, {}, AGAIN),
        (move, {}, INSTALL),
        (install_for_cpu, {"BACKEND": "gpu"}, ON_GPU),
        (add_a_gpu, {}, ON_GPU),
    ],
    ids=["nothing", "lock", "moved folder", "another backend", "a GPU"],
)
def test_setup_installs_once_and_again_when_what_it_depends_on_changes(
    copy: Copy, change: Callable[[Copy], None], environment: dict[str, str], calls: list[str]
) -> None:
    """Into the same environment where that can be used."""
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == INSTALL
    change(copy)
    assert copy.launch("setup", **environment).returncode == 0
    assert copy.calls() == calls


def test_an_environment_behind_a_link_is_never_cleared(copy: Copy, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    (other / ".tandem-stamp").write_text("theirs")
    (copy.folder / ".venv").symlink_to(other)
    done = copy.launch("setup")
    assert done.returncode == 2
    assert f"is a link to {other}, made elsewhere; remove it: rm " in done.stderr
    assert (other / "precious").exists() and (other / ".tandem-stamp").read_text() == "theirs"


def test_a_second_launch_says_that_it_waits_for_the_first(copy: Copy) -> None:
    (copy.folder / ".cache").mkdir()
    with (copy.folder / ".cache" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        result = copy.launch("setup")
    assert result.returncode == 0
    assert result.stdout.startswith("tandem: waiting for another launch.sh")
    assert copy.calls() == INSTALL


def test_the_pytorch_index_is_asked_only_for_torch_and_only_when_the_own_index_has_none(copy: Copy) -> None:
    result = copy.launch("setup", FAILS_ON="torch==2.13.0+cpu")
    assert copy.calls()[2:] == [PACKAGES[0], f"{PACKAGES[0]} --index-url https://download.pytorch.org/whl/cpu"]
    assert result.returncode == 2


def test_a_failed_install_shows_its_log_and_the_next_start_repairs_it(copy: Copy) -> None:
    result = copy.launch("setup", FAILS_ON="tools/locks/cpu.lock")
    assert result.returncode == 2
    assert "no luck with: -m pip install" in result.stderr
    assert f"The whole log: {copy.folder}/.cache/setup.log" in result.stderr
    half = copy.folder / ".venv/lib/python3.11/site-packages/pluggy-1.0.dist-info"
    whole = half.with_name("numpy-2.3.5.dist-info")
    half.mkdir(parents=True)
    whole.mkdir()
    (whole / "RECORD").touch()
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == AGAIN
    assert not half.exists() and whole.exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OLD_PYTHON": "yes"}, "needs Python 3.11 or 3.12: apt-get install python3.11 python3.11-venv"),
        ({"PYTHON": "no-such-python"}, "PYTHON=no-such-python is not Python 3.11 or 3.12"),
        ({"BACKEND": "tpu"}, "BACKEND=tpu is not auto, cpu or gpu"),
        ({"FAILS_ON": DOCTOR}, "no luck with: "),  # a full disk, an old driver: test_doctor.py
        ({"FAILS_ON": "--known"}, "no luck with: "),
    ],
)
def test_a_wrong_environment_gets_a_fix_and_no_package(copy: Copy, environment: dict[str, str], message: str) -> None:
    result = copy.launch("setup", **environment)
    assert result.returncode == (1 if "--known" in environment.values() else 2)
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (copy.folder / ".venv").exists()


def test_what_the_user_set_is_kept_and_the_callers_folder_is_told(copy: Copy, tmp_path: Path) -> None:
    assert copy.launch("doctor").returncode == 0
    assert copy.calls() == ["-m launcher doctor"], "it needs no installation"
    copy.launch("setup")
    assert copy.launch("run", cwd=tmp_path).stdout.startswith(f"usage stats: 1, called from: {tmp_path}\n")
    assert "usage stats: 0" in copy.launch("run", VLLM_NO_USAGE_STATS="0").stdout


# ---- the table of commands


def test_help_names_every_command(copy: Copy) -> None:
    shown = copy.launch("help").stdout
    assert shown.startswith("Installs, starts and tests Tandem") and "set -euo" not in shown
    assert [name for name in COMMANDS if not re.search(rf"(launch\.sh |\[|\| ){name}\b", shown)] == []


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("--known tset", 2, "tandem: unknown command tset; did you mean test?\n"),
        ("xyzzy", 2, "tandem: unknown command xyzzy; bash launch.sh help lists all\n"),
        ("--known setup", 0, ""),
        ("setup", 0, "tandem: ready; start with: bash launch.sh\n"),
    ],
)
def test_a_command_is_known_or_not_before_any_package_is_installed(typed: str, code: int, said: str) -> None:
    words = [sys.executable, "-S", "-m", "launcher", *typed.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("typed", "started"),
    [
        ("", "-m launcher.run"),
        ("mine.yaml a.b=1 --hosts hosts", "-m launcher.run HERE/mine.yaml a.b=1 --hosts HERE/hosts"),
        ("run mine.yaml a.b=1", "-m launcher.run HERE/mine.yaml a.b=1"),
        ("configs/none.yaml", "-m launcher.run configs/none.yaml"),
        ("plan /mine.yaml", "-m launcher.plan /mine.yaml"),
        ("check mine.yaml --rows 5", "-m launcher.check_rewards HERE/mine.yaml --rows 5"),
        ("samples a_run --worst", "-m report.samples HERE/a_run --worst"),
        # without loadfile each worker would start the engines of each file; named tests start sooner without workers
        ("test --all", "-m pytest -n auto --dist loadfile --no-loadscope-reorder --all"),
        ("test -n 3", "-m pytest -n auto --dist loadfile --no-loadscope-reorder -n 3"),
        ("test -k wire", "-m pytest -k wire"),
        ("test tests/unit/test_wire.py -x", "-m pytest tests/unit/test_wire.py -x"),
    ],
)
def test_each_command_starts_its_program_with_the_callers_paths(tmp_path: Path, typed: str, started: str) -> None:
    for file in ("mine.yaml", "hosts"):
        (tmp_path / file).touch()
    (tmp_path / "a_run").mkdir()
    name, words = command(typed.split(), tmp_path)
    assert " ".join(program(name, words, tmp_path)) == started.replace("HERE", str(tmp_path))
    assert program("plan", ["configs/quickstart.yaml", ""], Path())[2:] == ["configs/quickstart.yaml", ""], "our folder"


@pytest.mark.parametrize("name", ["a:b", "a$b", 'say "a"', "a\\b", "a\nb"])
def test_a_folder_whose_name_compilers_cannot_take_is_refused_before_anything_is_done(copy: Copy, name: str) -> None:
    copy.folder = copy.folder.rename(copy.folder.with_name(name))
    done = copy.launch("setup")
    assert done.returncode == 2 and "rename it" in done.stderr and copy.calls() == []


@pytest.mark.parametrize("name", ["a b", "it's (ü) & #1 %2;x[3]*"])
def test_a_folder_with_a_space_and_other_characters_is_a_folder(copy: Copy, name: str) -> None:
    copy.folder = copy.folder.rename(copy.folder.with_name(name))
    assert copy.launch("setup").returncode == 0 and copy.calls() == INSTALL
    assert copy.launch("setup").returncode == 0 and copy.calls() == ["-m launcher setup"]
    assert f"ops: {copy.folder}/.venv/torch_extensions," in copy.launch("run").stdout


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for mounts and other users")
ANOTHER = ("/usr/bin/setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")  # a user without a name


@pytest.fixture
def shared() -> Iterator[Copy]:
    """Installed by root where others may look, with a compiled op."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        copy = Copy(Path(folder))
        copy.calls_file.touch()
        copy.calls_file.chmod(0o666)
        assert copy.launch("setup").returncode == 0
        (copy.folder / ".venv/torch_extensions/op").mkdir(parents=True)
        (copy.folder / ".venv/torch_extensions/op/op.so").touch()
        yield copy


@needs_root
@pytest.mark.parametrize("home", ["", "/", "/root"])
def test_a_user_without_a_name_or_a_home_gets_places_of_its_own(shared: Copy, home: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        scratch = Path(folder)
        scratch.chmod(0o777)
        done = shared.launch("run", through=ANOTHER, HOME=home, TMPDIR=str(scratch))
        mine, ops = scratch / "tandem-12345", f"/.cache/tandem/{str(shared.folder).replace('/', '_')}"
        said = f"ops: {mine}{ops}, home: {'/root' if home == '/root' else mine}, caches: {mine}/.cache, user: uid12345"
        assert done.returncode == 0 and said in done.stdout, done
        assert (Path(f"{mine}{ops}") / "op/op.so").is_file() and mine.stat().st_mode & 0o777 == 0o700
        mine.chmod(0o777)
        shutil.rmtree(mine)
        mine.mkdir()  # somebody else's
        done = shared.launch("run", through=ANOTHER, HOME=home, TMPDIR=str(scratch))
        assert done.returncode == 2 and "export HOME=/a/folder/of/yours" in done.stderr


@needs_root
def test_an_installation_that_cannot_be_written_has_its_ops_in_the_users_cache(shared: Copy, tmp_path: Path) -> None:
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    through = ("/usr/bin/unshare", "-m", "/bin/bash", "-c", mount, str(shared.folder))
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    done = shared.launch("run", through=through, HOME=str(tmp_path), PATH=f"{shared.bin}:{path}")
    if "mount" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    name = str(shared.folder).replace("/", "_")
    assert done.returncode == 0 and f"ops: {tmp_path}/.cache/tandem/{name}, home: {tmp_path}" in done.stdout
    assert (tmp_path / ".cache/tandem" / name / "op/op.so").is_file()
    (shared.folder / ".venv/.tandem-stamp").unlink()
    done = shared.launch("run", through=through, HOME=str(tmp_path), PATH=f"{shared.bin}:{path}")
    assert done.returncode == 2 and "cannot be written; its owner first: PYTHON=" in done.stderr


def test_ctrl_c_reaches_what_a_shell_starts_behind_an_ampersand() -> None:
    """It comes ignored, and would stay so."""
    asks = "import signal; assert signal.getsignal(2) is signal.default_int_handler"
    code = f"from launcher import __main__ as m; m.COMMANDS['plan'] = ('-c', {asks!r}); m.main(['plan'])"
    words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["{}/launch.sh", "/proc/self/cwd/{}/launch.sh", "LINK"])
def test_our_folder_is_found_by_every_name_and_whatever_is_set_for_the_shell_or_python(tmp_path, name: str) -> None:
    (tmp_path / "start").symlink_to(ROOT / "launch.sh")
    env = os.environ | {"CDPATH": ".:/tmp", "PYTHONSAFEPATH": "1"}
    command = ["bash", name.format(ROOT.name).replace("LINK", f"{tmp_path}/start"), "nothing"]
    done = subprocess.run(command, cwd=ROOT.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown command nothing" in done.stderr
