"""A policy without DeepSpeed that trainer.publish takes for an engine with one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import Config
from common.files.weights import Published, VersionName
from model.files import lora
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from trainer.engine.exported import adapters, parameters, under_checkpoint_names
from trainer.save.host_copies import HostCopies
from trainer.save.write_version import DeltaWriter, snapshot


class OneRank:
    """What trainer.publish needs of Collectives when there is one rank."""

    rank, world_size, stall_timeout_s = 0, 1, 0.0

    def gather(self, text: str) -> list[str]:
        return [text]

    def broadcast_text(self, value: str | None) -> str:
        return value or ""

    def agree(self, value: bool) -> bool:
        return value

    any_rank = agree


class PlainPolicy:
    """What trainer.publish needs of a PolicyEngine, around a transformers model without DeepSpeed."""

    published_settings: bytes | None = None
    layout = None

    def __init__(self, folder: Path, dtype: str = "float32", delta_writer: DeltaWriter | None = None):
        self.delta_writer = delta_writer
        self.model = load_causal_lm(str(folder), dtype, None, False)
        self.packing = packing_of(self.model)
        self.tensors = under_checkpoint_names(self.model, parameters(self.model))
        self.master: list[torch.Tensor] = []  # float32, of an optimizer whose model has another dtype

    def trained(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    @torch.no_grad()
    def score(self, row, temperature):
        return score_logprobs(self.model, row, temperature, 64)

    def gathered_tensors(self, tensors, wanted, convert=lambda _, tensor: tensor):
        return ((t.name, convert(t.name, t.make())) for t in tensors if wanted(t.name))

    def publish(self, folder: Path, number: int) -> Published:
        """This policy as a version, by the trainer's real code."""
        vocab, ranks = self.model.config.get_text_config().vocab_size, OneRank()
        name = VersionName(folder, "run", "life", number)
        taken = snapshot(self, ranks, name, vocab, copies=False, memory=HostCopies())  # type: ignore[arg-type]
        return taken.write(ranks, self.delta_writer or DeltaWriter(full_every=1))  # type: ignore[arg-type]

    @torch.no_grad()
    def disturb(self, seed: int) -> None:
        """Other weights, far enough away that stale ones cannot pass for them."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.trained():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)

    @torch.no_grad()
    def step(self, number: int, learning_rate: float) -> None:
        """What Adam does in its first step: every weight moves by the learning rate."""
        generator = torch.Generator().manual_seed(number)
        self.master = self.master or [p.detach().float().clone() for p in self.trained()]
        for p, master in zip(self.trained(), self.master, strict=True):
            master -= learning_rate * torch.randn(master.shape, generator=generator).sign()
            p.copy_(master)

    def logprobs(self, prompt: list[int], completion: list[int], temperature: float) -> np.ndarray:
        return self.score(pack([(prompt, [completion])]), temperature).numpy()


class DevicePolicy(PlainPolicy):
    """On a device, as a rank's is; what is published comes from there."""

    def __init__(self, folder: Path, dtype: str, device: str):
        super().__init__(folder, dtype)
        self.model.to(device)

    def score(self, row: Any, temperature: float) -> Any:
        return super().score(row.to(self.model.device), temperature).float().cpu()

    def gathered_tensors(self, tensors: Any, wanted: Callable[[str], bool], to_host: Any = lambda _, t: t.cpu()) -> Any:
        return super().gathered_tensors(tensors, wanted, to_host)

    @torch.no_grad()
    def disturb(self, seed: int) -> None:
        """By a hundredth, alike in every row: a bfloat16 model's log-probs stay near those of its engine."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.add_(torch.randn(p.shape[-1], generator=generator).to(p), alpha=0.01)


class AdaptedPolicy(PlainPolicy):
    """What trainer.publish needs of a PolicyEngine that trains adapters."""

    def __init__(self, config: Config):
        super().__init__(Path(config.model.path), config.model.dtype)
        self.published_settings = lora.settings_file(lora.add_adapters(self.model, config))
        self.tensors = adapters(self.model)

    def trained(self) -> list[torch.Tensor]:
        return [p for t in adapters(self.model) for p in t.parameters]
