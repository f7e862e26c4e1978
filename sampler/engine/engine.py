"""Runs vLLM in this process: submits prompts, steps the engine, and collects completions with their log-probs.

The engine runs in-process (real exceptions, no process left behind by a SIGKILL), stepped by the sampler's loop. Each
sampling parameter is given explicitly: vLLM would otherwise take temperature, top-k and penalties from the model's
generation_config.json, and the trainer's ratio would compare two different distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from common.config import TIES, Config
from common.errors import UserError
from common.processes.certain_errors import raising_permanent_errors
from common.processes.watchdog import report_progress
from common.types import EncodedImage
from model.files.folder import load_config
from model.files.images import as_picture, vision_of
from sampler.engine import routing, vllm_insides
from sampler.engine.cache_sleep import CacheSleep
from sampler.engine.completions import Completion, SamplingParams, completions_of
from sampler.engine.engine_arguments import (
    ends,
    engine_arguments,
    has_right_prefix_cache,
    has_tower,
    require_bfloat16,
    set_environment,
)
from sampler.engine.fetch import vllm_dir
from sampler.engine.in_flight import InFlight
from sampler.engine.weight_loader import WeightLoader

if TYPE_CHECKING:
    from vllm import RequestOutput, TokensPrompt
    from vllm.logprobs import Logprob


@dataclass(frozen=True)
class _Scored:
    """Key of a sequence that `score` waits for."""

    index: int


def _mend_vllm(config: Config, arguments: dict[str, Any]) -> None:
    """Patches the parts of vLLM that are wrong for this model, before vLLM loads it."""
    vllm_insides.keep_files_in(vllm_dir(config))
    vllm_insides.rotate_every_head()
    if "enable_lora" in arguments:
        vllm_insides.run_experts_without_adapters()
    if has_tower(config):
        vllm_insides.show_images_alone()
    else:
        vllm_insides.load_without_torchvision(load_config(config.model).architectures or ())


class Engine:
    """A vLLM engine. `version` is the policy version it holds, None before the first reload."""

    def __init__(self, config: Config, num_gpus: int):
        self.on_cpu = num_gpus == 0
        set_environment(config, self.on_cpu)
        import vllm

        self._vllm = vllm
        self._vision = vision_of(config)
        arguments = engine_arguments(config, self.on_cpu)
        if not self.on_cpu:
            require_bfloat16(config, vllm.platforms.current_platform)
        with raising_permanent_errors(
            f"vLLM {vllm.__version__} does not start with {config.model.path}"
        ):
            try:
                _mend_vllm(config, arguments)
                if self.on_cpu and not has_right_prefix_cache(
                    vllm.EngineArgs(**arguments).create_model_config()
                ):
                    arguments = {"enable_prefix_caching": False} | arguments
                self._llm = vllm.LLM(**arguments)
            except ValidationError as error:
                raise UserError(
                    f"vllm: vLLM refuses these engine arguments: {error.errors()[0]['msg']}"
                ) from error
        self._engine = self._llm.llm_engine
        vllm_insides.report_tokens(self._engine.engine_core)
        self._llm.collective_rpc("prepare", args=(self.on_cpu, config.algorithm.router_replay))
        if config.algorithm.router_replay:
            ask = self._llm.collective_rpc
            routing.deliver(self._engine.engine_core, lambda ids: ask("routing_of", args=(ids,))[0])
        self._vocab_size: int = self._engine.model_config.get_vocab_size()
        self._ignore_eos = config.sampler.ignore_eos
        self._ends = ends(config)
        self._keys: dict[str, Any] = {}
        self._hears: dict[str, Callable[[list[int]], None] | None] = {}
        self._early: list[
            tuple[Any, list[Completion]]
        ] = []  # finished during a canary; the next step returns them
        self._in_flight = InFlight(self._engine) if config.sampler.in_flight_updates else None
        self._cache = CacheSleep(self._llm) if config.vllm.get("enable_sleep_mode") else None
        self._expanded: dict[
            str, list[int]
        ] = {}  # ids of prompts with images, as the trainer gets them
        self._next_id = 0
        self.weights = WeightLoader(self._llm, config, self._in_flight)
        self.version: int | None = None

    @property
    def num_running(self) -> int:
        return len(self._keys) + len(self._early)

    def submit(
        self,
        key: Any,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        images: Sequence[EncodedImage] = (),
    ) -> None:
        """Queues params.num_completions completions of one prompt; `step` returns them together under `key`."""
        kinds = self._vllm.sampling_params.RequestOutputKind
        more = {"min_tokens": 0, **params.more}  # vLLM refuses wrong ones when the run is rehearsed
        more["min_tokens"] = min(more["min_tokens"], params.max_tokens)
        if (form := more.get("structured_outputs")) is not None:
            more["structured_outputs"] = self._vllm.sampling_params.StructuredOutputsParams(**form)
        parameters = self._vllm.SamplingParams(
            n=params.num_completions,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            max_tokens=params.max_tokens,
            ignore_eos=self._ignore_eos,
            stop_token_ids=list(self._ends.ids),
            stop=[*self._ends.texts, *params.stop],
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # a stop text may contain one
            # vLLM draws the noise of all rows without a seed in one kernel, that of each row with one in another
            seed=params.seed if self.on_cpu or params.keeps_seed else None,
            logprobs=min(params.top_k + TIES - 1, self._vocab_size)
            if params.returns_sampling_mask
            else 0,
            flat_logprobs=True,
            detokenize=bool(self._ends.texts or params.stop),
            output_kind=kinds.CUMULATIVE if params.hears else kinds.FINAL_ONLY,
            **more,
        )
        self._hears[self._add(key, prompt_ids, parameters, images)] = params.hears

    def step(self) -> list[tuple[Any, list[Completion]]]:
        """Runs one engine step. Returns the prompts whose completions are all finished, as (key, completions)."""
        early, self._early = self._early, []
        return early + [(key, completions_of(output)) for key, output in self._finished()]

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[EncodedImage] = ()
    ) -> list[NDArray[np.float32]]:
        """Returns log π(token | tokens before it) at temperature 1 for every position but the first: [L − 1] each.

        images: the images that each of the sequences contains.
        """
        assert self._in_flight or not self._keys, "scoring waits until the engine is idle"
        parameters = self._vllm.SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
        )
        for i, sequence in enumerate(sequences):
            self._add(_Scored(i), sequence, parameters, images)
        scores: dict[int, NDArray[np.float32]] = {}
        while len(scores) < len(sequences):
            report_progress("scoring the canary")
            for key, output in self._finished():
                if not isinstance(key, _Scored):  # a prompt that decodes at the same time
                    self._early.append((key, completions_of(output)))
                    continue
                # position p maps the id of the token at p to its Logprob
                positions = cast("list[dict[int, Logprob]]", output.prompt_logprobs)
                pairs = zip(sequences[key.index][1:], positions[1:], strict=True)
                scores[key.index] = np.array([at[token].logprob for token, at in pairs], np.float32)
        return [scores[i] for i in range(len(sequences))]

    def _finished(self) -> list[tuple[Any, RequestOutput]]:
        """Returns (key, output) of all requests that one engine step finished. No pooling model runs in this engine."""
        outputs = [cast("RequestOutput", output) for output in self._engine.step()]
        done = [output for output in outputs if output.finished]
        for output in outputs:
            if (hears := self._hears.get(output.request_id)) and not output.finished:
                hears(list(output.outputs[0].token_ids))
        for output in done:
            self._hears.pop(output.request_id, None)
            expected = self._expanded.pop(output.request_id, None)
            if expected is not None and list(output.prompt_token_ids or ()) != expected:
                raise RuntimeError(
                    f"vLLM made {len(output.prompt_token_ids or ())} tokens of a prompt with images, the trainer gets "
                    f"{len(expected)} or others: it would train on another prompt"
                )
        return [(self._keys.pop(output.request_id), output) for output in done]

    def rest(self) -> None:
        """Frees the memory of an idle engine's cache until something is generated, with vllm.enable_sleep_mode."""
        if self._cache:
            self._cache.rest()

    def abort(self, keys: Collection[Any]) -> None:
        """Drops these prompts, queued or running."""
        request_ids = [request_id for request_id, key in self._keys.items() if key in keys]
        self._engine.abort_request(request_ids)
        for request_id in request_ids:
            del self._keys[request_id]
            self._hears.pop(request_id, None)
            self._expanded.pop(request_id, None)
        self._early = [(key, completions) for key, completions in self._early if key not in keys]

    def _add(
        self,
        key: Any,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        parameters: Any,
        images: Sequence[EncodedImage],
    ) -> str:
        if self._cache:
            self._cache.wake()
        request_id, self._next_id = str(self._next_id), self._next_id + 1
        ids = [int(t) for t in prompt_ids]
        prompt = cast("TokensPrompt", {"prompt_token_ids": ids})
        if images:
            assert self._vision is not None, "an engine of a text model has no place for images"
            prompt["prompt_token_ids"] = self._vision.shortened(ids, images)
            prompt["multi_modal_data"] = {"image": [as_picture(image) for image in images]}
            self._expanded[request_id] = ids
        of_version = (
            self._in_flight.request(prompt, isinstance(key, _Scored)) if self._in_flight else {}
        )
        self._engine.add_request(
            request_id, prompt, parameters, lora_request=self.weights.adapter, **of_version
        )
        self._keys[request_id] = key
        return request_id
