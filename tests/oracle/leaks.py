"""What is left on the workers after a program: nothing, once all that died was released."""

from __future__ import annotations

import gc
import inspect
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import gradwire
from gradwire.autograd.graph.crossing import Joined, Recv, Send
from gradwire.current import current_worker
from gradwire.torch_private import backward_class

SECONDS = 20.0
"""without a change; a call that nobody waits for may run as long"""
_NODES = {function.__name__: backward_class(function) for function in (Send, Recv, Joined)}


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
    """Release what has died on this worker; what is alive still, counted."""
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
        left.update({f"{name} nodes": kinds[kind] for name, kind in _NODES.items()})
    return dict(+left)


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
        elif time.monotonic() > since + SECONDS:
            return "; ".join(f"{worker}: {said}" for worker, said in left.items()) + held_by()
        rounds += 1


def held_by(levels: int = 5) -> str:
    """Who holds the nodes that are left, as far as Python knows: for whoever looks into a leak."""
    nodes = [alive for alive in gc.get_objects() if type(alive) in _NODES.values()]
    known, said = {id(nodes)}, []
    for _ in range(levels):
        holders = [h for h in gc.get_referrers(*nodes) if id(h) not in known] if nodes else []
        nodes = [h for h in holders if inspect.currentframe() is not h]
        known.update(map(id, (holders, nodes, *nodes)))
        said.append(", ".join(sorted({_short(holder) for holder in nodes})))
    return "; held by " + " <- ".join(said)


def _short(holder: object) -> str:
    if inspect.isframe(holder):
        return f"{holder.f_code.co_qualname}:{holder.f_lineno}"
    keys = list(holder)[:4] if isinstance(holder, dict) else ""
    return f"{type(holder).__name__}{keys}"
