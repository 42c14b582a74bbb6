"""What a worker has refused: how often, and whether that is worth a line in the log."""

from __future__ import annotations

import threading
from collections import Counter
from typing import final

from gradwire.errors import BadMessage, NotExposed, OverLimit, RemoteError

_MOST_REMEMBERED = 1024
_KINDS = ((NotExposed, "not exposed"), (OverLimit, "over limit"), (BadMessage, "bad message"))


def maybe_kind(error: BaseException) -> str | None:
    """The kind of refusal that an error is; None if it is none of ours."""
    if isinstance(error, RemoteError):
        return None
    return next((kind for type_, kind in _KINDS if isinstance(error, type_)), None)


@final
class Refusals:
    """Counted by kind. Peers are remembered up to a number; whoever comes later is only counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def count(self, kind: str, peer: str) -> bool:
        """Count one more; True the first time for this kind and peer, so that it is logged."""
        with self._lock:
            self._counts[kind] += 1
            is_first = (kind, peer) not in self._logged
            if is_first and len(self._logged) < _MOST_REMEMBERED:
                self._logged.add((kind, peer))
                return True
        return False

    def seen(self) -> dict[str, int]:
        """How often each kind was refused."""
        with self._lock:
            return dict(self._counts)
