"""The memory of copies is used again."""

import torch

from trainer.save.host_copies import HostCopies


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
