"""The settings of what both processes share: the run, models, data, prompts, the link and the weights."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from common.errors import UserError
from common.paths import here_or_ours
from common.user_code import functions

MAX_SOCKET_PATH = 107  # bytes, by sockaddr_un
MAX_LORA_RANK = 512  # vLLM's limit


class Section(BaseModel):  # use_attribute_docstrings costs each start 0.1 s: reference_page.py reads them
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_the_home_folder(cls, value: Any) -> Any:
        """Expands the ~ of a path, which no shell does in YAML or after `option=`, and finds Tandem's own files."""
        if isinstance(value, str) and value.startswith("~/"):
            return str(Path(value).expanduser())
        return here_or_ours(value.expanduser()) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yields a sentence for each setting that has no meaning or no effect, with what to write instead."""
        return iter(())

    def changes(self, name: str) -> bool:
        """Returns whether this setting differs from its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


def require_own_function(name: str, built_in: Collection[str] = ()) -> None:
    """Raises ValueError unless the name is built in or a user's function, whose existence is checked before a run."""
    try:
        if name not in built_in:
            functions.parse(repr(name), name, built_in)
    except UserError as error:
        raise ValueError(str(error)) from None


class Run(Section):
    output_dir: Path = Path("runs/run")
    """The run's folder."""
    seed: int = 0
    """Data order, sampling, training."""
    report_to: list[str] = ["tensorboard"]
    """Also wandb, `file.py:function`."""
    log_completions: bool = False
    """Samples to wandb, too, as a table: they leave this machine."""
    resume: bool = False
    """From the newest valid checkpoint."""
    record: bool = False
    """Append trained groups to groups.recording."""
    replay: Path | None = None
    """Train on a recording, without a sampler."""

    def _contradictions(self) -> Iterator[str]:
        if self.log_completions and "wandb" not in self.report_to:
            yield "log_completions is for wandb; set run.report_to=[wandb], or remove it: samples.jsonl has them"

    @field_validator("report_to")
    @classmethod
    def _names_sinks(cls, value: list[str]) -> list[str]:
        for name in value:
            require_own_function(name, ("tensorboard", "wandb"))
        return value


class Model(Section):
    path: str
    """Hub id or folder; of a GGUF file `convert` makes one."""
    builder: str | None = Field(None, pattern=r"^[a-z_]\w*(\.\w+)*$")
    """A module that makes model and data where they are missing, as `examples.quickstart`."""
    revision: str | None = None
    """Branch, tag, commit."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16 keeps float32 master weights; slower than float32 on most CPUs. GPUs below compute
    capability 8.0 (T4, RTX 20) need float32."""
    trust_remote_code: bool = False
    """Run the model's own Python."""
    gradient_checkpointing: bool = False
    """Less memory, a third slower."""
    freeze_vision_tower: bool = False
    """Train only the language model."""


class ReferenceSettings(Section):
    path: str | None = None
    """For the KL, same tokenizer; null = the initial policy."""
    on: Literal["sampler", "trainer"] | None = None
    """Who scores it; null: the trainer, or with kl_in_reward or trainer.max_staleness the sampler."""
    sync_steps: int | None = Field(None, gt=0)
    """The policy becomes the reference every n steps; null = never."""


class Lora(Section):
    """Low-rank adapters (docs/lora.md)."""

    r: int = Field(0, ge=0)
    """Rank; 0 = off."""
    alpha: int | None = Field(None, gt=0)
    """The scale is alpha/r; null = 2r."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Or [q_proj, v_proj]; the output head has none."""
    sync: Literal["adapter", "merged"] = "adapter"
    """merged: whole weights, where vLLM cannot apply adapters."""

    @property
    def scale(self) -> int:
        """Returns alpha, as given or by default."""
        return 2 * self.r if self.alpha is None else self.alpha

    @property
    def publishes_adapters(self) -> bool:
        return self.r > 0 and self.sync == "adapter"

    def _contradictions(self) -> Iterator[str]:
        if self.r == 0:
            if changed := sorted(name for name in type(self).model_fields if self.changes(name)):
                yield f"{changed[0]} does nothing without adapters; set lora.r=16, or remove it"
            return
        names = self.target_modules if isinstance(self.target_modules, list) else ["all-linear"]
        if not names:
            yield "target_modules is empty; write target_modules: all-linear, or [q_proj, v_proj]"
        if tied := [name for name in names if name.split(".")[-1] in ("embed_tokens", "lm_head", "wte")]:
            yield f"target_modules {tied[0]}: embedding and output head get no adapters; remove it"
        if self.publishes_adapters and self.r > MAX_LORA_RANK:
            yield f"vLLM applies adapters up to rank {MAX_LORA_RANK}, r is {self.r}; set lora.sync=merged"


class PromptTemplate(Section):
    system: str | None = None
    """System message."""
    examples: list[dict[Literal["user", "assistant"], str]] = []
    """[{user: a problem, assistant: its answer}]."""
    format_prompt: Path | str | None = None
    """User message in Jinja, a file or `"Use {{ nums }} to make {{ target }}."`; `content` is the problem."""
    chat_template: Path | None = None
    """Jinja file; base models need one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Such as {enable_thinking: false}."""

    @field_validator("format_prompt", mode="before")
    @classmethod
    def _template_or_file(cls, value: Any) -> Any:
        is_file = isinstance(value, str) and "{{" not in value and "{%" not in value
        return Path(value) if is_file else value

    @field_validator("examples")
    @classmethod
    def _are_whole(cls, value: list[dict[str, str]]) -> list[dict[str, str]]:
        for example in value:
            if len(example) != 2:
                raise ValueError(f"an example has {', '.join(example) or 'nothing'}; write {{user: …, assistant: …}}")
        return value


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme == "ipc":
        return bool(parts.path) and len(text.removeprefix("ipc://").encode()) <= MAX_SOCKET_PATH
    names_a_host = parts.hostname not in (None, "*", "0.0.0.0", "::")  # samplers connect to the same text
    return parts.scheme == "tcp" and names_a_host and bool(port) and not parts.path


class Channel(Section):
    endpoint: str | None = None
    """null = ipc:// on one host; else rank 0's, tcp://10.0.0.1:5555."""
    connect_timeout_s: float = Field(600.0, gt=0)
    """For the first message."""
    stall_timeout_s: float = Field(1800.0, gt=0)
    """Without progress, such as a token, exit with code 75. Above every `timeout_s`."""

    @field_validator("endpoint")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            remedy = "write tcp://10.0.0.1:5555, tcp://[fd00::1]:5555, or null on one host"
            raise ValueError(f"not an address that both sides can use; {remedy}")
        return value


class Weights(Section):
    dir: Path | None = None
    """Published versions; null = /dev/shm on one host, else output_dir/weights."""
    full_every: int = Field(1, ge=1)
    """Of n versions one is published whole, the others as what changed; 1 = all whole."""
