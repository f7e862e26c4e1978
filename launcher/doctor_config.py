"""The doctor's checks of one config: devices, room for checkpoints and weights, the port, tokenizer and chat template.

Needs the packages, unlike doctor.py. Left out: rewards and data, which `launch.sh plan` tries on real rows.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from common import weights
from common.config import Config, load
from common.errors import UserError
from launcher.doctor_machine import Check
from launcher.machine import GIB
from launcher.placement import placement, visible_gpus
from model.dims import read_dims
from model.gguf import with_folders


def config_checks(path: str) -> Iterator[Check]:
    """Raises nothing: a config that does not load is a check that fails."""
    try:
        config = load(path)
    except UserError as error:
        yield Check(False, f"{path}: does not load", str(error))
        return
    yield Check(True, f"{path}: every option is known and nothing contradicts itself")
    yield _devices(config)
    try:
        config = with_folders(config)
    except UserError as error:
        yield Check(False, f"model: {config.model.path} cannot be used", str(error))
        return
    yield from _room(config)
    if config.channel.endpoint is not None and config.channel.endpoint.startswith("tcp://"):
        yield port(config.channel.endpoint)
    yield _tokenizer(config)


def _devices(config: Config) -> Check:
    try:
        place = placement(config, visible_gpus(os.environ), sorted(os.sched_getaffinity(0)))
    except UserError as error:
        return Check(False, "devices: the config asks for others than there are", str(error))
    return Check(True, f"devices: sampler on {place.sampler_place}, trainer on {place.trainer_place}")


def _room(config: Config) -> Iterator[Check]:
    try:
        model = read_dims(config.model.path, config.model.revision)
    except UserError as error:
        yield Check(False, f"model: {config.model.path} is not there", str(error))
        return
    if model is None:
        return
    width, lora = 2 if config.model.dtype == "bfloat16" else 4, config.lora
    trained = model.adapter_parameters(lora.r) if lora.r else model.parameters
    published = trained if lora.publishes_adapters else model.parameters
    kept = config.trainer.save_limit + 1 if config.trainer.saves_checkpoints else 0
    # a checkpoint: what is trained for transformers and for DeepSpeed, and AdamW's three float32 copies; then final/
    yield room("run.output_dir", config.run.output_dir, (kept * (2 * width + 12) + width) * trained)
    yield room("weights.dir", weights.default_dir(config), (config.weights.keep + 2) * width * published)


def room(option: str, folder: Path, needed: float) -> Check:
    """Whether `needed` bytes fit into a folder that may not exist yet."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    text = f"{option}: {folder} needs about {needed / GIB:.1f} GiB and has {free / GIB:.1f} free"
    smaller = " or fewer trainer.save_limit" if option == "run.output_dir" else " (weights.keep versions and two more)"
    return Check(free >= needed, text, f"set {option} to a larger disk{smaller}")


def port(endpoint: str) -> Check:
    """Whether trainer rank 0 can bind this port. An address of another host cannot be tried from here, and passes."""
    parts = urlsplit(endpoint)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((parts.hostname, parts.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"stop what listens there (ss -ltnp 'sport = :{parts.port}'), or set channel.endpoint to another port"
            return Check(False, f"channel.endpoint: {endpoint} is in use", fix)
        return Check(True, f"channel.endpoint: {endpoint} is not an address of this host")
    return Check(True, f"channel.endpoint: {endpoint} can be bound")


def _tokenizer(config: Config) -> Check:
    from model.tokenizer import load_tokenizer  # transformers takes seconds

    try:
        tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
    except UserError as error:
        return Check(False, f"tokenizer: {config.model.path} has none that loads", str(error))
    own = config.prompt.chat_template
    if own is None and not getattr(tokenizer, "chat_template", None):
        fix = "prompt.chat_template=configs/templates/chatml.jinja, or an -Instruct model"
        return Check(False, f"chat template: the tokenizer of {config.model.path} has none", fix)
    if own is not None and not own.is_file():
        return Check(False, f"chat template: {own} is not there", "prompt.chat_template=configs/templates/chatml.jinja")
    return Check(True, f"tokenizer: {len(tokenizer)} tokens, chat template {own or 'its own'}")
