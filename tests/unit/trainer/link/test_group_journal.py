"""Groups that a trainer accepted before it died come back, with the weights that sampled them and no others."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.files.weights import Published
from tests.support.memory_transport import TRAINER, MemoryNetwork
from tests.support.protocol_helpers import changed, make_config, make_group, make_inbox, received
from trainer.link.group_journal import FOLDER, GroupJournal
from trainer.link.inbox import Inbox

FIRST = (("10a", 20, 21), ("11b", 22), ("12c", 23, 24))  # a version, its weights, and the groups accepted meanwhile


def begun(journal: GroupJournal, version: str) -> list[int]:
    journal.begin(published(version))
    found = sorted(journal.waiting)
    journal.waiting.clear()
    return found


def published(version: str) -> Published:
    return Published(int(version[:2]), "", "", version[2:])


def live(
    config: Config, *versions: tuple[Any, ...], run: str = "run", say: Callable[[str], None] = print
) -> GroupJournal:
    journal = GroupJournal(config, run, say)
    for version, *groups in versions:
        begun(journal, version)
        for group_id in groups:
            journal.add(received(make_group(group_id, int(version[:2]))))
    return journal


def inbox_of(config: Config) -> Inbox:
    return make_inbox(config, transport=MemoryNetwork().end(TRAINER))


def test_what_was_accepted_comes_back_with_its_version_and_is_reserved_until_then(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    live(config, *FIRST)
    for _ in range(2):  # a restart that dies at once changes nothing
        journal = live(config)
        assert journal.reserved == {20, 21, 22, 23, 24}
        assert begun(journal, "10a") == [20, 21] and journal.reserved == {22, 23, 24}
        assert begun(journal, "10a") == [], "a skipped step publishes it again"
    journal.add(received(make_group(19, 10)))
    assert begun(journal, "11b") == [22] and journal.reserved == {23, 24}
    assert begun(live(config), "10a") == [19, 20, 21], "of both starts"


@pytest.mark.parametrize(
    ("versions", "back"),
    [
        (["10x", "11b"], [[], []]),
        (["10a", "11x", "12c"], [[20, 21], [], []]),
        (["10a", "12c"], [[20, 21], []]),  # where the first start published one in between
        (["11b", "12c"], [[20, 21, 22], [23, 24]]),  # a newer one: those that ran ahead are of its history
        (["13d"], [[20, 21, 22, 23, 24]]),  # saved before it was published
    ],
)
def test_the_first_other_version_ends_it_for_good(tmp_path: Path, versions: list[str], back: list[list[int]]) -> None:
    config = make_config(tmp_path)
    said: list[str] = []
    live(config, *FIRST)
    for _ in range(2):  # one more restart changes nothing
        journal = live(config, say=said.append)
        assert [begun(journal, version) for version in versions] == back
        assert not journal.reserved
    lost = 5 - sum(map(len, back))
    assert lost == 0 or f"{lost} finished groups of an earlier" in said[0]
    assert len(said) == min(lost, 1)


def test_what_other_settings_or_another_reward_made_is_sampled_again(tmp_path: Path) -> None:
    reward = tmp_path / "mine_ü.py"
    agent = tmp_path / "agent.js"
    agent.write_text("old")
    reward.write_text("old")
    config = make_config(tmp_path, rewards={"reward_funcs": [f"{reward}:f"]})
    config = changed(config, rollout={"agent": ["node", str(agent)]})

    def back(run: str = "run", **sections: dict[str, Any]) -> list[int]:
        live(config, *FIRST)
        return begun(live(changed(config, **sections), run=run), "10a")

    assert back(trainer={"max_steps": 60, "learning_rate": 1e-3}) == [20, 21]
    assert back(trainer={"save_steps": 0}) == []
    assert back(sampler={"temperature": 0.7}) == []
    assert back(run="another") == []
    for file in (agent, reward):
        live(config, *FIRST)
        file.write_text("new")
        assert begun(live(config), "10a") == []


def test_a_torn_record_costs_its_group_and_the_next_start_writes_over_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    live(config, FIRST[0])
    [path] = (config.run.output_dir / FOLDER).iterdir()
    os.truncate(path, path.stat().st_size - 9)
    live(config, ("10a", 25))
    assert begun(live(config), "10a") == [20, 25]


def test_what_no_checkpoint_wants_any_more_is_deleted_and_at_the_end_all_is(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    said: list[str] = []
    folder = config.run.output_dir / FOLDER
    live(config, *FIRST)
    inbox = inbox_of(config)
    inbox.forget(12)  # with max_staleness 1, a batch of version 12 may have groups of version 11
    assert [path.name[:8] for path in sorted(folder.iterdir())] == ["00000011", "00000012"]
    inbox.state.journal.clear()
    assert not folder.exists()
    folder.write_text("in the way")
    live(config, *FIRST, say=said.append)
    assert len(said) == 3 and "not kept" in said[0], "a disk that takes nothing stops nobody"


def test_a_kept_group_is_held_if_it_is_fresh_enough_and_else_sampled_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    live(config, ("10a", 20, 24), ("11b", 25, 26), ("12c", 27), ("13d", 28))
    inbox = inbox_of(config)
    ledger = inbox.state.ledger
    inbox.commit(24, published("12c"))
    assert sorted(ledger.received) == [25, 26, 27] and inbox.state.counters == {"kept": 3, "refused/version": 1}
    ledger.lease_out(["s0"])
    assert ledger.by_sampler() == {"s0": [24]}
    assert ledger.redrawn == 1, "its batch had been begun"
    inbox.commit(26, published("13d"))
    assert sorted(ledger.received) == [26, 27, 28]


@pytest.mark.parametrize(("was_published", "redrawn"), [(False, 1), (True, 3)])
def test_after_a_restart_only_groups_that_had_been_begun_count_as_drawn_again(
    tmp_path: Path, was_published: bool, redrawn: int
) -> None:
    """The trainer dies at cursor 26: of groups 24 to 27 all but 27 had arrived; 28 and 29 came with version 13."""
    config = make_config(tmp_path)
    assert (config.prompts_per_batch, config.window) == (2, 4)
    live(config, ("11b", 24, 25), ("12c", 26), *[("13d",)] * was_published)
    inbox = inbox_of(config)
    inbox.commit(26, published("13d"))
    ledger = inbox.state.ledger
    ledger.lease_out(["s0"])
    assert (list(ledger.received), ledger.by_sampler(), ledger.redrawn) == ([26], {"s0": [27, 28, 29]}, redrawn)
