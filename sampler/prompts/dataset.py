"""Turns rows into Problems, and defines the order in which the run's groups take them.

The order is a set of pure functions of the seed, so that the sampler has nothing to save.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config, Data
from common.config.data import Rows, RowSource, entries
from common.errors import UserError
from common.processes.exits import say
from common.processes.watchdog import report_progress
from common.types import ImageFile, Problem
from sampler.prompts.bad_rows import HALF, all_whole, usable
from sampler.prompts.columns import (
    Row,
    has_column,
    is_empty,
    look_up,
    require_column,
    with_named_columns,
)
from sampler.prompts.pictures import check_images, read_file, sources, unreadable
from sampler.prompts.sources import folder_of, read_rows, require_source

_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object
_MOST_ROWS_NAMED = 3


def load_data(option: str, spec: Rows, data: Data) -> list[Problem]:
    """Returns the problems of data.train or data.eval, and logs which rows it leaves out.

    A row with an empty answer is left out, because it cannot be scored. A few rows that cannot be
    used are left out, too. option: "data.train" or "data.eval", for messages. Raises UserError,
    also if no row has an answer or many cannot be used. The images of a row are not among its
    columns: see `whole_row`.
    """
    problems, errors = load_rows(entries(spec), data)
    if data.image_key is not None:
        readable = [problem for problem in problems if problem.index not in errors]
        if readable:
            check_images(option, readable, data)
        errors |= unreadable(option, readable)
    for problem in problems:
        for name in (data.prompt_key or "", "answer"):
            if not all_whole(problem.columns.get(name)):
                errors[problem.index] = f"{HALF} in {name!r}"
    problems = usable(option, problems, errors, data)
    if data.answer_key is None:
        return problems
    return _with_answers(option, problems, data)


def _with_answers(option: str, problems: list[Problem], data: Data) -> list[Problem]:
    """Returns the problems whose answer is not empty. Raises UserError if there are none."""
    answered = []
    empty = []  # row indexes
    for problem in problems:
        if is_empty(problem.columns["answer"]):
            empty.append(problem.index)
        else:
            answered.append(problem)
    if not answered:
        raise UserError(
            f"{option}: each of the {len(problems)} rows has an empty {data.answer_key!r}. Set "
            "data.answer_key to the column with the answers, or data.answer_key: null when no "
            "reward needs one"
        )
    if empty:
        rows = ", ".join(map(str, empty[:_MOST_ROWS_NAMED]))
        if len(empty) > _MOST_ROWS_NAMED:
            rows += ", …"
        say(
            f"{option}: {len(empty)} of {len(problems)} rows have an empty {data.answer_key!r} and "
            f"are left out: row {rows}"
        )
    return answered


def load_rows(row_sources: Sequence[RowSource], data: Data) -> tuple[list[Problem], dict[int, str]]:
    """Returns the problems of all rows, and why a row's images cannot be used, keyed by row index.

    row_sources: data sets, in the notation of sources.py. A problem's columns are the whole row,
    after `data.rename`, with the values of prompt_key and answer_key under the names prompt_key and
    `answer`. Rows of several data sets have the columns of all, None where their own data set lacks
    one. Raises UserError, also for a missing column.
    """
    tables = _read_tables(row_sources, data)
    columns: dict[str, None] = {}
    for table in tables:
        columns |= dict.fromkeys(table[0])
    if data.image_key is not None:
        columns.pop(data.image_key, None)
    scored_by = {}
    for entry in [*entries(data.eval), *entries(data.train)]:
        scored_by[entry.label] = tuple(entry.rewards or ())
    problems: list[Problem] = []
    errors: dict[int, str] = {}
    for source, table in zip(row_sources, tables, strict=True):
        folder = folder_of(source.path)
        rewards = scored_by.get(source.label, ())
        for row in table:
            index = len(problems)
            images: tuple[ImageFile, ...] = ()
            if data.image_key is not None:
                try:
                    images = sources(look_up(row, data.image_key), folder)
                except ValueError as error:
                    errors[index] = f"data.image_key {data.image_key!r}: {error}"
            full_row = _with_columns(row, columns)
            problems.append(Problem(index, full_row, images, source.label, rewards))
    return problems, errors


def _read_tables(row_sources: Sequence[RowSource], data: Data) -> list[list[Row]]:
    """Returns the rows of each data set, with renamed columns.

    Raises UserError, also for a missing column. Only one of the data sets must have data.image_key.
    """
    if not row_sources:
        raise UserError(
            "data: an empty list of data sets; name one, for example openai/gsm8k:main@train"
        )
    for source in row_sources:
        require_source(source.path)  # all paths are checked before the first is read
    tables = []
    for source in row_sources:
        rename = {**data.rename, **source.rename}
        rows = read_rows(source.path)
        tables.append(with_named_columns(rows, source.path, data, rename))
    image_key = data.image_key
    if image_key is not None and not any(has_column(table, image_key) for table in tables):
        require_column("data.image_key", image_key, tables[0], row_sources[0].path)
    return tables


def _with_columns(row: Row, columns: Mapping[str, None]) -> Row:
    """Returns the row with these columns, None where it has none."""
    if row.keys() == columns.keys():
        return row
    return {name: row.get(name) for name in columns}


def by_source(problems: Iterable[Problem], config: Config) -> list[tuple[Config, list[Problem]]]:
    """Returns the problems of each source, in order, with the settings that apply to them."""
    by_name: dict[str, list[Problem]] = {}
    for problem in problems:
        by_name.setdefault(problem.source, []).append(problem)
    return [(config.for_source(name), of_source) for name, of_source in by_name.items()]


def whole_row(problem: Problem, image_key: str | None) -> Mapping[str, Any]:
    """Returns the values that reward functions may request.

    These are the row's columns and, under image_key, the bytes of its image files. Raises OSError.
    """
    if image_key is None:
        return problem.columns
    return {**problem.columns, image_key: list(map(read_file, problem.images))}


@functools.lru_cache(maxsize=32)
def permutation(seed: int, epoch: int, n: int, source: int = 0) -> NDArray[np.int64]:
    """Returns the order of n problems in one epoch, [n], read-only.

    It depends only on the arguments and on numpy's version. source: the position of the source
    among several. Position 0 does not change the seed (SeedSequence), so the first source has the
    order of a single source.
    """
    generator = np.random.Generator(np.random.PCG64([seed % 2**64, epoch, source]))
    order = generator.permutation(n)
    order.setflags(write=False)  # the array is cached
    return order


def problem_index(
    group_id: int, seed: int, num_problems: int, shuffle: bool = True, source: int = 0
) -> int:
    """Returns the index of a group's problem. n consecutive groups take each of n problems once.

    This is permutation(seed, g // n)[g % n], or g % n without shuffling.
    """
    epoch, position = divmod(group_id, num_problems)
    if not shuffle:
        return position
    return int(permutation(seed, epoch, num_problems, source)[position])


def mixed_index(
    group_id: int, seed: int, parts: Sequence[tuple[Fraction | int, int]], shuffle: bool = True
) -> int:
    """Returns the index of a group's problem in a mix of sources, whose problems follow each other.

    parts: (weight, number of problems) of each source, in order. The first source, whose share of
    the weights is p, has the groups g at which ⌊(g + 1) p⌋ > ⌊g p⌋, and had ⌊g p⌋ groups before.
    The remaining groups are distributed to the other sources in the same way. At any time, a source
    has less than one group too few, and less than one too many for each source before it, because
    the last source gets what all others round off. Each source goes through its own problems in its
    own order. A single source has all groups.
    """
    first_problem = 0
    remaining_weight = sum(weight for weight, _ in parts)
    for source, (weight, num_problems) in enumerate(parts):
        num_before = int(group_id * weight // remaining_weight)
        if (group_id + 1) * weight // remaining_weight > num_before:
            own_index = problem_index(num_before, seed, num_problems, shuffle, source)
            return first_problem + own_index
        group_id -= num_before
        remaining_weight -= weight
        first_problem += num_problems
    raise AssertionError("the last source takes every group that remains")


def sampling_seed(seed: int, group_id: int) -> int:
    """Returns the engine's seed for a group, 0 ≤ s < 2³¹.

    The engine adds the number of the completion to it.
    """
    digest = hashlib.blake2b(f"{seed}:{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFF_FFFF


def fingerprint(problems: Sequence[Problem], data: Data) -> str:
    """Returns 32 hexadecimal digits that change with any value, column or order of the rows in use.

    Token ids do not count, because a chat template may write the date, and a run may continue on
    the next day.
    """
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        columns = json.dumps(dict(problem.columns), sort_keys=True, default=_lasting_repr)
        digest.update(columns.encode())
        digest.update(b"\n")
        for image in problem.images:
            file = read_file(image)
            # other limits of pixels make other images
            limits = f"{data.min_pixels} {data.max_pixels} {len(file)}\n"
            digest.update(limits.encode() + file)
            report_progress("comparing rows")
    return digest.hexdigest()


def _lasting_repr(value: Any) -> str:
    """Returns the repr of an object without its memory address, which differs between processes."""
    return _MEMORY_ADDRESS.sub("", repr(value))
