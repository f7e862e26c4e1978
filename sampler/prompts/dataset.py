"""Turns rows into Problems, and defines the order in which the run's groups take them.

The order is a set of pure functions of the seed, so that the sampler has nothing to save.
"""

import difflib
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
from rewards import ALWAYS_PASSED
from sampler.prompts.bad_rows import HALF, all_whole, usable
from sampler.prompts.pictures import check_images, read_file, sources, unreadable
from sampler.prompts.sources import folder_of, read_rows, require_source

_SYNONYMS = (
    {"question", "problem", "prompt", "instruction", "input", "query", "messages"},
    {"answer", "solution", "ground_truth", "target", "output", "label", "final_answer"},
    {"image", "images", "picture", "pictures", "img"},
)
_ABSENT = object()
_RESERVED = {*ALWAYS_PASSED, "self"}  # argument names of reward functions
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Row = dict[str, Any]


def load_data(option: str, spec: Rows, data: Data) -> list[Problem]:
    """Returns the problems of one data set of the config; `option` is data.train or data.eval. Logs what it leaves out.

    A row with an empty answer is left out, because it cannot be scored, and so are a few that cannot be used. Raises
    UserError, also when no row has an answer or many cannot be used. Images are not a column: see `whole_row`.
    """
    problems, bad = load_rows(entries(spec), data)
    if data.image_key is not None:
        if named := [problem for problem in problems if problem.index not in bad]:
            check_images(option, named, data)
        bad |= unreadable(option, named)
    for problem in problems:
        for name in (data.prompt_key or "", "answer"):
            if not all_whole(problem.columns.get(name)):
                bad[problem.index] = f"{HALF} in {name!r}"
    problems = usable(option, problems, bad, data)
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
        what = f"{len(empty)} of {len(problems)} rows have an empty {data.answer_key!r} and are left out"
        say(f"{option}: {what}: row {places}")
    return [problem for problem in problems if not is_empty(problem.columns["answer"])]


def load_rows(given: Sequence[RowSource], data: Data) -> tuple[list[Problem], dict[int, str]]:
    """Returns (all rows, {index: why a row's images cannot be used}); the notation of paths is in sources.py.

    A Problem's columns are the whole row, after `data.rename`, and the values of prompt_key and answer_key under the
    names prompt_key and `answer`. Rows of several data sets have the union of all columns, None where their own set
    lacks one. Raises UserError, also for a missing column; at least one of several data sets must have image_key.
    """
    image_key = data.image_key
    if not given:
        raise UserError("data: an empty list of data sets; name one, for example openai/gsm8k:main@train")
    for source in given:
        require_source(source.path)  # all paths are checked before the first is read
    tables = [_named(read_rows(s.path), s.path, data, {**data.rename, **s.rename}) for s in given]
    if image_key is not None and not any(_has(table, image_key) for table in tables):
        _check_column("data.image_key", image_key, tables[0], given[0].path)
    columns = dict.fromkeys(name for table in tables for name in table[0] if name != image_key)
    scored_by = {entry.label: tuple(entry.rewards or ()) for entry in [*entries(data.eval), *entries(data.train)]}
    problems, bad = list[Problem](), dict[int, str]()
    for source, table in zip(given, tables, strict=True):
        folder = folder_of(source.path)
        for row in table:
            images: tuple[ImageFile, ...] = ()
            try:
                images = sources(look_up(row, image_key), folder) if image_key is not None else ()
            except ValueError as error:
                bad[len(problems)] = f"data.image_key {image_key!r}: {error}"
            row = row if row.keys() == columns.keys() else {name: row.get(name) for name in columns}
            problems.append(Problem(len(problems), row, images, source.label, scored_by.get(source.label, ())))
    return problems, bad


def by_source(problems: Iterable[Problem], config: Config) -> list[tuple[Config, list[Problem]]]:
    """Returns the problems of each source, in order, with the settings that apply to them."""
    rows: dict[str, list[Problem]] = {}
    for problem in problems:
        rows.setdefault(problem.source, []).append(problem)
    return [(config.for_source(source), own) for source, own in rows.items()]


def whole_row(problem: Problem, image_key: str | None) -> Mapping[str, Any]:
    """Returns the row's columns, with its image files under image_key: the values that reward functions may request."""
    return problem.columns if image_key is None else {**problem.columns, image_key: [*map(read_file, problem.images)]}


def look_up(row: Any, key: str, default: Any = None) -> Any:
    """Returns the column `key`, or the value at a path such as `a.b.0` inside one; `default` if there is none.

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


def _named(rows: list[Row], spec: str, data: Data, rename: Mapping[str, str]) -> list[Row]:
    """Returns renamed rows, with the prompt under prompt_key and the answer under `answer`. Raises UserError."""
    # a rename away from a reserved name applies only to data sets that have the column
    rename = {old: new for old, new in rename.items() if old in rows[0] or old not in _RESERVED}
    for old, new in rename.items():
        _check_column("data.rename", old, rows, spec)
        if new in rows[0] and new not in rename:
            raise UserError(f"data.rename: {spec} has a column {new!r} already; rename that too, or use another name")
    if rename:
        rows = [_rename(row, rename) for row in rows]
    if reserved := sorted(_RESERVED & rows[0].keys()):
        others = dict.fromkeys(reserved) | dict(zip(rename.values(), rename, strict=True))
        others = {old or new: f"given_{new}" if new in reserved else new for new, old in others.items()}
        raise UserError(
            f"{spec} has columns of a name under which reward functions get something else: {', '.join(reserved)}. "
            f"Set data.rename: {{{', '.join(f'{old}: {new}' for old, new in others.items())}}}"
        )
    if data.answer_key not in (None, "answer", rename.get("answer")) and "answer" in rows[0]:
        say(f"{spec}: rewards get {data.answer_key!r} as their `answer`, in the place of the column 'answer'")
    keys = ("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)
    for option, key in keys:
        if key is None:
            continue
        name = "answer" if option == "data.answer_key" else key
        if not _has(rows, key):
            key = rename.get(key, key)  # the option may still use the column's old name
        _check_column(option, key, rows, spec)
        if key != name:
            rows = [{**row, name: look_up(row, key)} for row in rows]
    return rows


def _rename(row: Row, rename: Mapping[str, str]) -> Row:
    kept = {name: value for name, value in row.items() if name not in rename}
    return kept | {new: look_up(row, old) for old, new in rename.items()}


def _has(rows: Sequence[Row], key: str) -> bool:
    """Returns whether a row has the key: what it looks into may be null in others."""
    return any(look_up(row, key, _ABSENT) is not _ABSENT for row in rows)


def _check_column(option: str, key: str, rows: Sequence[Row], spec: str) -> None:
    """Raises UserError, which suggests a similar column, unless a row has one of this name."""
    if _has(rows, key):
        return
    row = rows[0] | {name: value for row in rows for name, value in row.items() if value is not None}
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


@functools.lru_cache(maxsize=32)
def permutation(seed: int, epoch: int, n: int, source: int = 0) -> NDArray[np.int64]:
    """Returns the order of n problems in one epoch, [n], read-only; it is a function of arguments and numpy version.

    source: position among several sources. A seed that ends with 0 is the seed without it (SeedSequence).
    """
    order = np.random.Generator(np.random.PCG64([seed % 2**64, epoch, source])).permutation(n)
    order.setflags(write=False)  # the array is cached
    return order


def problem_index(group_id: int, seed: int, num_problems: int, shuffle: bool = True, source: int = 0) -> int:
    """Returns group g's problem, permutation(seed, g // n)[g % n] or unshuffled g % n; n consecutive groups ask all."""
    epoch, place = divmod(group_id, num_problems)
    return int(permutation(seed, epoch, num_problems, source)[place]) if shuffle else place


def mixed_index(group_id: int, seed: int, parts: Sequence[tuple[Fraction | int, int]], shuffle: bool = True) -> int:
    """Returns the problem of group g in a mix of sources; `parts` has (weight, number of problems) of each, in order.

    Source 1, whose share is p, has the groups at which ⌊(g + 1) p⌋ > ⌊g p⌋, and had ⌊g p⌋ of those before; the
    remaining groups are distributed to the other sources in the same way. At any time a source has less than one
    group too few, and less than one too many for each source before it: a last one gets what all of these round off.
    Each source goes through its own problems in its own order. A single source has all groups.
    """
    first, left = 0, sum(weight for weight, _ in parts)
    for source, (weight, size) in enumerate(parts):
        before = group_id * weight // left
        if (group_id + 1) * weight // left > before:
            return first + problem_index(int(before), seed, size, shuffle, source)
        group_id, left, first = int(group_id - before), left - weight, first + size
    raise AssertionError("the last source has all that is left")


def sampling_seed(seed: int, group_id: int) -> int:
    """Returns the engine's seed for one group, 0 ≤ s < 2³¹; the engine adds the number of the completion to it."""
    digest = hashlib.blake2b(f"{seed}:{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFF_FFFF


def fingerprint(problems: Sequence[Problem], data: Data) -> str:
    """Returns 32 hexadecimal digits that change with any value, column or order of the rows in use.

    Token ids do not count: a chat template may write the date, and a run may continue on the next day.
    """
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        columns = dict(problem.columns)
        # objects enter as a repr that is the same in the next process
        digest.update(json.dumps(columns, sort_keys=True, default=lambda o: _ADDRESS.sub("", repr(o))).encode())
        digest.update(b"\n")
        for image in map(read_file, problem.images):  # other pixel limits make other images
            digest.update(f"{data.min_pixels} {data.max_pixels} {len(image)}\n".encode() + image)
            report_progress("comparing rows")
    return digest.hexdigest()
