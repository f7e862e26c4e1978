"""A shard is the library's file, hashed while it is written; the memory of copies is used again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common import weights
from trainer.save.shard_file import HostCopies, write_shard

TENSORS: dict[str, dict[str, Tensor]] = {
    "a model": {f"model.layers.{i}.weight": torch.randn(3, 5).bfloat16() for i in (10, 9, 1)},
    "several widths": {"b": torch.randn(3), "a": torch.randn(2, 2).half(), "c": torch.randn(1), "A": torch.ones(3)},
    "odd shapes": {"nothing": torch.ones(0, 4), "one number": torch.tensor(2.5), "three": torch.ones(3).bfloat16()},
    "names": {"größe": torch.ones(2), 'with "quotes"\n': torch.ones(1), "z" * 200: torch.ones(1)},
    "no tensor": {},
}


@pytest.mark.parametrize("kind", TENSORS)
def test_the_file_is_the_librarys_byte_for_byte_and_the_digest_that_of_the_file(kind: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = write_shard(ours, TENSORS[kind])
    save_file(TENSORS[kind], theirs, metadata={"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert found == weights.file_info(theirs)


def test_a_disk_that_is_full_is_an_error_of_the_disk() -> None:
    with pytest.raises(OSError) as raised:
        write_shard(Path("/dev/full"), {"a": torch.ones(1 << 20)})
    assert raised.value.errno == errno.ENOSPC


def test_the_memory_of_a_copy_is_used_again_by_the_next_one_of_its_name_and_shape() -> None:
    host, first = HostCopies(), torch.tensor([1.0, 2.0])
    copied = host.copy("a", first)
    first[0] = 7
    assert copied.tolist() == [1.0, 2.0]
    host.wait()
    again = host.copy("a", first)
    assert again.data_ptr() == copied.data_ptr() and again.tolist() == [7.0, 2.0]
    assert host.copy("b", first).data_ptr() != copied.data_ptr()
    assert host.copy("a", torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert host.copy("a", torch.ones(2).bfloat16()).dtype == torch.bfloat16
