"""The trainer's forwards on a GPU that is not there: is every tensor on the device, and does nothing wait for it?

    python tools/benchmarks/fake_cuda.py            needs torch's CUDA build, and no GPU; half a minute
    python tools/benchmarks/fake_cuda.py --cpu      the same passes on a CPU, with any build

torch's fake tensors have shapes, dtypes and a device, here cuda:0, but no contents. An operation between two devices
raises, and so does every question for a value, or for a shape that depends on values: `.item()`, `nonzero`, an index
made of booleans. At each of those the program would wait for its GPU. Copies to the host wait as well and are counted:
scores that go to the host take one each; a micro-batch's forward, objective and sums must take none.

The code is that of the trainer: PolicyEngine, Critic and Reference, without DeepSpeed around the module, and the
checksums of a version. Left out, because torch cannot do it on a device that is not there: backward, the optimizer
step, a version's copies to pinned memory and what is compiled; and every number.
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from common import exits  # noqa: E402
from common.config import Config  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.types import Group, Rollout  # noqa: E402
from model import attention  # noqa: E402
from model.checksum import device_sums, words_of  # noqa: E402
from model.reference import Reference  # noqa: E402
from model.stopwatch import Stopwatch  # noqa: E402
from trainer.algorithm.losses import Denominator  # noqa: E402
from trainer.algorithm.sums import TOKEN_SUMS, VALUE_SUMS, Sums  # noqa: E402
from trainer.data.experience import Experience, score_rewards  # noqa: E402
from trainer.data.tensors import MicroBatch, ValueBatch, micro_batch  # noqa: E402
from trainer.engine import critic  # noqa: E402
from trainer.engine.policy import Policy, PolicyEngine  # noqa: E402

VERSION, VOCABULARY, CHUNK = 3, 512, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped heads, as in every model that is trained here
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo with a reference": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "sequence ratios, dual clip": {"importance_sampling_level": "sequence", "delta": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "mismatch correction": {"num_iterations": 2, "vllm_importance_sampling_mode": "token_mask"},
}


_indexes = attention._indexes


@dataclass(frozen=True)
class Pass:
    """One forward of the trainer, and how often it may copy to the host."""

    name: str
    run: Callable[[], object]
    to_host: int = 0


class CopiesToHost(TorchDispatchMode):
    """Counts tensors that leave the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_on_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        self.count += is_on_host and any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in args)
        return result


class Module:
    """What PolicyEngine and Critic need of DeepSpeed's engine for a forward."""

    global_steps = 0

    def __init__(self, module: torch.nn.Module, device: torch.device):
        self.module, self.device = module, device
        self.train, self.eval = module.train, module.eval

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        assert loss.device == self.device and loss.shape == ()


def require_cuda_build() -> None:
    """Raises UserError with torch's CPU build: under it autograd aborts the process at the first fake GPU tensor."""
    if torch.version.cuda is None:
        raise UserError(
            f"torch {torch.__version__} is the CPU build, which cannot even pretend to have a GPU. In its own "
            "environment: python3.11 -m venv .cache/cuda && .cache/cuda/bin/pip install -r requirements.txt -c "
            "tools/locks/gpu.lock && .cache/cuda/bin/python tools/benchmarks/fake_cuda.py. On the CPU instead: --cpu"
        )


def settings(**algorithm: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none.jsonl"},
            "sampler": {"temperature": 0.7},
            "trainer": {"logprob_chunk_size": CHUNK},
            "algorithm": algorithm,
        }
    )


def group(group_id: int, version: int, beta: float) -> Group:
    """Three completions of different lengths, more tokens than a chunk of the head."""
    rng = np.random.default_rng(group_id)

    def rollout(length: int, reward: float) -> Rollout:
        level = rng.normal(-6.0, 0.5, (2, length)).astype(np.float32)
        ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
        return Rollout(ids, level[0], level[1] if beta else None, {"answer": reward}, reward, "stop")

    prompt = rng.integers(0, VOCABULARY, 7).astype(np.int32)
    return Group(group_id, version, group_id, prompt, (rollout(9, 1.0), rollout(5, 0.0), rollout(12, 0.5)))


def batch_of(config: Config, packing: Any) -> MicroBatch:
    """Two groups, one of the present version and one of the version before. On the host, with contents."""
    groups = [Experience(group(i, VERSION - i, config.algorithm.beta)) for i in (0, 1)]
    scored = score_rewards(groups, config)
    with unset_fake_temporarily():
        return micro_batch(scored, Denominator(config.algorithm.loss_type, 6, 52, 16), config.algorithm, packing)


def with_earlier_logprobs(batch: MicroBatch) -> MicroBatch:
    """As in a later pass over the same groups: the own log-probs of the first pass are known, of some tokens."""
    with unset_fake_temporarily():
        known = torch.full_like(batch.old_logprobs, math.nan)
        known[::2] = -6.0
        return replace(batch, sampled_logprobs=known, proximal_logprobs=batch.old_logprobs)


def build(kind: Any, device: torch.device, **more: Any) -> Any:
    """A model without contents, in bfloat16 as on a GPU."""
    from transformers import AutoConfig

    attention.register()
    config = AutoConfig.for_model("qwen2", **SHAPE, pad_token_id=0, **more)
    with torch.device(device):
        return kind.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)


def policy_of(config: Config, device: torch.device) -> PolicyEngine:
    from transformers import AutoModelForCausalLM

    model = build(AutoModelForCausalLM, device)
    engine: Any = PolicyEngine.__new__(PolicyEngine)
    engine.config, engine.model, engine.world_size, engine._micro_batch = config, model, 2, 0
    engine.ds = Module(Policy(model, CHUNK, config.algorithm.entropy_coef > 0), device)
    engine.sums = Sums(TOKEN_SUMS, device)
    engine.head_time = Stopwatch(torch.device("cpu"))  # CUDA's events need a driver
    engine.ds.train()
    return engine


def critic_of(config: Config, device: torch.device) -> critic.Critic:
    from transformers import AutoModelForSequenceClassification

    model = build(AutoModelForSequenceClassification, device, num_labels=1)
    model.score = critic._head(model.score, fresh=True)
    made: Any = critic.Critic.__new__(critic.Critic)
    made.config, made.model, made.world_size, made.sums = config, model, 2, Sums(VALUE_SUMS, device)
    made.ds = Module(critic.ValueModel(model), device)
    return made


class EmptyReference(Reference):
    """A reference whose weights come from nowhere."""

    @staticmethod
    def _load(config: Config, device: torch.device) -> Any:
        from transformers import AutoModelForCausalLM

        return build(AutoModelForCausalLM, device).eval()


def passes(device: torch.device) -> Iterator[Pass]:
    """Every forward that the trainer makes."""

    def trained(what: str, batch: MicroBatch, engine: PolicyEngine) -> Pass:
        return Pass(f"policy, micro-batch: {what}", lambda: engine.backward(batch, VERSION))

    for name, algorithm in OBJECTIVES.items():
        config = settings(**algorithm)
        yield trained(name, batch_of(config, "shared"), policy_of(config, device))
    config = settings()
    batch, engine = batch_of(config, "shared"), policy_of(config, device)
    yield trained("a second pass", with_earlier_logprobs(batch), engine)
    for packing in ("flat", "off"):
        yield trained(f"packing {packing}", batch_of(config, packing), engine)
    to_host = int(device.type == "cuda")
    yield Pass("policy, log-probs", lambda: engine.score(batch.row, 1.0), to_host)
    sums = [partial(device_sums, words_of(p.detach())) for p in engine.model.parameters()]
    yield Pass("publishing, checksums", lambda: [one() for one in sums])
    yield Pass("policy, score norms", lambda: engine.score_norms(batch.row), to_host)
    engine.model.gradient_checkpointing_enable({"use_reentrant": False})
    yield trained("gradient checkpointing", batch, engine)
    yield Pass("reference, log-probs", lambda: EmptyReference(config, device).score(batch.row), to_host)
    values, of_tokens = critic_of(config, device), batch.weights
    yield Pass("critic, micro-batch", lambda: values.backward(ValueBatch(batch.row, *[of_tokens] * 3)))
    yield Pass("critic, values", lambda: values.score(batch.row), to_host)


def stand_in() -> None:
    """Replaces what fake tensors cannot do, in this process: see each function. And torch asks the GPU's driver whether
    it has flash attention; here it has, as every GPU from Ampere on."""
    from torch.nn.attention import bias

    vars(attention).update(_indexes=indexes_made_on_the_host, _described_past=past_made_on_the_host)
    torch.Tensor.numpy = numpy_of  # type: ignore[method-assign,assignment]
    bias.can_use_flash_attention = lambda *_: True  # type: ignore[assignment]


def indexes_made_on_the_host(lengths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """attention._indexes with contents: it asks the host's own memory, which no GPU has to be waited for."""
    with unset_fake_temporarily():
        rows, real = _indexes(lengths, torch.device("cpu"))
    return rows.to(device), real.to(device)


def past_made_on_the_host(queries: int, keys: int) -> Any:
    """attention._described_past: a tensor of another class, which a fake one cannot become."""
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def numpy_of(tensor: torch.Tensor, **options: Any) -> Any:
    """Tensor.numpy: of a tensor of the host with its contents, which dispatch would take away; of no other."""
    if isinstance(tensor, FakeTensor):
        raise RuntimeError("numpy() asks for the contents of a tensor that comes from the device")
    with unset_fake_temporarily():
        return torch._C.TensorBase.numpy(tensor, **options)


def outcome(one: Pass) -> str:
    """ "" if it ran as it should; else what happened and where in this repository."""
    with CopiesToHost() as copies:
        try:
            one.run()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if Path(f.filename).is_relative_to(ROOT) and "benchmarks" not in f.filename]
            at = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}: " if ours else ""
            return f"{at}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "" if copies.count == one.to_host else f"{copies.count} copies to the host, expected {one.to_host}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each pass. Raises UserError with the wrong build, or if a pass failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the same passes with fake tensors on the CPU")
    on_cpu = parser.parse_args(arguments).cpu
    if not on_cpu:
        require_cuda_build()
    device = torch.device("cpu") if on_cpu else torch.device("cuda:0")
    print(f"torch {torch.__version__}, fake tensors on {device}")
    stand_in()
    failed = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for one in passes(device):
            trouble = outcome(one)
            failed += bool(trouble)
            print(f"{'FAIL' if trouble else 'ok':>4}  {one.name}{': ' if trouble else ''}{trouble}", flush=True)
    if failed:
        raise UserError(f"{failed} passes failed")


if __name__ == "__main__":
    sys.exit(exits.run("fake_cuda", main))
