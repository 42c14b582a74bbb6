"""The handshake, fed with what a stranger says: to the one who listens, or to the one who dials.

It knows all that goes over the wire but the key. So the only words by which it gets in are those
that an honest worker says: whatever else is taken for a proof is a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.agent.links.handshake_state import (
    HEAD_BYTES,
    MOST_BYTES,
    NONCE_BYTES,
    Dialling,
    Listening,
    Refusal,
    body_length,
)

_KEY, _JOB = bytes(range(32)), "job"
_OURS, _THEIRS = b"\1" * NONCE_BYTES, b"\2" * NONCE_BYTES
_LISTENER, _DIALLER = b"\0", b"\1"


class NotHeard(Exception):
    """The stranger said less than it announced."""


class _Words:
    """What the stranger says, heard as a channel hears it."""

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def next(self) -> bytes:
        head = self._take(HEAD_BYTES)
        length = body_length(head)
        assert 0 <= length <= MOST_BYTES - HEAD_BYTES
        return head + self._take(length)

    def _take(self, length: int) -> bytes:
        if len(self._rest) < length:
            raise NotHeard
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


def _listening() -> Listening:
    return Listening(_KEY, _JOB, "w1", nonce=_OURS)


def _dialling(nonce: bytes) -> Dialling:
    return Dialling(_KEY, _JOB, "w0", "w1", nonce=nonce)


def _honest() -> dict[bytes, bytes]:
    """By which words each side is convinced."""
    dialling, listening = _dialling(_THEIRS), _listening()
    opening = dialling.opening()
    proof = dialling.proof(listening.challenge(opening))
    other, dialled = Listening(_KEY, _JOB, "w1", nonce=_THEIRS), _dialling(_OURS)
    challenge = other.challenge(dialled.opening())
    answer = other.proof(dialled.proof(challenge))
    return {_LISTENER: opening + proof, _DIALLER: challenge + answer}


def _listen(words: _Words) -> None:
    listening = _listening()
    listening.challenge(words.next())
    listening.proof(words.next())


def _dial(words: _Words) -> None:
    dialling = _dialling(_OURS)
    dialling.proof(words.next())
    dialling.check(words.next())


@contextmanager
def opened() -> Iterator:
    """What to feed: a byte for the side that hears it, and the words."""
    honest = _honest()

    def run(data: bytes) -> None:
        side, said = (_DIALLER if data[:1] and data[0] & 1 else _LISTENER), data[1:]
        try:
            (_dial if side == _DIALLER else _listen)(_Words(said))
        except (Refusal, NotHeard):
            return
        if not said.startswith(honest[side]):
            raise AssertionError("a stranger was believed")

    yield run


def seeds() -> list[bytes]:
    """What honest workers say, and how it begins."""
    found = []
    for side, words in _honest().items():
        found += [side + words, side + words[:-1], side + words[:HEAD_BYTES], side + words * 2]
    return found
