"""The split of a model's layers over tensor-parallel ranks: transformers' plan for the family, in DeepSpeed's form.

    colwise    q, k, v, gate, up    each rank has some heads, or some intermediate values
    rowwise    o, down              each rank has the inputs of these, and the outputs are added up over the ranks

(Megatron-LM: Shoeybi et al., arXiv 1909.08053, section 3.) The embedding stays whole on every rank, and so does a head
that is tied to it; another head is split over the vocabulary, and its logits are gathered. Of an adapter, A is split
with the inputs of its layer and B with the outputs. Left out: experts, and layers that are not plain matrices.
"""

from typing import Any

from common.errors import UserError
from model.files.dims import experts_of

_KINDS = {
    "colwise": "column",
    "colwise_gather_output": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "skip",  # norms of heads: each rank has a part of their gradient
}
_EVEN = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_LAYERS = {"full_attention", "sliding_attention"}


def layer_specs(config: Any, size: int) -> list[dict[str, Any]]:
    """Returns layer_specs of DeepSpeed's tensor_parallel.partition_config.

    config: transformers' configuration of the model. Raises UserError if `size` ranks cannot share its layers.
    """
    text = config.get_text_config()
    given = getattr(text, "base_model_tp_plan", None) or {}
    plan = {name: style for name, style in given.items() if style != "embedding_rowwise"}  # it stays whole
    if reason := _why_not(config, text, plan, size):
        raise UserError(
            f"trainer.tensor_parallel_size {size}: the layers of a {config.model_type} are not split over ranks, "
            f"because {reason}; set trainer.tensor_parallel_size=1"
        )
    if not text.tie_word_embeddings:
        plan["lm_head"] = "colwise_gather_output"
    plan["layers.*.mlp.act_fn"] = "replicated_with_grad_allreduce"  # Apertus's plan leaves its parameters out
    specs = []
    for name, style in plan.items():
        kind, path = _KINDS[style], name.replace(".", r"\.").replace("*", r"\d+")
        adapter = {"column": "B", "row": "A"}.get(kind)
        parameters = rf"(\.base_layer|\.lora_{adapter}\.default)?\.weight$" if adapter else r"\."
        specs.append(
            {
                "patterns": [rf"(.*\.)?{path}{parameters}"],
                "partition_type": kind,
                "gather_output": style == "colwise_gather_output",
                "grad_allreduce": kind == "skip",
            }
        )
    return specs


def _why_not(config: Any, text: Any, plan: dict[str, str], size: int) -> str:
    """Returns why these layers cannot be split over `size` ranks; "" if they can."""
    if hasattr(config, "vision_config"):
        return "it sees images"
    if kinds := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYERS):
        return f"it has layers of {', '.join(kinds)}"
    if any("expert" in name for name in plan) or experts_of(text.to_dict()):
        return "it has experts"
    if any("sinks" in name for name in plan):
        return "its attention has sinks"
    if not plan or (styles := sorted(set(plan.values()) - {*_KINDS})):
        return f"transformers splits it by {', '.join(styles)}" if plan else "transformers has no plan for it"
    found = ((name, getattr(text, name, None) or 0) for name in _EVEN)  # one for all layers, or one for each
    odd = [f"{n} {name}" for name, n in found if any(each % size for each in (n if isinstance(n, list) else [n]))]
    return f"{size} does not divide its {' and '.join(odd)}" if odd else ""
