"""What a class does to its logits behind its head: a scale, a soft cap, whatever comes next.

Granite divides them, Gemma 2 and nanochat cap them, Cohere multiplies them. No list of such wishes is kept: the class's
own forward runs with a decoder that returns the hidden states it is given.

    logits = class.forward(model with [decoder -> given hidden states] and [head -> the head])

Whether that is more than the head is found out once, when a model is loaded; Qwen, Llama and most others keep the head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from model.transformers_internals import decoder_of

Head = Callable[[Tensor], Tensor]


class _Stand(torch.nn.Module):
    """In the place of a part of the model: returns what it is told to."""

    def __init__(self, answer: Callable[..., Any]):
        super().__init__()
        self.answer = answer

    def forward(self, *given: Any, **_: Any) -> Any:
        return self.answer(*given)


class _Output:
    """What a decoder returns, of which a head needs its hidden states alone."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def own_logits(model: Any) -> Callable[[Head, Tensor], Tensor] | None:
    """(head, hidden states [n, D]) -> the class's own logits [n, V]; None where the head alone gives the same bits.

    model: a transformers causal language model, on one device. Raises UserError if its forward needs more than its
    decoder's hidden states.
    """
    head, decoder = model.get_output_embeddings(), decoder_of(model)

    def logits(of_head: Head, hidden: Tensor) -> Tensor:
        shell = copy.copy(model)  # shares every parameter; ZeRO's hooks stay with the model
        shell._modules = dict(model._modules)
        for name, child in model.named_children():
            if child is head:
                shell._modules[name] = _Stand(of_head)
            elif any(part is decoder for part in child.modules()):
                shell._modules[name] = _Stand(lambda *_: _Output(hidden[None]))
        return type(model).forward(shell, inputs_embeds=hidden[None], use_cache=False).logits[0]

    some = torch.randn(4, head.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    some = some.to(head.weight.device, head.weight.dtype)
    try:
        with torch.no_grad():
            is_head = torch.equal(logits(head, some).float(), head(some[None])[0].float())
    except Exception as error:
        raise UserError(
            f"the logits of a {type(model).__name__} cannot be computed apart from its decoder ({error!r}); choose "
            "another model"
        ) from error
    return None if is_head else logits
