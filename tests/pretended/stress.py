"""Random programs on pretended devices, compared with the same programs on plain CPU tensors.

A program keeps pairs of tensors: one on the CPU, computed at once in this process, and its twin on
a pretended device, which may have crossed workers. It switches streams as a correct program for one
GPU would: a side stream waits for the current one before, and the current one for it afterwards.
Values are small integers, so that any order of sums gives the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import gradwire as gw
from gradwire.testing.cluster import Cluster, cluster
from gradwire.testing.pretend import streams
from gradwire.testing.pretend.driver import PretendDriver
from gradwire.testing.pretend.tensors import install, put

install()
DEVICE = torch.device("pretend:0")
SIZE = 8


def double(x):
    return x * 2 + 1


def combine(x, y):
    return x + 2 * y


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


@contextmanager
def workers(n: int = 3, **settings) -> Iterator[Cluster]:
    driver = PretendDriver(**settings)
    with cluster(n, expose=EXPOSED, drivers=lambda kind: driver) as made:
        yield made


class Program:
    """One random program; `run` raises AssertionError if a value or a gradient differs."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        streams.shuffle(seed)
        self.side = [streams.Stream(DEVICE) for _ in range(2)]
        self.sum = torch.zeros(SIZE)
        STATE["sum"] = put(self.sum, DEVICE)
        self.leaves = [self.leaf() for _ in range(2)]
        self.pairs = [self.as_local(*pair) for pair in self.leaves]

    def leaf(self):
        values = torch.tensor([float(self.dice.randint(-3, 3)) for _ in range(SIZE)])
        return values.clone().requires_grad_(), put(values, DEVICE).requires_grad_()

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
        act()

    def on_a_side_stream(self, act: Callable[[], None]) -> None:
        side, before = self.dice.choice(self.side), streams.current_stream(DEVICE)
        side.wait_stream(before)
        with streams.use_stream(side):
            act()
        before.wait_stream(side)

    def pick(self):
        return self.dice.choice(self.pairs)

    def other(self) -> str:
        return self.dice.choice(["w1", "w2"])

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


def play(seeds: range, **settings) -> list[int]:
    """The seeds whose programs differ."""
    wrong = []
    with workers(**settings) as made:
        for seed in seeds:
            try:
                made[0].run(lambda seed=seed: Program(seed).run())
            except AssertionError:
                wrong.append(seed)
            streams.synchronize()
    return wrong
