"""What must not be written down, and model folders that must not be read."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.config import load
from common.errors import Retryable, UserError
from common.processes import exits
from common.redact import redacted, redacted_words
from launcher.processes.processes import Child, Running
from model.files.folder import check_model_folder
from model.tokenizer import load_tokenizer
from tests.support.raising import raising

CANARY = "canary-5f1e"


def test_the_config_is_written_without_secrets_and_otherwise_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"""
model: {{path: m}}
data: {{train: "https://me:{CANARY}@host/train.jsonl", prompt_key: question}}
prompt: {{chat_template_kwargs: {{ApiKey: {CANARY}}}}}
vllm: {{hf_token: {CANARY}, max_num_batched_tokens: 8192, tokenizer: some/tokenizer, ssl: {{key_file: [{CANARY}]}}}}
deepspeed: {{monitor: {{secrets: {{a: {CANARY}, n: 3}}, password: {CANARY}, url: "s3://{CANARY}@bucket/x"}}}}
""")
    written = redacted(load(path).model_dump(mode="json"))
    assert CANARY not in json.dumps(written)
    harmless = {"max_num_batched_tokens": 8192, "tokenizer": "some/tokenizer"}
    assert written["vllm"] == {"hf_token": "***", "ssl": {"key_file": ["***"]}} | harmless
    monitor = {"secrets": {"a": "***", "n": 3}, "password": "***", "url": "s3://***@bucket/x"}
    assert written["deepspeed"]["monitor"] == monitor
    assert written["data"]["train"] == "https://***@host/train.jsonl"
    assert written["data"]["prompt_key"] == "question"


def test_a_config_without_secrets_is_not_changed() -> None:
    for path in (Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"):
        settings = load(path).model_dump(mode="json")
        assert redacted(settings) == settings


def test_the_log_shows_the_command_without_its_secrets(tmp_path: Path) -> None:
    words = (f"vllm.hf_token={CANARY}", f"deepspeed={{monitor: {{wandb_key: {CANARY}}}}}", "trainer.max_steps=3")
    argv = (sys.executable, "-c", "pass", *words, f"https://me:{CANARY}@host")
    Running(Child("sampler", argv, dict(os.environ), tmp_path / "log"), "mark", 1).close()
    log = (tmp_path / "log").read_text()
    assert CANARY not in log
    assert "vllm.hf_token=***" in log and "trainer.max_steps=3" in log


@pytest.mark.parametrize(
    ("text", "override"),
    [
        # a whole section contradicts itself
        (f"rewards: {{reward_funcs: [a, a], reward_kwargs: {{a: {{api_key: {CANARY}}}}}}}", ""),
        (f"rewards: {{reward_kwargs: {{b: {{api_key: {CANARY}}}}}}}", ""),
        # a value of the wrong type
        (f"trainer: {{max_steps: {{api_key: {CANARY}}}}}", ""),
        (f"sampler: {{devices: [{{api_key: {CANARY}}}]}}", ""),
        (f"rewards: {{reward_kwargs: {{api_key: {CANARY}}}}}", ""),
        (f"channel: {{endpoint: 'tcp://me:{CANARY}@host'}}", ""),
        # no YAML: the parser's own message quotes the line
        (f"vllm: {{hf_token: {CANARY}", ""),
        (f"vllm: {{hf_token: {CANARY}, a: ]}}", ""),
        # overrides are quoted back
        ("", f"vllm.hf_token={CANARY}: ["),
        ("", f"model.path.api_key={CANARY}"),
        ("", f"vllm.hf_token:{CANARY}"),
        ("", f"rewards.reward_kwargs={{a: {{api_key: {CANARY}}}, ["),
    ],
)
def test_no_error_of_a_config_repeats_a_secret(tmp_path: Path, text: str, override: str) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: t}\n" + text)
    with pytest.raises(UserError) as caught:
        load(tmp_path / "config.yaml", [override] if override else [])
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("kind", [UserError, Retryable])
def test_a_password_in_an_address_is_in_no_message(kind: type[Exception]) -> None:
    """Data sets may be named by address, and many messages repeat the name."""
    error = kind(f"data set 'https://me:{CANARY}@host/a' is no file or folder here")
    assert str(error) == "data set 'https://***@host/a' is no file or folder here"


def test_a_traceback_shows_no_password_of_an_address(capfd: pytest.CaptureFixture[str]) -> None:
    assert exits.run("sampler", raising(RuntimeError(f"cannot open https://me:{CANARY}@host/a"))) == 1
    shown = capfd.readouterr().err
    assert CANARY not in shown and "RuntimeError: cannot open https://***@host/a" in shown


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (f"deepspeed.monitor.secrets.a={CANARY}", "deepspeed.monitor.secrets.a=***"),  # in a section of secrets
        (f"rewards.reward_kwargs=a: {{api_key: {CANARY}}}", "rewards.reward_kwargs=***"),  # YAML without braces
        (f'vllm={{"hf_token":"{CANARY}"}}', "vllm=***"),
        (f"data.train=[https://me:{CANARY}@host/a]", "data.train=[https://***@host/a]"),
        ("data.answer_key=solution", "data.answer_key=solution"),
        ("me/token-problems:main@train", "me/token-problems:main@train"),
        ("configs/secret/a.yaml", "configs/secret/a.yaml"),
    ],
)
def test_overrides_are_shown_without_their_secrets(word: str, shown: str) -> None:
    assert redacted_words([word]) == [shown]


def model_folder(folder: Path, *shards: object) -> Path:
    weight_map = {f"layer.{i}": name for i, name in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_of_ordinary_shards_is_accepted(tmp_path: Path) -> None:
    check_model_folder(str(model_folder(tmp_path, *(f"model-{i:05d}-of-10000.safetensors" for i in range(10_000)))))
    check_model_folder("some/hub-id")


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b", "x" * 129, "a b", "a\n", "mödel", None, 3, ["x"]],
)
def test_an_index_that_names_anything_else_is_refused_before_any_library_reads_it(tmp_path: Path, name: object) -> None:
    for reads in (check_model_folder, load_tokenizer):
        with pytest.raises(UserError, match=r"index\.json"):
            reads(str(model_folder(tmp_path, "model-1.safetensors", name)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="not an index of a model's shards"):
        check_model_folder(str(tmp_path))
