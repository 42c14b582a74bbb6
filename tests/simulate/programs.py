"""Random distributed-autograd programs, and what they give in one process.

Numbers are small integers in float64 and every call has a factor of its own, so that sums are exact
in any order and a lost, doubled or swapped contribution shows. A program is a tree of calls: each
runs on a worker that holds a parameter, may call others, and may use or not use what they return.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, final

import torch

import gradwire
from tests.simulate.scheduler import here

TO_GRAD, TO_MAP, OF_INPUT = "loss.backward()", "backward(context, [loss])", "autograd.grad()"
_APART = 7
"""The factor of calls that are given no graph: their part's gradient is all that backward gives."""
NOWHERE, PARTLY, EVERYWHERE = "without a context", "partly in a context", "in a context"
"""Which part of a step is in a context. If a part is, backward is, and half of the calls."""
_MODES = ("sync", "sync", "async", "remote")


@dataclass(frozen=True, slots=True)
class Node:
    """One call: of which part (its number, or after `plan` itself), how, and what it calls."""

    part: Any
    ticket: int
    factor: int
    mode: str
    is_used: bool
    is_kept: bool = False  # the part keeps its result, and the graph of it, until its next call
    children: tuple[Node, ...] = ()

    def size(self) -> int:
        """Calls in it."""
        return 1 + sum(child.size() for child in self.children)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward."""

    way: str
    times: int
    x: tuple[int, ...]
    calls: tuple[Node, ...]
    scope: str = EVERYWHERE
    uses_last: bool = False  # the loss depends on what the step before returned, and its graph

    def calls_before_context(self) -> int:
        """How many of the calls are made before the context is opened."""
        n = len(self.calls)
        return {NOWHERE: n, PARTLY: (n + 1) // 2, EVERYWHERE: 0}[self.scope]


@dataclass(frozen=True, slots=True)
class Script:
    """What one worker does, and where its parts live."""

    root: str
    places: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    def describe(self) -> str:
        """In a line."""
        ways = ", ".join(
            f"{step.way} of {sum(call.size() for call in step.calls)} calls {step.scope}"
            + (" and of the step before" if step.uses_last else "")
            for step in self.steps
        )
        return f"{self.root} with parts on {', '.join(self.places)}: {ways}"


class ExpectedStep(NamedTuple):
    """What a step gives in one process."""

    loss: torch.Tensor
    x: torch.Tensor | None
    parts: list[torch.Tensor | None]


@final
class Parameter:
    """A parameter on a worker, and the function that uses it; without a name, in one process."""

    def __init__(self, name: str, values: list[int]) -> None:
        self.p = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        self._kept: torch.Tensor | None = None
        scheduler = here()
        self._stage = scheduler.stage if name and scheduler is not None else None
        if self._stage is not None:
            self._stage.made(name, self.p)

    def forward(
        self, x: torch.Tensor, ticket: int, factor: int, is_kept: bool, children: tuple[Node, ...]
    ) -> torch.Tensor:
        """Use the parameter, call the children, use what they return."""
        if self._stage is not None:
            self._stage.ran(ticket)
        h = x * factor + self.p
        y = h * self.p
        for out in called(h, children):
            y = y + out
        self._kept = y if is_kept else None
        return y


def called(h: torch.Tensor, calls: Sequence[Node]) -> list[torch.Tensor]:
    """What the calls return that is used; the asynchronous ones run meanwhile."""
    outs: list[Any] = []
    for node in calls:
        given = h.detach() if node.factor == _APART else h
        rest = (given, node.ticket, node.factor, node.is_kept, node.children)
        if isinstance(node.part, Parameter):
            outs.append(node.part.forward(*rest))
        elif node.mode == "async":
            outs.append(node.part.rpc_async().forward(*rest))
        elif node.mode == "remote":
            outs.append(node.part.remote().forward(*rest).to_here())
        else:
            outs.append(node.part.rpc_sync().forward(*rest))
    came = [out if isinstance(out, torch.Tensor) else out.wait() for out in outs]
    return [out for node, out in zip(calls, came, strict=True) if node.is_used]


def plan(calls: Sequence[Node], parts: Sequence[object]) -> tuple[Node, ...]:
    """The calls as `called` takes them, with these in the place of the numbers."""
    return tuple(
        replace(node, part=parts[node.part], children=plan(node.children, parts)) for node in calls
    )


def loss_of(x: torch.Tensor, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on all of them."""
    total = x * 3
    for n, out in enumerate(outs):
        total = total + out * (n + 2)
    weights = torch.arange(1, len(x) + 1, dtype=x.dtype)
    return (total * weights).sum()


def alone(script: Script, step: Step, last: Step | None) -> ExpectedStep:
    """The same in one process, with plain torch; the loss depends on the `last` step, if any."""
    parts = [Parameter("", list(values)) for values in script.values]
    x = torch.tensor(step.x, dtype=torch.float64, requires_grad=True)
    outs = called(x * 2, plan(step.calls, parts))
    if last is not None:
        before = last.calls[: last.calls_before_context()]
        h = torch.tensor(last.x, dtype=torch.float64, requires_grad=True) * 2
        outs += called(h, plan(before, parts))
    loss = loss_of(x, outs)
    found = torch.autograd.grad(loss, [x, *(part.p for part in parts)], allow_unused=True)
    times = 1 if step.way == OF_INPUT else step.times
    scaled: list[torch.Tensor | None] = [None if g is None else g * times for g in found]
    return ExpectedStep(loss.detach(), scaled[0], scaled[1:])


def random_script(
    chosen: random.Random, root: str, names: Sequence[str], tickets: count[int], steps: int
) -> Script:
    """A program for one worker."""
    places = tuple(chosen.choice(names) for _ in range(chosen.randint(2, 3)))
    values = tuple(tuple(chosen.randint(1, 3) for _ in range(2)) for _ in places)
    made = [_random_step(chosen, len(places), tickets) for _ in range(steps)]
    for n, step in enumerate(made):
        scopes = (PARTLY, EVERYWHERE) if step.way == TO_MAP else (NOWHERE, NOWHERE, PARTLY)
        uses_last = n > 0 and made[n - 1].scope != EVERYWHERE and chosen.random() < 0.5
        made[n] = replace(step, scope=chosen.choice(scopes), uses_last=uses_last)
    return Script(root, places, values, tuple(made))


def make_parts(script: Script, tag: str) -> list[Any]:
    """References to the parts, each made where it lives."""
    return [
        gradwire.remote(place, Parameter, args=(f"{tag}.{n}", list(values)))
        for n, (place, values) in enumerate(zip(script.places, script.values, strict=True))
    ]


def _random_step(chosen: random.Random, parts: int, tickets: count[int]) -> Step:
    way = chosen.choice((TO_GRAD, TO_GRAD, TO_MAP, OF_INPUT))
    times = 2 if way == TO_GRAD and chosen.random() < 0.2 else 1
    x = tuple(chosen.randint(-3, 3) for _ in range(2))
    calls = tuple(
        _random_node(chosen, parts, tickets, chosen.choice((1, 1, 2, 3)))
        for _ in range(chosen.choice((1, 1, 2)))
    )
    return Step(way, times, x, calls)


def _random_node(chosen: random.Random, parts: int, tickets: count[int], depth: int) -> Node:
    children: tuple[Node, ...] = ()
    if depth > 1:
        n = chosen.choice((0, 1, 1, 2))
        children = tuple(_random_node(chosen, parts, tickets, depth - 1) for _ in range(n))
    ticket = next(tickets)
    factor = 2 + ticket % 11
    is_used = chosen.random() < 0.85
    part, mode = chosen.randrange(parts), chosen.choice(_MODES)
    return Node(part, ticket, factor, mode, is_used, ticket % 3 == 0, children)
