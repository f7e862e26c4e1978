"""What an upgrade of DeepSpeed took away of what trainer/engine/deepspeed_insides.py reads or replaces, by name."""

import inspect


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
