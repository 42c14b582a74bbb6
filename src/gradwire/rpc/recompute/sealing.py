"""Bytes that a peer keeps for this process and can neither read nor change.

The state of a generator tells all numbers that it will draw, also those that hide somebody's data
or make a secret: a caller that holds it must not learn it, nor choose one.
"""

from __future__ import annotations

import hashlib
import secrets

from gradwire.errors import BadMessage

_NONCE_BYTES = _TAG_BYTES = 16
_key = secrets.token_bytes(32)
"""of this process; a later life of the worker cannot open what an earlier one has sealed"""


def sealed(content: bytes, purpose: str) -> bytes:
    """To be opened here, for the same purpose."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hidden = nonce + _crossed(content, nonce)
    return _tag(hidden, purpose) + hidden


def opened(body: bytes, purpose: str) -> bytes:
    """What was sealed; BadMessage unless it was sealed here, for this purpose."""
    tag, hidden = body[:_TAG_BYTES], body[_TAG_BYTES:]
    if not secrets.compare_digest(tag, _tag(hidden, purpose)):
        raise BadMessage(
            f"what a call of {purpose} brings to repeat random numbers was not made here for it",
            hint="a worker that was started again cannot repeat what its earlier life has drawn",
        )
    return _crossed(hidden[_NONCE_BYTES:], hidden[:_NONCE_BYTES])


def _crossed(content: bytes, nonce: bytes) -> bytes:
    """Exclusive or with a stream that only this process knows, and uses once."""
    stream = hashlib.shake_256(_key + nonce).digest(len(content))
    number = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
    return number.to_bytes(len(content), "little")


def _tag(hidden: bytes, purpose: str) -> bytes:
    about = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    return hashlib.blake2b(about + hidden, key=_key, digest_size=_TAG_BYTES).digest()
