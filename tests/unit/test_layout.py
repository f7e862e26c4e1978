"""Which rows a model takes, found out when it is loaded: tiny models of every kind against their own forward."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import UserError
from model import layout
from model.layout import packing_of
from model.logits import whole_forward
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from tests.support.configs import config_of
from tests.support.tiny import dense_logprobs
from tools.families.models import random_model
from trainer.engine.critic import ValueModel, load_value_model

VOCAB = 97
GROUPS = [(list(range(40, 55)), [list(range(60, 69)), [7], list(range(10, 25))]), ([3, 4], [[5, 6], [7, 8, 9]])]


def saved(path: Path, family: str) -> str:
    random_model(family, VOCAB).save_pretrained(path)
    return str(path)


def gradient(model: Any, logprobs: torch.Tensor) -> torch.Tensor:
    along = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((logprobs * along).sum(), list(model.parameters()), materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("family", ["granitemoehybrid", "llama4_text", "gpt_oss"])
def test_a_critic_of_any_family_has_the_values_of_one_sequence_at_a_time(tmp_path: Path, family: str) -> None:
    config = config_of({"path": saved(tmp_path, family), "dtype": "float32"}, algorithm={"adv_estimator": "gae"})
    model = load_value_model(config)
    torch.nn.init.normal_(model.score.weight)
    together = ValueModel(model)(pack(GROUPS, packing_of(model)))
    alone = [ValueModel(model)(pack([(p, [c])], "separate")) for p, completions in GROUPS for c in completions]
    assert together.tolist() == pytest.approx(torch.cat(alone).tolist(), abs=1e-4)
    assert together.std() > 0.1


def test_a_layout_that_is_wanted_and_wrong_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"packing shared: a Lfm2ForCausalLM .*carry a state.*trainer.packing=auto"):
        load_causal_lm(saved(tmp_path, "lfm2"), "float32", None, False, "shared")


def test_separate_rows_go_through_the_model_s_own_attention_where_they_are_wanted(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, "qwen2"), "float32", None, False, "separate")
    assert packing_of(model) == "separate" and model.config._attn_implementation == "sdpa"
    with pytest.raises(AssertionError, match="mix the sequences"):
        score_logprobs(model, pack(GROUPS, "shared"), 1.0, 5)


def test_a_soft_cap_that_sdpa_would_pass_over_is_kept_by_the_model_s_eager_attention(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, "gemma2"), "bfloat16", None, False, "separate")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["lfm2", "llama4_text"])
def test_an_unnamed_layer_shows_in_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A leak from one completion into the next, and a window that shared rows do not know."""
    monkeypatch.setattr(layout, "mixes_packed_sequences", lambda _: False)
    path = saved(tmp_path, family)
    assert packing_of(load_causal_lm(path, "float32", None, False)) == "separate"
    with pytest.raises(UserError, match="packing shared"):
        load_causal_lm(path, "float32", None, False, "shared")


def test_windows_are_those_of_the_model_again_after_the_check(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, "mistral"), "float32", None, False)
    assert model.config.sliding_window == 32
    assert {m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")} <= {32}


@pytest.mark.parametrize(("family", "has_own"), [("qwen2", False), ("granite", True)])
def test_the_head_alone_stays_where_it_gives_the_same_bits(tmp_path: Path, family: str, has_own: bool) -> None:
    assert (load_causal_lm(saved(tmp_path, family), "float32", None, False).own_logits is not None) is has_own


# ---- logits that a class makes of more than its decoder's hidden states


def of_an_attribute(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
    hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)[0]
    return SimpleNamespace(logits=self.lm_head(hidden) * self.model.layers[0].self_attn.scaling)


def of_the_tokens(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
    hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)[0]
    return SimpleNamespace(logits=self.lm_head(hidden) + self.get_input_embeddings()(input_ids).sum(-1, keepdim=True))


def of_a_decoder_that_is_deeper(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
    from transformers import Qwen2Model

    embedded = inputs_embeds if input_ids is None else self.model.embed_tokens(input_ids)
    hidden = Qwen2Model.forward(self.model, inputs_embeds=embedded, **given)[0]
    return SimpleNamespace(logits=2 * self.lm_head(hidden))


@pytest.mark.parametrize(
    ("forward", "is_whole"), [(of_an_attribute, False), (of_the_tokens, True), (of_a_decoder_that_is_deeper, True)]
)
def test_logits_are_the_class_s_own_apart_from_its_decoder_or_by_its_whole_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, forward: Any, is_whole: bool
) -> None:
    from transformers import Qwen2ForCausalLM

    path = saved(tmp_path, "qwen2")
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward)
    model = load_causal_lm(path, "float32", None, False)
    assert (model.own_logits is whole_forward) is is_whole
    assert ("its whole forward runs" in capsys.readouterr().err) is is_whole
    found = score_logprobs(model, pack(GROUPS, packing_of(model)), 1.0, chunk_size=5)
    found_gradient = gradient(model, found)
    model.set_attn_implementation("eager")
    alone = [dense_logprobs(model, prompt, completion) for prompt, completions in GROUPS for completion in completions]
    expected = torch.cat(alone)
    assert (found - expected).abs().max() < 1e-5
    assert (found_gradient - gradient(model, expected)).norm() < 2e-6 * found_gradient.norm()


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("seed_oss", {"residual_dropout": 0.5, "attention_dropout": 0.5}),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.5}),
        ("falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5, "alibi": False}),  # read from its configuration
        ("opt", {"layerdrop": 0.9, "dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
)
def test_nothing_is_dropped_at_random_while_a_model_trains(family: str, rates: dict[str, Any], tmp_path: Path) -> None:
    """The sampler drops nothing: the ratio would compare two networks, and a resumed run would be another one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | rates)).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), "float32", None, False)
    row = pack(GROUPS, packing_of(model))
    evaluated, trained = (score_logprobs(model.train(mode), row, 1.0, 64) for mode in (False, True))
    assert torch.equal(evaluated, trained)


def test_a_model_that_stays_random_while_it_trains_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    forward = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda mlp, x: forward(mlp, x) * (torch.rand(1) if mlp.training else 1))
    with pytest.raises(UserError, match="hidden states differ"):
        load_causal_lm(saved(tmp_path, "qwen2"), "float32", None, False)
