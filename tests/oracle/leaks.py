"""What is left on the workers after a program: nothing, once all that died was released."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import gradwire
from gradwire.current import current_worker
from tests.oracle.holders import NODES, hooks_here, report

SECONDS = 20.0
"""without a change; a call that nobody waits for may run as long"""
HOOKS = "hooks of another call"
"""in what is left on a worker: a thread is still under the saved-tensor hooks of a call before"""


@contextmanager
def cheap_collections() -> Iterator[None]:
    """The collector does not look at what there was before, most of which are torch's modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def left_here(collects: bool) -> dict[str, int]:
    """Release what has died on this worker; what is alive still, counted.

    All objects are looked at, so an exception may die here that another thread has just let go of,
    and with it what its frames hold: that is part of the test.
    """
    if (hooks := hooks_here()) is not None:
        return {f"{HOOKS}: {hooks}": 1}
    engine = current_worker.find().engine
    if collects:
        gc.collect()
    engine.releases.flush()
    edges = engine.edges
    left = Counter(
        {
            "sent edges": len(edges.sent),
            "received edges": len(edges.received),
            "joins": len(edges.joins),
            "edges to release": len(edges.to_tell),
            "passes": len(engine.passes),
            "contexts": len(engine.contexts),
        }
    )
    if left.total() == 0:
        kinds = Counter(type(alive) for alive in gc.get_objects())
        left.update({f"{name} nodes": kinds[kind] for name, kind in NODES.items()})
    return dict(+left)


@contextmanager
def unseen() -> Iterator[list[str]]:
    """What finalizers and dying generators of this process raise, which Python only prints."""
    raised: list[str] = []

    def note(said: sys.UnraisableHookArgs) -> None:
        raised.append(f"{said.err_msg or 'ignored in'} {said.object!r}: {said.exc_value!r}")
        before(said)

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield raised
    finally:
        sys.unraisablehook = before


def what_is_left(workers: int) -> str | None:
    """Wait until nothing is left on any worker; what is, in words, if it does not go away.

    A release lets the next graph upstream die, one message each; and a cycle behind a cycle needs
    one collection each. So it is waited for as long as anything changes.
    """
    before, since, rounds = {}, time.monotonic(), 0
    while True:
        left = {}
        for worker in [f"w{n}" for n in range(workers)]:
            said = gradwire.rpc_sync(worker, left_here, args=(rounds > 2,))
            if said:
                left[worker] = said
        if not left:
            return None
        if left != before:
            before, since = left, time.monotonic()
        if time.monotonic() > since + SECONDS or HOOKS in str(left):
            return "; ".join(f"{worker}: {said}" for worker, said in left.items()) + f"; {report()}"
        rounds += 1
