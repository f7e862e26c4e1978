"""Runs vLLM in this process: submits prompts, steps the engine, and collects completions.

The engine runs in this process, so exceptions are real and a SIGKILL leaves no process behind. The
sampler's loop steps it. Each sampling parameter is given explicitly: vLLM would otherwise take
temperature, top-k and penalties from the model's generation_config.json, and the trainer's ratio
would compare two different distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from model.files.images import as_picture, vision_of
from sampler.engine import routing, vllm_insides, vllm_patches
from sampler.engine.cache_sleep import CacheSleep
from sampler.engine.completions import Completion, SamplingParams, completions_of
from sampler.engine.engine_arguments import (
    ends,
    engine_arguments,
    has_right_prefix_cache,
    require_bfloat16,
    set_environment,
)
from sampler.engine.in_flight import InFlight
from sampler.engine.weight_loader import WeightLoader

if TYPE_CHECKING:
    from vllm import RequestOutput, TokensPrompt
    from vllm.logprobs import Logprob


@dataclass(frozen=True)
class _Scored:
    """Key of a sequence that `score` waits for."""

    index: int  # of the sequence


class Engine:
    """A vLLM engine. `version` is the policy version it holds, None before the first reload."""

    def __init__(self, config: Config, num_gpus: int):
        """Starts vLLM, on a CPU if num_gpus is 0.

        Raises UserError if vLLM refuses the arguments or the model.
        """
        self.on_cpu = num_gpus == 0
        set_environment(config, self.on_cpu)
        import vllm

        self._vllm = vllm
        self._vision = vision_of(config)
        arguments = engine_arguments(config, self.on_cpu)
        if not self.on_cpu:
            require_bfloat16(config, vllm.platforms.current_platform)
        failed = f"vLLM {vllm.__version__} does not start with {config.model.path}"
        with raising_permanent_errors(failed):
            try:
                self._llm = self._start(config, arguments)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise UserError(f"vllm: vLLM refuses these engine arguments: {reason}") from error
        self._engine = self._llm.llm_engine
        vllm_insides.report_tokens(self._engine.engine_core)
        self._llm.collective_rpc("prepare", args=(self.on_cpu, config.algorithm.router_replay))
        if config.algorithm.router_replay:
            routing.deliver(self._llm)
        self._vocab_size: int = self._engine.model_config.get_vocab_size()
        self._ignore_eos = config.sampler.ignore_eos
        self._ends = ends(config)
        self._keys: dict[str, Any] = {}  # request id -> the caller's key
        # request id -> SamplingParams.hears
        self._hears: dict[str, Callable[[list[int]], None]] = {}
        # prompts that finished during a canary; the next step returns them
        self._early: list[tuple[Any, list[Completion]]] = []
        self._in_flight: InFlight | None = None
        if config.sampler.in_flight_updates:
            self._in_flight = InFlight(self._engine)
        self._cache: CacheSleep | None = None
        if config.vllm.get("enable_sleep_mode"):
            self._cache = CacheSleep(self._llm)
        # request id -> the token ids of a prompt with images, as the trainer gets them
        self._expanded: dict[str, list[int]] = {}
        self._next_id = 0
        self.weights = WeightLoader(self._llm, config, self._in_flight)
        self.version: int | None = None

    def _start(self, config: Config, arguments: dict[str, Any]) -> Any:
        """Returns vllm.LLM with the model loaded."""
        vllm_patches.mend(config, arguments)
        if self.on_cpu:
            model_config = self._vllm.EngineArgs(**arguments).create_model_config()
            if not has_right_prefix_cache(model_config):
                arguments = {"enable_prefix_caching": False} | arguments
        return self._vllm.LLM(**arguments)

    @property
    def num_running(self) -> int:
        """Returns the number of prompts that were submitted and not yet returned."""
        return len(self._keys) + len(self._early)

    def submit(
        self,
        key: Any,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        images: Sequence[EncodedImage] = (),
    ) -> None:
        """Queues params.num_completions completions of one prompt.

        `step` returns them together under `key`. images: those that the prompt contains.
        """
        request_id = self._add(key, prompt_ids, self._parameters(params), images)
        if params.hears is not None:
            self._hears[request_id] = params.hears

    def _parameters(self, params: SamplingParams) -> Any:
        """Returns vLLM's sampling parameters."""
        classes = self._vllm.sampling_params
        more = dict(params.more)  # vLLM refuses wrong ones when the run is rehearsed
        more["min_tokens"] = min(more.get("min_tokens", 0), params.max_tokens)
        form = more.get("structured_outputs")
        if form is not None:
            more["structured_outputs"] = classes.StructuredOutputsParams(**form)
        # vLLM draws the noise of all rows without a seed in one kernel, but that of each row with a
        # seed in a kernel of its own
        seed = None
        if self.on_cpu or params.keeps_seed:
            seed = params.seed
        num_logprobs = 0
        if params.returns_sampling_mask:
            num_logprobs = min(params.top_k + TIES - 1, self._vocab_size)
        output_kind = classes.RequestOutputKind.FINAL_ONLY
        if params.hears is not None:
            output_kind = classes.RequestOutputKind.CUMULATIVE
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
            skip_special_tokens=False,  # a stop text may contain one
            seed=seed,
            logprobs=num_logprobs,
            flat_logprobs=True,
            output_kind=output_kind,
            **self._stops(params),
            **more,
        )
        return parameters

    def _stops(self, params: SamplingParams) -> dict[str, Any]:
        """Returns vLLM's parameters for the ends of a completion."""
        texts = [*self._ends.texts, *params.stop]
        return {
            "stop_token_ids": list(self._ends.ids),
            "stop": texts,
            "include_stop_str_in_output": True,
            "detokenize": bool(texts),
        }

    def step(self) -> list[tuple[Any, list[Completion]]]:
        """Runs one engine step.

        Returns the prompts whose completions are all finished, as (key, completions).
        """
        finished = self._early
        self._early = []
        for key, output in self._finished():
            finished.append((key, completions_of(output)))
        return finished

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[EncodedImage] = ()
    ) -> list[NDArray[np.float32]]:
        """Returns log π(token | tokens before it) at temperature 1: [L − 1] for each sequence.

        The first token of a sequence has none.

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
                scores[key.index] = _prompt_logprobs(output, sequences[key.index])
        return [scores[i] for i in range(len(sequences))]

    def _finished(self) -> list[tuple[Any, RequestOutput]]:
        """Returns (key, output) of all requests that one engine step finished."""
        finished = []
        for step_output in self._engine.step():
            output = cast("RequestOutput", step_output)  # no pooling model runs in this engine
            request_id = output.request_id
            if output.finished:
                self._hears.pop(request_id, None)
                self._require_expanded(output)
                finished.append((self._keys.pop(request_id), output))
            elif request_id in self._hears:
                token_ids = list(output.outputs[0].token_ids)
                self._hears[request_id](token_ids)
        return finished

    def _require_expanded(self, output: RequestOutput) -> None:
        """Raises RuntimeError if vLLM expanded a prompt's images otherwise than the trainer."""
        expected = self._expanded.pop(output.request_id, None)
        token_ids = list(output.prompt_token_ids or ())
        if expected is not None and token_ids != expected:
            raise RuntimeError(
                f"vLLM made {len(token_ids)} tokens of a prompt with images, the trainer gets "
                f"{len(expected)} or others: it would train on another prompt"
            )

    def rest(self) -> None:
        """Frees the memory of an idle engine's cache until something is generated.

        It does nothing without vllm.enable_sleep_mode.
        """
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
        request_id = str(self._next_id)
        self._next_id += 1
        ids = [int(token) for token in prompt_ids]
        prompt = cast("TokensPrompt", {"prompt_token_ids": ids})
        if images:
            assert self._vision is not None, "an engine of a text model has no place for images"
            prompt["prompt_token_ids"] = self._vision.shortened(ids, images)
            prompt["multi_modal_data"] = {"image": [as_picture(image) for image in images]}
            self._expanded[request_id] = ids
        more: Mapping[str, Any] = {}
        if self._in_flight:
            more = self._in_flight.request(prompt, is_canary=isinstance(key, _Scored))
        adapter = self.weights.adapter
        self._engine.add_request(request_id, prompt, parameters, lora_request=adapter, **more)
        self._keys[request_id] = key
        return request_id


def _prompt_logprobs(output: RequestOutput, sequence: Sequence[int]) -> NDArray[np.float32]:
    """Returns the log-prob of each token of a sequence after the first: [L − 1]."""
    # the first position is None, and each other one maps its token's id to a Logprob
    positions = cast("list[dict[int, Logprob]]", output.prompt_logprobs)
    logprobs = []
    for token, candidates in zip(sequence[1:], positions[1:], strict=True):
        logprobs.append(candidates[token].logprob)
    return np.array(logprobs, np.float32)
