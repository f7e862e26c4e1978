"""One data source becomes rows: hub ids, .jsonl, .json and .parquet files, folders of them, save_to_disk folders.

Everything is read through the `datasets` library (a git clone of a hub repository is a folder too), except a .json file
whose rows are lists, which it cannot hold: each of those becomes a row with one column, `conversation`. Left out:
streaming (group g must be addressable).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.paths import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SPLIT = re.compile(r"[\w.]+(\[[^\]]*\])?(\([\w]+\))?(\+[\w.]+(\[[^\]]*\])?(\([\w]+\))?)*")
_SUBSETS_THERE = re.compile(
    r"(?:pick one among the available configs|Available|Available configs in the cache): (\[[^\]]*\])"
)


def read_rows(spec: str, decode_images: bool = True) -> list[dict[str, Any]]:
    """At least one row of `openai/gsm8k:main@train[:512]`, a file, a folder or a save_to_disk folder.

    decode_images: columns of images are PIL's, which hold every pixel in memory; else the files' {bytes, path}.

    The split is what follows the last `@` and may be a slice; without it the split is train, or the only one. Raises
    UserError for a path that does not exist (before `datasets` is imported), a missing subset or split, no rows, and a
    data set that is not found or cannot be read.
    """
    source, split = _split_off(spec)
    taken = _take(_splits(source), split, source)
    rows = [dict(row) for row in (taken if decode_images else _undecoded(taken))]
    if not rows:
        raise UserError(f"{spec} has no rows")
    return rows


def check_there(spec: str) -> None:
    """Raises UserError for a local file or folder that does not exist or has no format we read. Imports nothing."""
    path, _ = _path_and_subset(_split_off(spec)[0])
    name = str(path)
    looks_local = spec.startswith((".", "/", "~")) or path.suffix in _FORMATS or name.count("/") > 1
    if looks_local and not path.exists():
        raise UserError(f"data: no file or folder {name}.{did_you_mean(path)}")
    if path.is_file() and path.suffix not in _FORMATS:
        raise UserError(f"data: {name} is not one of {', '.join(_FORMATS)}; convert it, for example to .jsonl")
    if path.is_dir() and not (path / "README.md").is_file():
        kinds = sorted({file.suffix for file in path.iterdir() if file.suffix in _FORMATS})
        if ".parquet" in kinds and len(kinds) > 1:  # `datasets` would read the commonest kind and ignore the others
            raise UserError(
                f"data: folder {name} holds {' and '.join(kinds)} files; name one file, or split the folder"
            )


def _split_off(spec: str) -> tuple[str, str | None]:
    """("openai/gsm8k:main", "train[:512]") from "openai/gsm8k:main@train[:512]"; an @ in a folder's name stays."""
    if Path(spec).expanduser().exists():
        return spec, None
    source, at, split = spec.rpartition("@")
    return (source, split) if at and _SPLIT.fullmatch(split) else (spec, None)


def _path_and_subset(source: str) -> tuple[Path, str]:
    """(Path("openai/gsm8k"), "main") from "openai/gsm8k:main"; a colon in a folder's name stays."""
    if Path(source).expanduser().exists():
        return Path(source).expanduser(), ""
    name, _, subset = source.partition(":")
    return Path(name).expanduser(), subset


def _splits(source: str) -> Mapping[str, Dataset]:
    """All splits of the data set, memory-mapped. Raises UserError."""
    check_there(source)
    path, subset = _path_and_subset(source)

    import datasets  # costs half a second; user errors above come first

    try:
        if not path.exists():
            return datasets.load_dataset(str(path), subset or None)
        datasets.disable_progress_bars()  # local files take a moment; a download keeps its bar
        if path.is_file():
            if path.suffix == ".json" and (rows := _rows_that_are_lists(path)):
                return {"train": datasets.Dataset.from_list(rows)}
            return datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path))
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return {str(saved.split or "train"): saved} if isinstance(saved, datasets.Dataset) else saved
        return datasets.load_dataset(str(path), subset or None)
    except Exception as error:
        raise UserError(_explain(error, str(path), subset, is_local=path.exists())) from error


def _undecoded(rows: Dataset) -> Dataset:
    import datasets

    plain = datasets.Image(decode=False)
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, plain)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(name, datasets.List(plain))
    return rows


def folder_of(spec: str) -> Path:
    """What relative paths in the rows of a local data set count from."""
    path, _ = _path_and_subset(_split_off(spec)[0])
    return path if path.is_dir() else path.parent


def _rows_that_are_lists(path: Path) -> list[dict[str, Any]]:
    """[{"conversation": [a, b]}] for a file that holds [[a, b]]; [] for any other, of which only the start is read."""
    with path.open(encoding="utf-8") as file:
        start = re.sub(r"\s", "", file.read(4096))
        if not start.startswith("[["):
            return []
        file.seek(0)
        return [{"conversation": row} for row in json.load(file)]


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
