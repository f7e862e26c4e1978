"""Rows with images: every form of column, where images stand in a prompt, and what is refused."""

import base64
import contextlib
import io
import json
import random
import re
import struct
import textwrap
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from PIL import Image

from common.config import Data, PromptTemplate
from common.errors import UserError
from common.paths import ROOT
from common.types import Problem, Prompt
from common.wire.group_limits import picture_size
from model.files.folder import require_downloaded, require_models
from model.files.images import Vision, read_vision
from sampler.prompts.dataset import fingerprint, load_data, whole_row
from sampler.prompts.many_prompts import make_prompts
from sampler.prompts.pictures import encode_problem, image_size, read_file, sources
from sampler.prompts.prompts import make_prompt
from tests.support.configs import config_of
from tests.support.vision import END, PAD, PLAIN, START, byte_tokenizer, file_of, picture, write_vision_settings

CHAT = PromptTemplate(chat_template=ROOT / "configs" / "templates" / "chatml.jinja")
DATA = Data(train="x.jsonl", image_key="images", limit_images=2, min_pixels=784, max_pixels=10_000)
RED, BLUE = file_of(picture(84, 56)), file_of(picture(56, 56, seed=1), "JPEG")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """With the marks of turns and images."""
    return byte_tokenizer("<|im_start|>", "<|im_end|>", START, PAD, END)


@pytest.fixture(scope="module")
def vision(tokenizer: Any) -> Vision:
    return Vision(PLAIN, *tokenizer.convert_tokens_to_ids([START, PAD, END]))


def problem(text: Any, *images: bytes, index: int = 0) -> Problem:
    return Problem(index, {"question": text, "answer": "4"}, images)


def made(given: Problem, tokenizer: Any, vision: Vision, template: PromptTemplate = CHAT) -> Prompt:
    config = config_of(data=DATA.model_dump(), prompt=template.model_dump())
    return make_prompt(given, tokenizer, config, vision)


# ---- columns ----------------------------------------------------------------------------------------------------


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ([], ()),
        (RED, (RED,)),
        ([RED, BLUE], (RED, BLUE)),
        ({"bytes": memoryview(RED), "path": "gone.png"}, (RED,)),  # as a table has it
        ([{"bytes": None, "path": "blue.jpg"}], (BLUE,)),
        ("blue.jpg", (BLUE,)),
        # written as text
        ([f"data:image/png;base64,{base64_of(RED)}"], (RED,)),
        ([f"DATA:;base64,{quote(base64_of(RED))}"], (RED,)),
        ([base64_of(BLUE)], (BLUE,)),
        ([base64.urlsafe_b64encode(RED).decode().rstrip("=")], (RED,)),
        (["\n".join(textwrap.wrap(base64_of(RED), 76))], (RED,)),
        ([{"bytes": base64_of(RED), "path": None}], (RED,)),
        ([{"bytes": [*RED], "path": None}], (RED,)),
        ([{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64_of(BLUE)}"}}], (BLUE,)),
        ([{"type": "image", "image": "blue.jpg"}], (BLUE,)),
        ("file:HERE/blue.jpg", (BLUE,)),
    ],
)
def test_a_column_is_one_image_or_a_list_of_them_in_any_form(tmp_path: Path, value: Any, expected: Any) -> None:
    (tmp_path / "blue.jpg").write_bytes(BLUE)
    value = value.replace("HERE", f"//{tmp_path}") if isinstance(value, str) else value
    assert tuple(map(read_file, sources(value, tmp_path))) == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "3 is no image: expected bytes, a path, a data: URI, base64"),
        ([b"x", 3], "3 is no image"),
        ({"link": "x"}, "{'link': 'x'} is no image"),
        ("https://a.b/c.png?key=1", "'https://a.b/c.png?key=1' is a URL, and nothing is fetched in a run: download it"),
        ({"url": "s3://bucket/c.png"}, "'s3://bucket/c.png' is a URL"),
        ("gone.png", "gone.png: no such file in "),
        ("/dev", "/dev: no such file in "),
        ("~nobody/x.png", "no such file"),
        ("data:image/png;base64,%%%", "'data:image/png;base64,%%%'… of 25 characters is no path and no base64"),
        ("x" * 9000 + "!", f"'{'x' * 40}'… of 9,001 characters is no path and no base64"),
        ("a\0b.png", "no such file"),
    ],
)
def test_what_is_no_image_is_refused_in_a_short_sentence(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        sources(value, tmp_path)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.prompts.pictures.MAX_BYTES", 1 << 20)
    (tmp_path / "most.png").write_bytes(bytes(1 << 20))
    (tmp_path / "more.png").write_bytes(bytes(2 << 20))
    assert len(read_file(sources("most.png", tmp_path)[0])) == 1 << 20
    for value in ("more.png", bytes(2 << 20)):
        with pytest.raises(ValueError, match="a file of more than 1 MiB"):
            sources(value, tmp_path)


def load(tmp_path: Path, *images: Any, **changes: Any) -> list[Problem]:
    """Rows with these images, of which red.png is in their folder."""
    (tmp_path / "red.png").write_bytes(RED)
    rows = [{"question": "?", "answer": "4", "images": names} for names in images]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data("data.train", f"{tmp_path}/x.jsonl", DATA.model_copy(update=changes))


def test_paths_start_at_the_file_and_blind_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, blind = load(tmp_path, "red.png", [])
    row = {"question": "?", "answer": "4"}
    assert (shown.images, shown.columns, blind.images) == ((tmp_path / "red.png",), row, ())
    assert whole_row(shown, "images") == row | {"images": [RED]}
    assert "data.train: 1 of 2 rows have no image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        (
            [["red.png"], ["red.png"] * 3, ["red.png"] * 4],
            {},
            "2 of 3 rows have more images than data.limit_images 2, first row 1; the most is 4",
        ),
        ([["gone.png"]], {}, "row 0: data.image_key 'images': gone.png: no such file in"),
        ([[], []], {}, "data.image_key 'images' is empty in each of the 2 rows"),
        ([["red.png"]], {"image_key": "image"}, 'data.image_key "image" not found in'),
        ([["red.png"]], {"image_key": "image"}, "Set data.image_key: images"),
    ],
)
def test_rows_without_needed_images_are_refused(tmp_path: Path, rows: list[list[str]], changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load(tmp_path, *rows, **changes)


def of_40000_pixels_a_side() -> bytes:
    size = struct.pack(">II5B", 40_000, 40_000, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    return b"\x89PNG\r\n\x1a\n" + header + RED[33:]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (RED[:10], "10 bytes that are no PNG"),
        (RED[:-200], "truncated"),  # torn behind its header
        (file_of(picture(3000, 10)), "3000 × 10 pixels"),
        (of_40000_pixels_a_side(), "40000 × 40000 pixels|decompression bomb"),  # told by its header
    ],
)
def test_an_image_that_cannot_be_read_or_is_a_strip_is_refused_by_row_and_place(source: bytes, said: str) -> None:
    with pytest.raises(UserError, match=f"row 7: image 2 cannot be read: .*({said})"):
        encode_problem(problem("?", RED, source, index=7), PLAIN, DATA)


def with_broken(tmp_path: Path, broken: dict[int, Any], **changes: Any) -> list[int]:
    """Those of 40 rows that load_data leaves."""
    (tmp_path / "cut.jpg").write_bytes(BLUE[:-300])
    (tmp_path / "strip.png").write_bytes(file_of(picture(3000, 10)))
    found = load(tmp_path, *(broken.get(i, "red.png") for i in range(40)), **changes)
    return [problem.index for problem in found]


BROKEN = {7: "cut.jpg", 12: ["red.png", "strip.png"], 30: "gone.png"}
SAID = (
    "data.train: 3 of 40 rows cannot be used and are left out (data.max_bad_rows):",
    "\n  row 7: image 1 cannot be read: image file is truncated",
    "\n  row 12: image 2 cannot be read: 3000 × 10 pixels, a strip",
    "\n  row 30: data.image_key 'images': gone.png: no such file in",
)


def test_broken_images_are_all_named_and_a_few_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_broken(tmp_path, BROKEN) == [i for i in range(40) if i not in BROKEN]
    said = capsys.readouterr().err
    assert all(part in said for part in SAID)
    with pytest.raises(UserError) as caught:
        with_broken(tmp_path, BROKEN, max_bad_rows=0)
    for part in (SAID[0].partition(" and")[0] + ". Mend them, or leave them out: data.max_bad_rows=0.075", *SAID[1:]):
        assert part in str(caught.value)


def test_many_broken_images_are_left_out_by_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {i: "cut.jpg" for i in range(0, 40, 3)}
    with pytest.raises(UserError, match=r"14 of 40 rows cannot be used.* data.max_bad_rows=0.35\n"):
        with_broken(tmp_path, broken)
    assert len(with_broken(tmp_path, broken, max_bad_rows=0.35)) == 26
    assert "rows 30, 33, 36, 39" in capsys.readouterr().err, "those beyond the first ten are named, too"
    with pytest.raises(UserError, match="40 of 40 rows cannot be used"):
        with_broken(tmp_path, dict.fromkeys(range(40), "cut.jpg"), max_bad_rows=1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.filterwarnings("ignore")  # of PIL, about damaged files
def test_a_damaged_file_is_seen_or_refused_by_row_and_raises_nothing_else(kind: str) -> None:
    rng, whole, refused = random.Random(kind), file_of(picture(84, 56), kind), 0
    for _ in range(60):
        damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.choice([1, 2, 8])):
            if damaged:
                damaged[rng.randrange(min(len(damaged), 200))] = rng.randrange(256)
        try:
            (image,) = encode_problem(problem("?", bytes(damaged), index=7), PLAIN, DATA)
            assert picture_size(image.png, DATA.max_pixels)
        except UserError as error:
            assert "row 7: image 1 cannot be read" in str(error)
            refused += 1
    assert refused > 5


# ---- prompts ----------------------------------------------------------------------------------------------------


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


SHOWN = f"{START}{PAD}{END}"
PARTS = [{"type": "text", "text": "A "}, {"type": "image"}, {"type": "text", "text": "?"}]


@pytest.mark.parametrize(
    ("row", "text", "for_rewards"),
    [
        ("How many?", chat(f"{SHOWN}How many?"), "How many?"),
        ("A <image>?", chat(f"A {SHOWN}?"), "A <image>?"),
        ([{"role": "user", "content": PARTS}], chat(f"A {SHOWN}?"), [{"role": "user", "content": "A <image>?"}]),
    ],
)
def test_images_are_first_unless_placed(tokenizer: Any, vision: Vision, row: Any, text: str, for_rewards: Any) -> None:
    prompt = made(problem(row, RED), tokenizer, vision)
    assert (prompt.text, prompt.for_rewards) == (text, for_rewards)


def test_a_prompt_has_a_token_per_merged_patch_and_shortened_is_the_tokenizers(tokenizer: Any, vision: Vision) -> None:
    prompt = made(problem("<image> or <image>?", RED, BLUE), tokenizer, vision)
    assert [image.grid_thw for image in prompt.images] == [(1, 4, 6), (1, 4, 4)]
    ids = prompt.token_ids.tolist()
    begins = [i for i, token in enumerate(ids) if token == vision.start]
    assert [ids[i + 1 : i + n + 2] for i, n in zip(begins, (6, 4), strict=True)] == [
        [vision.image] * 6 + [vision.end],
        [vision.image] * 4 + [vision.end],
    ]
    assert vision.shortened(ids, prompt.images) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


def test_examples_and_a_system_show_no_image_and_a_format_may(tmp_path: Path, tokenizer: Any, vision: Vision) -> None:
    template = CHAT.model_copy(update={"system": "An <image>.", "examples": [{"user": "<image>", "assistant": "4"}]})
    text = made(problem("How many?", RED), tokenizer, vision, template).text
    assert text.count("<image>") == 2 and f"user\n{SHOWN}How many?" in text
    (tmp_path / "f.jinja").write_text("<image>Look: {{ content }}")
    template = CHAT.model_copy(update={"format_prompt": tmp_path / "f.jinja"})
    assert f"user\n{SHOWN}Look: ?" in made(problem("?", RED), tokenizer, vision, template).text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (problem("<image> <image>", RED), "row 0: 2 × <image> in the text, and 1 images"),
        (problem("<image>"), "row 0: 1 × <image> in the text, and 0 images"),
        (problem(f"{PAD}?", RED), "row 0: the rendered prompt has 2 image tokens for 1 images"),
        (problem(f"{PAD}?"), "row 0: the rendered prompt has 1 image tokens for 0 images"),
    ],
)
def test_unequal_places_and_images_are_refused(tokenizer: Any, vision: Vision, given: Problem, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(given, tokenizer, vision)


def test_long_prompts_are_counted_with_their_image_tokens(tokenizer: Any, vision: Vision) -> None:
    rows = [problem("?", RED), problem("?", BLUE), problem("?")]
    lengths = [len(made(row, tokenizer, vision).token_ids) for row in rows]
    assert lengths[0] - lengths[2] == 6 + 2
    data = DATA.model_dump() | {"max_prompt_length": lengths[1]}
    prompts, num_filtered = make_prompts(rows, tokenizer, config_of(data=data, prompt=CHAT.model_dump()), vision)
    assert (len(prompts), num_filtered) == (2, 1)
    assert [len(prompt.images) for prompt in prompts] == [1, 0]


def test_the_fingerprint_sees_every_pixel_of_an_image(tokenizer: Any, vision: Vision) -> None:
    changed = picture(84, 56)
    changed.putpixel((0, 0), (1, 2, 3))
    rows = [problem("?", RED), problem("?", file_of(changed)), problem("?", BLUE), problem("?")]
    other = DATA.model_copy(update={"max_pixels": 9000})
    assert len({fingerprint([row], data) for row in rows for data in (DATA, other)}) == 7
    assert fingerprint(rows[:1], DATA) == fingerprint([problem("?", memoryview(RED))], DATA)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_header_says_how_many_tokens_an_image_becomes(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    picture(300, 90).save(file, kind, exif=exif)
    [image] = encode_problem(problem("?", file.getvalue()), PLAIN, DATA)
    assert PLAIN.num_tokens_of(*image_size(file.getvalue()), DATA) == PLAIN.num_tokens(image)
    height, width = image_size(file.getvalue())
    assert (height > width) == (image.grid_thw[1] > image.grid_thw[2]) == (orientation in (6, 8))


def test_images_wait_until_asked_for_or_begun(tokenizer: Any, vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Mock(wraps=encode_problem)
    monkeypatch.setattr("sampler.prompts.prompts.encode_problem", encode)
    rows = [problem("?", RED, index=0), problem("?", index=1), problem("?", BLUE, index=2), problem("?", RED, index=3)]
    config = config_of(data=DATA.model_dump(), prompt=CHAT.model_dump())
    prompts, _ = make_prompts(rows, tokenizer, config, vision)
    prompts.only([1, 2])[0]
    # the first, to look at it, and the one that was asked for
    assert [call.args[0].index for call in encode.call_args_list] == [0, 1]
    prompts.begin(2)
    prompts.begin(3)
    assert [len(prompts[i].images) for i in (3, 2)] == [1, 1]
    assert sorted(call.args[0].index for call in encode.call_args_list) == [0, 1, 2, 3]


# ---- models -----------------------------------------------------------------------------------------------------


TEXT = {"model_type": "qwen2"}


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ({}, {}, "names no column with images; set data.image_key: images"),
        (TEXT, {"image_key": "images"}, "to me/model, a text model; set data.image_key: null"),
        ({"model_type": "gemma3"}, {"image_key": "images"}, "model 'me/model' is a gemma3"),
        ({}, {"image_key": "images"}, ""),
        ({}, {"limit_images": 0}, ""),
        (TEXT, {}, ""),
    ],
)
def test_images_and_a_model_that_sees_need_each_other_which_is_told_once_its_config_json_is_here(
    tmp_path: Path, vision: Vision, monkeypatch: pytest.MonkeyPatch, changes: Any, data: Any, said: str
) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "models--me--model"

    def download(*_: Any) -> None:
        """As the hub's client lays it down."""
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("1a2b")
        write_vision_settings(cache / "snapshots" / "1a2b", vision, **changes)
        if changes is TEXT:
            (cache / "snapshots" / "1a2b" / "config.json").write_text(json.dumps(TEXT))

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # an earlier test may have found no hub
    monkeypatch.setattr("model.files.folder.model_json", download)
    given = config_of({"path": "me/model"}, data)
    require_models(given)
    for requires in (require_downloaded, require_models):
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            requires(given)


def test_contradictions_of_the_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_pixels 900 is above max_pixels 800; set data.min_pixels=800"):
        Data(train="x", min_pixels=900, max_pixels=800)
    with pytest.raises(ValueError, match="limit_images 0 allows none"):
        Data(train="x", image_key="images", limit_images=0)


def test_the_tokens_of_images_are_those_of_config_json(tmp_path: Path, vision: Vision) -> None:
    write_vision_settings(tmp_path, vision)
    assert read_vision(str(tmp_path)) == vision
    write_vision_settings(tmp_path, vision, image_token_id=None)
    with pytest.raises(UserError, match=r"config.json has no image_token_id"):
        read_vision(str(tmp_path))
