"""Parsing of addresses, and the choice of a transport by their scheme.

tcp://host:port   tls://[::1]:0   unix:///path   memory://name
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from gradwire.errors import NotTrusted, PeerLost, UsageError
from gradwire.transport.base import Channel, Listener, Transport

NEAR = "near://"
"""The scheme of unix sockets of workers that other machines can reach, too; see near.py."""
_PLACES = {"tcp": "host:port", "tls": "host:port", "unix": "/path", "memory": "name"}
_HINT = "addresses look like tcp://host:port, tcp://[::1]:port, unix:///path or memory://name"
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A scheme and a place in it: a path, a name, or a host with its port.

    >>> parse_address("tcp://[::1]:80")
    Address(scheme='tcp', place='::1', port=80)
    >>> str(parse_address("tcp://[::1]:80"))
    'tcp://[::1]:80'
    """

    scheme: str
    place: str
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.place}"
        host = f"[{self.place}]" if ":" in self.place else self.place
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str, expected: str | None = None) -> Address:
    """Parse an address, of the expected scheme; host, port, path and name may be empty."""
    scheme, separator, rest = text.partition("://")
    if not (scheme and separator):
        raise UsageError(f"{text!r} is not an address", hint=_HINT)
    if expected is not None and scheme != expected:
        raise UsageError(
            f"{text} is not a {expected} address", hint=f"{expected}://{_PLACES[expected]}"
        )
    if scheme not in ("tcp", "tls"):
        return Address(scheme, rest)
    if rest.count(":") > 1 and not rest.startswith("["):
        raise UsageError(
            f"{text!r} has an IPv6 address without brackets", hint=f"{scheme}://[ADDRESS]:PORT"
        )
    has_port = rest and not rest.endswith("]")
    host, _, port = rest.rpartition(":") if has_port else (rest, "", "0")
    if not (port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        raise UsageError(f"{text!r} has no port between 0 and {_LAST_PORT}", hint=_HINT)
    return Address(scheme, host.removeprefix("[").removesuffix("]"), int(port))


@final
class Transports:
    """A transport made of those of one worker; `hints` tell how to enable a missing scheme."""

    def __init__(
        self, known: Mapping[str, Transport], hints: Mapping[str, str] | None = None
    ) -> None:
        self.schemes = frozenset(known)
        self._known, self._hints = known, hints or {}

    def listen(self, address: str) -> Listener:
        """Listen at the address, with the transport of its scheme."""
        return self._of(address).listen(address)

    def connect(self, address: str, deadline: float, name: str | None = None) -> Channel:
        """Connect to the address, with the transport of its scheme.

        Of two addresses (near.py) the first is tried, and the second if the first cannot be used.
        """
        near, _, far = address.rpartition(" ") if address.startswith(NEAR) else ("", "", address)
        if near:
            with suppress(PeerLost, NotTrusted, UsageError):
                return self._of(near).connect(near, deadline, name)
        return self._of(far).connect(far, deadline, name)

    def _of(self, address: str) -> Transport:
        scheme = parse_address(address).scheme
        if scheme not in self._known:
            known = ", ".join(sorted(self._known)) or "none"
            raise UsageError(
                f"no transport for scheme {scheme!r} of address {address!r}",
                hint=self._hints.get(scheme, f"the known ones are: {known}"),
            )
        return self._known[scheme]
