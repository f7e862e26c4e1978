"""One GPU for both processes: the size of vLLM's cache by hand, what is refused, and what both processes are told."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from launcher import run as launcher_run
from launcher.resources import fit as fits
from launcher.resources.fit import fit
from launcher.resources.machine import GIB, Machine
from launcher.resources.memory import sampler_memory, trainer_memory
from launcher.resources.placement import placement
from launcher.resources.workload import Workload, workload_of
from model.files.dims import ModelDims
from tests.support.configs import config_of

SMALL = ModelDims(896, 4864, 24, 14, 2, 64, 151936, tied=True, bias=True)  # Qwen2.5-0.5B
CARD = Machine(1, 24564 * 2**20, 64 * GIB)
PER_TOKEN = 2 * 24 * 2 * 64 * 2  # keys and values, layers, key-value heads, size, bytes
PLACE = placement(config_of(), [0], [0, 1])


def work_of(**changes: Any) -> Workload:
    work = Workload(SMALL, "bfloat16", 1, 1, 384, 512, 8, 1, 16, checkpointing=True, max_num_seqs=128)
    return replace(work, **changes)


def short(**sections: Any) -> Config:
    return config_of(data={"max_prompt_length": 384}, **{"sampler": {"max_completion_length": 512}} | sections)


def test_a_large_card_gives_the_cache_every_sequence_of_a_batch_in_whole_blocks_and_no_more() -> None:
    found = fits.shares(work_of(), CARD, 896)
    assert found.cache == 128 * 896 * PER_TOKEN  # 896 is 56 whole blocks of 16
    assert found.sequences == 128
    assert found.settings[0] == f"vllm.kv_cache_memory_bytes={128 * 896 * PER_TOKEN}"
    assert fits.shares(work_of(prompt=385), CARD, 897).cache == 128 * 912 * PER_TOKEN  # 57 blocks


def test_a_small_card_gives_the_cache_what_trainer_and_weights_leave() -> None:
    work = work_of()
    needed = trainer_memory(work).total + sampler_memory(work).weights + sampler_memory(work).overhead
    machine = replace(CARD, gpu_bytes=(needed + 2e8) / 0.96)
    found = fits.shares(work, machine, 896)
    assert found.cache == pytest.approx(2e8, abs=2)
    assert found.sequences == int(2e8 / (896 * PER_TOKEN)) == 18
    assert found.trainer + found.sampler + found.cache <= machine.gpu_bytes


def test_the_engine_asks_at_its_start_for_weights_and_cache_alone() -> None:
    """The reference is loaded before it, and the trainer may have started too: both are no longer free."""
    found = fits.shares(work_of(reference=SMALL), CARD, 896)
    share = (2 * SMALL.parameters + found.cache) / CARD.gpu_bytes
    assert found.settings[1] == f"vllm.gpu_memory_utilization={int(100 * share) / 100:.2f}"


def test_no_room_for_one_sequence_names_settings_that_make_it() -> None:
    work = work_of(checkpointing=False)
    found = fits.shares(work, replace(CARD, gpu_bytes=20 * GIB), 896)
    assert found.cache == 0
    said = fits.problem(work, found)
    assert re.search(r"one GPU of 20\.0 GiB for both: a trainer rank needs about .*set model\.gradient_check", said)
    assert "set lora.r=16" in fits.problem(work, replace(found, total=4 * GIB))


def test_the_reference_counts_on_the_one_gpu_whichever_process_holds_it() -> None:
    without = fits.shares(work_of(), CARD, 896)
    for side, logits in (("sampler", 18 * 151936 * 1024), ("trainer", 0)):  # the trainer has room for a chunk anyway
        found = fits.shares(work_of(reference=SMALL, reference_on=side), CARD, 896)
        more = found.trainer + found.sampler - without.trainer - without.sampler
        assert more == pytest.approx(2 * SMALL.parameters + logits)


def test_each_rank_on_the_one_gpu_counts() -> None:
    work = work_of(ranks=2, ranks_per_gpu=2)
    of_one, fixed = trainer_memory(work).total, sampler_memory(work).weights + sampler_memory(work).overhead
    card = replace(CARD, gpu_bytes=(2 * of_one + fixed + 2e8) / 0.96)
    found = fits.shares(work, card, 896)
    assert found.trainer == 2 * of_one
    assert found.cache == pytest.approx(2e8, abs=2)
    place = PLACE._replace(num_ranks=2, trainer_gpus=(0, 0))
    assert "per rank, 2 ranks on one GPU" in dict(fit(short(), work, place, card).lines)["trainer"]
    (problem,) = fit(short(), work, place, replace(CARD, gpu_bytes=8 * GIB)).problems
    assert f"2 trainer ranks on it need about {2 * of_one / GIB:.1f} GiB" in problem


def test_a_gpu_that_nobody_divided_is_divided_by_the_run() -> None:
    assert fits.is_undivided(short(), PLACE)
    for name, value in {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": GIB}.items():
        assert not fits.is_undivided(short(vllm={name: value}), PLACE)
    assert not fits.is_undivided(short(), placement(short(), [0, 1], [0, 1]))


@pytest.mark.parametrize(
    ("model", "gib", "words"),
    [
        (SMALL, 0, "does not say how large it is"),
        (None, 24, "no estimate for m"),
        (SMALL, 8, "one GPU of 8.0 GiB for both"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_way_by_hand(model: ModelDims | None, gib: float, words: str) -> None:
    with pytest.raises(UserError, match=rf"{words}.*add vllm\.gpu_memory_utilization=0\.4"):
        fits.settings_of_one_gpu(short(), model, PLACE, replace(CARD, gpu_bytes=gib * GIB))


def test_the_plan_shows_the_same_settings_that_a_run_is_started_with() -> None:
    config = short(model={"path": "m", "gradient_checkpointing": True}, trainer={"prompts_per_step": 16})
    lines = dict(fit(config, workload_of(config, 1, SMALL), PLACE, CARD).lines)
    assert lines["one GPU"].endswith(" ".join(fits.settings_of_one_gpu(config, SMALL, PLACE, CARD)))
    assert "128 of 128 decode at once" in lines["sampler"]


def test_a_cache_given_in_bytes_is_what_the_plan_counts() -> None:
    given = short(vllm={"kv_cache_memory_bytes": 10 * 896 * PER_TOKEN})
    assert "10 of 128 decode at once" in dict(fit(given, work_of(), PLACE, CARD).lines)["sampler"]
    too_much = short(vllm={"kv_cache_memory_bytes": 20 * GIB})
    assert any("beside the sampler" in problem for problem in fit(too_much, work_of(), PLACE, CARD).problems)


def test_launch_adds_the_settings_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """`launch.sh run` on a machine with one faked GPU, up to the start of both processes."""
    started: list[Any] = []
    stand_ins = {
        "visible_gpus": lambda _: (0,),
        "this_machine": lambda _: CARD,
        "require_models": lambda _: None,
        "read_dims": lambda *_: SMALL,
        "Supervisor": lambda samplers, *_: SimpleNamespace(run=lambda: started.extend(samplers) or 0),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(launcher_run, name, stand_in)
    monkeypatch.setattr(launcher_run.Commands, "trainer", lambda _: SimpleNamespace())
    config = tmp_path / "one.yaml"
    config.write_text(
        f"model: {{path: m, gradient_checkpointing: true}}\nrun: {{output_dir: {tmp_path}/run}}\n"
        "data: {train: t.jsonl, max_prompt_length: 384}\nsampler: {max_completion_length: 512}\n"
        "trainer: {prompts_per_step: 16}\n"
    )
    assert launcher_run.main([str(config)]) == 0
    (sampler,) = started
    cache, said = f"vllm.kv_cache_memory_bytes={128 * 896 * PER_TOKEN}", capsys.readouterr().err
    assert cache in sampler.argv
    assert f"one GPU for both processes: {cache} " in said and "shared with the sampler" in said


def test_micro_batches_on_gpus_hold_a_ranks_step_or_the_largest_part_of_it_that_fits_and_a_users_own_stay() -> None:
    def tokens(gib: int, gpus: int = 2, **trainer: Any) -> int | None:
        sections = {"trainer": {"prompts_per_step": 16} | trainer, "model": {"dtype": "bfloat16"}}
        config = short(**sections, sampler={"num_generations": 8, "max_completion_length": 512})
        place = placement(config, range(gpus), [0, 1])
        return fits.tokens_per_micro_batch(config, SMALL, place, Machine(gpus, gib * GIB, 512 * GIB))

    group = 384 + 8 * 512
    assert tokens(640) == 16 * group
    assert tokens(80) == 8 * group
    half, whole = (trainer_memory(work_of(groups_per_micro_batch=n, checkpointing=False)).total for n in (8, 16))
    assert half < 0.96 * 80 * GIB < whole
    assert tokens(12) == group
    assert tokens(640, gpus=3) == 8 * group, "of each of two ranks"
    assert tokens(640, gpus=1) == 16 * group and (tokens(48, gpus=1) or 0) < 16 * group
    assert tokens(80, groups_per_micro_batch=1) is None and tokens(80, max_tokens_per_micro_batch=9000) is None
    on_cpu = placement(config_of(), [], [0, 1])
    assert fits.tokens_per_micro_batch(config_of(), SMALL, on_cpu, Machine(0, 0, 64 * GIB)) is None
