"""What a checkpoint's forward recorded: its calls in order, and the random state each returned.

No torch, no threads. The k-th call of the recomputation repeats the k-th of the forward.

A callee returns its recording as bytes that only it can read. A generator's state predicts every
number it will draw, including noise that hides data and secrets. So a caller that keeps a callee's
state must not be able to read it, nor to choose one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import final

import msgspec

from gradwire.errors import BadMessage, UsageError

State = tuple[bytes, ...]
"""of the generators of one worker: that of the CPU, then those of its devices"""
CallKey = tuple[int, str]
"""the worker that was called, and the function"""


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a forward, and what its callee returned to repeat it."""

    key: CallKey
    known: bool = False  # whether its answer has come
    lost: bool = False  # whether it failed without an answer: then no result of it was used
    drawn: bytes = b""  # random state, encrypted by the callee; empty if no random number was drawn
    # Checks whether the answer has come; with True, waits for it. None once it has come.
    poll: Callable[[bool], None] | None = None

    def answered(self, drawn: bytes) -> None:
        """The call returned or raised; only the first report counts."""
        if not self.known:
            # `drawn` before `known`: another thread that sees `known` must also see `drawn`.
            self.drawn = drawn
            self.known = True

    def failed(self) -> None:
        """No answer will come: the callee was lost, or the call timed out."""
        self.lost = not self.known


UNKNOWN_CALL = RecordedCall((-1, ""))
"""a call that the forward did not make, or made from another thread"""


@final
@dataclass(slots=True, eq=False)
class Recording:
    """The calls and generator states of one forward; a recomputation replays it, maybe repeatedly.

    `start` and `end` are the states of the generators before and after the function; a callee that
    repeats a call has the digest of `end` only. `raised` is whether the function raised.
    """

    start: State = ()
    end: State | bytes = ()
    raised: bool = False
    after_waits: dict[int, State] = field(default_factory=dict)
    """state after the n-th wait, if other code drew from the generators during it"""
    calls: list[RecordedCall] = field(default_factory=list)
    is_interleaved: bool = False
    """whether other code may have drawn while this function was running, outside of a wait"""

    @property
    def has_drawn(self) -> bool:
        """Whether the function or its callees drew: whether there is anything to restore."""
        return self.has_drawn_here or any(call.drawn for call in self.calls)

    @property
    def has_drawn_here(self) -> bool:
        """Whether the function drew on this worker."""
        return bool(self.start != self.end or self.after_waits)

    def answered_calls(self, *, wait: bool = False) -> Sequence[RecordedCall]:
        """All calls but the lost ones: a lost call that was retried counts once."""
        for call in self.calls:
            if (poll := call.poll) is not None:
                poll(wait)
        return [call for call in self.calls if not call.lost]

    def repeated(self, n: int, key: CallKey) -> RecordedCall:
        """The call of the forward that the n-th call of the recomputation repeats."""
        calls = self.answered_calls(wait=True)
        if n >= len(calls):
            return UNKNOWN_CALL
        if calls[n] is not UNKNOWN_CALL and calls[n].key != key and self.has_drawn:
            raise UsageError(
                f"the recomputation of a checkpoint calls {key[1]} on w{key[0]} where its forward "
                f"called {calls[n].key[1]} on w{calls[n].key[0]}: it cannot repeat the random "
                "numbers that were drawn there",
                hint="the function of a checkpoint must make the same calls each time it runs",
            )
        return calls[n]


# -- as bytes that only this process can read

_Returned = tuple[State, bytes, bool, dict[int, State], list[tuple[CallKey, bool, bytes]]]
"""start, digest of end, raised, after_waits, calls"""
_decoder = msgspec.msgpack.Decoder(_Returned)
_NO_DIGEST = b"mixed"
"""in place of the digest of `end`, for a run that cannot be repeated if it draws"""


def digest(state: State) -> bytes:
    """A short form of a state, to compare it by."""
    return hashlib.blake2b(b"".join(state), digest_size=16).digest()


def encoded(recording: Recording, function: str, *, wait: bool) -> bytes:
    """What the answer carries; empty if there is nothing to repeat."""
    calls = recording.answered_calls(wait=wait)
    if not recording.has_drawn and all(call.known for call in calls):
        return b""
    assert isinstance(recording.end, tuple)
    end = _NO_DIGEST if recording.is_interleaved else digest(recording.end)
    states = [(call.key, call.known, call.drawn) for call in calls]
    returned = recording.start, end, recording.raised, recording.after_waits, states
    return encrypted(msgspec.msgpack.encode(returned), function)


def decoded(drawn: bytes, function: str) -> Recording:
    """What this worker recorded when the call was made in the forward."""
    if not drawn:
        return Recording()
    start, end, raised, after_waits, calls = _decoder.decode(decrypted(drawn, function))
    made = [RecordedCall(key, known, drawn=drawn) for key, known, drawn in calls]
    return Recording(start, end, raised, after_waits, made)


_NONCE_BYTES = _TAG_BYTES = 16


@cache
def _keys() -> tuple[bytes, bytes]:
    """The keys of this process: to encrypt, and to sign.

    Made when first needed, so that processes forked from one that has imported this module have
    keys of their own. A worker that was restarted cannot decrypt what it encrypted before.
    """
    return secrets.token_bytes(32), secrets.token_bytes(32)


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
    stream = hashlib.shake_256(_keys()[0] + nonce).digest(len(content))
    number = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
    return number.to_bytes(len(content), "little")


def _tag(hidden: bytes, function: str) -> bytes:
    about = hashlib.blake2b(function.encode(), digest_size=16).digest()
    return hashlib.blake2b(about + hidden, key=_keys()[1], digest_size=_TAG_BYTES).digest()
