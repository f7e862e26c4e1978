"""Records <-> frames. Three frames a message: a msgpack header, raw little-endian arrays, a digest of both.

No pickle and no compression. Everything that arrives is decoded by type (groups: common/group_frames.py), then
range-checked (common/group_limits.py); what fails raises WireError and is counted by its reason, never used. CURVE
authenticates tcp; the digest catches damage on any link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from common.errors import WireError
from common.group_frames import GroupHeader, ImageGroupHeader, read_group, write_group
from common.types import EvalRequest, EvalResult, Group, Tombstone

PROTO = 2
RECORDED_PROTOS = (1, 2)  # whose groups are laid out as now: a recording may be of any of them
_DIGEST_BYTES = 16


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Sampler → trainer, each second until credited: who I am and what I can serve."""

    pid: int
    dataset_fingerprint: str  # of the training rows; a resumed run must find the same
    tokenizer_hash: str
    num_problems: int
    num_eval_problems: int
    scores_reference: bool = False  # its groups carry ref_logprobs; the trainer must want the same
    incarnation: str = ""  # of this sampler: a new one each time it starts, for in a container every pid is the same
    eval_fingerprint: str = ""  # of the held-out rows


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="credit"):
    """Trainer → sampler, on change and each second: the full state, so that losing one is harmless."""

    cursor: int  # groups below it are trained and may be forgotten
    lease: list[int]  # groups this sampler shall produce, and no other; it sends again what it sent and finds here
    evals: list[EvalRequest]  # evaluation chunks this sampler shall produce
    version: int  # sample with exactly these weights
    weights_dir: str
    manifest_sha256: str
    progress: int  # of the training loop; a lower one was overtaken on the way


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """Sampler → trainer from the work loop, so that a stuck loop falls silent."""

    phase: str
    progress: int
    loaded_version: int | None
    stats: dict[str, float]  # metrics of the sampler, newest values


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """Either way: I end, and why. exit_code is what the receiver should exit with too."""

    reason: str
    exit_code: int = 0


class _Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tombstone"):
    group_id: int
    policy_version: int
    reason: str


class _EvalResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="eval"):
    result: EvalResult


WireMessage = Hello | Credit | Beat | Bye | Group | Tombstone | EvalResult
_Body = Hello | Credit | Beat | Bye | GroupHeader | ImageGroupHeader | _Tombstone | _EvalResult


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    proto: int
    run_id: str
    incarnation: str  # of the trainer: a new one each time it starts; empty in a HELLO that has not met one yet
    sampler_id: str
    body: _Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True)
class Envelope:
    """Who speaks, and to which start of the trainer it belongs."""

    run_id: str
    incarnation: str
    sampler_id: str


def encode(envelope: Envelope, message: WireMessage) -> list[bytes]:
    """Three frames. Inverse of `decode`."""
    body, arrays = _to_body(message)
    header = _encoder.encode(_Header(PROTO, envelope.run_id, envelope.incarnation, envelope.sampler_id, body))
    return [header, arrays, _digest(header, arrays)]


def decode(frames: list[bytes], protos: Collection[int] = ()) -> tuple[Envelope, WireMessage]:
    """Raises WireError for anything that `encode` did not make. protos: what is understood; () = this one alone."""
    if len(frames) != 3:
        raise WireError("frame_count", f"{len(frames)} frames, expected 3")
    header, arrays, digest = frames
    if _digest(header, arrays) != digest:
        raise WireError("digest")
    try:
        decoded = _decoder.decode(header)
        if decoded.proto not in (protos or (PROTO,)):
            raise WireError("proto", f"the peer speaks protocol {decoded.proto}, this is {PROTO}: update one of them")
        message = _from_body(decoded.body, arrays)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise WireError("malformed", str(error)) from None
    return Envelope(decoded.run_id, decoded.incarnation, decoded.sampler_id), message


def _digest(header: bytes, arrays: bytes) -> bytes:
    hasher = hashlib.blake2b(len(header).to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    hasher.update(header)
    hasher.update(arrays)
    return hasher.digest()


def _to_body(message: WireMessage) -> tuple[_Body, bytes]:
    if isinstance(message, Group):
        return write_group(message)
    if isinstance(message, Tombstone):
        return _Tombstone(message.group_id, message.policy_version, message.reason), b""
    if isinstance(message, EvalResult):
        return _EvalResult(message), b""
    return message, b""


def _from_body(body: _Body, arrays: bytes) -> WireMessage:
    if isinstance(body, GroupHeader):
        return read_group(body, arrays)
    if arrays:
        raise WireError("malformed", f"{len(arrays)} bytes of arrays behind a {type(body).__name__}")
    if isinstance(body, _Tombstone):
        return Tombstone(body.group_id, body.policy_version, body.reason)
    if isinstance(body, _EvalResult):
        return body.result
    return body
