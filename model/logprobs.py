"""Log-probs of given tokens from hidden states, without a float32 [tokens, vocabulary] tensor.

Qwen2.5 has 151,936 tokens: the logits of 64 completions of 256 tokens would take 10 GB in float32. The head runs over
chunks of tokens instead, and with gradients each of several chunks is recomputed in backward, so one chunk's logits
exist at a time in either direction. Prompt positions never enter the head.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from model import attention, vision
from model.files.folder import causal_lm_class, check_model_folder
from model.layout import Agree, backbone, choose_layout, hidden_at_sources
from model.log_softmax import LogSoftmaxAt, joined, on_support, scaled
from model.logits import Head, own_logits, whole_forward
from model.packing import PackedRow, Wanted
from model.sequence_parallel import gather


def score_logprobs(model: Any, row: PackedRow, temperature: float, chunk_size: int) -> Tensor:
    """Returns the log-probs of the row's targets, [N] float32, without computing entropies."""
    return score_terms(model, row, temperature, chunk_size, with_entropy=False)[0]


def score_terms(
    model: Any,
    row: PackedRow,
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool = False,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `token_terms` of the row's targets; for a row that is split over ranks, every rank gets all N values.

    model: a transformers causal language model as load_causal_lm returns it; the row's packing is packing_of(model).
    """
    logprobs, entropy, log_mass = _with_head(
        model,
        _hidden_states(model, row),
        lambda h, head: token_terms(
            h, row.target_ids, head, temperature, chunk_size, entropy_gradient, row.sampling_mask, with_entropy
        ),
    )
    return gather(logprobs, row.shard), gather(entropy, row.shard), gather(log_mass, row.shard)


def score_norms_of_row(model: Any, row: PackedRow, temperature: float, chunk_size: int) -> Tensor:
    """Returns `score_norms` of the row's targets: [N] float32, without gradient."""
    norms = _with_head(
        model,
        _hidden_states(model, row),
        lambda h, head: score_norms(h, row.target_ids, head, temperature, chunk_size, row.sampling_mask),
    )
    return gather(norms, row.shard)


def _hidden_states(model: Any, row: PackedRow) -> Tensor:
    """Returns hidden states [N, D] before the model's head; its logits [N, V] if they need its whole forward.

    With router replay the row's tokens are sent to the recorded experts.
    """
    if replay := getattr(model, "router_replay", None):
        replay.use(row.routing)
    if getattr(model, "own_logits", None) is whole_forward:
        return hidden_at_sources(model, row, "logits")
    return hidden_at_sources(backbone(model), row)


def _with_head(model: Any, hidden: Tensor, body: Callable[[Tensor, Head], Any]) -> Any:
    """Calls body(hidden, function from hidden states to logits) as one call of the model's head.

    ZeRO-3 gathers weights from all ranks in every call, forward and backward. Ranks hold different numbers of tokens
    and so of chunks: with a call for each chunk they would wait for each other for ever.
    """
    head = model.get_output_embeddings()
    forward, own = head.forward, getattr(model, "own_logits", None)
    if own is whole_forward:
        return body(hidden, lambda logits: logits)
    logits = forward if own is None else functools.partial(own, forward)
    head.forward = lambda h: body(h, logits)
    try:
        return head(hidden)
    finally:
        head.forward = forward


def token_terms(  # noqa: PLR0913 as score_terms
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool = False,
    sampling_mask: Tensor | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log softmax(head(h) / temperature)[target] for each row h of hidden [N, D]; targets [N] int64.

    With sampling_mask [N, K] (padded with -1) the softmax is over each row's set S, which must hold the target:

        log μ(target) = z_target − log Σ_{v ∈ S} exp z_v        log_mass = log Σ_{v ∈ S} π(v)

    The result is float32: (logprobs [N], of μ with sets; entropy [N] of π, or zeros; log_mass [N], 0 without sets). The
    entropy has a gradient only with entropy_gradient, log_mass none.
    """

    def chunk(h: Tensor, target: Tensor, sets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return LogSoftmaxAt.apply(head(h), target, sets, temperature, with_entropy, entropy_gradient)

    if len(targets) <= chunk_size:
        return chunk(hidden, targets, sampling_mask)
    recomputed = functools.partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    run = recomputed if torch.is_grad_enabled() else chunk
    sets = itertools.repeat(None) if sampling_mask is None else sampling_mask.split(chunk_size)
    parts = [run(*given) for given in zip(hidden.split(chunk_size), targets.split(chunk_size), sets, strict=False)]
    logprobs, entropy, log_mass = joined(parts)
    return logprobs, entropy, log_mass


@torch.no_grad()
def score_norms(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    chunk_size: int,
    sampling_mask: Tensor | None = None,
) -> Tensor:
    """Returns ‖∇_z log π(target)‖² for each row of hidden [N, D], with π = softmax(z), z = head(h) / temperature.

        q = Σ_v (1[v = target] − π_v)² = 1 − 2 π_target + Σ_v π_v²

    The result is [N] float32 in [0, 2], without gradient: 0 if the target is certain. With sampling_mask, as for
    `token_terms`, π is the softmax over each target's set.
    """

    def chunk(h: Tensor, target: Tensor, support: Tensor) -> Tensor:
        logits = scaled(head(h), temperature)
        chosen = logits.gather(-1, target[:, None])
        if sampling_mask is not None:
            logits = on_support(logits, support)
        log_normaliser = logits.logsumexp(-1, keepdim=True)
        p = (chosen - log_normaliser)[:, 0].exp()
        return 1 - 2 * p + (logits - log_normaliser).exp().square().sum(-1)

    supports = targets[:, None] if sampling_mask is None else sampling_mask
    parts = zip(*(x.split(chunk_size) for x in (hidden, targets, supports)), strict=True)
    return torch.cat([chunk(*given) for given in parts]).clamp(min=0)


def load_causal_lm(
    path: str, dtype: str, revision: str | None, trust_remote_code: bool, packing: Wanted = "auto"
) -> Any:
    """Loads a transformers causal language model in the layout that is right for it, with its vision tower if any.

    Raises UserError as `load_model` and `arrange_causal_lm` do.
    """
    model, _ = load_model(causal_lm_class, path, dtype, revision, trust_remote_code)
    arrange_causal_lm(model, packing, vision.layout_of(model.config, path, revision))
    return model


def arrange_causal_lm(model: Any, packing: Wanted, images: vision.VisionLayout | None, agree: Agree = float) -> None:
    """Chooses the layout of rows, and how the logits are computed. agree: as for `choose_layout`.

    Raises UserError if no layout, or not the one asked for, is right, and for a vision model whose logits need its
    whole forward.
    """
    choose_layout(model, packing, images, agree)
    model.own_logits = own_logits(model, agree)
    if model.own_logits is whole_forward:  # the whole forward may not pass a shared row's spans to its layers
        if vision.has_vision_tower(model.config):
            raise UserError(
                f"the logits of a {type(model).__name__} can only be computed by its whole forward, which is not "
                "supported for a model that sees images; set model.path to another model"
            )
        choose_layout(model, "separate" if packing == "auto" else packing, None, agree)


def load_model(
    class_of: Callable[[Any], Any],
    path: str,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    **options: Any,
) -> tuple[Any, list[str]]:
    """Loads a model in the class for its configuration, and returns it with the names of weights that its files lack.

    options: further arguments of that class's from_pretrained. Raises UserError if the model cannot be loaded.
    """
    from transformers import AutoConfig

    attention.register()
    check_model_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if getattr(config.get_text_config(), "output_router_logits", False):
            config.get_text_config().output_router_logits = False  # their loss is not part of the objective
        model, loading = class_of(config).from_pretrained(
            path,
            revision=revision,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"model {path!r} cannot be loaded: {first_line}\n"
            f"Give a folder, or download it once: hf download {path}  (behind a firewall set HF_ENDPOINT)"
        ) from None
    return model, sorted(loading["missing_keys"])
