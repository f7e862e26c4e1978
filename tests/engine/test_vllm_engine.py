"""The real engine on a tiny model: log-probs, seeds, stop tokens, the verified reload and all that it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.processes.watchdog import progress_heard_by
from environments import Turn
from model.packing import pack
from model.tokenizer import load_tokenizer
from sampler.engine.completions import Completion, SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from sampler.turns.episode import Episode, as_rollout
from tests.support import engines
from tests.support.engines import PROMPT, complete, finished, greedy, worker_of
from tests.support.plain_policy import PlainPolicy
from tools.benchmarks.sampler_alone import operators

pytestmark = pytest.mark.timeout(300)


def test_every_layer_of_a_step_reports_progress(engine, config, version):
    reload(engine, version(0), config)
    engine.submit("a", [5] * 40, SamplingParams(1.0, 1, 1, 0))
    heard: list[str] = []
    with progress_heard_by(heard.append):
        finished(engine)
    num_layers = json.loads((Path(config.model.path) / "config.json").read_text())["num_hidden_layers"]
    assert len(heard) >= num_layers and set(heard) == {"generating"}


def test_nothing_is_compiled_though_torch_dynamo_was_there_before_the_engine(engine, config, version):
    """As with a reference model, which is loaded first. The first canary would take 5 to 20 s."""
    from torch._dynamo.utils import counters

    reload(engine, version(1), config)
    complete(engine, SamplingParams(1.0, 8, 2, 3))
    assert counters["frames"]["total"] == 0


def test_old_logprobs_are_those_of_the_full_softmax_at_the_sampling_temperature(engine, config, policy, version):
    reload(engine, version(1), config)
    for temperature in (0.7, 1.0):
        for completion in complete(engine, SamplingParams(temperature, 24, 4, 7)):
            expected = policy.logprobs(PROMPT, completion.token_ids.tolist(), temperature)
            assert np.abs(completion.logprobs - expected).max() < 1e-4


def test_completions_of_a_group_compute_its_prompt_once_and_have_the_trainers_log_probs(
    engine, config, policy, version
):
    reload(engine, version(0), config)
    before = worker_of(engine).repeated_rows.spared
    prompts = [PROMPT[: 2 * 32 + 7], PROMPT[1 : 2 * 32 + 1], PROMPT[:20]]  # behind whole blocks: 7 tokens, a block, all
    for index, prompt in enumerate(prompts):
        engine.submit(index, prompt, SamplingParams(0.7, 4, 3, 1))
    found = finished(engine)
    # of three completions each the first computes them
    assert worker_of(engine).repeated_rows.spared - before == 2 * (7 + 32 + 20)
    for index, prompt in enumerate(prompts):
        for completion in found[index]:
            expected = policy.logprobs(prompt, completion.token_ids.tolist(), 0.7)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_without_speed_ups_every_row_of_a_group_is_computed_and_has_the_trainers_log_probs(
    config, policy, version, monkeypatch
):
    monkeypatch.setenv("TANDEM_CPU_TRICKS", "0")
    plain = engines.kept(Engine(config, num_gpus=0))
    reload(plain, version(0), config)
    assert worker_of(plain).repeated_rows is None
    prompt = PROMPT[: 2 * 32 + 7]
    for completion in complete(plain, SamplingParams(0.7, 4, 3, 1), prompt):
        expected = policy.logprobs(prompt, completion.token_ids.tolist(), 0.7)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_every_turn_of_a_conversation_has_the_trainers_log_probs_behind_all_that_was_said(
    engine, config, policy, version
):
    reload(engine, version(0), config)
    said, observed = [list(PROMPT) for _ in range(4)], [40, 41, 42]
    for turn in range(8):
        for i, ids in enumerate(said):
            engine.submit(i, ids, SamplingParams(0.7, 16, 1, seed=10 * turn + i))
        for i, [completion] in finished(engine).items():
            ids = completion.token_ids.tolist()
            np.testing.assert_allclose(completion.logprobs, policy.logprobs(said[i], ids, 0.7), atol=1e-5)
            said[i] += ids + observed


def test_every_token_of_a_rollout_whose_history_is_rewritten_has_the_trainers_log_prob(engine, config, policy, version):
    """Before each turn a piece of what was said is cut or replaced, here and there within prompt and turns."""
    reload(engine, version(0), config)
    prompt, episodes = np.array(PROMPT, np.int32), [Episode(4, 200) for _ in range(4)]
    for turn in range(4):
        for i, episode in enumerate(episodes):
            engine.submit(i, episode.sequence(prompt).tolist(), SamplingParams(0.7, 12, 1, seed=10 * turn + i))
        for i, [completion] in finished(engine).items():
            episode = episodes[i].sampled(completion, "").answered(Turn())
            present, cut = episode.sequence(prompt), [len(PROMPT) - 2, len(PROMPT), len(PROMPT) + 4, 1][(i + turn) % 4]
            asked = np.array([*present[:cut], *[40, 41][:i], *present[cut + 3 :], 42], np.int32)
            episodes[i] = episode.asked(prompt, asked) if turn < 3 else episode
    rollouts = [as_rollout(episode.played(), None, {}, 0.0) for episode in episodes]
    assert [(r.turns, len(r.forks)) for r in rollouts] == [(4, 3)] * 4
    groups, forks = [(PROMPT, [r.completion_ids.tolist() for r in rollouts])], [[r.forks for r in rollouts]]
    for packing in ("shared", "separate"):
        row = pack(groups, packing, forks=forks)
        for rollout, found in zip(rollouts, policy.score(row, 0.7).split(row.lengths), strict=True):
            at = rollout.sampled()
            np.testing.assert_allclose(rollout.old_logprobs[at], found.numpy()[at], atol=1e-5)


def test_a_seed_gives_the_same_completions_again_and_siblings_differ(engine, config, version):
    reload(engine, version(1), config)  # an earlier test may have left weights that always say the same
    first, second = (complete(engine, SamplingParams(1.0, 24, 4, 11)) for _ in range(2))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in second]
    assert len({tuple(c.token_ids.tolist()) for c in first}) == 4
    other = complete(engine, SamplingParams(1.0, 24, 4, 12))
    assert [c.token_ids.tolist() for c in other] != [c.token_ids.tolist() for c in first]


def test_an_accelerator_samples_other_tokens_with_the_same_seed_unless_the_request_named_it(
    engine, config, version, monkeypatch
):
    reload(engine, version(1), config)
    params = SamplingParams(1.0, 24, 4, 11)

    def sampled(**more: Any) -> list[list[int]]:
        return [c.token_ids.tolist() for c in complete(engine, replace(params, **more))]

    on_a_cpu = sampled()
    monkeypatch.setattr(engine, "on_cpu", False)
    several = [*sampled(), *sampled(), *on_a_cpu]
    assert len({tuple(ids) for ids in several}) == len(several) == 12
    assert sampled(keeps_seed=True) == on_a_cpu


def test_a_decoding_step_without_seeds_takes_as_many_operators_for_64_sequences_as_for_16(
    engine, config, version, monkeypatch, figure
):
    reload(engine, version(1), config)
    params = SamplingParams(1.0, 24, 4, 11)
    seeded = {sequences: operators(engine, params, sequences) for sequences in (16, 64)}
    monkeypatch.setattr(engine, "on_cpu", False)
    found = {sequences: operators(engine, params, sequences) for sequences in (16, 64)}
    assert found[16] > 0 and abs(found[64] - found[16]) <= 2, found
    assert seeded[64] - seeded[16] >= 64 - 16, f"seeds cost nothing: let accelerators have them again: {seeded}"
    figure("sampler", f"operators of a decoding step {found}, with a seed for each sequence {seeded}")


def test_a_completion_that_ends_keeps_its_stop_token_and_its_logprob(engine, config, policy, version):
    stop = engine._ends.ids[0]
    with torch.no_grad():  # the embedding is tied: a long row makes its token likely, whatever comes before
        policy.model.get_input_embeddings().weight[stop] *= 40
    reload(engine, version(2), config)
    ended = [c for c in complete(engine, SamplingParams(1.0, 24, 16, 5)) if c.finish_reason == "stop"]
    assert ended, "no completion ended: the test's weights do not make the stop token likely enough"
    for completion in ended:
        assert completion.token_ids[-1] == stop
        assert stop not in completion.token_ids[:-1]
        assert len(completion.logprobs) == len(completion.token_ids)


def test_no_cached_prefix_survives_a_reload(engine, config, policy, version, figure):
    long_prompt = [7 + i % 50 for i in range(400)]
    reload(engine, version(4), config)
    before = greedy(engine, long_prompt)
    assert before == greedy(engine, long_prompt)
    policy.disturb(4)
    reload(engine, version(5), config)
    tokens = greedy(engine, long_prompt)
    whole = distributions(policy, [*long_prompt, *tokens], 1.0)  # by transformers, fed with the engine's own tokens
    assert tokens == whole[len(long_prompt) - 1 : -1].argmax(-1).tolist()
    assert tokens != before
    figure("R5", f"{len(tokens)} tokens after a reload with 400 cached before: a fresh model's")


def test_more_seeded_prompts_than_fit_one_engine_step_are_all_sampled(engine):
    params = SamplingParams(1.0, 4, 1, seed=1)
    prompts = {i: [3 + (i + j) % 200 for j in range(430)] for i in range(40)}  # 17,200 tokens; a step takes 8,192
    for i, prompt in prompts.items():
        engine.submit(i, prompt, params)
    found = finished(engine)
    assert sorted(found) == sorted(prompts) and all(len(c) == 1 for c in found.values())


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.8, "min_p": 0.02}, {}], ids=str)
def test_truncated_samples_come_with_the_kept_tokens_and_the_log_probs_of_the_law_on_them(
    cut, engine, config, policy, version
):
    with torch.no_grad():  # a random model is nearly uniform: nothing would be left out
        policy.model.get_input_embeddings().weight *= 2
    reload(engine, version(3), config)
    params = SamplingParams(0.7, 24, 4, 7, top_k=12, returns_sampling_mask=True, **cut)
    sizes = set()
    for completion in complete(engine, params):
        ids, sets = ids_and_sets(completion, policy)
        whole = np.exp(distributions(policy, [*PROMPT, *ids], 0.7)[len(PROMPT) - 1 : -1])
        for probs, kept in zip(whole, sets, strict=True):
            expected = kept_by_definition(probs, top_k=12, **cut)
            assert set(kept[kept >= 0].tolist()) == expected
            sizes.add(len(expected))
    assert len(sizes) > 1 if cut else sizes == {12}


A_FORM = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
FORMS: dict[str, tuple[dict[str, Any], str]] = {  # and what a finished completion is
    "regex": ({"structured_outputs": {"regex": "(yes|no){2}[0-9]"}}, "(yes|no){2}[0-9]"),
    "choice": ({"structured_outputs": {"choice": ["red", "a bluer one", "12"]}}, "red|a bluer one|12"),
    "json": ({"structured_outputs": {"json": A_FORM}}, r'\{\s*"a"\s*:\s*(1|23)\s*\}'),
    "min_tokens": ({"min_tokens": 9}, "(?s:.*)"),
}


@pytest.mark.parametrize(
    "settings", [{"sampler": {"top_k": 200, "generation_kwargs": {"min_tokens": 1}}}], indirect=True
)
@pytest.mark.parametrize("form", FORMS)
def test_what_forbids_tokens_leaves_the_log_probs_of_the_law_on_the_others(form, engine, config, policy, version):
    reload(engine, version(3), config)
    more, expected = FORMS[form]
    params = SamplingParams(0.7, 24, 8, 7, top_k=200, returns_sampling_mask=True, more=more)
    tokenizer, texts = AutoTokenizer.from_pretrained(config.model.path), set()
    for completion in complete(engine, params):
        ids, sets = ids_and_sets(completion, policy)
        if completion.finish_reason == "stop":
            texts.add(tokenizer.decode(ids, skip_special_tokens=True))
        assert form != "min_tokens" or not set(sets[:9].ravel().tolist()) & set(engine._ends.ids)
    assert (len(texts) > 1 or form == "min_tokens") and all(re.fullmatch(expected, text) for text in texts), texts


def ids_and_sets(completion: Completion, policy: PlainPolicy) -> tuple[list[int], np.ndarray]:
    """(its tokens, those that were kept for each), once its log-probs are those of the law on what was kept."""
    ids, sets = completion.token_ids.tolist(), completion.sampling_mask
    assert completion.incomplete_support == 0
    restricted = policy.score(pack([(PROMPT, [ids])]).with_sampling_mask([sets]), 0.7)
    assert np.abs(completion.logprobs - restricted.numpy()).max() < 1e-4
    return ids, sets


def distributions(policy, ids: list[int], temperature: float) -> np.ndarray:
    """[T, vocabulary]"""
    row = pack([(ids[:1], [ids[1:]])])
    with torch.no_grad():
        hidden = policy.model.get_decoder()(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, spans=row.spans
        ).last_hidden_state[0]
        return torch.log_softmax(policy.model.get_output_embeddings()(hidden).double() / temperature, -1).numpy()


def kept_by_definition(probs: np.ndarray, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """min_p of the most likely, then the top_k of those, then the fewest of these that hold top_p of their sum."""
    order = [v for v in np.argsort(-probs) if probs[v] >= min_p * probs.max()][:top_k]
    share = probs[order] / probs[order].sum()
    fewest = int(np.searchsorted(np.cumsum(share), top_p)) + 1 if top_p < 1 else len(order)
    return {int(v) for v in order[:fewest]}


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
