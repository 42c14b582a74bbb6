"""What a worker has refused: how often, and whether that is worth a line in the log."""

from __future__ import annotations

import threading
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
        self._lock = threading.RLock()
        self._counts: dict[str, int] = {}
        self._logged: dict[tuple[str, str], None] = {}
        self._remembered = 0

    def count(self, kind: str, peer: str) -> bool:
        """Count one more; True the first time for this kind and peer, so that it is logged."""
        counts, logged, which = self._counts, self._logged, (kind, peer)
        is_new = False
        with self._lock:  # no calls in here, see docs/threads.md
            counts[kind] = counts[kind] + 1 if kind in counts else 1
            if which not in logged and self._remembered < _MOST_REMEMBERED:
                self._remembered += 1
                logged[which] = None
                is_new = True
        return is_new

    def seen(self) -> dict[str, int]:
        """How often each kind was refused."""
        return self._counts.copy()
