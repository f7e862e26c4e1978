"""Images where people look: in samples.jsonl, in a terminal, in the report. None may steer any of them."""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.png import check_png
from common.types import EncodedImage
from model.images import digest, encode_image
from report.html_page import content_of, write_report
from report.images import caption, data_uri
from report.run_log import MetricsLog
from report.samples import main
from tests.support.protocol_helpers import make_group
from tests.support.vision import PLAIN, picture
from trainer.record.stats import samples_records


@functools.cache
def large() -> EncodedImage:
    return encode_image(picture(500, 250), PLAIN, 784, 400_000)


def decode(ids: list[int]) -> str:
    return "".join("<|image_pad|>" if token == 7 else str(token) for token in ids)


def records() -> list[dict[str, Any]]:
    ids = np.array([1, 7, 7, 7, 2, 7, 7, 3], np.int32)
    return samples_records([dataclasses.replace(make_group(4), prompt_ids=ids, images=(large(),))], 5, 1, decode)


def run_with(folder: Path, *images: Any) -> Path:
    log = MetricsLog(folder)
    log.log(5, {"reward": 1.0})
    log.log_samples([record | {"images": list(images)} for record in records()])
    log.close()
    return folder


def test_a_sample_holds_a_small_copy_the_size_and_the_digest_and_its_prompt_one_mark_an_image() -> None:
    worst, best = records()
    assert worst["prompt"] == "1<|image_pad|>2<|image_pad|>3"
    [image] = best["images"]
    assert (image["width"], image["height"], image["digest"]) == (504, 252, digest(large()))
    assert check_png(base64.b64decode(image["png"]), 1 << 16) == (64, 128)


def test_a_sample_of_text_has_no_images() -> None:
    assert all("images" not in record for record in samples_records([make_group(4)], 5, 1, decode))


def test_a_terminal_shows_size_and_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_with(tmp_path, *records()[0]["images"])), "--best", "-n", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"  image  │ 504 × 252 pixels, {digest(large())}")
    assert lines[at + 1].startswith("  prompt │ 1")


def test_the_report_shows_the_small_copy(tmp_path: Path) -> None:
    [image] = records()[0]["images"]
    page = write_report(run_with(tmp_path, image)).read_text()
    assert f'<img src="data:image/png;base64,{image["png"]}" alt="504 × 252 pixels, {digest(large())}"' in page
    assert content_of(tmp_path)["samples"][0][1][0]["images"][0][1].startswith("504")


def good() -> dict[str, Any]:
    return dict(records()[0]["images"][0])


def huge() -> str:
    return base64.b64encode(encode_image(picture(700, 500), PLAIN, 784, 400_000).png).decode()


@pytest.mark.parametrize(
    "made",  # when it is needed, for everybody collects this file
    [
        lambda: None,
        lambda: "data:text/html,<script>",
        lambda: {},
        lambda: {"png": 'x" onerror="alert(1)'},
        lambda: {"png": base64.b64encode(b"<svg onload=alert(1)>").decode()},
        lambda: {"png": good()["png"][:-8]},
        lambda: {"png": huge()},
        lambda: good() | {"width": '"><script>alert(1)</script>', "height": "\x1b[2J", "digest": "\n\u202e" * 99},
    ],
)
def test_a_hostile_image_is_no_markup_and_steers_no_terminal(
    tmp_path: Path, made: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    image = made()
    page = write_report(run_with(tmp_path, image)).read_text()
    assert "<script" not in page
    assert ("<img src=" in page) == (isinstance(image, dict) and "width" in image)
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert not [char for char in shown if not char.isprintable() and char != "\n"]
    assert sum(line.startswith("  image  │ ") for line in shown.splitlines()) == 2


def test_what_is_embedded_is_the_plain_png_and_nothing_else() -> None:
    image = good()
    assert data_uri(image) == "data:image/png;base64," + image["png"]
    assert data_uri(image | {"png": image["png"] + "\n"}) is None
    assert caption(image) == f"504 × 252 pixels, {digest(large())}"
