"""Reads the rows of a data set: a hub id, a file, a folder of files, or a folder of save_to_disk.

A .jsonl or .json file, compressed or not, is read unchanged. The `datasets` library reads all other
data sets, also a git clone of a hub repository. It would turn strings that look like dates into
times, and large integers into floats. NaN, which pandas writes for a cell without a value, becomes
None. Not supported: streaming, because every group's row must be found by its index.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from common.errors import UserError, first_line
from common.hub import work_offline_without_hub
from common.paths import did_you_mean
from model.files.hub import not_available_error
from sampler.prompts.json_files import COMPRESSED, opened, rows_of_json
from sampler.prompts.tables import rows_of_table

if TYPE_CHECKING:
    from datasets import Dataset

Table: TypeAlias = "list[dict[str, Any]] | Dataset"

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_PART = r"[\w.]+(\[[^\]]*\])?(\([\w]+\))?"  # train, train[:512] or train[:10%](pct1_dropremainder)
_SPLIT = re.compile(rf"{_PART}(\+{_PART})*")
_FILE_AND_SLICE = re.compile(r"([^@]+)(\[[^\]]*\])")
_KNOWN_SUBSETS = re.compile(  # in messages of `datasets`
    r"(?:pick one among the available configs|Available|Available configs in the cache): "
    r"(\[[^\]]*\])"
)


@dataclass(frozen=True)
class _DataSet:
    """A data set as the settings name it, such as openai/gsm8k:main@train[:512]."""

    name: str  # without the split: openai/gsm8k:main
    path: Path  # of the file or folder; for a data set of the hub its id, openai/gsm8k
    subset: str  # main; "" without one
    split: str | None  # train[:512]


def read_rows(spec: str) -> list[dict[str, Any]]:
    """Returns the rows, at least one, of a data set such as openai/gsm8k:main@train[:512].

    The split follows the last `@` and may be a slice. Without it, it is `train` or the only split.
    Columns of images, sounds and films contain their files, {bytes, path}, and these bytes are
    views of the table. Raises UserError.
    """
    data_set = _parse(spec)
    _require_readable(data_set, spec)
    rows: list[dict[str, Any]] = []
    for table in _select_split(_read_splits(data_set), data_set):
        if isinstance(table, list):
            rows += table
        else:
            rows += rows_of_table(table)
    if not rows:
        raise UserError(f"{spec} has no rows")
    return rows


def require_source(spec: str) -> bool:
    """Returns whether a data set is a local file or folder.

    Raises UserError if it looks local and does not exist, or if its format is not supported.
    """
    data_set = _parse(spec)
    _require_readable(data_set, spec)
    return data_set.path.exists()


def folder_of(spec: str) -> Path:
    """Returns the folder at which relative paths in the rows of a local data set start."""
    path = _parse(spec).path
    return path if path.is_dir() else path.parent


def _parse(spec: str) -> _DataSet:
    """Returns the parts of a data set's notation. An existing path may contain @ or a colon."""
    name = spec
    split = None
    if not _exists(spec):
        name, split = _name_and_split(spec)
    if _exists(name):
        return _DataSet(name, Path(name).expanduser(), "", split)
    path, _, subset = name.partition(":")
    return _DataSet(name, Path(path).expanduser(), subset, split)


def _name_and_split(spec: str) -> tuple[str, str | None]:
    """Returns ("openai/gsm8k:main", "train[:512]") for openai/gsm8k:main@train[:512].

    A file has only one split, so rows.jsonl[:8] means ("rows.jsonl", "train[:8]").
    """
    cut = _FILE_AND_SLICE.fullmatch(spec)
    if cut and Path(cut[1]).expanduser().is_file():
        return cut[1], f"train{cut[2]}"
    name, at, split = spec.rpartition("@")
    if at and _SPLIT.fullmatch(split):
        return name, split
    return spec, None


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _format_suffix(path: Path) -> str:
    """Returns the suffix of a file without that of its compression: .jsonl for rows.jsonl.gz."""
    if path.suffix in COMPRESSED:
        return Path(path.stem).suffix
    return path.suffix


def _require_readable(data_set: _DataSet, spec: str) -> None:
    """Raises UserError for a local data set that does not exist, or whose format is unsupported."""
    path = data_set.path
    suffix = _format_suffix(path)
    looks_like_path = spec.startswith((".", "/", "~")) or str(path).count("/") > 1
    if not path.exists() and (looks_like_path or suffix in _FORMATS):
        raise UserError(f"data: no file or folder {path}.{did_you_mean(path)}")
    if path.is_file() and suffix not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise UserError(
            f"data: {path} is not one of {known}, nor one of them behind which "
            f"{', '.join(COMPRESSED)} stands; convert it, for example to .jsonl"
        )
    if path.is_dir() and not (path / "README.md").is_file():
        suffixes = {_format_suffix(file) for file in path.iterdir()}.intersection(_FORMATS)
        # `datasets` would read the most frequent format and ignore the others
        if ".parquet" in suffixes and len(suffixes) > 1:
            raise UserError(
                f"data: folder {path} holds {' and '.join(sorted(suffixes))} files; name one file, "
                "or split the folder"
            )


def _read_splits(data_set: _DataSet) -> Mapping[str, Table]:
    """Returns all splits of a data set, keyed by name. Raises UserError."""
    path = data_set.path
    if path.is_file() and _FORMATS[_format_suffix(path)] == "json":
        return {"train": rows_of_json(path)}
    if not path.exists():
        work_offline_without_hub()
    import datasets  # takes half a second, so user errors above come first

    if path.exists():
        datasets.disable_progress_bars()  # local files take a moment; a download keeps its bar
    try:
        return _load_with_datasets(path, data_set.subset)
    except Exception as error:
        raise _data_set_error(error, data_set) from error


def _load_with_datasets(path: Path, subset: str) -> Mapping[str, Table]:
    """Returns the splits that the `datasets` library reads. Raises its exceptions."""
    import datasets

    if path.is_file():
        suffix = _format_suffix(path)
        options = _text_options([path])
        if suffix == ".tsv":
            options["sep"] = "\t"
        return datasets.load_dataset(_FORMATS[suffix], data_files=str(path), **options)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            return {str(saved.split or "train"): saved}
        return saved
    return datasets.load_dataset(str(path), subset or None, **_text_options(path.rglob("*")))


def _text_options(files: Iterable[Path]) -> dict[str, Any]:
    """Returns options of `datasets` that keep each cell of .csv and .tsv files as its text.

    Otherwise, 007 would become 7, and None or NA a missing value. Returns {} for other files.
    """
    first = None
    for file in files:
        suffix = _format_suffix(file)
        if suffix in _FORMATS and suffix not in _SEPARATORS:
            return {}
        if suffix in _SEPARATORS and first is None:
            first = file
    if first is None:
        return {}
    import datasets

    with opened(first) as text:
        lines = csv.reader(text, delimiter=_SEPARATORS[_format_suffix(first)])
        header = next(lines, [])
    features = datasets.Features(dict.fromkeys(header, datasets.Value("string")))
    return {"features": features, "keep_default_na": False}


def _data_set_error(error: Exception, data_set: _DataSet) -> UserError:
    """Returns the error for an exception of `datasets`.

    The subset may be wrong, or the data set may not exist or not be readable.
    """
    name = str(data_set.path)
    known_subsets = _KNOWN_SUBSETS.search(str(error))
    if known_subsets:
        subset = data_set.subset
        subsets = re.findall(r"'([^']*)'", known_subsets[1])
        closest = difflib.get_close_matches(subset, subsets, n=1) or subsets
        has = f"no subset {subset!r}; its subsets are" if subset else "subsets"
        listing = ", ".join(subsets)
        return UserError(f"{name} has {has} {listing}. Write {name}:{closest[0]}@train")
    if data_set.path.exists():
        kind = type(error).__name__
        return UserError(f"data: {name} cannot be read: {kind}: {first_line(error)}")
    return not_available_error(name, error, "data set")


def _select_split(splits: Mapping[str, Table], data_set: _DataSet) -> list[Table]:
    """Returns the tables of train, train[:512], train[10%:20%] or train+test, part by part.

    Raises UserError if there is no such split.
    """
    sizes = {str(name): len(rows) for name, rows in splits.items()}
    split = data_set.split or _only_split(sizes, data_set)
    for part in split.split("+"):
        name = part.partition("[")[0]
        if name not in sizes:
            raise UserError(f'split "{name}" is not in {data_set.name}; it has {_listing(sizes)}')
    if split in sizes:
        return [_without_dates(splits[split], data_set)]
    import datasets

    try:
        pieces = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f'split "{split}" of {data_set.name}: {error}. Slices look like train[:512] or '
            "train[10%:20%]"
        ) from None
    tables: list[Table] = []
    for piece in pieces:
        rows = _without_dates(splits[piece.splitname], data_set)
        end = max(piece.from_, piece.to)
        if isinstance(rows, list):
            tables.append(rows[piece.from_ : end])
        else:
            tables.append(rows.select(range(piece.from_, end)))
    return tables


def _only_split(sizes: Mapping[str, int], data_set: _DataSet) -> str:
    """Returns `train` or the only split. Raises UserError if there are several others."""
    if "train" in sizes:
        return "train"
    first = next(iter(sizes))
    if len(sizes) > 1:
        raise UserError(
            f"{data_set.name} has splits {_listing(sizes)}; write for example "
            f"{data_set.name}@{first}"
        )
    return first


def _listing(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({size})" for name, size in sizes.items())


def _without_dates(rows: Table, data_set: _DataSet) -> Table:
    """Returns the rows. Raises UserError if `datasets` read a column of text in JSON as dates."""
    if isinstance(rows, list) or rows.info.builder_name != "json":
        return rows
    for name, feature in rows.features.items():
        if "timestamp" in str(feature):
            raise UserError(
                f"data: column {name} of {data_set.name} holds text that is read as dates, and "
                "would be changed; name its .jsonl file, which is read as it is"
            )
    return rows
