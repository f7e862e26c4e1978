"""A policy without DeepSpeed that trainer.publish takes for an engine with one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import Config
from common.weights import Published, TensorInfo
from model import lora
from model.checksum import describe
from model.logprobs import load_causal_lm, score_row
from model.packing import pack
from trainer.engine.exported import adapters, base
from trainer.save.write_version import write_version


class OneRank:
    """What trainer.publish needs of an Exchange when there is one rank."""

    rank, world_size = 0, 1

    def barrier(self) -> None: ...

    def gather(self, text: str) -> list[str]:
        return [text]

    def agree(self, value: bool) -> bool:
        return value


class Float32Weights:
    """The float32 weights of an optimizer whose model has others, and one step of it."""

    def __init__(self, trained: Iterable[torch.Tensor]):
        self.trained = list(trained)
        self.master = [p.detach().float().clone() for p in self.trained]
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """What Adam does in its first step: every weight moves by the learning rate."""
        for p, master in zip(self.trained, self.master, strict=True):
            master -= learning_rate * torch.randn(master.shape, generator=self.generator).sign()
            p.copy_(master)


class PlainPolicy:
    """What trainer.publish needs of a PolicyEngine, around a transformers model without DeepSpeed."""

    published_settings: bytes | None = None
    layout = None

    def __init__(self, folder: Path):
        self.model = load_causal_lm(str(folder), "float32", None, False)
        self.tied_embeddings = self.model.config.tie_word_embeddings

    @torch.no_grad()
    def score(self, row, temperature):
        return score_row(self.model, row, temperature, 64)[0]

    def parameter_names(self):
        return [(n, p.numel() * p.element_size()) for n, p in self.model.named_parameters()]

    def full_parameters(self, wanted, to_host=None):
        return ((n, p.detach()) for n, p in self.model.named_parameters() if wanted(n))

    def publish(self, folder: Path, number: int) -> Published:
        """This policy as a version, by the trainer's real code."""
        vocab = self.model.config.get_text_config().vocab_size
        return write_version(self, OneRank(), folder, "run", "life", number, vocab)  # type: ignore[arg-type]

    def disturb(self, seed: int) -> None:
        """Other weights, far enough away that stale ones cannot pass for them."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)

    def logprobs(self, prompt: list[int], completion: list[int], temperature: float) -> np.ndarray:
        row = pack([(prompt, [completion])])
        return self.score(row, temperature).numpy()


class DevicePolicy(PlainPolicy):
    """On a device, as a rank's is; what is published comes from there."""

    def __init__(self, folder: Path, dtype: str, device: str):
        self.model = load_causal_lm(str(folder), dtype, None, False).to(device)
        self.tied_embeddings = self.model.config.tie_word_embeddings

    def score(self, row: Any, temperature: float) -> Any:
        return super().score(row.to(self.model.device), temperature).float().cpu()

    def full_parameters(self, wanted: Callable[[str], bool], to_host: Any = lambda _, tensor: tensor.cpu()) -> Any:
        return ((n, to_host(n, p.detach())) for n, p in self.model.named_parameters() if wanted(n))

    @torch.no_grad()
    def disturb(self, seed: int) -> None:
        """By a hundredth, alike in every row: a bfloat16 model's log-probs stay near those of its engine."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.add_(torch.randn(p.shape[-1], generator=generator).to(p), alpha=0.01)


class AdaptedPolicy(PlainPolicy):
    """What trainer.publish needs of a PolicyEngine that trains adapters."""

    def __init__(self, config: Config):
        self.model = load_causal_lm(config.model.path, config.model.dtype, None, False)
        self.tied_embeddings = self.model.config.tie_word_embeddings
        self.published_settings = lora.settings_file(lora.add_adapters(self.model, config))

    def parameter_names(self) -> list[tuple[str, int]]:
        return [(t.name, t.size) for t in adapters(self.model)]

    def full_parameters(self, wanted: Callable[[str], bool], to_host: Any = None) -> Any:
        return ((t.name, t.make()) for t in adapters(self.model) if wanted(t.name))

    def base_tensors(self) -> dict[str, TensorInfo]:
        return {t.name: describe(t.make()) for t in base(self.model)}

    def disturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapters(self.model):
                for p in tensor.parameters:
                    p.add_(torch.randn(p.shape, generator=generator) * 0.1)
