"""Client of an OpenEnv server (openenv-core 0.3), used in rollouts as any other environment.

    rollout:
      environment: environments/openenv.py:OpenEnv
      environment_kwargs: {url: "ws://localhost:8000/ws"}

A rollout is a session of JSON over a WebSocket; docs/environments.md starts the server. Not
supported: actions of several fields, which the model would have to write as JSON, and MCP.
"""

import json
import zlib
from collections.abc import Sequence
from typing import Any

from websockets.sync.client import connect

from environments import Done


class OpenEnv:
    """A session on an OpenEnv server."""

    def __init__(
        self, url: str, action: str, observation: str | None = None, columns: Sequence[str] = ()
    ) -> None:
        """Stores the settings; `reset` opens the session.

        action: the field that receives the completion.
        observation: the field that the model reads; None for all fields as JSON.
        columns: the columns of the row that reset sends, beside a seed that depends on the row.
        """
        self._url = url
        self._action = action
        self._observation = observation
        self._columns = columns

    def reset(self, **row: Any) -> str | None:
        """Opens a session and returns its first observation.

        Returns None if that is empty, so that the row's own prompt is kept.
        """
        self._socket = connect(self._url)
        row_json = json.dumps(row, sort_keys=True, default=repr)
        settings: dict[str, Any] = {"seed": zlib.crc32(row_json.encode())}
        for name in self._columns:
            settings[name] = row[name]
        result = self._request("reset", settings)
        return self._text(result) or None

    def step(self, completion: str) -> Any:
        result = self._request("step", {self._action: completion})
        if "errors" in result:
            return json.dumps({"error": result["errors"][0]["msg"]}, ensure_ascii=False)
        text = self._text(result)
        reward = result.get("reward")
        if result["done"]:
            return Done(float(reward or 0.0), [{"role": "user", "content": text}])
        return text, reward

    def close(self) -> None:
        self._socket.close()

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        if answer["type"] == "error" and not self._is_of_model(answer["data"].get("errors")):
            raise RuntimeError(f"the OpenEnv server refuses {kind} {data}: {answer['data']}")
        return dict(answer["data"])

    def _is_of_model(self, errors: list[dict[str, Any]] | None) -> bool:
        """Returns whether all errors are about what the model wrote into the action's field."""
        if not errors:
            return False
        for error in errors:
            if error["loc"][:1] != [self._action] or error["type"] == "extra_forbidden":
                return False
        return True

    def _text(self, result: dict[str, Any]) -> str:
        observation = result["observation"]
        if self._observation:
            observation = observation[self._observation]
        if observation is None:
            return ""
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, ensure_ascii=False)
