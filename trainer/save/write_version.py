"""Writer of parameters as a committed weight version that the sampler can verify. Every rank takes part.

Ranks write their own contiguous slice of the model, of about equal bytes, side by side; rank 0 adds the manifest and
commits with one rename. The canary is scored by the trainer itself under the very weights that are written, and every
tensor's checksum is taken where the tensor is: on a GPU before it is copied to the host.
"""

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.save.disk import on_all_ranks, on_rank_0, retry_on_disk_trouble
from trainer.save.host_copies import HostCopies
from trainer.save.model_files import slices, tensor_file

_CANARY_SEQUENCES, _CANARY_LENGTH, _CANARY_PROMPT = 2, 32, 4


def canary(engine: PolicyEngine, vocab_size: int) -> Canary:
    """Returns fixed random token sequences with the log-probs that the trainer's forward gives them.

    If the run has images, each prompt shows one, so that the vision tower is verified, too.
    """
    random = np.random.default_rng(0).integers(0, vocab_size, (_CANARY_SEQUENCES, _CANARY_LENGTH))
    length, image = _CANARY_PROMPT, None
    if engine.layout is not None:
        layout = engine.layout
        random[np.isin(random, (layout.image_token, layout.start, layout.end, layout.video))] = 0
        if engine.config.data.image_key is not None:
            image = canary_image(layout.form)
            shown = [layout.start, *[layout.image_token] * layout.form.num_tokens(image), layout.end]
            random = np.insert(random, [length] * len(shown), shown, axis=1)
            length += len(shown)
    ids = random.tolist()
    images = () if image is None else [(image,)] * len(ids)
    row = pack([(sequence[:length], [sequence[length:]]) for sequence in ids], engine.packing, images)
    logprobs = [part.tolist() for part in engine.score(row, temperature=1.0).split(row.lengths)]
    if image is None:
        return Canary(length, ids, logprobs)
    return Canary(length, ids, logprobs, base64.b64encode(image.png).decode(), list(image.grid_thw))


class Changes:
    """The file that this rank published last, so that the next version holds only changes. All ranks count the same."""

    def __init__(self, full_every: int):
        self._full_every, self._count = full_every, 0
        self._data = self._next = memoryview(b"")
        self._published: Published | None = None

    @property
    def base(self) -> Published | None:
        """Returns the version that the next one's changes are based on; None if the next is published whole."""
        return self._published if self._count % self._full_every else None

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Writes this rank's file, whole or as changes. Returns its path."""
        if self._full_every == 1:
            pieces.write(path, tensor_file(tensors), digests=False)
            return path
        tensor_file(tensors)(whole := io.BytesIO())
        self._next = whole.getbuffer()
        parts: Iterable[Any] = [self._next]
        if self.base:
            path, parts = path.with_name(path.name + delta.SUFFIX), delta.pack(self._data, self._next)
        pieces.write(path, lambda file: [file.write(part) for part in parts], digests=False)
        return path

    def committed(self, published: Published) -> None:
        self._data, self._published, self._count = self._next, published, self._count + 1


@dataclass(frozen=True)
class Snapshot:
    """A version in memory, on one rank: its slice of the parameters, and the other contents of the manifest."""

    name: VersionName
    file: str | None  # name of this rank's file; None if it has no slice
    tensors: Mapping[str, Tensor]  # the tensors of this rank's file, on the host
    on_device: Mapping[str, TensorInfo]  # infos of tensors that came from a GPU, taken there
    canary: Canary
    adapter_settings: bytes | None  # peft's; None for a whole model

    def write(self, ranks: Exchange, changes: Changes) -> Published:
        """Writes and commits the version, on every rank; rank 0 has the result. Raises DiskTrouble or Interrupted."""

        def prepare() -> None:
            durable.remove_dir(self.name.temporary)
            durable.remove_dir(self.name.final)  # left by an attempt that failed after its rename; no sampler knows it
            self.name.temporary.mkdir(parents=True, mode=0o700)

        def attempt() -> Published:
            own: dict[str, Any] = {"files": {}, "tensors": {}}
            found = [Published(self.name.version, str(self.name.final), "")]
            on_rank_0(ranks, prepare)
            on_all_ranks(ranks, lambda: own.update(self._write_own(changes)))
            of_ranks = [json.loads(text) for text in ranks.gather(json.dumps(own))]
            on_rank_0(ranks, lambda: found.append(self._commit(of_ranks, changes.base)))
            return found[-1]

        published = retry_on_disk_trouble(ranks, f"version {self.name.version}", attempt, self.name.temporary)
        changes.committed(published)
        return published

    def _write_own(self, changes: Changes) -> dict[str, Any]:
        """Writes this rank's file to the disk. Returns its entries in the manifest."""
        if self.file is None:
            return {}
        path = changes.write(self.name.temporary / self.file, self.tensors)
        failpoint("weights.shard")
        sums = Checksums()
        for name, tensor in self.tensors.items():
            if name not in self.on_device:
                sums.add(name, tensor)
        return {
            "files": {path.name: path.stat().st_size},
            "tensors": {name: asdict(info) for name, info in {**self.on_device, **sums.infos()}.items()},
        }

    def _commit(self, of_ranks: Sequence[dict[str, Any]], base: Published | None) -> Published:
        name = self.name
        files = {file: size for own in of_ranks for file, size in own["files"].items()}
        tensors = {tensor: TensorInfo(**info) for own in of_ranks for tensor, info in own["tensors"].items()}
        if self.adapter_settings is not None:
            durable.write_file(name.temporary / lora.SETTINGS, self.adapter_settings)
            files[lora.SETTINGS] = len(self.adapter_settings)
        manifest = Manifest(name.run_id, name.incarnation, name.version, files, tensors, self.canary, base)
        return weights.commit(name, manifest)


def snapshot(
    engine: PolicyEngine,
    exchange: Exchange,
    name: VersionName,
    vocab_size: int,
    copies: bool,
    memory: HostCopies,
) -> Snapshot:
    """Scores the canary and takes this rank's slice of the parameters.

    copies: the slice must outlive the next optimizer step. It may then be written in a thread, if the Exchange that
    `write` gets is that thread's own. Tensors on a GPU are copied in any case.
    memory: holds the copies of the version before, which nobody reads any more.
    """
    settings, rank = engine.published_settings, exchange.rank
    if settings is None:
        files = [weights.shard_name(rank, exchange.world_size) for rank in range(exchange.world_size)]
    else:
        files = [lora.WEIGHTS]  # peft and vLLM read one file
    scored = canary(engine, min(vocab_size, engine.model.get_input_embeddings().num_embeddings))
    shares = dict(zip(files, slices([tensor.form.nbytes for tensor in engine.tensors], len(files)), strict=True))
    file = files[rank] if rank < len(files) else None
    own = [engine.tensors[i] for i in shares[file]] if file is not None else []
    memory.make_room([tensor.form.nbytes for tensor in own])
    wanted = {tensor.name for tensor in own}
    sums = Checksums()

    def to_host(key: str, tensor: Tensor) -> Tensor:
        is_on_device = devices.is_accelerator(tensor.device)
        if is_on_device:
            sums.add(key, tensor)
        return memory.copy(key, tensor) if copies or is_on_device else tensor.contiguous()

    tensors = dict(engine.gathered_tensors(engine.tensors, lambda key: key in wanted, to_host))  # all ranks gather
    on_device = sums.infos()
    devices.synchronize()
    return Snapshot(name, file, tensors, on_device, scored, settings)
