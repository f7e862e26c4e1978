"""A run goes on with other ranks, ZeRO stages and sharing of layers: the same bits, and then the same training."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.files import run_folder
from tests.support.gloo_data import GAE, VOCAB_SIZE, group, settings
from tests.support.rank import Worker, run_hash
from tests.support.replay_worker import RankReports, stack
from tests.support.tier import ALL
from tests.support.tiny import tiny_model, tiny_reward_model

Layout = tuple[int, ...]  # ranks, ZeRO stage, and how many ranks share each layer, if it is more than one
HALF: dict[str, Any] = {"model": {"dtype": "bfloat16"}}


def work(folder: Path) -> None:
    """One life of a rank: what the checkpoint gives it, and one more step."""
    from trainer.save import checkpoint, resume

    life, worker = json.loads((folder / "life.json").read_text()), Worker(folder)
    sections = life["sections"] | {"trainer": {"tensor_parallel_size": life["sharing"]}}
    trainer = worker.trainer(settings(folder, "run", life["stage"], **sections), group)
    hashes = []
    if saved := run_folder.checkpoints(folder / "run"):
        trainer.run_state = resume.read_run_state(saved[-1], {})
        checkpoint.restore(trainer.engine, saved[-1], trainer.critic)
        hashes.append(run_hash(trainer))
    trainer.train_batch()
    trainer.saver.save_if_due(trainer.run_state)
    worker.write_models("after", "weights", trainer)
    worker.tell_steps("life", trainer, hashes=[*hashes, run_hash(trainer)])
    worker.tell()


def lives(name: str, layouts: list[Layout], sections: dict[str, Any]) -> list[RankReports]:
    folder = stack().folder / name
    tiny_reward_model(folder / "critic", tiny_model(folder / "model", hidden=128, vocab=VOCAB_SIZE))
    found = []
    for ranks, stage, *more in layouts:
        sharing = more[0] if more else 1
        (folder / "life.json").write_text(json.dumps({"stage": stage, "sharing": sharing, "sections": sections}))
        found.append(stack().seen(__name__, name, ranks))
    return found


ADAPTERS: dict[str, Any] = {"lora": {"r": 4}}
CASES: dict[str, tuple[list[Layout], dict[str, Any]]] = {
    "bfloat16": ([(2, 1), (1, 1), (2, 3)], HALF),
    "layers": ([(4, 1, 2), (1, 1), (2, 3, 2), (2, 2)], {}),
}
if ALL:
    CASES |= {
        "layers-with-adapters": ([(2, 0, 2), (2, 1), (2, 0, 2)], ADAPTERS),
        "3-divide-nothing": ([(3, 3), (2, 1), (3, 2)], {}),
        "critic": ([(2, 2), (1, 0), (2, 1)], GAE),
        "adapters": ([(2, 3), (1, 0), (2, 2)], ADAPTERS),
    }


@pytest.mark.parametrize("name", CASES)
def test_weights_and_optimizer_come_back_bit_for_bit_and_go_on_as_on_one_layout(name: str) -> None:
    layouts, sections = CASES[name]
    found = lives(name, layouts, sections)
    for before, after in itertools.pairwise(found):
        assert after.ranks[0]["life"]["hashes"][0] == before.ranks[0]["life"]["hashes"][-1]
    same = lives(f"{name}-same", layouts[:1] * len(layouts), sections)
    assert found[-1].ranks[0]["life"]["run_state"] == same[-1].ranks[0]["life"]["run_state"]
    most = 1e-3 * len(layouts) if sections == HALF else 2e-6
    after = [reports[-1].tensors("after/weights") for reports in (found, same)]
    torch.testing.assert_close(*after, atol=most, rtol=1e-5)


def test_a_state_that_is_not_adams_is_refused_by_what_it_holds() -> None:
    from trainer.engine.other_layout import holds_moments

    assert holds_moments({"", "step", "exp_avg", "exp_avg_sq"}, "x") and not holds_moments({"", "step"}, "x")
    for state in ({"", "exp_avg"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}):
        with pytest.raises(UserError, match="can be restored only by the same"):
            holds_moments(state, "x")
