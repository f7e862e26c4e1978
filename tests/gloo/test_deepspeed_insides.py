"""What an upgrade of DeepSpeed took away of what trainer/engine/deepspeed_insides.py reads or replaces, by name."""

import inspect
from pathlib import Path

import pytest


def test_an_engine_still_has_what_is_replaced_in_it() -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name in ("_copy_recovery_script", "clip_fp32_gradients", "save_checkpoint", "load_checkpoint"):
        assert callable(getattr(DeepSpeedEngine, name)), name
    for name in ("save", "load", "makedirs"):
        assert callable(getattr(TorchCheckpointEngine, name)), name
    source = inspect.getsource(DeepSpeedEngine)
    for used in ("self.checkpoint_engine.save(", "self.checkpoint_engine.load(", "self.checkpoint_engine.makedirs("):
        assert used in source, used
    assert "self._copy_recovery_script(" in source and "self.clip_fp32_gradients()" in source


def test_what_keeps_modules_of_zero_3_is_still_the_list_and_the_cache_that_are_emptied() -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    assert isinstance(parameter_offload.FWD_MODULE_STACK, list)
    assert "FWD_MODULE_STACK.append(self.module)" in inspect.getsource(parameter_offload.DeepSpeedZeRoOffload)
    wrapper = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    assert inspect.getclosurevars(wrapper).nonlocals["func"].cache_info().maxsize is None


def test_the_shared_buffer_of_ranks_on_a_cpu_has_the_name_that_is_unlinked() -> None:
    import deepspeed

    sources = list(Path(deepspeed.__file__).parent.glob("ops/csrc/cpu/comm/shm.cpp"))
    if not sources:
        pytest.skip("DeepSpeed came without its sources")
    assert "deepspeed_allreduce_buffer" in sources[0].read_text()
