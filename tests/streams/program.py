"""Random programs with tensors on a device, compared with the same programs on the CPU.

A program keeps pairs of tensors: one on the CPU, computed at once in this process, and its twin on
a device, which may have crossed workers. It switches streams as a correct program for one GPU
would: a side stream waits for the current one before, and the current one for it afterwards. Values
are small integers, so that any order of sums gives the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

import gradwire as gw

SIZE = 8
LONGEST_CYCLES = 4_000_000
"""of the GPU: some milliseconds"""
_dice = random.Random(0)


class Kit(Protocol):
    """What a program needs of a device."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A copy there."""

    def new_stream(self) -> Any:
        """A side stream."""

    def current_stream(self) -> Any:
        """The one on which this thread queues work."""

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make it current."""

    def delay(self, dice: random.Random) -> None:
        """Let the current stream be late, sometimes."""


def double(x):
    be_late(x)
    return x * 2 + 1


def combine(x, y):
    be_late(x)
    return x + 2 * y


def be_late(x):
    """The stream of a worker that serves is late too, on a GPU, so blocks are read late."""
    if x.is_cuda and _dice.random() < 0.5:
        torch.cuda._sleep(_dice.randrange(LONGEST_CYCLES))


def through(x):
    """Calls back: its caller serves this while it waits, perhaps on a side stream."""
    return gw.rpc_sync("w0", double, args=(x - 1,)) + 1


def keep(x):
    return x * 3


STATE: dict[str, torch.Tensor] = {}


def add_to_state(x):
    """The work of all calls that change it must be in one order, whoever serves them."""
    STATE["sum"] = STATE["sum"] + x
    return STATE["sum"] * 1


def add_through(x):
    return gw.rpc_sync("w0", add_to_state, args=(x,))


EXPOSED = [double, combine, through, keep, add_to_state, add_through]


class Program:
    """One random program; `run` raises AssertionError if a value or a gradient differs."""

    def __init__(self, seed: int, kit: Kit, others: Sequence[str]) -> None:
        self.dice, self.kit, self.others = random.Random(seed), kit, others
        self.side = [kit.new_stream() for _ in range(2)]
        self.sum = torch.zeros(SIZE)
        STATE["sum"] = kit.put(self.sum)
        self.leaves = [self.leaf() for _ in range(2)]
        self.pairs = [self.as_local(*pair) for pair in self.leaves]

    def leaf(self):
        values = torch.tensor([float(self.dice.randint(-3, 3)) for _ in range(SIZE)])
        return values.clone().requires_grad_(), self.kit.put(values).requires_grad_()

    def as_local(self, cpu, there):
        return cpu * 1, there * 1

    def run(self) -> None:
        for _ in range(self.dice.randint(2, 6)):
            if self.dice.random() < 0.4:
                self.on_a_side_stream(self.step)
            else:
                self.step()
        self.backward()

    def step(self) -> None:
        act = self.dice.choice(
            [
                self.call,
                self.call_async,
                self.overwritten,
                self.lent,
                self.fetched,
                self.nested,
                self.kept_state,
                self.local,
            ]
        )
        self.kit.delay(self.dice)  # what it sends may not be computed before much later
        act()

    def on_a_side_stream(self, act: Callable[[], None]) -> None:
        side, before = self.dice.choice(self.side), self.kit.current_stream()
        side.wait_stream(before)
        with self.kit.use_stream(side):
            act()
        before.wait_stream(side)

    def pick(self):
        return self.dice.choice(self.pairs)

    def other(self) -> str:
        return self.dice.choice(self.others)

    def local(self) -> None:
        (a, x), (b, y) = self.pick(), self.pick()
        self.pairs.append((combine(a, b), combine(x, y)))

    def call(self) -> None:
        (a, x), (b, y) = self.pick(), self.pick()
        self.pairs.append((combine(a, b), gw.rpc_sync(self.other(), combine, args=(x, y))))

    def call_async(self) -> None:
        futures = []
        for _ in range(self.dice.randint(1, 3)):
            a, x = self.pick()
            futures.append((double(a), gw.rpc_async(self.other(), double, args=(x,))))
        for a, future in futures:
            self.pairs.append((a, future.wait()))

    def overwritten(self) -> None:
        """The argument is overwritten, and freed, as soon as the call has left."""
        a, x = self.pick()
        copy = x.detach() * 1
        future = gw.rpc_async(self.other(), double, args=(copy,))
        copy.fill_(77)
        del copy
        self.pairs.append((double(a.detach()), future.wait()))

    def lent(self) -> None:
        """The argument was allocated on another stream than it is sent from, and is freed."""
        a, x = self.pick()
        copies = [x.detach() * 1]

        def send() -> None:
            future = gw.rpc_async(self.other(), double, args=(copies.pop(),))
            self.pairs.append((double(a.detach()), future.wait()))

        self.on_a_side_stream(send)

    def kept_state(self) -> None:
        for _ in range(2):
            a, x = self.pick()
            self.sum = self.sum + a.detach()
            self.pairs.append((self.sum, self.added(x.detach())))

    def added(self, x):
        found = []

        def add() -> None:
            found.append(gw.rpc_sync(self.other(), add_through, args=(x,)))

        if self.dice.random() < 0.5:
            self.on_a_side_stream(add)
        else:
            add()
        return found[0]

    def fetched(self) -> None:
        a, x = self.pick()
        reference = gw.remote(self.other(), keep, args=(x,))
        self.pairs.append((keep(a), reference.to_here()))

    def nested(self) -> None:
        a, x = self.pick()
        self.pairs.append((double(a - 1) + 1, gw.rpc_sync(self.other(), through, args=(x,))))

    def backward(self) -> None:
        loss = sum(a.sum() for a, _ in self.pairs)
        there = sum(x.sum() for _, x in self.pairs)
        loss.backward()
        # A thread of torch's own engine would not know our current stream.
        with torch.autograd.set_multithreading_enabled(False):
            if self.dice.random() < 0.4:
                self.on_a_side_stream(there.backward)
            else:
                there.backward()
        for n, (a, x) in enumerate(self.pairs):
            assert torch.equal(a.detach(), x.detach().cpu()), f"value {n}"
        for n, (a, x) in enumerate(self.leaves):
            assert torch.equal(a.grad, x.grad.cpu()), f"the gradient of leaf {n}"
