"""Data set rows become Problems, and the run's stream of groups gets its order.

Everything is read through the `datasets` library: hub ids, .jsonl, .json and .parquet files, folders of them (a git
clone of a hub repository too) and save_to_disk folders. The order is a set of pure functions of the seed, so that the
sampler has nothing to save. Left out: streaming (group g must be addressable) and renaming columns (reward functions
get the row as it is).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.config import UserError
from common.types import Problem

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SPLIT = re.compile(r"[\w.]+(\[[^\]]*\])?(\([\w]+\))?(\+[\w.]+(\[[^\]]*\])?(\([\w]+\))?)*")
_SUBSETS_THERE = re.compile(
    r"(?:pick one among the available configs|Available|Available configs in the cache): (\[[^\]]*\])"
)
_SYNONYMS = (
    {"question", "problem", "prompt", "instruction", "input", "query", "messages"},
    {"answer", "solution", "ground_truth", "target", "output", "label", "final_answer"},
)


def load_problems(spec: str, prompt_key: str = "question", answer_key: str = "answer") -> list[Problem]:
    """Every row of `openai/gsm8k:main@train[:512]`, of a file, of a folder or of a save_to_disk folder.

    The split is what follows the last `@` and may be a slice; without it the split is train, or the only one. A
    Problem's columns are the whole row; the column answer_key is there under the name `answer` too. Raises UserError
    for a path that does not exist (before `datasets` is imported), a missing subset, split or column, and a data set
    that is not found.
    """
    source, split = _split_off(spec)
    rows = _take(_splits(source), split, source)
    for option, key in (("data.prompt_key", prompt_key), ("data.answer_key", answer_key)):
        if key not in rows.column_names:
            raise UserError(_missing_column(option, key, rows.column_names, source))
    if len(rows) == 0:
        raise UserError(f"{spec} has no rows")
    return [Problem(i, {**row, "answer": row[answer_key]}) for i, row in enumerate(rows)]


def _split_off(spec: str) -> tuple[str, str | None]:
    """("openai/gsm8k:main", "train[:512]") from "openai/gsm8k:main@train[:512]"; an @ in a folder's name stays."""
    if Path(spec).expanduser().exists():
        return spec, None
    source, at, split = spec.rpartition("@")
    return (source, split) if at and _SPLIT.fullmatch(split) else (spec, None)


def _splits(source: str) -> Mapping[str, Dataset]:
    """All splits of the data set, memory-mapped. Raises UserError."""
    name, _, subset = source.partition(":") if not Path(source).expanduser().exists() else (source, "", "")
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or path.suffix in _FORMATS or name.count("/") > 1
    if looks_local and not path.exists():
        near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1)
        raise UserError(
            f"data: no file or folder {name} (working directory {os.getcwd()})."
            + (f" Did you mean {path.parent / near[0]}?" if near else "")
        )
    if path.is_file() and path.suffix not in _FORMATS:
        raise UserError(f"data: {name} is not one of {', '.join(_FORMATS)}; convert it, for example to .jsonl")

    if path.is_dir() and not (path / "README.md").is_file():
        kinds = sorted({file.suffix for file in path.iterdir() if file.suffix in _FORMATS})
        if ".parquet" in kinds and len(kinds) > 1:  # `datasets` would read the commonest kind and ignore the others
            raise UserError(
                f"data: folder {name} holds {' and '.join(kinds)} files; name one file, or split the folder"
            )

    import datasets  # costs half a second; user errors above come first

    try:
        if not path.exists():
            return datasets.load_dataset(name, subset or None)
        datasets.disable_progress_bars()  # local files take a moment; a download keeps its bar
        if path.is_file():
            return datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path))
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return {str(saved.split or "train"): saved} if isinstance(saved, datasets.Dataset) else saved
        return datasets.load_dataset(str(path), subset or None)
    except Exception as error:
        raise UserError(_explain(error, name, subset, is_local=path.exists())) from error


def _explain(error: Exception, name: str, subset: str, is_local: bool) -> str:
    """The message for what `datasets` raised: a missing or unknown subset, or a data set it cannot find or read."""
    if found := _SUBSETS_THERE.search(str(error)):
        subsets = re.findall(r"'([^']*)'", found[1])
        near = difflib.get_close_matches(subset, subsets, n=1) or subsets[:1]
        there = f"no subset {subset!r}; its subsets are" if subset else "subsets"
        return f"{name} has {there} {', '.join(subsets)}. Write {name}:{near[0]}@train"
    first_line = next(iter(str(error).splitlines()), "")
    if is_local:
        return f"data: {name} cannot be read: {type(error).__name__}: {first_line}"
    settings = [f"HF_HOME={os.environ.get('HF_HOME', '~/.cache/huggingface')}"]
    settings += [f"{key}={os.environ[key]}" for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if key in os.environ]
    return (
        f"data set {name!r} is no file or folder here and cannot be had from the hub or the cache: {first_line} "
        f"({', '.join(settings)}). Download it where there is a network: hf download --repo-type dataset {name}, or "
        "name a local file or folder. Behind a firewall: HF_ENDPOINT=…"
    )


def _take(splits: Mapping[str, Dataset], split: str | None, source: str) -> Dataset:
    """The rows of `train`, `train[:512]`, `train[10%:20%]` or `train+test`. Raises UserError."""
    import datasets

    sizes = {str(name): len(rows) for name, rows in splits.items()}
    there = ", ".join(f"{name} ({n})" for name, n in sizes.items())
    if split is None:
        split = "train" if "train" in sizes else next(iter(sizes))
        if split != "train" and len(sizes) > 1:
            raise UserError(f"{source} has splits {there}; write for example {source}@{split}")
    for part in split.split("+"):
        if (name := part.partition("[")[0]) not in sizes:
            raise UserError(f'split "{name}" is not in {source}; it has {there}')
    try:
        pieces = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f'split "{split}" of {source}: {error}. Slices look like train[:512] or train[10%:20%]'
        ) from None
    parts = [splits[p.splitname].select(range(p.from_, max(p.from_, p.to))) for p in pieces]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _missing_column(option: str, key: str, columns: Sequence[str], source: str) -> str:
    alike = {name for group in _SYNONYMS if key in group for name in group}
    near = [name for name in columns if name in alike] or difflib.get_close_matches(key, columns, n=1)
    return (
        f'{option} "{key}" not found in {source}; columns are {", ".join(columns)}. '
        f"Set {option}: {near[0] if near else '<one of them>'}"
    )


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


def fingerprint(problems: Sequence[Problem]) -> str:
    """32 hexadecimal digits that change with any value, column or order of the problems."""
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        digest.update(json.dumps(dict(problem.columns), sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
