"""What a run does once, small, before its first step: the trainer's part and the sampler's."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.types import Problem, Prompt
from model import compiled
from model.tokenizer import load_tokenizer
from sampler import rehearsal as of_sampler
from sampler.turns.task import Task
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank
from tests.support.raising import raising
from tests.support.tiny import tiny_model
from tests.unit.trainer.engine.test_exported import engine_of
from trainer import rehearsal
from trainer.engine import uncompiled_kinds


def trainer_of(folder: Path, **sections: Any) -> Any:
    """With a model whose log-probs are all -1, and the rows that it was given."""
    given = tiny_model(folder / "given")
    config = config_of({"path": str(given)}, {"max_prompt_length": 7}, run={"output_dir": folder / "run"}, **sections)
    config.run.output_dir.mkdir()
    engine, rows = engine_of(given), list[Any]()
    engine.backward = lambda batch: rows.append(batch.row) or torch.full((sum(batch.row.lengths),), -1.0)
    step_trainer = SimpleNamespace(models=SimpleNamespace(reference=None, packing="shared"))
    parts = {"config": config, "engine": engine, "critic": None, "collectives": OneRank(), "rows": rows}
    parts["step_trainer"] = step_trainer
    return SimpleNamespace(**parts, tokenizer=load_tokenizer(str(given)))


def test_the_longest_row_and_a_save_are_tried_and_leave_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, sampler={"max_completion_length": 5})
    (trainer.config.run.output_dir / "config.json").write_text(trainer.config.model_dump_json())
    rehearsal.rehearse(trainer)
    [row] = trainer.rows
    assert (len(row.input_ids[0]), row.lengths) == (7 + 5, (5,))
    assert {p.name for p in trainer.config.run.output_dir.rglob("*")} == {"config.json", "checkpoints"}


def no_room(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rehearsal.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore


def no_log_probs(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.engine.backward = lambda batch: torch.tensor([-1.0, torch.nan])


def full(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.tokenizer.save_pretrained = raising(OSError(errno.EDQUOT, "Disk quota exceeded"))


def read_only(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rehearsal.durable, "make_dir", raising(PermissionError(errno.EACCES, "Permission denied")))


def no_tokenizer(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.tokenizer.save_pretrained = raising(ValueError("its vocabulary is gone"))
    for file in Path(trainer.config.model.path).glob("*token*"):
        file.unlink()
    (Path(trainer.config.model.path) / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_room, r"0\.0 GB free, but saving there takes up to .* GB; make room, or set a different run\.output_dir"),
        (no_log_probs, r"no finite log-probs for 7 \+ 256 tokens"),
        (full, r"nothing can be saved in .*Disk quota exceeded.*set a different run\.output_dir"),
        (read_only, "nothing can be saved in .*Permission denied"),
        (no_tokenizer, "final/ would be incomplete: the tokenizer cannot be saved: ValueError: its vocabulary is gone"),
    ],
)
def test_what_could_not_be_saved_or_trained_later_ends_the_run_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], said: str
) -> None:
    trainer = trainer_of(tmp_path)
    spoil(trainer, monkeypatch)
    with pytest.raises(UserError, match=said):
        rehearsal.rehearse(trainer)


def test_a_temperature_without_do_sample_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(tmp_path)
    trainer.engine.model.generation_config.temperature = 0.61
    rehearsal.rehearse(trainer)
    assert "generation_config.json cannot be saved" in (said := capsys.readouterr().err)
    assert "rehearsal: the longest row and a save work" in said


class TwoRanks(OneRank):
    """This rank, and another one that names these kinds of attention."""

    def __init__(self, other: str) -> None:
        self.other = other

    def any_rank(self, value: bool) -> bool:
        return value or bool(self.other)

    def gather(self, text: str) -> list[str]:
        return [text, self.other]


@pytest.mark.parametrize("other", ["", "attention with heads of 192"])
def test_attention_that_a_rank_cannot_train_is_not_compiled_on_any_rank_after_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = "attention with heads of 256"
    for name in ("_uncompiled", "_failed_kinds", "_abandoned_kinds"):
        monkeypatch.setattr(compiled, name, type(getattr(compiled, name))())
    monkeypatch.setattr(uncompiled_kinds, "_agreed", set())
    monkeypatch.setattr(compiled, "is_compiled", lambda _: True)
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: raising(RuntimeError("PTXAS error: too many registers"))
    )
    monkeypatch.setattr(rehearsal.devices, "count", lambda: 1)
    trainer = trainer_of(tmp_path)
    trainer.collectives = TwoRanks(other)
    backward = trainer.engine.backward

    def train(batch: Any) -> Any:
        compiled.compiled(torch.square, torch.ones(3), kind=ours)
        return backward(batch)

    trainer.engine.backward = train
    rehearsal.rehearse(trainer)
    assert compiled.is_abandoned(ours)
    assert compiled.is_abandoned("attention with heads of 192") == bool(other)
    assert not compiled.is_abandoned("attention with heads of 64")
    assert "PTXAS error: too many registers" in capsys.readouterr().err


# ---- the sampler's -----------------------------------------------------------------------------------------


class Engine:
    """Refuses what vLLM would."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Any]] = []
        self.num_running = 0

    def submit(self, _key: Any, ids: Any, params: Any, _images: Any) -> None:
        if params.temperature == 0 and params.num_completions > 1:
            raise ValueError("n must be 1 when using greedy sampling, got 4.")
        self.asked.append((list(ids), params))
        self.num_running = 1

    def step(self) -> None:
        self.num_running = 0


def prompt(index: int, *ids: int) -> Prompt:
    return Prompt(Problem(index, {}), "?", "?", np.array(ids, np.int32))


def test_the_longest_sequence_and_an_evaluation_are_sampled_once() -> None:
    data = {"eval": "e", "max_prompt_length": 6}
    config = config_of(data=data, sampler={"max_completion_length": 4}, eval={"top_p": 0.5})
    engine: Any = Engine()
    task = Task([prompt(0, 2, 3), prompt(1, 1)], [prompt(0, 4, 5, 6), prompt(1, 7)], lambda ids: [])
    scored: list[Any] = []
    reference: Any = SimpleNamespace(logprobs=lambda ids, completions, images: scored.append((ids, completions)))
    of_sampler.rehearse(config, task, engine, reference)
    (ids, of_group), (held_out, of_eval) = engine.asked
    assert (ids, of_group.num_completions, of_group.max_tokens) == ([2, *[3] * 7], 1, 2), "8 tokens, and 2 sampled: 10"
    assert (held_out, of_eval.top_p, of_eval.max_tokens) == ([4, 5, 6], 0.5, 2)
    [(asked, [completion])] = scored
    assert len(asked) + len(completion) == 8


def test_what_the_engine_would_refuse_at_the_first_evaluation_ends_the_run_now() -> None:
    config = config_of(eval={"num_generations": 4})
    task = Task([prompt(0, 1)], [prompt(0, 1)], lambda ids: [])
    engine: Any = Engine()
    with pytest.raises(UserError, match=r"vLLM refuses an evaluation of this run: ValueError: n must be 1 .* got 4"):
        of_sampler.rehearse(config, task, engine, None)
