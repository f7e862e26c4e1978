"""Conversion of records to three frames and back: a msgpack header, raw little-endian arrays, a digest of both.

There is no pickle and no compression. Every received message is decoded by type (groups: group_frames.py), then
range-checked (common/wire/group_limits.py); what fails raises WireError and is counted by its reason, never used. CURVE
authenticates tcp; the digest catches damage on any link.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import WireError, require
from common.types import EvalRequest, EvalResult, Group, Tombstone
from common.wire.group_frames import ArrayReader, Frame, GroupBody, array_writer

PROTO = 4
NUM_FRAMES = 3  # of a message


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """A message sampler → trainer, each second until the first CREDIT: the sampler's identity and its data."""

    pid: int
    dataset_fingerprint: str  # digest of the training rows; a resumed run must find the same
    tokenizer_hash: str
    num_problems: int
    num_eval_problems: int
    scores_reference: bool = False  # its groups carry ref_logprobs; the trainer must want the same
    incarnation: str = ""  # a new one each time this sampler starts, because in a container every pid is the same
    eval_fingerprint: str = ""  # digest of the held-out rows


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="credit"):
    """A message trainer → sampler, on change and each second: the full state, so that losing one is harmless."""

    cursor: int  # groups below it are trained and may be forgotten
    lease: list[int]  # groups this sampler shall produce, and no other; it sends again what it sent and finds here
    evals: list[EvalRequest]  # evaluation chunks this sampler shall produce
    version: int  # sample with exactly these weights
    weights_dir: str
    manifest_sha256: str
    progress: int  # the training loop's; a message with a lower one was overtaken on the way


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """A message sampler → trainer from the work loop, so that a stuck loop falls silent."""

    phase: str
    progress: int
    loaded_version: int | None
    stats: dict[str, float]  # metrics of the sampler, newest values


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """A message in either direction: the sender ends, and why. exit_code: what the receiver should exit with, too."""

    reason: str
    exit_code: int = 0


WireMessage = Hello | Credit | Beat | Bye | Group | Tombstone | EvalResult
_Body = Hello | Credit | Beat | Bye | GroupBody | Tombstone | EvalResult


class Envelope(msgspec.Struct, frozen=True):
    """The sender of a message, and the start of the trainer to which the message belongs."""

    run_id: str
    incarnation: str  # a new one each time the trainer starts; "" in a HELLO before the first CREDIT
    sampler_id: str


class _Header(Envelope, frozen=True, forbid_unknown_fields=True):
    proto: int
    body: _Body


@dataclass(frozen=True)
class Received:
    """A group and the frames that it came in, whose memory the group's arrays use."""

    group: Group | Tombstone
    frames: Sequence[bytes]


def encode(envelope: Envelope, message: WireMessage) -> list[bytes]:
    """Returns the three frames of a message: header, arrays, and a digest of both. Inverse of `decode`."""
    body = GroupBody.of(message) if isinstance(message, Group) else message
    whole = _Header(envelope.run_id, envelope.incarnation, envelope.sampler_id, PROTO, body)
    parts: list[bytes] = []
    try:
        header = msgspec.msgpack.encode(whole, enc_hook=array_writer(parts))
    except UnicodeEncodeError:  # half a surrogate, in a text that a row or a user's function made
        parts.clear()
        plain = msgspec.to_builtins(whole, enc_hook=array_writer(parts))
        header = msgspec.msgpack.encode(_with_whole_characters(plain))
    arrays = b"".join(parts)
    return [header, arrays, _digest(header, arrays)]


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_whole_characters(name): _with_whole_characters(inner) for name, inner in value.items()}
    return [_with_whole_characters(inner) for inner in value] if isinstance(value, list | tuple) else value


def decode(frames: Sequence[Frame]) -> tuple[Envelope, WireMessage]:
    """Returns the envelope and the message. Raises WireError for anything that `encode` did not make."""
    require(len(frames) == NUM_FRAMES, "frame_count", f"{len(frames)} frames, expected {NUM_FRAMES}")
    header, arrays, digest = frames
    require(_digest(header, arrays) == digest, "digest")
    read = ArrayReader(arrays)
    try:
        decoded = msgspec.msgpack.decode(header, type=_Header, dec_hook=read)
        what = f"the peer speaks protocol {decoded.proto}, this is {PROTO}: update one of them"
        require(decoded.proto == PROTO, "proto", what)
        fits = read.num_bytes == len(arrays)
        require(fits, "malformed", f"{len(arrays)} bytes of arrays, and the header has {read.num_bytes}")
        message: WireMessage = decoded.body.whole() if isinstance(decoded.body, GroupBody) else decoded.body
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise WireError("malformed", str(error)) from None
    return Envelope(decoded.run_id, decoded.incarnation, decoded.sampler_id), message


def _digest(header: Frame, arrays: Frame) -> bytes:
    hasher = hashlib.blake2b(len(header).to_bytes(8, "little"), digest_size=16)
    hasher.update(header)
    hasher.update(arrays)
    return hasher.digest()
