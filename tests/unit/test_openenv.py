"""The adapter for OpenEnv, with a server that speaks as openenv-core 0.3 does; it was tried with the package, too."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.sync.server import serve

from environments import Done
from environments.openenv import OpenEnv


@pytest.fixture
def address() -> Iterator[tuple[str, list[Any]]]:
    """A number is to be guessed, one of each session's own; what was asked is in the list."""
    asked: list[Any] = []

    def session(socket: Any) -> None:
        secret = 0
        for text in socket:
            asked.append(message := json.loads(text))
            kind, data = message["type"], message["data"]
            if kind == "reset":
                secret = int(data["answer"])
                answer = {"observation": {"text": "Guess."}, "reward": None, "done": False}
            elif not data["number"].isdigit():
                socket.send(json.dumps({"type": "error", "data": {"message": "no number"}}))
                continue
            else:
                is_right = int(data["number"]) == secret
                seen = {"text": "Right." if is_right else "Higher.", "left": 2}
                answer = {"observation": seen, "reward": 1.0 if is_right else -0.1, "done": is_right}
            socket.send(json.dumps({"type": "observation", "data": answer}))

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws", asked
        server.shutdown()


def test_each_rollout_is_a_session_and_its_rewards_are_the_turns(address: Any) -> None:
    url, asked = address
    first, second = (OpenEnv(url, "number", "text", ["answer"]) for _ in range(2))
    row = {"question": "?", "answer": "7"}
    assert (first.reset(**row), second.reset(**row | {"answer": "3"})) == ("Guess.", "Guess.")
    assert asked[0]["data"]["answer"] == "7" and asked[0]["data"]["seed"] != asked[1]["data"]["seed"]
    assert first.step("3") == ("Higher.", -0.1)
    assert second.step("3") == Done(1.0, [{"role": "user", "content": "Right."}])
    assert first.step("7") == Done(1.0, [{"role": "user", "content": "Right."}])
    first.close()
    again = OpenEnv(url, "number", columns=["answer"])
    assert again.reset(**row) == '{"text": "Guess."}' and asked[-1] == asked[0], "a rollout of the same row"
    assert again.step("1") == ('{"text": "Higher.", "left": 2}', -0.1)
    with pytest.raises(RuntimeError, match="no number"):
        again.step("?")


def test_where_the_environment_says_nothing_the_prompt_is_the_row_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{"text": None}, {"text": None}, {"text": ["a", {"b": None}]}])
    one = OpenEnv("ws://nowhere", "number", "text")
    monkeypatch.setattr("environments.openenv.connect", lambda url: None)
    monkeypatch.setattr(one, "_asked", lambda *_: {"observation": next(seen), "reward": 0.5, "done": False})
    assert one.reset() is None and one.step("1") == ("", 0.5)
    assert one.step("2") == ('["a", {"b": null}]', 0.5)


def test_what_the_type_of_an_action_refuses_the_model_is_told_and_a_field_that_is_none_fails_the_rollout() -> None:
    def refused(kind: str, field: str) -> str:
        errors = [{"type": kind, "loc": [field], "msg": "Input should be a valid integer"}]
        return json.dumps({"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": errors}})

    one: Any = OpenEnv("ws://nowhere", "number", "text")
    told = iter([refused("int_parsing", "number"), refused("extra_forbidden", "number"), refused("missing", "count")])
    one._socket = SimpleNamespace(send=len, recv=lambda: next(told))
    assert one.step("left") == '{"error": "Input should be a valid integer"}'
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refuses step"):
            one.step("left")
