"""Sequence classifiers as rewards: built here, scored in the rewards' process and by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from common.config import Rewards
from common.errors import UserError
from rewards.pool import RewardFailure, RewardPool
from tests.support.speed import limit
from tests.support.tiny import tiny_model, tiny_reward_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "model")


def scored(prompt: Any, completions: list[str], metrics: dict[str, float] | None = None, **entry: Any) -> list[float]:
    with RewardPool(Rewards.model_validate({"reward_funcs": [entry], "timeout_s": limit(60)})) as pool:
        for key in range(2):
            pool.submit(key, prompt, completions, [[1]] * len(completions), {"question": ""})
        found = []
        while pool.pending:
            found += pool.ready(limit(60))
        assert len(pool._idle) + pool._num_busy == 1, "one process has the model"
    (metrics if metrics is not None else {}).update(pool.logged)
    assert not any(isinstance(scores, RewardFailure) for _, scores in found), found
    assert found[0][1] == found[1][1]
    return [total for _, total in found[0][1]]


def test_a_reward_model_reads_the_conversation_in_its_template_and_padding_changes_nothing(model: Path) -> None:
    folder = tiny_reward_model(model.parent / "reward", model)
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    texts, expected = ["Tom has 4 pens.", "4", "Tina has 4 pens and 5 more, so 9."], []
    for text in texts:
        said = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": text}]
        ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(said, tokenize=False))["input_ids"]])
        with torch.no_grad():
            expected.append(plain(input_ids=ids).logits.item())
    assert len(set(expected)) == 3
    for prompt in ("How many?", [{"role": "user", "content": "How many?"}]):
        found = scored(prompt, texts, model=str(folder), batch_size=2)
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_classifier_of_several_labels_reads_a_pair_and_gives_the_probability_of_one(model: Path) -> None:
    """Without a chat template, and with fewer positions than a long completion has tokens."""
    folder, tokenizer = model.parent / "labels", AutoTokenizer.from_pretrained(model)
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape)
    config.id2label, config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    plain = BertForSequenceClassification(config).eval()
    plain.save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        [[_, good]] = plain(**tokenizer("2+2?", "4", return_tensors="pt")).logits.softmax(1).tolist()
    metrics: dict[str, float] = {}
    texts = ["4", "I have thought about it for a long time and it is certainly 4"]
    for label in ("good", 1):
        assert scored("2+2?", texts, metrics, model=str(folder), label=label)[0] == pytest.approx(good, abs=1e-6)
    assert metrics["classifier_cut"] == 0.5
    for label, words in ((None, "write label: with one of bad, good"), ("fine", "label 'fine' is none of")):
        with pytest.raises(UserError, match=words):
            scored("2+2?", ["4"], model=str(folder), label=label)


def test_a_model_without_a_head_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"reward nice: .* is no sequence classifier: it has no score.weight"):
        scored("2+2?", ["4"], model=str(model), name="nice")
