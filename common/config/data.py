"""The settings of data sets: where rows come from, and how several data sets are mixed in the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from common.config.sampling import Rollouts
from common.config.sections import Section


class RowSource(Section):
    """The settings of one of several data sets, with its share of the groups."""

    path: str
    name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """In metrics; null = that of the file or data set."""
    weight: float | None = Field(None, gt=0)
    """Share of the groups, beside the others' weights; null = its rows."""
    rename: dict[str, str] = {}
    """Behind data.rename."""
    rollout: Rollouts | None = None
    """Instead of the section rollout; {} = one turn."""
    rewards: list[str] | None = Field(None, min_length=1)
    """Those of rewards.reward_funcs that score it, by their short names; null = all."""

    @model_validator(mode="before")
    @classmethod
    def _source_from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @property
    def label(self) -> str:
        return Path(self.path.partition("@")[0].partition(":")[0]).stem if self.name is None else self.name


def _form_of_rows(value: Any) -> str:
    mixed = isinstance(value, list) and any(isinstance(entry, dict | RowSource) for entry in value)
    return "text" if isinstance(value, str) else "sources" if mixed else "list"


Rows = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[str], Tag("list")] | Annotated[list[RowSource], Tag("sources")],
    Discriminator(_form_of_rows),
]


def entries(spec: str | list[str] | list[RowSource] | None) -> list[RowSource]:
    """Returns the entries of a data setting. Plain paths are together one source, with the name ""."""
    given = [spec] if isinstance(spec, str) else spec or []
    return [
        entry if isinstance(entry, RowSource) else RowSource.model_construct(path=entry, name="") for entry in given
    ]


class Data(Section):
    train: Rows
    """Hub data set (`openai/gsm8k:main@train[:512]`), file, folder, list; a mix: docs/data.md#several-sources."""
    eval: Rows | None = None
    """Held-out problems, or sets {easy: a.jsonl, hard: b.jsonl}; `test.jsonl@train[:96]` is a file's first 96."""
    prompt_key: str | None = "question"
    """Column of problems; `extra_info.question` looks inside. null: prompt.format_prompt makes them of others."""
    answer_key: str | None = "answer"
    """Column of the rewards' `answer`."""
    rename: dict[str, str] = {}
    """{problem: question} renames columns first."""
    max_prompt_length: int = Field(512, gt=0)
    """Tokens; longer prompts are left out."""
    max_bad_rows: float = Field(0.01, ge=0, le=1)
    """Share of unreadable rows to leave out, at least 3; 0 = none."""
    shuffle: bool = True
    """A new order each epoch."""
    image_key: str | None = None
    """Column of images."""
    limit_images: int = Field(1, ge=0)
    """Most images in a row."""
    min_pixels: int = Field(262_144, gt=0)
    """Smaller images are enlarged."""
    max_pixels: int = Field(2_097_152, gt=0)
    """Larger images are reduced: 2,674 tokens."""

    @field_validator("eval", mode="before")
    @classmethod
    def _sets_by_name(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "path" in value:  # one with `path` is a single source, not in a list
            return [value] if isinstance(value, dict) else value
        if not value:
            raise ValueError("no set of problems; write {easy: a.jsonl, hard: b.jsonl}, or null")
        sets = {str(name): rows if isinstance(rows, dict) else {"path": rows} for name, rows in value.items()}
        return [{"name": name, **rows} for name, rows in sets.items()]

    def _contradictions(self) -> Iterator[str]:
        low, high = self.min_pixels, self.max_pixels
        if low > high:
            yield f"min_pixels {low} is above max_pixels {high}; set data.min_pixels={high}"
        if self.image_key is not None and self.limit_images == 0:
            yield "limit_images 0 allows none of the images of image_key; set data.limit_images=1"
        for option, spec in (("train", self.train), ("eval", self.eval)):
            labels = [entry.label for entry in entries(spec) if entry.label]
            if doubled := sorted({label for label in labels if labels.count(label) > 1}):
                yield f"{option} has two sources named {doubled[0]!r}; write {{path: …, name: {doubled[0]}-2}} for one"
        weights = [entry.weight is None for entry in entries(self.train)]
        if any(weights) and not all(weights):
            yield "train has sources with a weight and some without; give one to each, or to none: then rows count"
        for entry in entries(self.eval):
            if entry.weight is not None:
                yield f"eval asks every problem once: remove the weight of {entry.path}"
            named = entry.label and entry.label in {e.label for e in entries(self.train)}
            if named and (entry.rollout is not None or entry.rewards is not None):
                yield f"eval: source {entry.label!r} is rolled out and scored as in train; remove both there"
