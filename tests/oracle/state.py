"""What one worker of a random program has: a parameter, things kept, and counts of what ran."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable

import torch

import gradwire

_HOOK = "post-accumulate hook"


def _seen(leaf: torch.Tensor) -> str:
    """What a post-accumulate hook sees is part of what is compared."""
    return f"{_HOOK} at {None if leaf.grad is None else leaf.grad.sum().item()}"


DEVICE = os.environ.get("GRADWIRE_ORACLE_DEVICE", "cpu")
"""where the leaves of all programs are; set by `python -m tests.oracle --device cuda:0`"""


def detached(tensors: list[torch.Tensor], picked: list[int] | None) -> list[torch.Tensor]:
    """Some of these are cut off from their graph, or all of them."""
    return [t.detach() if picked is None or n in picked else t for n, t in enumerate(tensors)]


class State:
    """Fresh for every program."""

    def __init__(self, seed: int, worker: int, *, draws: bool = False) -> None:
        self.seed, self.draws = seed, draws
        generator = torch.Generator().manual_seed(seed * 16 + worker)
        values = torch.randint(1, 4, (3,), dtype=torch.float64, generator=generator)
        self.parameter = torch.nn.Parameter(values.to(DEVICE))
        self.kept: list[torch.Tensor] = []
        self.alive: list[object] = []
        self.contexts: list[gradwire.context] = []
        """opened on this worker, and open until the program is over"""
        self.before: torch.Tensor | None = None
        """the gradient of the parameter when this act began"""
        self.fails = False
        # Appending is one step: a finalizer may run while its own thread counts.
        self._said: deque[str] = deque()
        self._owed: deque[int] = deque()
        self.later: deque[Callable[[], None]] = deque()
        """what finalizers were refused, and do elsewhere"""

    def count(self, what: str) -> None:
        self._said.append(what)

    def take_counts(self) -> Counter:
        """What was counted since the last time."""
        return Counter([self._said.popleft() for _ in range(len(self._said))])

    def owe(self, more: int) -> None:
        self._owed.append(more)

    @property
    def owed(self) -> int:
        """Finalizers that have not ended."""
        return sum(tuple(self._owed))

    def watch_leaf(self, *, sums: bool) -> None:
        """Every kind of hook a leaf may have; `sums` says whether what they see is compared."""
        leaf = self.parameter
        leaf.register_hook(lambda _: self.count("leaf hook"))
        leaf.register_post_accumulate_grad_hook(lambda p: self.count(_seen(p) if sums else _HOOK))
        accumulator = leaf.view_as(leaf).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_: self.count("accumulator hook"))
        self.alive.append(accumulator)


class Accumulator:
    """An object that lives on a worker and whose methods are called through a reference."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total * 1

    def add(self, value: torch.Tensor, times: int) -> torch.Tensor:
        self.total = self.total + value * times
        return self.total


class Stopped(torch.autograd.Function):
    """Passes its input on, and gives no gradient for it: not zero, none."""

    @staticmethod
    def forward(ctx, state: State, x: torch.Tensor) -> torch.Tensor:
        ctx.state = state
        return x * 1

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.state.count("stopped backward")
        return None, None


class Doubled(torch.autograd.Function):
    """Counts its backwards, and asks for zeros where there is no gradient."""

    @staticmethod
    def forward(ctx, state: State, x: torch.Tensor) -> torch.Tensor:
        ctx.state = state
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.state.count("user backward")
        return None, gradient * 2
