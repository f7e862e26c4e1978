"""Which part of a row each sequence-parallel rank gets, and which settings allow it. Real ranks: ..._ranks.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.errors import UserError
from model.files.folder import require_models
from model.packing import SequenceGroup, Span, pack
from model.sequence_parallel import shard
from tests.support.configs import config_of
from tests.unit.test_packing import Groups, groups_of_tokens
from trainer.engine.deepspeed_config import deepspeed_config


def parts(groups: Groups, size: int):
    return [shard(pack(groups), SequenceGroup(rank, size, None)) for rank in range(size)]


def test_a_row_of_six_tokens_on_four_ranks() -> None:
    """ids 5 6 7 │ 8 9 │ 8 and two tokens more; sources 2 3 │ 2."""
    found = parts([([5, 6, 7], [[8, 9], [8]])], 4)
    assert [p.input_ids.tolist() for p in found] == [[[5, 6]], [[7, 8]], [[9, 8]], [[0, 0]]]
    assert [p.position_ids.tolist() for p in found] == [[[0, 1]], [[2, 3]], [[4, 3]], [[0, 0]]]
    assert [p.source_index.tolist() for p in found] == [[], [0, 1, 0], [], []]
    assert [p.target_ids.tolist() for p in found] == [[], [8, 9, 8], [], []]
    assert all(p.spans == (Span(0, 3, (2, 1)), Span(6, 2, ())) and p.lengths == (2, 1) for p in found)
    assert [p.shard.places.tolist() for p in found if p.shard] == [[], [0, 1, 2], [], []]
    assert all(p.shard and p.shard.num_targets == 3 for p in found)


def test_the_experts_of_a_row_go_where_its_tokens_go() -> None:
    of = [(np.full((3, 1, 1), 2), [np.full((1, 1, 1), 4), np.full((0, 1, 1), 0)])]
    row = pack([([5, 6, 7], [[8, 9], [8]])], routing=of)
    found = [shard(row, SequenceGroup(rank, 4, None)).routing for rank in range(4)]
    assert [r.flatten().tolist() for r in found if r is not None] == [[2, 2], [2, 4], [-1, -1], [-1, -1]]


@given(groups_of_tokens, st.integers(2, 5))
def test_the_parts_hold_every_token_and_every_target_once(groups: Groups, size: int) -> None:
    row, found = pack(groups), parts(groups, size)
    whole = torch.cat([p.input_ids for p in found], 1)[:, : row.input_ids.shape[1]]
    assert whole.equal(row.input_ids)
    each = found[0].input_ids.shape[1]
    assert all(p.input_ids.shape == (1, each) for p in found)
    assert size * each - row.input_ids.shape[1] < size
    assert all(len(p.spans) - len(row.spans) == (size * each > row.input_ids.shape[1]) for p in found)
    places = torch.cat([p.shard.places for p in found if p.shard])
    assert sorted(places.tolist()) == list(range(len(row.target_ids)))
    sources = torch.cat([p.source_index + rank * each for rank, p in enumerate(found)])
    assert sources[places.argsort()].equal(row.source_index)


# ---- settings


def config(folder: Path, size: int, **sections: dict) -> Config:
    trainer = {"sequence_parallel_size": size} | sections.pop("trainer", {})
    return config_of({"path": str(folder)}, trainer=trainer, **sections)


def test_the_ranks_of_a_micro_batch_count_as_one_in_batches_and_not_for_deepspeed(tmp_path: Path) -> None:
    given = config(tmp_path, 2, trainer={"prompts_per_step": 12})
    assert [given.dp_size(ranks) for ranks in (2, 4, 8)] == [1, 2, 4]
    assert given.micro_batches(4) == 6  # 12 groups on 2 data-parallel ranks
    assert given.uneven_work(6) is None
    assert "12 on 5 data-parallel ranks: some train 3 groups" in (given.uneven_work(10) or "")
    assert deepspeed_config(given, 4)["train_batch_size"] == 6 * 4  # as if all ranks had groups of their own


@pytest.mark.parametrize(("ranks", "even"), [(1, 2), (3, 4)])
def test_ranks_that_cannot_be_divided_are_refused_with_a_number_that_can(tmp_path: Path, ranks: int, even: int) -> None:
    with pytest.raises(UserError, match=f"size 2 does not divide the trainer's {ranks} rank.*num_ranks={even},"):
        deepspeed_config(config(tmp_path, 2), ranks)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"trainer": {"packing": "separate"}}, "trainer.packing separate makes none; set trainer.packing=auto"),
        ({"data": {"train": "t.jsonl", "image_key": "image"}}, "does not split rows with images"),
    ],
)
def test_what_is_not_split_is_refused_by_name(tmp_path: Path, sections: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(tmp_path, 2, **sections)
    config(tmp_path, 1, **sections)


def write_model(folder: Path, **settings: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"} | settings))
    return folder


def test_heads_that_do_not_divide_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", num_attention_heads=12)
    other = str(write_model(tmp_path / "other", num_attention_heads=14))
    require_models(config(policy, 4))
    critic = {"algorithm": {"adv_estimator": "gae"}, "critic": {"path": other}}
    reference = {"algorithm": {"beta": 0.1}, "reference": {"path": other, "on": "trainer"}}
    for size, sections, says in (
        (8, {}, r"size 8 does not divide the model's 12 attention heads.*size=1 or 2 or 3 or 4"),
        (4, critic, "the model's 14 attention heads"),
        (4, reference, "the model's 14 attention heads"),
    ):
        with pytest.raises(UserError, match=says):
            require_models(config(policy, size, **sections))


def test_a_model_that_sees_images_is_refused_by_name(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "vision_config": {}, "text_config": {"num_attention_heads": 4}}
    policy = write_model(tmp_path / "policy", **heads | {"model_type": "qwen2_5_vl"})
    with pytest.raises(UserError, match="a model that sees images are not split"):
        require_models(config(policy, 2, data={"train": "t.jsonl", "limit_images": 0}))
