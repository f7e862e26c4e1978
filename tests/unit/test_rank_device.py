"""Several ranks on one GPU: which one each rank takes."""

import pytest

from trainer.engine.rank_device import set_device


def test_each_rank_sees_one_gpu_as_its_first() -> None:
    environ = {"TANDEM_RANK_DEVICES": "3,5,3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    set_device(environ)
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["LOCAL_RANK"]) == ("5", "0")


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, {"RANK": "0"}])
def test_ranks_with_gpus_of_their_own_are_left_alone(environ: dict[str, str]) -> None:
    before = dict(environ)
    set_device(environ)
    assert environ == before
