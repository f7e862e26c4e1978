"""The shipped GSM8K run against the real rows and the real Qwen2.5 tokenizer."""

import json
import re

import pytest

from common.config import load
from common.paths import ROOT
from model.tokenizer import load_tokenizer
from rewards.built_in import answer, format
from sampler.prompts.dataset import load_data
from sampler.prompts.many_prompts import make_prompts

SHARED = ROOT.parent / "shared"
GSM8K = SHARED / "data" / "gsm8k"
QWEN = SHARED / "models" / "qwen2.5-tokenizer"
CONFIG = ROOT / "configs/gsm8k_qwen2.5_1.5b.yaml"
SIZES = {"train": 7473, "test": 1319}

pytestmark = pytest.mark.skipif(not (GSM8K.is_dir() and QWEN.is_dir()), reason="no rows and tokenizer in ../shared")


@pytest.mark.parametrize("split", SIZES)
def test_every_gold_answer_earns_both_rewards_in_every_notation_and_any_other_number_nothing(split):
    columns = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
    # without the code under test: every gold of GSM8K is an integer
    golds = [int(column[column.index("####") + 4 :].replace(",", "")) for column in columns]
    assert len(columns) == SIZES[split]
    right = [[notation.format(gold) for gold in golds] for notation in ("{}", "{:,}", "{}.00", " **{}** dollars")]
    right.append([f"${gold:,}.".replace("$-", "-$") for gold in golds])
    wrong = [gold + 1 for gold in golds], [-gold - 1 for gold in golds], [f"{gold}.01" for gold in golds]
    for results, reward in [*((results, 1.0) for results in right), *((results, -1.0) for results in wrong)]:
        both = zip(columns, results, strict=True)
        completions = [f"<think>{c}</think>\n<answer>{r}</answer><|im_end|>" for c, r in both]
        assert set(answer(completions=completions, answer=columns)) == {reward}
        assert set(format(completions=completions)) == {1.25}


def test_every_prompt_of_the_shipped_run_fits_and_has_the_tokens_of_the_chat_template():
    config, tokenizer = load(CONFIG), load_tokenizer(str(QWEN))
    longest = 0
    for split, size in SIZES.items():
        problems = load_data("data.train", f"{GSM8K}@{split}", config.data)
        prompts, num_filtered = make_prompts(problems, tokenizer, config)
        assert (len(prompts), num_filtered) == (size, 0)
        longest = max(longest, *(len(prompt.token_ids) for prompt in prompts))
        for prompt in prompts.only(range(0, size, 50)):
            contents = {"system": config.prompt.system, "user": prompt.problem.columns["question"]}
            messages = [{"role": role, "content": content} for role, content in contents.items()]
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
            assert prompt.token_ids.tolist() == list(encoded["input_ids"])
    assert longest == int(re.search(r"longest problem has (\d+) tokens", CONFIG.read_text())[1])
