"""For workers of one machine in a job of many: a unix socket beside the address for the others.

Such a worker has two listeners, and tells its peers both addresses as one text,
`near://MACHINE/path tls://host:port`. A peer on the same machine connects by the first, with shared
memory and no encryption; all others by the second. A container is on the same machine and cannot
see the path: then the second is used too.

The certificate of a peer is not seen over a unix socket. It is a process of the same user, which
could read the keys of all workers here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn, final

from gradwire.errors import PeerLost
from gradwire.transport.address import NEAR, parse_address
from gradwire.transport.base import Channel, Listener, Transport

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def this_machine() -> str:
    """A text that no other machine has, nor this one after the next boot; empty if none is known.

    Then workers connect as if they were on different machines.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not every sandbox shows it
        return ""


@final
class NearTransport:
    """Unix sockets, for peers that are on the machine of the listener."""

    def __init__(self, unix: Transport) -> None:
        self._unix = unix

    def listen(self, address: str) -> Listener:
        """Listen at a generated path, or at the path of the address."""
        listener = self._unix.listen(_unix(address))
        path = parse_address(listener.address).place
        listener.address = f"{NEAR}{this_machine()}{path}"
        return listener

    def connect(self, address: str, deadline: float, name: str | None = None) -> Channel:
        """Connect; PeerLost if the listener is on another machine."""
        here = this_machine()
        if not here or not address.startswith(f"{NEAR}{here}/"):
            raise PeerLost(f"{address} is on another machine")
        return self._unix.connect(_unix(address), deadline, name)


def _unix(address: str) -> str:
    """The address without the machine."""
    _, slash, path = parse_address(address).place.partition("/")
    return f"unix://{slash}{path}"


@final
class ManyListeners:
    """The listeners of one worker. Who accepts for it does so at each of `parts`."""

    def __init__(self, parts: Sequence[Listener]) -> None:
        self.parts = parts
        self.address = " ".join(part.address for part in parts)

    def accept(self) -> NoReturn:
        """Never called: one thread can wait for one listener only."""
        raise NotImplementedError("accept at each of `parts`")

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening anywhere."""
        for part in self.parts:
            part.close(reason)
