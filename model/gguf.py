"""GGUF files as models: converted once into a folder that transformers and vLLM load.

`model.path: my.gguf` or `owner/name:file.gguf` (on the hub) becomes .cache/gguf/<digest>-<dtype>. The digest is the
file's SHA-256: the same file under another name is the same model, also for a run that resumes. transformers reads the
file and undoes its quantization; those values are what is trained. The conversion runs in a process of its own, so that
its memory goes with it. Left out: files in several parts, and writing GGUF.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from common import durable
from common.config import Config
from common.errors import UserError
from common.paths import did_you_mean
from model.hub import file_from_hub

FOLDER = Path(".cache/gguf")  # counted like every path of a config, from the folder of launch.sh
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf") and not Path(path).expanduser().is_dir()


def with_folders(config: Config) -> Config:
    """The config with folders in place of GGUF files, which are converted if they are not yet. Raises UserError."""
    folders = converted(config)
    changed = {
        section: getattr(config, section).model_copy(update={"path": str(folder)})
        for section, folder in folders.items()
    }
    if "model" in changed:
        changed["model"] = changed["model"].model_copy(update={"revision": None})
    return config.model_copy(update=changed)


def as_overrides(folders: dict[str, Path]) -> list[str]:
    """What gives another process the same folders."""
    return [f"{name}.path={path}" for name, path in folders.items()] + ["model.revision=null"] * ("model" in folders)


def converted(config: Config) -> dict[str, Path]:
    """The folder for each section of a config (model, reference, critic) that names a GGUF file and is in use."""
    named = [("model", config.model.path, config.model.revision)]
    if config.algorithm.beta > 0 and config.reference.path is not None:
        named.append(("reference", *config.start_of(config.reference)))
    if config.algorithm.needs_critic and config.critic.path is not None:
        named.append(("critic", *config.start_of(config.critic)))
    return {name: folder_of(path, revision, config.model.dtype) for name, path, revision in named if is_gguf(path)}


def folder_of(path: str, revision: str | None, dtype: str) -> Path:
    """The folder of a GGUF file's model, made if it is not there. Waits while another process makes it.

    dtype: of the values in it, float32 or bfloat16. Raises UserError.
    """
    file = _file(path, revision)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = FOLDER / f"{digest[:16]}-{dtype}"
    if not folder.is_dir():
        with durable.waiting_lock(folder.with_name(f"{folder.name}.lock"), _waits(path)):
            if not folder.is_dir():
                _convert_apart(file, digest, folder, dtype)
    return folder


def _file(path: str, revision: str | None) -> Path:
    """The file itself, from the hub if it has to come from there."""
    file = Path(path).expanduser()
    if not file.is_file():
        repository, colon, name = path.partition(":")
        if not colon or repository.count("/") != 1 or path.startswith((".", "/", "~")):
            raise UserError(
                f"model {path!r}: no such file.{did_you_mean(file)} Set model.path to a .gguf file, to one on the hub "
                "(owner/name:file.gguf), or to a folder"
            )
        file = file_from_hub(repository, name, revision, path)
    if part := _PART.search(file.name):
        raise UserError(
            f"{path} is part {int(part[1])} of {int(part[2])}; join them: llama-gguf-split --merge {path} whole.gguf"
        )
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file (it does not begin with GGUF); download it again")
    return file


def _waits(path: str) -> str:
    return f"waiting for another process that converts {path}"


def _convert_apart(file: Path, digest: str, folder: Path, dtype: str) -> None:
    """Converts in a process of its own. Raises UserError, also when that process is killed."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file.name} needs the package gguf; install it: .venv/bin/python -m pip install gguf==0.19.0")
    print(f"tandem: converting {file.name} to {dtype} into {folder}, once", file=sys.stderr, flush=True)
    temporary = folder.with_name(f"{durable.TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed conversion left
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(convert, file, temporary, dtype).result()
        except BrokenProcessPool:
            raise UserError(
                f"the conversion of {file.name} was killed, most likely for want of memory: it holds all values in "
                f"{dtype}; use a machine with more, or set model.path to the folder or hub id that it was made from"
            ) from None
    (temporary / "source.json").write_text(json.dumps({"file": file.name, "sha256": digest}))
    durable.commit_dir(temporary, folder)


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Writes the file's model and tokenizer as from_pretrained reads them. Raises UserError for one it cannot read."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn of its guess
    # Here, because these imports cost seconds.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent.absolute()), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:  # a file that is cut short or odd fails in many ways
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise UserError(
            f"{file.name}: transformers {transformers.__version__} cannot read it ({reason}); "
            "download it again, or set model.path to the folder or hub id that it was made from"
        ) from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"{file.name} lacks {len(missing)} weights, such as {missing[0]}; download it again")
    # The weights are plain values now, but the model still says that it is quantized, and would not save.
    settings = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    with torch.device("meta"):
        plain = type(model)(type(model.config).from_dict(settings))
    plain.generation_config = model.generation_config
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
