"""What a run does once, small, before its first step: the trainer's part and the sampler's."""

import errno
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
    return SimpleNamespace(
        config=config,
        engine=engine,
        critic=None,
        collectives=OneRank(),
        rows=rows,
        step_trainer=SimpleNamespace(models=SimpleNamespace(reference=None, packing="shared")),
        tokenizer=load_tokenizer(str(given)),
    )


def test_the_longest_row_and_a_save_are_tried_and_leave_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, sampler={"max_completion_length": 5})
    (trainer.config.run.output_dir / "config.json").write_text(trainer.config.model_dump_json())
    rehearsal.rehearse(trainer)
    [row] = trainer.rows
    assert (len(row.input_ids[0]), row.lengths) == (7 + 5, (5,))
    assert {p.name for p in trainer.config.run.output_dir.rglob("*")} == {"config.json", "checkpoints"}


def no_room(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rehearsal.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=1000))


def no_log_probs(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.engine.backward = lambda batch: torch.tensor([-1.0, torch.nan])


def full(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.tokenizer.save_pretrained = raising(OSError(errno.EDQUOT, "Disk quota exceeded"))


def read_only(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rehearsal.durable, "make_dir", raising(PermissionError(errno.EACCES, "Permission denied")))


def no_tokenizer(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rehearsal, "save_model", lambda *_, **__: SimpleNamespace(missing=["no tokenizer"]))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_room, r"0\.0 GB free, but saving there takes up to .* GB; make room, or set a different run\.output_dir"),
        (no_log_probs, r"no finite log-probs for 7 \+ 256 tokens"),
        (full, r"nothing can be saved in .*Disk quota exceeded.*set a different run\.output_dir"),
        (read_only, "nothing can be saved in .*Permission denied"),
        (no_tokenizer, "final/ would be incomplete: no tokenizer"),
    ],
)
def test_what_could_not_be_saved_or_trained_later_ends_the_run_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], said: str
) -> None:
    trainer = trainer_of(tmp_path)
    spoil(trainer, monkeypatch)
    with pytest.raises(UserError, match=said):
        rehearsal.rehearse(trainer)


class TwoRanks(OneRank):
    """This rank, and another one whose GPU cannot compile attention with heads of 192."""

    def gather(self, text: str) -> list[str]:
        return [text, "attention with heads of 192"]


def test_attention_that_a_rank_cannot_train_is_not_compiled_on_any_rank_after_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "attention with heads of 256"
    monkeypatch.setattr(compiled, "_abandoned_kinds", set())
    monkeypatch.setattr(uncompiled_kinds, "_agreed", set())
    monkeypatch.setattr(rehearsal, "failed_kinds", lambda: {ours})
    monkeypatch.setattr(rehearsal.devices, "count", lambda: 1)
    trainer = trainer_of(tmp_path)
    trainer.collectives = TwoRanks()
    rehearsal.rehearse(trainer)
    assert compiled.abandoned_kinds() == {ours, "attention with heads of 192"}


# ---- the sampler's -----------------------------------------------------------------------------------------


class Engine:
    """Writes down what it is asked for, and is done after a step."""

    num_running = 0

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Any]] = []

    def submit(self, _key: Any, ids: Any, params: Any, _images: Any) -> None:
        self.asked.append((list(ids), params))
        self.num_running = 1

    def step(self) -> None:
        self.num_running = 0


def prompt(*ids: int) -> Prompt:
    return Prompt(Problem(0, {}), "?", "?", np.array(ids, np.int32))


def test_the_longest_sequence_and_an_evaluation_are_sampled_once() -> None:
    data = {"eval": "e", "max_prompt_length": 6}
    config = config_of(data=data, sampler={"max_completion_length": 4}, eval={"top_p": 0.5})
    engine: Any = Engine()
    task = Task([prompt(2, 3)], [prompt(4, 5, 6)], lambda ids: [])
    scored: list[Any] = []
    reference: Any = SimpleNamespace(logprobs=lambda ids, completions, images: scored.extend([ids, *completions]))
    of_sampler.rehearse(config, task, engine, reference)
    (ids, of_group), (held_out, of_eval) = engine.asked
    assert (ids, of_group.num_completions, of_group.max_tokens) == ([2, *[3] * 7], 1, 2), "8 tokens, and 2 sampled: 10"
    assert (held_out, of_eval.top_p, of_eval.max_tokens) == ([4, 5, 6], 0.5, 2)
    assert sum(map(len, scored)) == 8


def test_what_the_engine_would_refuse_later_ends_the_run_now() -> None:
    engine: Any = SimpleNamespace(submit=raising(ValueError("n must be 1 when using greedy sampling")))
    with pytest.raises(UserError, match=r"vLLM refuses the longest sequence of this run: ValueError: n must be 1"):
        of_sampler.rehearse(config_of(), Task([prompt(1)], [], lambda ids: []), engine, None)
