"""Peak memory of log-probs and their gradients at Qwen's vocabulary: chunks of 1,024 tokens against all logits at once.

    python tools/benchmarks/head_memory.py        2 minutes, 13 GB of memory

Forward and backward of the output head (width 896, 151,936 tokens, as Qwen2.5-0.5B) on N completion tokens, each in a
fresh process. Memory is what the process had at most, less what it had before: the weights, their gradient of the same
size, and what the logits take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WIDTH, VOCABULARY, CHUNK = 896, 151_936, 1024
WAYS = ("all at once", "in chunks")


def measure(tokens: int, dtype: str, way: str) -> dict[str, object]:
    """In this process, once: a peak is never forgotten."""
    import torch

    from model.cpu.linear import use_faster_linear
    from model.logprobs import token_terms

    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=getattr(torch, dtype))
    use_faster_linear(torch.nn.ModuleList([head]))
    hidden = torch.randn(tokens, WIDTH, dtype=getattr(torch, dtype), requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,))
    before, start = peak_bytes(), time.monotonic()
    if way == "in chunks":
        logprobs = token_terms(hidden, targets, head, 1.0, CHUNK)[0]
    else:
        logprobs = torch.log_softmax(head(hidden).float(), -1).gather(-1, targets[:, None])[:, 0]
    logprobs.mean().backward()
    seconds = time.monotonic() - start
    return {"tokens": tokens, "dtype": dtype, "way": way, "bytes": peak_bytes() - before, "s": seconds}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a measurement, as JSON: this process makes it
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one))))
        return
    print("| dtype | tokens | " + " | ".join(f"{way}, GB (s)" for way in WAYS) + " |\n|---|---|---|---|")
    for dtype in arguments.dtypes:
        for tokens in arguments.tokens:
            cells = []
            for way in WAYS:
                one = json.dumps({"tokens": tokens, "dtype": dtype, "way": way})
                done = subprocess.run([sys.executable, __file__, "--one", one], stdout=subprocess.PIPE, check=True)
                measured = json.loads(done.stdout)
                cells.append(f"{measured['bytes'] / 1e9:.2f} ({measured['s']:.1f})")
            print(f"| {dtype} | {tokens:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
