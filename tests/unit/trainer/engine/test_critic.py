"""Sequence classifiers as critics: where their weights come from, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from common.config import Config
from common.errors import UserError
from model.layout import choose_layout
from model.packing import pack
from model.tokenizer import check_vocabulary
from tests.support.configs import config_of
from tests.support.tiny import VOCAB_SIZE, dense_values, tiny_model, tiny_reward_model
from trainer.engine.critic import ValueModel, load_value_model
from trainer.engine.deepspeed_model import DeepSpeedModel

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model: a causal language model. reward: a reward model of its shape."""
    made = tmp_path_factory.mktemp("critic")
    tiny_model(made / "model", vocab=VOCAB_SIZE)
    tiny_reward_model(made / "reward", made / "model")
    return made


def settings(folder: Path, path: Path | None = None, dtype: str = "float32") -> Config:
    model, critic = {"path": str(folder / "model"), "dtype": dtype}, {} if path is None else {"path": str(path)}
    return config_of(model, algorithm={"adv_estimator": "gae"}, critic=critic)


def test_the_policys_start_gets_a_head_of_zeros_and_a_reward_model_keeps_its_own(folder: Path) -> None:
    model = load_value_model(settings(folder))
    assert model.score.weight.shape == (1, 64) and not model.score.weight.any()
    weights = load_file(folder / "model" / "model.safetensors")
    named = dict(model.named_parameters())
    assert named.keys() - {"score.weight"} == weights.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, named[name]) for name, tensor in weights.items() if name in named)

    model = load_value_model(settings(folder, folder / "reward"))  # which keeps its own
    saved = load_file(folder / "reward" / "model.safetensors")["score.weight"]
    assert torch.equal(model.score.weight, saved) and saved.any()


@pytest.mark.parametrize("packing", ["shared", "separate"])
def test_values_of_a_row_equal_a_dense_forward_per_completion(folder: Path, packing: Any) -> None:
    groups = [([5, 6, 7], [[8, 9], [8], [3, 4, 5]]), ([2], [[1, 1, 1, 1], [7]])]
    model = ValueModel(load_value_model(settings(folder, folder / "reward")))
    choose_layout(model.model, "auto", None)
    found = model(pack(groups, packing))
    dense = AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float64)
    expected = torch.cat([dense_values(dense, prompt, c) for prompt, completions in groups for c in completions])
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert expected.std() > 0.1
    # the value of a completion's first token belongs to the prompt: it is that of its siblings
    assert torch.allclose(found[:1].expand(2), found[[2, 3]], atol=1e-5)


def test_values_are_float32_where_the_weights_are_bfloat16(folder: Path) -> None:
    model = ValueModel(load_value_model(settings(folder, folder / "reward", "bfloat16")))
    assert model.model.score.weight.dtype == torch.bfloat16
    values = model(pack([([5, 6], [[8, 9, 3]])]))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("two labels", "does not fit a value head with one output"),
        ("a layer without a weight", r"lacks 1 weights, the first is model\.layers\.1\.mlp\.up_proj\.weight"),
        ("nothing", "cannot be loaded"),
    ],
)
def test_what_is_no_critic_is_refused_with_what_to_do(folder: Path, tmp_path: Path, kind: str, said: str) -> None:
    if kind == "two labels":
        AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2).save_pretrained(tmp_path)
    if kind == "a layer without a weight":
        weights = load_file(folder / "reward" / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folder / "reward" / "config.json").read_text())
    with pytest.raises(UserError, match=said):
        load_value_model(settings(folder, tmp_path))


def test_a_critic_with_fewer_embeddings_than_the_tokenizer_has_tokens_is_refused(folder: Path) -> None:
    critic = load_value_model(settings(folder))
    check_vocabulary(critic, VOCAB_SIZE, "critic")
    with pytest.raises(UserError, match=f"the critic model knows {VOCAB_SIZE} tokens, the policy's tokenizer 321"):
        check_vocabulary(critic, VOCAB_SIZE + 1, "critic")


def test_a_gradient_that_is_infinite_under_a_finite_loss_is_seen() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
    watched = SimpleNamespace(model=torch.nn.ParameterList([weight]), _not_finite=torch.zeros((), dtype=torch.bool))
    DeepSpeedModel.watch_gradients(watched)  # type: ignore[arg-type]
    weight.sum().backward()
    assert not watched._not_finite
    loss = weight.sqrt().sum()  # at 0 its slope is infinite
    loss.backward()
    assert loss.item() == 1.0
    assert watched._not_finite
