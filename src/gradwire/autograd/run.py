"""One execution of torch's engine that we start ourselves, for a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from gradwire.autograd.graph import Landmarks
from gradwire.autograd.ledger import Ledger
from gradwire.autograd.torch_private import (
    replica_parameters,
    run_engine,
    set_sequence_number,
    when_run_ends,
    will_execute,
)
from gradwire.errors import UsageError

Tensors = Sequence[torch.Tensor]

_BEFORE_ALL = 1 << 62
_ONE = torch.ones(())
"""What a token is given. Nobody sees it: a Send asks for its gradients, and no user has a token."""


def accumulate(
    roots: Tensors,
    ledger: Ledger,
    landmarks: Landmarks,
    enter: Callable[[], None],
    *,
    gradients: Tensors | None = None,
    retain_graph: bool,
    create_graph: bool = False,
) -> None:
    """Run from these roots to every leaf they reach, keeping the books in the ledger.

    Without `gradients` the roots are tokens.
    """

    def checked() -> None:
        enter()
        if ledger.into is not None and any(will_execute(node) for node in landmarks.checkpoints):
            raise UsageError(
                "a reentrant checkpoint runs a backward of its own, "
                "which writes to .grad and not to the context's map",
                hint="use checkpoint(…, use_reentrant=False), or call loss.backward()",
            )
        sinks = [node for node in landmarks.sinks if will_execute(node)]
        unused = [leaf for sink in sinks for leaf in replica_parameters(sink)]
        when_run_ends(partial(ledger.reopen, unused))  # before what DDP leaves until then

    begin = checked if any(landmarks) else enter
    watched = ledger.watch(landmarks.accumulators)
    try:
        _run(roots, gradients, begin, None, retain_graph, create_graph)
    finally:
        ledger.unwatch(watched)


def run_towards(
    anchors: Tensors,
    tokens: Tensors,
    enter: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> None:
    """Run from these tokens, only to what leads to the anchors; leaves keep nothing."""
    _run(tokens, None, enter, anchors, retain_graph, create_graph)


def _run(
    roots: Tensors,
    gradients: Tensors | None,
    enter: Callable[[], None],
    inputs: Tensors | None,
    retain_graph: bool,
    create_graph: bool,
) -> None:
    if gradients is None:
        gradients = (_ONE,) * len(roots)
    _entrance.bell.enter = enter
    try:
        run_engine(
            (*roots, _entrance.token),
            (*gradients, _ONE),
            None if inputs is None else (*inputs, _entrance.way_in),
            retain_graph,
            create_graph,
        )
    except BaseException:
        _entrance.bell.enter = None
        _drain()
        raise


def _drain() -> None:
    """A run that fails leaves its tasks in the engine's queue of this thread.

    There they would keep the graph alive until the thread's next run, and a thread that ends with
    such a queue after the interpreter aborts the process. A run of one node behind them all makes
    the engine drop them.
    """
    with torch.inference_mode(False), torch.enable_grad():
        seed = torch.zeros((), requires_grad=True)
        last = seed.view(())
    assert last.grad_fn is not None
    set_sequence_number(last.grad_fn, 0)
    torch.autograd.grad(last, seed)


@final
class _Bell:
    """What the entrance of one thread calls: whoever begins a run there. Once for each run."""

    def __init__(self) -> None:
        self.enter: Callable[[], None] | None = None

    def __call__(self, _: Any) -> None:  # noqa: ANN401
        enter, self.enter = self.enter, None
        assert enter is not None, "a run that nobody began"
        enter()


@final
class _Entrance(threading.local):
    """An extra root that the engine runs first, so that a run we start knows its own number.

    One for each thread that starts runs; no user's code is run before it. `way_in` is the input
    that makes grad() run it.
    """

    def __init__(self) -> None:
        self.bell = _Bell()
        with torch.inference_mode(False), torch.enable_grad():
            self.way_in = torch.zeros((), requires_grad=True)
            self.token = self.way_in.view(())
        node = self.token.grad_fn
        assert node is not None
        set_sequence_number(node, _BEFORE_ALL)
        node.register_prehook(self.bell)


_entrance = _Entrance()
