"""One execution of torch's engine that we start ourselves, for a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from gradwire.autograd.ledger import Ledger
from gradwire.autograd.nodes import Entrance
from gradwire.autograd.torch_private import Node, set_sequence_number

_BEFORE_ALL = 1 << 62


def accumulate(
    tokens: Sequence[torch.Tensor],
    ledger: Ledger,
    accumulators: Sequence[Node],
    enter: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool = False,
) -> None:
    """Run from these tokens to every leaf they reach, keeping the books in the ledger."""
    entrance, _ = _entrance(enter)
    roots = [*tokens, entrance]
    with ledger.watching(accumulators):
        torch.autograd.backward(
            roots,
            [torch.ones_like(root) for root in roots],
            retain_graph=retain_graph,
            create_graph=create_graph,
        )


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
    torch.autograd.grad(
        roots,
        [*anchors, way_in],
        [torch.ones_like(root) for root in roots],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
    )


def _entrance(enter: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """A root that runs before all others and calls `enter`, and the input that makes grad() run it."""
    with torch.inference_mode(False), torch.enable_grad():
        way_in = torch.zeros((), requires_grad=True)
        token: torch.Tensor = cast(Any, Entrance).apply(enter, way_in)
    assert token.grad_fn is not None
    set_sequence_number(token.grad_fn, _BEFORE_ALL)
    return token, way_in
