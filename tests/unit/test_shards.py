"""A shard's tensors are views of one mapping, which nothing that is written to them leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.verified_copy import map_privately
from common.weights import BadWeights
from model.shards import tensors_of

TENSORS: dict[str, Tensor] = {
    "wide": torch.randn(3, 5),
    "narrow": torch.randn(7, 3).bfloat16(),
    "half": torch.randn(3).half(),
    "nothing": torch.ones(0, 4),
    "one number": torch.tensor(2.5).bfloat16(),
    "whole numbers": torch.arange(4),
}


@pytest.mark.parametrize("is_mapped", [False, True])
def test_they_are_what_the_library_saved(tmp_path: Path, is_mapped: bool) -> None:
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    with open(path, "rb") as file:
        found = tensors_of(path, map_privately(file) if is_mapped else None)
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert torch.equal(tensor, TENSORS[name])


def test_they_outlive_the_file_and_what_is_written_to_them_does_not_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    before = path.read_bytes()
    found = tensors_of(path)
    found["wide"][0] = 7
    assert path.read_bytes() == before
    path.unlink()
    assert torch.equal(found["narrow"], TENSORS["narrow"])


def test_a_dtype_that_no_policy_has_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "a.safetensors")
    with pytest.raises(BadWeights, match="numbers of the dtype I8"):
        tensors_of(tmp_path / "a.safetensors")
