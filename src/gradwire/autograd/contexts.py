"""The contexts one worker knows, and those it must never know again."""

from __future__ import annotations

import threading
from functools import partial
from typing import final

from gradwire.autograd.context import Context
from gradwire.autograd.nodes import origin_of_recv
from gradwire.errors import ContextClosed, UsageError
from gradwire.ids import ContextId, WorkerId, context_id, opener_of, spoken_context

_CLOSED_REMEMBERED = 20_000


@final
class Contexts:
    """Opened here or heard of from a peer; a closed one is not created again by a late message."""

    def __init__(self, me: WorkerId, name: str, *, first: int = 0) -> None:
        self._me, self._name = me, name
        self._lock = threading.Lock()
        self._count = first
        self._open: dict[ContextId, Context] = {}
        self._closed: dict[ContextId, str | None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def new(self) -> Context:
        """Open one here."""
        with self._lock:
            context = self._made(context_id(self._me, self._count))
            self._count += 1
        return context

    def maybe(self, id: ContextId) -> Context | None:
        """The context, if it is open here."""
        return self._open.get(id)

    def heard_of(self, id: ContextId) -> Context | None:
        """A peer works in this context: the one we know, or a new one; None if it was closed.

        Raises if it was closed because its opener was lost, which others may not know: what crossed
        here without being recorded would be missing from the gradients of somebody.
        """
        context = self._open.get(id)
        if context is not None:
            return context
        with self._lock:
            if (lost := self._closed.get(id)) is not None:
                raise ContextClosed(
                    f"{spoken_context(id)} was closed on {self._name}: {lost}",
                    hint="close the context and begin again",
                )
            if id in self._closed or opener_of(id) == self._me:
                return self._open.get(id)
            return self._open.get(id) or self._made(id)

    def find(self, id: ContextId) -> Context:
        """The context, or an error that says what became of it."""
        context = self._open.get(id)
        if context is not None:
            return context
        unknown = f"Could not find autograd context with id: {id}"
        if id in self._closed:
            lost = self._closed.get(id)
            why = "" if lost is None else f": {lost}"
            raise ContextClosed(
                f"{unknown}: {spoken_context(id)} is closed on {self._name}{why}",
                hint="backward must run inside the `with context()` block that made the graph",
            )
        raise UsageError(unknown)

    def close(self, id: ContextId, lost: str | None = None) -> Context | None:
        """Forget it for good; the context, if it was open here. `lost` is why, if not its end."""
        with self._lock:
            self._closed[id] = lost
            if len(self._closed) > _CLOSED_REMEMBERED:
                del self._closed[next(iter(self._closed))]
            return self._open.pop(id, None)

    def opened_by(self, worker: WorkerId) -> list[ContextId]:
        """The contexts that end with this worker."""
        with self._lock:
            return [id for id in self._open if opener_of(id) == worker]

    def all(self) -> list[ContextId]:
        """Every open one."""
        with self._lock:
            return list(self._open)

    def _made(self, id: ContextId) -> Context:
        context = Context(id, partial(origin_of_recv, id))
        self._open[id] = context
        return context
