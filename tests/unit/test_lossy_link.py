"""R8: loss, duplication, reordering and reset connections change nothing in what is trained, in what order."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common.types import Group
from tests.support.lossy_proxy import DELAYED, DOUBLED, LOST, LossyProxy
from tests.support.protocol_helpers import (
    FakeSampler,
    hurry,
    make_config,
    make_group,
    make_inbox,
    make_rollout,
    published,
    take,
)

pytestmark = pytest.mark.timeout(120)

PER_STEP, NUM_STEPS = 8, 40
Weights = NDArray[np.float64]


class Policy:
    """Weights of every version so far: a group is a function of its id and of the weights that sample it."""

    def __init__(self) -> None:
        self.versions: list[Weights] = [np.zeros(4)]

    def sample(self, group_id: int, version: int) -> Group:
        seed = [group_id, int.from_bytes(hashlib.sha256(self.versions[version]).digest()[:4])]
        first, second = np.random.default_rng(seed).integers(0, 100, (2, 4)).tolist()
        return make_group(group_id, version, make_rollout(first), make_rollout(second))

    def train(self, groups: list[Group]) -> None:
        """An update in which the order of the groups matters."""
        weights = self.versions[-1]
        for group in groups:
            for rollout in group.rollouts:
                weights = 0.9 * weights + 0.01 * rollout.completion_ids
        self.versions.append(weights)

    def digest(self) -> str:
        return hashlib.sha256(np.stack(self.versions).tobytes()).hexdigest()


def without_a_network() -> Policy:
    """One version after the other, by hand."""
    policy = Policy()
    for step in range(NUM_STEPS):
        policy.train([policy.sample(group_id, step) for group_id in range(step * PER_STEP, (step + 1) * PER_STEP)])
    return policy


def run(folder: Path, seed: int, max_staleness: int) -> tuple[list[int], Policy, LossyProxy]:
    """(trained ids, policy, proxy) of a whole run with two samplers behind a bad network."""
    trainer = {"prompts_per_step": PER_STEP, "max_staleness": max_staleness, "max_steps": NUM_STEPS}
    config = make_config(folder, trainer=trainer)
    address = str(config.channel.endpoint)
    behind = make_config(folder, trainer=trainer, channel={"endpoint": f"{address}-proxy"})
    policy, trained = Policy(), []
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(make_inbox(config, total=NUM_STEPS * PER_STEP))
        proxy = stack.enter_context(LossyProxy(f"{address}-proxy", address, seed))
        for name in ("s0", "s1"):
            stack.enter_context(FakeSampler(behind, name, make=policy.sample))
        for step in range(NUM_STEPS):
            ids = range(step * PER_STEP, (step + 1) * PER_STEP)
            inbox.commit(ids.start, published(step))
            taken = take(inbox, ids)
            assert all(step - max_staleness <= group.policy_version <= step for group in taken)
            policy.train([group for group in taken if isinstance(group, Group)])
            trained += [group.group_id for group in taken]
    return trained, policy, proxy


@pytest.mark.parametrize("seed", [1, 2])
def test_behind_a_bad_network_the_same_groups_are_trained_in_the_same_order_to_the_same_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, figure: Callable[[str, str], None]
) -> None:
    hurry(monkeypatch)
    trained, policy, proxy = run(folder, seed, max_staleness=0)
    assert trained == list(range(NUM_STEPS * PER_STEP))
    assert policy.digest() == without_a_network().digest()
    fates, total = proxy.fates, proxy.fates["messages"]
    assert total > 500 and fates["resets"] >= 3 and fates["overtaken"] > 50
    for name, share in (("lost", LOST), ("doubled", DOUBLED), ("delayed", DELAYED)):
        assert share / 2 < fates[name] / total < 2 * share
    figure(
        "R8",
        f"{total:,} messages: {fates['lost']} lost, {fates['doubled']} doubled, {fates['delayed']} delayed, "
        f"{fates['overtaken']} overtaken, {fates['resets']} resets; {len(trained)} groups in order, same weights",
    )


def test_with_a_sampler_that_runs_ahead_the_order_holds_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    trained, _, _ = run(folder, seed=3, max_staleness=1)
    assert trained == list(range(NUM_STEPS * PER_STEP))


def test_the_weights_would_tell_another_order() -> None:
    straight, swapped = Policy(), Policy()
    groups = [straight.sample(g, 0) for g in range(8)]
    straight.train(groups)
    swapped.train([groups[1], groups[0], *groups[2:]])
    assert straight.digest() != swapped.digest()
