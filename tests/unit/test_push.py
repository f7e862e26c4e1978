"""`launch.sh push` against a stand-in for the hub's HTTP API, which keeps what it gets."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub  # ModelCard is imported when it is used: that takes half a second
import pytest
from huggingface_hub import constants

from common.errors import Retryable, UserError
from launcher.push import main, require_name
from tests.support.speed import limit
from tests.unit.test_model_card import evaluation, run_folder

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_doNotPrintThis"


class FakeHub:
    """The calls that an upload makes. `broken` maps the start of a path to a status. `private`, `there`: the model."""

    def __init__(self) -> None:
        self.broken: dict[str, int] = {}
        self.there, self.private = False, False
        self.stored: dict[str, bytes] = {}  # by sha256
        self.files: dict[str, bytes] = {}  # of the newest commit
        self.commits: list[str] = []
        self.asked: list[str] = []
        self.tokens: dict[str | None, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.asked.append(f"{self.command} {self.path}")
                if self.path.startswith(("/api/models/", "/api/repos/", "/me/")):  # others are open to all
                    hub.tokens[self.headers.get("Authorization")] = self.path
                status = next((s for start, s in hub.broken.items() if self.path.startswith(start)), 0)
                found: Any = {"error": "as told"} if status else hub.reply(self.command, self.path, body)
                answer = json.dumps(found).encode()
                self.send_response(status or (404 if found is None else 200))
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, method: str, path: str, body: bytes) -> Any:
        """None = 404."""
        path = path.partition("?")[0]
        if path.startswith("/upload/"):
            self.stored[path.removeprefix("/upload/")] = body
            return {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.private = asked.get("visibility") == "private" if not self.there else self.private
            self.there = True
            return {"url": f"{self.url}/{asked['organization']}/{asked['name']}"}
        if path == "/api/models/me/model":
            return {"id": "me/model", "private": self.private, "sha": "a" * 40} if self.there else None
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/models/me/model/preupload/main":
            modes = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            files = [{"path": p, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False} for p, lfs in modes]
            return {"files": files}
        if path == "/me/model.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return {
                "objects": [o | {"actions": {"upload": {"href": f"{self.url}/upload/{o['oid']}"}}} for o in objects]
            }
        if path == "/api/models/me/model/commit/main":
            return self._commit([json.loads(line) for line in body.splitlines()])
        return None

    def _commit(self, lines: list[dict[str, Any]]) -> dict[str, str]:
        self.files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[value["path"]] = self.stored[value["oid"]]
        return {"commitUrl": f"{self.url}/me/model/commit/{'b' * 40}", "commitOid": "b" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub as huggingface_hub sees it in this process, which is logged in there."""
    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with two checkpoints, one of them with a critic."""
    folder = run_folder(tmp_path, evaluation(0, 128, 256), evaluation(30, 256, 300), evaluation(60, 384, 512))
    for name, version in (("final", 60), ("checkpoints/step_000030", 30), ("checkpoints/step_000060", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"model_type": "qwen2"}')
        (folder / name / "model.safetensors").write_bytes(bytes([version]) * 5000)
    (folder / "final" / "README.md").write_text("---\nlicense: mit\n---\nwritten at the end of the run\n")
    for name in ("trainer/state/optim_states.pt", "critic/model.safetensors"):
        (folder / "checkpoints/step_000030" / name).parent.mkdir(parents=True)
        (folder / "checkpoints/step_000030" / name).write_bytes(b"large")
    (folder / "checkpoints/step_000030/commit.json").write_text('{"policy_version": 30}')
    return folder


def test_final_becomes_one_commit_with_every_file_as_it_is(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), "me/model"])
    assert hub.files == {path.name: path.read_bytes() for path in (run / "final").iterdir()}
    assert hub.commits == ["Upload a model trained with Tandem"] and not hub.private
    assert list(hub.stored) == [hashlib.sha256(bytes([60]) * 5000).hexdigest()]
    assert list(hub.tokens) == [f"Bearer {TOKEN}"], hub.tokens
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"{hub.url}/me/model/commit/{'b' * 40}" and TOKEN not in out + err


def test_a_checkpoint_goes_up_without_the_trainers_state_and_with_a_card_of_its_own_version(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), "me/model", "--checkpoint", "step_000030", "--private"])
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"} and hub.private
    card = huggingface_hub.ModelCard(hub.files["README.md"].decode())
    assert card.data.eval_results[0].metric_value == 0.5 and "version 30 of the policy" in str(card)
    assert "stays here: trainer (DeepSpeed's state), critic (the value model), commit.json" in capsys.readouterr().out
    main([str(run / "checkpoints" / "step_000030"), "me/model"])
    assert huggingface_hub.ModelCard(hub.files["README.md"].decode()).data.eval_results[0].metric_value == 0.5


def test_a_dry_run_says_what_would_go_where_and_asks_nobody(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    main([str(run), "me/model", "--dry-run"])
    out = capsys.readouterr().out
    assert f"final → {hub.url}/me/model, public if it is new" in out
    for line in ("       51 B  README.md", "       23 B  config.json", "      5 kB  model.safetensors", "in 3 files"):
        assert line in out
    assert "nothing was sent" in out and hub.asked == []


def test_a_private_upload_never_lands_in_a_public_model(hub: FakeHub, run: Path) -> None:
    hub.there = True
    with pytest.raises(UserError, match="me/model exists on the hub and is public"):
        main([str(run), "me/model", "--private"])
    assert hub.files == {} and hub.stored == {}


def test_without_final_it_says_what_there_is_instead(hub: FakeHub, run: Path) -> None:
    (run / "final").rename(run / "elsewhere")
    words = "has no final/ yet, which a run writes at its end; it has step_000030 and step_000060"
    with pytest.raises(UserError, match=words):
        main([str(run), "me/model"])
    with pytest.raises(UserError, match="has no checkpoint 'step_31'; it has step_000030 and step_000060"):
        main([str(run), "me/model", "--checkpoint", "step_31"])


@pytest.mark.parametrize(
    ("folder", "words"),
    [("nowhere", "is no folder; name a run folder"), ("my_run/checkpoints", "holds neither a run nor a model")],
)
def test_what_is_neither_run_nor_model_is_refused(hub: FakeHub, run: Path, folder: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        main([str(run.parent / folder), "me/model"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "'model' is not owner/name, as the hub's names are; write for example my-name/model"),
        ("a/b/c", "write for example my-name/c"),
        ("me/mo del", "is no name for the hub"),
    ],
)
def test_a_name_the_hub_has_no_place_for_is_refused_before_anything_is_read(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_name(name)


def test_without_a_token_it_says_where_to_get_one(hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no token for the hub; log in with"):
        main([str(run), "me/model"])
    assert hub.asked == []


def test_offline_mode_is_named(hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing is sent; write: unset HF_HUB_OFFLINE"):
        main([str(run), "me/model"])


@pytest.mark.parametrize(
    ("broken", "status", "error", "words"),
    [
        ("/api", 401, UserError, r"the hub does not know this token \(401\)"),
        ("/api", 403, UserError, r"this token may not write to me/model \(403\)"),
        ("/api", 500, Retryable, r"the hub is in trouble \(500\)"),
        ("/api/models/me/model/commit", 503, Retryable, r"the hub is in trouble \(503\)"),
        ("/upload", 403, UserError, r"may not write to me/model \(403\)"),
        ("/api/models/me/model/commit", 412, UserError, r"the hub refuses the upload \(412\)"),
    ],
)
def test_an_answer_that_is_an_error_becomes_a_sentence_and_no_commit(
    hub: FakeHub, run: Path, broken: str, status: int, error: type[Exception], words: str
) -> None:
    hub.broken = {broken: status}
    with pytest.raises(error, match=words) as raised:
        main([str(run), "me/model"])
    assert TOKEN not in str(raised.value) and hub.commits == []


def test_a_hub_that_is_not_there_may_be_tried_again(hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Retryable, match=r"http://127\.0\.0\.1:1 was not reached"):
        main([str(run), "me/model"])


@pytest.mark.processes
def test_the_command_itself_ends_with_the_usual_codes(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    def push(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")} | more
        command = [sys.executable, "-m", "launcher.push", str(run), name]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(60))

    done = push("me/model")
    assert done.returncode == 0, done.stderr
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert (push("model").returncode, push("me/model", HF_HUB_OFFLINE="1").returncode) == (2, 2)
    assert push("me/model", HF_ENDPOINT="http://127.0.0.1:1").returncode == 75
