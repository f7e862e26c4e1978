"""Published weights that are one number, another one for every version and every life of the trainer."""

import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from common import weights
from common.failpoints import failpoint
from common.weights import Canary, Manifest, Published, VersionName
from tests.support.protocol_helpers import LIMITS


def number(incarnation: str, version: int) -> int:
    return zlib.crc32(f"{incarnation} {version}".encode()) % LIMITS.vocab_size


def publish(folder: Path, version: int, incarnation: str) -> Published:
    name = VersionName(folder, "run", incarnation, version)
    name.temporary.mkdir()
    shard = weights.shard_name(0, 1)
    save_file({"number": np.array([number(incarnation, version)])}, name.temporary / shard)
    failpoint("weights.shard")
    files = {shard: (name.temporary / shard).stat().st_size}
    manifest = Manifest("run", incarnation, version, files, {}, Canary(1, [], []))
    return weights.commit(name, manifest)
