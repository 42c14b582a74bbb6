"""Prepares engine runs that cross: numbers their nodes, keeps them on one thread.

See Note [The order of waiting], walk.py. A run that gradwire starts (backward/engine_run.py)
enters `ordered`. One that a program starts with `loss.backward()` or `torch.autograd.grad` is met
at the only place through which Python starts runs, torch's engine object: while a context here has
received anything, each such run is prepared before it begins. A run that C++ code starts is not
met. Its numbers are right in most programs, and `check_order` raises at once where they are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from gradwire.autograd.graph.context import Context, Received
from gradwire.autograd.graph.nodes import RECV, depth_of_recv
from gradwire.errors import UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import (
    AccumulateGrad,
    Node,
    current_run,
    lift,
    root_nodes,
    set_sequence_number,
    set_threaded,
    will_execute,
    wrap_runs,
)

_receiving: set[int] = set()
"""the contexts of this process, of all its workers, that have received something and are open; by
identity, so that none is kept alive. hot: a WeakSet takes four calls more for each context
"""


@final
class _ThreadRuns(threading.local):
    is_ordered = False
    """whether the innermost run of this thread was prepared, and no run inside it has failed"""
    has_leftovers = False
    """whether a failed run may have left tasks in the engine's queue of this thread"""


_thread = _ThreadRuns()


_UNSEEN: list[Node] = []
"""stands for the inputs of a node that was not visited yet"""


@final
class _Wrapped:
    """Whether torch's engine object is replaced by now."""

    done = False


def receives(context: Context) -> None:
    """A context receives for the first time: from now on runs are prepared."""
    _receiving.add(id(context))
    if not _Wrapped.done:
        _Wrapped.done = True
        wrap_runs(_run)


def closed(context: Context) -> None:
    """A context was closed: a run that meets its Recvs fails, so none needs to be prepared."""
    _receiving.discard(id(context))


def _run(engine_run: Callable[..., Any], roots: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """Prepare a run that Python code starts, then start it."""
    if not _receiving and not _thread.is_ordered:
        return engine_run(roots, *args, **kwargs)
    if _thread.has_leftovers and current_run() == -1:
        drain()  # before numbers change: the queue must not be out of order
    if number_nodes(root_nodes(roots)) or _thread.is_ordered:
        with ordered():
            return engine_run(roots, *args, **kwargs)
    return engine_run(roots, *args, **kwargs)


def number_nodes(roots: Iterable[Node]) -> bool:
    """Lift each node between these and the first Recvs above the depth it depends on.

    Whether there is such a Recv. Nothing is remembered: a loss may die before its context.
    """
    depths: dict[Node, int] = {}
    todo = [(node, _UNSEEN) for node in roots]
    crosses = False
    while todo:
        node, inputs = todo.pop()
        if inputs is _UNSEEN:
            if node in depths:
                continue
            kind = type(node)
            if kind is RECV:
                crosses = True
                depths[node] = depth_of_recv(node)
                continue
            if kind is AccumulateGrad:
                depths[node] = 0
                continue
            inputs = [behind for behind, _ in node.next_functions if behind is not None]
            missing = [(behind, _UNSEEN) for behind in inputs if behind not in depths]
            if missing:
                todo.append((node, inputs))
                todo += missing
                continue
        depth = depths[node] = max([depths[behind] for behind in inputs], default=0)
        if depth:
            lift(node, depth)
    return crosses


@final
class ordered:
    """Around one engine run whose nodes are numbered: it uses the calling thread only.

    With a queue per device, a Send that waits on the thread of the CPU could hide work that a node
    on another device is about to make ready there. The switch belongs to the thread, so it is set
    for the run alone: between two runs the thread may go on with another task of asyncio's.
    """

    __slots__ = ("_was_ordered", "_was_threaded")

    def __enter__(self) -> None:
        self._was_ordered, _thread.is_ordered = _thread.is_ordered, True
        self._was_threaded = set_threaded(False)

    def __exit__(self, kind: object, *_: object) -> None:
        set_threaded(self._was_threaded)
        _thread.is_ordered = self._was_ordered
        if kind is not None:
            # The engine compares the tasks of a failed run differently once its run is gone, so
            # the queue that they are left in may be out of order for the run around this one.
            _thread.is_ordered = False
            _thread.has_leftovers = True
        if _thread.has_leftovers and current_run() == -1:
            drain()


def drain() -> None:
    """Let the engine drop the tasks that failed runs have left in its queue of this thread.

    There they would keep the graph alive until the thread's next run, and a thread that ends with
    such a queue after the interpreter aborts the process. A run of one node behind them all makes
    the engine drop them.
    """
    _thread.has_leftovers = False
    with torch.inference_mode(False), torch.enable_grad():
        seed = torch.zeros((), requires_grad=True)
        last = seed.view(())
    assert last.grad_fn is not None
    set_sequence_number(last.grad_fn, 0)
    torch.autograd.grad(last, seed)


def meets_crossing() -> None:
    """A run that a program began meets its first crossing.

    If it was not prepared, its failure is not seen either: the next run looks for its leftovers.
    """
    if not _thread.is_ordered:
        _thread.has_leftovers = True


def check_order(context: Context, edge: EdgeId, edges_sent: set[EdgeId]) -> None:
    """A Send is about to wait: UsageError if a Recv of its run should have run before it.

    In a run whose nodes are in order there is none; only other runs are looked at.
    """
    if _thread.is_ordered:
        return
    sent = context.sent[edge.n]
    if sent is None:
        return
    for received in tuple(context.received):
        if received.edge in edges_sent or depth_of_recv(received.node) < sent.depth:
            continue
        if runs_through(received):
            raise UsageError(
                f"{edge} of {context} waits for gradients before {received.edge} has sent its own: "
                "the backward was not begun by Python code, or one inside it has failed",
                hint="begin it with loss.backward(), torch.autograd.grad(…) or "
                "gradwire.backward(context_id, [loss])",
            )


def runs_through(received: Received) -> bool:
    """Whether the current run executes this Recv.

    `will_execute` alone also says yes to a node at which grad() only captures a gradient; a node
    that is executed has a next one that is.
    """
    return will_execute(received.node) and leads_on(received)


def leads_on(received: Received) -> bool:
    """Whether the current run executes something behind this Recv."""
    for node, _ in received.node.next_functions:  # noqa: SIM110  (half the time of a generator)
        if node is not None and will_execute(node):
            return True
    return False
