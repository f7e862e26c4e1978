"""Writer of a weight version, which the sampler can verify. Every rank takes part.

    snapshot ─► every rank writes a safetensors file ─► rank 0 writes the manifest, syncs, renames

Each rank writes a contiguous share of the model, and the shares have about equal sizes. The canary
is scored by the trainer itself under the very weights that are written. Every tensor's checksum is
taken where the tensor is, on a GPU before the tensor is copied to the host.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common import durable
from common.failpoints import failpoint
from common.files import delta, pieces, weights
from common.files.weights import Canary, Manifest, Published, TensorInfo, VersionName
from model import devices
from model.checksum import Checksums
from model.files import lora
from model.files.images import canary_image
from model.packing import pack
from trainer.engine.exported import Exported
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.save.disk import retry_on_disk_trouble, sharing_disk_trouble
from trainer.save.host_copies import HostCopies
from trainer.save.model_files import slices, write_safetensors

_CANARY_SEQUENCES = 2
_CANARY_LENGTH = 32  # tokens of a sequence, with its prompt
_CANARY_PROMPT = 4  # tokens of its prompt


def canary(engine: PolicyEngine, vocab_size: int) -> Canary:
    """Returns fixed random token sequences with the log-probs of the trainer's forward.

    If the run has images, each prompt shows one, so that the vision tower is verified, too. Every
    rank calls it.
    """
    shape = (_CANARY_SEQUENCES, _CANARY_LENGTH)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape)
    prompt_length = _CANARY_PROMPT
    image = None
    layout = engine.layout
    if layout is not None:
        special_tokens = (layout.image_token, layout.start, layout.end, layout.video)
        tokens[np.isin(tokens, special_tokens)] = 0
        if engine.config.data.image_key is not None:
            image = canary_image(layout.form)
            image_tokens = [layout.image_token] * layout.form.num_tokens(image)
            shown = [layout.start, *image_tokens, layout.end]
            tokens = np.insert(tokens, [prompt_length] * len(shown), shown, axis=1)
            prompt_length += len(shown)
    token_ids = tokens.tolist()
    groups = [(ids[:prompt_length], [ids[prompt_length:]]) for ids in token_ids]
    images = () if image is None else [(image,)] * len(groups)
    row = pack(groups, engine.packing, images)
    scores = engine.score(row, temperature=1.0)
    logprobs = [sequence.tolist() for sequence in scores.split(row.lengths)]
    if image is None:
        return Canary(prompt_length, token_ids, logprobs)
    png = base64.b64encode(image.png).decode()
    return Canary(prompt_length, token_ids, logprobs, png, list(image.grid_thw))


class DeltaWriter:
    """This rank's newest published file, to which the next version may be a delta.

    Every weights.full_every-th version is whole. All ranks count alike.
    """

    def __init__(self, full_every: int):
        self._full_every = full_every
        self._count = 0  # versions published so far
        self._published: Published | None = None
        self._published_file = memoryview(b"")
        self._new_file = memoryview(b"")

    @property
    def base(self) -> Published | None:
        """The version to which the next one is a delta, or None if the next one is whole."""
        if self._count % self._full_every == 0:
            return None
        return self._published

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Writes this rank's file. Returns its path, which ends in .delta for a delta."""
        if self._full_every == 1:  # nothing needs the bytes in memory
            pieces.write(path, partial(write_safetensors, tensors), digests=False)
            return path
        buffer = io.BytesIO()
        write_safetensors(tensors, buffer)
        self._new_file = buffer.getbuffer()
        if self.base is None:
            pieces.write(path, lambda file: file.write(self._new_file), digests=False)
            return path
        delta_path = path.with_name(path.name + delta.SUFFIX)
        pieces.write(delta_path, self._write_delta, digests=False)
        return delta_path

    def _write_delta(self, file: Any) -> None:
        for piece in delta.pack(self._published_file, self._new_file):
            file.write(piece)

    def committed(self, published: Published) -> None:
        """Makes the version that was just written the base of the next one."""
        self._published = published
        self._published_file = self._new_file
        self._count += 1


@dataclass(frozen=True)
class ManifestEntries:
    """A rank's entries in the manifest."""

    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes, by name
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A version in memory on one rank: a share of the parameters, and contents of the manifest."""

    name: VersionName
    file: str | None  # the name of this rank's file, or None if the rank has no share
    tensors: Mapping[str, Tensor]  # the tensors of this rank's file, on the host
    on_device: Mapping[str, TensorInfo]  # infos of those that came from a GPU, taken there
    canary: Canary
    adapter_settings: bytes | None  # peft's, or None for a whole model

    def write(self, ranks: Collectives, delta_writer: DeltaWriter) -> Published:
        """Writes and commits the version. Every rank calls it. Raises DiskTrouble or Interrupted.

        Returns the version's address. Only rank 0's has the manifest's digest.
        """
        what = f"version {self.name.version}"
        attempt = partial(self._write_once, ranks, delta_writer)
        published = retry_on_disk_trouble(ranks, what, attempt, self.name.temporary)
        delta_writer.committed(published)
        return published

    def _write_once(self, ranks: Collectives, delta_writer: DeltaWriter) -> Published:
        with sharing_disk_trouble(ranks):
            if ranks.rank == 0:
                durable.remove_dir(self.name.temporary)
                # left by an attempt that failed after its rename; no sampler knows of it
                durable.remove_dir(self.name.final)
                self.name.temporary.mkdir(parents=True, mode=0o700)
        entries = ManifestEntries()
        with sharing_disk_trouble(ranks):
            if self.file is not None:
                entries = self._write_file(self.file, delta_writer)
        entries_as_json = ranks.gather(json.dumps(asdict(entries)))
        published = Published(self.name.version, str(self.name.final), "")
        with sharing_disk_trouble(ranks):
            if ranks.rank == 0:
                published = self._commit(entries_as_json, delta_writer.base)
        return published

    def _write_file(self, file: str, delta_writer: DeltaWriter) -> ManifestEntries:
        """Writes this rank's file. Returns its entries in the manifest."""
        path = delta_writer.write(self.name.temporary / file, self.tensors)
        failpoint("weights.shard")
        sums = Checksums()
        for name, tensor in self.tensors.items():
            if name not in self.on_device:
                sums.add(name, tensor)
        infos = {**self.on_device, **sums.infos()}
        return ManifestEntries({path.name: path.stat().st_size}, infos)

    def _commit(self, entries_as_json: Sequence[str], base: Published | None) -> Published:
        """Writes the manifest and makes the version visible. entries_as_json: of every rank."""
        files: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for text in entries_as_json:
            entries = json.loads(text)
            files |= entries["files"]
            for tensor, info in entries["tensors"].items():
                tensors[tensor] = TensorInfo(**info)
        name = self.name
        if self.adapter_settings is not None:
            durable.write_file(name.temporary / lora.SETTINGS, self.adapter_settings)
            files[lora.SETTINGS] = len(self.adapter_settings)
        manifest = Manifest(
            name.run_id, name.incarnation, name.version, files, tensors, self.canary, base
        )
        return weights.commit(name, manifest)


def snapshot(
    engine: PolicyEngine,
    collectives: Collectives,
    name: VersionName,
    vocab_size: int,
    copies: bool,
    memory: HostCopies,
) -> Snapshot:
    """Scores the canary and takes this rank's share of the parameters. Every rank calls it.

    copies: whether the share must outlive the next optimizer step, because it is written in a
    thread. The Collectives that `write` gets must then be that thread's own. Tensors on a GPU are
    copied in any case. memory: holds the copies of the version before, which nobody reads any more.
    """
    num_embeddings = engine.model.get_input_embeddings().num_embeddings
    scored_canary = canary(engine, min(vocab_size, num_embeddings))
    file, tensors_of_file = _share(engine, collectives)
    memory.make_room([tensor.form.nbytes for tensor in tensors_of_file])
    names = {tensor.name for tensor in tensors_of_file}
    sums = Checksums()

    def to_host(key: str, tensor: Tensor) -> Tensor:
        is_on_device = devices.is_accelerator(tensor.device)
        if is_on_device:
            sums.add(key, tensor)
        if copies or is_on_device:
            return memory.copy(key, tensor)
        return tensor.contiguous()

    gathered = engine.gathered_tensors(engine.tensors, names.__contains__, to_host)
    tensors = dict(gathered)  # all ranks gather all tensors
    on_device = sums.infos()
    devices.synchronize()
    return Snapshot(name, file, tensors, on_device, scored_canary, engine.published_settings)


def _share(engine: PolicyEngine, collectives: Collectives) -> tuple[str | None, Sequence[Exported]]:
    """Returns the name of this rank's file and its tensors, or (None, []) without a file."""
    rank = collectives.rank
    if engine.published_settings is None:
        file = weights.shard_name(rank, collectives.world_size)
        num_files = collectives.world_size
    else:
        file = lora.WEIGHTS
        num_files = 1  # peft and vLLM read one file
    if rank >= num_files:
        return None, []
    sizes = [tensor.form.nbytes for tensor in engine.tensors]
    indices = slices(sizes, num_files)[rank]
    return file, [engine.tensors[i] for i in indices]
