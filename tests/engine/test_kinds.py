"""Reloads of every kind of model in a real engine: right, proven, and refused where a part of one is missing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checksum import describe
from sampler import vllm_insides
from sampler.engine_arguments import set_environment
from sampler.engine_tensors import Proof
from tests.support.configs import config_of
from tests.support.engines import kept
from tests.support.kinds import KINDS, save_kind
from tests.support.tier import full
from trainer.engine.exported import parameters, under_checkpoint_names

pytestmark = pytest.mark.timeout(300)

ELSEWHERE = ("olmo2", "qwen3_5_text", "lfm2")  # engines of these need more than vLLM's own arguments
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss")
NEVER_TIED = ("glm4_moe", "deepseek_v3", "gpt_oss")  # vLLM's classes keep a head of their own
FIRST = ("qwen3_moe", False)
CASES = [(k, tied) for k in KINDS if k not in ELSEWHERE for tied in (False, True) if not (tied and k in NEVER_TIED)]
PARAMETERS = [
    pytest.param(*case, id=f"{case[0]}{', tied' * case[1]}", marks=() if case == FIRST else full) for case in CASES
]
PROMPT = list(range(5, 40))


class Pair:
    """vLLM's model and transformers', of one folder."""

    def __init__(self, folder: Path):
        set_environment(config_of(model={"path": str(folder)}), on_cpu=True)
        from transformers import AutoModelForCausalLM
        from vllm import LLM

        vllm_insides.rotate_every_head()
        self.llm: Any = kept(
            LLM(  # type: ignore[arg-type]
                str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
                enforce_eager=True, enable_prefix_caching=False, enable_chunked_prefill=False, generation_config="vllm",
                max_num_batched_tokens=2048, logprobs_mode="processed_logprobs", kv_cache_memory_bytes=1 << 26,
                worker_extension_cls="sampler.vllm_worker.WeightExtension",
            )
        )  # fmt: skip
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.exported = under_checkpoint_names(self.model, parameters(self.model))

    @torch.no_grad()
    def train(self, seed: int) -> dict[str, Tensor]:
        """Every parameter moves. What is then published."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
        return {t.name: t.make().clone() for t in self.exported}

    def load(self, tensors: dict[str, Tensor]) -> Proof:
        [proof] = self.llm.collective_rpc(
            "load_weights_from", args=("nowhere", {n: describe(t) for n, t in tensors.items()}, tensors)
        )
        return proof

    @torch.no_grad()
    def distance(self) -> float:
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=12, logprobs=0, seed=3, detokenize=False, ignore_eos=True)
        [request] = self.llm.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
        ids = list(request.outputs[0].token_ids)
        theirs = [entry[token].logprob for entry, token in zip(request.outputs[0].logprobs, ids, strict=True)]
        logits = self.model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        return float((logits.gather(-1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(theirs)).abs().max())


@pytest.mark.parametrize(("kind", "tied"), PARAMETERS)
def test_every_reload_is_right_and_proven_and_a_loader_that_does_nothing_is_refused(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """A worker whose first version is none that it started with, as one that was started again."""
    pair = Pair(save_kind(kind, tmp_path / kind, tie_word_embeddings=tied))
    bound = 2e-5 if kind == "gemma4_text" else 1e-5
    for seed in range(3):
        tensors = pair.train(seed)
        proof = pair.load(tensors)
        assert (proof.wrong, proof.proven | proof.unproven.keys()) == ([], tensors.keys())
        assert pair.distance() < bound
    if kind in MIXTURES:
        assert {n for n in tensors if ".experts." in n} <= proof.proven, "experts are compared where they stand"
    reasons = {why.partition(": ")[2] for why in proof.unproven.values()}
    assert reasons <= {"vLLM packed it for a CPU", "vLLM computes with it as it loads it"}
    figure("R4", f"{kind}: {len(proof.proven)} of {len(tensors)} tensors proven, {len(proof.unproven)} not ({reasons})")
    newest = pair.train(4)
    for part in ("layers.1.", "layernorm", ""):
        with monkeypatch.context() as patch:
            reload_weights = pair.worker.reload_weights
            patch.setattr(
                pair.worker,
                "reload_weights",
                lambda weights_iterator, part=part, load=reload_weights: load(
                    weights_iterator=((n, t) for n, t in weights_iterator if part not in n)
                ),
            )
            assert pair.load(newest).wrong
    assert pair.load(newest).wrong == [] and pair.distance() < bound
    assert not math.isnan(pair.distance())
