"""A real sshd with a key and a port of its own, which `ssh -F` reaches; nothing of this machine's ssh is touched."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.speed import until

_SEPARATION = Path("/run/sshd")  # Debian's sshd wants it; its service makes it

_SERVER = """
ListenAddress {address}:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
AuthenticationMethods publickey
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
"""
# the alias lets several names stand for the one host
_CLIENT = """
Host *
  HostName {address}
  Port {port}
  HostKeyAlias tandem
  IdentityFile {folder}/user
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known
"""


@contextmanager
def ssh_server(folder: Path, address: str, port: int) -> Iterator[str]:
    """What TANDEM_SSH is to be."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here; apt-get install openssh-server")
    folder.mkdir()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    places = {"folder": folder, "address": address, "port": port}
    (folder / "known").write_text(f"tandem {(folder / 'host.pub').read_text()}")
    (folder / "server").write_text(_SERVER.format(**places))
    (folder / "client").write_text(_CLIENT.format(**places))
    makes_separation = os.geteuid() == 0 and not _SEPARATION.exists()
    if makes_separation:
        _SEPARATION.mkdir(mode=0o755)
    log = folder / "log"
    command = [sshd, "-D", "-f", str(folder / "server"), "-E", str(log)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until(lambda: server.poll() is not None or (log.exists() and "Server listening" in log.read_text()), 20)
        if server.poll() is not None:
            pytest.skip(f"sshd does not start here: {log.read_text()}")
        yield f"ssh -F {folder / 'client'}"
        until(lambda: not psutil.Process(server.pid).children(recursive=True), 20)
    finally:
        for process in psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []:
            process.kill()
        server.kill()
        server.wait()
        if makes_separation:
            _SEPARATION.rmdir()
