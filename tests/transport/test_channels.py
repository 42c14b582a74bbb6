"""The contract, on every transport we have."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from msgspec.structs import replace

from gradwire.transport.base import Channel, Transport
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.tls import TlsTransport
from gradwire.transport.unix import UnixTransport
from gradwire.wire.message import Frame
from tests.certificates import job
from tests.transport.conformance import (
    CHANNEL_CHECKS,
    Check,
    MakePair,
    check_channel,
    frames_keep_their_order,
    recv,
)

WAYS: dict[str, tuple[Callable[[], Transport], str]] = {
    "memory": (MemoryNetwork, "memory://"),
    "unix": (UnixTransport, "unix://"),
    "unix without blocks": (partial(UnixTransport, shared_bytes=0), "unix://"),
    "unix with blocks only": (partial(UnixTransport, shared_from=1), "unix://"),
    "unix with few blocks": (
        partial(UnixTransport, shared_bytes=1 << 18, shared_from=1),
        "unix://",
    ),
    "tcp4": (TcpTransport, "tcp://127.0.0.1:0"),
    "tcp6": (TcpTransport, "tcp://[::1]:0"),
    "tls": (lambda: TlsTransport(job().tls("w0")), "tls://127.0.0.1:0"),
}


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(params=[*WAYS, "memory pair"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    if request.param == "tcp6" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    if request.param == "memory pair":
        yield MemoryNetwork().pair
        return
    make_transport, address = WAYS[request.param]
    transport = make_transport()
    listener = transport.listen(address)

    def connect() -> tuple[Channel, Channel]:
        here = transport.connect(listener.address, time.monotonic() + 10)
        there = listener.accept()
        # As workers greet each other: from then on a unix channel knows what its peer can do.
        for near, far in ((here, there), (there, here)):
            near.send(Frame(0, 0, 0, b"", ()), time.monotonic() + 10)
            recv(far)
        return here, there

    yield connect
    listener.close()


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_every_channel_keeps_the_contract(check: Check, make_pair: MakePair):
    check(make_pair)


@pytest.mark.slow
def test_one_call_runs_every_check():
    made = []

    def make_pair() -> tuple[Channel, Channel]:
        made.append(MemoryNetwork().pair())
        return made[-1]

    check_channel(make_pair)
    assert len(made) >= len(CHANNEL_CHECKS)


class Forgetful:
    """A channel that loses payloads, as no channel may."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)

    def send(self, frame: Frame, deadline: float) -> None:
        self._channel.send(replace(frame, payload=()), deadline)


def test_a_channel_that_breaks_the_contract_is_found_out():
    def make_pair() -> tuple[Channel, Channel]:
        here, there = MemoryNetwork().pair()
        return Forgetful(here), there  # type: ignore[return-value]

    with pytest.raises(AssertionError, match="the payload of frame 1 arrived changed"):
        frames_keep_their_order(make_pair)
