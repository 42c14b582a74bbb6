"""A store whose values are believed only if they were written with the job's secret.

torch's TCPStore listens on all interfaces and asks nobody who it is; a file may be anybody's. So
each value carries an HMAC-SHA256 under a key of the secret, bound to the name it stands under and,
where the writer knows it, to the round of joining. What fails is refused before it is parsed.

What a signature cannot do: whoever can write to the store can still delete a value, put an older
one back, or move a counter, which has none. Then workers do not find each other, and say so when
their time is over; nobody is believed who should not be, for each connection is proven anew.
"""

from __future__ import annotations

import hmac
import struct
from typing import final

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.errors import NotTrusted

_PURPOSE = "rendezvous"
_HEX_BYTES = 64
_LENGTHS = struct.Struct(">QQ")


def signed(key: bytes, name: str, value: str, round: str = "") -> str:
    """The value with its signature before it."""
    return _mac(key, name, value, round) + value


def opened(key: bytes, name: str, text: bytes, round: str = "") -> str | None:
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
    """Of torch's stores what joining needs."""

    def __init__(self, store: Store, secret: Secret, refusals: Refusals) -> None:
        self.inner = store
        self._key = secret.key(_PURPOSE)
        self._refusals = refusals

    def set(self, name: str, value: str, round: str = "") -> None:
        """Sign and write."""
        self.inner.set(name, signed(self._key, name, value, round))

    def get(self, name: str, round: str = "") -> str:
        """What stands there, NotTrusted if it was not written with the secret."""
        return self._value(name, self.inner.get(name), round)

    def maybe_get(self, name: str, round: str = "") -> str | None:
        """The same, None if nothing stands there."""
        return self.get(name, round) if self.inner.check([name]) else None

    def replace(self, name: str, old: str | None, new: str) -> bool:
        """Write it in the place of the old value; False if that is not there any more."""
        if new == old:
            return True
        before = "" if old is None else signed(self._key, name, old)
        after = signed(self._key, name, new)
        return bool(self.inner.compare_set(name, before, after).decode() == after)

    def add(self, name: str, amount: int) -> int:
        """Move a counter, which is not signed: it must be believed only in its own right."""
        return int(self.inner.add(name, amount))

    def has(self, names: list[str]) -> bool:
        """Whether something stands under all of them, whatever it is."""
        return bool(self.inner.check(names))

    def _value(self, name: str, text: bytes, round: str) -> str:
        value = opened(self._key, name, text, round)
        if value is None:
            self._refusals.count("rendezvous", name)
            raise NotTrusted(
                f"what stands under {name!r} at the meeting place was not written with this "
                "worker's secret",
                hint="give every worker of the job the same secret, Options(secret=…) or "
                "GRADWIRE_SECRET_FILE, and other jobs another meeting place; else somebody "
                "interferes",
            )
        return value
