"""Writer of a weight version, which the sampler can verify. Every rank takes part.

    snapshot ─► every rank writes a safetensors file ─► rank 0 writes the manifest, syncs, renames

Each rank writes a contiguous share of the model, and the shares have about equal sizes. Samplers
verify a version by two things in the manifest: a checksum of every tensor, and the canary, which is
a fixed token sequence with its log-probs. The trainer computes these log-probs with the weights
that it writes. The checksum of a tensor on a GPU is computed there, before it is copied to the
host.
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
_CANARY_LENGTH = 32  # tokens of a sequence, including its prompt
_CANARY_PROMPT = 4  # tokens of its prompt, without an image


def canary(engine: PolicyEngine, vocab_size: int) -> Canary:
    """Returns fixed random token sequences, and their log-probs by the trainer's current weights.

    If the run has images, each prompt shows one, so that the vision tower is verified, too. Every
    rank calls it.
    """
    shape = (_CANARY_SEQUENCES, _CANARY_LENGTH)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape)
    prompt_length = _CANARY_PROMPT
    image = None
    layout = engine.layout
    if layout is not None:
        # a random special token would announce an image or a video that is not there
        special_tokens = (layout.image_token, layout.start, layout.end, layout.video)
        tokens[np.isin(tokens, special_tokens)] = 0
        if engine.config.data.image_key is not None:
            image = canary_image(layout.form)
            image_tokens = [layout.image_token] * layout.form.num_tokens(image)
            shown = [layout.start, *image_tokens, layout.end]
            end_of_prompt = [prompt_length] * len(shown)
            tokens = np.insert(tokens, end_of_prompt, shown, axis=1)
            prompt_length += len(shown)

    token_ids = tokens.tolist()
    groups = [(ids[:prompt_length], [ids[prompt_length:]]) for ids in token_ids]
    images = () if image is None else [(image,)] * len(groups)
    row = pack(groups, engine.packing, images)
    scores = engine.score(row, temperature=1.0)
    logprobs = [sequence.tolist() for sequence in scores.split(row.lengths)]
    if image is None:
        return Canary(prompt_length, token_ids, logprobs)
    return Canary(
        prompt_length,
        token_ids,
        logprobs,
        image_png=base64.b64encode(image.png).decode(),
        grid_thw=list(image.grid_thw),
    )


class DeltaWriter:
    """Writes this rank's file of each version, whole or as a delta to the previous version's file.

    Every full_every-th published version is whole, beginning with the first. All ranks publish the
    same versions, so they agree on which ones are whole.
    """

    def __init__(self, full_every: int):
        self._full_every = full_every
        self._num_published = 0
        self._published: Published | None = None  # the newest version
        # this rank's file in memory, of the newest version and of the version being written
        self._published_file = memoryview(b"")
        self._new_file = memoryview(b"")

    @property
    def base(self) -> Published | None:
        """The version from which the next delta is computed; None if the next version is whole."""
        if self._num_published % self._full_every == 0:
            return None
        return self._published

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Writes this rank's file at `path`, or a delta at a path with .delta appended.

        tensors: this rank's tensors by name. Returns the path of the file that was written.
        """
        if self._full_every == 1:  # no version is a delta, so no file is kept in memory
            pieces.write(path, partial(write_safetensors, tensors), digests=False)
            return path
        buffer = io.BytesIO()
        write_safetensors(tensors, buffer)
        self._new_file = buffer.getbuffer()
        if self.base is None:
            pieces.write(path, self._write_whole, digests=False)
            return path
        delta_path = path.with_name(path.name + delta.SUFFIX)
        pieces.write(delta_path, self._write_delta, digests=False)
        return delta_path

    def _write_whole(self, file: Any) -> None:
        file.write(self._new_file)

    def _write_delta(self, file: Any) -> None:
        for piece in delta.pack(self._published_file, self._new_file):
            file.write(piece)

    def note_published(self, published: Published) -> None:
        """Makes the version that was just written the base of the next one."""
        self._published = published
        self._published_file = self._new_file
        self._num_published += 1


@dataclass(frozen=True)
class ManifestEntries:
    """What the manifest says of the file and the tensors of one rank."""

    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes, by file name
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a version in memory, ready to be written: `snapshot` takes it."""

    name: VersionName
    file: str | None  # the name of this rank's file, or None if the rank has no share
    tensors: Mapping[str, Tensor]  # the tensors of this rank's file, on the host
    device_infos: Mapping[str, TensorInfo]  # the infos, with checksums, that a GPU computed
    canary: Canary
    adapter_settings: bytes | None  # peft's adapter_config.json, or None for a whole model

    def write(self, collectives: Collectives, delta_writer: DeltaWriter) -> Published:
        """Writes the version and makes it visible. Every rank calls it.

        collectives: those of the calling thread. Returns the version's address, in which only rank
        0 has the manifest's digest. Raises DiskTrouble or Interrupted.
        """
        what = f"version {self.name.version}"
        attempt = partial(self._write_once, collectives, delta_writer)
        published = retry_on_disk_trouble(collectives, what, attempt, self.name.temporary)
        delta_writer.note_published(published)
        return published

    def _write_once(self, collectives: Collectives, delta_writer: DeltaWriter) -> Published:
        with sharing_disk_trouble(collectives):
            if collectives.rank == 0:
                durable.remove_dir(self.name.temporary)
                # left by an attempt that failed after its rename; no sampler knows of it
                durable.remove_dir(self.name.final)
                self.name.temporary.mkdir(parents=True, mode=0o700)
        entries = ManifestEntries()
        with sharing_disk_trouble(collectives):
            if self.file is not None:
                entries = self._write_file(self.file, delta_writer)
        entries_as_json = collectives.gather(json.dumps(asdict(entries)))
        # on rank 0 the result of `_commit` takes its place
        published = Published(self.name.version, str(self.name.final), manifest_sha256="")
        with sharing_disk_trouble(collectives):
            if collectives.rank == 0:
                published = self._commit(entries_as_json, delta_writer.base)
        return published

    def _write_file(self, file: str, delta_writer: DeltaWriter) -> ManifestEntries:
        """Writes this rank's file. Returns the manifest's entries for the file and its tensors."""
        path = delta_writer.write(self.name.temporary / file, self.tensors)
        failpoint("weights.shard")
        checksums = Checksums()
        for name, tensor in self.tensors.items():
            if name not in self.device_infos:
                checksums.add(name, tensor)
        infos = {**self.device_infos, **checksums.infos()}
        return ManifestEntries({path.name: path.stat().st_size}, infos)

    def _commit(self, entries_as_json: Sequence[str], base: Published | None) -> Published:
        """Writes the manifest, and makes the version visible. Rank 0 calls it.

        entries_as_json: every rank's ManifestEntries. base: the version to which the files are
        deltas, or None.
        """
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
    """Scores the canary, and takes this rank's share of the parameters. Every rank calls it.

    copies: whether to copy tensors that are on the host already. It is needed if a thread writes
    the snapshot, because the next optimizer step may change the parameters meanwhile. Tensors on a
    GPU are always copied. memory: holds the copies of the previous version, which are overwritten.
    """
    num_embeddings = engine.model.get_input_embeddings().num_embeddings
    scored_canary = canary(engine, min(vocab_size, num_embeddings))
    file, tensors_of_file = _share(engine, collectives)
    memory.make_room([tensor.form.nbytes for tensor in tensors_of_file])
    names = {tensor.name for tensor in tensors_of_file}
    checksums = Checksums()
    to_host = partial(_to_host, checksums, memory, copies)
    # all ranks pass all tensors, because ZeRO 3 gathers each with all ranks
    gathered = engine.gathered_tensors(engine.tensors, lambda name: name in names, to_host)
    tensors = dict(gathered)
    device_infos = checksums.infos()
    devices.synchronize()  # the copies are complete
    return Snapshot(name, file, tensors, device_infos, scored_canary, engine.published_settings)


def _to_host(
    checksums: Checksums, memory: HostCopies, copies: bool, name: str, tensor: Tensor
) -> Tensor:
    """Returns a tensor on the host. If it comes from a GPU, its checksum is computed there first.

    copies: whether a tensor that is on the host already is copied, too.
    """
    is_on_device = devices.is_accelerator(tensor.device)
    if is_on_device:
        checksums.add(name, tensor)
    if copies or is_on_device:
        return memory.copy(name, tensor)
    return tensor.contiguous()


def _share(engine: PolicyEngine, collectives: Collectives) -> tuple[str | None, Sequence[Exported]]:
    """Returns the name and the tensors of this rank's file, or (None, []) if it writes no file."""
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
