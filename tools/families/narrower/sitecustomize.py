"""Limits vLLM, in every process with this folder on PYTHONPATH, to the instructions that ATEN_CPU_CAPABILITY allows.

vLLM asks torch.cpu which of its libraries to load, which matrices to pack and which kernels to run: with avx512 none
for bfloat16, with avx2 the library for processors without AVX-512, and with default no matrix is packed, as on a GPU.
"""

import os
import sys
from typing import Any

_CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY")
_MISSING = ["avx512_bf16", "amx_tile", "amx_fp16", *(["avx512"] if _CAPABILITY in ("avx2", "default") else [])]


class _Before:
    """Finds no module, but sees which one is about to be imported."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "vllm":
            import torch.cpu

            for each in _MISSING:
                setattr(torch.cpu, f"_is_{each}_supported", lambda: False)
        elif name == "vllm.v1.worker.cpu_worker" and _CAPABILITY == "default":
            import vllm._custom_ops

            vllm._custom_ops._supports_onednn = False


if _CAPABILITY:
    sys.meta_path.insert(0, _Before)  # type: ignore[arg-type]
