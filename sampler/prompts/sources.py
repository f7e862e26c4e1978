"""Reads the rows of a data source: hub ids, files of the formats below, folders of them, save_to_disk folders.

A .jsonl or .json file, compressed or not, is read unchanged: the `datasets` library, which reads all other sources (a
git clone of a hub repository is a folder too), would make times of strings that look like dates, and floats of large
integers. NaN, which pandas writes for a cell without a value, becomes None. Left out: streaming (group g must be
addressable).
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from common.errors import UserError, first_line
from common.hub import work_offline_without_hub
from common.paths import did_you_mean
from model.files.hub import not_available_error
from sampler.prompts.progress import counted
from sampler.prompts.tables import rows_of_table

if TYPE_CHECKING:
    from datasets import Dataset

Table: TypeAlias = "list[dict[str, Any]] | Dataset"

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = (".gz", ".zst", ".bz2")  # behind any of them
_NO_JSON = (ValueError, RecursionError)
_JSON = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))
_SPLIT = re.compile(r"[\w.]+(\[[^\]]*\])?(\([\w]+\))?(\+[\w.]+(\[[^\]]*\])?(\([\w]+\))?)*")
_CUT = re.compile(r"([^@]+)(\[[^\]]*\])")
_SUBSETS_THERE = re.compile(
    r"(?:pick one among the available configs|Available|Available configs in the cache): (\[[^\]]*\])"
)


def read_rows(spec: str) -> list[dict[str, Any]]:
    """Returns the rows, at least one, of `openai/gsm8k:main@train[:512]`, a file, a folder or a save_to_disk folder.

    Columns of images, sounds and films contain their files, {bytes, path}; bytes are views of the table. The split
    follows the last `@` and may be a slice; without it, it is train or the only one. Raises UserError.
    """
    source, split = _source_and_split(spec)
    parts = _select_splits(_splits(source), split, source)
    rows = [row for part in parts for row in (part if isinstance(part, list) else rows_of_table(part))]
    if not rows:
        raise UserError(f"{spec} has no rows")
    return rows


def require_source(spec: str) -> bool:
    """Returns whether a source is local. Raises UserError for a local one that is absent or has no format we read."""
    path, _ = _path_and_subset(_source_and_split(spec)[0])
    name = str(path)
    looks_local = spec.startswith((".", "/", "~")) or _suffix(path) in _FORMATS or name.count("/") > 1
    if looks_local and not path.exists():
        raise UserError(f"data: no file or folder {name}.{did_you_mean(path)}")
    if path.is_file() and _suffix(path) not in _FORMATS:
        known = f"{', '.join(_FORMATS)}, nor one of them behind which {', '.join(_COMPRESSED)} stands"
        raise UserError(f"data: {name} is not one of {known}; convert it, for example to .jsonl")
    if path.is_dir() and not (path / "README.md").is_file():
        kinds = sorted({_suffix(file) for file in path.iterdir() if _suffix(file) in _FORMATS})
        if ".parquet" in kinds and len(kinds) > 1:  # `datasets` would read the commonest kind and ignore the others
            raise UserError(
                f"data: folder {name} holds {' and '.join(kinds)} files; name one file, or split the folder"
            )
    return path.exists()


def _suffix(path: Path) -> str:
    """Returns the suffix of the format: ".jsonl" of rows.jsonl.gz."""
    return Path(path.stem if path.suffix in _COMPRESSED else path.name).suffix


def _source_and_split(spec: str) -> tuple[str, str | None]:
    """Splits "openai/gsm8k:main@train[:512]" into ("openai/gsm8k:main", "train[:512]"); paths may have an @.

    The rows of a file may be cut without naming its only split: "rows.jsonl[:8]" is ("rows.jsonl", "train[:8]").
    """
    if Path(spec).expanduser().exists():
        return spec, None
    if (cut := _CUT.fullmatch(spec)) and Path(cut[1]).expanduser().is_file():
        return cut[1], f"train{cut[2]}"
    source, at, split = spec.rpartition("@")
    return (source, split) if at and _SPLIT.fullmatch(split) else (spec, None)


def _path_and_subset(source: str) -> tuple[Path, str]:
    """Returns (Path("openai/gsm8k"), "main") for "openai/gsm8k:main"; a colon in a folder's name stays."""
    if Path(source).expanduser().exists():
        return Path(source).expanduser(), ""
    name, _, subset = source.partition(":")
    return Path(name).expanduser(), subset


def _splits(source: str) -> Mapping[str, Table]:
    """Returns all splits of the data set. Raises UserError."""
    require_source(source)
    path, subset = _path_and_subset(source)
    if path.is_file() and _FORMATS[_suffix(path)] == "json":
        return {"train": _rows_of_json(path)}

    if not path.exists():
        work_offline_without_hub()
    import datasets  # costs half a second; user errors above come first

    try:
        if path.exists():
            datasets.disable_progress_bars()  # local files take a moment; a download keeps its bar
        if path.is_file():
            options = _as_text([path]) | ({"sep": "\t"} if _suffix(path) == ".tsv" else {})
            return datasets.load_dataset(_FORMATS[_suffix(path)], data_files=str(path), **options)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return {str(saved.split or "train"): saved} if isinstance(saved, datasets.Dataset) else saved
        return datasets.load_dataset(str(path), subset or None, **_as_text(path.rglob("*")))
    except Exception as error:
        raise _data_set_error(error, str(path), subset, is_local=path.exists()) from error


def _as_text(files: Iterable[Path]) -> dict[str, Any]:
    """Returns the options with which the cells of tables in text are read as they stand, also 007, None and NA."""
    tables = [file for file in files if _suffix(file) in _FORMATS]
    if not tables or any(_suffix(table) not in _SEPARATORS for table in tables):
        return {}
    import datasets

    with _opened(tables[0]) as file:
        names = next(csv.reader(file, delimiter=_SEPARATORS[_suffix(tables[0])]), [])
    return {"features": datasets.Features({name: datasets.Value("string") for name in names}), "keep_default_na": False}


def folder_of(spec: str) -> Path:
    """Returns the folder at which relative paths in the rows of a local data set start."""
    path, _ = _path_and_subset(_source_and_split(spec)[0])
    return path if path.is_dir() else path.parent


def _rows_of_json(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON list or of a JSON-lines file; each has the columns of all, None where it lacks one.

    [["a", "b"]] → [{"conversation": ["a", "b"]}]. Raises UserError with the line that is no JSON or no row.
    """
    rows, names = list[dict[str, Any]](), dict[str, str]()
    try:
        for number, row in enumerate(counted(_values(path), "reading rows"), 1):
            if not isinstance(row, dict | list):
                raise UserError(f"data: {path}: row {number} is {row!r:.80}, not an object; write one per line")
            row = row if isinstance(row, dict) else {"conversation": row}
            rows.append({names.setdefault(name, name): value for name, value in row.items()})  # one object per name
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data: {path} cannot be read: {error}") from None
    columns = list(names)
    return [row if list(row) == columns else {name: row.get(name) for name in columns} for row in rows]


def _values(path: Path) -> Iterator[Any]:
    """Yields the values of a file with one per line, which is never held whole, or with one list of them."""
    with _opened(path) as file:
        is_list = next((line for line in file if line.strip()), "").lstrip().startswith("[")
    if is_list:
        with contextlib.suppress(*_NO_JSON), _opened(path) as file:  # otherwise the file has one list per line
            yield from _JSON.decode(file.read())
            return
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _JSON.decode(line)
                except _NO_JSON as error:
                    raise UserError(
                        f"data: {path}, line {number}, cannot be read: {error}; write one object per line, or a list"
                    ) from None


def _opened(path: Path) -> IO[str]:
    """Opens a file, compressed or not, whose lines end with "\\n" alone: JSON may contain other ends, as U+2028."""
    if path.suffix not in _COMPRESSED:
        return path.open(encoding="utf-8-sig", newline="\n")
    import pyarrow

    return io.TextIOWrapper(pyarrow.input_stream(str(path)), encoding="utf-8-sig", newline="\n")


def _data_set_error(error: Exception, name: str, subset: str, is_local: bool) -> UserError:
    """Returns the error for an exception of `datasets`: a wrong subset, or a data set not found or unreadable."""
    if found := _SUBSETS_THERE.search(str(error)):
        subsets = re.findall(r"'([^']*)'", found[1])
        closest = difflib.get_close_matches(subset, subsets, n=1) or subsets[:1]
        known = f"no subset {subset!r}; its subsets are" if subset else "subsets"
        return UserError(f"{name} has {known} {', '.join(subsets)}. Write {name}:{closest[0]}@train")
    if is_local:
        return UserError(f"data: {name} cannot be read: {type(error).__name__}: {first_line(error)}")
    return not_available_error(name, error, "data set")


def _select_splits(splits: Mapping[str, Table], split: str | None, source: str) -> list[Table]:
    """Returns the rows of `train`, `train[:512]`, `train[10%:20%]` or `train+test`, part by part. Raises UserError."""
    sizes = {str(name): len(rows) for name, rows in splits.items()}
    listing = ", ".join(f"{name} ({n})" for name, n in sizes.items())
    if split is None:
        split = "train" if "train" in sizes else next(iter(sizes))
        if split != "train" and len(sizes) > 1:
            raise UserError(f"{source} has splits {listing}; write for example {source}@{split}")
    for part in split.split("+"):
        if (name := part.partition("[")[0]) not in sizes:
            raise UserError(f'split "{name}" is not in {source}; it has {listing}')
    if split in sizes:
        return [_checked(splits[split], source)]
    import datasets

    try:
        pieces = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f'split "{split}" of {source}: {error}. Slices look like train[:512] or train[10%:20%]'
        ) from None
    parts = [(_checked(splits[p.splitname], source), p.from_, max(p.from_, p.to)) for p in pieces]
    return [rows[start:end] if isinstance(rows, list) else rows.select(range(start, end)) for rows, start, end in parts]


def _checked(rows: Table, source: str) -> Table:
    """Returns the rows. Raises UserError for a column of text in JSON that `datasets` took for dates."""
    if not isinstance(rows, list) and rows.info.builder_name == "json":
        for name, feature in rows.features.items():
            if "timestamp" in str(feature):
                raise UserError(
                    f"data: column {name} of {source} holds text that is read as dates, and would be changed; name its "
                    ".jsonl file, which is read as it is"
                )
    return rows
