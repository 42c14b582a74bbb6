"""A peer can neither read nor change the random state that it keeps for a callee."""

from __future__ import annotations

import pytest

from gradwire.errors import BadMessage
from gradwire.rpc.recompute import recording
from gradwire.rpc.recompute.recording import decrypted, encrypted

CONTENT = bytes(range(256)) * 20


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 9, CONTENT])
def test_what_was_encrypted_is_decrypted(content):
    assert decrypted(encrypted(content, "m:f"), "m:f") == content


def test_it_cannot_be_read():
    first, second = encrypted(CONTENT, "m:f"), encrypted(CONTENT, "m:f")

    assert CONTENT[:16] not in first
    assert first[32:] != second[32:]


@pytest.mark.parametrize("place", [0, 15, 16, 31, 32, -1])
def test_it_cannot_be_changed(place):
    changed = bytearray(encrypted(CONTENT, "m:f"))
    changed[place] ^= 1

    with pytest.raises(BadMessage, match="sent with a call of m:f was not made by this worker"):
        decrypted(bytes(changed), "m:f")


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 16, b"x" * 40])
def test_it_cannot_be_made_up(body):
    with pytest.raises(BadMessage, match="restarted"):
        decrypted(body, "m:f")


def test_it_is_for_one_function():
    with pytest.raises(BadMessage, match="call of m:g"):
        decrypted(encrypted(CONTENT, "m:f"), "m:g")


def test_each_use_has_a_key_of_its_own(monkeypatch):
    stream_key, tag_key = recording._keys()
    assert stream_key != tag_key
    body = encrypted(CONTENT, "m:f")

    with monkeypatch.context() as patch:
        patch.setattr(recording, "_keys", lambda: (tag_key, tag_key))
        assert decrypted(body, "m:f") != CONTENT
    monkeypatch.setattr(recording, "_keys", lambda: (stream_key, stream_key))
    with pytest.raises(BadMessage):
        decrypted(body, "m:f")
