"""The README.md of a trained model: what the run left, in the hub's format, and nothing that it did not."""

import itertools
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub  # ModelCard is imported when it is used: that takes half a second
import pytest
import torch
from safetensors.torch import load_file

from common import durable, failpoints
from common.config import Config, load
from common.redact import redacted
from report.model_card import hub_id, write_model_card
from report.run_log import MetricsLog
from tests.unit.trainer.save.test_checkpoint_faults import ONE_RANK, TOKENIZER, SmallEngine
from trainer.save import checkpoint
from trainer.save.disk import write_folder

SETTINGS: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
    "data": {"train": "openai/gsm8k:main@train[:512]", "eval": "openai/gsm8k:main@test"},
    "algorithm": {"beta": 0.04},
    "trainer": {"max_steps": 60},
    "rewards": {"reward_funcs": ["answer", "format"], "reward_weights": [1.0, 0.5]},
}


def evaluation(version: int, answer: int) -> dict[str, Any]:
    given = {"full_marks": {"answer": answer}, "mean": {"answer": 0.25}}
    return {"step": version, "eval_id": f"v{version}", "n": 512, "problems": 512, **given}


def run_folder(folder: Path, *evaluations: dict[str, Any], **settings: Any) -> Path:
    """A finished run of 60 steps in folder/my_run."""
    run = folder / "my_run"
    config = Config.model_validate(SETTINGS | settings)
    log = MetricsLog(run)
    for step in (1, 60):
        log.log(step, {"policy_version": step, "num_tokens": 4096 * step, "timing/all_s": 30.0, "step_time": 30.0})
    for record in evaluations:
        log.log_eval(record)
    log.close()
    (run / "config.json").write_text(json.dumps(redacted(config.model_dump(mode="json"))))
    return run


def card_of(run: Path, version: int = 60) -> huggingface_hub.ModelCard:
    write_model_card(run, run, version)
    return huggingface_hub.ModelCard.load(run / "README.md")


@pytest.mark.parametrize("r", [0, 16])
def test_the_front_matter_is_what_the_hub_reads(tmp_path: Path, r: int) -> None:
    run = run_folder(tmp_path, evaluation(0, 128), evaluation(60, 384), lora={"r": r})
    if r:
        (run / "adapter_config.json").write_text("{}")
    card = card_of(run)
    data = card.data.to_dict()
    assert data["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct" and data["datasets"] == ["openai/gsm8k"]
    assert data["base_model_relation"] == ("adapter" if r else "finetune")
    assert data["library_name"] == ("peft" if r else "transformers") and data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["tandem", "reinforcement-learning", "grpo", *(["lora"] if r else [])]
    assert ("AutoPeftModelForCausalLM" in str(card)) == (r > 0)


FIRST, MIDDLE, LAST = evaluation(0, 128), evaluation(20, 300), evaluation(60, 384)


@pytest.mark.parametrize(
    ("evaluations", "version", "line", "versions"),
    [
        ((FIRST, MIDDLE, LAST), 60, "25.0 % → 75.0 %", "0 and 60"),
        ((FIRST, MIDDLE, LAST), 40, "25.0 %", "0"),  # 40 borrows from no other
        ((LAST,), 60, "75.0 %", "60"),
    ],
)
def test_a_card_compares_the_first_evaluation_with_that_of_its_own_version(
    evaluations: tuple[dict[str, Any], ...], version: int, line: str, versions: str, tmp_path: Path
) -> None:
    text = str(card_of(run_folder(tmp_path, *evaluations), version))
    assert f"held-out answer: {line}  (n = 512" in text
    assert f"on openai/gsm8k:main@test at temperature 0.0, policy version {versions}." in text
    assert f"This is version {version} of the policy" in text


def test_it_says_what_was_trained_on_what_by_what_and_has_no_number_that_the_run_has_not(tmp_path: Path) -> None:
    text = str(card_of(run_folder(tmp_path)))
    assert "This is version 60 of the policy: 60 optimizer steps, 245,760 completion tokens, 1:00, on `openai/" in text
    assert f"By torch {torch.__version__}, vllm " in text
    assert "the run made no held-out evaluation of it" in text and "%" not in text.split("## Use")[0]


def test_the_settings_in_the_card_start_the_same_run(tmp_path: Path) -> None:
    prompt = {"system": "Think.\n```\ncode\n```", "chat_template_kwargs": {"enable_thinking": False}}
    run = run_folder(tmp_path, run={"seed": 3, "output_dir": "runs/x"}, prompt=prompt)
    text = str(card_of(run))
    fence = "````"  # one more than the longest inside
    settings = text.split(f"{fence}yaml\n")[1].split(f"\n{fence}")[0]
    (tmp_path / "settings.yaml").write_text(settings)
    again = load(tmp_path / "settings.yaml", [])
    original = Config.model_validate(json.loads((run / "config.json").read_text()))
    assert again.model_copy(update={"run": again.run.model_copy(update={"output_dir": Path("runs/x")})}) == original


def test_neither_secrets_nor_folders_of_this_machine_are_published(tmp_path: Path) -> None:
    run = run_folder(
        tmp_path,
        evaluation(60, 1),
        model={"path": "/home/somebody/models/qwen"},
        data={"train": ["/home/somebody/data/a.jsonl", "https://me:word@host/b"], "eval": "/home/somebody/b.jsonl"},
        channel={"endpoint": "tcp://10.1.2.3:5555"},
        vllm={"hf_token": "hf_verysecret"},
    )
    card = card_of(run)
    for secret in ("somebody", "hf_verysecret", "me:word", "10.1.2.3", str(tmp_path), "channel", "output_dir"):
        assert secret not in str(card)
    assert "…/qwen" in str(card) and "…/a.jsonl" in str(card) and "hf_token: '***'" in str(card)
    assert not {"base_model", "datasets"} & set(card.data.to_dict())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("openai/gsm8k:main@train[:512]", "openai/gsm8k"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("owner/repo:weights.Q8_0.gguf", "owner/repo"),
        *((local, None) for local in ("data/a.jsonl", "./a", "~/a", "/a/b", "a/b/c", "model.gguf", ".cache/a/model")),
    ],
)
def test_hub_ids_are_told_from_files_and_folders(source: str, expected: str | None) -> None:
    assert hub_id(source) == expected


def test_a_card_that_cannot_be_made_costs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path)
    (run / "config.json").write_text("{}")
    write_model_card(run, tmp_path, 60)
    assert not (tmp_path / "README.md").exists()
    assert "gets no model card: ValidationError" in capsys.readouterr().err


def commit_final(run: Path, number: int) -> None:
    """A model and a card of this number."""
    engine: Any = SmallEngine(number)
    card = partial(durable.write_file, data=str(number).encode())
    save = partial(checkpoint.save_models, engine, None, ONE_RANK, TOKENIZER)
    write_folder(ONE_RANK, run / "final", lambda folder: card(folder / "README.md"), save)


def test_final_is_whole_with_its_card_or_absent_after_any_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    final, found = tmp_path / "final", set()
    for n in itertools.count(1):
        commit_final(tmp_path, 1)
        if (pid := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.environ["TANDEM_FAULT"], failpoints._operations = f"{n}:kill", 0
            commit_final(tmp_path, 2)
            os._exit(0)
        was_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        if final.exists():
            number = load_file(final / "model.safetensors")["number"][0].item()
            found.add(((final / "README.md").read_text(), str(number)))
            assert {path.name for path in final.iterdir()} >= {"config.json", "tokenizer.json"}
        if not was_killed:
            break
    assert n > 10 and found == {("1", "1"), ("2", "2")}
