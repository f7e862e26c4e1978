"""Sequence classifiers as rewards, scored in the rewards' process and by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BloomConfig, RobertaConfig

from common.config import Rewards
from common.errors import UserError
from rewards.classifier import Classifier
from rewards.pool import RewardFailure, RewardPool
from tests.support.speed import limit
from tests.support.tiny import VOCAB_SIZE, tiny_model, tiny_reward_model

pytestmark = pytest.mark.timeout(300)

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model. Beside it, "reward" is a reward model of its shape."""
    path = tmp_path_factory.mktemp("classifiers") / "model"
    tiny_model(path, vocab=VOCAB_SIZE)
    tiny_reward_model(path.parent / "reward", path)
    return path


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
