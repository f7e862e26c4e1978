"""Transports: private folders, taken addresses, CURVE keys, and a sampler that comes back under its old name."""

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from common.config import Config
from common.errors import Retryable, UserError
from common.wire import channel
from common.wire.address import endpoint, require_free
from common.wire.channel import Transport
from common.wire.ports import free_port
from tests.support.protocol_helpers import make_config
from tests.support.speed import limit, overdue


def tcp(folder: Path, port: int | None = None) -> Config:
    return make_config(folder, channel={"endpoint": f"tcp://127.0.0.1:{port or free_port()}"})


@contextlib.contextmanager
def bound(config: Config) -> Iterator[Transport]:
    with contextlib.closing(channel.bind(config)) as transport:
        yield transport


@contextlib.contextmanager
def connected(config: Config, name: str = "s0") -> Iterator[Transport]:
    with contextlib.closing(channel.connect(config, name)) as transport:
        yield transport


def received(end: Transport, within_s: float | None = None, count: int = 1) -> list[bytes]:
    """First frames of up to `count` messages."""
    messages: list[bytes] = []
    deadline = time.monotonic() + (within_s or limit(3))
    while len(messages) < count and time.monotonic() < deadline:
        if (frames := end.receive()) is None:
            end.poll(max(0.0, deadline - time.monotonic()))
        else:
            messages.append(frames[0])
    return messages


def require_connected(config: Config) -> None:
    """A sampler finds a trainer there."""
    with bound(config) as trainer, connected(config) as sampler:
        sampler.send([b"hello"])
        assert received(trainer) == [b"hello"]


# ---- frames ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp"])
def config(folder: Path, request: pytest.FixtureRequest) -> Config:
    return tcp(folder) if request.param == "tcp" else make_config(folder)


def test_frames_arrive_whole_both_ways_and_nothing_waits(config: Config) -> None:
    with bound(config) as trainer, connected(config) as sampler:
        assert trainer.receive() is None and sampler.receive() is None
        assert not trainer.send([b"to nobody"], to="s1")
        assert sampler.send([b"hello", b"", b"s0"])
        assert not trainer.poll(limit(5)), "a message is not a wake"
        assert trainer.receive() == [b"hello", b"", b"s0"]
        assert trainer.send([b"credit"], to="s0")
        assert received(sampler) == [b"credit"]


def test_a_sampler_that_crashed_and_came_back_under_its_name_is_served(config: Config) -> None:
    with bound(config) as trainer, connected(config) as crashed:
        crashed.send([b"hello"])
        assert received(trainer) == [b"hello"]
        with connected(config) as again:  # while nobody reads the trainer's socket, which still knows the old one
            for i in range(5):
                again.send([b"%d" % i])
            time.sleep(0.3)
            assert received(trainer, count=5) == [b"0", b"1", b"2", b"3", b"4"]
            trainer.send([b"credit"], to="s0")
            assert received(again) == [b"credit"]


def test_more_than_a_window_of_messages_waits_for_who_does_not_read_and_not_much_more(folder: Path) -> None:
    config = make_config(folder)
    with bound(config) as trainer, connected(config) as sampler:
        sampler.send([b"hello"])
        assert received(trainer) == [b"hello"]
        for sender, to in ((sampler, ""), (trainer, "s0")):
            sent = 0
            for _ in range(5):  # until what is on its way has arrived
                sent += sum(sender.send([bytes(1 << 16)], to) for _ in range(400))
                time.sleep(0.05)
            assert config.window + 64 <= sent < 4 * (config.window + 64)


def test_an_oversized_message_is_refused_and_the_next_good_one_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "max_message_bytes", 1 << 20)
    config = make_config(folder)
    with bound(config) as trainer, connected(config) as sampler:
        sampler.send([bytes(2 << 20)])
        assert received(trainer, within_s=0.5) == []
        deadline, got = time.monotonic() + limit(5), list[bytes]()
        while not got and time.monotonic() < deadline:  # the connection was closed: it takes a moment to reconnect
            sampler.send([b"good"])
            got = received(trainer, within_s=0.3)
        assert got[0] == b"good"


def test_a_wake_ends_a_poll_and_may_come_from_any_thread_at_any_time(folder: Path) -> None:
    with bound(make_config(folder)) as trainer:
        threads = [threading.Thread(target=trainer.wake) for _ in range(4)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        assert trainer.poll(limit(20))
        assert not overdue(time.monotonic() - start, 5)
        for thread in threads:
            thread.join()
        trainer.poll(0.0)
        start = time.monotonic()
        assert not trainer.poll(0.2), "a wake ends one poll"
        assert time.monotonic() - start >= 0.19
        for _ in range(5000):
            trainer.wake()  # nobody reads: it does not wait
    trainer.wake()
    trainer.close()
    with pytest.raises(zmq.ZMQError):
        trainer.send([b"to nobody"])


# ---- addresses ---------------------------------------------------------------------------------------------


@pytest.fixture
def default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return make_config(folder, channel={"endpoint": None})


def path_of(config: Config) -> Path:
    return Path(endpoint(config).removeprefix("ipc://"))


def test_each_run_has_a_private_default_socket(default: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_connected(default)
    with bound(default):
        assert stat.S_ISSOCK(path_of(default).stat().st_mode)
    assert path_of(default).parent.stat().st_mode & 0o777 == 0o700
    other = make_config(folder / "another run", channel={"endpoint": None})
    assert endpoint(other) != endpoint(default)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("x" * 100)))
    with pytest.raises(UserError, match="set TMPDIR to a shorter folder"):
        endpoint(default)


@pytest.mark.parametrize("mode", [0o777, 0o710, 0o701])
def test_a_folder_that_others_can_enter_is_refused(default: Config, mode: int) -> None:
    prepared = path_of(default).parent
    prepared.chmod(mode)
    for start in (channel.bind, lambda config: channel.connect(config, "s0")):
        with pytest.raises(UserError, match=f"{prepared} .*{mode:04o}.*only this user can enter; remove it"):
            start(default)


def test_the_socket_that_a_killed_trainer_left_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "inbox"))
    require_connected(make_config(folder))


def test_an_address_that_cannot_be_had_is_told_with_the_reason_and_left_alone(folder: Path) -> None:
    served = make_config(folder)
    (folder / "file").mkdir()
    (folder / "file" / "inbox").write_text("precious")
    with socket.socket() as holder, bound(served) as trainer, connected(served) as sampler:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        elsewhere = make_config(folder, channel={"endpoint": "tcp://192.0.2.1:5555"})
        for config, said in (
            (make_config(folder / "file"), r"ipc://.*inbox: the file there is not a socket.*channel\.endpoint"),
            (served, r"cannot bind ipc://.*inbox: it is in use by another trainer"),
            (tcp(folder, port), rf"port {port} is used by pid {os.getpid()} \("),
            (elsewhere, r"tcp://192\.0\.2\.1:5555.*of this host"),
        ):
            with pytest.raises(UserError, match=said):
                channel.bind(config)
        sampler.send([b"still there"])
        assert received(trainer) == [b"still there"]
    assert (folder / "file" / "inbox").read_text() == "precious"


@pytest.mark.parametrize("host", ["[::1]", "localhost", "ip6-localhost"])
def test_addresses_and_names_of_ipv6_are_bound_found_and_told_when_they_are_taken(folder: Path, host: str) -> None:
    try:
        socket.getaddrinfo(host.strip("[]"), None)
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    config = make_config(folder, channel={"endpoint": f"tcp://{host}:{free_port()}"})
    require_free(config)
    require_connected(config)
    with bound(config), pytest.raises(UserError, match=f"port {endpoint(config).rpartition(':')[2]} is used by pid"):
        require_free(config)


@pytest.mark.parametrize("stands_for", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_name_of_loopback_is_bound_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch, stands_for: str) -> None:
    family = socket.AF_INET6 if ":" in stands_for else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (stands_for, 0))]
    port = free_port()
    with monkeypatch.context() as here:
        here.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        transport = channel.bind(make_config(folder, channel={"endpoint": f"tcp://node-7:{port}"}))
    with contextlib.closing(transport):
        socket.create_connection(("127.0.0.9", port), timeout=5).close()
    with bound(tcp(folder, port)), pytest.raises(ConnectionRefusedError):  # an address is bound as it is written
        socket.create_connection(("127.0.0.9", port), timeout=5).close()


def test_a_process_may_have_several_links_and_a_closed_one_frees_its_address(folder: Path) -> None:
    config = tcp(folder)
    with bound(tcp(folder)):
        for _ in range(3):
            require_connected(config)


# ---- CURVE -------------------------------------------------------------------------------------------------


def test_keys_are_made_once_and_are_ours_alone(folder: Path) -> None:
    config = tcp(folder)
    keys = channel.make_keys(config)
    assert channel.make_keys(config) == keys
    path = folder / "run" / "keys" / "curve.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    for start in (channel.bind, lambda config: channel.connect(config, "s0")):
        with pytest.raises(UserError, match=rf"readable by others; run: chmod 600 {path}"):
            start(config)


def test_a_sampler_without_keys_says_what_it_waited_for(folder: Path) -> None:
    config = make_config(folder, channel={"endpoint": f"tcp://127.0.0.1:{free_port()}", "connect_timeout_s": 0.3})
    with pytest.raises(Retryable, match=r"curve\.json did not appear within 0 s: is the trainer running"):
        channel.connect(config, "s0")


STRANGERS = ("no keys", "another client's keys", "another server's key", "plain password")


def stranger(kind: str, address: str, keys: dict[str, bytes]) -> zmq.Socket[bytes]:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IDENTITY, b"s0")  # and it takes the good client's name
    public, secret = zmq.curve_keypair()
    if kind == "another client's keys":
        sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = public, secret, keys["server_public"]
    elif kind == "another server's key":
        sock.curve_publickey, sock.curve_secretkey = keys["client_public"], keys["client_secret"]
        sock.curve_serverkey = public
    elif kind == "plain password":
        sock.plain_username, sock.plain_password = b"user", b"password"
    sock.connect(address)
    return sock


def test_only_the_right_keys_deliver_and_strangers_do_not_disturb(
    folder: Path, figure: Callable[[str, str], None]
) -> None:
    config = tcp(folder)
    with bound(config) as trainer, connected(config) as good, contextlib.ExitStack() as stack:
        good.send([b"first"])
        assert received(trainer) == [b"first"]
        strangers = [stranger(kind, endpoint(config), channel.read_keys(config)) for kind in STRANGERS]
        for sock in strangers:
            stack.callback(sock.close)
            with contextlib.suppress(zmq.Again):  # refused at the handshake, it may have nowhere to put them
                for _ in range(5):
                    sock.send(b"evil", zmq.DONTWAIT)
        port = int(endpoint(config).split(":")[-1])
        for _ in range(20):
            garbage = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=limit(20)))
            with contextlib.suppress(OSError):
                garbage.sendall(os.urandom(100))
        assert received(trainer, within_s=1.0) == []
        good.send([b"second"])
        assert received(trainer) == [b"second"]
        assert trainer.send([b"credit"], to="s0")
        assert received(good) == [b"credit"]
        assert not any(sock.poll(0) for sock in strangers)
        figure("R9", f"{len(STRANGERS)} kinds of stranger, 5 messages each: 0 delivered; 2 of 2 of the right key")
