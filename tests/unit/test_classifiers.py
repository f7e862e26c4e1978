"""Sequence classifiers: as critics, where their weights come from and what is refused, and as rewards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BloomConfig, RobertaConfig

from common.config import Config, Rewards
from common.errors import UserError
from model.layout import choose_layout
from model.packing import pack
from model.tokenizer import check_vocabulary
from rewards.classifier import Classifier
from rewards.pool import RewardFailure, RewardPool
from tests.support.configs import config_of
from tests.support.speed import limit
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


# ---- as rewards: built here, scored in the rewards' process and by hand

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def model(folder: Path) -> Path:
    return folder / "model"


def scored(prompt: Any, completions: list[str], metrics: dict[str, float] | None = None, **entry: Any) -> list[float]:
    with RewardPool(Rewards.model_validate({"reward_funcs": [entry], "timeout_s": limit(60)})) as pool:
        for key in range(2):
            pool.submit(key, prompt, completions, [[1]] * len(completions), {"question": ""})
        found = []
        while pool.pending:
            found += pool.ready(limit(60))
        assert len(pool._idle) + len(pool._busy) == 1, "one process has the model"
    (metrics if metrics is not None else {}).update(pool.logged)
    assert not any(isinstance(scores, RewardFailure) for _, scores in found), found
    assert found[0][1] == found[1][1]
    return [total for _, total in found[0][1]]


def test_a_reward_model_reads_the_conversation_in_its_template_and_padding_changes_nothing(model: Path) -> None:
    folder = model.parent / "reward"
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    texts, expected = ["Tom has 4 pens.", "4", "Tina has 4 pens and 5 more, so 9."], []
    for text in texts:
        said = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(said, tokenize=False), return_tensors="pt")["input_ids"]
        expected.append(plain(input_ids=ids).logits.item())
    assert len(set(expected)) == 3
    asked = [{"role": "user", "content": "How many?"}]
    for prompt in ("How many?", asked, [*asked, {"role": "assistant", "content": ""}]):
        found = scored(prompt, texts, model=str(folder), batch_size=2)
        assert found == pytest.approx(expected, abs=1e-5)
    begun = [*asked, {"role": "assistant", "content": "Tom has"}]  # which the completion repeats
    assert scored(begun, texts[:1], model=str(folder)) == pytest.approx(expected[:1], abs=1e-5)


def test_what_a_conversation_ends_with_is_scored_where_the_model_knows_no_padding(model: Path) -> None:
    folder = tiny_reward_model(model.parent / "no_padding", model)
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    tokenizer.pad_token, tokenizer.bos_token, plain.config.pad_token_id = None, tokenizer.pad_token, None
    tokenizer.save_pretrained(folder)
    plain.save_pretrained(folder)
    texts, expected = ["4", "It is 4."], []
    for text in texts:
        rows = tokenizer(f"2+2?{tokenizer.eos_token}{text}{tokenizer.eos_token}", return_tensors="pt")
        assert rows["input_ids"][0, -1] == tokenizer.eos_token_id
        expected.append(plain(**rows).logits.item())  # one row alone, as its card does: the last token's
    assert Classifier(str(folder))(["2+2?"] * 2, texts, print) == pytest.approx(expected, abs=1e-5)


def test_a_classifier_of_several_labels_reads_a_pair_and_gives_the_probability_of_one(model: Path) -> None:
    """Without a chat template, and with fewer positions than a long completion has tokens."""
    folder, tokenizer = model.parent / "labels", AutoTokenizer.from_pretrained(model)
    config = BertConfig(pad_token_id=tokenizer.pad_token_id, max_position_embeddings=16, **SHAPE)
    config.id2label, config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    plain = tiny_classifier(folder, tokenizer, config)
    [[_, good]] = plain(**tokenizer("2+2?", "4", return_tensors="pt")).logits.softmax(1).tolist()
    metrics: dict[str, float] = {}
    texts = ["4", "I have thought about it for a long time and it is certainly 4"]
    for label in ("good", 1):
        assert scored("2+2?", texts, metrics, model=str(folder), label=label)[0] == pytest.approx(good, abs=1e-6)
    assert metrics["classifier_cut"] == 0.5
    one_of = r"write label: with one of \['bad', 'good'\]"
    for label, words in ((None, one_of), ("fine", "label 'fine' is none of"), (True, "label True is none of")):
        with pytest.raises(UserError, match=words):
            scored("2+2?", ["4"], model=str(folder), label=label)


@pytest.mark.parametrize(("kind", "function"), [("multi_label_classification", torch.sigmoid), ("regression", None)])
def test_labels_that_exclude_no_other_are_not_normalised_over_them(model: Path, kind: str, function: Any) -> None:
    """As transformers' own pipeline reads problem_type."""
    folder, tokenizer = model.parent / kind, AutoTokenizer.from_pretrained(model)
    plain = tiny_classifier(folder, tokenizer, BertConfig(num_labels=3, problem_type=kind, **SHAPE))
    [logits] = plain(**tokenizer("2+2?", "4", return_tensors="pt")).logits
    expected = (function or torch.nn.Identity())(logits).tolist()
    found = [Classifier(str(folder), label=label)(["2+2?"], ["4"], print)[0] for label in range(3)]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        (RobertaConfig(num_labels=1, max_position_embeddings=18, pad_token_id=1, **SHAPE), 1.0),  # of 18 it counts 16
        (BloomConfig(num_labels=1, n_head=2, n_layer=1, hidden_size=32), 0.0),  # has no positions
    ],
    ids=["positions behind the padding's", "no limit anywhere"],
)
def test_long_texts_are_cut_to_the_positions_that_there_are(model: Path, config: Any, cut: float) -> None:
    folder, said = model.parent / config.model_type, list[Any]()
    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=10**30)
    tiny_classifier(folder, tokenizer, config)
    text = "I have thought about it and it is certainly 4"
    assert len(Classifier(str(folder))(["2+2?"], [text], lambda *metric: said.append(metric))) == 1
    assert said == [("classifier_cut", cut)]


def tiny_classifier(folder: Path, tokenizer: Any, config: Any) -> Any:
    config.vocab_size, tokenizer.chat_template = len(tokenizer), None
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return plain


def test_a_model_without_a_head_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"reward nice: .* is no sequence classifier: it has no score.weight"):
        scored("2+2?", ["4"], model=str(model), name="nice")
