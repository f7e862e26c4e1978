"""R8: loss, duplication, reordering and reset connections change nothing in what is trained, in what order."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common import wire
from common.types import Group
from sampler.link import Link
from tests.support.lossy_proxy import DELAYED, DOUBLED, LOST, LossyProxy
from tests.support.protocol_helpers import (
    HELLO,
    FakeSampler,
    hurry,
    make_config,
    make_group,
    make_inbox,
    make_rollout,
    published,
    short_folder,
    take,
)
from tests.support.sockets import router
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(120)

PER_STEP, NUM_STEPS = 8, 40
Weights = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def fast_beats() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        yield


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


def run(folder: Path, seed: int | None, max_staleness: int = 0) -> tuple[list[int], Policy, LossyProxy | None]:
    """(trained ids, policy, proxy) of a whole run with two samplers, behind a bad network if there is a seed."""
    trainer = {"prompts_per_step": PER_STEP, "max_staleness": max_staleness, "max_steps": NUM_STEPS}
    config = make_config(folder, trainer=trainer)
    address = config.channel.endpoint
    behind = config if seed is None else make_config(folder, trainer=trainer, channel={"endpoint": f"{address}-proxy"})
    policy, trained = Policy(), []
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(make_inbox(config, total=NUM_STEPS * PER_STEP))
        proxy = None if seed is None else stack.enter_context(LossyProxy(f"{address}-proxy", str(address), seed))
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


@pytest.fixture(scope="module")
def good_network() -> tuple[list[int], Policy]:
    """What is trained without a proxy."""
    with short_folder() as folder:
        trained, policy, _ = run(folder, None)
    return trained, policy


def digest(policy: Policy) -> str:
    return hashlib.sha256(np.stack(policy.versions).tobytes()).hexdigest()


@pytest.mark.parametrize("seed", [1, 2])
def test_behind_a_bad_network_the_same_groups_are_trained_in_the_same_order_to_the_same_weights(
    good_network: tuple[list[int], Policy], seed: int, figure: Callable[[str, str], None]
) -> None:
    plain_ids, plain = good_network
    with short_folder() as folder:
        trained, policy, proxy = run(folder, seed)
    assert trained == plain_ids == list(range(NUM_STEPS * PER_STEP))
    assert digest(policy) == digest(plain)
    assert proxy is not None
    fates, total = proxy.fates, proxy.fates["messages"]
    assert total > 500 and fates["resets"] >= 3 and fates["overtaken"] > 50
    for name, share in (("lost", LOST), ("doubled", DOUBLED), ("delayed", DELAYED)):
        assert share / 2 < fates[name] / total < 2 * share
    figure(
        "R8",
        f"{total:,} messages: {fates['lost']} lost, {fates['doubled']} doubled, {fates['delayed']} delayed, "
        f"{fates['overtaken']} overtaken, {fates['resets']} resets; {len(trained)} groups in order, same weights",
    )


def test_with_a_sampler_that_runs_ahead_the_order_holds_too() -> None:
    with short_folder() as folder:
        trained, _, _ = run(folder, seed=3, max_staleness=1)
    assert trained == list(range(NUM_STEPS * PER_STEP))


def test_the_weights_would_tell_another_order() -> None:
    straight, swapped = Policy(), Policy()
    groups = [straight.sample(g, 0) for g in range(8)]
    straight.train(groups)
    swapped.train([groups[1], groups[0], *groups[2:]])
    assert digest(straight) != digest(swapped)


def test_a_credit_that_was_overtaken_by_a_later_one_is_counted_and_not_used() -> None:
    def credit(progress: int) -> wire.Credit:
        return wire.Credit(8 * progress, [8 * progress], [], progress, "", "", progress)

    with short_folder() as folder:
        config = make_config(folder)
        with router(config) as trainer:
            link = Link(config, "s0", HELLO)
            link.beat("ready", 0, None, {}, now=True)
            name, *_ = trainer.recv_multipart()
            seen = []
            steps = [("a", 1), ("a", 2), ("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 0), ("b", 1)]
            for incarnation, progress in steps:
                trainer.send_multipart([name, *wire.encode(wire.Envelope("run", incarnation, ""), credit(progress))])
                link.receive(timeout_s=limit(5))
                seen.append(link.credit.version if link.credit else None)
            link.close()
        assert seen == [1, 2, 2, 2, 1, 1, 1, 1]
        assert link.counters == {"refused/outdated": 2, "refused/past_incarnation": 1}
