"""Requests and peers that a worker has refused: counted, and logged the first time."""

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


@final
class Refusals:
    """Counts by kind. The first refusals of a limited number of peers are to be logged."""

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
class RefusalLog:
    """Counts and logs what one worker refuses its peers."""

    def __init__(self, directory: Directory, refusals: Refusals) -> None:
        self._directory, self._refusals = directory, refusals

    def note(self, peer: WorkerId, error: BaseException) -> bool:
        """Count the error that a peer's request ended with, if it is a refusal; whether it is."""
        kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), None)
        if kind is None or isinstance(error, RemoteError):  # another worker has refused it
            return False
        name = self._directory.name(peer)
        if self._refusals.count(kind, name):
            me = self._directory.me.name
            # As text: a kept log record must not keep the traceback's frames alive.
            _log.warning("%s refused %s: %s; the next are only counted", me, name, str(error))
        return True

    def came_late(self, peer: WorkerId) -> None:
        """Count a message that came too late to have an effect."""
        self._refusals.count("late", self._directory.name(peer))
