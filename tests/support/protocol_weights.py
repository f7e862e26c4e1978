"""Published weights that are one number."""

import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from common.failpoints import failpoint
from common.files import weights
from common.files.weights import Canary, Manifest, Published, TensorInfo, VersionName
from tests.support.protocol_helpers import LIMITS


def trained_on(weights_before: int, what: str) -> int:
    return zlib.crc32(f"{weights_before} {what}".encode())


def number(trained: int) -> int:
    return trained % LIMITS.vocab_size


def publish(folder: Path, version: int, incarnation: str, trained: int = 0) -> Published:
    name = VersionName(folder, "run", incarnation, version)
    name.temporary.mkdir()
    shard = weights.shard_name(0, 1)
    save_file({"number": np.array([number(trained)])}, name.temporary / shard)
    failpoint("weights.shard")
    files = {shard: (name.temporary / shard).stat().st_size}
    tensors = {"number": TensorInfo("int64", [1], str(trained))}
    manifest = Manifest("run", incarnation, version, files, tensors, Canary(1, [], []))
    return weights.commit(name, manifest)
