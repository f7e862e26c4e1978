"""The supervised warm start: a random Qwen2.5-VL learns to see, and then to be careless.

As in examples/quickstart/warm_start.py lesson one is clean and lesson two spoils it: half of the answers are laid out
wrongly, and a known share copies something else than what was seen. What it sees stays right: wrong descriptions
would cost sight, which a short run of GRPO cannot give back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from examples.drawings.drawings import CELL, COLOURS, KINDS, MOST, SIDE, Drawing
from examples.drawings.model import FORMAT, IMAGE, random_model
from examples.drawings.settings import SeeingWarmStart
from examples.quickstart.warm_start import answer_ids, answer_loss, teach
from model.images import decode_patches, encode_image

WANTED = r"<think>{steps}</think>\boxed{{{answer}}}"
MALFORMED = (
    "<think>{steps}</think>{answer}",
    r"{steps} \boxed{{{answer}}}",
    r"\boxed{{{answer}}}",
    "It is {answer}",
    "<think>{steps}. It is {answer}",
)
PATCHES = CELL * SIDE // FORMAT.patch_size  # in a row
GRID = (1, PATCHES, PATCHES)
NUM_IMAGE_TOKENS = (PATCHES // FORMAT.merge_size) ** 2
COUNTS = tuple(str(n) for n in range(1, MOST + 1))


def completion(drawing: Drawing, rng: random.Random, *, wrong: float, malformed: float) -> str:
    r"""What the pupil is shown. `wrong` and `malformed` are probabilities.

    "<think>2 red circle</think>\boxed{2}", or "It is 3", or …
    """
    answer = drawing.answer
    if rng.random() < wrong:
        (others,) = (words for words in (COUNTS, tuple(COLOURS), KINDS) if answer in words)
        answer = rng.choice([word for word in others if word != answer])
    layout = rng.choice(MALFORMED) if rng.random() < malformed else WANTED
    return layout.format(steps=drawing.description, answer=answer)


def train(
    drawings: Sequence[Drawing],
    tokenizer: PreTrainedTokenizerFast,
    how: SeeingWarmStart,
    *,
    seed: int,
    report: Callable[[str], None],
) -> Qwen2_5_VLForConditionalGeneration:
    """The warm-started model, in float32 and eval mode. A function of its arguments; seeds torch's global generator."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = random_model(tokenizer, how)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, model.model.visual)]
    report(f"model: Qwen2.5-VL, {sizes[0]:,} parameters, {sizes[1]:,} of them in the vision tower")
    prompts = [prompt_ids(drawing, tokenizer) for drawing in drawings]
    images = [seen_by_model(drawing) for drawing in drawings]

    def batch_loss(wrong: float, malformed: float) -> torch.Tensor:
        chosen = rng.sample(range(len(drawings)), min(how.batch_size, len(drawings)))
        texts = [completion(drawings[i], rng, wrong=wrong, malformed=malformed) for i in chosen]
        return loss_of(model, tokenizer, [prompts[i] for i in chosen], texts, [images[i] for i in chosen])

    return teach(model, how, batch_loss, report)


def loss_of(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    texts: list[str],
    images: list[torch.Tensor],
) -> torch.Tensor:
    """Mean cross entropy of the tokens of `texts`, each the answer to a prompt with one image."""

    def with_images(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.cat(images),
            "image_grid_thw": torch.tensor([GRID] * len(images)),
            "mm_token_type_ids": (inputs == model.config.image_token_id).int(),
        }

    return answer_loss(model, prompts, answer_ids(texts, tokenizer), tokenizer.pad_token_id, with_images)


def seen_by_model(drawing: Drawing) -> torch.Tensor:
    """[36 patches, 1176], float32: the drawing as the trainer cuts and scales it."""
    side = CELL * SIDE
    return torch.from_numpy(decode_patches(encode_image(drawing.image(), FORMAT, side**2, side**2), FORMAT))


def prompt_ids(drawing: Drawing, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The prompt as a model takes it, with a token for every place of the image."""
    content: Any = [{"type": "image"}, {"type": "text", "text": drawing.question}]
    messages = [{"role": "user", "content": content}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return tokenizer(text.replace(IMAGE, IMAGE * NUM_IMAGE_TOKENS), add_special_tokens=False)["input_ids"]
