"""A resumed run asks the problems that the interrupted one would have asked, or it does not start."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import Config, Data, PromptTemplate
from common.errors import UserError
from common.files import run_folder
from common.types import Problem
from sampler.prompts.dataset import fingerprint
from tests.support.configs import config_in
from trainer.loop import Trainer
from trainer.save import resume
from trainer.save.checkpoint import RunState

CANARY = "canary-5f1e"


def saved(config: Config) -> Path:
    """A checkpoint of this run, whose record alone is read here."""
    folder = run_folder.step_dir(config.run.output_dir / run_folder.CHECKPOINTS, 40)
    folder.mkdir(parents=True, exist_ok=True)
    progress = RunState("run", 40, 320, 40, 40, 9, 0, resume.stream_settings(config), dataset_fingerprint="a" * 32)
    (folder / run_folder.COMMIT).write_text(json.dumps(dataclasses.asdict(progress)))
    return folder


def resumed(folder: Path, config: Config) -> RunState:
    return resume.read_run_state(folder, resume.stream_settings(config))


def test_every_setting_of_data_and_prompt_is_guarded_but_those_of_the_evaluation(tmp_path: Path) -> None:
    guarded = resume.stream_settings(config_in(tmp_path))
    every = {f"data.{name}" for name in Data.model_fields} | {f"prompt.{name}" for name in PromptTemplate.model_fields}
    assert every - guarded.keys() == {"data.eval"}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("data", "train", [{"path": "t.jsonl", "weight": 2}]),  # another share makes other groups
        ("prompt", "examples", [{"user": "1+1?", "assistant": "2"}]),
        ("sampler", "num_generations", 3),
    ],
)
def test_another_value_is_refused_with_both(tmp_path: Path, section: str, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"may not change on resume: .*{section}\.{field}=.* \(was "):
        resumed(saved(config_in(tmp_path)), config_in(tmp_path, **{section: {field: value}}))


def test_a_template_file_counts_by_its_contents_wherever_it_lies(tmp_path: Path) -> None:
    first = config_in(tmp_path, prompt={"chat_template": tmp_path / "first.jinja"})
    second = config_in(tmp_path, prompt={"chat_template": tmp_path / "second.jinja"})
    for name in ("first", "second"):
        (tmp_path / f"{name}.jinja").write_text("{{ content }}")
    folder = saved(first)
    assert resumed(folder, second).step == 40
    (tmp_path / "first.jinja").write_text("Solve: {{ content }}")
    (tmp_path / "second.jinja").unlink()
    for config in (first, second):
        with pytest.raises(UserError, match=r"prompt\.chat_template='a file .* \(was 'a file with BLAKE3"):
            resumed(folder, config)


def test_what_decides_no_problem_may_change(tmp_path: Path) -> None:
    sections = {
        "sampler": {"temperature": 0.7},
        "data": {"eval": "other.jsonl"},
        "trainer": {"learning_rate": 1e-3, "max_steps": 77},
        "model": {"path": "elsewhere"},  # the weights are the checkpoint's, and the hello tells the tokenizer
    }
    assert resumed(saved(config_in(tmp_path)), config_in(tmp_path, **sections)).step == 40


def test_no_secret_of_a_setting_is_in_the_checkpoint_or_in_the_message(tmp_path: Path) -> None:
    data = {"train": f"https://me:{CANARY}@host/a"}
    folder = saved(config_in(tmp_path, data=data, prompt={"chat_template_kwargs": {"api_key": CANARY}}))
    assert CANARY not in (folder / run_folder.COMMIT).read_text()
    with pytest.raises(UserError, match=r"data\.train='t' \(was 'https://\*\*\*@host/a'\)") as caught:
        resumed(folder, config_in(tmp_path, data={"train": "t"}))
    assert CANARY not in str(caught.value)


def test_a_folder_with_checkpoints_is_never_overwritten_and_an_empty_one_never_resumed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert resume.find_checkpoint(config) == ""
    folder = saved(config)
    with pytest.raises(UserError, match=r"already holds checkpoints\. Continue it with run\.resume=true, or start"):
        resume.find_checkpoint(config)
    (folder / run_folder.COMMIT).unlink()
    resuming = config_in(tmp_path, run={"output_dir": tmp_path / "run", "resume": True})
    with pytest.raises(UserError, match=r"no valid checkpoint; set run\.output_dir=.*/run-2"):
        resume.find_checkpoint(resuming, lambda _: None)


# ---- the rows themselves -----------------------------------------------------------------------------------


NEW = RunState("run", 40, 320, 40, 40, 9, 0, {})
KNOWN = dataclasses.replace(NEW, dataset_fingerprint="b" * 32, tokenizer_hash="c" * 16)


def test_the_first_hello_of_a_run_gives_the_fingerprints_that_its_checkpoints_keep() -> None:
    told = {"dataset_fingerprint": "b" * 32, "tokenizer_hash": "c" * 16}
    for before in (NEW, KNOWN):
        assert resume.with_fingerprints(before, told, Path("runs/a")) == KNOWN
    of_a_replay = dict.fromkeys(told, "")
    assert resume.with_fingerprints(KNOWN, of_a_replay, Path("runs/a")) == KNOWN


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer_hash", r"c+, now it is a+: model\.path"),
        ("base_fingerprint", r"e+, now it is a+: model\.path, model\.revision or"),
    ],
)
def test_other_rows_another_tokenizer_and_other_frozen_weights_are_refused(name: str, said: str) -> None:
    known = dataclasses.replace(KNOWN, base_fingerprint="e" * 32)
    with pytest.raises(UserError, match=f"{name} {said}"):
        resume.with_fingerprints(known, {name: "a" * 16}, Path("runs/a"))


def test_another_checksum_of_a_frozen_tensor_gives_another_fingerprint() -> None:
    def fingerprint_of(**checksums: str) -> str:
        return resume.base_fingerprint(SimpleNamespace(base_checksums=lambda: checksums))  # type: ignore[arg-type]

    assert fingerprint_of(a="1", b="2") == fingerprint_of(b="2", a="1") != fingerprint_of(a="1", b="3")


def test_a_resumed_run_with_an_edited_train_file_ends_at_the_first_hello(tmp_path: Path) -> None:
    trainer: Any = object.__new__(Trainer)
    trainer.config = config_in(tmp_path)
    trainer.run_state = KNOWN
    hello = SimpleNamespace(dataset_fingerprint="a" * 32, tokenizer_hash="", num_eval_problems=0)
    trainer._source = SimpleNamespace(wait_for_sampler=lambda: hello)
    trainer.collectives = SimpleNamespace(run_on_rank_0=lambda work: work())
    with pytest.raises(
        UserError, match=r"b{32}, now it is a{32}: rows of data\.train.* model.path=.*/run/checkpoints/step_000040 "
    ):
        trainer.run()


def of(*rows: dict[str, Any]) -> str:
    return fingerprint([Problem(0, row) for row in rows], Data(train="x"))


def test_the_fingerprint_sees_values_columns_and_order_and_no_memory() -> None:
    a = {"question": "1", "answer": "2"}
    b = {"question": "3", "answer": "4"}
    others = [of(b, a), of(a), of({"question": "1", "solution": "2"}, b), of(a | {"level": 1}, b)]
    assert len({of(a, b), *others}) == 5
    assert of(a) == of({"answer": "2", "question": "1"})
    assert of({"image": object()}) == of({"image": object()})
