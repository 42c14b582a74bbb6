"""What a worker has refused: how often, and whether that is worth a line in the log."""

from __future__ import annotations

import logging
import threading
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.errors import BadMessage, NotExposed, OverLimit, RemoteError
from gradwire.ids import WorkerId

_log = logging.getLogger("gradwire")

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


@final
class Noting:
    """Of one worker."""

    def __init__(self, directory: Directory, refusals: Refusals) -> None:
        self._directory, self._refusals = directory, refusals

    def note(self, peer: WorkerId, error: BaseException) -> bool:
        """What a peer asked for ended so: count it, if that was a refusal of ours."""
        kind = maybe_kind(error)
        if kind is None:
            return False
        name = self._directory.name(peer)
        if self._refusals.count(kind, name):
            me = self._directory.me.name
            # As text: whoever keeps the record must not keep the frames, and what is in them.
            _log.warning("%s refused %s: %s; the next are only counted", me, name, str(error))
        return True

    def came_late(self, peer: WorkerId) -> None:
        """What a peer sent is for something that is over: it is counted, and changes nothing."""
        self._refusals.count("late", self._directory.name(peer))
