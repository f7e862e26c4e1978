"""What an upgrade of vLLM or transformers took away of what the sampler reads or replaces, by name."""

import pkgutil
from typing import Any

import pytest

from sampler.engine import vllm_insides, vllm_patches
from sampler.engine.engine import Engine
from tests.support.engines import worker_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=[{}, {"lora": {"r": 4, "alpha": 12}}], ids=["whole", "adapters"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def model(engine: Engine) -> Any:
    return worker_of(engine).model_runner.model


def test_a_models_layers_its_fused_ones_and_their_parts_are_found(model: Any) -> None:
    layers = vllm_insides.layers_of(model)
    assert len(layers) == 2
    assert vllm_insides.fused_layers(model) == {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    fused = layers[0].mlp.gate_up_proj
    fused = getattr(fused, "base_layer", fused)
    assert len(set(vllm_insides.rows_of_parts(fused))) == 1 and len(vllm_insides.rows_of_parts(fused)) == 2
    assert vllm_insides.tensor_parallel_size(fused) == fused.tp_size == 1
    assert hasattr(fused, "quant_method") and vllm_insides.quantised_by(fused) == ""
    assert "model.norm.weight" in vllm_insides.engine_names(model, "model.norm.weight")
    assert vllm_insides.adapter_name(model, "model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"


def test_adapters_are_stacked_by_the_parts_of_a_layer(model: Any) -> None:
    stacks = vllm_insides.adapter_stacks(model)
    if not stacks:
        assert not any(hasattr(module, "base_layer") for module in model.modules())
        return
    of_layer = stacks["model.layers.0.self_attn.qkv_proj"]
    assert len(of_layer["lora_A"]) == len(of_layer["lora_B"]) == 3
    assert of_layer["lora_A"][0].ndim == 2


QWEN = "vllm.model_executor.models.qwen"


@pytest.mark.parametrize(
    "name",
    [
        f"{QWEN}2_vl:Qwen2VLProcessingInfo.get_supported_mm_processor_kwargs",
        f"{QWEN}2_5_vl:Qwen2_5_VLProcessingInfo.get_hf_processor",
        f"{QWEN}3_vl:Qwen3VLProcessingInfo.get_video_processor",
        f"{QWEN}3_vl:Qwen3VLProcessingInfo.get_image_processor",
        f"{QWEN}3_vl:Qwen3VLProcessingInfo.get_supported_mm_limits",
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
    ],
)
def test_what_the_processors_of_models_that_see_are_patched_into_is_still_there(name: str) -> None:
    vllm_patches.show_images_alone()
    assert pkgutil.resolve_name(name)
