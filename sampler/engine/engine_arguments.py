"""Defines how vLLM is started: environment variables, arguments, and ends of a completion."""

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
_CANARY_LENGTH = 64  # tokens of the trainer's canary sequences, which the context must hold


def ends(config: Config) -> Ends:
    """Returns the ends of a completion; none with sampler.ignore_eos."""
    if config.sampler.ignore_eos:
        return Ends((), ())
    tokenizer = tokenizer_of(config.model)
    return stop_conditions(config, tokenizer)


def set_environment(config: Config, on_cpu: bool) -> None:
    """Sets environment variables before vLLM is imported; the user's own values stay."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM warns about a chat template that is not used
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner is not tested in this project
    }
    if not on_cpu and config.model.dtype == "float32":
        # FlashAttention and FlashInfer refuse float32, and vLLM's Triton attention then multiplies
        # in TF32: 10 bits of mantissa, log-probs off by 2e-3 and more, and the canary refuses good
        # weights. Triton reads it when it is imported.
        defaults["TRITON_F32_DEFAULT"] = "ieee"
    if on_cpu:
        # The first log-prob would otherwise compile a function with g++ for 20 s. The second name
        # is read where vLLM decorates it, the first when torch._dynamo is imported, which a
        # reference model may have done already.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        defaults["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCH_COMPILE_DISABLE", "1")
        # vLLM's MLA kernels for a CPU take the sizes of one model only
        defaults["VLLM_MLA_DISABLE"] = "1"
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the launcher places processes
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def max_num_seqs(config: Config) -> int:
    """Returns how many sequences decode at once unless `vllm:` says: a batch, 64 to 1,024."""
    batch_size = config.sampler.num_generations * config.prompts_per_batch
    return min(1024, max(64, batch_size))


def max_model_len(config: Config) -> int:
    """Returns the tokens of the longest sequence, unless `vllm:` sets it."""
    longest = config.data.max_prompt_length + config.sampler.max_completion_length
    return max(longest, _CANARY_LENGTH)


def has_right_prefix_cache(model: Any) -> bool:
    """Returns whether vLLM's prefix cache is correct for a model on a CPU.

    A hybrid model's state cache needs prompts in chunks, which a CPU's generator cannot have. After
    a cached prompt, the CPU's chunked attention (Llama 4) is wrong by 2 in log-probs, at positions
    that the canary does not check.
    model: vllm's ModelConfig.
    """
    return not (model.is_hybrid or model.attention_chunk_size)


def looks_for_texts(config: Config) -> bool:
    """Returns whether texts may end completions: by sampler.stop, or by the request of an agent."""
    for source in config.of_sources.values():
        if source.rollout.agent is not None:
            return True
    return any(isinstance(stop, str) for stop in config.sampler.stop)


def has_tower(config: Config) -> bool:
    """Returns whether vLLM will load a vision model.

    Text models are recognised without a look at their files.
    """
    if config.data.image_key is not None:
        return True
    model = config.model
    return config.data.limit_images == 0 and sees_images(model.path, model.revision)


def require_bfloat16(config: Config, platform: Any) -> None:
    """Raises UserError for bfloat16 on a GPU that has none; vLLM itself would recommend float16.

    platform: vllm's, which asks the driver, because this process must not use the GPU.
    """
    if not platform.is_cuda():
        return
    capability = platform.get_device_capability()
    version = None
    if capability is not None:
        version = (capability.major, capability.minor)
    bfloat16.require(*config.dtype_of_engine, "the sampler's GPU", version)


def _image_arguments(config: Config) -> dict[str, Any]:
    """Returns vllm.LLM's arguments for images; {} for a text model.

    vLLM itself expands the one token of each image.
    """
    if not has_tower(config):
        return {}
    data = config.data
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # vLLM finds an image's place by the text of its token
        "limit_mm_per_prompt": {"image": data.limit_images, "video": 0},
        "mm_processor_cache_gb": 0,  # an image is asked for once in an epoch
        # it rounds otherwise, and not at all for a model without a processor_class
        "mm_device_do_normalize": False,
    }
    vision = vision_of(config)
    if vision is None:
        return arguments
    # images are resized already; the limits bound the memory of the largest
    pixels_per_token = vision.form.factor**2
    most_tokens = max(data.max_prompt_length, _CANARY_IMAGE_TOKENS)
    most_pixels = min(data.max_pixels, most_tokens * pixels_per_token)
    arguments["mm_processor_kwargs"] = {
        "do_resize": False,
        "min_pixels": pixels_per_token,
        "max_pixels": max(most_pixels, _CANARY_IMAGE_TOKENS * pixels_per_token),
    }
    return arguments


def engine_arguments(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Returns vllm.LLM's arguments: the sampler's, overridden by the user's `vllm:` section."""
    # The noise of rows without seeds: other samplers and restarted ones must not draw the same.
    seed = secrets.randbits(31)
    if on_cpu:
        seed = config.run.seed
    needs_tokenizer = looks_for_texts(config) or config.sampler.generation_kwargs
    model = config.model
    arguments: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": not needs_tokenizer,
        "seed": seed,
        "max_model_len": max_model_len(config),
        "max_num_seqs": max_num_seqs(config),
        "max_logprobs": max(1, config.sampler.max_sampling_mask),
    }
    arguments["generation_config"] = "vllm"
    arguments["logprobs_mode"] = "processed_logprobs"
    arguments["worker_extension_cls"] = "sampler.engine.vllm_worker.WeightExtension"
    if on_cpu:
        arguments |= _cpu_arguments(config)
    if config.algorithm.router_replay:
        # a CUDA graph would repeat the recorded routing and capture nothing
        arguments["enforce_eager"] = True
    if config.sampler.in_flight_updates:
        arguments["scheduling_policy"] = "priority"
        # it could run a step on old weights during a load
        arguments["async_scheduling"] = False
    return arguments | lora.engine_arguments(config) | _image_arguments(config) | config.vllm


def _cpu_arguments(config: Config) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        # With blocks of 128 tokens, the default of a CPU, short prompts would share nothing.
        "block_size": 32,
        # A prompt that is prefilled in two chunks makes vLLM rewind its seeded generator, which a
        # CPU's generator cannot do: the engine would raise.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_len(config)),
    }
    sets_cache = "VLLM_CPU_KVCACHE_SPACE" in os.environ or "kv_cache_memory_bytes" in config.vllm
    if not sets_cache:
        arguments["worker_cls"] = "sampler.engine.vllm_cpu_worker.CpuWorker"
        arguments["kv_cache_memory_bytes"] = 16 << 30  # at most
    return arguments
