"""Waiting for a promise in an event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from gradwire.agent.requests.promise import Promise


def settled_in_loop(promise: Promise[Any]) -> asyncio.Future[None]:
    """A future of the running event loop, which is done once the promise is settled."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    def settled(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(tell)

    promise.on_settled(settled)
    return done
