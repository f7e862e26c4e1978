"""The ranks that vLLM is not asked to count."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sampler.token_ranks import count_no_ranks


def test_every_token_of_a_step_has_a_rank_that_vllm_never_counts() -> None:
    def counted(logprobs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (logprobs >= chosen).sum(-1)

    sampler, logprobs = SimpleNamespace(batched_count_greater_than=counted), torch.tensor([[-3.0, -0.1], [-0.7, -0.7]])
    chosen = logprobs[:, :1]
    assert sampler.batched_count_greater_than(logprobs, chosen).tolist() == [2, 2]
    count_no_ranks(sampler)
    ranks = sampler.batched_count_greater_than(logprobs, chosen)
    assert ranks.tolist() == [0, 0]
    assert ranks.dtype == torch.int64
