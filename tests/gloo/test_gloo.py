"""Gradient steps, skipped steps, published weights and checkpoints of real DeepSpeed ranks over gloo, ZeRO 0 to 3.

The yardstick is a plain training loop on one process: dense forwards, the oracle's loss and gradient, torch's AdamW.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.files import weights
from common.processes import exits
from common.types import Group
from sampler.engine.verify import checked_tensors, copy_files
from tests.support import gloo_data
from tests.support.configs import config_of
from tests.support.gloo_data import GROUPS_PER_STEP, LAYOUTS, MANY, NUM_STEPS, TRAINER, VARIANTS, WHOLE_LAYOUTS, batch
from tests.support.plain_training import BETA1, PLAIN_ROUNDING, PlainActorCritic, PlainGroupPpo, PlainTraining
from tests.support.replay_worker import RankReports, stack
from tests.support.tiny import VOCAB_SIZE, dense_logprobs, difference, tiny_model, tiny_reward_model
from trainer.data.mini_batches import steps

pytestmark = pytest.mark.timeout(600)

# what gloo takes with CUDA tensors, by the source of ProcessGroupGloo in torch 2.13
ON_GPUS = {"broadcast_", "allreduce_", "reduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"}
OURS = {"send", "recv_", "gather_", "barrier"}  # of the trainer's own messages, which are always in CPU memory
every_layout = pytest.mark.parametrize(("ranks", "stage"), LAYOUTS)
every_whole_layout = pytest.mark.parametrize(("ranks", "stage"), WHOLE_LAYOUTS)
of_many = pytest.mark.parametrize("ranks", MANY)


class Runs:
    """What the workers saw. A start happens when a test first asks for it."""

    def __init__(self) -> None:
        self.folder = stack().folder / "gloo"
        self.model = tiny_model(self.folder / "model", vocab=VOCAB_SIZE)
        self.reference = tiny_model(self.folder / "reference", layers=1, vocab=VOCAB_SIZE)
        self.reward_model = tiny_reward_model(self.folder / "critic", self.model)

    @cache  # noqa: B019
    def first(self, ranks: int) -> RankReports:
        folder = self.folder.with_name(f"gloo-{ranks}")
        folder.mkdir()
        for name in ("model", "reference", "critic"):
            (folder / name).symlink_to(self.folder / name)
        return stack().seen("tests.support.gloo_worker", folder.name, ranks, "first")

    @cache  # noqa: B019
    def resumed(self, ranks: int) -> RankReports:
        """A second start, after one byte of each newest checkpoint was flipped."""
        folder = self.first(ranks).folder
        for checkpoint in folder.glob(f"*/checkpoints/step_{NUM_STEPS:06d}"):
            file = checkpoint / ("critic" if (checkpoint / "critic").is_dir() else ".") / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        return stack().seen("tests.support.gloo_worker", folder.name, ranks, "resume")

    def of(self, ranks: int, name: str) -> dict[str, Any]:
        """What rank 0 saw of a scenario."""
        return self.first(ranks).ranks[0][name]

    def tensors(self, ranks: int, name: str) -> dict[str, Tensor]:
        return self.first(ranks).tensors(name)

    def gradient(self, ranks: int, name: str, kind: str = "") -> dict[str, Tensor]:
        return {key: t / (1 - BETA1) for key, t in self.tensors(ranks, f"{name}/{kind}gradient").items()}

    @cache  # noqa: B019
    def plain(self) -> PlainTraining:
        return PlainTraining(self.model).train()

    @cache  # noqa: B019
    def plain_critic(self) -> PlainActorCritic:
        return PlainActorCritic(self.model, self.reward_model).train()

    def checkpoint(self, ranks: int, name: str) -> Path:
        return self.first(ranks).folder / name / f"checkpoints/step_{NUM_STEPS:06d}"


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@every_layout
def test_three_steps_equal_plain_torch_with_the_oracle(runs: Runs, ranks: int, stage: int) -> None:
    """The first gradient, the numbers of every step, and the weights after all."""
    name, plain = f"train{stage}", runs.plain()
    assert difference(runs.gradient(ranks, name), plain.gradient) < PLAIN_ROUNDING
    assert [s["learning_rate"] for s in plain.steps] == [0.0, 1e-3, 5e-4]
    assert_steps(runs.of(ranks, name)["steps"], plain.steps)
    assert difference(runs.tensors(ranks, f"{name}/weights"), weights_of(plain.model)) < 1e-6
    assert len({tuple(seen[name]["hashes"]) for seen in runs.first(ranks).ranks}) == 1


def assert_steps(
    found: list[dict[str, Any]], *plain: list[dict[str, float]], rel: float = 2e-5, abs: float = 0
) -> None:
    """plain: the policy's numbers of every step, and the critic's."""
    for step, *numbers in zip(found, *plain, strict=True):
        for expected in numbers:
            for name, value in expected.items():
                assert step[name] == pytest.approx(value, rel=rel, abs=abs), name


def alive() -> list[Group]:
    """The uneven groups without the tombstone. Only the first has something to train."""
    return [g for g in map(gloo_data.uneven, range(GROUPS_PER_STEP)) if isinstance(g, Group)]


@every_whole_layout
def test_dead_groups_and_a_tombstone_on_one_rank_change_nothing_and_nobody_waits(
    runs: Runs, ranks: int, stage: int
) -> None:
    plain = PlainTraining(runs.model, beta=0.0)
    loss = plain.backward(alive())
    # the oracle divides by three groups' completions, the step by four: the tombstone's were planned
    expected = {key: t * 3 / 4 for key, t in plain.gradients().items()}
    assert difference(runs.gradient(ranks, f"uneven{stage}"), expected) < PLAIN_ROUNDING
    step = runs.of(ranks, f"uneven{stage}")["steps"][0]
    assert step["loss"] == pytest.approx(loss * 3 / 4, rel=1e-5)
    assert step["tokens"] == sum(len(r.completion_ids) for r in alive()[0].rollouts)


@every_whole_layout
def test_a_step_of_dead_groups_alone_has_a_gradient_of_zero(runs: Runs, ranks: int, stage: int) -> None:
    (step,) = runs.of(ranks, f"dead{stage}")["steps"]
    assert step["applied"] and (step["grad_norm"], step["loss"], step["tokens"]) == (0.0, 0.0, 0.0)
    assert all(not t.any() for t in runs.gradient(ranks, f"dead{stage}").values())


BATCH_OF_EIGHT = [*batch(0), *batch(1)]
LOOP = ("num_iterations", "steps_per_generation", "shuffle_mini_batches", "dead_groups")
# of dead groups and others: those that train, and how many are used up
ALIVE = {"skip": ((0, 2), 4), "resample": ((0, 2, 4, 6), 7)}


def mini_batches(name: str) -> list[list[Group]]:
    """What each optimizer step of the variant must train."""
    algorithm = VARIANTS[name].get("algorithm", {})
    if name in ALIVE:  # the dead ones have a KL term, which would train them if they were kept
        return [[gloo_data.group(g) for g in ALIVE[name][0]]]
    if algorithm.get("shuffle_mini_batches"):  # that this is a partition of every pass is tested beside the function
        planned = steps(gloo_data.settings(Path("unused"), name, 1, **VARIANTS[name]), batch=0)
        return [[BATCH_OF_EIGHT[slot] for slot in step.slots] for step in planned]
    return [batch(i) for i in range(algorithm.get("steps_per_generation", 1))] * algorithm.get("num_iterations", 1)


def with_reference(runs: Runs, groups: list[Group]) -> list[Group]:
    """As a sampler would have sent them, with the log-probs of the reference: of a dense forward in float64."""
    reference = PlainTraining(runs.reference)

    def scored(g: Group) -> Group:
        refs = [logprobs.detach().numpy() for logprobs, _ in reference.scores(g)]
        pairs = zip(g.rollouts, refs, strict=True)
        return replace(g, rollouts=tuple(replace(r, ref_logprobs=ref) for r, ref in pairs))

    return [scored(gloo_data.bare(g.group_id)) for g in groups]


@of_many
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "critic_shuffled"])
def test_objectives_passes_and_ways_to_compute_them_equal_plain_steps_with_advantages_of_the_whole_batch(
    runs: Runs, ranks: int, name: str
) -> None:
    sections = VARIANTS[name]
    algorithm, trainer = sections.get("algorithm", {}), TRAINER | sections.get("trainer", {})
    changes = {"adv_estimator": "dr_grpo"} if name == "own" else {k: v for k, v in algorithm.items() if k not in LOOP}
    planned = mini_batches(name)
    whole = BATCH_OF_EIGHT if "steps_per_generation" in algorithm else planned[0]
    if "reference" in sections:
        planned, whole = [with_reference(runs, groups) for groups in planned], with_reference(runs, whole)
    plain = PlainTraining(runs.model, trainer, **changes)
    for groups in planned:
        plain.step(groups, whole)
    seen = runs.of(ranks, name)
    # the loss is a mean of terms of about 1, most of which cancel: float32 keeps 1e-6 of them, not of the mean
    assert_steps(seen["steps"], plain.steps, abs=1e-6)
    if len(planned) == 1:
        assert difference(runs.gradient(ranks, name), plain.gradient) < PLAIN_ROUNDING
    # Adam divides each gradient by its own size: where that is rounding alone, so is the step
    assert difference(runs.tensors(ranks, f"{name}/weights"), weights_of(plain.model)) < 1e-5
    end = seen["run_state"]
    assert (end["batch"], end["cursor"]) == (1, ALIVE[name][1] if name in ALIVE else len(whole))
    assert end["step"] == end["policy_version"] == len(planned)


# the policy's loss not finite, the critic's, or both: neither may move
SKIPS = [(ranks, f"{name}{s}") for name in ("nan", "inf", "critic_inf", "value_inf") for ranks, s in WHOLE_LAYOUTS]
SKIPS += [(ranks, "critic_nan_half1") for ranks in MANY]


@pytest.mark.parametrize(("ranks", "name"), SKIPS)
def test_a_step_that_is_not_finite_leaves_no_trace(
    runs: Runs, ranks: int, name: str, figure: Callable[[str, str], None]
) -> None:
    for seen in runs.first(ranks).ranks:
        run = seen[name]
        assert [s["applied"] for s in run["steps"]] == [False, True]
        start, after_skip, after_good = run["hashes"]
        assert after_skip == start
        assert after_good == run["alone"] != start  # as if the good step had been the first
        assert run["run_state"]["policy_version"] == run["run_state"]["skipped_steps"] == 1
        assert run["run_state"]["step"] == run["run_state"]["batch"] == 2
    figure("R11", "NaN or infinity in policy, critic or values, on one rank or both: skipped, weights unchanged")


@every_whole_layout
def test_three_steps_with_a_critic_equal_plain_torch(runs: Runs, ranks: int, stage: int) -> None:
    plain_critic = runs.plain_critic()
    assert_both_models_equal(runs, ranks, f"critic{stage}", plain_critic)
    steps = runs.of(ranks, f"critic{stage}")["steps"]
    assert_steps(steps, plain_critic.steps, plain_critic.value_steps, rel=5e-5, abs=1e-6)


def assert_both_models_equal(
    runs: Runs, ranks: int, name: str, plain: PlainActorCritic, after_steps: float = PLAIN_ROUNDING
) -> None:
    for kind, gradient, model in (("", plain.gradient, plain.model), ("value_", plain.value_gradient, plain.critic)):
        # both are clipped, by norms that are rounded otherwise
        assert difference(runs.gradient(ranks, name, kind), gradient) < 1.2e-5
        assert difference(runs.tensors(ranks, f"{name}/{kind}weights"), weights_of(model)) < after_steps


@of_many
def test_group_ppo_trains_segment_ends_as_plain_torch_does(runs: Runs, ranks: int) -> None:
    plain = PlainGroupPpo(runs.model, runs.reward_model).train()
    # fewer tokens, smaller gradients: Adam divides their rounding by less (5e-6 as measured)
    assert_both_models_equal(runs, ranks, "segments1", plain, after_steps=1e-5)
    steps = runs.of(ranks, "segments1")["steps"]
    assert_steps(steps, plain.steps, plain.value_steps, rel=5e-5, abs=1e-6)
    assert all(step["tokens"] < step["token_group/total_tokens"] for step in steps)
    assert [step["token_group/threshold"] for step in steps] == pytest.approx(plain.thresholds, rel=1e-5)


@of_many
def test_mini_batches_with_a_critic_equal_plain_steps_with_old_values_of_the_whole_batch(
    runs: Runs, ranks: int
) -> None:
    name = "critic_shuffled"
    plain = PlainActorCritic(runs.model, runs.reward_model, TRAINER | VARIANTS[name]["trainer"])
    for groups in mini_batches(name):
        plain.step(groups, BATCH_OF_EIGHT)
    seen = runs.of(ranks, name)
    assert_steps(seen["steps"], plain.steps, plain.value_steps, rel=1e-4, abs=1e-6)
    assert seen["steps"][0]["value_clip_fraction"] == 0 < seen["steps"][3]["value_clip_fraction"]
    for kind, model in (("", plain.model), ("value_", plain.critic)):
        assert difference(runs.tensors(ranks, f"{name}/{kind}weights"), weights_of(model)) < 1e-5
    assert (seen["run_state"]["cursor"], seen["run_state"]["policy_version"]) == (8, 4)


@of_many
@pytest.mark.parametrize("stage", (1, 3))
def test_the_critic_learns_from_dead_groups_and_nobody_waits_for_a_tombstone(
    runs: Runs, ranks: int, stage: int
) -> None:
    """The head starts at zero, so the first gradient is that of the head alone: − mean over tokens of return · h."""
    model = PlainTraining(runs.model, beta=0.0).model
    tokens, expected = 0, torch.zeros(model.config.hidden_size, dtype=torch.float64)
    for g in alive():
        for r in g.rollouts:
            ids = torch.tensor([[*g.prompt_ids.tolist(), *r.completion_ids.tolist()]])
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0].detach()
            expected -= r.reward * hidden[len(g.prompt_ids) - 1 : -1].sum(0)
            tokens += len(r.completion_ids)
    found = runs.gradient(ranks, f"critic_uneven{stage}", "value_")
    head = {"score.weight": found.pop("score.weight")[0]}
    assert difference(head, {"score.weight": expected / tokens}) < PLAIN_ROUNDING
    assert all(not t.any() for t in found.values())


@of_many
def test_while_only_the_critic_learns_the_policy_and_its_version_stay(runs: Runs, ranks: int) -> None:
    run = runs.of(ranks, "warm_up")
    (policy, critic), (policy1, critic1), (policy2, critic2) = run["hashes"]
    assert policy == policy1 != policy2  # the first of the second batch's two updates is still the critic's alone
    assert len({critic, critic1, critic2}) == 3
    assert [s["critic_only"] for s in run["steps"]] == [True, True, True, False]
    state = run["run_state"]
    assert (state["policy_version"], state["step"], state["skipped_steps"]) == (1, 4, 0)
    assert run["steps"][0]["value_clip_fraction"] == 0 < run["steps"][1]["value_clip_fraction"]  # against old values


@every_whole_layout
def test_final_critics_in_a_checkpoint_load_into_transformers_with_their_head(
    runs: Runs, ranks: int, stage: int
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = runs.checkpoint(ranks, f"critic{stage}") / "critic"
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and model.config.num_labels == 1
    # a later test may have flipped the last bit of the file and then trained that step again
    assert difference(weights_of(model), runs.tensors(ranks, f"critic{stage}/value_weights")) < 1e-7


@every_layout
def test_a_published_version_verifies_and_holds_the_weights_of_the_checkpoint_and_their_canary(
    runs: Runs, tmp_path: Path, ranks: int, stage: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    version = weights.Published(**runs.of(ranks, f"train{stage}")["published"])
    manifest = weights.read_manifest(version)
    copy_files(version, manifest, tmp_path / "private")
    checked_tensors(tmp_path / "private", manifest, config_of())
    assert (len(manifest.files), manifest.version) == (ranks, NUM_STEPS)
    found: dict[str, Tensor] = {}
    for name in manifest.files:
        shard = load_file(tmp_path / "private" / name)
        assert shard and not found.keys() & shard.keys()
        found |= shard
    expected = runs.tensors(ranks, f"train{stage}/weights")
    assert found.keys() == expected.keys() == manifest.tensors.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    checkpoint = runs.checkpoint(ranks, f"train{stage}")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    # a test may have flipped the last bit of the file and then trained that step again
    assert difference(weights_of(model), expected) < 1e-7
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(checkpoint)) == VOCAB_SIZE
    require_canary(model, manifest.canary)


def require_canary(model: Any, canary: weights.Canary) -> None:
    """Its log-probs are those of the model."""
    for ids, logprobs in zip(canary.token_ids, canary.logprobs, strict=True):
        with torch.no_grad():
            dense = dense_logprobs(model, ids[: canary.prompt_length], ids[canary.prompt_length :])
        assert np.abs(np.array(logprobs) - dense.numpy()).max() < 1e-5


RESUMED = [(ranks, f"train{stage}") for ranks, stage in LAYOUTS]
RESUMED += [(ranks, f"critic{stage}") for ranks, stage in WHOLE_LAYOUTS]
RESUMED += [(n, f"half{stage}") for n in MANY for stage in gloo_data.HALF_STAGES]
RESUMED += [(n, name) for n in MANY for name in ("critic_half1", "segments1")]


@pytest.mark.parametrize(("ranks", "name"), RESUMED)
def test_a_resumed_run_is_bit_identical_to_one_that_was_never_stopped_and_skips_a_checkpoint_with_a_flipped_byte(
    runs: Runs, ranks: int, name: str
) -> None:
    straight = runs.of(ranks, name)
    for rank, run in enumerate(seen[f"{name}/resumed"] for seen in runs.resumed(ranks).ranks):
        assert run["hashes"] == straight["hashes"][-2:]  # as saved, and after the next step
        assert run["hashes"][0] != run["before"]
        assert run["steps"] == straight["steps"][-1:]
        assert (run["run_state"]["cursor"], run["run_state"]["step"]) == (NUM_STEPS * GROUPS_PER_STEP, NUM_STEPS)
        assert run["found"] == f"step_{NUM_STEPS - 1:06d}"
        assert len(run["said"]) == (rank == 0), "one says it for all"
        assert all(f"step_{NUM_STEPS:06d} is skipped" in said and "differs" in said for said in run["said"])


@every_whole_layout
def test_masters_of_a_bfloat16_model_are_rounded_to_it_and_the_same_on_any_ranks(
    runs: Runs, ranks: int, stage: int
) -> None:
    masters, model = (runs.tensors(ranks, f"begin{stage or 1}/{part}") for part in ("masters", "model"))
    expected = runs.tensors(1, "begin1/masters")
    assert model.keys() <= masters.keys() == expected.keys()
    for name, halves in model.items():
        assert torch.equal(masters[name].bfloat16(), halves), name
        assert torch.equal(masters[name], expected[name]), name


@of_many
@pytest.mark.parametrize("stage", gloo_data.SUM_STAGES)
def test_a_bfloat16_gradient_does_not_depend_on_the_number_of_micro_batches(runs: Runs, ranks: int, stage: int) -> None:
    """Every micro-batch's gradient is rounded to 8 bits once, a quarter of a percent. More sums add nothing to that."""
    whole, in_4, in_16 = (runs.tensors(ranks, f"sum{stage}_{count}/gradient") for count in gloo_data.MICRO_BATCHES)
    few, many = difference(in_4, whole), difference(in_16, whole)
    assert 0 < few < 5e-3 and many == pytest.approx(few, rel=0.1)


@of_many
def test_a_rank_whose_memory_runs_out_begins_the_step_anew_with_all_ranks_and_halves_of_micro_batches(
    runs: Runs, ranks: int
) -> None:
    short, enough = runs.of(ranks, "memory")
    assert short == enough


@pytest.mark.parametrize("ranks", gloo_data.RANKS)
def test_every_pickle_of_a_checkpoint_is_read_without_running_code(runs: Runs, ranks: int) -> None:
    for seen in runs.resumed(ranks).ranks:
        assert len(seen["weights_only"]) >= 2
        assert all(flag is True for flag in seen["weights_only"])


def test_a_pickle_that_calls_a_function_is_refused(tmp_path: Path) -> None:
    from trainer.engine.deepspeed_insides import load_without_code

    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "hit").touch, ()

    torch.save({"module": Bomb()}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_without_code(str(tmp_path / "state.pt"))
    assert not (tmp_path / "hit").exists()


def test_a_checkpoint_of_pythons_that_pickle_an_enum_by_getattr_loads_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11.2 does; DeepSpeed writes its stage into every rank's optimizer state."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from trainer.engine.deepspeed_insides import load_without_code, pickle_the_stage_by_value

    file = tmp_path / "state.pt"
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    torch.save({"zero_stage": ZeroStageEnum.gradients}, file)
    with pytest.raises(pickle.UnpicklingError):
        load_without_code(str(file))
    pickle_the_stage_by_value()
    torch.save({"zero_stage": ZeroStageEnum.gradients}, file)
    assert load_without_code(str(file)) == {"zero_stage": ZeroStageEnum.gradients}


@of_many
def test_only_collectives_that_gloo_takes_with_a_gpus_tensors_are_called(runs: Runs, ranks: int) -> None:
    """The calls are the same on a CPU. Others crash, or are refused."""
    called = runs.of(ranks, "collectives")
    assert {name for name, _ in called} >= {"allreduce_", "_allgather_base_", "_reduce_scatter_base_"}
    assert ("gather_" in {name for name, _ in called}) == (ranks > 1)
    assert {name for name, dtype in called if dtype != "torch.uint8"} <= ON_GPUS | {"barrier"}
    assert {name for name, _ in called} <= ON_GPUS | OURS


def test_when_rank_0_ends_the_other_rank_leaves_with_its_code(runs: Runs) -> None:
    first, second = (seen["ended"] for seen in runs.first(2).ranks)
    assert first == ["UserError", None]
    assert second == ["PeerEnded", exits.USER_ERROR]
