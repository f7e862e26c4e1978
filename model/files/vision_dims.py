"""The size of a vision tower, read from its part of config.json alone: parameters, operations, tokens.

    patches ─► embedding ─► depth blocks (norm, attention, norm, MLP) ─► merger: merge² patches ─► one token

Qwen2-VL and Qwen3-VL attend over the whole image in every block, Qwen2.5-VL within windows in all blocks but a few.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionDims:
    """The dimensions of a vision tower, such as Qwen2.5-VL-3B's with 668,684,288 parameters:
    VisionDims("qwen2_5_vl", 32, 1280, 3420, 2048, 14, 2, 2, window=112, whole=4)."""

    family: str
    depth: int
    hidden: int  # h
    intermediate: int  # i, of the MLP
    out: int  # hidden size of the language model
    patch: int  # pixels a side
    merge: int  # merge² patches become one token
    temporal: int
    positions: int = 0  # learned ones
    deepstack: int = 0  # further mergers, for the language model's first layers
    window: int = 0  # pixels a side; 0 = attention over the whole image everywhere
    whole: int = 0  # blocks with attention over the whole image, where there are windows

    @property
    def block(self) -> int:
        """Counts a block: attention 4·h² + 4·h, norms, and the MLP 2·h·i + i + h, in Qwen2.5-VL 3·h·i + 2·i + h."""
        h, i, matrices = self.hidden, self.intermediate, 3 if self._is_gated else 2
        return 2 * self._norm(h) + 4 * (h * h + h) + matrices * h * i + (matrices - 1) * i + h

    @property
    def embedding(self) -> int:
        """Counts a patch's embedding: 3 · temporal · patch² · h, and a bias in Qwen3-VL."""
        return 3 * self.temporal * self.patch**2 * self.hidden + (self.hidden if self.family == "qwen3_vl" else 0)

    @property
    def mergers(self) -> int:
        """Counts the mergers, each with w = merge² · h: w² + w + w·out + out, and a norm."""
        wide = self.merge**2 * self.hidden
        merger = wide * wide + wide + wide * self.out + self.out
        return merger + self._norm(self.hidden) + self.deepstack * (merger + self._norm(wide))

    @property
    def parameters(self) -> int:
        return self.embedding + self.positions * self.hidden + self.depth * self.block + self.mergers

    def flops(self, patches: int) -> float:
        """Returns an image's forward FLOPs: 2 · parameters per patch, mergers' per token; 4·h per pair of patches."""
        within = min(patches, (self.window // self.patch) ** 2) if self.window else patches
        whole = self.whole if self.window else self.depth
        pairs = patches * (whole * patches + (self.depth - whole) * within)
        linear = (self.embedding + self.depth * self.block) * patches + self.mergers * self.tokens(patches)
        return 2.0 * linear + 4.0 * self.hidden * pairs

    def kept_by_block(self, b: int) -> int:
        """Returns the bytes per patch that a block keeps for its backward pass, at b bytes a value.

        Norms and residuals 5b·h, or without a bias 2·(4 + 2b)·h; queries, keys, values, rotations and output 6b·h; and
        the MLP 4b·i with a gate, 3b·i with Qwen2-VL's quick GELU, 2b·i with Qwen3-VL's.
        """
        if self._is_gated:
            return 2 * (4 + 2 * b) * self.hidden + b * (6 * self.hidden + 4 * self.intermediate)
        return b * (11 * self.hidden + (3 if self.family == "qwen2_vl" else 2) * self.intermediate)

    def tokens(self, patches: int) -> int:
        """Returns the number of image tokens of so many patches in the language model."""
        return patches // self.merge**2

    def patches(self, pixels: int) -> int:
        """Returns the number of patches of the largest image with so many pixels."""
        return pixels // (self.patch * self.merge) ** 2 * self.merge**2

    @property
    def _is_gated(self) -> bool:
        return self.family == "qwen2_5_vl"

    def _norm(self, width: int) -> int:
        return width if self._is_gated else 2 * width  # Qwen2.5-VL's has no bias


def vision_dims(family: str, settings: dict[str, Any]) -> VisionDims:
    """Returns the dimensions that a vision_config gives, with transformers' defaults for missing settings."""
    hidden = int(settings.get("embed_dim", 1280) if family == "qwen2_vl" else settings["hidden_size"])
    out = int(settings["hidden_size"] if family == "qwen2_vl" else settings["out_hidden_size"])
    ratio = int(settings.get("mlp_ratio", 4))
    has_windows = family == "qwen2_5_vl"
    return VisionDims(
        family,
        depth=int(settings.get("depth", 27 if family == "qwen3_vl" else 32)),
        hidden=hidden,
        intermediate=ratio * hidden if family == "qwen2_vl" else int(settings["intermediate_size"]),
        out=out,
        patch=int(settings.get("patch_size", 16 if family == "qwen3_vl" else 14)),
        merge=int(settings.get("spatial_merge_size", 2)),
        temporal=int(settings.get("temporal_patch_size", 2)),
        positions=int(settings.get("num_position_embeddings", 2304)) if family == "qwen3_vl" else 0,
        deepstack=len(settings.get("deepstack_visual_indexes", (8, 16, 24))) if family == "qwen3_vl" else 0,
        window=int(settings.get("window_size", 112)) if has_windows else 0,
        whole=len(settings.get("fullatt_block_indexes", (7, 15, 23, 31))) if has_windows else 0,
    )
