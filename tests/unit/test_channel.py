"""Sockets: private folders, taken addresses, CURVE keys, and a sampler that comes back under its old name."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from common import channel
from common.address import endpoint
from common.config import Config
from common.errors import Retryable, UserError
from common.ports import free_port
from tests.support.protocol_helpers import make_config
from tests.support.sockets import dealer, router, with_deadline
from tests.support.speed import limit, overdue


def tcp(folder: Path, port: int | None = None) -> Config:
    return make_config(folder, channel={"endpoint": f"tcp://127.0.0.1:{port or free_port()}"})


def received(bound: zmq.Socket[bytes], within_s: float | None = None, count: int = 1) -> list[bytes]:
    """Up to `count` messages, without the routing frame."""
    messages: list[bytes] = []
    deadline = time.monotonic() + (within_s or limit(3))
    while len(messages) < count and bound.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        messages.append(bound.recv_multipart()[1])
    return messages


# ---- ipc ---------------------------------------------------------------------------------------------------


def default_endpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return make_config(folder, channel={"endpoint": None})


def test_the_default_is_a_socket_in_a_folder_that_only_we_can_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = default_endpoint(folder, monkeypatch)
    with router(config) as bound, dealer(config) as sampler:
        path = Path(endpoint(config).removeprefix("ipc://"))
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        sampler.send(b"hello")
        assert received(bound) == [b"hello"]


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o710, 0o701])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    config = default_endpoint(folder, monkeypatch)
    prepared = Path(endpoint(config).removeprefix("ipc://")).parent
    prepared.chmod(mode)
    for start in (lambda: channel.bind_router(config, 4), lambda: channel.connect_dealer(config, "s0", 4)):
        with pytest.raises(UserError, match=f"{prepared} .*{mode:04o}.*only this user can enter; remove it"):
            start()


def test_a_temporary_folder_with_too_long_a_name_says_what_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("x" * 100)))
    with pytest.raises(UserError, match="set TMPDIR to a shorter folder"):
        endpoint(make_config(folder, channel={"endpoint": None}))


def test_two_runs_have_two_sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    channels = {"endpoint": None}
    one, other = (endpoint(make_config(folder / name, channel=channels)) for name in ("a", "b"))
    assert one != other


def test_the_socket_that_a_killed_trainer_left_is_replaced(folder: Path) -> None:
    config = make_config(folder)
    path = folder / "inbox"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    with router(config) as bound, dealer(config) as sampler:
        sampler.send(b"hello")
        assert received(bound) == [b"hello"]


def test_a_file_in_the_place_of_the_socket_is_not_deleted(folder: Path) -> None:
    (folder / "inbox").write_text("precious")
    with pytest.raises(UserError, match=r"inbox.*not a socket"):
        channel.bind_router(make_config(folder), 4)
    assert (folder / "inbox").read_text() == "precious"


def test_an_ipc_address_that_another_trainer_serves_is_not_taken_from_it(folder: Path) -> None:
    config = make_config(folder)
    with router(config) as bound, dealer(config) as sampler:
        with pytest.raises(UserError, match=r"cannot bind ipc://.*inbox.*in use.*channel\.endpoint"):
            channel.bind_router(config, 4)
        sampler.send(b"still there")
        assert received(bound) == [b"still there"]


# ---- addresses ---------------------------------------------------------------------------------------------


def test_a_port_in_use_names_its_holder_and_the_way_out(folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(UserError) as caught:
            channel.bind_router(tcp(folder, port), 4)
    message = str(caught.value)
    assert f"port {port} is used by pid {os.getpid()} (" in message
    assert "set channel.endpoint" in message
    assert not overdue(time.monotonic() - start, 2)


def test_an_address_of_another_host_cannot_be_bound(folder: Path) -> None:
    config = make_config(folder, channel={"endpoint": "tcp://192.0.2.1:5555"})  # TEST-NET: nobody's
    with pytest.raises(UserError, match=r"cannot bind tcp://192\.0\.2\.1:5555.*address of this host"):
        channel.bind_router(config, 4)


# ---- CURVE -------------------------------------------------------------------------------------------------


def test_a_second_link_of_a_process_waits_until_the_first_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = channel.bind(tcp(folder))
    monkeypatch.setattr(channel, "_CLOSED_WITHIN_S", 0.0)
    with pytest.raises(Retryable, match="an earlier link of this process was not closed"):
        channel.bind(tcp(folder))
    monkeypatch.undo()
    closing = threading.Timer(0.3, first.close)
    closing.start()
    channel.bind(tcp(folder)).close()
    closing.join()


def test_keys_are_made_once_and_are_ours_alone(folder: Path) -> None:
    config = tcp(folder)
    keys = channel.make_keys(config)
    assert channel.make_keys(config) == keys
    path = folder / "run" / "keys" / "curve.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    for start in (lambda: channel.bind_router(config, 4), lambda: channel.connect_dealer(config, "s0", 4)):
        with pytest.raises(UserError, match=rf"readable by others; run: chmod 600 {path}"):
            start()


def test_a_sampler_without_keys_says_what_it_waited_for(folder: Path) -> None:
    config = make_config(folder, channel={"endpoint": f"tcp://127.0.0.1:{free_port()}", "connect_timeout_s": 0.3})
    with pytest.raises(Retryable, match=r"curve\.json did not appear within 0 s: is the trainer running"):
        channel.connect_dealer(config, "s0", 4)


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
    return with_deadline(sock)


def test_only_the_right_keys_deliver_and_strangers_do_not_disturb(
    folder: Path, figure: Callable[[str, str], None]
) -> None:
    config = tcp(folder)
    with router(config) as bound, dealer(config) as good:
        good.send(b"first")
        assert received(bound) == [b"first"]
        strangers = [stranger(kind, endpoint(config), channel.read_keys(config)) for kind in STRANGERS]
        try:
            for sock in strangers:
                with contextlib.suppress(zmq.Again):  # refused at the handshake, it may have nowhere to put them
                    for _ in range(5):
                        sock.send(b"evil", zmq.DONTWAIT)
            port = int(endpoint(config).split(":")[-1])
            garbage = [socket.create_connection(("127.0.0.1", port), timeout=limit(20)) for _ in range(20)]
            for connection in garbage:
                with contextlib.suppress(OSError):
                    connection.sendall(os.urandom(100))
            assert received(bound, within_s=1.0) == []
            good.send(b"second")
            assert received(bound) == [b"second"]
            bound.send_multipart([b"s0", b"credit"])
            assert good.poll(int(limit(3000)))
            assert good.recv() == b"credit"
            assert not any(sock.poll(0) for sock in strangers)
            figure("R9", f"{len(STRANGERS)} kinds of stranger, 5 messages each: 0 delivered; 2 of 2 of the right key")
        finally:
            for connection in garbage:
                connection.close()
            for sock in strangers:
                sock.close()


# ---- coming back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_sampler_that_crashed_and_came_back_under_its_name_is_served(folder: Path, transport: str) -> None:
    config = tcp(folder) if transport == "tcp" else make_config(folder)
    with router(config) as bound, dealer(config) as crashed:
        crashed.send(b"hello")
        assert received(bound) == [b"hello"]
        with dealer(config) as again:  # while nobody reads the trainer's socket, which still knows the old one
            for i in range(5):
                again.send(b"%d" % i)
            time.sleep(0.3)
            assert received(bound, count=5) == [b"0", b"1", b"2", b"3", b"4"]
            bound.send_multipart([b"s0", b"credit"])
            assert again.poll(int(limit(3000)))


def test_sending_to_a_sampler_that_is_not_there_is_an_error_not_a_loss(folder: Path) -> None:
    with router(make_config(folder)) as bound, pytest.raises(zmq.ZMQError) as caught:
        bound.send_multipart([b"nobody", b"credit"], flags=zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_an_oversized_message_is_refused_and_the_next_good_one_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "max_message_bytes", 1 << 20)
    config = make_config(folder)
    with router(config) as bound, dealer(config) as sampler:
        sampler.send(bytes(2 << 20))
        assert received(bound, within_s=0.5) == []
        deadline = time.monotonic() + limit(5)
        got: list[bytes] = []
        while not got and time.monotonic() < deadline:  # the connection was closed: it takes a moment to reconnect
            sampler.send(b"good")
            got = received(bound, within_s=0.3)
        assert got[0] == b"good"
