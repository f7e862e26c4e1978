"""A model folder from a GGUF file:  bash launch.sh convert FILE.gguf FOLDER [--dtype float32]

transformers reads the file and undoes its quantization; the resulting values are trained. Left out: files in several
parts, and writing GGUF.
"""

import argparse
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import durable
from common.errors import UserError, first_line
from common.paths import did_you_mean
from common.processes import exits

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts the file that the command line names. Raises UserError as `convert` does."""
    parser = argparse.ArgumentParser(prog="launch.sh convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("folder", type=Path, help="which is made, for model.path")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the values in it")
    given = parser.parse_args(arguments)
    convert(given.file, given.folder, given.dtype)
    print(f"tandem: made {given.folder}; set model.path={given.folder}")


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Writes the file's model and tokenizer as from_pretrained reads them; the folder appears whole or not at all.

    dtype: float32 or bfloat16. Raises UserError if the file is missing or cannot be read, or if the folder exists.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file.{did_you_mean(file)}")
    if part := _PART.search(file.name):
        raise UserError(
            f"{file} is part {int(part[1])} of {int(part[2])}; join them: llama-gguf-split --merge {file} whole.gguf"
        )
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file (it does not begin with GGUF); download it again")
    if folder.exists():
        raise UserError(f"{folder} exists; name another folder, or remove it: rm -r {folder}")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file.name} needs the package gguf; install it: .venv/bin/python -m pip install gguf==0.19.0")
    temporary = folder.with_name(f"{durable.TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # remains of a killed conversion
    _save(file, temporary, dtype)
    durable.commit_dir(temporary, folder)


def _save(file: Path, folder: Path, dtype: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn of its guess
    # imported inside the function, because these imports take seconds
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
        reason = f"{type(error).__name__}: {first_line(error)}"
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


if __name__ == "__main__":
    sys.exit(exits.run("convert", main))
