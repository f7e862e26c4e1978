"""(e) The engine starts, proves five versions of disturbed weights, and notices one that it did not load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_check.finding import Finding, judged

_RELOADS = 5


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    """Two engines, one after the other, each in a process of its own: vLLM gives its memory back only with it."""
    kinds = [("1m", "float32")] + ([("qwen2.5-0.5b", "bfloat16")] if on_gpu else [])
    for shape, dtype in kinds:
        out = scratch / f"{shape}.jsonl"
        command = [sys.executable, "-m", "gpu_check.reloads", shape, dtype, str(scratch / shape), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        yield from _read(out)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            yield Finding("reloads", f"{dtype}, came to its end", "fail", last[:200])


def _read(out: Path) -> Iterator[Finding]:
    import json

    for line in out.read_text().splitlines() if out.exists() else ():
        yield Finding(**json.loads(line))


def engine_findings(shape: str, dtype: str, scratch: Path) -> Iterator[Finding]:
    """In a process of its own."""
    import time

    import torch

    from benchmarks.handover import OneRank, settings
    from common import weights
    from sampler.engine import Engine
    from sampler.reload import reload
    from trainer.save.write_version import write_version

    config = settings(shape, dtype, 0, scratch)
    if torch.cuda.is_available():  # as beside a trainer: a cache in bytes, measured by nobody
        own = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.3}
        config = config.model_copy(update={"vllm": config.vllm | own})
    policy, begun = _policy(config), time.monotonic()
    engine = Engine(config, torch.cuda.device_count())
    started = time.monotonic() - begun
    yield Finding("reloads", f"{dtype}, engine start", "figure", f"{started:.0f} s", {"seconds": started})

    def published(version: int) -> Any:
        return write_version(policy, OneRank(), weights.default_dir(config), "run", "life", version, 512)  # type: ignore[arg-type]

    seen = []
    for version in range(_RELOADS):
        seen.append(reload(engine, published(version), config))
        weights.prune(weights.default_dir(config), [version], keep=2)
        policy.disturb()
    worst = max(one.canary_max_diff for one in seen)
    seconds = sorted(one.seconds for one in seen)[_RELOADS // 2]
    text = f"{_RELOADS} proven, worst difference of a log-prob {worst:.2g}, {seconds:.2f} s each"
    yield judged("reloads", f"{dtype}, reloads", True, text, worst=worst, seconds=seconds)
    setattr(engine, "load", lambda folder: None)  # noqa: B010 - it keeps the weights of the version before
    try:
        reload(engine, published(_RELOADS), config)
        noticed = ""
    except Exception as error:
        noticed = f"refused: {error}"
    weights.remove_versions(weights.default_dir(config))
    yield judged("reloads", f"{dtype}, a stale engine", bool(noticed), noticed[:120] or "not noticed")


def _policy(config: Any) -> Any:
    """What publishing needs of a trainer, on the device that a trainer would have."""
    import torch

    from benchmarks.handover import Policy

    class OnDevice(Policy):
        def __init__(self) -> None:
            super().__init__(config)
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self.model.to(self.device)

        def score(self, row: Any, temperature: float) -> Any:
            return super().score(row.to(self.device), temperature).float().cpu()

        def full_parameters(self, wanted: Any, see: Any = None) -> Any:
            return ((name, tensor.cpu()) for name, tensor in super().full_parameters(wanted, see))

        def disturb(self) -> None:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(torch.randn(p.shape[-1], dtype=p.dtype, device=p.device), alpha=0.01)

    return OnDevice()


def main(shape: str, dtype: str, scratch: str, out: str) -> None:
    import json

    from common import exits

    with open(out, "w") as file:
        for finding in engine_findings(shape, dtype, Path(scratch)):
            file.write(json.dumps(finding.record()) + "\n")
            file.flush()
    exits.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
