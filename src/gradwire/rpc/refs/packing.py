"""The references of one message while it is packed, or unpacked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

from gradwire.ids import WorkerId
from gradwire.rpc.messages import Reference


@final
class Packing:
    """A block: inside it references are added to `packed`; if it raises, they are taken back.

    hot: around every argument list and result
    """

    __slots__ = ("_local", "_outer", "_undo", "deadline", "packed", "to")

    def __init__(
        self,
        local: threading.local,
        undo: Callable[[Sequence[Reference]], None],
        to: WorkerId,
        deadline: float,
    ) -> None:
        self._local, self._undo, self.to, self.deadline = local, undo, to, deadline
        self.packed: list[Reference] = []

    def __enter__(self) -> list[Reference]:
        # A finalizer that makes a call of its own may interrupt us: it must find us as we were.
        self._outer = getattr(self._local, "packing", None)
        self._local.packing = self
        return self.packed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._local.packing = self._outer
        if kind is not None:
            self._undo(self.packed)


@final
class Unpacking:
    """A block: inside it the references that came are found where the codec looks for them.

    hot: around every argument list and result
    """

    __slots__ = ("_came", "_local", "_outer")

    def __init__(self, local: threading.local, came: list[object]) -> None:
        self._local, self._came = local, came

    def __enter__(self) -> None:
        self._outer = getattr(self._local, "unpacking", None)
        self._local.unpacking = self._came

    def __exit__(self, *_: object) -> None:
        self._local.unpacking = self._outer
