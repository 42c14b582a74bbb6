"""Executions of torch's engine: those that gradwire starts for a pass, and backwards inside them.

A run must know its own number before user code runs in it, as the number tells which pass a node
runs for. The engine tells the number only to nodes, so each run gets a first node: see
`_StartNode`.

Functions may run a backward of their own inside such a run: checkpoints, reversible blocks. That is
torch's own backward, started by Python code in the middle of a node. Left alone it would write to
`.grad`, where `backward(context, …)` promises to write nothing, and nothing would revert it if the
pass failed. So it gets an undo log of its own, inside that of the run around it. To see it begin,
the engine object that Python code finds is replaced by one that calls `_run_of_python` first. A
backward that is not inside a run of gradwire passes through unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradwire.autograd.graph.ordering import ordered
from gradwire.autograd.graph.walk import Landmarks
from gradwire.autograd.undo.nested_pass import inside
from gradwire.autograd.undo.undo_log import UndoLog, undo_log_of_run
from gradwire.torch_private import (
    NO_RUN,
    AccumulateGrad,
    Node,
    current_run,
    is_transformed,
    replica_parameters,
    run_engine,
    set_sequence_number,
    when_run_ends,
    will_execute,
    wrap_runs,
)
from gradwire.torch_private import (
    lets_checkpoints_run as torch_lets_checkpoints_run,
)

Tensors = tuple[torch.Tensor, ...]

OnStart = Callable[[], None]
"""Called from inside a run, before anything else, to take note of its number."""

_BEFORE_ALL = 1 << 62
_NO_GRADIENT = (None,)
_ONE = torch.ones(())
"""The gradient of a token. Nothing reads it: a Send waits for its gradients, and no user has a
token."""


def accumulate(
    roots: Tensors,
    gradients: Tensors | None,
    undo_log: UndoLog,
    landmarks: Landmarks,
    on_start: OnStart,
    *,
    retain_graph: bool,
    create_graph: bool = False,
    span: AbstractContextManager[object] | None = None,
    checkpoints: bool = True,
) -> None:
    """Run from these roots to every leaf they reach, and log the changes.

    Without `gradients` the roots are tokens. `checkpoints` says whether reentrant checkpoints may
    run in passes that begin inside this run.
    """
    begin = partial(_begin, landmarks, undo_log, on_start)
    watched = undo_log.watch(landmarks.accumulators)
    refused, _start.refuses_checkpoints = _start.refuses_checkpoints, not checkpoints
    try:
        if gradients is None:
            _start.on_first_send = begin
            gradients = (_ONE,) * len(roots)
        else:
            _start.hook.on_start = begin
            roots, gradients = (*roots, _start.leaf), (*gradients, _ONE)
        _run(roots, gradients, None, retain_graph, create_graph, span)
    finally:
        _start.refuses_checkpoints = refused
        undo_log.unwatch(watched)


def lets_checkpoints_run() -> bool:
    """Whether a reentrant checkpoint may run in a pass that begins here."""
    return not _start.refuses_checkpoints and torch_lets_checkpoints_run()


def _begin(landmarks: Landmarks, undo_log: UndoLog, on_start: OnStart) -> None:
    undo_log.enter()
    on_start()
    if any(landmarks):
        unused = _unused_behind(landmarks.sinks) if landmarks.sinks else ()
        # Queued now, so that it is called before the callbacks that DDP queues during the run.
        when_run_ends(partial(undo_log.reopen, unused))


def _unused_behind(sinks: Iterable[Node]) -> Tensors:
    executed = [node for node in sinks if will_execute(node)]
    return tuple(leaf for sink in executed for leaf in replica_parameters(sink))


def run_towards(
    anchors: Tensors,
    tokens: Tensors,
    undo_log: UndoLog,
    on_start: OnStart,
    *,
    retain_graph: bool,
    create_graph: bool,
    span: AbstractContextManager[object] | None = None,
) -> None:
    """Run from these tokens, only to what leads to the anchors; leaves keep nothing.

    The undo log is for the backwards that Functions run on the way.
    """

    def begin() -> None:
        undo_log.enter()
        on_start()

    _start.hook.on_start = begin
    roots, inputs = (*tokens, _start.view), (*anchors, _start.leaf)
    try:
        _run(roots, (_ONE,) * len(roots), inputs, retain_graph, create_graph, span)
    finally:
        undo_log.unwatch([])


def _run(
    roots: Tensors,
    gradients: Tensors,
    inputs: Tensors | None,
    retain_graph: bool,
    create_graph: bool,
    span: AbstractContextManager[object] | None,
) -> None:
    try:
        with ordered():
            if span is None:
                run_engine(roots, gradients, inputs, retain_graph, create_graph)
            else:
                with span:
                    run_engine(roots, gradients, inputs, retain_graph, create_graph)
    except BaseException:
        # It may have failed before its first node: the next run must not call what was for this.
        _start.hook.on_start = _start.on_first_send = None
        raise


def enter_if_begun() -> bool:
    """Enter the run from tokens that has begun in this thread; False if there is none.

    Its first node is a Send, which asks for its pass. No user code runs before it.
    """
    begin = _start.on_first_send
    if begin is None:
        return False
    _start.on_first_send = None
    begin()
    return True


@final
class _StartHook:
    """The prehook of one thread's start node: calls `on_start`, once for each run."""

    def __init__(self) -> None:
        self.on_start: OnStart | None = None

    def call(self, _: object) -> None:
        """The run has begun."""
        on_start, self.on_start = self.on_start, None
        assert on_start is not None, "a run that nobody began"
        on_start()

    def call_at_leaf(self, _: object) -> tuple[None]:
        """The same where the start node is a leaf, which must accumulate nothing."""
        self.call(_)
        return _NO_GRADIENT


@final
class _StartNode(threading.local):
    """An extra root that the engine runs first, so that a run learns its own number.

    One for each thread that starts runs; no user code runs before it. In a backward() it is `leaf`,
    as the engine runs the nodes of leaves before all others. A grad() does not run leaves: there it
    is `view`, whose number is the greatest, and `leaf` is the input that makes grad() run it. A run
    from tokens needs no extra root: its first node is a Send, which calls `on_first_send`.
    """

    def __init__(self) -> None:
        self.hook = _StartHook()
        self.on_first_send: OnStart | None = None
        self.refuses_checkpoints = False
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros((), requires_grad=True)
            self.view = self.leaf.view(())
        node = self.view.grad_fn
        assert node is not None
        set_sequence_number(node, _BEFORE_ALL)
        node.register_prehook(self.hook.call)
        accumulator, _ = node.next_functions[0]
        assert accumulator is not None
        accumulator.register_prehook(self.hook.call_at_leaf)


_start = _StartNode()

# -- backwards that Python code starts

_TensorOrEdge = torch.Tensor | GradientEdge


@final
class _Watched:
    """Whether torch's engine object is replaced by now."""

    done = False


def watch_backwards() -> None:
    """See from now on the backwards that Python code starts; once for the process."""
    if not _Watched.done:
        _Watched.done = True
        wrap_runs(_run_of_python)


def _run_of_python(start: Callable[..., Any], roots: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """hot: every backward() and grad() of the process"""
    outer = undo_log_of_run()
    if outer is not None and not is_transformed():
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
    watched = undo_log.watch(_accumulators(roots, inputs)) if accumulate_grad else []
    _start.hook.on_start = undo_log.enter
    first, last = (_start.leaf if accumulate_grad else _start.view), _start.leaf
    try:
        captured = start(
            (*roots, first),
            (*gradients, torch.ones_like(first)),
            retain_graph,
            create_graph,
            (*inputs, last) if inputs else (),
            allow_unreachable=allow_unreachable,
            accumulate_grad=accumulate_grad,
        )
    finally:
        _start.hook.on_start = None  # the run may have failed before its first node
        undo_log.unwatch(watched)
    return captured if accumulate_grad else captured[:-1]


def _accumulators(tensors: Sequence[_TensorOrEdge], inputs: Sequence[_TensorOrEdge]) -> list[Node]:
    """The nodes that this backward will run for leaves."""
    if inputs:
        return [node for node in map(_node, inputs) if isinstance(node, AccumulateGrad)]
    todo = [node for node in map(_node, tensors) if node is not None]
    seen, found = set(todo), []
    while todo:
        node = todo.pop()
        if type(node) is AccumulateGrad:
            found.append(node)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return found


def _node(root: _TensorOrEdge) -> Node | None:
    if isinstance(root, torch.Tensor):
        return get_gradient_edge(root).node if root.requires_grad else None
    return root.node
