"""sampler.stop in a real engine: a text, or a token that is no end of the model's own."""

import numpy as np
import pytest

from model.tokenizer import load_tokenizer
from sampler.completions import SamplingParams
from sampler.reload import reload
from tests.support.engines import PROMPT, complete

pytestmark = pytest.mark.timeout(300)
TOKEN = 21


@pytest.mark.parametrize("settings", [{"sampler": {"stop": ["e", TOKEN]}}], indirect=True)
def test_a_text_and_a_token_end_a_completion_and_stay_in_it_with_the_trainers_log_probs(
    engine, config, policy, version
):
    reload(engine, version(1), config)
    tokenizer = load_tokenizer(config.model.path)
    completions = complete(engine, SamplingParams(1.0, 24, 16, 5))
    ends = []
    for completion in completions:
        ids = completion.token_ids.tolist()
        *before, last = tokenizer.batch_decode([ids[:-1], ids])
        is_end = "e" in last or ids[-1] in (TOKEN, tokenizer.eos_token_id)
        assert (completion.finish_reason == "stop") == is_end and "e" not in before[0] and TOKEN not in ids[:-1]
        ends += ["text" if "e" in last else "token" if ids[-1] == TOKEN else "other"]
        np.testing.assert_allclose(completion.logprobs, policy.logprobs(PROMPT, ids, 1.0), atol=1e-4)
    assert {"text"} < set(ends), "each kind of end is there"
