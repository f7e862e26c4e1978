"""Several data sets in one run: who asks which problem, by which settings, scored by what."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.config import Config, load
from common.config.data import entries
from common.errors import UserError
from common.types import Group, Problem, Prompt, Rollout, Tombstone
from common.wire.wire import Envelope, decode, encode
from launcher.evaluation import main as evaluation
from report.main import source_lines
from rewards.pool import RewardPool
from sampler.data_source import columns_for_rewards, load_sources
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import by_source, load_data, mixed_index, permutation
from sampler.turns.sampled import Sampled
from sampler.turns.scheduler import Turns
from sampler.turns.task import parts_of
from tests.support.configs import config_of
from tests.unit.sampler.turns.test_episodes import Engine
from trainer.record.stats import rollout_metrics, source_metrics, turn_metrics

TWO = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "name": "games", "weight": 1}]


def config(train: Any, **sections: Any) -> Config:
    return config_of(data={"train": train}, **sections)


# ---- which problem a group asks


def test_three_of_four_groups_are_of_the_source_with_weight_three_and_each_goes_through_its_own_problems() -> None:
    # ⌊(g + 1) · 3/4⌋ grows at g = 1, 2, 3: the first source has those, and its n-th is problem n mod 2 of two
    found = [mixed_index(g, 0, [(3, 2), (1, 5)], shuffle=False) for g in range(12)]
    assert found == [2, 0, 1, 0, 3, 1, 0, 1, 4, 0, 1, 0]


@given(st.lists(st.tuples(st.fractions(Fraction(1, 50), 50), st.integers(1, 9)), min_size=1, max_size=5), st.integers())
def test_each_source_is_near_its_share_at_any_time_and_asks_its_problems_in_order(parts: Any, seed: int) -> None:
    ends = np.cumsum([size for _, size in parts])
    asked: list[list[int]] = [[] for _ in parts]
    total = sum(weight for weight, _ in parts)
    for g in range(60):
        place = mixed_index(g, seed, parts)
        source = int(np.searchsorted(ends, place, side="right"))
        asked[source].append(place - int(ends[source] - parts[source][1]))
        for before, (own, (weight, _)) in enumerate(zip(asked, parts, strict=True)):
            too_many = len(own) - (g + 1) * weight / total
            assert -1 < too_many < before or -1 < too_many <= before == 0
    for source, (own, (_, size)) in enumerate(zip(asked, parts, strict=True)):
        assert own == [int(permutation(seed, n // size, size, source)[n % size]) for n in range(len(own))]


def test_sources_of_equal_size_have_orders_of_their_own() -> None:
    """Rows that belong together, such as translations, have the same place in both sources."""
    size = 1000
    pairs = [[mixed_index(2 * k + i, 3, [(1, size)] * 2) % size for i in range(2)] for k in range(size)]
    assert sum(first == second for first, second in pairs) < 6, "about 1 by chance"


@given(st.integers(), st.integers(0, 99), st.integers(1, 50), st.integers(1, 50))
def test_the_first_source_keeps_the_order_that_it_had_before_others_had_their_own(
    seed: int, epoch: int, size: int, other: int
) -> None:
    without_source = np.random.Generator(np.random.PCG64([seed % 2**64, epoch])).permutation(size)
    parts = [(size, size), (other, other)]
    found = [mixed_index(g, seed, parts) for g in range(epoch * (size + other), (epoch + 1) * (size + other))]
    assert [row for row in found if row < size] == without_source.tolist()


def test_without_weights_rows_count() -> None:
    problems = [Problem(i, {}, source="a" if i < 6 else "b") for i in range(8)]
    assert parts_of(config(["a.jsonl", {"path": "b.jsonl"}]), problems) == [(6, 6), (2, 2)]
    weighted = [{"path": "a.jsonl", "weight": 0.1}, {"path": "b.jsonl", "weight": 0.3}]
    assert parts_of(config(weighted), problems) == [(Fraction(1, 10), 6), (Fraction(3, 10), 2)]
    assert parts_of(config(["a.jsonl", "b.jsonl"]), [Problem(i, {}) for i in range(8)]) == [(8, 8)]
    with pytest.raises(UserError, match="no row of source 'b' is left"):
        parts_of(config(weighted), problems[:6])
    with pytest.raises(UserError, match=r"data\.eval: no row of source 'b' is left"):
        parts_of(config_of(data={"train": "a.jsonl", "eval": {"b": "b.jsonl"}}), [], "eval")


# ---- what holds for its rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_know_their_source_what_scores_them_and_its_own_renames(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4"}])
    b = write(tmp_path / "b.jsonl", [{"ask": "Guess.", "answer": "7", "level": 2}])
    given = config([a, {"path": b, "name": "games", "rename": {"ask": "question"}, "rewards": ["format"]}])
    first, second = load_data("data.train", given.data.train, given.data)
    assert (first.source, first.scored_by) == ("a", ())
    assert (second.source, second.scored_by, second.columns["question"]) == ("games", ("format",), "Guess.")
    scored = [(c.rewards.names, len(own)) for c, own in by_source([first, second], given)]
    assert scored == [(["answer", "format"], 1), (["format"], 1)]


def test_an_entry_has_its_own_rollouts_and_held_out_rows_those_of_their_namesake() -> None:
    games = {"path": "g.jsonl", "name": "games", "rollout": {"environment": "g.py:G", "max_turns": 5}}
    train = ["math.jsonl", games | {"rewards": ["environment"]}]
    eval_ = [{"path": "math_test.jsonl", "name": "math"}, {"path": "g_test.jsonl", "name": "games"}]
    sections = {"rewards": {"reward_funcs": ["answer", "environment"], "reward_weights": [1, 2]}}
    given = config_of(data={"train": [{"path": train[0], "rewards": ["answer"]}, train[1]], "eval": eval_}, **sections)
    assert given.max_turns == 5 and set(given.of_sources) == {"math", "games"}
    of_games, of_math = given.for_source("games"), given.for_source("math")
    assert (of_games.rollout.max_turns, of_games.rewards.names, of_games.rewards.weights) == (5, ["environment"], [2])
    assert (of_math.rollout.is_multi_turn, of_math.rewards.environment_weight) == (False, 0)
    assert Config.model_validate(given.model_dump(mode="json")) == given, "as config.json has it"


def test_held_out_sets_have_names(tmp_path: Path) -> None:
    easy = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4"}])
    hard = {"path": write(tmp_path / "b.jsonl", [{"ask": "7?", "answer": "7"}]), "rename": {"ask": "question"}}
    sets = {"easy": easy, "hard": hard | {"rewards": ["answer"]}}
    given = config_of(data={"eval": sets}, eval={"metric_for_best_model": "hard/answer/mean"})
    assert given.data.eval is not None
    assert [p.source for p in load_data("data.eval", given.data.eval, given.data)] == ["easy", "hard"]
    assert Config.model_validate(given.model_dump(mode="json")) == given, "as config.json has it"
    assert entries(config_of(data={"eval": {"path": easy}}).data.eval)[0].label == "a", "a source without its list"
    for metric in ("hard/format/mean", "easy/mean", "harder/answer/mean"):  # the first is not scored there
        with pytest.raises(ValidationError, match=f"{metric}' is none of"):
            config_of(data={"eval": sets}, eval={"metric_for_best_model": metric})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": [{"path": "a.jsonl", "weight": 0}]}, "greater than 0"),
        ({"train": [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]}, "some without"),
        ({"train": [{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}]}, "two sources named 'a'"),
        ({"train": [{"path": "a.jsonl", "rewards": ["none"]}]}, "scored by 'none'"),
        (
            {"train": [{"path": "a.jsonl", "rollout": {"max_turns": 3}}]},
            "source 'a', .* rollout.max_turns does nothing",
        ),
        ({"train": "a.jsonl", "eval": [{"path": "b.jsonl", "weight": 1}]}, "remove the weight"),
        ({"train": "a.jsonl", "eval": {}}, "no set of problems"),
        ({"train": "a.jsonl", "eval": {"a/b": "b.jsonl"}}, "match pattern"),
        ({"train": "a.jsonl", "eval": {"easy": ["a.jsonl", "b.jsonl"]}}, "valid string"),
        ({"train": TWO, "eval": [{"path": "b.jsonl", "name": "games", "rewards": ["answer"]}]}, "remove both"),
    ],
)
def test_what_cannot_be_meant_is_refused(data: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(data=data)


def test_a_typo_in_an_entry_is_named_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: [{path: a.jsonl, wieght: 2}]}\n")
    with pytest.raises(UserError, match=r"data\.train\.sources\.0\.wieght: no such option"):
        load(tmp_path / "c.yaml")
    assert load(tmp_path / "c.yaml", ["data.train=[{path: a.jsonl, weight: 2}]"]).data.train[0].label == "a"  # type: ignore[union-attr]


def test_functions_that_do_not_score_a_source_are_not_called(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def fails(completions, **columns):\n    raise ValueError('called')\n")
    funcs = ["answer", f"{tmp_path}/own.py:fails"]
    with RewardPool(config("a.jsonl", rewards={"reward_funcs": funcs}).rewards, columns=["answer"]) as pool:
        pool.submit(0, "2+2?", ["<answer>4</answer>"], [[1]], {"answer": "4"}, scored_by=("answer",))
        [(_, scores)] = pool.ready(timeout_s=60)
    [(by_name, total)] = scores  # type: ignore[misc]
    assert list(by_name) == ["answer", "fails"] and (by_name["answer"], total) == (1.0, 1.0)
    assert np.isnan(by_name["fails"])


def test_a_source_that_is_not_held_out_has_columns_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def near(completions, level, **rest):\n    return [1.0 for _ in completions]\n")
    math = write(tmp_path / "math.jsonl", [{"question": "2+2?", "answer": "4"}])
    games = write(tmp_path / "games.jsonl", [{"question": "Guess.", "answer": "7", "level": 2}])
    train: list[dict[str, Any]] = [{"path": math, "rewards": ["answer"]}, {"path": games, "rewards": ["near"]}]
    rewards = {"reward_funcs": ["answer", f"{tmp_path}/own.py:near"]}
    settings = config_of(data={"train": train, "eval": {"math": math}}, rewards=rewards)
    sources = load_sources(settings)
    names = {"math": ["question", "answer"], "games": ["question", "answer", "level"]}
    assert {source.name: source.columns for source in sources} == names
    with RewardPool(settings.rewards, columns_for_rewards(settings, sources)):
        pass  # `near` is never called with a row of math
    stopped = Mock(side_effect=LookupError("the rewards are open"))
    monkeypatch.setattr(evaluation, "tokenizer_of", stopped)
    with pytest.raises(LookupError, match="the rewards are open"):
        evaluation.run(settings, None)  # type: ignore[arg-type]
    train[0].pop("rewards")  # now `near` scores what is held out, too
    settings = config_of(data={"train": train, "eval": {"math": math}}, rewards=rewards)
    columns = columns_for_rewards(settings, load_sources(settings))
    said = r"reward near wants .level.; the data set gives question, answer"
    with pytest.raises(UserError, match=said), RewardPool(settings.rewards, columns):
        pass


# ---- one engine for all


class OfOne:
    """Plays the rollouts of a source: an engine request for each, here one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    async def play(self, key: Any, prompt: Prompt, params: SamplingParams) -> Sampled:
        return Sampled(prompt, await self.generator.generate((key, 0), prompt.token_ids, params))


def test_turns_of_two_sources_get_what_is_theirs_of_one_engine() -> None:
    engine = Engine()
    pool = SimpleNamespace(ready=lambda timeout_s: [], pending=0)
    settings = SimpleNamespace(rollout=SimpleNamespace(timeout_s=1.0))
    games: Any = SimpleNamespace(player=lambda generator, *_: OfOne(generator), pool=pool, config=settings)
    turns = Turns(engine, str, {"math": None, "games": games})  # type: ignore[arg-type]
    params, ids = SamplingParams(1.0, 9, 2, 0), np.array([5], np.int32)
    prompts = {s: Prompt(Problem(0, {}, source=s), "?", "?", ids) for s in ("math", "games")}
    for key, source in [(7, "math"), (8, "games"), (9, "games"), (10, "math")]:
        turns.start(key, prompts[source], params)
    assert list(engine.asked) == [7, (8, 0), (9, 0), 10] and turns.num_running == 4
    one = [Completion(ids, np.zeros(1, np.float32), "stop")]
    engine.finished = [((8, 0), one), (7, one)]
    assert {key for key, _ in turns.step()} == {7, 8} and turns.num_running == 2 and turns.num_events == 2
    turns.abort([9])
    assert list(engine.asked) == [10] and turns.num_running == 1
    engine.finished = [(10, one)]  # the engine is empty afterwards, and what it gave still arrives
    assert [key for key, _ in turns.step()] == [10] and turns.num_running == 0
    turns.start(11, prompts["games"], params)
    turns.abort([11])
    assert (turns.num_running, len(engine.asked)) == (0, 0)


# ---- metrics


def test_metrics_of_each_source() -> None:
    def group(group_id: int, source: str, *rewards: float) -> Group:
        ids, zeros = np.array([7, 8], np.int32), np.zeros(2, np.float32)
        rollouts = tuple(Rollout(ids, zeros, None, {"answer": r, "format": 0.0}, r, "stop") for r in rewards)
        return Group(group_id, 0, 0, ids, rollouts, source=source)

    groups = [group(0, "a", 1, 0), group(1, "a", 1, 1), group(2, "games", 0, 0.5), Tombstone(3, 0, "why")]
    of_a = {"groups": 2, "kept": 1, "reward": 0.75, "mean_length": 2}
    of_games = {"groups": 1, "kept": 1, "reward": 0.25, "mean_length": 2}
    assert source_metrics(groups, config(TWO)) == {
        **{f"sources/a/{name}": value for name, value in of_a.items()},
        **{f"sources/games/{name}": value for name, value in of_games.items()},
    }
    assert source_metrics([group(0, "", 1, 0)], config("a.jsonl")) == {}
    _, sent = decode(encode(Envelope("run", "life", "s0"), groups[2]))
    assert isinstance(sent, Group) and sent.source == "games"


def test_what_holds_for_a_source_counts_its_rows() -> None:
    tools = {"tools": ["t.py:f"], "max_turns": 2}
    train = [{"path": "a.jsonl", "rewards": ["answer"], "rollout": tools}, {"path": "b.jsonl", "rewards": ["format"]}]
    given = config(train, rollout=tools | {"max_turns": 8})
    ids, zeros = np.array([7, 8], np.int32), np.zeros(2, np.float32)

    def group(group_id: int, source: str, answer: float, layout: float) -> Group:
        one = Rollout(ids, zeros, None, {"answer": answer, "format": layout}, 1.0, "length", turns=2)
        return Group(group_id, 0, 0, ids, (one, one), source=source)

    groups = [group(0, "a", 1.0, np.nan), group(1, "b", np.nan, 1.0)]
    assert turn_metrics(groups, given)["rollout/max_turns_ratio"] == 0.5
    found = rollout_metrics(groups, 0, given)
    assert found["rewards/answer/mean"] == found["rewards/format/mean"] == 1.0
    found = rollout_metrics([group(0, "a", np.nan, np.nan), *groups], 0, given)
    assert {name: value for name, value in found.items() if name.endswith("/none")} == {"rewards/answer/none": 0.5}


def test_the_report_has_a_line_for_each_source() -> None:
    step = {"sources/a/groups": 3.0, "sources/a/kept": 2.0, "sources/a/reward": 0.25, "sources/a/mean_length": 9.0}
    rows = [step, {"reward": 1.0}, step | {"sources/a/kept": 1.0, "sources/a/reward": 0.5}]
    rows.append(rows[-1] | {"iteration": 1.0})  # the same groups again
    assert source_lines(rows) == ["source a: reward 0.25 → 0.50, length 9 → 9; of 6 groups 50% had an advantage"]
