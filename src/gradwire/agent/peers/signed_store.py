"""A store whose values are accepted only if they were signed with the job's secret.

torch's TCPStore listens on all interfaces and authenticates nobody; a file may be writable by
others. So each value carries an HMAC-SHA256 under a key derived from the secret, bound to its name
and, where the writer knows it, to the round of joining. A bad signature is refused before parsing.

A process that can write to the store can still delete a value, restore an older one, or change a
counter, which is not signed. Then joining fails by its timeout. No impostor gets in, as the
handshake authenticates each connection again.
"""

from __future__ import annotations

import hmac
import struct
from typing import final

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.errors import NotTrusted

_HEX_BYTES = 64
_LENGTHS = struct.Struct(">QQ")


def signed(key: bytes, name: str, value: str, round: str = "") -> str:
    """The value with its signature before it."""
    return _mac(key, name, value, round) + value


def verified(key: bytes, name: str, text: bytes, round: str = "") -> str | None:
    """The value, if it was signed with this key for this name and round."""
    try:
        value = text[_HEX_BYTES:].decode()
    except UnicodeDecodeError:
        return None
    good = hmac.compare_digest(text[:_HEX_BYTES], _mac(key, name, value, round).encode())
    return value if good else None


def _mac(key: bytes, name: str, value: str, round: str) -> str:
    said = [part.encode() for part in (name, round, value)]
    lengths = _LENGTHS.pack(len(said[0]), len(said[1]))
    return hmac.new(key, lengths + b"".join(said), "sha256").hexdigest()


@final
class SignedStore:
    """The operations of torch's stores that joining needs, with signed values."""

    def __init__(self, store: Store, secret: Secret, refusals: Refusals) -> None:
        self.inner, self._refusals = store, refusals
        self._key = secret.key("rendezvous")

    def set(self, name: str, value: str, round: str = "") -> None:
        """Sign and write."""
        self.inner.set(name, signed(self._key, name, value, round))

    def get(self, name: str, round: str = "") -> str:
        """The value; NotTrusted if it was not signed with the secret."""
        value = verified(self._key, name, self.inner.get(name), round)
        if value is None:
            self._refusals.count("rendezvous", name)
            raise NotTrusted(
                f"the value of {name!r} in the rendezvous store was not signed with this "
                "worker's secret",
                hint="give every worker of the job the same secret, Options(secret=…) or "
                "GRADWIRE_SECRET_FILE, and other jobs another store; else an attacker may have "
                "written it",
            )
        return value

    def maybe_get(self, name: str, round: str = "") -> str | None:
        """The value, None if there is none."""
        return self.get(name, round) if self.inner.check([name]) else None

    def replace(self, name: str, old: str | None, new: str) -> bool:
        """Replace the old value; False if the store holds another one by now."""
        if new == old:
            return True
        before = "" if old is None else signed(self._key, name, old)
        after = signed(self._key, name, new)
        return bool(self.inner.compare_set(name, before, after).decode() == after)

    def add(self, name: str, amount: int) -> int:
        """Add to a counter. Counters are not signed: no trust may rest on their value."""
        return int(self.inner.add(name, amount))

    def has(self, names: list[str]) -> bool:
        """Whether all of these names have a value, signed or not."""
        return bool(self.inner.check(names))
