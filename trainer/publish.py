"""Parameters -> a committed weight version that the sampler can verify. Every rank takes part.

Ranks write their own contiguous slice of the model, of about equal bytes, side by side; rank 0 adds the manifest and
commits with one rename. The canary is scored by the trainer itself under the very weights that are written.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from common import durable, weights
from common.packing import pack
from common.weights import Canary, FileInfo, Manifest, Published, TensorInfo
from trainer.engine import Engine
from trainer.exchange import Exchange

_CANARY_SEQUENCES, _CANARY_LENGTH, _CANARY_PROMPT = 4, 32, 8


def slices(sizes: Sequence[int], count: int) -> list[range]:
    """Contiguous index ranges of about equal total size.  ([4, 1, 1, 2], 2) -> [range(0, 1), range(1, 4)]"""
    total, bounds, running = sum(sizes), [0], 0
    for i, size in enumerate(sizes):
        # a boundary falls where the running sum passes the next multiple of total / count
        while len(bounds) < count and running + size / 2 > total * len(bounds) / count:
            bounds.append(i)
        running += size
    bounds += [len(sizes)] * (count + 1 - len(bounds))
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def canary(engine: Engine, vocab_size: int) -> Canary:
    """Fixed random token sequences with the log-probs that the trainer's forward gives them."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (_CANARY_SEQUENCES, _CANARY_LENGTH)).tolist()
    row = pack([(sequence[:_CANARY_PROMPT], [sequence[_CANARY_PROMPT:]]) for sequence in ids])
    logprobs = engine.score(row, temperature=1.0).split(row.lengths)
    return Canary(_CANARY_PROMPT, ids, [part.tolist() for part in logprobs])


def publish(
    engine: Engine, exchange: Exchange, weights_dir: Path, run_id: str, incarnation: str, version: int, vocab_size: int
) -> Published:
    """Writes and commits a version. The return value is meaningful on rank 0."""
    from safetensors.torch import save_file

    temporary = weights.temporary_dir(weights_dir, version, incarnation)
    final = weights.version_dir(weights_dir, version, incarnation)
    if exchange.rank == 0:
        temporary.mkdir(parents=True, mode=0o700)
    witness = canary(engine, vocab_size)
    exchange.barrier()
    names = engine.parameter_names()
    mine = slices([size for _, size in names], exchange.world_size)[exchange.rank]
    wanted = {names[i][0] for i in mine}
    tensors = {name: t.contiguous() for name, t in engine.full_parameters(lambda name: name in wanted)}
    shard = temporary / weights.shard_name(exchange.rank, exchange.world_size)
    save_file(tensors, shard, metadata={"format": "pt"})
    durable.fsync_path(shard)
    durable.failpoint("weights.shard")
    digest = json.dumps(asdict(weights.file_info(shard))).encode()
    durable.write_file(temporary / f"{shard.name}.digest", digest)
    exchange.barrier()
    if exchange.rank != 0:
        return Published(version, str(final), "")
    files: dict[str, FileInfo] = {}
    infos: dict[str, TensorInfo] = {}
    for rank in range(exchange.world_size):
        name = weights.shard_name(rank, exchange.world_size)
        sidecar = temporary / f"{name}.digest"
        files[name] = FileInfo(**json.loads(sidecar.read_text()))
        infos.update(weights.tensor_infos(temporary / name))
        sidecar.unlink()
    manifest = Manifest(run_id, incarnation, version, engine.tied_embeddings, files, infos, witness)
    return weights.commit(temporary, final, manifest)
