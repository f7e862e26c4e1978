"""Ports for those who listen later."""

import socket
from pathlib import Path

import pytest

from common import ports
from common.ports import free_port


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the system gives to whoever asks for any."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_GIVEN_TO_ANYONE", file)
    return file


def test_no_port_is_chosen_that_another_program_would_get_by_asking_for_any(given: Path) -> None:
    given.write_text("20000\t60999\n")
    assert all(10_240 <= free_port() < 20_000 for _ in range(50))


def test_a_port_on_which_somebody_listens_is_passed_over(given: Path) -> None:
    given.write_text("10242\t60999\n")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 10_240))
        one.listen()
        assert {free_port() for _ in range(20)} == {10_241}
        other.bind(("127.0.0.1", 10_241))
        other.listen()
        assert free_port() > 10_241, "none is left below, so it is any"


@pytest.mark.parametrize("range_", ["", "1024 65535\n", "nonsense"])
def test_without_ports_of_its_own_any_free_one_does(given: Path, range_: str) -> None:
    given.write_text(range_)
    with socket.socket() as listener:
        listener.bind(("", free_port()))
