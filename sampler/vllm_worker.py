"""What runs inside vLLM's worker: load a checked folder, and prove that the whole model uses it.

vLLM 0.32 on CPU keeps the *old* LM head after `reload_weights` when it is tied to the embedding, because linear
layers hold a packed copy: log-probs are off by more than 1, in silence. The repair below is the published one: tie
again, pack again; only once, for the embedding itself multiplies nothing. Loaded by name through
`worker_extension_cls`; vLLM mixes it into its worker class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from common.exits import die_with_parent
from common.watchdog import report_progress
from model.cpu.repeated_rows import RepeatedRows
from sampler.base_weights import prove_base
from sampler.engine_tensors import Packed, Part, layout, packed_of, prove, prove_adapters
from sampler.proof import Expected, Proof

if TYPE_CHECKING:
    from torch import Tensor


class WeightExtension:
    model_runner: Any  # vLLM's worker provides both
    reload_weights: Any
    repeated_rows: RepeatedRows | None = None

    def report_layers(self) -> None:
        """From now on: on a CPU one forward pass may take longer than a sampler may be silent."""
        _, language = language_model(self.model_runner.model)
        for layer in getattr(language.model, "layers", ()):
            layer.register_forward_pre_hook(lambda *_: report_progress("generating"))

    def end_with_engine(self) -> None:
        """In a worker that is a process of its own. When its engine is killed vLLM's ends by itself, unless it is
        stopped, or waits for ever while it tells its own reader (SpinCondition.cancel): then it would keep its GPU.
        """
        die_with_parent()

    def compute_rows_once(self, attention: type, context: Callable[[], Any]) -> None:
        """From now on: repeated_rows.py. On a CPU, where every row counts and looking at them costs nothing.

        attention, context: vllm's Attention and get_forward_context.
        """
        settings = self.model_runner.vllm_config
        _, language = language_model(self.model_runner.model)
        if settings.lora_config is None and settings.parallel_config.pipeline_parallel_size == 1:
            attentions = [module for module in language.modules() if isinstance(module, attention)]
            block_size = settings.cache_config.block_size
            self.repeated_rows = RepeatedRows(language.model, attentions, lambda: context().attn_metadata, block_size)

    def num_spared_rows(self) -> int:
        """So far, by `compute_rows_once`."""
        return self.repeated_rows.spared if self.repeated_rows else 0

    def load_weights_from(
        self, path: str, expected: Mapping[str, Expected] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> Proof:
        """Replaces all parameters by the safetensors files in `path` and compares them with what was published.

        Any exception, and a proof with anything wrong, leaves the engine unusable. Without `expected` nothing is
        compared. tensors: the files' own; without them vLLM maps the files once more.
        """
        model = self.model_runner.model
        prefix, language = language_model(model)
        is_tied = getattr(language.config, "tie_word_embeddings", False)
        if expected is None:
            self._reload(path, tensors, sees=bool(prefix))
            if is_tied:
                _tie_again(language)
            return Proof()
        with _watch_packing(model, expected) as packed:
            self._reload(path, tensors, sees=bool(prefix))
            if is_tied:
                packed[f"{prefix}lm_head"] = _tie_again(language)
        return prove(model, expected, packed)

    def _reload(self, path: str, tensors: Mapping[str, Tensor] | None, sees: bool) -> None:
        """Afterwards vLLM would look for the next image's processor in `path`, which is soon gone: give it its own."""
        if tensors is not None:
            self.reload_weights(weights_iterator=iter(tensors.items()))
            return
        if not sees:
            self.reload_weights(weights_path=path)
            return
        config = self.model_runner.model_config
        own = config.model, config.revision
        try:
            self.reload_weights(weights_path=path)
        finally:
            config.model, config.revision = own

    def compare_base(self, expected: Mapping[str, Expected]) -> Proof:
        """Compares the weights under the adapters."""
        return prove_base(self.model_runner.model, expected)

    def compare_adapter(self, number: int, expected: Mapping[str, Expected]) -> Proof:
        """Compares the adapter that was loaded under this number."""
        manager = self.model_runner.lora_manager._adapter_manager
        if number not in manager.lora_index_to_id:
            return Proof(wrong=[f"the engine has the adapters {manager.lora_index_to_id} and not {number}"])
        index = manager.lora_index_to_id.index(number)
        return prove_adapters(manager.modules, manager.model, index, expected)


def language_model(model: Any) -> tuple[str, Any]:
    """(path with its dot, the part with embedding and head): a vision model has it one level down."""
    inner = getattr(model, "language_model", None)
    return ("", model) if inner is None else ("language_model.", inner)


def _tie_again(model: Any) -> Packed:
    """One packed copy for both: the embedding's own is never used and would be as large."""
    embedding, head = model.model.embed_tokens, model.lm_head
    head.weight = embedding.weight
    repack = getattr(head.quant_method, "process_weights_after_loading", None)
    if repack is not None:
        repack(head)
    product = head.__dict__.get("cpu_linear")
    if "cpu_linear" in embedding.__dict__:
        embedding.cpu_linear = product
    return Packed(product, list(head.weight.shape), None)


@contextmanager
def _watch_packing(model: Any, expected: Mapping[str, Expected]) -> Iterator[dict[str, Packed]]:
    """{path of a layer: what its product was packed of}, filled while vLLM packs; one progress report per layer."""
    packed: dict[str, Packed] = {}
    parts, _ = layout(model, expected)
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    _, language = language_model(model)
    is_tied = getattr(language.config, "tie_word_embeddings", False)
    watched = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        pack = getattr(method, "process_weights_after_loading", None)
        if pack is not None and "process_weights_after_loading" not in vars(method):
            is_idle = is_tied and module is language.model.embed_tokens  # see _tie_again
            pack = (lambda _: None) if is_idle else _noting(pack, paths, parts, expected, packed)
            method.process_weights_after_loading = pack  # type: ignore[union-attr]
            watched.append(method)
    try:
        yield packed
    finally:
        for method in watched:
            del method.process_weights_after_loading  # type: ignore[union-attr]


def _noting(
    pack: Callable[[Any], None],
    paths: Mapping[int, str],
    parts: Mapping[str, list[Part]],
    expected: Mapping[str, Expected],
    packed: dict[str, Packed],
) -> Callable[[Any], None]:
    """`pack`, which then notes what the layer's matrix was, if it is gone or has a packed copy now."""

    def pack_and_note(layer: Any) -> None:
        path, weight = paths[id(layer)], getattr(layer, "weight", None)
        pack(layer)
        report_progress("loading weights")
        product, now = layer.__dict__.get("cpu_linear"), getattr(layer, "weight", None)
        is_changed = now is None or weight is None or (now.shape, now.dtype) != (weight.shape, weight.dtype)
        if weight is not None and (product is not None or is_changed):
            packed[path] = packed_of(weight.data, product, parts.get(f"{path}.weight", []), expected)

    return pack_and_note
