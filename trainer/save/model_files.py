"""Writer of a model as a Hugging Face folder: weights come first, and no failure of another file ends a run.

Configuration, generation settings, a model's own code and the tokenizer go through transformers, which refuses to write
some that it has read: a temperature without do_sample, a tokenizer whose files are gone. Then the initial model's file
is copied, which still fits the weights; if there is none, the folder goes without it. Both cases are reported, once.
Left out: errors of the disk, which trainer/save/disk.py waits for.
"""

import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import durable
from common.files.weights import shard_name
from common.processes.exits import say
from model.files.hub import present_file
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import Exported

_LEAST, _MOST = 256 << 20, 50 * 10**9  # bytes of a file, if a model is written as several
_TOKENIZER = ("*token*.json", "special_tokens_map.json", "vocab*", "merges*", "*.model", "*.tiktoken", "chat_template*")
_say_once = functools.cache(say)


def tensor_file(tensors: Mapping[str, Tensor]) -> Callable[[Any], None]:
    """Returns a writer of the very bytes of safetensors' save_file, which reports no progress, for `pieces.write`."""
    from safetensors.torch import _TYPES

    codes = {dtype: code for code, dtype in _TYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def content(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

    return content


def slices(sizes: Sequence[int], count: int) -> list[range]:
    """Returns contiguous index ranges of about equal sums.  ([4, 1, 1, 2], 2) -> [range(0, 1), range(1, 4)]"""
    middles, multiples = np.cumsum(sizes) - np.array(sizes) / 2, sum(sizes) * np.arange(1, count) / count
    bounds = np.searchsorted(middles, multiples, side="right").tolist()  # a range ends where its share of the sum does
    return [range(a, b) for a, b in itertools.pairwise([0, *bounds, len(sizes)])]


def files_of(tensors: Sequence[Exported], ranks: int) -> dict[str, list[Exported]]:
    """Returns the tensors of each file of a model: model.safetensors, or as many shards as there are ranks.

    A model of few bytes has fewer, and one of many has more: a rank writes every `ranks`-th file.
    """
    sizes = [tensor.form.nbytes for tensor in tensors]
    count = max(1, min(ranks, sum(sizes) // _LEAST), math.ceil(sum(sizes) / _MOST))
    names = [shard_name(i, count) for i in range(count)] if count > 1 else ["model.safetensors"]
    return {name: [tensors[i] for i in own] for name, own in zip(names, slices(sizes, count), strict=True)}


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Writes the index that save_pretrained writes beside shards. files: by tensor. size: bytes of them all."""
    index = {"metadata": {"total_size": size}, "weight_map": files}
    durable.write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())


def write_side_files(engine: DeepSpeedModel, tokenizer: Any, folder: Path, is_whole: bool) -> list[str]:
    """Writes all files beside the weights. Returns what the folder lacks, each with its reason.

    is_whole: False for adapters, whose base model is elsewhere.
    """
    parts: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {}
    if is_whole:
        parts = {
            "config.json": (lambda: _write_config(engine.model, folder), ("config.json", "*.py")),
            "generation_config.json": (lambda: _write_generation(engine.model, folder), ("generation_config.json",)),
        }
    parts["the tokenizer"] = lambda: _write_tokenizer(engine, tokenizer, folder), _TOKENIZER
    lacks = []
    for what, (write, patterns) in parts.items():
        try:
            write()
        except Exception as error:
            if durable.disk_trouble(error) is not None:
                raise
            reason = f"{what} cannot be saved: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            is_copied = _copy(engine, patterns, folder)
            lacks += [] if is_copied else [reason]
            _say_once(f"{reason}; " + ("the model's own is copied" if is_copied else f"{folder.name} goes without it"))
    return lacks


def _write_config(model: Any, folder: Path) -> None:
    """Writes the config as transformers' save_pretrained does. Code first: it may change the config that names it."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)


def _write_generation(model: Any, folder: Path) -> None:
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _write_tokenizer(engine: DeepSpeedModel, tokenizer: Any, folder: Path) -> None:
    """Writes the tokenizer, and a vision model's processor files."""
    tokenizer.save_pretrained(folder)
    for name, contents in engine.layout.files if engine.layout else ():
        durable.write_file(folder / name, contents)


def _copy(engine: DeepSpeedModel, patterns: tuple[str, ...], folder: Path) -> bool:
    """Copies files of the initial model. Returns False if it has none, or for a critic, whose config is another one."""
    given = engine.config.model
    found = present_file(given.path, "config.json", given.revision)
    if found is None or not engine.model.can_generate():
        return False
    files = [file for pattern in patterns for file in found.parent.glob(pattern) if file.is_file()]
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return bool(files)
