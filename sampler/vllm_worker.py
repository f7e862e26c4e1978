"""What runs inside vLLM's worker: load a checked folder and make sure that the whole model uses it.

vLLM 0.32 on CPU keeps the *old* LM head after `reload_weights` when it is tied to the embedding, because linear
layers hold a packed copy: log-probs are off by more than 1, in silence. The repair below is the published one: tie
again, pack again. Loaded by name through `worker_extension_cls`; vLLM mixes it into its worker class.
"""

from __future__ import annotations

from typing import Any


class WeightExtension:
    model_runner: Any  # vLLM's worker provides both
    reload_weights: Any

    def load_weights_from(self, path: str) -> None:
        """Replaces all parameters by the safetensors files in `path`. Any exception leaves the engine unusable."""
        self.reload_weights(weights_path=path)
        model = self.model_runner.model
        if getattr(model.config, "tie_word_embeddings", False):
            model.lm_head.weight = model.model.embed_tokens.weight
            repack = getattr(model.lm_head.quant_method, "process_weights_after_loading", None)
            if repack is not None:
                repack(model.lm_head)
