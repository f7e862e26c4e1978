"""The frozen reference model of the KL term: log-probs of sampled completions, prompt computed once per group.

The process that reference.on names loads it: the sampler scores groups before it sends them, a trainer rank scores its
own micro-batches before their backward. Scoring is a plain transformers forward over packed rows, the same code as the
policy's, so that an identical reference gives a KL of zero at the first step. vLLM could score too, but would skip its
prefix cache and build a [T, vocabulary] tensor. Every rank has the whole model here; where ranks hold parts of models,
trainer/engine/sharded_reference.py is used.
"""

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from common.processes.watchdog import report_progress
from common.types import EncodedImage, Forks
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import PackedRow, SequenceGroup, pack
from model.sequence_parallel import shard
from model.transformers_internals import decoder_of, without_adapters
from model.vision import layout_of, with_vision


class Reference:
    """The reference model, which scores tokens at the sampling temperature. Loaded only when beta > 0."""

    def __init__(
        self, config: Config, device: torch.device, policy: Any = None, sequence_group: SequenceGroup | None = None
    ):
        """Loads the reference model, or takes `policy`'s frozen weights as the reference (config.reference_is_base).

        policy: a whole model with adapters. sequence_group: the trainer's ranks that score every row together.
        """
        self._adapted, self._sequence_group = policy is not None, sequence_group
        self._config, self._device = config, device
        source = config.model_source(config.reference)
        self.model = policy if policy is not None else self._load(*source)
        self._layout = layout_of(self.model.config, *source)

    def _load(self, path: str, revision: str | None) -> Any:
        given, packing = self._config.model, self._config.trainer.packing
        model = load_causal_lm(path, given.dtype, revision, given.trust_remote_code, packing).to(self._device).eval()
        for layer in getattr(decoder_of(model), "layers", ()):  # a long group is many seconds on a CPU
            layer.register_forward_hook(lambda *_: report_progress("scoring with the reference"))
        return model

    def replace(self, folder: str) -> None:
        """Replaces the reference by the model in this folder."""
        self.model = None  # first: there is no room for two
        gc.collect()  # a model's own functions and hooks refer back to it, so only the collector frees it
        self.model = self._load(folder, None)

    def logprobs(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[NDArray[np.int32]],
        sampling_mask: Sequence[NDArray[np.int32] | None] = (),
        images: tuple[EncodedImage, ...] = (),
        forks: Sequence[Forks] = (),
    ) -> list[NDArray[np.float32]]:
        """Returns log π_ref of each completion's tokens, [C] each, within its sampling_mask [C, K] if it has one."""
        groups = [(prompt_ids.tolist(), [c.tolist() for c in completion_ids])]
        row = pack(groups, packing_of(self.model), [images], forks=[forks] if forks else ())
        logprobs = self.score(row.with_sampling_mask(sampling_mask)).cpu()
        return [part.numpy() for part in logprobs.split(row.lengths)]

    @torch.no_grad()
    def score(self, row: PackedRow) -> Tensor:
        """Returns log π_ref of the row's targets: [N] float32, on the model's device."""
        with without_adapters(self.model) if self._adapted else contextlib.nullcontext():
            row = replace(row, routing=None)  # the reference's own router chooses its experts
            local_row = shard(with_vision(row, self._layout), self._sequence_group).to(self._device)
            temperature, chunk_size = self._config.sampler.temperature, self._config.trainer.logprob_chunk_size
            return score_logprobs(self.model, local_row, temperature, chunk_size)
