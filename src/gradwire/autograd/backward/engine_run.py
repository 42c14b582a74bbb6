"""One execution of torch's engine that we start ourselves, for a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch

from gradwire.autograd.graph.ordering import ordered
from gradwire.autograd.graph.walk import Landmarks
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.torch_private import (
    Node,
    replica_parameters,
    run_engine,
    set_sequence_number,
    when_run_ends,
    will_execute,
)
from gradwire.torch_private import (
    lets_checkpoints_run as torch_lets_checkpoints_run,
)

Tensors = tuple[torch.Tensor, ...]

Enter = Callable[[], None]
"""What tells a pass the number of its run, from inside the run."""

_BEFORE_ALL = 1 << 62
_NO_GRADIENT = (None,)
_ONE = torch.ones(())
"""What a token is given. Nobody sees it: a Send asks for its gradients, and no user has a token."""


def accumulate(
    roots: Tensors,
    gradients: Tensors | None,
    undo_log: UndoLog,
    landmarks: Landmarks,
    enter: Enter,
    *,
    retain_graph: bool,
    create_graph: bool = False,
    span: AbstractContextManager[object] | None = None,
    checkpoints: bool = True,
) -> None:
    """Run from these roots to every leaf they reach, keeping the books in the undo log.

    Without `gradients` the roots are tokens. What is begun inside knows whether `checkpoints` may
    run there.
    """
    begin = partial(_enter_among, landmarks, undo_log, enter)
    watched = undo_log.watch(landmarks.accumulators)
    refused, _entrance.refuses_checkpoints = _entrance.refuses_checkpoints, not checkpoints
    try:
        if gradients is None:
            _entrance.next = begin
            gradients = (_ONE,) * len(roots)
        else:
            _entrance.bell.enter = begin
            roots, gradients = (*roots, _entrance.way_in), (*gradients, _ONE)
        _run(roots, gradients, None, retain_graph, create_graph, span)
    finally:
        _entrance.refuses_checkpoints = refused
        undo_log.unwatch(watched)


def lets_checkpoints_run() -> bool:
    """Whether a reentrant checkpoint may run in a pass that this code begins."""
    return not _entrance.refuses_checkpoints and torch_lets_checkpoints_run()


def _enter_among(landmarks: Landmarks, undo_log: UndoLog, enter: Enter) -> None:
    undo_log.enter()
    enter()
    if any(landmarks):
        unused = _unused_behind(landmarks.sinks) if landmarks.sinks else ()
        when_run_ends(partial(undo_log.reopen, unused))  # before what DDP leaves until then


def _unused_behind(sinks: Iterable[Node]) -> Tensors:
    executed = [node for node in sinks if will_execute(node)]
    return tuple(leaf for sink in executed for leaf in replica_parameters(sink))


def run_towards(
    anchors: Tensors,
    tokens: Tensors,
    undo_log: UndoLog,
    enter: Enter,
    *,
    retain_graph: bool,
    create_graph: bool,
    span: AbstractContextManager[object] | None = None,
) -> None:
    """Run from these tokens, only to what leads to the anchors; leaves keep nothing.

    The undo log is for what Functions on the way do by backwards of their own.
    """

    def begin() -> None:
        undo_log.enter()
        enter()

    _entrance.bell.enter = begin
    roots, inputs = (*tokens, _entrance.token), (*anchors, _entrance.way_in)
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
        _entrance.bell.enter = _entrance.next = None
        raise


def enter_if_begun() -> bool:
    """Whether a run from tokens has begun in this thread that is not entered yet: it is then.

    Its first node is a Send, which asks for its pass. No user's code is run before it.
    """
    begin = _entrance.next
    if begin is None:
        return False
    _entrance.next = None
    begin()
    return True


@final
class _Bell:
    """What the entrance of one thread calls: whoever begins a run there. Once for each run."""

    def __init__(self) -> None:
        self.enter: Enter | None = None

    def ring(self, _: object) -> None:
        """The run has begun."""
        enter, self.enter = self.enter, None
        assert enter is not None, "a run that nobody began"
        enter()

    def ring_for_leaf(self, _: object) -> tuple[None]:
        """The same where the entrance is a leaf, which shall keep nothing."""
        self.ring(_)
        return _NO_GRADIENT


@final
class _Entrance(threading.local):
    """An extra root that the engine runs first, so that a run we start knows its own number.

    One for each thread that starts runs; no user's code is run before it. It is the leaf `way_in`,
    as the nodes of leaves come before all others. Under grad() a leaf is not run: then it is
    `token`, and `way_in` the input that makes grad() run it.
    """

    def __init__(self) -> None:
        self.bell = _Bell()
        self.next: Enter | None = None
        """what the first Send of a run calls"""
        self.refuses_checkpoints = False
        with torch.inference_mode(False), torch.enable_grad():
            self.way_in = torch.zeros((), requires_grad=True)
            self.token = self.way_in.view(())
        node = self.token.grad_fn
        assert node is not None
        set_sequence_number(node, _BEFORE_ALL)
        node.register_prehook(self.bell.ring)
        accumulator, _ = node.next_functions[0]
        assert accumulator is not None
        accumulator.register_prehook(self.bell.ring_for_leaf)


_entrance = _Entrance()


def entrance(enter: Enter, *, is_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One more root and input for a backward() or grad() of somebody else's: they call this."""
    _entrance.bell.enter = enter
    return _entrance.token if is_grad else _entrance.way_in, _entrance.way_in


def cancel_entrance() -> None:
    """The run is over, perhaps before it came to the entrance."""
    _entrance.bell.enter = None
