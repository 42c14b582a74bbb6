"""Addresses as they are written, and who is asked for which."""

from __future__ import annotations

import doctest

import pytest

from gradwire.errors import UsageError
from gradwire.transport import address as address_module
from gradwire.transport.address import Address, Transports, parse_address
from gradwire.transport.memory import MemoryNetwork


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("tcp://host:80", Address("tcp", "host", 80)),
        ("tcp://127.0.0.1:0", Address("tcp", "127.0.0.1", 0)),
        ("tcp://[::1]:0", Address("tcp", "::1", 0)),
        ("tcp://:80", Address("tcp", "", 80)),
        ("unix:///tmp/a:b", Address("unix", "/tmp/a:b")),
        ("unix://", Address("unix", "")),
        ("memory://name", Address("memory", "name")),
        ("other://any:thing", Address("other", "any:thing")),
    ],
)
def test_an_address_is_read_and_written_alike(text, parsed):
    assert parse_address(text) == parsed
    assert str(parsed) == text


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("tcp://", Address("tcp", "", 0)), ("tcp://[::1]", Address("tcp", "::1", 0))],
)
def test_a_port_may_be_left_out(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "host:80", "://place", "tcp:/host:80"])
def test_what_has_no_scheme_is_not_an_address(text):
    with pytest.raises(UsageError, match="is not an address\nhint: addresses look like tcp://host"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    ["tcp://host", "tcp://host:", "tcp://host:-1", "tcp://h:65536", "tcp://h:x", "tcp://h:²"],
)
def test_a_tcp_address_needs_a_port(text):
    with pytest.raises(UsageError, match=f"'{text}' has no port between 0 and 65535"):
        parse_address(text)


@pytest.mark.parametrize("text", ["tcp://::1:80", "tcp://::1", "tls://2001:db8::", "tcp://fe80::a"])
def test_an_ipv6_address_needs_brackets_and_the_hint_shows_them(text):
    scheme = text.partition(":")[0]
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert str(caught.value) == (
        f"'{text}' has an IPv6 address without brackets\nhint: {scheme}://[ADDRESS]:PORT"
    )


def test_the_scheme_chooses_the_transport():
    near, far = MemoryNetwork(), MemoryNetwork()
    transports = Transports({"memory": near, "other": far})
    listener = transports.listen("memory://here")
    assert listener.address == "memory://here"
    channel = transports.connect("memory://here", deadline=0.0)
    assert channel.remote == "memory://here"


def test_an_unknown_scheme_is_named_and_the_known_ones_are_listed():
    transports = Transports({"unix": MemoryNetwork(), "memory": MemoryNetwork()})
    with pytest.raises(UsageError) as caught:
        transports.connect("shm://place", deadline=0.0)
    assert str(caught.value) == (
        "no transport for scheme 'shm' of address 'shm://place'\n"
        "hint: the known ones are: memory, unix"
    )
    with pytest.raises(UsageError, match="hint: the known ones are: none"):
        Transports({}).listen("shm://place")


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(address_module).failed == 0
