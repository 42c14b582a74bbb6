"""The references of the message that a thread packs or unpacks."""

from __future__ import annotations

import math
import threading
from typing import Any, final

from gradwire.ids import WorkerId


@final
class MessageRefs:
    """A block in which a thread packs or unpacks one message: the references in it, by index.

    hot: each argument list or result that needs a walk
    """

    __slots__ = ("_local", "_outer", "deadline", "refs", "to")

    def __init__(
        self,
        local: threading.local,
        refs: list[Any],
        to: WorkerId = -1,
        deadline: float = math.inf,
    ) -> None:
        self._local, self.refs, self.to, self.deadline = local, refs, to, deadline

    def __enter__(self) -> list[Any]:
        # Code inside of the block (a codec of the user's, a finalizer) may make calls of its own,
        # whose blocks restore what they found.
        self._outer: MessageRefs | None = getattr(self._local, "message", None)
        self._local.message = self
        return self.refs

    def __exit__(self, *_: object) -> None:
        self._local.message = self._outer
