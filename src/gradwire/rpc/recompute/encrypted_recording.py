"""What a callee recorded under a checkpoint, as bytes that only this callee can read.

See Note [Random numbers under a checkpoint], checkpoint_run.py. A generator's state predicts every
number it will draw, including noise that hides data and secrets. So a caller that keeps a callee's
state must not be able to read it, nor to choose one.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from gradwire.errors import BadMessage
from gradwire.rpc.recompute.recording_state import CallKey, RecordedCall, Recording, State


class _ReturnedState(msgspec.Struct, frozen=True, array_like=True):
    """The recording of a callee, as it is sent to the caller and back."""

    start: State
    end: bytes
    raised: bool
    after_waits: dict[int, State]
    calls: list[tuple[CallKey, bool, bytes]]


_decoder = msgspec.msgpack.Decoder(_ReturnedState)
_NO_DIGEST = b"mixed"
"""in place of the digest of `end`, for a run that cannot be repeated if it draws"""


def digest(state: State) -> bytes:
    """A short form of a state, to compare it by."""
    return hashlib.blake2b(b"".join(state), digest_size=16).digest()


def decoded(drawn: bytes, function: str) -> Recording:
    """What this worker recorded when the call was made in the forward."""
    if not drawn:
        return Recording()
    returned = _decoder.decode(decrypted(drawn, function))
    recording = Recording(returned.start, returned.end, raised=returned.raised)
    recording.after_waits = returned.after_waits
    recording.calls = [
        RecordedCall(key, known, drawn=drawn) for key, known, drawn in returned.calls
    ]
    return recording


def encoded(recording: Recording, function: str, *, wait: bool) -> bytes:
    """What the answer carries; empty if there is nothing to repeat."""
    calls = recording.answered_calls(wait=wait)
    if not recording.has_drawn and all(call.known for call in calls):
        return b""
    assert isinstance(recording.end, tuple)
    end = _NO_DIGEST if recording.is_interleaved else digest(recording.end)
    states = [(call.key, call.known, call.drawn) for call in calls]
    returned = _ReturnedState(recording.start, end, recording.raised, recording.after_waits, states)
    return encrypted(msgspec.msgpack.encode(returned), function)


_NONCE_BYTES = _TAG_BYTES = 16
_key = secrets.token_bytes(32)
"""of this process; a worker that was restarted cannot decrypt what it encrypted before"""
# One key for each use, so that nothing which one of them reveals helps against the other.
_stream_key = hashlib.blake2b(key=_key, person=b"gradwire stream", digest_size=32).digest()
_tag_key = hashlib.blake2b(key=_key, person=b"gradwire tag", digest_size=32).digest()


def encrypted(content: bytes, function: str) -> bytes:
    """Bytes that only this process can decrypt, and only for the same function."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hidden = nonce + _xor_keystream(content, nonce)
    return _tag(hidden, function) + hidden


def decrypted(body: bytes, function: str) -> bytes:
    """The content; BadMessage unless this process encrypted it for this function."""
    tag, hidden = body[:_TAG_BYTES], body[_TAG_BYTES:]
    if not secrets.compare_digest(tag, _tag(hidden, function)):
        raise BadMessage(
            f"the random state sent with a call of {function} was not made by this worker for it",
            hint="a worker that was restarted cannot repeat what it drew before",
        )
    return _xor_keystream(hidden[_NONCE_BYTES:], hidden[:_NONCE_BYTES])


def _xor_keystream(content: bytes, nonce: bytes) -> bytes:
    stream = hashlib.shake_256(_stream_key + nonce).digest(len(content))
    number = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
    return number.to_bytes(len(content), "little")


def _tag(hidden: bytes, function: str) -> bytes:
    about = hashlib.blake2b(function.encode(), digest_size=16).digest()
    return hashlib.blake2b(about + hidden, key=_tag_key, digest_size=_TAG_BYTES).digest()
