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
from tests.support.configs import config_in, config_of
from trainer.loop import Trainer
from trainer.save import checkpoint, resume
from trainer.save.checkpoint import RunState

CANARY = "canary-5f1e"


def saved(config: Config) -> Path:
    """A checkpoint of this run, whose record alone is read here."""
    folder = run_folder.step_dir(config.run.output_dir / run_folder.CHECKPOINTS, 40)
    folder.mkdir(parents=True, exist_ok=True)
    progress = RunState("run", 40, 320, 40, 40, 9, 0, resume.stream_settings(config), dataset_fingerprint="a" * 32)
    record = dataclasses.asdict(progress) | {"world_size": 1, "zero_stage": 1, "files": {}}
    (folder / run_folder.COMMIT).write_text(json.dumps(record | {"blake3": checkpoint.digest(record)}))
    return folder


def resumed(folder: Path, config: Config) -> RunState:
    return resume.read_run_state(folder, resume.stream_settings(config))


def test_every_setting_of_data_and_prompt_is_guarded_but_those_of_the_evaluation(tmp_path: Path) -> None:
    guarded = resume.stream_settings(config_in(tmp_path))
    every = {f"data.{name}" for name in Data.model_fields} | {f"prompt.{name}" for name in PromptTemplate.model_fields}
    assert every - guarded.keys() == {"data.eval"}
    passes = {f"algorithm.{name}" for name in ("num_iterations", "steps_per_generation", "shuffle_mini_batches")}
    assert guarded.keys() >= passes | {"run.seed", "trainer.prompts_per_step", "sampler.num_generations", "lora.r"}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("data", "rename", {"a": "b"}),
        ("prompt", "examples", [{"user": "1+1?", "assistant": "2"}]),
        ("sampler", "num_generations", 3),
    ],
)
def test_another_value_is_refused_with_both(tmp_path: Path, section: str, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"may not change on resume: .*{section}\.{field}=.* \(was "):
        resumed(saved(config_in(tmp_path)), config_in(tmp_path, **{section: {field: value}}))


@pytest.mark.parametrize("name", ["chat_template", "format_prompt"])
def test_a_template_file_counts_by_its_contents_wherever_it_lies(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / "first.jinja", tmp_path / "second.jinja"
    for path in (first, second):
        path.write_text("{{ content }}")
    config = config_in(tmp_path, prompt={name: first})
    folder = saved(config)
    assert resumed(folder, config_in(tmp_path, prompt={name: second})).step == 40
    first.write_text("Solve: {{ content }}")
    with pytest.raises(UserError, match=rf"prompt\.{name}='a file with BLAKE3 [0-9a-f]{{16}}' \(was 'a file with"):
        resumed(folder, config)
    first.unlink()
    with pytest.raises(UserError, match=rf"prompt\.{name}='a file that is not here' \(was 'a file with BLAKE3"):
        resumed(folder, config)


def test_what_decides_no_problem_may_change(tmp_path: Path) -> None:
    sections = {
        "sampler": {"temperature": 0.7},
        "rewards": {"reward_funcs": ["answer"]},
        "trainer": {"learning_rate": 1e-3, "max_steps": 77},
        "model": {"path": "elsewhere"},  # the weights are the checkpoint's, and the hello tells the tokenizer
    }
    assert resumed(saved(config_in(tmp_path)), config_in(tmp_path, **sections)).step == 40


def test_no_secret_of_a_setting_is_in_the_checkpoint_or_in_the_message(tmp_path: Path) -> None:
    data = {"train": f"https://me:{CANARY}@host/a"}
    config = config_in(tmp_path, data=data, prompt={"chat_template_kwargs": {"api_key": CANARY}})
    folder = saved(config)
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


def found(rows: str = "", tokenizer: str = "", base: str = "") -> dict[str, str]:
    return {"dataset_fingerprint": rows, "tokenizer_hash": tokenizer, "base_fingerprint": base}


NEW = RunState("run", 40, 320, 40, 40, 9, 0, {})
KNOWN = dataclasses.replace(NEW, **found("b" * 32, "c" * 16))  # type: ignore[arg-type]


def test_the_first_hello_of_a_run_gives_the_fingerprints_that_its_checkpoints_keep() -> None:
    for before in (NEW, KNOWN):
        assert resume.with_fingerprints(before, found("b" * 32, "c" * 16), Path("runs/a")) == KNOWN
    assert resume.with_fingerprints(KNOWN, found(), Path("runs/a")) == KNOWN, "a replay has no sampler"


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (found("b" * 32, "d" * 16), r"tokenizer_hash c+, now it is d+: model\.path"),
        (found("a" * 32, "c" * 16), r"dataset_fingerprint b+, now it is a+: rows of data\.train"),
        (found("", base="f" * 32), r"base_fingerprint e+, now it is f+: model\.path, model\.revision or"),
    ],
)
def test_other_rows_another_tokenizer_and_other_frozen_weights_are_refused(now: dict[str, str], words: str) -> None:
    known = resume.with_fingerprints(KNOWN, found("", base="e" * 32), Path("runs/a"))
    with pytest.raises(UserError, match=words):
        resume.with_fingerprints(known, now, Path("runs/a"))


def test_another_checksum_of_a_frozen_tensor_gives_another_fingerprint() -> None:
    def fingerprint_of(**checksums: str) -> str:
        return resume.base_fingerprint(SimpleNamespace(base_checksums=lambda: checksums))  # type: ignore[arg-type]

    assert fingerprint_of(a="1", b="2") == fingerprint_of(b="2", a="1") != fingerprint_of(a="1", b="3")


def test_a_resumed_run_with_an_edited_train_file_ends_at_the_first_hello(tmp_path: Path) -> None:
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.run_state = config_in(tmp_path), dataclasses.replace(NEW, dataset_fingerprint="a" * 32)
    hello = SimpleNamespace(dataset_fingerprint="b" * 32, tokenizer_hash="", num_eval_problems=0)
    trainer._source = SimpleNamespace(wait_for_sampler=lambda: hello)
    trainer.collectives = SimpleNamespace(run_on_rank_0=lambda work: work())
    with pytest.raises(UserError, match=r"a{32}, now it is b{32}.* model.path=.*/run/checkpoints/step_000040 "):
        trainer.run()


def of(*rows: dict[str, Any]) -> str:
    return fingerprint([Problem(0, row) for row in rows], Data(train="x"))


def test_the_fingerprint_sees_values_columns_and_order_and_no_memory() -> None:
    a, b = {"question": "1", "answer": "2"}, {"question": "3", "answer": "4"}
    others = ([b, a], [a], [a | {"answer": "5"}, b], [{"question": "1", "solution": "2"}, b], [a | {"level": 1}, b])
    assert len({of(*rows) for rows in [[a, b], *others]}) == 6
    assert of(a) == of({"answer": "2", "question": "1"})
    assert of({"image": object()}) == of({"image": object()})
    assert of({"image": memoryview(b"x")}) == of({"image": memoryview(b"x")})


def test_another_share_of_a_source_makes_other_groups() -> None:
    def of(weight: int) -> dict[str, Any]:
        games = {"path": "b.jsonl", "weight": 1, "rollout": {"environment": "g.py:G"}}
        return resume.stream_settings(config_of(data={"train": [{"path": "a.jsonl", "weight": weight}, games]}))

    assert of(3) == of(3) != of(2)
    assert of(3)["data.train"][1]["rollout"]["environment"] == "g.py:G"
