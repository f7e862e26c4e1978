"""Router replay: the recorded experts, the trainer's own scores of them, and gradients through the router."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from model.files.folder import expert_warnings, require_models
from model.router_replay import RouterReplay
from tests.support.configs import config_of
from tests.support.mixtures import MIXTURES, mixture
from tests.support.tiny import model_of_shape, tiny_model
from tools.families.models import FAMILIES


def run(model: Any) -> Tensor:
    return model(input_ids=torch.arange(24).reshape(2, 12), use_cache=False).logits


def replayed(family: str, **changes: Any) -> tuple[Any, RouterReplay]:
    model = mixture(family, **changes)
    return model, RouterReplay(model, lambda: run(model))


def own_choice(model: Any, replay: RouterReplay) -> Tensor:
    """[T, layers, k] what its routers say of themselves: their last output is the experts."""
    said: list[Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda _m, _a, output: said.append(output[-1])) for router in routers]
    replay.use(None)
    run(model)
    for hook in hooks:
        hook.remove()
    return torch.stack(said, 1)


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    run(model).log_softmax(-1)[..., 3].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", MIXTURES)
def test_replaying_a_models_own_choice_changes_no_bit_of_its_logits_and_gradients(family: str) -> None:
    model, replay = replayed(family)
    own = own_choice(model, replay)
    assert own.shape == (24, replay.num_layers, 2) and replay.num_layers == 4 - (family in ("glm4_moe", "deepseek_v3"))
    plain, plain_gradients = run(model), gradients(model)
    replay.use(own.to(torch.int16))
    assert torch.equal(run(model), plain)
    assert {name: int(n) for name, n in replay.sums().items()} == {"routed": own[..., 0].numel(), "rerouted": 0}
    assert all(torch.equal(g, plain_gradients[name]) for name, g in gradients(model).items())


@pytest.mark.parametrize("family", MIXTURES)
def test_other_experts_are_used_in_every_layer_and_counted(family: str) -> None:
    model, replay = replayed(family)
    own, num_experts = own_choice(model, replay), FAMILIES[family].get("num_local_experts", 8)
    plain = run(model)
    for layer in range(replay.num_layers):
        other = own.clone()
        other[5, layer] = (own[5, layer] + 1) % num_experts
        replay.use(other)
        changed = run(model)
        torch.testing.assert_close(changed[0, :5], plain[0, :5])
        torch.testing.assert_close(changed[1], plain[1])
        assert not torch.allclose(changed[0, 5], plain[0, 5], atol=1e-3)
        assert replay.sums()["rerouted"] >= 1  # layers behind it may choose others, too


def test_what_was_not_recorded_is_the_routers_own_choice() -> None:
    model, replay = replayed("qwen3_moe")
    plain = run(model)
    replay.use(torch.full((24, 4, 2), -1, dtype=torch.int16))
    assert torch.equal(run(model), plain)
    assert int(replay.sums()["routed"]) == 0


def test_chosen_experts_have_their_scores_renormalised_and_the_router_its_gradient() -> None:
    """By hand: softmax over all, the two that were recorded, divided by their sum."""
    model, replay = replayed("qwen3_moe", norm_topk_prob=True)
    block = model.model.layers[1].mlp
    x = torch.randn(4, model.config.hidden_size)
    recorded = torch.tensor([[0, 1], [7, 2], [3, 4], [5, 6]])
    replay.use(recorded[:, None].expand(-1, 4, -1))
    block(x[None]).square().sum().backward()
    found = block.gate.weight.grad.clone()
    weight = block.gate.weight.detach().clone().requires_grad_()
    chosen = (x @ weight.T).softmax(-1).gather(-1, recorded)
    chosen = chosen / chosen.sum(-1, keepdim=True)

    def expert(e: Tensor, token: Tensor) -> Tensor:
        gate, up = (block.experts.gate_up_proj[e] @ token).chunk(2)
        return block.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)

    by_hand = torch.stack([chosen[t] @ torch.stack([expert(e, x[t]) for e in recorded[t]]) for t in range(4)])
    torch.testing.assert_close(block(x[None])[0], by_hand)
    by_hand.square().sum().backward()
    torch.testing.assert_close(found, weight.grad)
    assert found.abs().max() > 1e-4


def test_a_recomputed_layer_sends_its_tokens_where_they_were_sent() -> None:
    model, replay = replayed("qwen3_moe")
    recorded = (own_choice(model, replay) + 3) % 8
    replay.use(recorded)
    kept = gradients(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    replay.use(recorded)
    recomputed = gradients(model)
    assert all(torch.equal(g, recomputed[name]) for name, g in kept.items())
    assert int(replay.sums()["rerouted"]) <= 24 * 4


def test_a_model_without_experts_is_refused() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(hidden_size=64, num_hidden_layers=1, vocab_size=8, num_attention_heads=2))
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM has no experts.*algorithm.router_replay=false"):
        RouterReplay(model, lambda: None)


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    model = mixture("qwen3_moe")
    router = model.model.layers[1].mlp.gate

    def by_sorting(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ router.weight.T
        scores, indices = logits.softmax(-1).sort(descending=True)
        return logits, scores[:, :2], indices[:, :2]

    router.forward = by_sorting
    with pytest.raises(UserError, match="3 of the 4 mixtures of Qwen3MoeForCausalLM"):
        RouterReplay(model, lambda: run(model))


def test_the_start_says_what_a_mixture_does_without_replay_and_that_no_loss_balances_experts(tmp_path: Path) -> None:
    shape = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
    path = str(model_of_shape(tmp_path, shape))
    routing, balance = expert_warnings(config_of({"path": path, "dtype": "bfloat16"}))
    assert "algorithm.router_replay=true" in routing and "router_aux_loss_coef 0.001" in balance
    assert expert_warnings(config_of({"path": path, "dtype": "float32"})) == [balance]
    replaying = config_of({"path": path, "dtype": "bfloat16"}, algorithm={"router_replay": True})
    assert expert_warnings(replaying) == [balance]
    assert expert_warnings(config_of({"path": str(tiny_model(tmp_path / "dense"))})) == []


def test_replay_without_a_mixture_is_refused_from_its_config_json(tmp_path: Path) -> None:
    dense = config_of({"path": str(tiny_model(tmp_path))}, algorithm={"router_replay": True})
    with pytest.raises(UserError, match=r"names none in its config\.json; set algorithm\.router_replay=false"):
        require_models(dense)


def test_a_recording_of_other_layers_is_refused() -> None:
    _, replay = replayed("mixtral")
    with pytest.raises(UserError, match="experts in 2 layers, the trainer's model in 4"):
        replay.use(torch.zeros(24, 2, 2, dtype=torch.int16))
