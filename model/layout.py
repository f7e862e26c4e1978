"""The layout in which rows pass through a model, chosen by a check when the model is loaded.

    shared     a prompt once, its completions behind it: attention.py
    separate   each completion in a row of its own, through the model's own attention and layers

Layers that carry a state from token to token, convolutions, or attention of their own kind would let the completions of
a shared row see each other. No list of families is needed: two completions of a few tokens are computed by the model's
own forward, one at a time, and in each layout; a layout that differs by more than rounding is not used. The layouts are
tried in train mode, because a model that drops something at random in it is another network than the sampler's.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError, with_type
from model import attention, vision
from model.packing import PackedRow, Packing, Wanted, pack
from model.transformers_internals import decoder_of, mixes_packed_sequences

Agree = Callable[[float], float]  # (a rank's value) -> the largest of all ranks' values
_ATTENTION = {"auto": (attention.NAME, "sdpa", "eager"), "shared": (attention.NAME,), "separate": ("sdpa", "eager")}
# bounds of the relative RMS difference. Measured: float32 at most 3e-6; bfloat16 0.01, and up to 0.14 with experts,
# because a router may choose another; completions that see each other 0.4 to 1
_FLOAT32_BOUND, _BFLOAT16_BOUND = 1e-4, 0.25
_WINDOWS = ("sliding_window", "attention_chunk_size")  # attributes of transformers' configs and layers
_NOISE = ("jitter_noise", "moe_jitter_eps")  # noise before routers: Mixtral and MiniMax, DBRX


def packing_of(model: Any) -> Packing:
    """Returns the packing of rows that the model takes."""
    return "shared" if model.config.get_text_config()._attn_implementation == attention.NAME else "separate"


def backbone(model: Any) -> Any:
    """Returns the part of a model that computes hidden states: without its head, with its vision tower."""
    return model.base_model if vision.has_vision_tower(model.config) else decoder_of(model)


def hidden_at_sources(base: Any, row: PackedRow, output: str = "last_hidden_state") -> Tensor:
    """Returns hidden states [N, D] at the positions that predict the row's targets. base: a model's backbone.

    output: "logits" of a whole model gives [N, V].

    It uses index_select, not indexing: completions share a source, and two threads of indexing's backward add to it in
    the order of their arrival, so that no two runs are alike.
    """
    if row.vision is not None:
        hidden = vision.hidden_states(base, row)
    else:
        found = base(input_ids=row.input_ids, use_cache=False, **attention.options(base, row))
        hidden = getattr(found, output).flatten(0, 1)
    return hidden.index_select(0, row.source_index)


@torch.no_grad()
def choose_layout(model: Any, wanted: Wanted, vision_layout: vision.VisionLayout | None, agree: Agree = float) -> None:
    """Sets the first attention that agrees with the model's own forward; `packing_of` then tells which rows it takes.

    agree: makes ranks whose processors round differently, and which may hold parts of the model, choose alike.
    Raises UserError if no layout, or not the wanted one, agrees.
    """
    base, was_training, reasons = backbone(model), model.training, dict[str, str]()
    with _short_windows(model):
        with own_attention(model):
            own = torch.cat([_own_hidden(base, completion) for completion in _COMPLETIONS])
        _switch_off_dropout(model.train())
        for name in _ATTENTION[wanted]:
            if name == attention.NAME and mixes_packed_sequences(model):
                reasons[name] = "its layers carry a state from token to token, or do attention of their own"
                continue
            difference, reason = math.inf, ""
            try:
                _set_attention(model, name)
                row = pack([(_PROMPT, _COMPLETIONS)], packing_of(model))
                found = hidden_at_sources(base, vision.with_vision(row, vision_layout).to(base.device))
                difference = float((found - own).norm() / own.norm())
            except Exception as error:
                reason = with_type(error)
            difference = agree(difference)
            if difference <= (_BFLOAT16_BOUND if own.dtype == torch.bfloat16 else _FLOAT32_BOUND):
                model.train(was_training)
                return
            differs = f"hidden states differ by {difference:.1e} from those of the model's own forward"
            reasons[name] = reason or differs
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    remedy = "model.path to another model" if wanted == "auto" else "trainer.packing=auto"
    raise UserError(
        f"trainer.packing {wanted}: a {type(model).__name__} gives completions side by side other hidden states than "
        f"each of them alone ({details[:600]}); set {remedy}"
    )


_PROMPT, _COMPLETIONS = list(range(5, 17)), [list(range(20, 27)), list(range(30, 35))]  # ids that every model has


def _own_hidden(base: Any, completion: list[int]) -> Tensor:
    """Returns the model's own hidden states that predict the tokens of one completion, [C, D]."""
    ids = torch.tensor([[*_PROMPT, *completion]], device=base.device)
    found = getattr(base, "language_model", base)(input_ids=ids, use_cache=False)
    return found.last_hidden_state[0, len(_PROMPT) - 1 : -1]


@contextlib.contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Switches the model to transformers' eager attention, for single sequences, and to eval mode in the context."""
    name, was_training = model.config.get_text_config()._attn_implementation, model.training
    _set_attention(model.eval(), "eager")
    try:
        yield
    finally:
        _set_attention(model.train(was_training), name)


def _switch_off_dropout(model: Any) -> None:
    """Switches off dropout, skipped layers and noise before routers, all of which transformers keeps as rates.

    The rates are attributes of modules (`residual_dropout`, `layerdrop`, torch.nn.Dropout's p) and of configurations.
    Other names with "jitter" are left alone: Phi-3.5-MoE's is a threshold of its routers as well.
    """
    holders = {id(x): x for module in model.modules() for x in (module, getattr(module, "config", module))}
    for holder in holders.values():
        for name, value in vars(holder).items():
            is_rate = "drop" in name or name in _NOISE or (name == "p" and isinstance(holder, torch.nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(holder, name, 0.0)


def _set_attention(model: Any, name: str) -> None:
    parts = {"": name, "text_config": name, "vision_config": "sdpa"}
    model.set_attn_implementation(parts if vision.has_vision_tower(model.config) else name)


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Makes windows shorter than the check's few tokens in the context, so that layouts that ignore them fail it."""
    holders = {id(x): x for x in (model.config, model.config.get_text_config(), *model.modules())}.values()
    found = [(x, name, vars(x)[name]) for x in holders for name in _WINDOWS if isinstance(vars(x).get(name), int)]
    for holder, name, _ in found:
        setattr(holder, name, 8)
    try:
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)
