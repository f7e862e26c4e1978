"""Rows become Problems, and the run's stream of groups gets its order.

Columns may be renamed, and `a.b.0.c` looks inside a column, as verl's `reward_model.ground_truth` needs. The order is a
set of pure functions of the seed, so that the sampler has nothing to save.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Data
from common.errors import UserError
from common.exits import say
from common.types import Problem, Prompt
from sampler.pictures import check_images, sources
from sampler.sources import check_there, folder_of, read_rows

_SYNONYMS = (
    {"question", "problem", "prompt", "instruction", "input", "query", "messages"},
    {"answer", "solution", "ground_truth", "target", "output", "label", "final_answer"},
    {"image", "images", "picture", "pictures", "img"},
)
_ABSENT = object()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Row = dict[str, Any]


def load_data(option: str, spec: str | Sequence[str], data: Data) -> list[Problem]:
    """The problems of one data set of the config; `option` is data.train or data.eval. Says what it leaves out.

    A row with an empty answer is left out, because it cannot be scored. Raises UserError, also when no row has one.
    Images are no column: see `whole_row`.
    """
    problems = load_problems(spec, data.prompt_key, data.answer_key, data.rename, data.image_key)
    if data.image_key is not None:
        check_images(option, problems, data)
    if data.answer_key is None:
        return problems
    empty = [problem.index for problem in problems if is_empty(problem.columns["answer"])]
    if len(empty) == len(problems):
        raise UserError(
            f"{option}: each of the {len(problems)} rows has an empty {data.answer_key!r}. Set data.answer_key to the "
            "column with the answers, or data.answer_key: null when no reward needs one"
        )
    if empty:
        places = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
        say(
            f"{option}: {len(empty)} of {len(problems)} rows have an empty {data.answer_key!r} and are left out: row "
            f"{places}"
        )
    return [problem for problem in problems if not is_empty(problem.columns["answer"])]


def load_problems(
    specs: str | Sequence[str],
    prompt_key: str = "question",
    answer_key: str | None = "answer",
    rename: Mapping[str, str] | None = None,
    image_key: str | None = None,
) -> list[Problem]:
    """Every row of a data set or of several; sampler/sources.py has the notation.

    A Problem's columns are the whole row, after `rename`; what prompt_key and answer_key find is there under the names
    prompt_key and `answer` too. Rows of several data sets have the columns of all, None where theirs has none. Of
    several, one must have image_key; what is there becomes the Problem's images. Raises UserError, also for a missing
    column.
    """
    specs = [specs] if isinstance(specs, str) else list(specs)
    if not specs:
        raise UserError("data: an empty list of data sets; name one, for example openai/gsm8k:main@train")
    for spec in specs:
        check_there(spec)  # all of them before the first is read
    tables = [
        _named(read_rows(spec, decode_images=image_key is None), spec, prompt_key, answer_key, rename or {})
        for spec in specs
    ]
    images: list[tuple[bytes, ...]] = [()] * sum(map(len, tables))
    if image_key is not None:
        if all(look_up(table[0], image_key, _ABSENT) is _ABSENT for table in tables):
            _check_column("data.image_key", image_key, tables[0][0], specs[0])
        images = [found for spec, table in zip(specs, tables, strict=True) for found in _images(table, spec, image_key)]
        tables = [[{k: v for k, v in row.items() if k != image_key} for row in table] for table in tables]
    columns = dict.fromkeys(name for table in tables for name in table[0])
    rows = (row for table in tables for row in table)
    return [Problem(i, {**columns, **row}, found) for i, (row, found) in enumerate(zip(rows, images, strict=True))]


def whole_row(problem: Problem, image_key: str | None) -> Mapping[str, Any]:
    """Its columns, with the files of its images under image_key: what reward functions choose from."""
    return problem.columns if image_key is None else {**problem.columns, image_key: list(problem.images)}


def _images(rows: list[Row], spec: str, image_key: str) -> Iterator[tuple[bytes, ...]]:
    """The files of each row's images. Raises UserError for one that is none, or is not there."""
    folder = folder_of(spec)
    for i, row in enumerate(rows):
        try:
            yield sources(look_up(row, image_key), folder)
        except ValueError as error:
            raise UserError(f"{spec}, row {i}: data.image_key {image_key!r}: {error}") from None


def look_up(row: Any, key: str, default: Any = None) -> Any:
    """The column `key`, or what `a.b.0` finds inside one; default where there is none.

    look_up({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth") == "4"
    """
    if isinstance(row, Mapping) and key in row:
        return row[key]
    head, _, rest = key.partition(".")
    if isinstance(row, Mapping) and head in row:
        inner = row[head]
    elif isinstance(row, list | tuple) and head.isdecimal() and int(head) < len(row):
        inner = row[int(head)]
    else:
        return default
    return look_up(inner, rest, default) if rest else inner


def is_empty(answer: Any) -> bool:
    return answer is None or (isinstance(answer, str | list | dict) and len(answer) == 0) or not str(answer).strip()


def _named(rows: list[Row], spec: str, prompt_key: str, answer_key: str | None, rename: Mapping[str, str]) -> list[Row]:
    """The rows with their new names, the prompt under prompt_key and the answer under `answer`. Raises UserError."""
    for old, new in rename.items():
        _check_column("data.rename", old, rows[0], spec)
        if new in rows[0] and new not in rename:
            raise UserError(
                f"data.rename: {spec} has a column {new!r} already; rename that one too, or use another name"
            )
    if rename:
        rows = [_rename(row, rename) for row in rows]
    wanted = [("data.prompt_key", prompt_key, prompt_key), ("data.answer_key", answer_key, "answer")]
    for option, key, name in wanted:
        if key is None:
            continue
        if look_up(rows[0], key, _ABSENT) is _ABSENT:
            key = rename.get(key, key)  # the column's old name still means it
        _check_column(option, key, rows[0], spec)
        if key != name:
            rows = [{**row, name: look_up(row, key)} for row in rows]
    return rows


def _rename(row: Row, rename: Mapping[str, str]) -> Row:
    kept = {name: value for name, value in row.items() if name not in rename}
    return kept | {new: look_up(row, old) for old, new in rename.items()}


def _check_column(option: str, key: str, row: Row, spec: str) -> None:
    """Raises UserError, with a column that may be meant, unless the row has one of this name."""
    if look_up(row, key, _ABSENT) is not _ABSENT:
        return
    alike = {name for group in _SYNONYMS if key in group for name in group}
    near = [name for name in row if name in alike] or difflib.get_close_matches(key, row, n=1)
    inside = [f"{name}.{part}" for name, value in row.items() if isinstance(value, Mapping) for part in value]
    near = near or [path for path in inside if path.rpartition(".")[2] in {*alike, key.rpartition(".")[2]}]
    remedy = f"Set {option}: {near[0] if near else '<one of them>'}"
    if option == "data.rename":
        remedy = "Write data.rename: {" + (near[0] if near else "<one of them>") + ": <its new name>}"
    elif option == "data.answer_key":
        remedy += ", or null when no reward needs one"
    raise UserError(f'{option} "{key}" not found in {spec}; columns are {", ".join([*row, *inside])}. {remedy}')


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """The order of n problems in one epoch, [n], read-only. The same for the same arguments and numpy version."""
    order = np.random.Generator(np.random.PCG64([seed % 2**64, epoch])).permutation(n)
    order.setflags(write=False)  # it is cached
    return order


def problem_index(group_id: int, seed: int, num_problems: int, shuffle: bool = True) -> int:
    """Which problem group g asks: permutation(seed, g // n)[g % n]; g % n unshuffled. n consecutive groups ask all."""
    epoch, place = divmod(group_id, num_problems)
    return int(permutation(seed, epoch, num_problems)[place]) if shuffle else place


def sampling_seed(seed: int, group_id: int) -> int:
    """The engine's seed for one group, 0 ≤ s < 2³¹; the engine adds the number of the completion to it."""
    digest = hashlib.blake2b(f"{seed}:{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFF_FFFF


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """32 hexadecimal digits that change with any value, column or order of the rows that are asked.

    The tokens do not count: a chat template may write the date, and the run goes on tomorrow.
    """
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        columns = dict(prompt.problem.columns)
        digest.update(json.dumps(columns, sort_keys=True, default=_without_address).encode())
        digest.update(b"\n")
        for image in prompt.images:  # as the model sees it: other limits of pixels are other data
            digest.update(len(image.png).to_bytes(8, "little") + image.png)
    return digest.hexdigest()


def _without_address(value: Any) -> str:
    """An object's repr that the next process gives too."""
    return _ADDRESS.sub("", repr(value))
