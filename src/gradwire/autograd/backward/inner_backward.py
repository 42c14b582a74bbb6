"""Backwards that Functions run inside a run of ours: checkpoints, reversible blocks and their like.

Such a backward is one of torch's own, started by Python code in the middle of a node. On its own it
would write to `.grad`, where `backward(context, …)` promises to write nothing, and nobody would
take it back if the pass failed. So it gets a undo log of its own, inside that of the run around it.
To see it begin, the engine that Python code finds is one that asks here first; a backward that is
not inside a run of ours passes through as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradwire.autograd.backward.engine_run import cancel_entrance, entrance
from gradwire.autograd.undo.nested_pass import inside
from gradwire.autograd.undo.undo_log import UndoLog, ledger_of_run
from gradwire.torch_private import (
    NO_RUN,
    AccumulateGrad,
    Node,
    current_run,
    is_transformed,
    wrap_runs,
)

Root = torch.Tensor | GradientEdge


@final
class _Watched:
    """Whether they are by now."""

    done = False


def watch_backwards() -> None:
    """From now on Python code's backwards are seen here; once for the process."""
    if not _Watched.done:
        _Watched.done = True
        wrap_runs(_run)


def _run(start: Callable[..., Any], roots: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """hot: every backward() and grad() of the process"""
    outer = ledger_of_run()
    if outer is not None and not is_transformed():
        return _run_inside(outer, start, roots, *args, **kwargs)
    if current_run() == NO_RUN:
        return start(roots, *args, **kwargs)
    with inside():
        return start(roots, *args, **kwargs)


def _run_inside(
    outer: UndoLog,
    start: Callable[..., Any],
    roots: tuple[Root, ...],
    gradients: tuple[torch.Tensor | None, ...],
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[Root, ...] = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:  # noqa: ANN401
    """The arguments are those of torch's engine."""
    undo_log = outer.inside()
    watched = undo_log.watch(_accumulators(roots, inputs)) if accumulate_grad else []
    first, last = entrance(undo_log.enter, is_grad=not accumulate_grad)
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
        cancel_entrance()
        undo_log.unwatch(watched)
    return captured if accumulate_grad else captured[:-1]


def _accumulators(tensors: Sequence[Root], inputs: Sequence[Root]) -> list[Node]:
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


def _node(root: Root) -> Node | None:
    if isinstance(root, torch.Tensor):
        return get_gradient_edge(root).node if root.requires_grad else None
    return root.node
