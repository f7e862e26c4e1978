"""What a model's config.json says about its size: parameters, bytes of cache, floating-point operations. No weights.

For decoders of the Llama family (Llama, Qwen2, Qwen2.5, Qwen3, Mistral): attention with grouped keys, a gated MLP with
three matrices, two norms per layer; for mixtures of such MLPs (Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, GLM-4-MoE); and
for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose tower is in vision_dims.py. Other decoders are counted:
counted_dims.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model.vision_dims import VisionDims, vision_dims

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe")
_WITH_TOWER = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}  # whose language model is of which
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # as transformers names them


@dataclass(frozen=True)
class Experts:
    """The mixture that stands in place of the MLP in all layers but some. Qwen3-30B-A3B: Experts(128, 8, 768)."""

    count: int  # E
    per_token: int  # k
    intermediate: int  # I_e, of each
    shared: int = 0  # I_s, of the experts that every token passes
    shared_gate: bool = False  # a vector that weighs them
    dense_layers: int = 0  # that keep the plain MLP


@dataclass(frozen=True)
class ModelDims:
    """Qwen2.5-1.5B is ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True): 1,543,714,304 values."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    bias: bool = False  # of the query, key and value projections
    qk_norm: bool = False
    vision: VisionDims | None = None  # of the tower of a model that sees images
    experts: Experts | None = None
    qk_norm_values: int | None = None  # of both, where they are not one head's each

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of a layer's _MATRICES."""
        h, i, queries, keys = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (queries, h), (keys, h), (keys, h), (h, queries), (i, h), (i, h), (h, i)

    @property
    def layer_parameters(self) -> int:
        """q + k + v + o = 2·H·A·D + 2·H·K·D (+ biases), MLP = 3·H·I, two norms = 2·H (+ 2·D with query-key norms)."""
        biases = self.bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        per_head = self.qk_norm * 2 * self.head_dim
        norms = 2 * self.hidden + (per_head if self.qk_norm_values is None else self.qk_norm_values)
        return sum(out * into for out, into in self.matrices) + biases + norms

    def _in_layers(self, experts: int) -> int:
        """Of all layers, with so many experts in each mixture: 3·H·(experts·I_e + I_s) + H·E, and a gate of H."""
        if self.experts is None:
            return self.layers * self.layer_parameters
        e, h = self.experts, self.hidden
        mixture = 3 * h * (experts * e.intermediate + e.shared) + h * (e.count + e.shared_gate)
        more = mixture - 3 * h * self.intermediate
        return self.layers * self.layer_parameters + (self.layers - e.dense_layers) * more

    @property
    def active_in_layers(self) -> int:
        """Parameters of the layers that a token meets."""
        return self._in_layers(self.experts.per_token if self.experts else 0)

    @property
    def active_intermediate(self) -> float:
        """I of what a token passes, in the mean over the layers."""
        if self.experts is None:
            return self.intermediate
        e = self.experts
        sparse = (self.layers - e.dense_layers) * (e.per_token * e.intermediate + e.shared)
        return (e.dense_layers * self.intermediate + sparse) / self.layers

    @property
    def parameters(self) -> int:
        """N = V·H (twice unless the head is tied to the embedding) + layers + H for the last norm, and the tower."""
        return self._whole(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Those of N that a token meets."""
        return self._whole(self.experts.per_token if self.experts else 0)

    def _whole(self, experts: int) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        language = embeddings + self._in_layers(experts) + self.hidden
        return language + (self.vision.parameters if self.vision else 0)

    def adapter_parameters(self, r: int, modules: Collection[str] | None = None) -> int:
        """r·(in + out) of the layers with these names, in every block; None = of all but the output head.

        In a mixture of experts those of its attention alone.
        """
        sides = {name: out + into for name, (out, into) in zip(_MATRICES, self.matrices, strict=True)}
        known = _MATRICES[:4] if self.experts else _MATRICES
        return self.layers * r * sum(sides[name] for name in known if modules is None or name in modules)

    @property
    def kv_values_per_token(self) -> int:
        """2·L·K·D: a key and a value per layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def state_values(self) -> int:
        """What recurrent layers keep of a sequence, however long it is."""
        return 0


def model_dims(settings: dict[str, Any]) -> ModelDims | None:
    """From the contents of config.json; None for a model whose layers are others."""
    kind, whole = settings.get("model_type"), settings
    settings = dict(whole) | dict(whole.get("text_config") or {})  # older files have both in one
    if kind in _WITH_TOWER:
        settings["tie_word_embeddings"] = whole.get("tie_word_embeddings", settings.get("tie_word_embeddings"))
    family = _WITH_TOWER.get(str(kind), kind)
    if family not in (*FAMILY, *MIXTURES) or (family in FAMILY and experts_of(settings)):
        return None
    heads = int(settings["num_attention_heads"])
    head_dim = int(settings.get("head_dim") or settings["hidden_size"] // heads)
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    return ModelDims(
        hidden=int(settings["hidden_size"]),
        intermediate=int(settings["intermediate_size"]),
        layers=int(settings["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(settings["vocab_size"]),
        tied=bool(settings.get("tie_word_embeddings", False)),
        bias=bool(settings.get("qkv_bias", family == "qwen2_moe") or settings.get("attention_bias", family == "qwen2")),
        qk_norm=family in ("qwen3", "qwen3_moe") or bool(settings.get("use_qk_norm")),
        vision=vision_dims(str(kind), whole["vision_config"]) if kind in _WITH_TOWER else None,
        experts=_experts(settings, family) if family in MIXTURES else None,
        qk_norm_values=(heads + kv_heads) * head_dim if family == "olmoe" else None,
    )


def experts_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """(experts E of a layer, those of a token k) from the language model's settings; None without a mixture."""
    counts = (settings.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count, per_token = next((n for n in counts if n), 0), settings.get("num_experts_per_tok")
    return (int(count), int(per_token)) if count and per_token else None


def _experts(settings: Mapping[str, Any], family: str) -> Experts:
    found = experts_of(settings)
    if found is None:
        raise ValueError("a mixture without experts")
    intermediate = int(settings.get("moe_intermediate_size") or settings["intermediate_size"])
    layers, every = range(int(settings["num_hidden_layers"])), int(settings.get("decoder_sparse_step") or 1)
    plain = set(settings.get("mlp_only_layers") or ()) | set(range(int(settings.get("first_k_dense_replace") or 0)))
    own = settings.get("shared_expert_intermediate_size")
    return Experts(
        *found,
        intermediate,
        shared=int(own or int(settings.get("n_shared_experts") or 0) * intermediate),
        shared_gate=family == "qwen2_moe",
        dense_layers=sum(i in plain or (i + 1) % every != 0 for i in layers),
    )
