"""The settings of sampling: training samples, their turns, held-out evaluations and the rewards of both."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config.sections import Section, require_own_function
from common.user_code.functions import short_name, unnamed

MAX_ENVIRONMENTS = 256  # environments alive at once, each in a process
MAX_REWARD_WORKERS = 64
MAX_TOP_K = 1024  # tokens that travel with every sampled one
ROUNDING = 1e-6  # two scores this near are equal: some reward functions compute in float32
_ENTRY = "{model: org/classifier} or {judge: rubric.md, model: …, base_url: …}"
TIES = 16  # more tokens than top_k may be kept: all that are as likely as the last of them

# vLLM's SamplingParams that forbid tokens but keep the odds of the others
_FORBIDDING = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs")


class SamplerSettings(Section):
    num_generations: int = Field(8, ge=2)
    """G: completions per problem."""
    temperature: float = Field(1.0, ge=0.01)
    """In vLLM and trainer."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 needs top_k."""
    top_k: int | None = Field(None, ge=-1)
    """Above 0 the trainer's softmax is over the kept tokens, too."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above 0 needs top_k."""
    max_completion_length: int = Field(256, gt=0)
    """Tokens, end-of-sequence included."""
    stop: list[int | str] = []
    """More ends of a completion: token ids and texts, such as ["</answer>"], which stay in it."""
    generation_kwargs: dict[str, Any] = {}
    """More of vLLM's SamplingParams, with top_k: min_tokens, bad_words, allowed_token_ids, structured_outputs."""
    ignore_eos: bool = False
    """Never stop early: for measurements."""
    in_flight_updates: bool = False
    """Load new weights while sequences decode."""
    devices: list[int] = []
    """GPUs, tensor_parallel_size per sampler; empty = the first visible."""
    num_samplers: int = Field(1, ge=1)
    """vLLM engines of launch.sh."""

    @property
    def truncates(self) -> bool:
        """Returns whether samples carry their kept tokens, so that the trainer's softmax is over these alone."""
        return (self.top_k or 0) > 0

    @property
    def max_sampling_mask(self) -> int:
        """Returns the most tokens that one sample may be drawn from; 0 = the whole vocabulary."""
        return (self.top_k or 0) + TIES if self.truncates else 0

    def _contradictions(self) -> Iterator[str]:
        """Yields contradictions. Without kept tokens the trainer's ratios are too small by the probability cut away."""
        if self.stop and self.ignore_eos:
            yield f"stop {self.stop} does nothing with ignore_eos; set sampler.ignore_eos=false, or remove it"
        if "" in self.stop:
            yield 'stop holds an empty text, which is everywhere; write such as sampler.stop=["</answer>"]'
        if (self.top_k or 0) > MAX_TOP_K:
            yield f"top_k {self.top_k} is above {MAX_TOP_K}; set sampler.top_k=50, or for all tokens sampler.top_k=-1"
        for name in self.generation_kwargs:
            if name not in _FORBIDDING:
                others = "others are settings of sampler, or change odds unknown to the trainer; remove it"
                yield f"generation_kwargs.{name} is none of {', '.join(_FORBIDDING)}; {others}"
        if self.generation_kwargs and not self.truncates:
            yield f"generation_kwargs forbids tokens; for a softmax over the others set sampler.top_k={MAX_TOP_K}"
        cuts = [f"{name} {getattr(self, name)}" for name in ("top_p", "min_p") if self.changes(name)]
        if cuts and not self.truncates:
            remedy = "set sampler.top_k=50, or for all tokens sampler.top_p=1 sampler.min_p=0"
            yield f"{', '.join(cuts)} needs top_k, because all kept tokens travel with each sample; {remedy}"


class Rollouts(Section):
    """Several turns (docs/environments.md); all share sampler.max_completion_length."""

    environment: str | None = None
    """`file.py:Class`, ours or TRL's kind."""
    agent: str | list[str] | None = None
    """`file.py:solve`, which calls the model itself by OpenAI's API, or a command, `[node, agent.js]`."""
    environment_kwargs: dict[str, Any] = {}
    """The class's arguments."""
    tools: list[str] = []
    """Functions, `[file.py:calculator]`."""
    tool_parser: str = "auto"
    """As the chat template writes calls, or a name of vLLM's `--tool-call-parser`, such as hermes."""
    max_turns: int = Field(8, ge=1)
    """A rollout with more is truncated."""
    timeout_s: float = Field(30.0, gt=0)
    """A longer reset or step fails its rollout."""
    failure_reward: float | None = Field(None, allow_inf_nan=False)
    """Of rollouts that fail; null = the lowest of the group, at most 0."""
    import_timeout_s: float = Field(120.0, gt=0)
    """A longer import of your file ends the run."""

    @property
    def is_multi_turn(self) -> bool:
        return self.environment is not None or bool(self.tools) or self.agent is not None

    def _contradictions(self) -> Iterator[str]:
        if len(given := [name for name in ("agent", "environment", "tools") if getattr(self, name)]) > 1:
            yield f"{' and '.join(given)} are both given; keep agent, or write tools as methods of the environment"
        if isinstance(self.agent, str) and " " in self.agent:
            yield f"agent {self.agent!r}: a command is a list; write rollout.agent=[{', '.join(self.agent.split())}]"
        elif isinstance(self.agent, str):
            require_own_function(self.agent)
        if self.agent == []:
            yield "agent is an empty command; write rollout.agent: [python, my_agent.py], or my_agent.py:solve"
        if self.environment_kwargs and self.environment is None:
            yield "environment_kwargs is given and environment is not; set rollout.environment=my.py:Class"
        names = [short_name(spec) for spec in self.tools]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            yield f"tools has two functions named {doubled[0]!r}; rename one, the model calls them by name"


class Eval(Section):
    steps: int | None = Field(None, gt=0)
    """Every n policy versions; null = before and after training."""
    before: bool = True
    """The initial policy."""
    temperature: float = Field(0.0, ge=0)
    """0 = greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """As in sampler."""
    top_k: int | None = Field(None, ge=-1)
    """As in sampler; top_p does without."""
    num_generations: int = Field(1, ge=1)
    """Completions per problem."""
    metric_for_best_model: str | None = None
    """For best/: `answer/accuracy` or `answer/mean`, of any function; of one set `hard/answer/mean`."""
    greater_is_better: bool = True
    """Of that metric."""
    early_stopping_patience: int | None = Field(None, gt=0)
    """Stop after n in a row that neither are the best nor above what it is worth (evaluation.md)."""
    load_best_model_at_end: bool = False
    """final/ is the best policy."""

    def _contradictions(self) -> Iterator[str]:
        for name in ("early_stopping_patience", "load_best_model_at_end"):
            if getattr(self, name) and self.metric_for_best_model is None:
                yield f"{name} needs a metric; set eval.metric_for_best_model=answer/accuracy"
        if self.early_stopping_patience is not None and self.steps is None:
            yield "early_stopping_patience counts evaluations while training; set eval.steps=20"


class Rewards(Section):
    reward_funcs: list[str] = ["answer", "format"]
    """Built-in names, `package.module.function`, `file.py:function`; {model: …} or {judge: rubric.md, model: …}."""
    reward_weights: list[float] | None = None
    """null = 1.0 each."""
    reward_kwargs: dict[str, dict[str, Any]] = {}
    """{brief: {max_len: 512}}; overrides columns."""
    full_marks: dict[str, float] = {}
    """A right completion's score, by function; else format 1.25, others 1.0."""
    timeout_s: float = Field(10.0, gt=0)
    """A longer call fails its group."""
    import_timeout_s: float = Field(120.0, gt=0)
    """A longer import of your files ends the run."""
    num_workers: int | None = Field(None, ge=1, le=MAX_REWARD_WORKERS)
    """Processes that score groups side by side; null = a core each, more where functions wait."""
    max_memory_gib: float = Field(8.0, gt=0)
    """Beyond it a MemoryError; Linux only."""
    special_tokens: Literal["auto", "keep", "drop"] = "auto"
    """In the texts that rewards and tools read. auto: those alone that they look for, and tags in pairs."""

    @model_validator(mode="before")
    @classmethod
    def _built_ins_of_models(cls, given: Any) -> Any:
        """Rewrites {model: org/m, name: nice} as the built-in `classifier as nice`, its other keys as reward_kwargs."""
        if not (isinstance(given, dict) and isinstance(given.get("reward_funcs"), list)):
            return given
        specs, kwargs = [], dict(given.get("reward_kwargs") or {})
        for entry in given["reward_funcs"]:
            if isinstance(entry, dict):
                own = dict(entry)
                spec = "judge" if "judge" in own else "classifier"
                name = own.pop("name", spec)
                if "model" not in own or not re.fullmatch(r"[\w-]+", str(name)):
                    keys = ", ".join(map(str, entry))
                    raise ValueError(f"reward_funcs: {{{keys}}} needs a model, and as its name a word; write {_ENTRY}")
                if spec == "judge":
                    own = {"rubric": own.pop("judge"), "cache": f".cache/judges/{name}.sqlite", **own}
                kwargs[name] = own | dict(kwargs.get(name) or {})
                entry = spec if name == spec else f"{spec} as {name}"
            specs.append(entry)
        return {**given, "reward_funcs": specs, "reward_kwargs": kwargs}

    def arguments_of_built_in(self, name: str) -> list[dict[str, Any]]:
        """Returns the arguments of each use of a built-in function: of `judge` and of `judge as nice`, say."""
        return [self.reward_kwargs.get(short_name(spec), {}) for spec in self.reward_funcs if unnamed(spec) == name]

    @property
    def weights(self) -> list[float]:
        return self.reward_weights if self.reward_weights is not None else [1.0] * len(self.reward_funcs)

    @property
    def names(self) -> list[str]:
        """Returns the functions' short names, for metrics: the part after the last colon or dot."""
        return [short_name(spec) for spec in self.reward_funcs]

    @property
    def environment_weight(self) -> float:
        """Returns the weight of the environments' rewards; 0: these are not used."""
        return dict(zip(self.reward_funcs, self.weights, strict=True)).get("environment", 0.0)

    def full_mark(self, name: str) -> float:
        return self.full_marks.get(name, 1.25 if name == "format" else 1.0)

    def _contradictions(self) -> Iterator[str]:
        if doubled := sorted({name for name in self.names if self.names.count(name) > 1}):
            yield f"reward_funcs has two functions named {doubled[0]!r}; rename one, their metrics would mix"
        for option in ("reward_kwargs", "full_marks"):
            for name in set(getattr(self, option)) - set(self.names):
                yield f"{option} names {name!r}, and reward_funcs gives {', '.join(self.names)}; use one of them"
        if (n := len(self.weights)) != (m := len(self.reward_funcs)):
            yield f"reward_weights has {n} numbers for {m} reward_funcs; write {[1.0] * m}"
