"""A token that was added to the tokenizer alone: no row that holds it may reach an engine."""

from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from common.types import Problem
from model.tokenizer import load_tokenizer
from sampler.start import prompts_of
from tests.support.configs import config_of
from tests.support.tiny import tiny_model


def added(folder: Path, **prompt: Any) -> tuple[Any, Config]:
    """Tokenizer and settings of a model that knows every token but <added>."""
    tokenizer = load_tokenizer(str(tiny_model(folder)))
    tokenizer.add_tokens(["<added>"])
    return tokenizer, config_of({"path": str(folder)}, prompt=prompt)


def rows(count: int, *odd: int) -> list[Problem]:
    return [Problem(i, {"question": "1 + 1 <added>" if i in odd else "1 + 1", "answer": "2"}) for i in range(count)]


def test_few_rows_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, config = added(tmp_path)
    prompts = prompts_of("data.train", rows(40, 7, 12), tokenizer, config)
    assert [p.problem.index for p in prompts] == [i for i in range(40) if i not in (7, 12)]
    assert "2 prompts of data.train hold a token" in (said := capsys.readouterr().err)
    assert "such as '<added>' (rows 7, 12): they are left out" in said


@pytest.mark.parametrize("template", [False, True])
def test_many_end_the_run_with_what_to_do(tmp_path: Path, template: bool) -> None:
    """In every row because the chat template writes it, or in 4 of 40."""
    tokenizer, config = added(tmp_path)
    if template:
        tokenizer.chat_template = "{{ messages[0].content }}<added>"
    found = rows(40) if template else rows(40, 1, 2, 3, 4)
    with pytest.raises(UserError, match=r"(4|40) prompts .* '<added>' \(rows .*resize_token_embeddings\(\d+\)"):
        prompts_of("data.train", found, tokenizer, config)


def test_a_tokenizer_with_more_tokens_than_the_model_is_no_trouble_while_no_row_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, config = added(tmp_path)
    assert len(prompts_of("data.train", rows(3), tokenizer, config)) == 3
    assert capsys.readouterr().err == ""
