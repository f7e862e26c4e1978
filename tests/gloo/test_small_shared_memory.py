"""/dev/shm of 64 MiB, as containers have it by default: a real one, in a mount namespace of its own."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from common.paths import ROOT
from tests.support.speed import limit

MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for mounts")


def within(code: str) -> str:
    """What the code prints there."""
    command = ["unshare", "-m", "bash", "-c", MOUNT, sys.executable, textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    if "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_does_not_fit_goes_through_the_runs_folder_and_the_disk(tmp_path: Path) -> None:
    for name, mib in (("small", 2), ("large", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(mib << 20))
    said = within(f"""
        from launcher.run import outside_memory
        from sampler.engine.fetch import scratch_dir
        from tests.support.configs import config_of
        for name in ("small", "large"):
            model = {{"path": f"{tmp_path}/{{name}}", "dtype": "float32"}}
            print(outside_memory(config_of(model=model, run={{"output_dir": "{tmp_path}/a #b"}})))
        print(*(scratch_dir(config_of(), mib << 20).parent for mib in (63, 65)))
    """)
    assert said.splitlines() == [
        "[]",
        f"['weights.dir=\"{tmp_path}/a #b/weights\"']",
        f"/dev/shm {tempfile.gettempdir()}",
    ]


def test_two_ranks_exchange_without_their_buffers() -> None:
    said = within("""
        import os, shutil
        from common.wire.ports import free_port
        from common.files.shared_memory import NO_BUFFERS, RANK_BUFFER, has_room
        assert has_room(60 << 20) and not has_room(2 * RANK_BUFFER)
        os.environ |= {NO_BUFFERS: "1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(os.fork() > 0))
        import torch
        from tests.support.configs import config_of
        from trainer.engine.process_group import init_distributed
        init_distributed(config_of())
        import deepspeed
        values = torch.ones(1 << 20)
        deepspeed.comm.all_reduce(values)
        assert shutil.disk_usage("/dev/shm").used < 1 << 20, "a buffer without a name takes room, too"
        if os.environ["RANK"] == "1":
            print(values.sum().item())
            os.wait()
    """)
    assert said.splitlines()[-1] == f"{2.0 * (1 << 20)}"
