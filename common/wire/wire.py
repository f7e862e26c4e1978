"""Conversion of records to three frames and back: a msgpack header, raw little-endian arrays, a digest of both.

There is no pickle and no compression. Every received message is decoded by type (groups: group_frames.py), then
range-checked (common/wire/group_limits.py); what fails raises WireError and is counted by its reason, never used. CURVE
authenticates tcp; the digest catches damage on any link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import WireError
from common.types import EvalRequest, EvalResult, Group, Tombstone
from common.wire.group_frames import Frame, GroupHeader, read_group, read_outline, write_group

PROTO = 3


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
_Body = Hello | Credit | Beat | Bye | GroupHeader | Tombstone | EvalResult


class Envelope(msgspec.Struct, frozen=True):
    """The sender of a message, and the start of the trainer to which the message belongs."""

    run_id: str
    incarnation: str  # a new one each time the trainer starts; "" in a HELLO before the first CREDIT
    sampler_id: str


class _Header(Envelope, frozen=True, forbid_unknown_fields=True):
    proto: int
    body: _Body


class _ResultIds(msgspec.Struct):
    """The fields that a result must have for its failure to be counted, whatever else cannot be read."""

    policy_version: int
    group_id: int = -1
    problem_index: int = -1
    eval_id: str = ""
    chunk: int = -1


class _ResultHeader(Envelope, frozen=True):
    body: _ResultIds


_encoder = msgspec.msgpack.Encoder(enc_hook=float)  # the hook is for numpy's numbers
_decoder = msgspec.msgpack.Decoder(_Header)
_result_decoder = msgspec.msgpack.Decoder(_ResultHeader)


@dataclass(frozen=True)
class Received:
    """A group and the frames that it came in, whose memory the group's arrays use."""

    group: Group | Tombstone
    frames: Sequence[bytes]


def encode(envelope: Envelope, message: WireMessage) -> list[bytes]:
    """Returns the three frames of a message: header, arrays, and a digest of both. Inverse of `decode`."""
    body, arrays = write_group(message) if isinstance(message, Group) else (message, b"")
    whole = _Header(envelope.run_id, envelope.incarnation, envelope.sampler_id, PROTO, body)
    try:
        header = _encoder.encode(whole)
    except UnicodeEncodeError:  # half a surrogate, in a text that a row or a user's function made
        header = _encoder.encode(_with_whole_characters(msgspec.to_builtins(whole, enc_hook=float)))
    return [header, arrays, _digest(header, arrays)]


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_whole_characters(name): _with_whole_characters(inner) for name, inner in value.items()}
    return [_with_whole_characters(inner) for inner in value] if isinstance(value, list | tuple) else value


def decode(frames: Sequence[Frame]) -> tuple[Envelope, WireMessage]:
    """Returns the envelope and the message. Raises WireError for anything that `encode` did not make."""
    if len(frames) != 3:
        raise WireError("frame_count", f"{len(frames)} frames, expected 3")
    header, arrays, digest = frames
    if _digest(header, arrays) != digest:
        raise WireError("digest")
    try:
        decoded = _decoder.decode(header)
        if decoded.proto != PROTO:
            raise WireError("proto", f"the peer speaks protocol {decoded.proto}, this is {PROTO}: update one of them")
        body = decoded.body
        if arrays and not isinstance(body, GroupHeader):
            raise WireError("malformed", f"{len(arrays)} bytes of arrays behind a {type(body).__name__}")
        message: WireMessage = read_group(body, arrays) if isinstance(body, GroupHeader) else body
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise WireError("malformed", str(error)) from None
    return Envelope(decoded.run_id, decoded.incarnation, decoded.sampler_id), message


def failure_of(frames: Sequence[Frame], reason: str) -> tuple[Envelope, Tombstone | EvalResult] | None:
    """Returns the failure in place of a group or evaluation that `decode` refuses; None for damage or anything else."""
    try:
        header, arrays, digest = frames
        found = _result_decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    ids, envelope = found.body, Envelope(found.run_id, found.incarnation, found.sampler_id)
    if _digest(header, arrays) != digest:
        return None
    if ids.eval_id:
        return envelope, EvalResult(ids.eval_id, ids.chunk, ids.policy_version, ())
    return envelope, Tombstone(ids.group_id, ids.policy_version, f"row {ids.problem_index}: {reason}")


def decode_outline(header: bytes) -> tuple[Group | Tombstone, int]:
    """Returns (the group without its arrays: see `read_outline`, their bytes) of a header that `decode` accepted."""
    body = _decoder.decode(header).body
    if isinstance(body, GroupHeader):
        return read_outline(body), body.num_bytes
    assert isinstance(body, Tombstone), f"a {type(body).__name__} is no group"
    return body, 0


def _digest(header: Frame, arrays: Frame) -> bytes:
    hasher = hashlib.blake2b(len(header).to_bytes(8, "little"), digest_size=16)
    hasher.update(header)
    hasher.update(arrays)
    return hasher.digest()
