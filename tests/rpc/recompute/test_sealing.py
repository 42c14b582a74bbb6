"""What a peer keeps for us, it can neither read nor change."""

from __future__ import annotations

import pytest

from gradwire.errors import BadMessage
from gradwire.rpc.recompute.sealing import opened, sealed

CONTENT = bytes(range(256)) * 20


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 9, CONTENT])
def test_what_was_sealed_is_opened(content):
    assert opened(sealed(content, "m:f"), "m:f") == content


def test_it_cannot_be_read():
    first, second = sealed(CONTENT, "m:f"), sealed(CONTENT, "m:f")

    assert CONTENT[:16] not in first
    assert first[32:] != second[32:]


@pytest.mark.parametrize("place", [0, 15, 16, 31, 32, -1])
def test_it_cannot_be_changed(place):
    changed = bytearray(sealed(CONTENT, "m:f"))
    changed[place] ^= 1

    with pytest.raises(BadMessage, match="m:f brings to repeat random numbers was not made here"):
        opened(bytes(changed), "m:f")


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 16, b"x" * 40])
def test_it_cannot_be_made_up(body):
    with pytest.raises(BadMessage, match="earlier life"):
        opened(body, "m:f")


def test_it_is_for_one_function():
    with pytest.raises(BadMessage, match="m:g brings"):
        opened(sealed(CONTENT, "m:f"), "m:g")
