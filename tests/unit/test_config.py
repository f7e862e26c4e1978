"""Settings: everything wrong is said at once, with file, line and what to write instead."""

from pathlib import Path
from typing import Any

import pytest

from common.config import Config, load
from common.errors import UserError
from common.paths import ROOT

GOOD = "model:\n  path: m\ndata:\n  train: t.jsonl\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def loaded(folder: Path, *overrides: str) -> Config:
    return load(write(folder, GOOD), overrides)


def problem(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write(folder, text), overrides)
    return str(caught.value)


def test_every_mistake_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    text = GOOD + "sampler:\n  num_generatoins: 4\n  temperature: -1\ntrainer:\n  max_steps: many\n"
    message = problem(tmp_path, text)
    path = tmp_path / "run.yaml"
    assert f"{path}:6: sampler.num_generatoins: no such option. Did you mean sampler.num_generations?" in message
    assert f"{path}:7: sampler.temperature: Input should be greater than or equal to 0.01, got -1" in message
    assert f"{path}:9: trainer.max_steps: Input should be a valid integer" in message
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.learning_rat", "trainer.learning_rate"),
        ("sampler.max_completion_len", "sampler.max_completion_length"),
        ("trainer.beta", "algorithm.beta"),  # right name, wrong section
        ("rewardz", "rewards"),
        ("algorithm.group_params.max_size", "algorithm.group_params.group_max_size"),
        ("algorithm.segment_rule", "algorithm.group_params.segment_rule"),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(tmp_path: Path, key: str, meant: str) -> None:
    assert f"{key}: no such option. Did you mean {meant}?" in problem(tmp_path, GOOD, f"{key}=1")


def test_required_settings_are_all_named_with_the_way_to_give_them(tmp_path: Path) -> None:
    message = problem(tmp_path, "model: {}\n")
    assert "model.path is required; add it to the file or give model.path=…" in message
    assert "data is required" in message


def test_overrides_have_the_type_that_yaml_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for override, value in {
        "trainer.learning_rate=1e-6": 1e-6,
        "trainer.max_steps=20": 20,
        "run.resume=true": True,
        "data.eval=null": None,
        "rewards.reward_funcs=[answer, my.py:length]": ["answer", "my.py:length"],
        "vllm.max_model_len=4096": 4096,
        "deepspeed.optimizer.params.lr=1e-6": 1e-6,  # a number where no field converts it
        "model.path=a=b": "a=b",
        "model.revision=3e8a91c0d1": "3e8a91c0d1",  # only begins like a number, or like off
        "data.train=offline.jsonl": "offline.jsonl",
        "run.output_dir=1e-6_sweep": Path("1e-6_sweep"),
        "weights.dir=~/weights": Path("/home/me/weights"),
        "model.path=~/models/x": "/home/me/models/x",
        "reference.path=~/x": "/home/me/x",
        "data.eval=~/x.jsonl@train[:8]": "/home/me/x.jsonl@train[:8]",
    }.items():
        found: Any = loaded(tmp_path, override)
        for name in override.partition("=")[0].split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert found == value, override


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("max_steps", "is not key=value"),
        ("=3", "is not key=value"),
        ("model.path.x=1", "model.path is not a section"),
        ("vllm.a=[", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_quoted_back(tmp_path: Path, override: str, said: str) -> None:
    message = problem(tmp_path, GOOD, override)
    assert repr(override) in message
    assert said in message


def test_an_empty_section_keeps_its_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD + "eval:\n  # steps: 5\n"), ["eval.steps=7"])
    assert config.eval.steps == 7


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = problem(tmp_path, GOOD + "trainer:\n  max_steps: 5\ntrainer:\n  save_steps: 5\n")
    assert message.startswith(f"{tmp_path / 'run.yaml'}:7: trainer ")
    assert "line 5" in message


@pytest.mark.parametrize(
    "text", [b"[1, 2]", b"model: [", b"just words", b"a: !!python/object/apply:os.getpid []", b"\xff\xfe\x00model"]
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"run\.yaml"):
        load(tmp_path / "run.yaml")


def test_a_missing_file_names_the_one_beside_it(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"rnu\.yaml: No such file.*Did you mean .*run\.yaml"):
        load(tmp_path / "rnu.yaml")
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path / "nowhere" / "run.yaml")


def test_on_is_a_name_in_a_file_and_off_is_still_false(tmp_path: Path) -> None:
    block = "deepspeed:\n  zero_optimization:\n    stage: 3\n    offload_optimizer: {device: cpu}\n"
    given = load(write(tmp_path, GOOD + block + "reference:\n  on: trainer\nvllm: {enforce_eager: off}\n"))
    assert (given.reference.on, given.vllm) == ("trainer", {"enforce_eager": False})
    assert given.deepspeed == {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def test_an_override_changes_no_section_that_is_an_alias_of_the_same(tmp_path: Path) -> None:
    text = GOOD + "reference: &start {path: a}\ncritic: *start\n"
    given = load(write(tmp_path, text), ["critic.path=b", "algorithm.adv_estimator=gae"])
    assert (given.reference.path, given.critic.path) == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        (["algorithm.beta=0"], None),
        (["algorithm.beta=0.1"], "trainer"),
        (["algorithm.beta=0.1", "trainer.max_staleness=1"], "sampler"),
        (["algorithm.beta=0.1", "algorithm.kl_in_reward=true"], "sampler"),
        (["algorithm.beta=0.1", "trainer.max_staleness=1", "reference.on=trainer"], "trainer"),
        (["algorithm.beta=0.1", "reference.on=sampler"], "sampler"),
    ],
    ids=str,
)
def test_the_trainer_scores_the_reference_unless_both_compute_all_the_time_or_rewards_need_it(
    tmp_path: Path, settings: list[str], side: str | None
) -> None:
    assert loaded(tmp_path, *settings).reference_on == side


# of a file that is right but for these, section.key=value: a part of what is said
REFUSED = {
    "rollout.": {
        "tools=[a.py:f] environment=a.py:C": "environment and tools are both given",
        "tools=[a.py:f,b.py:f]": "two functions named 'f'",
        'environment_kwargs={"n":1}': "set rollout.environment=my.py:Class",
        "max_turns=3": "rollout.max_turns does nothing",
    },
    "algorithm.": {
        "loss_type=cispo": "set algorithm.epsilon_high=5.0",
        "loss_type=cispo epsilon_high=0.28": "set algorithm.epsilon_high=5.0",
        "loss_type=cispo epsilon_high=5 importance_sampling_level=sequence": "importance_sampling_level=token",
        "loss_type=cispo epsilon_high=5 delta=6": "set algorithm.delta=null",
        "loss_type=cispo epsilon_high=5 epsilon=0.1": "remove algorithm.epsilon",
        "loss=dapo": "set algorithm.loss_type=dapo, and remove loss",
        "loss=mine.py:f loss_type=cispo epsilon_high=5": "set algorithm.loss_type=dapo",
        "loss=mine.py": "Write mine.py:function",
        "adv_estimator=grop": "Did you mean grpo? Built in: grpo, dr_grpo, rloo",
        "adv_estimator=mine.py": "Write mine.py:function",
        "adv_estimator=mine.py:f scale_rewards=batch": "mine.py:f divides by no deviation",
        "adv_estimator=mine.py:f lam=0.9": "mine.py:f has no gamma and no lam",
        "adv_estimator=rloo scale_rewards=group": "rloo divides by no deviation",
        "adv_estimator=rloo lam=0.95": "set adv_estimator=gae",
        "adv_estimator=gae scale_rewards=group": "gae divides by no deviation",
        "adv_estimator=gae multi_objective_aggregation=normalize_then_sum": "set algorithm.adv_estimator=grpo",
        "adv_estimator=reinforce_plus_plus dead_groups=skip": "set algorithm.dead_groups=keep",
        "adv_estimator=reinforce_plus_plus whiten_advantages=true": "whitens already",
        "multi_objective_aggregation=normalize_then_sum adv_estimator=rloo": "set algorithm.adv_estimator=grpo",
        "multi_objective_aggregation=normalize_then_sum soft_punish_cache=9": "normalize_then_sum does not form",
        "gamma=0.9": "grpo has no gamma and no lam",
        "gamma=1.5 adv_estimator=gae": "algorithm.gamma",
        "max_resamples=3": "set algorithm.dead_groups=resample",
        "shuffle_mini_batches=true": "set algorithm.steps_per_generation=4",
        "delta=1.2": "above 1 + epsilon_high = 1.2",
        "delta=1.25 epsilon_high=0.28": "above 1 + epsilon_high = 1.28",
        "kl_estimator=k2": "kl_estimator without a KL term in the loss",
        "kl_in_reward=true": "kl_in_reward without beta",
        "kl_in_reward=true beta=0.1 kl_estimator=k2": "kl_estimator without a KL term in the loss",
        "use_bias_correction_kl=true": "set algorithm.beta",
        "use_bias_correction_kl=true beta=0.1 kl_in_reward=true": "set algorithm.beta",
        "use_bias_correction_kl=true beta=0.1 importance_sampling_level=sequence": "importance_sampling_level=token",
        "use_bias_correction_kl=true beta=0.1 kl_estimator=k2": "set algorithm.kl_estimator=k3",
        "vllm_importance_sampling_clip_max=2": "without algorithm.vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_min=0.5": "without algorithm.vllm_importance_sampling_mode",
        "soft_punish_cache=257": "at most sampler.max_completion_length 256",
        "adv_estimator=gae group_params.group_max_size=8": "group_params does nothing with adv_estimator gae",
        "adv_estimator=group_ppo loss_type=dr_grpo": "segment_loss=segment",
        "adv_estimator=group_ppo importance_sampling_level=sequence": "segment_loss=segment",
        "adv_estimator=group_ppo vllm_importance_sampling_mode=sequence_mask": "use token_…",
        "adv_estimator=group_ppo group_params.segment_rule=literal": "set threshold_lr=0",
    },
    "lora.": {
        "alpha=16": "alpha does nothing without adapters; set lora.r=16",
        "sync=merged": "sync does nothing without adapters; set lora.r=16",
        "r=8 target_modules=[]": "write target_modules: all-linear",
        "r=8 target_modules=[q_proj,lm_head]": "target_modules lm_head: embedding and output head",
        "r=8 target_modules=[model.embed_tokens]": "target_modules model.embed_tokens: embedding and",
        "r=600": "vLLM applies adapters up to rank 512, r is 600; set lora.sync=merged",
    },
    "sampler.": {
        "top_p=0.9 top_k=null": "set sampler.top_k=50",
        "top_p=0.9 top_k=-1": "set sampler.top_k=50",
        "min_p=0.05 top_k=0": "set sampler.top_k=50",
        "top_k=1025": "top_k 1025",
    },
    "": {
        "eval.metric_for_best_model=answer/mean": "needs held-out problems; set data.eval=",
        "data.eval=e eval.metric_for_best_model=anwser/mean": "set eval.metric_for_best_model=answer/mean",
        'data.eval=[{"path":"e"},{"path":"f"}] eval.metric_for_best_model=g/answer/mean': "e/answer/mean",
        "data.eval=e eval.early_stopping_patience=2": "early_stopping_patience needs a metric",
        "data.eval=e eval.load_best_model_at_end=true": "load_best_model_at_end needs a metric",
        "data.eval=e eval.metric_for_best_model=answer/mean eval.early_stopping_patience=2": "set eval.steps=20",
        "algorithm.router_replay=true vllm.pipeline_parallel_size=2": "vllm.pipeline_parallel_size is above 1",
        "algorithm.router_replay=true vllm.enforce_eager=false": "remove vllm.enforce_eager",
        "algorithm.router_replay=true vllm.speculative_config={}": "does not follow vllm.speculative_config",
        "algorithm.router_replay=true sampler.in_flight_updates=true trainer.max_staleness=1": "tokens elsewhere",
        "lora.r=16 vllm.max_lora_rank=8": "vllm.max_lora_rank 8 is below lora.r 16; remove it",
        "lora.r=16 vllm.enable_lora=false": "vllm.enable_lora follows from lora.r; remove it",
        "data.max_prompt_length=500 vllm.max_model_len=755": "= 756 tokens > vllm.max_model_len 755; set vllm",
        "sampler.devices=[0,1] trainer.devices=[1,2]": "GPU 1 is in sampler.devices [0, 1] and in",
        "trainer.max_steps=10 algorithm.num_iterations=4": "trainer.max_steps=12",
        "trainer.max_steps=12 algorithm.num_iterations=2 algorithm.steps_per_generation=4": "trainer.max_steps=16",
        "critic.learning_rate=1e-4": "does nothing with algorithm.adv_estimator grpo",
        "critic.critic_warmup_steps=5": "set algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=gae critic.critic_warmup_steps=200": "leaves the policy none of trainer.max_steps",
        "algorithm.adv_estimator=gae critic.cliprange_value=0": "critic.cliprange_value",
        "rewards.reward_funcs=[environment]": "reward 'environment' needs one",
        "rollout.tools=[a.py:f] rewards.reward_funcs=[environment]": "rollout.tools give no reward",
        "rollout.tools=[a.py:f] sampler.num_generations=257": "set sampler.num_generations=256",
        "rollout.tools=[a.py:f] eval.num_generations=257 eval.temperature=1": "set eval.num_generations=256",
        "rewards.reward_weights=[1.0]": "1 numbers for 2 reward_funcs; write [1.0, 1.0]",
        "rewards.reward_funcs=[]": "no reward counts, and there is no teacher",
        "rewards.reward_funcs=[answer,mine.py:answer]": "two functions named 'answer'",
        "vllm.enable_sleep_mode=true trainer.max_staleness=1": "set trainer.max_staleness=0",
        "vllm.logprobs_mode=raw_logprobs": "vllm.logprobs_mode 'raw_logprobs'",
        "vllm.seed=0": "remove it, and set run.seed",
        "vllm.seed=null": "the same noise",
        "reference.on=trainer algorithm.beta=0.1 algorithm.kl_in_reward=true": "set reference.on=sampler",
        'sampler.generation_kwargs={"min_tokens":9}': "set sampler.top_k=1024",
        'sampler.generation_kwargs={"repetition_penalty":1.2}': "unknown to the trainer; remove it",
        'sampler.top_k=50 sampler.generation_kwargs={"temperature":2}': "temperature is none of min_tokens, bad_words",
        "trainer.epochs=2 trainer.max_steps=40": "both given; remove one, as in trainer.epochs=null",
        "trainer.epochs=2 trainer.max_steps=200": "both given",
        "trainer.epochs=.inf": "should be a finite number",
        "rewards.reward_weights=[1,.nan]": "should be a finite number",
        "run.log_completions=true": "set run.report_to=[wandb]",
        "reference.sync_steps=5 algorithm.beta=0.1 trainer.max_staleness=1": "set algorithm.beta=0.04 reference.on",
        "reference.sync_steps=5 algorithm.beta=0.1 lora.r=4": "reference.on=trainer lora.r=0",
        "reference.sync_steps=5 algorithm.beta=0.1 algorithm.num_iterations=2": "batches of 2 steps; set 6",
    },
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (" ".join(prefix + word for word in given.split()), said)
        for prefix, table in REFUSED.items()
        for given, said in table.items()
    ],
)
def test_what_contradicts_itself_is_refused_with_what_to_write(tmp_path: Path, given: str, said: str) -> None:
    assert said in problem(tmp_path, GOOD, *given.split())


@pytest.mark.parametrize(
    "settings",
    [
        "data.max_prompt_length=500 vllm.max_model_len=756",
        "sampler.devices=[1] trainer.devices=[1]",
        "algorithm.soft_punish_cache=256",
        "vllm.enable_sleep_mode=true trainer.max_staleness=0",
        "rollout.tools=[a.py:f] sampler.num_generations=256",
        "rollout.environment=a.py:C rewards.reward_funcs=[environment]",
        "algorithm.adv_estimator=gae critic.learning_rate=1e-4 algorithm.lam=0.95 critic.critic_warmup_steps=199",
        "algorithm.adv_estimator=group_ppo critic.learning_rate=1e-4 algorithm.lam=0.95",
        "algorithm.loss_type=cispo algorithm.epsilon_high=1.5",
        "channel.endpoint=tcp://10.0.0.1:5555",
        "channel.endpoint=tcp://node-7:5555",
        "channel.endpoint=ipc:///run/user/me/inbox",
    ],
)
def test_settings_at_their_limits_agree(tmp_path: Path, settings: str) -> None:
    config = loaded(tmp_path, *settings.split())
    assert config.rollout.is_multi_turn == settings.startswith("rollout.")
    assert config.algorithm.needs_critic == ("critic" in settings)


BAD_ADDRESSES = (
    "10.0.0.1:5555 tcp://10.0.0.1 tcp://:5555 tcp://host:0 tcp://host:99999 tcp://host:port tcp://*:5555 "
    "tcp://0.0.0.0:5555 tcp://10.0.0.1:5555/path udp://10.0.0.1:5555 ipc:// inproc://x ipc:///tmp/" + 200 * "x"
)


@pytest.mark.parametrize("address", BAD_ADDRESSES.split())
def test_an_address_that_one_side_cannot_use_is_refused_with_one_that_both_can(tmp_path: Path, address: str) -> None:
    message = problem(tmp_path, GOOD + f"channel:\n  endpoint: '{address}'\n")
    assert message.startswith(f"{tmp_path / 'run.yaml'}:6: channel.endpoint: not an address that both sides can use")
    assert message.endswith(f"write tcp://10.0.0.1:5555, tcp://[fd00::1]:5555, or null on one host, got '{address}'")


@pytest.mark.parametrize(
    ("prompts", "micro", "ranks", "micro_batches", "says"),
    [
        (8, 4, 3, 1, "3 groups a step, the others 2 and then wait. Even would be trainer.prompts_per_step=6 or 9"),
        (1, 1, 3, 1, "1 groups a step, the others 0 and then wait. Even would be trainer.prompts_per_step=3"),
        (24, 3, 2, 4, ""),  # 24 groups, 2 ranks, 3 each: 24 / 6
        (10, 4, 2, 2, ""),
    ],
)
def test_micro_batches_per_rank_and_ranks_that_will_wait(
    tmp_path: Path, prompts: int, micro: int, ranks: int, micro_batches: int, says: str
) -> None:
    config = loaded(tmp_path, f"trainer.prompts_per_step={prompts}", f"trainer.groups_per_micro_batch={micro}")
    assert config.micro_batches(ranks) == micro_batches
    assert (config.uneven_work(ranks) or "").endswith(says) and bool(config.uneven_work(ranks)) == bool(says)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_file_we_ship_is_valid(path: Path) -> None:
    load(path)
