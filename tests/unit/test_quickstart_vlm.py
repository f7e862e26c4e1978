"""The quick start with images: drawings, tokenizer, model folder, warm start, build."""

from __future__ import annotations

import collections
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common import config
from examples.drawings import drawings
from examples.drawings.build import FOLDER, build, stamp
from examples.drawings.settings import QuickStartVlm, SeeingWarmStart
from launcher.run import built_by
from rewards.boxed import boxed, boxed_format

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart_vlm.yaml"
TINY = QuickStartVlm(
    num_train=60, num_test=20, warm_start=SeeingWarmStart(num_clean_steps=2, num_careless_steps=1, batch_size=4)
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "quickstart_vlm"
    assert build(folder, TINY, report=lambda line: None)
    return folder


def seen(image: Image.Image) -> collections.Counter[tuple[str, str]]:
    """(colour, kind) of every cell that is not empty, from the pixels alone: the largest channel, and how much of its
    bounding box a shape fills. A square fills it, a circle π/4 of it, a triangle half."""
    pixels = np.asarray(image).astype(int)
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for top in range(0, 84, 28):
        for left in range(0, 84, 28):
            cell = pixels[top : top + 28, left : left + 28]
            drawn = (cell != 255).any(-1)
            if drawn.any():
                colour = ("red", "green", "blue")[cell[drawn].mean(0).argmax()]
                rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
                filled = drawn.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
                shapes = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}
                found[colour, min(shapes, key=lambda kind: abs(shapes[kind] - filled))] += 1
    return found


def answer_to(question: str, image: Image.Image) -> str:
    """The answer as somebody gives it who has the question and the pixels."""
    things = seen(image)
    if counted := re.fullmatch(r"How many (\w+) (\w+)s are there\?", question):
        return str(things[counted[1], counted[2]])
    if coloured := re.fullmatch(r"What colour is every (\w+)\?", question):
        (answer,) = {colour for colour, kind in things if kind == coloured[1]}
    else:
        (answer,) = {kind for colour, kind in things if colour == re.fullmatch(r"Which shape is (\w+)\?", question)[1]}
    return answer


def test_every_answer_follows_from_the_pixels_and_the_question():
    kinds = collections.Counter()
    for drawing in drawings.split("train", 600, seed=1) + drawings.split("test", 200, seed=1):
        assert drawing.answer == answer_to(drawing.question, drawing.image())
        kinds[drawing.question.split()[0], len(drawing.sorts)] += 1
    assert len(kinds) == 5 and min(kinds.values()) > 80, "each question of one sort, and two of them of two"


def test_no_held_out_pair_of_drawing_and_question_is_trained_on():
    train, test = drawings.split("train", 4096, seed=0), drawings.split("test", 512, seed=0)
    pairs = [{(d.image().tobytes(), d.question) for d in split} for split in (train, test)]
    assert [len(found) for found in pairs] == [4096, 512]
    assert not pairs[0] & pairs[1]
    assert not {(d.sorts, d.question) for d in drawings.split("train", 4096, seed=5)} & {
        (d.sorts, d.question) for d in test
    }, "with another seed, too"


def test_a_seed_gives_the_same_pixels_and_another_gives_others():
    one, same, other = (
        [(d.question, d.image().tobytes()) for d in drawings.split("test", 20, seed)] for seed in (0, 0, 1)
    )
    assert one == same != other


def test_completions_are_wrong_and_malformed_exactly_when_asked():
    from examples.drawings.warm_start import completion

    drawing = next(d for d in drawings.split("train", 50, seed=0) if d.question.startswith("How many"))
    rng = random.Random(0)
    right = completion(drawing, rng, wrong=0, malformed=0)
    assert right == rf"<think>{drawing.description}</think>\boxed{{{drawing.answer}}}"
    assert (boxed([right], [drawing.answer]), boxed_format([right])) == ([1.0], [1.0])
    wrong = [completion(drawing, rng, wrong=1, malformed=0) for _ in range(100)]
    assert set(boxed(wrong, [drawing.answer] * 100)) == {0.0} and set(boxed_format(wrong)) == {1.0}
    assert all(text.startswith(f"<think>{drawing.description}<") for text in wrong), "seen rightly"
    malformed = [completion(drawing, rng, wrong=0, malformed=1) for _ in range(100)]
    assert set(boxed_format(malformed)) == {0.0} and len(set(malformed)) == 5


def test_the_tokenizer_keeps_tags_and_places_of_images_whole(built: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    ids = tokenizer(r"<think>2 red circle</think>\boxed{2}", add_special_tokens=False)["input_ids"]
    pieces = ["<think>", "2", "Ġred", "Ġcircle", "</think>", r"\boxed{", "2", "}"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which shape is red?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\n{image}Which shape is red?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids].count("<|image_pad|>") == 1


def test_a_prompt_has_a_token_for_every_four_patches(built: Path):
    from transformers import AutoConfig, AutoTokenizer

    from examples.drawings.warm_start import prompt_ids

    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    settings, shape = config.load(CONFIG), AutoConfig.from_pretrained(str(built / "model"))
    found = [prompt_ids(drawing, tokenizer) for drawing in drawings.split("train", 300, seed=0)]
    assert {ids.count(shape.image_token_id) for ids in found} == {84 * 84 // 28**2}
    assert max(map(len, found)) <= settings.data.max_prompt_length
    needed = settings.data.max_prompt_length + settings.sampler.max_completion_length
    assert needed <= settings.vllm["max_model_len"] <= TINY.warm_start.context_length


def test_the_sampler_makes_the_prompts_that_the_warm_start_was_taught(built: Path):
    from examples.drawings.warm_start import prompt_ids, seen_by_model
    from model.images import decode_patches, read_vision
    from model.tokenizer import load_tokenizer
    from sampler.dataset import load_data
    from sampler.pictures import encode_problem
    from sampler.prompts import make_prompt

    settings, tokenizer = config.load(CONFIG), load_tokenizer(str(built / "model"))
    vision = read_vision(str(built / "model"))
    problems = load_data("data.eval", str(built / "test.jsonl"), settings.data, settings.rewards.reward_funcs)
    for problem, drawing in zip(problems, drawings.split("test", 20, seed=0), strict=True):
        images = encode_problem(problem, vision.form, settings.data)
        prompt = make_prompt(problem, tokenizer, settings.data, settings.prompt, vision, images)
        assert prompt.token_ids.tolist() == prompt_ids(drawing, tokenizer)
        (image,) = images
        assert (decode_patches(image, vision.form) == seen_by_model(drawing).numpy()).all()


def test_the_warm_start_is_the_same_twice_and_moves_the_vision_tower():
    import torch

    from examples.drawings.model import random_model, train_tokenizer
    from examples.drawings.warm_start import train

    rows = drawings.split("train", 16, seed=0)
    tokenizer, how = train_tokenizer(rows, 400, 256), TINY.warm_start
    one, two = (train(rows, tokenizer, how, seed=0, report=lambda line: None).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.manual_seed(0)
    start = random_model(tokenizer, how).state_dict()
    towers = [name for name in one if ".visual." in name and name.endswith("weight")]
    assert towers and all(not torch.equal(one[name], start[name]) for name in towers)


def test_the_loss_depends_on_what_is_drawn():
    """The control: with another drawing's pixels the first token of an answer is no longer equally likely."""
    import torch

    from examples.drawings.model import random_model, train_tokenizer
    from examples.drawings.warm_start import loss_of, prompt_ids, seen_by_model
    from model.cpu.linear import use_faster_linear

    rows = drawings.split("train", 16, seed=0)
    tokenizer = train_tokenizer(rows, 400, 256)
    torch.manual_seed(0)
    model = random_model(tokenizer, TINY.warm_start)
    use_faster_linear(model)
    prompt = prompt_ids(rows[0], tokenizer)
    losses = [loss_of(model, tokenizer, [prompt], ["red"], [seen_by_model(d)]).item() for d in rows[:2]]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_the_build_writes_what_the_configuration_reads(built: Path):
    settings = config.load(CONFIG)
    for path in (settings.data.train, settings.data.eval, settings.model.path):
        assert path.startswith(f"{FOLDER}/") and (built / Path(path).relative_to(FOLDER)).exists()
    assert built_by(settings) == "examples.drawings"
    rows = [json.loads(line) for line in (built / "test.jsonl").read_text().splitlines()]
    expected = drawings.split("test", 20, seed=0)
    assert [row["question"] for row in rows] == [f"<image>{d.question}" for d in expected]
    assert [row["answer"] for row in rows] == [d.answer for d in expected]
    for row, drawing in zip(rows, expected, strict=True):
        (file,) = row["images"]
        with Image.open(built / file) as image:
            assert image.tobytes() == drawing.image().tobytes()


def test_transformers_takes_model_and_processor_for_qwen2_5_vl(built: Path):
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model, info = AutoModelForImageTextToText.from_pretrained(
        str(built / "model"), dtype="float32", output_loading_info=True
    )
    assert isinstance(model, Qwen2_5_VLForConditionalGeneration)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    processor = Qwen2VLImageProcessorPil.from_pretrained(str(built / "model"))
    patches = processor(images=[drawings.split("test", 1, seed=0)[0].image()], return_tensors="pt")
    assert patches["image_grid_thw"].tolist() == [[1, 6, 6]], "84 × 84 pixels are not resized"


def test_a_second_build_does_nothing_and_imports_no_torch(built: Path):
    again = (
        "import sys; from pathlib import Path; from examples.drawings.build import build\n"
        "from examples.drawings.settings import QuickStartVlm, SeeingWarmStart\n"
        f"was_built = build(Path({str(built)!r}), {TINY!r}, print)\n"
        "print(was_built, 'torch' in sys.modules, 'PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", again], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False False\n"


def test_another_setting_is_built_again():
    assert stamp(TINY) != stamp(QuickStartVlm()) == stamp(QuickStartVlm())
