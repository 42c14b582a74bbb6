"""Executions of torch's engine: those that gradwire starts for a pass, and those of Python code.

The number of a run tells which pass a node runs for, so a run must know it before user code runs in
it. The engine tells the number only to nodes, so each run gets a first node: see `_StartNode`.

Python starts runs (`loss.backward()`, `torch.autograd.grad`) only through torch's engine object,
which is replaced by one that calls `_run_of_python`. A run that C++ code starts is not seen. There,

 1. while a worker here has a Recv, the run is prepared: its nodes are numbered and it is kept on
    one thread. See Note [The order of waiting], graph/walk.py;
 2. a backward that a Function runs inside a run of gradwire (a checkpoint, a reversible block) gets
    an undo log of its own. Left alone it would write to `.grad`, where `backward(context, …)`
    promises to write nothing, and nothing would revert it if the pass failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradwire.autograd.graph.crossing import RECV, EdgeEnd, end_of
from gradwire.autograd.graph.edges import Edges, any_received
from gradwire.autograd.graph.walk import node_of, reachable_from
from gradwire.autograd.undo.nested_pass import inside
from gradwire.autograd.undo.undo_log import UndoLog, undo_log_of_run
from gradwire.current import NOWHERE, get_current
from gradwire.errors import UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import (
    CHECKPOINT,
    DDP_SINK,
    NO_RUN,
    AccumulateGrad,
    Node,
    current_run,
    is_checkpoint_valid,
    is_inside_transform,
    lift,
    recording,
    replica_parameters,
    root_nodes,
    run_engine,
    set_sequence_number,
    set_threaded,
    will_execute,
    wrap_runs,
)

Tensors = tuple[torch.Tensor, ...]

OnStart = Callable[[], None]
"""Called from inside a run, before anything else, to take note of its number."""

_FEW_LEAVES = 16
"""So many leaves are closed in less time than one more message takes."""
_BEFORE_ALL = 1 << 62
_ONE = torch.ones(())
"""The gradient of a token, which nothing reads."""


# -- what a run reaches; a coordinator asks from inside its run, at the first crossing


class Reached(NamedTuple):
    """The nodes behind some others that a run must know before it begins."""

    recvs: list[Node]
    accumulators: list[Node]
    """of leaves; those of the Recvs' anchors are not among them"""
    checkpoints: list[Node]
    """those of reentrant activation checkpoints, whose backward runs another backward"""
    sinks: list[Node]
    """DDP's sink nodes (`find_unused_parameters=True`)"""


def reached_from(nodes: Iterable[Node]) -> Reached:
    """What a run from these reaches on this worker, through links too."""
    found: dict[type[Node], list[Node]]
    found = {RECV: [], AccumulateGrad: [], CHECKPOINT: [], DDP_SINK: []}
    seen: dict[Any, None] = dict.fromkeys(nodes)
    todo = list(seen)
    seen[None] = None  # an input that needs no gradient has no node
    for node in todo:  # it grows meanwhile
        kind, inputs = type(node), node.next_functions
        if kind in found:
            found[kind].append(node)
            if kind is RECV:
                inputs = inputs[end_of(node).count + 1 :]  # the links
        for behind, _ in inputs:
            if behind not in seen:
                seen[behind] = None
                todo.append(behind)
    return Reached(*found.values())


def behind(recvs: Iterable[Node]) -> list[Node]:
    """The nodes of the links of these Recvs: every other node behind a Recv is behind a Send."""
    links = [recv.next_functions[end_of(recv).count + 1 :] for recv in recvs]
    return [node for inputs in links for node, _ in inputs if node is not None]


def may_be_counted(reached: Reached) -> bool:
    """Whether the last gradients of a run may be held until it is over, and announce its end.

    Not if many leaves are to be closed after them, or if DDP runs callbacks at the end.
    """
    if reached.checkpoints or reached.sinks or len(reached.accumulators) > _FEW_LEAVES:
        return False
    return not reached.accumulators or not may_have_ddp()


def may_have_ddp() -> bool:
    """Whether DDP may run callbacks at the end of a run."""
    return dist.is_available() and dist.is_initialized()


def leads_on(recv: Node) -> bool:
    """Whether the current run executes something behind this Recv, not only captures its gradient.

    `will_execute` says yes in both cases.
    """
    for node, _ in recv.next_functions:  # noqa: SIM110  (half the time of a generator)
        if node is not None and will_execute(node):
            return True
    return False


# -- runs that gradwire starts


def execute(
    roots: Tensors,
    gradients: Tensors | None,
    anchors: Tensors | None,
    undo_log: UndoLog,
    reached: Reached | None,
    on_start: OnStart,
    *,
    retain_graph: bool,
    create_graph: bool = False,
    checkpoints: bool = True,
) -> None:
    """Run from these roots to every leaf they reach, and log the changes.

    Without `gradients` the roots are tokens. With `anchors` the run goes only to what leads to
    these, and leaves keep nothing: the undo log is for the backwards that Functions run on the way.
    `checkpoints` says whether reentrant checkpoints may run in passes that begin inside this run.
    """
    if reached is not None:
        undo_log.watch(reached.accumulators)
    refused, this_thread.refuses_checkpoints = this_thread.refuses_checkpoints, not checkpoints
    inputs = None
    try:
        _start.pending.append(partial(_begin, reached, undo_log, on_start))
        if anchors is not None:
            roots, inputs = (*roots, _start.view), (*anchors, _start.leaf)
        elif gradients is not None:
            roots, gradients = (*roots, _start.leaf), (*gradients, _ONE)
        with ordered():
            gradients = gradients or (_ONE,) * len(roots)
            run_engine(roots, gradients, inputs, retain_graph, create_graph)
    except BaseException:
        _start.pending.clear()  # it may have failed before its first node
        raise
    finally:
        this_thread.refuses_checkpoints = refused
        undo_log.unwatch()


def lets_checkpoints_run() -> bool:
    """Whether a reentrant checkpoint may run in a pass that begins here."""
    return not this_thread.refuses_checkpoints and is_checkpoint_valid()


def _begin(reached: Reached | None, undo_log: UndoLog, on_start: OnStart) -> None:
    undo_log.enter()
    on_start()
    if reached and (reached.sinks or (reached.accumulators and may_have_ddp())):
        executed = [sink for sink in reached.sinks if will_execute(sink)]
        unused = [leaf for sink in executed for leaf in replica_parameters(sink)]
        undo_log.reopen_at_end(unused)


def _callback_queued() -> None:
    """By Python code. See Note [Callbacks at the end of a run], undo/undo_log.py."""
    undo_log = undo_log_of_run()
    if undo_log is not None:
        undo_log.reopen_at_end()


def enter_if_begun() -> bool:
    """Enter the run from tokens that has begun in this thread; False if there is none."""
    if not _start.pending:
        return False
    _start.pending.pop()()
    return True


def _run_begins(pending: list[OnStart], gradient: object, _: object) -> object:
    """The prehook of a start node, which gets this gradient instead of its own."""
    pending.pop()()
    return gradient


@final
class _StartNode(threading.local):
    """An extra root that the engine runs first, before user code: a run learns its own number.

    In a backward() it is `leaf`, as the engine runs the nodes of leaves before all others. A grad()
    does not run leaves: there it is `view`, whose number is the greatest, and `leaf` is the input
    that makes grad() run it. A run from tokens needs no extra root: its first node is a Send, which
    asks for its pass (`enter_if_begun`).
    """

    def __init__(self) -> None:
        self.pending: list[OnStart] = []
        """what to call in the run that this thread is about to start"""
        with recording():
            self.leaf = torch.zeros((), requires_grad=True)
            self.view = self.leaf.view(())
        node = node_of(self.view)
        set_sequence_number(node, _BEFORE_ALL)
        node.register_prehook(partial(_run_begins, self.pending, None))
        accumulator, _ = node.next_functions[0]
        assert accumulator is not None
        nothing = (None,)  # the leaf accumulates nothing
        accumulator.register_prehook(partial(_run_begins, self.pending, nothing))


_start = _StartNode()


@final
class _ThreadRuns(threading.local):
    refuses_checkpoints = False
    is_ordered = False
    """whether the innermost run of this thread was prepared, and no run inside it has failed"""
    recvs: Sequence[Node] = ()
    """the first Recvs of the innermost run that was prepared"""
    has_leftovers = False
    """whether a failed run may have left tasks in the engine's queue of this thread"""


this_thread = _ThreadRuns()

# -- backwards that Python code starts

_TensorOrEdge = torch.Tensor | GradientEdge


@cache
def watch_backwards() -> None:
    """See from now on the backwards that Python code starts; once for the process."""
    wrap_runs(_run_of_python, _callback_queued)


def is_in_pass(inbound: Any) -> bool:  # noqa: ANN401  # a Source, or None
    """Whether this code runs inside a `backward(context, …)`, here or where it was called from."""
    if inbound is not None and inbound.in_pass:
        return True
    outer = undo_log_of_run() if current_run() != NO_RUN else None
    return outer is not None and outer.into is not None


def _check_not_in_pass(inbound: Any, kwargs: Any) -> None:  # noqa: ANN401
    """UsageError if a served function adds to `.grad` where its gradients belong into a map."""
    if inbound is not None and inbound.in_pass and kwargs.get("accumulate_grad"):
        raise UsageError(
            "a function that was called from inside of backward(context_id, …) on another worker "
            "runs a backward of its own, whose gradients would not be in the context",
            hint="use torch.autograd.grad there and return the gradients, or run the outer pass by "
            "a plain loss.backward()",
        )


def _run_of_python(start: Callable[..., Any], roots: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """hot: every backward() and grad() of the process"""
    current = get_current()
    _check_not_in_pass(current[2], kwargs)
    if this_thread.is_ordered or any_received():
        if this_thread.has_leftovers and current_run() == NO_RUN:
            drain()  # before numbers change: the queue must not be out of order
        recvs, _ = number_nodes(root_nodes(roots))
        if recvs or this_thread.is_ordered:
            with ordered(recvs):
                return _run_as_nested(start, roots, args, kwargs)
    if current is NOWHERE:
        return _run_as_nested(start, roots, args, kwargs)
    # A thread of torch's own, one for each device, would know neither worker, context nor deadline:
    # hooks and checkpoints may make calls.
    was_threaded = set_threaded(False)
    try:
        return _run_as_nested(start, roots, args, kwargs)
    finally:
        set_threaded(was_threaded)


def _run_as_nested(start: Callable[..., Any], roots: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """Start a run; if another run is around it, its outcome depends on that one."""
    outer = undo_log_of_run()
    if outer is not None and not is_inside_transform():
        return _run_inside(outer, start, roots, *args, **kwargs)
    if current_run() == NO_RUN:
        return start(roots, *args, **kwargs)
    with inside():
        return start(roots, *args, **kwargs)


def _run_inside(
    outer: UndoLog,
    start: Callable[..., Any],
    roots: tuple[_TensorOrEdge, ...],
    gradients: tuple[torch.Tensor | None, ...],
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[_TensorOrEdge, ...] = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:  # noqa: ANN401
    """The arguments are those of torch's engine."""
    undo_log = outer.inside()
    if accumulate_grad:
        undo_log.watch(_accumulators(roots, inputs))
    first, last = (_start.leaf if accumulate_grad else _start.view), _start.leaf
    try:
        _start.pending.append(undo_log.enter)
        captured = start(
            (*roots, first),
            (*gradients, _ONE),
            retain_graph,
            create_graph,
            (*inputs, last) if inputs else (),
            allow_unreachable=allow_unreachable,
            accumulate_grad=accumulate_grad,
        )
    finally:
        _start.pending.clear()  # the run may have failed before its first node
        undo_log.unwatch()
    return captured if accumulate_grad else captured[:-1]


def _accumulators(tensors: Sequence[_TensorOrEdge], inputs: Sequence[_TensorOrEdge]) -> list[Node]:
    """The nodes that this backward will run for leaves."""
    nodes = []
    for root in inputs or tensors:
        if not isinstance(root, torch.Tensor):
            nodes.append(root.node)
        elif root.requires_grad:
            nodes.append(get_gradient_edge(root).node)
    found = nodes if inputs else reachable_from(nodes)
    return [node for node in found if isinstance(node, AccumulateGrad)]


# -- the order of waiting; see the note of that name, graph/walk.py


def number_nodes(roots: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """Lift the nodes from these to the first Recvs above their depths.

    Returns these Recvs, and the accumulators that were met on the way.
    """
    depths: dict[Any, int] = {None: 0}  # an input that needs no gradient has no node
    todo: list[Any] = []
    recvs: list[Any] = []
    accumulators: list[Any] = []
    for root in roots:
        (recvs if type(root) is RECV else todo).append(root)
    while todo:
        node, depth, count = todo[-1], 0, len(todo)
        if node not in depths:
            for behind, _ in node.next_functions:
                known = depths.get(behind)
                if known is None:
                    kind, known = type(behind), 0  # as long as it is not known
                    if kind is RECV:
                        recvs.append(behind)
                        known = depths[behind] = end_of(behind).origin.depth
                    elif kind is AccumulateGrad:
                        accumulators.append(behind)
                        depths[behind] = 0
                    else:
                        todo.append(behind)
                depth = max(depth, known)
            if len(todo) > count:
                continue
            if depth:
                lift(node, depth)
            depths[node] = depth
        todo.pop()
    return recvs, accumulators


@final
class ordered:
    """Around one engine run whose nodes are numbered: it uses the calling thread only.

    With a queue per device, a Send that waits on the thread of the CPU could hide work that a node
    on another device is about to make ready there. The switch is set for the run alone: between two
    runs the thread may go on with another task of asyncio's.
    """

    def __init__(self, recvs: Sequence[Node] = ()) -> None:
        self._recvs = recvs

    def __enter__(self) -> None:
        self._outer_recvs, this_thread.recvs = this_thread.recvs, self._recvs
        self._was_ordered, this_thread.is_ordered = this_thread.is_ordered, True
        self._was_threaded = set_threaded(False)

    def __exit__(self, kind: object, *_: object) -> None:
        set_threaded(self._was_threaded)
        this_thread.is_ordered, this_thread.recvs = self._was_ordered, self._outer_recvs
        if kind is not None:
            # The engine compares the tasks of a failed run differently once its run is gone, so
            # the queue that they are left in may be out of order for the run around this one.
            this_thread.is_ordered, this_thread.has_leftovers = False, True
        if this_thread.has_leftovers and current_run() == NO_RUN:
            drain()


def drain() -> None:
    """By one more run, let the engine drop what failed runs have left in its queue of this thread.

    There it would keep the graph alive until the thread's next run, and a thread that ends with
    such a queue after the interpreter aborts the process.
    """
    this_thread.has_leftovers = False
    with recording():
        seed = torch.zeros((), requires_grad=True)
        last = seed.view(())
    set_sequence_number(node_of(last), 0)
    torch.autograd.grad(last, seed)


def check_order(edges: Edges, end: EdgeEnd, edges_sent: set[EdgeId]) -> None:
    """A Send is about to wait: UsageError if a Recv of its run should have run before it."""
    if this_thread.is_ordered:
        return
    sent = edges.sent.get(end.edge.n)
    if sent is None:
        return
    for recv in edges.recvs():
        other = end_of(recv)
        if other.edge in edges_sent or other.origin.depth < sent.depth:
            continue
        if will_execute(recv) and leads_on(recv):
            raise UsageError(
                f"{end.edge} waits for gradients before {other.edge} has sent its own: "
                "the backward was not begun by Python code, or one inside it has failed",
                hint="begin it with loss.backward(), torch.autograd.grad(…) or "
                "gradwire.backward(context_id, [loss])",
            )
