"""One execution of torch's engine that we start ourselves, for a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from gradwire.autograd.graph import Landmarks
from gradwire.autograd.ledger import Ledger
from gradwire.autograd.nodes import Entrance
from gradwire.autograd.torch_private import (
    replica_parameters,
    set_sequence_number,
    when_run_ends,
    will_execute,
)
from gradwire.errors import UsageError

_BEFORE_ALL = 1 << 62


def accumulate(
    tokens: Sequence[torch.Tensor],
    ledger: Ledger,
    landmarks: Landmarks,
    enter: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool = False,
) -> None:
    """Run from these tokens to every leaf they reach, keeping the books in the ledger."""

    def checked() -> None:
        enter()
        if ledger.is_map and any(will_execute(node) for node in landmarks.checkpoints):
            raise UsageError(
                "a reentrant checkpoint runs a backward of its own, "
                "which writes to .grad and not to the context's map",
                hint="use checkpoint(…, use_reentrant=False), or call loss.backward()",
            )
        sinks = [node for node in landmarks.sinks if will_execute(node)]
        unused = [leaf for sink in sinks for leaf in replica_parameters(sink)]
        when_run_ends(partial(ledger.reopen, unused))  # before what DDP leaves until then

    entrance, _ = _entrance(checked)
    roots = [*tokens, entrance]
    with ledger.watching(landmarks.accumulators), _drained():
        # Of one element each: torch puts a one there. Given to it, it would be checked, for which
        # torch imports half a second's worth of modules, the first time.
        torch.autograd.backward(roots, retain_graph=retain_graph, create_graph=create_graph)


def run_towards(
    anchors: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor],
    enter: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> None:
    """Run from these tokens, only to what leads to the anchors; leaves keep nothing."""
    entrance, way_in = _entrance(enter)
    roots = [*tokens, entrance]
    with _drained():
        torch.autograd.grad(
            roots,
            [*anchors, way_in],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )


@contextmanager
def _drained() -> Iterator[None]:
    """A run that fails leaves its tasks in the engine's queue of this thread.

    There they would keep the graph alive until the thread's next run, and a thread that ends with
    such a queue after the interpreter aborts the process. A run of one node behind them all makes
    the engine drop them.
    """
    try:
        yield
    except BaseException:
        with torch.inference_mode(False), torch.enable_grad():
            seed = torch.zeros((), requires_grad=True)
            last = seed.view(())
        assert last.grad_fn is not None
        set_sequence_number(last.grad_fn, 0)
        torch.autograd.grad(last, seed)
        raise


def _entrance(enter: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """A root that runs first and calls `enter`, and the input that makes grad() run it."""
    with torch.inference_mode(False), torch.enable_grad():
        way_in = torch.zeros((), requires_grad=True)
        token: torch.Tensor = cast(Any, Entrance).apply(enter, way_in)
    assert token.grad_fn is not None
    set_sequence_number(token.grad_fn, _BEFORE_ALL)
    return token, way_in
