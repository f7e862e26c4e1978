"""The trainer's ZeroMQ address, which both processes derive from a config, and the checks that it is free."""

import contextlib
import errno
import ipaddress
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from common import durable
from common.config import MAX_SOCKET_PATH, Config
from common.errors import UserError


def endpoint(config: Config) -> str:
    return config.channel.endpoint or f"ipc://{private_dir(config.run.output_dir)}/inbox"


def private_dir(output_dir: Path) -> Path:
    """Makes and returns this run's socket folder (0700, short name). Raises UserError if its path is too long."""
    path = Path(tempfile.gettempdir()) / durable.run_tag(output_dir)
    if len(f"{path}/inbox") > MAX_SOCKET_PATH:
        raise UserError(f"{path} is too long for a socket's name; set TMPDIR to a shorter folder, for example /tmp")
    durable.make_private(path, forbidden=0o077)
    return path


def needs_ipv6(address: str) -> bool:
    """Returns whether a tcp address resolves to IPv6 addresses alone; False if its name does not resolve."""
    parts = urlsplit(address)
    with contextlib.suppress(OSError):  # the name does not resolve yet
        return all(found[0] == socket.AF_INET6 for found in socket.getaddrinfo(parts.hostname, parts.port))
    return False


def to_bind(address: str) -> str:
    """Returns the address to bind: tcp://* if a host name is loopback here (127.0.1.1, as on Debian), not elsewhere."""
    parts = urlsplit(address)
    with contextlib.suppress(OSError):
        found = {str(found[4][0]) for found in socket.getaddrinfo(parts.hostname, parts.port)}
        is_name = parts.hostname not in found and parts.hostname != "localhost"
        if is_name and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
            return f"tcp://*:{parts.port}"
    return address


def require_free(config: Config) -> None:
    """Raises UserError at once if another process listens at the tcp address, before seconds are spent on imports."""
    parts = urlsplit(endpoint(config))
    if parts.scheme == "tcp":
        family = socket.AF_INET6 if needs_ipv6(parts.geturl()) else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((parts.hostname, parts.port))
            except OSError as error:  # the ZeroMQ socket itself reports other errors
                if error.errno == errno.EADDRINUSE:
                    raise cannot_bind(parts.geturl(), f"{error.strerror}{holder(parts.geturl())}") from None


def cannot_bind(address: str, why: str) -> UserError:
    return UserError(
        f"cannot bind {address}: {why}. Stop what uses it, or set channel.endpoint to a free address of this host"
    )


def remove_dead_socket(path: Path) -> None:
    """Deletes a killed trainer's socket. Connects first, because libzmq would take even a live trainer's address."""
    if path.exists() and not path.is_socket():
        raise cannot_bind(f"ipc://{path}", "the file there is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT):  # a busy trainer is alive
            raise cannot_bind(f"ipc://{path}", "it is in use by another trainer")
    path.unlink(missing_ok=True)


def holder(address: str) -> str:
    import psutil

    port = urlsplit(address).port
    with contextlib.suppress(psutil.Error):  # another user's process, or one that has ended
        for link in psutil.net_connections(kind="tcp"):
            if link.laddr and link.laddr.port == port and link.status == psutil.CONN_LISTEN and link.pid:
                command = " ".join(psutil.Process(link.pid).cmdline())
                return f", port {port} is used by pid {link.pid} ({command[:80]})"
    return ""
