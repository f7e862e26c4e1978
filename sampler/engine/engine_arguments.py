"""Defines how vLLM is started: its environment variables, its arguments, and the ends of a completion."""

import os
import secrets
from typing import Any

from common import bfloat16
from common.config import Config
from model.files import lora
from model.files.images import sees_images, vision_of
from model.tokenizer import tokenizer_of
from sampler.prompts.reading import Ends, stop_conditions

_CANARY_IMAGE_TOKENS = 4  # tokens of the canary's image
_CANARY_LENGTH = 64  # the context must hold the trainer's canary sequences


def ends(config: Config) -> Ends:
    """Returns the ends of a completion; none with sampler.ignore_eos."""
    if config.sampler.ignore_eos:
        return Ends((), ())
    tokenizer = tokenizer_of(config.model)
    return stop_conditions(config, tokenizer)


def set_environment(config: Config, on_cpu: bool) -> None:
    """Sets environment variables before vLLM is imported; the user's own values stay."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "ERROR"
    )  # vLLM warns about a chat template that is not used
    os.environ.setdefault(
        "VLLM_USE_V2_MODEL_RUNNER", "0"
    )  # the other runner is not tested in this project
    if not on_cpu and config.model.dtype == "float32":
        # FlashAttention and FlashInfer refuse float32, and vLLM's Triton attention then multiplies in TF32: 10 bits of
        # mantissa, log-probs off by 2e-3 and more, and the canary refuses good weights. Triton reads it when imported.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if on_cpu:
        # The first log-prob would otherwise compile a helper with g++ for 20 s. The second name is read where vLLM
        # decorates it, the first when torch._dynamo is imported, which a reference model may have done already.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", os.environ["TORCH_COMPILE_DISABLE"])
        os.environ.setdefault(
            "VLLM_MLA_DISABLE", "1"
        )  # vLLM's MLA kernels for a CPU take the sizes of one model alone
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # the launcher places processes


def max_num_seqs(config: Config) -> int:
    """Returns the number of sequences that decode at once: a batch of rollouts, 64 to 1,024, unless `vllm:` sets it."""
    return min(1024, max(64, config.sampler.num_generations * config.prompts_per_batch))


def max_model_len(config: Config) -> int:
    """Returns the tokens of the longest sequence, unless `vllm:` sets it."""
    return max(config.data.max_prompt_length + config.sampler.max_completion_length, _CANARY_LENGTH)


def has_right_prefix_cache(model: Any) -> bool:
    """Returns whether vLLM's prefix cache is correct for a model on a CPU; `model` is vllm's ModelConfig.

    A hybrid model's state cache needs prompts in chunks, which a CPU's generator cannot have. After a cached prompt,
    the CPU's chunked attention (Llama 4) is wrong by 2 in log-probs, at positions that the canary does not check.
    """
    return not (model.is_hybrid or model.attention_chunk_size)


def looks_for_texts(config: Config) -> bool:
    """Returns whether a text may end a completion: one of sampler.stop, or one in an agent's request."""
    agents = any(settings.rollout.agent is not None for settings in config.of_sources.values())
    return agents or any(isinstance(stop, str) for stop in config.sampler.stop)


def has_tower(config: Config) -> bool:
    """Returns whether vLLM will load a vision model; text models are recognised without a look at their files."""
    data, model = config.data, config.model
    return data.image_key is not None or (
        data.limit_images == 0 and sees_images(model.path, model.revision)
    )


def require_bfloat16(config: Config, platform: Any) -> None:
    """Raises UserError for bfloat16 on a GPU that has none; vLLM itself would recommend float16.

    platform: vllm's, which asks the driver, because this process must not use the GPU.
    """
    if not platform.is_cuda():
        return
    capability = platform.get_device_capability()
    found = None if capability is None else (capability.major, capability.minor)
    bfloat16.require(*config.dtype_of_engine, "the sampler's GPU", found)


def _image_arguments(config: Config) -> dict[str, Any]:
    """Returns vllm.LLM's arguments for images; {} for a text model. vLLM expands each image's one token itself."""
    if not has_tower(config):
        return {}
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # vLLM finds an image's place by the text of its token
        "limit_mm_per_prompt": {"image": config.data.limit_images, "video": 0},
        "mm_processor_cache_gb": 0,  # an image is asked for once in an epoch
        "mm_device_do_normalize": False,  # it rounds otherwise, and not at all for a model without a processor_class
    }
    vision = vision_of(config)
    if vision is None:
        return arguments
    token = vision.form.factor**2
    largest = min(
        config.data.max_pixels, max(config.data.max_prompt_length, _CANARY_IMAGE_TOKENS) * token
    )
    # images are resized already; the limits bound the memory of the largest
    sizes = {
        "do_resize": False,
        "min_pixels": token,
        "max_pixels": max(largest, _CANARY_IMAGE_TOKENS * token),
    }
    return arguments | {"mm_processor_kwargs": sizes}


def engine_arguments(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Returns vllm.LLM's arguments: the sampler's, overridden by the user's `vllm:` section."""
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "revision": config.model.revision,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": not (looks_for_texts(config) or config.sampler.generation_kwargs),
        # The noise of rows without seeds: other samplers and restarted ones must not draw the same again.
        "seed": config.run.seed if on_cpu else secrets.randbits(31),
        "max_model_len": max_model_len(config),
        "max_num_seqs": max_num_seqs(config),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(1, config.sampler.max_sampling_mask),
        "worker_extension_cls": "sampler.engine.vllm_worker.WeightExtension",
    }
    if on_cpu:
        # Blocks of 128 tokens, the CPU default, would let short prompts share nothing. A prompt prefilled in two
        # chunks makes vLLM rewind its seeded generator, which a CPU generator cannot do: the engine would raise.
        whole_prompts = {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, max_model_len(config)),
        }
        arguments |= {"enforce_eager": True, "block_size": 32} | whole_prompts
        if (
            "VLLM_CPU_KVCACHE_SPACE" not in os.environ
            and "kv_cache_memory_bytes" not in config.vllm
        ):
            arguments["worker_cls"] = "sampler.engine.vllm_cpu_worker.CpuWorker"
            arguments["kv_cache_memory_bytes"] = 16 << 30  # at most
    if config.algorithm.router_replay:
        arguments["enforce_eager"] = (
            True  # a CUDA graph would repeat the recorded routing and capture nothing
        )
    if (
        config.sampler.in_flight_updates
    ):  # asynchronous scheduling could run a step on old weights during a load
        arguments |= {"scheduling_policy": "priority", "async_scheduling": False}
    return arguments | lora.engine_arguments(config) | _image_arguments(config) | config.vllm
