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

from common.config import Config, load
from common.redact import redacted
from report.model_card import hub_id, write_model_card
from report.run_log import MetricsLog
from tests.unit.trainer.save.test_checkpoint_faults import CLEAN, ONE_RANK, TOKENIZER, SmallEngine, in_a_child
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


@pytest.mark.parametrize(
    ("r", "relation", "library", "tags"),
    [(0, "finetune", "transformers", ["grpo"]), (16, "adapter", "peft", ["grpo", "lora"])],
)
def test_the_front_matter_is_what_the_hub_reads(
    tmp_path: Path, r: int, relation: str, library: str, tags: list[str]
) -> None:
    run = run_folder(tmp_path, lora={"r": r})
    if r:
        (run / "adapter_config.json").write_text("{}")
    card = card_of(run)
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "base_model_relation": relation,
        "datasets": ["openai/gsm8k"],
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["tandem", "reinforcement-learning", *tags],
    }
    assert ("AutoPeftModelForCausalLM" in str(card)) == (r > 0)


@pytest.mark.parametrize(
    ("version", "line", "versions"),
    [(60, "25.0 % → 75.0 %", "0 and 60"), (40, "25.0 %", "0")],  # 40 borrows from no other
)
def test_a_card_compares_the_first_evaluation_with_that_of_its_own_version(
    version: int, line: str, versions: str, tmp_path: Path
) -> None:
    run = run_folder(tmp_path, evaluation(0, 128), evaluation(20, 300), evaluation(60, 384))
    text = str(card_of(run, version))
    assert f"held-out answer: {line}  (n = 512" in text
    assert f"policy version {versions}." in text


def test_it_says_what_was_trained_on_what_by_what_and_has_no_number_that_the_run_has_not(tmp_path: Path) -> None:
    text = str(card_of(run_folder(tmp_path)))
    assert "This is version 60 of the policy: 60 optimizer steps, 245,760 completion tokens, 1:00, on `openai/" in text
    assert f"By torch {torch.__version__}, vllm " in text
    assert "%" not in text.split("## Use")[0]


def test_the_settings_in_the_card_start_the_same_run(tmp_path: Path) -> None:
    prompt = {"system": "Think.\n```\ncode\n```", "chat_template_kwargs": {"enable_thinking": False}}
    run = run_folder(tmp_path, run={"seed": 3, "output_dir": "runs/x"}, prompt=prompt)
    settings = str(card_of(run)).split("````yaml\n")[1].split("\n````")[0]  # one more than the longest inside
    (tmp_path / "settings.yaml").write_text(settings)
    again = load(tmp_path / "settings.yaml", ["run.output_dir=runs/x"])
    assert again == Config.model_validate(json.loads((run / "config.json").read_text()))


def test_neither_secrets_nor_folders_of_this_machine_are_published(tmp_path: Path) -> None:
    run = run_folder(
        tmp_path,
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
        *((local, None) for local in ("data/a.jsonl", "./a", "~/a", "/a/b", "a/b/c")),
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


FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}


def commit_final(run: Path, number: int) -> None:
    """A model and a card of this number."""
    engine: Any = SmallEngine(number)
    save = partial(checkpoint.save_models, engine, None, ONE_RANK, TOKENIZER)
    write_folder(ONE_RANK, run / "final", lambda folder: (folder / "README.md").write_text(str(number)), save)


def test_final_is_whole_with_its_card_or_absent_after_any_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    final = tmp_path / "final"
    found = set()
    for n in itertools.count(1):
        commit_final(tmp_path, 1)
        code = in_a_child(f"{n}:kill", partial(commit_final, tmp_path, 2))
        if final.exists():
            assert {path.name for path in final.iterdir()} == FILES, "nothing of an attempt that was killed"
            number = load_file(final / "model.safetensors")["number"][0].item()
            found.add(((final / "README.md").read_text(), number))
        if code == CLEAN:
            break
        assert code == -signal.SIGKILL
    assert n > 10 and found == {("1", 1), ("2", 2)}
