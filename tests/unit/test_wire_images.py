"""No image gets in over the link that could bomb, stall or crash a trainer."""

import random
import struct
import time
import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from common.errors import WireError
from common.types import EncodedImage, Group
from common.wire.group_limits import ImageLimits, Limits, check_group, picture_size
from common.wire.wire import Envelope, decode, encode
from model.files.images import decode_patches, encode_image
from tests.support.protocol_helpers import LIMITS, make_group, of_two_turns
from tests.support.speed import overdue
from tests.support.vision import PLAIN, picture
from tests.unit.test_wire import damage, sealed

PAD = 7
IMAGE_LIMITS = ImageLimits(max_images=2, max_pixels=10_000, patch_size=14, merge_size=2, image_token=PAD)
SEES = replace(LIMITS, max_prompt_length=40, images=IMAGE_LIMITS)
SMALL, LARGE = (encode_image(picture(w, h), PLAIN, 784, 10_000) for w, h in ((56, 28), (84, 84)))


def group_of(*images: EncodedImage, pads: int | None = None) -> Group:
    pads = sum(map(PLAIN.num_tokens, images)) if pads is None else pads
    return replace(make_group(3, 1), prompt_ids=np.array([1, *[PAD] * pads, 2], np.int32), images=images)


def reason_of(group: Group, limits: Limits = SEES) -> str:
    """Why it is refused; "" if it is not. Any exception but WireError fails the test."""
    try:
        check_group(group, limits)
    except WireError as error:
        assert error.reason == "image"
        return str(error)
    return ""


def test_an_honest_group_passes_and_its_patches_are_there() -> None:
    for images in ((), (SMALL,), (LARGE, SMALL)):
        assert reason_of(group_of(*images)) == ""
    assert decode_patches(LARGE, PLAIN).shape == (36, 1176)
    for seed in range(5):  # whatever pillow writes
        encoded = encode_image(picture(60 + 17 * seed, 50, seed), PLAIN, 784, 10_000)
        height, width = picture_size(encoded.png, 10_000)
        assert (height // 14, width // 14) == encoded.grid_thw[1:]


def png(width: int, height: int, rows: bytes | None = None, kind: bytes = b"\x08\x02\x00\x00\x00") -> bytes:
    """A PNG written by hand, so that its parts can be wrong."""
    rows = bytes(height * (1 + 3 * width)) if rows is None else rows
    return of_chunks(struct.pack(">II", width, height) + kind, zlib.compress(rows))


def of_chunks(header: bytes, pixels: bytes, *between: tuple[bytes, bytes]) -> bytes:
    chunks = [(b"IHDR", header), *between, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    )


HEADER = struct.pack(">IIBBBBB", 28, 28, 8, 2, 0, 0, 0)
ROWS = bytes(28 * 85)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(28, 28), ""),
        (b"", "cannot identify"),
        (png(28, 28)[:50], "truncated"),
        (png(28, 28).replace(b"IDAT", b"IDAX"), "cannot identify"),
        (of_chunks(HEADER[:-1], zlib.compress(ROWS)), "Truncated"),
        (png(28, 28, kind=b"\x08\x06\x00\x00\x00"), "28 × 28 of RGBA"),
        (png(0, 28, b""), "cannot identify"),
        (of_chunks(struct.pack(">IIBBBBB", 2**31, 2**31, 8, 2, 0, 0, 0), b"x"), "exceeds limit"),
        (png(28, 28, ROWS[:-1]), "truncated"),
        (of_chunks(HEADER, zlib.compress(ROWS)[:-8]), "truncated"),
        (of_chunks(HEADER, b"no zlib"), "broken"),
        (png(101, 100), "101 × 100 of RGB, at most 10000"),
        (png(28, 28, b"\5" + ROWS[1:]), "unrecognized data"),
    ],
)
def test_a_png_that_does_not_decode_to_a_small_picture_is_refused(data: bytes, why: str) -> None:
    found = reason_of(group_of(EncodedImage(data, (1, 2, 2))))
    assert why in found and bool(why) == bool(found)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """Kilobytes that unpack to 256 MiB, behind a header that says 28 × 28 and behind an honest one."""
    packed = zlib.compressobj(1)
    begin, more = (packed.compress(bytes(1 << 24)) + packed.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = begin + 15 * more  # without its last bytes, which nobody may reach
    start = time.monotonic()
    assert reason_of(group_of(EncodedImage(of_chunks(HEADER, bomb), (1, 2, 2)))) == ""  # its 28 rows are read alone
    honest = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    assert "exceeds limit" in reason_of(group_of(EncodedImage(of_chunks(honest, bomb), (1, 2, 2))))
    assert not overdue(time.monotonic() - start, 0.5)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (group_of(SMALL, SMALL, SMALL), "3 images, at most 2"),
        (group_of(SMALL, pads=1), "1 image tokens in the prompt, its images have 2"),
        (group_of(pads=1), "1 image tokens"),
        (group_of(replace(SMALL, grid_thw=(1, 4, 2))), "56 × 28 pixels in a grid of 4 × 2"),
        (group_of(replace(SMALL, grid_thw=(2, 2, 4)), pads=2), "a grid of"),
        (group_of(replace(SMALL, grid_thw=(1, 1, 8)), pads=2), "a grid of"),
        (group_of(replace(SMALL, grid_thw=(1, -2, -4)), pads=2), "a grid of"),
        (group_of(replace(SMALL, grid_thw=(1, 0, 0)), pads=2), "a grid of"),
    ],
)
def test_images_that_do_not_fit_their_prompt_are_refused(group: Group, why: str) -> None:
    assert why in reason_of(group)


def test_a_fork_is_refused_where_the_prompt_has_images() -> None:
    limits, forked = replace(SEES, max_turns=2), of_two_turns(forks=((2, 1),))
    assert reason_of(replace(group_of(), rollouts=(forked, forked)), limits) == ""
    assert "history" in reason_of(replace(group_of(SMALL), rollouts=(forked, forked)), limits)


def test_an_image_is_refused_where_prompts_are_text_alone() -> None:
    assert "1 images nobody asked for" in reason_of(group_of(SMALL), replace(SEES, images=None))


def test_4000_hostile_images_with_a_right_digest_crash_nothing_and_what_gets_in_can_be_trained_on() -> None:
    """Damage in the PNG alone, half of it with checksums that were made right again."""
    rng, accepted = random.Random(3), 0
    header, arrays, _ = encode(Envelope("run", "life", "s0"), group_of(SMALL))
    begin = len(arrays) - len(SMALL.png)
    start = time.monotonic()
    for _ in range(4000):
        hostile = damage(rng, SMALL.png)
        if rng.random() < 0.5:
            hostile = repaired(hostile)
        fields = msgspec.msgpack.decode(header)
        fields["body"]["pngs"] = [["|u1", [len(hostile)]]]
        _, group = decode(sealed(msgspec.msgpack.encode(fields), arrays[:begin] + hostile))
        assert isinstance(group, Group)
        if reason_of(group) == "":
            accepted += 1
            assert decode_patches(group.images[0], PLAIN).shape == (8, 1176)
    assert accepted < 200
    assert not overdue(time.monotonic() - start, 10)


def repaired(data: bytes) -> bytes:
    """With a right CRC on every chunk that is whole."""
    out, place = bytearray(data), 8
    while place + 12 <= len(out):
        end = place + 8 + int.from_bytes(out[place : place + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
    return bytes(out)
