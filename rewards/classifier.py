"""A reward model that scores completions: a sequence classifier of transformers, loaded once in the rewards' process.

What it reads, and which of its numbers is the reward: docs/rewards.md.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from rewards import prompt_before


@dataclass
class Classifier:
    model: str  # a hub id or a folder
    device: int | None = None  # number of a GPU, as `nvidia-smi -L` has it; None: the CPU
    label: str | int | None = None
    revision: str | None = None
    batch_size: int = 8
    is_costly = True  # `launch.sh check` does not try it

    def __post_init__(self) -> None:
        if self.device is not None:  # it is not among the devices that the sampler may see
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._where = "cpu" if self.device is None else f"cuda:{self.device}"
        options = {"dtype": torch.float32 if self.device is None else "auto", "output_loading_info": True}
        try:
            sides = {"padding_side": "right", "truncation_side": "left", "revision": self.revision}
            self._tokenizer = AutoTokenizer.from_pretrained(self.model, **sides)
            loaded = AutoModelForSequenceClassification.from_pretrained(self.model, revision=self.revision, **options)
            self._model = loaded[0].to(self._where).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.model} cannot be loaded: {(str(error).splitlines() or [''])[0]}") from None
        if missing := sorted(loaded[1]["missing_keys"]):
            raise UserError(f"{self.model} is no sequence classifier: it has no {missing[0]}")
        tokenizer, config = self._tokenizer, self._model.config.get_text_config()
        # a causal model scores the last token that is not padding, so a token that may end a text must not be padding
        own = tokenizer.convert_ids_to_tokens(pad) if (pad := config.pad_token_id) in range(len(tokenizer)) else None
        tokenizer.pad_token = own or tokenizer.bos_token or tokenizer.pad_token or tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id
        tables = [m for name, m in self._model.named_modules() if name.endswith("position_embeddings")]
        unused = max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)
        limits = (getattr(config, "max_position_embeddings", None) or 0) - unused, tokenizer.model_max_length, 1 << 20
        self._longest = min(limit for limit in limits if limit > 0)
        self._column = self._column_of_label()

    def _column_of_label(self) -> int:
        """Returns the column of the logits for `label`. Raises UserError if there is none."""
        labels = {str(name): i for i, name in self._model.config.id2label.items()}
        if len(labels) == 1 and self.label is None:
            return 0
        found = labels.get(str(self.label), self.label)
        if type(found) is int and found in labels.values():  # YAML reads yes and no without quotes as bool
            return found
        raise UserError(f"label {self.label!r} is none of {self.model}; write label: with one of {[*labels]}")

    def __call__(
        self, prompts: list[Any], completions: list[Any], log_metric: Callable[[str, float], None]
    ) -> list[float]:
        import torch

        scores = list[float]()
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            rows = self._tokens(prompts[part], completions[part]).to(self._where)
            with torch.inference_mode():
                logits = self._model(**rows).logits.float()
            if logits.shape[1] > 1 and (kind := self._model.config.problem_type) != "regression":
                logits = logits.sigmoid() if kind == "multi_label_classification" else logits.softmax(1)
            scores += logits[:, self._column].tolist()
            log_metric("classifier_cut", float((rows["attention_mask"].sum(1) >= self._longest).float().mean()))
        return scores

    def _tokens(self, prompts: list[Any], completions: list[Any]) -> Any:
        options = {"truncation": True, "max_length": self._longest, "padding": True, "return_tensors": "pt"}
        if self._tokenizer.chat_template is None:
            asked = map(prompt_before, prompts, completions)
            return self._tokenizer([*map(_text, asked)], [*map(_text, completions)], **options)
        both = [
            _messages(prompt_before(p, c), "user") + _messages(c, "assistant")
            for p, c in zip(prompts, completions, strict=True)
        ]
        texts = [self._tokenizer.apply_chat_template(messages, tokenize=False) for messages in both]
        return self._tokenizer(texts, add_special_tokens=False, **options)


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(str(message["content"]) for message in content)
