"""The real engine on tiny models that see: log-probs and the prompt of the trainer, proven reloads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.types import EncodedImage
from model.checksum import describe
from model.files.images import Vision, encode_image, read_vision
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from model.vision import layout_of, with_vision
from sampler.engine.completions import Completion, SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.engine_tensors import Proof
from tests.support.configs import config_in
from tests.support.engines import finished, kept
from tests.support.tiny_vision import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    VOCAB_SIZE,
    tiny_vision_model,
)
from tests.support.vision import END, PAD, START, picture, write_tokenizer
from trainer.engine.exported import parameters, under_checkpoint_names

pytestmark = pytest.mark.timeout(300)

PARAMS = SamplingParams(1.0, 16, 2, 7)


class Eye:
    """An engine, the trainer's model, and prompts with images."""

    def __init__(self, family: str, folder: Path, tied: bool = True, **sections: Any):
        self.folder = tiny_vision_model(folder / "model", family, tied)
        # vLLM's kernel of a delta net for a CPU wants bfloat16
        self.dtype, self.rounding = ("bfloat16", 0.3) if family == "qwen3_5" else ("float32", 1e-5)
        special = {IMAGE_TOKEN: PAD, VISION_START: START, VISION_END: END, VIDEO_TOKEN: "<|video_pad|>"}
        write_tokenizer(self.folder, VOCAB_SIZE, special)
        data = {"image_key": "images", "limit_images": 2, "max_prompt_length": 64, "min_pixels": 784}
        sections["model"] = {"path": str(self.folder), "dtype": self.dtype}
        sections["sampler"] = {"num_generations": 2, "max_completion_length": 16}
        sections["trainer"] = {"prompts_per_step": 4}
        self.config = config_in(folder, data=data | {"max_pixels": 20_000}, **sections)
        self.vision = read_vision(str(self.folder))
        self.model: Any = load_causal_lm(str(self.folder), self.dtype, None, trust_remote_code=False)
        self.layout = layout_of(self.model.config, str(self.folder), None)
        self.engine = kept(Engine(self.config, num_gpus=0))

    def prompt(self, *images: EncodedImage) -> list[int]:
        short = [5, 9] + [token for _ in images for token in (VISION_START, IMAGE_TOKEN, VISION_END)] + [17, 33]
        return self.vision.expanded(short, images).tolist()

    def sample(self, *images: EncodedImage, behind: Sequence[int] = ()) -> list[Completion]:
        """behind: what stands between the prompt and the completion, such as an earlier turn."""
        self.engine.submit("key", [*self.prompt(*images), *behind], PARAMS, images)
        [completions] = finished(self.engine).values()
        return completions

    def distance(self, *shown: tuple[EncodedImage, ...], said: Sequence[int] = (), given: Any = None) -> float:
        """Largest difference of a sampled log-prob from the trainer's, which packs the groups into one row.

        shown: images of each group's prompt. said: an earlier turn. given: what the trainer is shown instead.
        """
        sampled = [self.sample(*images, behind=said) for images in shown]
        groups = [
            (self.prompt(*images), [[*said, *c.token_ids.tolist()] for c in completions])
            for images, completions in zip(shown, sampled, strict=True)
        ]
        with torch.no_grad():
            row = with_vision(pack(groups, packing_of(self.model), given or shown), self.layout)
            found = score_logprobs(self.model, row, 1.0, 64).numpy()
        theirs = [[np.nan] * len(said) + c.logprobs.tolist() for completions in sampled for c in completions]
        return float(np.nanmax(np.abs(found - np.concatenate(theirs))))

    def change(self, seed: int) -> None:
        """Every parameter of the trainer's model, the tower's too."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))

    def published(self) -> dict[str, torch.Tensor]:
        return {t.name: t.make() for t in under_checkpoint_names(self.model, parameters(self.model))}

    def load(self, folder: Path) -> Proof:
        """As the trainer publishes: under the names of checkpoints, no tied head."""
        tensors = self.published()
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return self.engine.weights.load(folder, {n: describe(t) for n, t in tensors.items()})


FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"]
UNTIED = "qwen2_5_vl, untied"  # a head of its own, as Qwen2.5-VL-7B has


@pytest.fixture(scope="module", params=FAMILIES)
def eye(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eye:
    return Eye(request.param.split(",")[0], tmp_path_factory.mktemp("eye"), tied=request.param != UNTIED)


def images_for(vision: Vision) -> list[EncodedImage]:
    first, second, third = (picture(112, 84, seed) for seed in range(3))
    return [encode_image(p, vision.form, 784, 20_000) for p in (first, second.resize((56, 56)), third)]


def test_log_probs_are_the_trainers_with_the_same_images_and_not_with_others(eye: Eye) -> None:
    """What the model or a tool wrote is text, even where it is an image's token."""
    first, second, other = images_for(eye.vision)
    shown = [(first,), (first, second), ()]
    assert eye.distance(*shown) < eye.rounding
    assert eye.distance(*shown) < eye.rounding  # by the prefix cache
    assert eye.distance(*shown, given=[(other,), (other, second), ()]) > 0.5  # the control
    assert eye.distance((first,), said=[40, IMAGE_TOKEN, 41, VISION_START, IMAGE_TOKEN, VISION_END, 42]) < eye.rounding


def test_another_prompt_than_the_trainer_s_is_refused(eye: Eye) -> None:
    first, second, _ = images_for(eye.vision)
    eye.engine.submit("key", eye.prompt(second), PARAMS, [first])
    with pytest.raises(RuntimeError, match="it would train on another prompt"):
        finished(eye.engine)
    eye.engine.abort(["key"])


@pytest.mark.parametrize("eye", [*FAMILIES, UNTIED], indirect=True)
def test_a_reload_is_proven_tensor_by_tensor_and_the_next_image_is_seen_with_the_new_tower(
    eye: Eye, tmp_path: Path
) -> None:
    first, _, _ = images_for(eye.vision)
    eye.sample(first)  # its features are in the encoder's cache now
    for number in (1, 2):
        eye.change(number)
        proof = eye.load(tmp_path / str(number))
        assert proof.wrong == [] and all("packed" in why for why in proof.unproven.values())
        assert proof.proven | proof.unproven.keys() == eye.published().keys()
        assert any("visual" in name for name in proof.proven)
        assert eye.distance((first,)) < eye.rounding
