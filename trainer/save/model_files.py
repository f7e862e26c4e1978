"""Writer of a model as a Hugging Face folder: weight files, and side files such as config.json.

The weights matter most, so the failure of a side file does not end a run. transformers writes the
side files: the configuration, the generation settings, a model's own code and the tokenizer. It
refuses to write some contents that it has read without complaint, such as generation settings with
a temperature but without do_sample. Then the initial model's file is copied, because it still fits
the weights. If the initial model has no such file either, the folder goes without it. The user is
told of both cases, once. Only disk errors are raised, because trainer/save/disk.py waits until the
disk works again.
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
from model.files import lora
from model.files.hub import present_file
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.exported import Exported, adapters

# bytes of a file, if a model is written as several files
_MIN_FILE_SIZE = 256 << 20
_MAX_FILE_SIZE = 50 * 10**9
# name patterns of a tokenizer's files
_TOKENIZER_FILES = (
    "*token*.json",
    "special_tokens_map.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
_say_once = cache(say)  # says each text only once, because the cache then answers


def write_safetensors(tensors: Mapping[str, Tensor], file: Any) -> None:
    """Writes tensors by name into an open binary file, in the safetensors format.

    The bytes are those that safetensors' save_file would write. save_file takes only a path. This
    function can also write to memory, or to the file of `pieces.write`, which reports progress to
    the watchdog.
    """
    from safetensors.torch import _TYPES

    dtype_codes = {dtype: code for code, dtype in _TYPES.items()}
    # the order of save_file: large elements first, so that every tensor is aligned; then by name
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
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def slices(sizes: Sequence[int], count: int) -> list[range]:
    """Divides a list into `count` contiguous parts whose sizes sum to about the same.

    Returns the range of indices of each part.

    slices([4, 1, 1, 2], 2) -> [range(0, 1), range(1, 4)]
    """
    # an element belongs to the part in which its middle lies, if all sizes are laid end to end
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    boundaries = sum(sizes) * np.arange(1, count) / count
    ends = np.searchsorted(middles, boundaries, side="right").tolist()
    bounds = [0, *ends, len(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def weight_files(
    engine: DeepSpeedModel, num_ranks: int, max_tensors: int | None
) -> dict[str, list[Exported]]:
    """Returns which tensors go into each weight file of a model, by the file's name.

    max_tensors: how many tensors are saved, None = all. The ranks write the files in turns.
    """
    if engine.adapter_settings is None:
        return _files_of_tensors(list(engine.tensors[:max_tensors]), num_ranks)
    return {lora.WEIGHTS: adapters(engine.model)[:max_tensors]}  # peft reads one file


def _files_of_tensors(tensors: Sequence[Exported], num_ranks: int) -> dict[str, list[Exported]]:
    """Divides a model's tensors into files: model.safetensors, or one shard for each rank.

    A small model has fewer shards than there are ranks, and a very large model has more.
    """
    sizes = [tensor.form.nbytes for tensor in tensors]
    num_bytes = sum(sizes)
    num_shards = min(num_ranks, num_bytes // _MIN_FILE_SIZE)  # 0 for a small model
    least_shards = math.ceil(num_bytes / _MAX_FILE_SIZE)
    count = max(1, num_shards, least_shards)
    if count == 1:
        return {"model.safetensors": list(tensors)}
    files = {}
    for index, indices in enumerate(slices(sizes, count)):
        files[shard_name(index, count)] = [tensors[i] for i in indices]
    return files


def write_index(folder: Path, file_of_tensor: Mapping[str, str], num_bytes: int) -> None:
    """Writes the index that tells readers which shard holds each tensor, as save_pretrained does.

    file_of_tensor: file names by tensor name. num_bytes: the size of all tensors together.
    """
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of_tensor}
    path = folder / "model.safetensors.index.json"
    durable.write_file(path, json.dumps(index, indent=1).encode())


def write_other_files(
    engine: DeepSpeedModel, tokenizer: Any, folder: Path, files: Mapping[str, Sequence[Exported]]
) -> list[str]:
    """Writes the index or the adapters' settings, and all side files. Rank 0 calls it.

    files: as from `weight_files`. Returns what the folder lacks, as `write_side_files` does.
    """
    adapter_settings = engine.adapter_settings
    if adapter_settings is not None:
        durable.write_file(folder / lora.SETTINGS, adapter_settings)
    elif len(files) > 1:
        file_of_tensor = {}
        num_bytes = 0
        for file, tensors in files.items():
            for tensor in tensors:
                file_of_tensor[tensor.name] = file
                num_bytes += tensor.form.nbytes
        write_index(folder, file_of_tensor, num_bytes)
    return write_side_files(engine, tokenizer, folder, with_config=adapter_settings is None)


def write_side_files(
    engine: DeepSpeedModel, tokenizer: Any, folder: Path, with_config: bool
) -> list[str]:
    """Writes the tokenizer and, if wanted, the config files of a model into `folder`.

    with_config: whether to write config.json and generation_config.json, which a folder of adapters
    does not have. Returns a text about each file that could be neither written nor copied from the
    initial model, with the reason. Raises only disk errors.
    """
    writer = _SideFiles(engine, folder)
    if with_config:
        config_files = ("config.json", "*.py")
        writer.write("config.json", partial(_write_config, engine.model, folder), config_files)
        write_generation = partial(_write_generation, engine.model, folder)
        writer.write("generation_config.json", write_generation, ("generation_config.json",))
    writer.write(
        "the tokenizer", partial(_write_tokenizer, engine, tokenizer, folder), _TOKENIZER_FILES
    )
    return writer.missing


class _SideFiles:
    """Writes side files, or copies the initial model's files where transformers fails to write."""

    def __init__(self, engine: DeepSpeedModel, folder: Path):
        self._engine = engine
        self._folder = folder
        self.missing: list[str] = []  # files that were neither written nor copied, with reasons

    def write(self, what: str, write: Callable[[], None], patterns: Sequence[str]) -> None:
        """Calls `write`. If it fails, copies the initial model's files that match the patterns.

        what: what is written, for messages.
        """
        try:
            write()
        except Exception as error:
            if durable.disk_trouble(error) is not None:
                raise
            error_text = " ".join(str(error).split())[:300]
            reason = f"{what} cannot be saved: {type(error).__name__}: {error_text}"
            if self._copy(patterns):
                _say_once(f"{reason}; the model's own is copied instead")
            else:
                self.missing.append(reason)
                _say_once(f"{reason}; {self._folder.name} is saved without it")

    def _copy(self, patterns: Sequence[str]) -> bool:
        """Copies the initial model's files that match the patterns. Returns whether any was copied.

        Nothing is copied for a critic, because model.path is the initial model of the policy.
        """
        is_critic = not self._engine.model.can_generate()
        settings = self._engine.config.model
        config_file = present_file(settings.path, "config.json", settings.revision)
        if config_file is None or is_critic:
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

    The code is written first, because this also enters the names of its classes into the config.
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
    """Writes the tokenizer and, for a model that sees images, the files of its processor."""
    tokenizer.save_pretrained(folder)
    if engine.layout is not None:
        for name, contents in engine.layout.files:
            durable.write_file(folder / name, contents)
