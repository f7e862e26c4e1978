"""Writer of a model as a Hugging Face folder.

The weights matter most, so no failure of another file ends a run. transformers writes the
configuration, the generation settings, a model's own code and the tokenizer. It refuses some that
it has read, such as a temperature without do_sample, or a tokenizer whose files are gone. Then the
initial model's file is copied, because it still fits the weights. If there is none, the folder goes
without the file. Both cases are reported once. Errors of the disk are raised, because
trainer/save/disk.py waits for the disk.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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

# bytes of each file, if a model is written as several
_MIN_FILE_SIZE = 256 << 20
_MAX_FILE_SIZE = 50 * 10**9
_TOKENIZER = (
    "*token*.json",
    "special_tokens_map.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
_say_once = cache(say)


def write_safetensors(tensors: Mapping[str, Tensor], file: Any) -> None:
    """Writes tensors by name into an open binary file, in the safetensors format.

    The bytes are those that safetensors' save_file would write. save_file opens its file by itself,
    whereas this function can write to the file of `pieces.write`, which reports progress to the
    watchdog, or to memory.
    """
    from safetensors.torch import _TYPES

    dtype_codes = {dtype: code for code, dtype in _TYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype_codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def slices(sizes: Sequence[int], count: int) -> list[range]:
    """Returns `count` contiguous index ranges of about equal sums of sizes.

    slices([4, 1, 1, 2], 2) -> [range(0, 1), range(1, 4)]
    """
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    # a range ends where its share of the sum does
    targets = sum(sizes) * np.arange(1, count) / count
    ends = np.searchsorted(middles, targets, side="right").tolist()
    bounds = [0, *ends, len(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def files_of(tensors: Sequence[Exported], ranks: int) -> dict[str, list[Exported]]:
    """Returns the tensors of each file of a model.

    That is model.safetensors, or as many shards as there are ranks. A small model has fewer shards,
    and a very large one has more; each rank writes every `ranks`-th file.
    """
    sizes = [tensor.form.nbytes for tensor in tensors]
    num_bytes = sum(sizes)
    count = max(1, min(ranks, num_bytes // _MIN_FILE_SIZE), math.ceil(num_bytes / _MAX_FILE_SIZE))
    if count == 1:
        return {"model.safetensors": list(tensors)}
    files = {}
    for index, indices in enumerate(slices(sizes, count)):
        files[shard_name(index, count)] = [tensors[i] for i in indices]
    return files


def write_index(folder: Path, file_of_tensor: Mapping[str, str], num_bytes: int) -> None:
    """Writes the index that save_pretrained writes beside shards. num_bytes: of all tensors."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of_tensor}
    path = folder / "model.safetensors.index.json"
    durable.write_file(path, json.dumps(index, indent=1).encode())


def write_side_files(
    engine: DeepSpeedModel, tokenizer: Any, folder: Path, with_config: bool
) -> list[str]:
    """Writes all files beside the weights. Returns what the folder lacks, each with its reason.

    with_config: also writes config and generation config, which adapters do not have. Raises errors
    of the disk.
    """
    writer = _SideFiles(engine, folder)
    if with_config:
        config_files = ("config.json", "*.py")
        writer.write("config.json", partial(_write_config, engine.model, folder), config_files)
        write_generation = partial(_write_generation, engine.model, folder)
        writer.write("generation_config.json", write_generation, ("generation_config.json",))
    writer.write("the tokenizer", partial(_write_tokenizer, engine, tokenizer, folder), _TOKENIZER)
    return writer.missing


class _SideFiles:
    """Writes files beside the weights, or copies the initial model's if transformers refuses to."""

    def __init__(self, engine: DeepSpeedModel, folder: Path):
        self._engine = engine
        self._folder = folder
        self.missing: list[str] = []  # files that were neither written nor copied, with reasons

    def write(self, what: str, write: Callable[[], None], patterns: Sequence[str]) -> None:
        """Calls `write`. If it fails, copies files of the initial model that match the patterns."""
        try:
            write()
        except Exception as error:
            if durable.disk_trouble(error) is not None:
                raise
            error_text = " ".join(str(error).split())[:300]
            reason = f"{what} cannot be saved: {type(error).__name__}: {error_text}"
            if self._copy(patterns):
                _say_once(f"{reason}; the model's own is copied")
            else:
                self.missing.append(reason)
                _say_once(f"{reason}; {self._folder.name} goes without it")

    def _copy(self, patterns: Sequence[str]) -> bool:
        """Copies the initial model's files that match the patterns. Returns whether any was copied.

        Nothing is copied for a critic, because model.path is the initial model of the policy.
        """
        settings = self._engine.config.model
        config_file = present_file(settings.path, "config.json", settings.revision)
        if config_file is None or not self._engine.model.can_generate():
            return False
        is_copied = False
        for pattern in patterns:
            for path in config_file.parent.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, self._folder / path.name)
                    is_copied = True
        return is_copied


def _write_config(model: Any, folder: Path) -> None:
    """Writes config.json, and the model's own code if it has any, as save_pretrained does.

    The code is written first, because transformers then adds the names of its classes to `config`.
    """
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
    if engine.layout is not None:
        for name, contents in engine.layout.files:
            durable.write_file(folder / name, contents)
