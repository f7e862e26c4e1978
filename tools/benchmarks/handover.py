"""What handing weights over costs: every part of a version's way from the trainer's parameters into the engine.

    python tools/benchmarks/handover.py  the quick start's size, 1M parameters
    python tools/benchmarks/handover.py --shape qwen2.5-0.5b --dtype bfloat16 --repeats 5  3 minutes, 12 GB of memory

    trainer   snapshot (canary, copy of the parameters) ─► write (files, fsync, digests, manifest, rename)
    sampler   verify (hash, finite?) ─► stall: load ─► prove (the engine's checksums) ─► canary

Random weights, one rank, parts one after the other in one process, whose heap is set as launch.sh sets a sampler's.
The first version warms up and is left out. With max_staleness above 0 the trainer stands still for the snapshot alone
and the sampler verifies while its engine decodes; on policy both stand still for all of their parts. Medians, and a
JSON line per version in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.cpu import SAMPLERS_MEMORY
from tools.benchmarks.cells import ROOT, SHAPES, make_model

PARTS = ("snapshot_s", "write_s", "verify_s", "load_s", "prove_s", "canary_s", "stall_s")


class OneRank:
    """What trainer.publish needs of an Exchange when there is one rank."""

    rank, world_size = 0, 1

    def gather(self, text: str) -> list[str]:
        return [text]


class UntrainedPolicy:
    """What trainer.publish needs of a PolicyEngine, around a transformers model without an optimizer."""

    def __init__(self, config: Any, device: str = "cpu"):
        import torch

        from model import lora
        from model.logprobs import load_causal_lm

        self.config = config
        self.model = load_causal_lm(config.model.path, config.model.dtype, None, False)
        self.layout = None
        self.published_settings = lora.settings_file(lora.add_adapters(self.model, config)) if config.lora.r else None
        self.tied_embeddings = bool(self.model.config.tie_word_embeddings)
        self.device = torch.device(device)
        self.model.to(self.device)

    def score(self, row: Any, temperature: float) -> Any:
        import torch

        from model.logprobs import score_row

        with torch.no_grad():
            return score_row(self.model, row.to(self.device), temperature, 1024)[0].float().cpu()

    def parameter_names(self) -> list[tuple[str, int]]:
        return [(tensor.name, tensor.size) for tensor in self._tensors()]

    def full_parameters(self, wanted: Any, to_host: Any = lambda _, tensor: tensor.cpu()) -> Any:
        return ((t.name, to_host(t.name, t.make())) for t in self._tensors() if wanted(t.name))

    def base_tensors(self) -> Any:
        from model.checksum import describe
        from trainer.engine.exported import base

        return {tensor.name: describe(tensor.make()) for tensor in base(self.model)}

    def _tensors(self) -> Any:
        from trainer.engine.exported import exported

        return exported(self.model, self.config.lora)

    def disturb(self) -> None:
        """A step's worth of change, so that stale weights would fail the canary."""
        import torch

        with torch.no_grad():
            for p in self.model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn(p.shape[-1], dtype=p.dtype, device=p.device), alpha=0.01)


def settings(shape: str, dtype: str, rank: int, scratch: Path) -> Any:
    from common.config import Config

    folder = ROOT / ".cache" / "bench" / shape
    if not (folder / "model.safetensors").is_file():
        make_model(shape, folder)
    return Config.model_validate(
        {
            "run": {"output_dir": str(scratch / "run")},
            "model": {"path": str(folder), "dtype": dtype},
            "lora": {"r": rank},
            "data": {"train": "unused.jsonl", "max_prompt_length": 64},
            "sampler": {"num_generations": 8, "max_completion_length": 64},
            "vllm": {"max_model_len": 128},
        }
    )


def measure(config: Any, repeats: int) -> list[dict[str, float]]:
    from common import weights
    from sampler.engine import Engine
    from sampler.reload import reload
    from trainer.save.host_copies import HostCopies
    from trainer.save.write_version import VersionName, snapshot

    engine, policy, ranks = Engine(config, num_gpus=0), UntrainedPolicy(config), OneRank()
    weights_dir, vocabulary, memory = weights.default_dir(config), SHAPES_VOCABULARY, HostCopies()
    records: list[dict[str, float]] = []
    for version in range(repeats + 1):
        start = time.monotonic()
        copy = snapshot(policy, ranks, VersionName(weights_dir, "run", "ab12", version), vocabulary, True, memory)  # type: ignore[arg-type]
        taken = time.monotonic()
        published = copy.write(ranks)  # type: ignore[arg-type]
        written = time.monotonic()
        parts = reload(engine, published, config)
        seconds = {"snapshot_s": taken - start, "write_s": written - taken, "verify_s": parts.verify_s}
        seconds |= {"load_s": parts.load_s, "prove_s": parts.prove_s, "canary_s": parts.canary_s}
        seconds |= {"stall_s": parts.load_s + parts.prove_s + parts.canary_s}
        records.append({"version": version, "canary_max_diff": parts.canary_max_diff, **seconds})
        weights.prune(weights_dir, [version], keep=2)
        policy.disturb()
    weights.remove_versions(weights_dir)
    return records[1:]


SHAPES_VOCABULARY = 512  # tokens of the tokenizer that all shapes share: what a canary may hold


def start_as_a_sampler() -> None:
    """Again, with what launch.sh tells a sampler's glibc on a CPU, which glibc reads at the start of a process only."""
    if missing := {name: value for name, value in SAMPLERS_MEMORY.items() if name not in os.environ}:
        os.execve(sys.executable, sys.orig_argv, os.environ | missing)


def main() -> None:
    start_as_a_sampler()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="hand over adapters alone")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "handover.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        config = settings(arguments.shape, arguments.dtype, arguments.lora, Path(scratch))
        records = measure(config, arguments.repeats)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "a") as file:
        for record in records:
            file.write(
                json.dumps({"shape": arguments.shape, "dtype": arguments.dtype, "lora": arguments.lora, **record})
                + "\n"
            )
    for part in PARTS:
        values = [record[part] for record in records]
        print(f"{part:<12}{statistics.median(values):8.4f}  ({min(values):.4f}–{max(values):.4f})")


if __name__ == "__main__":
    main()
