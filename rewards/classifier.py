"""A reward model that scores completions: a sequence classifier of transformers.

It is loaded once, in the rewards' process. docs/rewards.md says what it reads, and which of its
numbers is the reward.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from rewards import prompt_before

_LONGEST = 1 << 20  # tokens, where neither the model nor its tokenizer has a limit


@dataclass
class Classifier:
    """A reward function that scores completions by a sequence classifier."""

    model: str  # a hub id or a folder
    device: int | None = None  # number of a GPU, as `nvidia-smi -L` has it; None: the CPU
    label: str | int | None = None
    revision: str | None = None
    batch_size: int = 8
    is_costly = True  # `launch.sh check` does not try it

    def __post_init__(self) -> None:
        """Loads the model. Raises UserError if it is no classifier or lacks the label."""
        self._device_name = "cpu"
        if self.device is not None:
            # The device is not among those that the sampler may see.
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            self._device_name = f"cuda:{self.device}"
        try:
            missing = self._load()
        except (OSError, ValueError, RuntimeError) as error:
            reason, _, _ = str(error).partition("\n")
            raise UserError(f"{self.model} cannot be loaded: {reason}") from None
        if missing:
            raise UserError(f"{self.model} is no sequence classifier: it has no {missing[0]}")
        self._set_padding()
        self._max_tokens = self._find_max_tokens()
        self._column = self._column_of_label()

    def _load(self) -> list[str]:
        """Loads tokenizer and model, and returns the names of weights that the model lacks."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            self.model, revision=self.revision, padding_side="right", truncation_side="left"
        )
        dtype: Any = "auto"
        if self.device is None:
            dtype = torch.float32
        model, info = AutoModelForSequenceClassification.from_pretrained(
            self.model, revision=self.revision, dtype=dtype, output_loading_info=True
        )
        self._model: Any = model.to(self._device_name).eval()
        return sorted(info["missing_keys"])

    def _set_padding(self) -> None:
        """Chooses the padding token of the tokenizer and the model.

        A causal model scores the last token that is not padding, so a token that may end a text
        must not be padding.
        """
        tokenizer = self._tokenizer
        config = self._model.config.get_text_config()
        padding = None
        if config.pad_token_id in range(len(tokenizer)):
            padding = tokenizer.convert_ids_to_tokens(config.pad_token_id)
        tokenizer.pad_token = (
            padding or tokenizer.bos_token or tokenizer.pad_token or tokenizer.eos_token
        )
        config.pad_token_id = tokenizer.pad_token_id

    def _find_max_tokens(self) -> int:
        """Returns how many tokens the model can read."""
        num_positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", 0)
        num_unused = 0  # a table of positions may begin behind its padding
        for name, module in self._model.named_modules():
            padding_index = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and padding_index is not None:
                num_unused = max(num_unused, padding_index + 1)
        limits = [(num_positions or 0) - num_unused, self._tokenizer.model_max_length, _LONGEST]
        return min(limit for limit in limits if limit > 0)

    def _column_of_label(self) -> int:
        """Returns the column of the logits for `label`. Raises UserError if there is none."""
        labels = {str(name): column for column, name in self._model.config.id2label.items()}
        if len(labels) == 1 and self.label is None:
            return 0
        column = labels.get(str(self.label), self.label)
        # YAML reads yes and no without quotes as bool, which is no column.
        if type(column) is int and column in labels.values():
            return column
        raise UserError(
            f"label {self.label!r} is none of {self.model}; write label: with one of {list(labels)}"
        )

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None],
    ) -> list[float]:
        """Returns the score of each completion behind its prompt."""
        import torch

        scores = list[float]()
        for start in range(0, len(prompts), self.batch_size):
            end = start + self.batch_size
            batch = self._tokens(prompts[start:end], completions[start:end]).to(self._device_name)
            with torch.inference_mode():
                logits = self._model(**batch).logits.float()
            scores += self._activated(logits)[:, self._column].tolist()
            is_cut = batch["attention_mask"].sum(1) >= self._max_tokens
            log_metric("classifier_cut", float(is_cut.float().mean()))
        return scores

    def _activated(self, logits: Any) -> Any:
        """Returns probabilities of several labels [rows, labels], or logits of one as they are."""
        kind = self._model.config.problem_type
        if logits.shape[1] == 1 or kind == "regression":
            return logits
        if kind == "multi_label_classification":
            return logits.sigmoid()
        return logits.softmax(1)

    def _tokens(self, prompts: list[Any], completions: list[Any]) -> Any:
        """Returns the padded tokens of prompts with their completions."""
        options = {
            "truncation": True,
            "max_length": self._max_tokens,
            "padding": True,
            "return_tensors": "pt",
        }
        pairs = list(zip(prompts, completions, strict=True))
        before = [prompt_before(prompt, completion) for prompt, completion in pairs]
        if self._tokenizer.chat_template is None:
            prompt_texts = [_text(prompt) for prompt in before]
            completion_texts = [_text(completion) for completion in completions]
            return self._tokenizer(prompt_texts, completion_texts, **options)
        texts = list[str]()
        for prompt, completion in zip(before, completions, strict=True):
            messages = _messages(prompt, "user") + _messages(completion, "assistant")
            texts.append(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return self._tokenizer(texts, add_special_tokens=False, **options)


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return content  # type: ignore[no-any-return]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(message["content"]) for message in content)
