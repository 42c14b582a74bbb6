"""What peers were refused, and what came too late: counted, and logged the first time."""

from __future__ import annotations

import logging
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import Refusals, maybe_kind
from gradwire.ids import WorkerId

_log = logging.getLogger("gradwire")


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
