"""Operations of a model class on its logits after its head: a scale, a soft cap or any other.

Granite divides logits, Gemma 2 and nanochat cap them, Falcon H1 multiplies them by a number that its decoder keeps. No
list of such operations is kept: the class's own forward runs with a decoder that returns given hidden states.

    logits = class.forward(model with [decoder -> given hidden states] and [head -> the head])

When a model is loaded, its own forward of a few tokens decides which way is right: the head alone (Qwen, Llama and most
others), the class's forward around given hidden states, or, if neither gives its logits, its whole forward.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.errors import with_type
from common.processes.exits import say
from model.cpu.equal import is_equal
from model.layout import Agree, own_attention
from model.transformers_internals import decoder_of

Head = Callable[[Tensor], Tensor]
_IDS = list(range(5, 21))  # token ids that every model has


class _StandIn(torch.nn.Module):
    """A module that replaces a part of the model: it returns `answer`'s result, and has the part's attributes."""

    def __init__(self, part: torch.nn.Module, answer: Callable[..., Any]):
        super().__init__()
        self.__dict__ |= {"part": part, "answer": answer}  # not as submodules, where __getattr__ would look for them

    def forward(self, *given: Any, **_: Any) -> Any:
        return self.answer(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"], name)


class _Output:
    """A decoder's output, reduced to the hidden states, the only part that a head needs."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def whole_forward(_: Head, hidden: Tensor) -> Tensor:
    """Marks a class whose logits need its whole forward, as own_logits found out; never called."""
    raise AssertionError("the logits come from the model's own forward")


def own_logits(model: Any, agree: Agree = float) -> Callable[[Head, Tensor], Tensor] | None:
    """Returns a function (head, hidden states [n, D]) -> the class's own logits [n, V].

    Returns None if the head alone gives the same bits; `whole_forward` if only the class's whole forward does.
    model: a transformers causal language model, on one device. agree: as for `choose_layout`.
    """
    head, decoder = model.get_output_embeddings(), decoder_of(model)

    def logits(of_head: Head, hidden: Tensor) -> Tensor:
        shell = copy.copy(model)  # shares every parameter; ZeRO's hooks stay with the model
        shell._modules = dict(model._modules)
        for name, child in model.named_children():
            if child is model.get_output_embeddings():  # tensor-parallel ranks may have replaced it since
                shell._modules[name] = _StandIn(child, of_head)
            elif any(part is decoder for part in child.modules()):
                shell._modules[name] = _StandIn(child, lambda *_: _Output(hidden[None]))
        return type(model).forward(shell, inputs_embeds=hidden[None], use_cache=False).logits[0]

    with own_attention(model), torch.no_grad():
        ids = torch.tensor([_IDS], device=model.device)
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        if not agree(not torch.equal(head(hidden[None])[0].float(), own)):
            return None
        differs, reason = True, "they differ from its own"
        try:
            found = logits(head, hidden).float()
            differs = not is_equal(found, own.to(found.dtype))
        except Exception as error:
            reason = with_type(error)
        if not agree(differs):
            return logits
    say(
        f"the logits of a {type(model).__name__} cannot be computed apart from its decoder ({reason}); its whole "
        "forward runs instead and keeps the logits of every token, which is slower and takes more memory"
    )
    return whole_forward
