"""The real protocol under SIGKILL.

A judge starts one trainer and two samplers made of the real Ledger, Inbox, Link, wire, weights and durable; only the
engines are fake. Every life of a process is armed with the next failpoint, at a hit drawn at random, until the wanted
number of kills has happened. Weights follow from the groups that were trained, as on one layout, and with `rounds` from
the life of the trainer, too, as where processors round differently. A group's tokens follow from its id and the weights
it was sampled with, so the trainer knows a wrong one. Every third group has an image, of a colour that follows from its
id, and every fifth a rollout of two turns. Every fourth is dead and the next one takes its slot. The trainer's state is
what a checkpoint holds: the cursor and, in the place of weights, the list of groups taken. In the end that list must be
0 … N − 1: none lost, none doubled, in order.

With `links` a bad network (lossy_proxy.py) is between them, a process of its own, which is killed that many times too:
all connections end, and what was on its way is lost.

Counted beside: groups that a trainer had accepted and that were begun anew for a later life of it.

The judge imports everything once and forks, so that a life costs milliseconds.
"""

import json
import os
import random
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from common import durable
from common.config import Config
from common.failpoints import failpoint
from common.files import weights
from common.files.weights import Published
from common.processes import exits
from common.types import EncodedImage, Forks, Group
from common.wire import channel
from common.wire.group_limits import ImageLimits
from common.wire.wire import Received
from model.files.images import ImageFormat, encode_image
from sampler import link as link_module
from sampler.engine.verify import copy_files
from sampler.link import Link
from tests.support.lossy_proxy import LossyProxy
from tests.support.protocol_helpers import (
    HELLO,
    LIMITS,
    changed,
    make_config,
    make_eval_result,
    make_rollout,
    of_two_turns,
    receive,
)
from tests.support.protocol_weights import number, publish, trained_on
from tests.support.speed import overdue
from trainer.data.slots import Slots
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

PER_STEP, SAVE_STEPS, EVAL_STEPS = 3, 2, 4
TRAINER_POINTS = (
    *("inbox.received", "inbox.accepted", "trainer.micro_batch", "trainer.stepped", "trainer.credited"),
    *("file.written", "file.synced", "file.renamed", "dir.synced", "dir.renamed", "dir.committed", "dir.trashed"),
    *("weights.shard", "weights.manifest", "checkpoint.started", "checkpoint.committed"),
)
SAMPLER_POINTS = (
    *("sampler.leased", "sampler.generated", "sampler.scored", "sampler.sent"),
    *("sampler.reloading", "sampler.reloaded"),
)
PAD = 7
SEES = replace(LIMITS, max_turns=2, images=ImageLimits(1, 784, patch_size=14, merge_size=2, image_token=PAD))
State = dict[str, Any]  # cursor, finished steps, trained group ids, and the last two versions
START: State = {"cursor": 0, "step": 0, "trained": [], "weights": [0, 0]}
ROLES = {"trainer": TRAINER_POINTS, "s0": SAMPLER_POINTS, "s1": SAMPLER_POINTS[3:] + SAMPLER_POINTS[:3]}
LINKS, ROUNDS = "links", "rounds"  # files that say so


def make_kill_config(folder: Path) -> Config:
    channel.BEAT_S, channel.LOST_AFTER_S, link_module._RESEND_AFTER_S = 0.05, 0.3, 0.1
    return make_config(
        folder,
        trainer={"prompts_per_step": PER_STEP, "max_staleness": 1, "max_steps": 100_000},
        algorithm={"dead_groups": "resample"},
        channel={"endpoint": f"ipc://{folder}/inbox", "stall_timeout_s": 300.0},
    )


# ---- the trainer -------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    config, state_file, weights_dir = make_kill_config(folder), folder / "state.json", folder / "weights"
    state: State = json.loads(state_file.read_text()) if state_file.exists() else START
    durable.remove_leftovers(weights_dir)
    durable.remove_leftovers(folder)
    weights.remove_versions(weights_dir)
    weights_dir.mkdir(exist_ok=True)
    incarnation = secrets.token_hex(8)
    rounding = incarnation if (folder / ROUNDS).exists() and random.random() < 0.3 else ""
    ledger = Ledger(10**9, PER_STEP * (1 + config.trainer.max_staleness), state["cursor"])
    accept, accepted = ledger.accept, partial(log, folder, "accepted", incarnation)

    def accept_and_log(received: Received, sampler: str) -> None:
        accept(received, sampler)
        if sampler:  # not of the journal, which had been logged before
            accepted(received.group.group_id)

    ledger.accept = accept_and_log  # type: ignore[method-assign]
    with (
        durable.lock(folder / "lock", RuntimeError),
        Inbox(config, "run", incarnation, SEES, ledger, lambda _: None) as inbox,
    ):
        inbox.wait_for_sampler()
        is_saved = False
        while not (is_saved and (folder / "enough").exists()):
            step = state["step"]
            published = publish(weights_dir, step, incarnation, state["weights"][-1])
            evaluates = step % EVAL_STEPS == 0
            inbox.commit(state["cursor"], published, f"v{step}" if evaluates else None, 70 * evaluates)
            weights.prune(weights_dir, (), keep=2)
            state = train_step(inbox, config, state, rounding)
            assert len(inbox.finish_eval()) == 2 * evaluates, "70 problems are two chunks"
            if is_saved := (step + 1) % SAVE_STEPS == 0:
                failpoint("checkpoint.started")
                durable.write_file(state_file, json.dumps(state).encode())
                failpoint("checkpoint.committed")
                inbox.forget(state["step"])


def log(folder: Path, what: str, incarnation: str, group_id: int) -> None:
    with open(folder / "groups.log", "a") as file:
        file.write(f"{what} {incarnation} {group_id}\n")


def sampled(folder: Path) -> dict[str, int]:
    """How many groups samplers began, and how many of these a former life of the trainer had accepted."""
    accepted: dict[str, str] = {}
    begun = again = 0
    for what, incarnation, group_id in map(str.split, (folder / "groups.log").read_text().splitlines()):
        if what == "accepted":
            accepted[group_id] = incarnation
        else:
            begun += 1
            again += accepted.get(group_id, incarnation) != incarnation
    return {"begun": begun, "begun_again": again}


def train_step(inbox: Inbox, config: Config, state: State, rounding: str) -> State:
    step, batch = state["step"], Slots(config, state["cursor"])
    stream = SimpleNamespace(receive=partial(receive, inbox), refill=inbox.refill)
    batch.fill(PER_STEP, 1, stream)  # with trainer.micro_batch after each
    groups = [taken.group for taken in batch.taken]
    for group in groups:
        assert isinstance(group, Group)
        assert step - 1 <= group.policy_version <= step, "older than max_staleness"
        expected = tokens(group.group_id, number(state["weights"][group.policy_version - step - 1]))
        assert group.rollouts[0].completion_ids.tolist() == expected, "sampled with other weights than it says"
        assert group.images == images(group.group_id), "it shows another image"
        assert bool(group.rollouts[1].observed) == in_turns(group.group_id), "it has lost its turns, or found some"
        assert group.rollouts[1].forks == forks(group.group_id), "its history is another"
    alive = [g.group_id for g in batch.trainable(range(batch.num_filled))]
    assert len(alive) == PER_STEP and not any(map(is_dead, alive)), "a slot is empty, or has a dead group"
    failpoint("trainer.stepped")
    ids = [group.group_id for group in groups]
    after = [state["weights"][-1], trained_on(state["weights"][-1], f"{ids} {rounding}")]
    return {"cursor": ids[-1] + 1, "step": step + 1, "trained": [*state["trained"], *ids], "weights": after}


def is_dead(group_id: int) -> bool:
    return group_id % 4 == 1


def in_turns(group_id: int) -> bool:
    return group_id % 5 == 2


def forks(group_id: int) -> Forks:
    """Without images, whose places in the prompt no history may change."""
    return ((2, 1),) if in_turns(group_id) and not images(group_id) else ()


def tokens(group_id: int, weights_number: int) -> list[int]:
    return [group_id % LIMITS.vocab_size, weights_number]


def images(group_id: int) -> tuple[EncodedImage, ...]:
    colour = (group_id % 256, group_id // 256 % 256, 7)
    return () if group_id % 3 else (encode_image(Image.new("RGB", (28, 28), colour), ImageFormat(), 784, 784),)


# ---- a sampler ---------------------------------------------------------------------------------------------


def sample(folder: Path, name: str) -> None:
    config = make_kill_config(folder)
    if (folder / LINKS).exists():
        config = changed(config, channel={"endpoint": f"{config.channel.endpoint}-proxy"})
    link, version, weights_number = Link(config, name, HELLO), None, -1
    while True:
        if link.receive(0.02):
            version = None
        credit = link.credit
        if credit is not None and credit.version != version:
            try:
                weights_number = reload(Published(credit.version, credit.weights_dir, credit.manifest_sha256))
                version = credit.version
            except weights.BadWeights as error:  # the trainer may have gone on, and pruned it
                assert "No such file" in str(error), error
        if credit is not None and credit.version == version:
            produce(link, weights_number, partial(log, folder, "begun", link._envelope.incarnation))
        link.beat("sampling", 0, version, {}, now=False)


def reload(published: Published) -> int:
    """The number in the weights, by way of the checks that a real reload makes."""
    failpoint("sampler.reloading")
    with tempfile.TemporaryDirectory(dir=Path(published.weights_dir).parents[1]) as scratch:
        manifest = weights.read_manifest(published)
        copy_files(published, manifest, Path(scratch) / "version")
        loaded = load_file(Path(scratch) / "version" / weights.shard_name(0, 1))
    failpoint("sampler.reloaded")
    return int(loaded["number"][0])


def produce(link: Link, weights_number: int, begin: Callable[[int], None]) -> None:
    credit = link.credit
    assert credit is not None
    for group_id in credit.lease:
        if link.has_result(group_id):
            continue
        begin(group_id)
        failpoint("sampler.leased")
        first, reward = make_rollout(tokens(group_id, weights_number)), float(is_dead(group_id))
        turns = of_two_turns(reward=reward, forks=forks(group_id))
        second = turns if in_turns(group_id) else make_rollout(reward=reward)
        failpoint("sampler.generated")
        shown = images(group_id)
        prompt_ids = np.array([1, *[PAD] * len(shown)], np.int32)
        group = Group(group_id, credit.version, group_id, prompt_ids, (first, second), shown)
        failpoint("sampler.scored")
        link.send_result(group)
        if random.random() < 0.2:
            link.send_result(group)  # a duplicate
    for request in credit.evals:
        link.send_eval(make_eval_result(request, credit.version))


# ---- the links ---------------------------------------------------------------------------------------------


def connect(folder: Path, armed: str) -> None:
    """Between samplers and trainer, for ever or for as many milliseconds as `armed` says."""
    address = str(make_kill_config(folder).channel.endpoint)
    LossyProxy(f"{address}-proxy", address, seed=int(armed or 1)).run(time.monotonic() + float(armed or 1e9) / 1000)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the judge ---------------------------------------------------------------------------------------------


def live(role: str, folder: Path, armed: str) -> int:
    """Forks one life of a process. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    exits.die_with_parent()
    os.environ["TANDEM_FAILPOINT"] = armed if role != LINKS else ""
    log = os.open(folder / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    random.seed(armed)
    work = {"trainer": lambda: train(folder), LINKS: lambda: connect(folder, armed)}
    exits.leave(exits.run(role, work.get(role, lambda: sample(folder, role))))
    raise AssertionError("unreachable")


def judge(folder: Path, kills: int, links: int, deadline_s: float, rounds: bool = False) -> dict[str, Any]:
    """Runs to the end. Raises AssertionError when a process ends in any way but a kill or, in the end, success."""
    rng, start = random.Random(1), time.monotonic()
    plan = {"trainer": kills - 2 * (kills // 4), "s0": kills // 4, "s1": kills // 4, LINKS: links}
    if links:
        (folder / LINKS).touch()
    if rounds:
        (folder / ROUNDS).touch()
    killed: Counter[str] = Counter()
    lives: Counter[str] = Counter()
    running: dict[int, tuple[str, str]] = {}

    def begin(role: str) -> None:
        life, point = lives[role], LINKS
        armed = str(rng.randrange(200, 1500))  # milliseconds that a link lives
        if role != LINKS:
            point = ROLES[role][life % len(ROLES[role])]
            armed = f"{point}:{rng.randrange(1, 9)}:kill"
        lives[role] += 1
        running[live(role, folder, armed if life < plan[role] else "")] = role, point

    for role in (*ROLES, *([LINKS] if links else [])):
        begin(role)
    try:
        trained_to_the_end = False
        while not trained_to_the_end:  # a sampler that comes back only now waits for the next trainer
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                assert not overdue(time.monotonic() - start, deadline_s), (
                    f"not done after {deadline_s} s: {dict(killed)}"
                )
                time.sleep(0.002)
                continue
            role, point = running.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                killed[point] += 1
                if killed.total() == kills + links:
                    (folder / "enough").touch()
                begin(role)
            else:
                log = (folder / f"{role}.log").read_text()[-3000:]
                assert status == 0, f"{role} ended with {os.waitstatus_to_exitcode(status)}:\n{log}"
                assert killed.total() == kills + links, f"{role} ended before the last kill"
                trained_to_the_end |= role == "trainer"
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    trained = json.loads((folder / "state.json").read_text())["trained"]
    return {
        "kills": killed.total(),
        "by_point": dict(sorted(killed.items())),
        "groups": len(trained),
        **sampled(folder),
        "exactly_once_in_order": trained == list(range(len(trained))),
        "leftovers": sorted(p.name for p in folder.rglob("*") if p.name.startswith((durable.TEMPORARY, durable.TRASH))),
    }
