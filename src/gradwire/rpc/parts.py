"""What layers above keep for each worker; this one must not know what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast, final

W = TypeVar("W")
T = TypeVar("T")


@final
class Parts(Generic[W]):
    """The parts of one worker: each is made when it is first asked for, and only once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[object, object] = {}

    def of(self, worker: W, kind: Callable[[W], T]) -> T:
        """The worker's part of that kind."""
        with self._lock:
            if kind not in self._parts:
                self._parts[kind] = kind(worker)
            return cast(T, self._parts[kind])
