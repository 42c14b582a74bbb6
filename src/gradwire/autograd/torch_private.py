"""The names of torch that are not public and that this layer stands on.

Each is used only here. What they tell a node of the run it is in was tried on torch 2.11 to 2.13;
a torch that lacks one is refused at import, by name, rather than found out in a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import Variable, forward_ad
from torch.utils.checkpoint import CheckpointFunction

Node = torch.autograd.graph.Node

_NEEDED = (
    "torch._C._current_graph_task_id",
    "torch._C._will_engine_execute_node",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._functions.AccumulateGrad",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.graph.Node._sequence_nr",
    "torch.autograd.forward_ad._current_level",
    "torch.Tensor._use_count",
)


def _find(path: str) -> object:
    found: object = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def missing_names() -> list[str]:
    """Those of the private names that this torch does not have."""
    lacking = []
    for path in _NEEDED:
        try:
            _find(path)
        except AttributeError:
            lacking.append(path)
    return lacking


if lacking := missing_names():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(lacking)}; gradwire needs torch 2.11 or newer"
    )

AccumulateGrad = cast(type[Node], _find("torch._C._functions.AccumulateGrad"))
_task_id = cast(Callable[[], int], _find("torch._C._current_graph_task_id"))
_will_execute = cast(Callable[[Node], bool], _find("torch._C._will_engine_execute_node"))
_keep_graph = cast(
    Callable[[], bool], _find("torch._C._autograd._get_current_graph_task_keep_graph")
)


def current_run() -> int:
    """The number of the engine run that executes the calling node; -1 outside of one."""
    return _task_id()


def will_execute(node: Node) -> bool:
    """Whether the current run executes a node, or captures a gradient at it."""
    return _will_execute(node)


def keeps_graph() -> bool:
    """Whether the current run was started with retain_graph."""
    return _keep_graph()


def when_run_ends(callback: Callable[[], None]) -> None:
    """Call back after the current run has succeeded, before its `backward()` returns.

    If the run fails, the engine drops the callback without calling it, at once.
    """
    cast(Any, Variable)._execution_engine.queue_callback(callback)


def sequence_number(node: Node) -> int:
    """The node's place in the engine's queue: of the ready nodes, the highest runs first."""
    return cast(Any, node)._sequence_nr()  # type: ignore[no-any-return]


def set_sequence_number(node: Node, number: int) -> None:
    """Move a node in the engine's queue."""
    cast(Any, node)._set_sequence_nr(number)


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether a node's backward runs one of its own, over a graph that is not there yet."""
    return isinstance(node, _CHECKPOINT)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a derivative of forward-mode differentiation."""
    dual = cast(Any, forward_ad)
    return dual._current_level >= 0 and dual.unpack_dual(tensor).tangent is not None


def is_kept_by_graphs(leaf: torch.Tensor) -> bool:
    """Whether a graph, or an operator that runs now, holds the very tensor.

    Besides its Python object one holds it who does no harm: the node that adds to its gradient.
    """
    return cast(Any, leaf)._use_count() > 2  # type: ignore[no-any-return]


def backward_class(function: type[torch.autograd.Function]) -> type[Node]:
    """The class of the nodes that a Function makes."""
    return cast(type[Node], cast(Any, function)._backward_cls)


_CHECKPOINT = backward_class(CheckpointFunction)
