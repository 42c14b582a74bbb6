"""What is the lower bound in Python? The same steps with two sockets, and without a library.

There are no names, contexts, limits, deadlines, errors or threads: each side knows which message
comes next, and polls for it. A library in Python cannot be faster than this.

Also measured is forward and backward of one local Function, in a loop and after a pause of polling
a clock: the difference is the cost of cold caches.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.autograd import Function

from benchmarks.measure import Row, Run, row, timed
from benchmarks.sides import SECONDS, apart, end_with_parent, pin

BARE = "bare Python"
_FLOATS = 16
_LOOKING = 200e-6
"""About the time that one side of a step takes."""


class Wire:
    """One end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._room = end, memoryview(bytearray(1 << 16))

    def put(self, tensor: torch.Tensor) -> None:
        """Send the bytes of a tensor."""
        self._socket.send(tensor.numpy().data.cast("B"))

    def get(self) -> torch.Tensor:
        """Poll for the next tensor and return it."""
        return torch.frombuffer(bytearray(self.wait()), dtype=torch.float32)

    def say(self) -> None:
        """Send one byte."""
        self._socket.send(b"x")

    def wait(self) -> memoryview:
        """Poll until a byte arrives."""
        while True:
            try:
                return self._room[: self._socket.recv_into(self._room, 0, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                continue


class Send(Function):
    """The Send node: its backward waits for the gradient."""

    @staticmethod
    def forward(node: Any, wire: Wire, tensor: torch.Tensor) -> torch.Tensor:
        """A token."""
        node.wire = wire
        return torch.zeros(())

    @staticmethod
    def backward(node: Any, _: torch.Tensor) -> Any:
        """The gradient that the other side sends."""
        return None, node.wire.get()


class Recv(Function):
    """The Recv node: its backward sends the gradient."""

    @staticmethod
    def forward(node: Any, wire: Wire, tensor: torch.Tensor, *links: torch.Tensor) -> torch.Tensor:
        """The tensor; it requires grad, because one of the links does."""
        node.wire, node.nothing = wire, (None,) * (2 + len(links))
        node.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> Any:
        """Send the gradient."""
        node.wire.put(gradient.contiguous())
        return node.nothing


def _call(wire: Wire) -> Callable[[], object]:
    def step() -> None:
        wire.say()
        wire.wait()

    return step


def _echo(wire: Wire) -> Callable[[], object]:
    x = torch.ones(_FLOATS)

    def step() -> None:
        wire.put(x)
        wire.get()

    return step


def _forward_and_backward(wire: Wire) -> Callable[[], object]:
    x = torch.ones(_FLOATS, requires_grad=True)

    def step() -> None:
        token = Send.apply(wire, x)
        wire.put(x.detach())
        y = Recv.apply(wire, wire.get(), token)
        y.sum().backward()
        assert x.grad is not None
        x.grad = None

    return step


def _serve_call(wire: Wire) -> None:
    wire.wait()
    wire.say()


def _serve_echo(wire: Wire) -> None:
    wire.put(wire.get())


def _serve_forward_and_backward(wire: Wire) -> None:
    x = Recv.apply(wire, wire.get(), torch.zeros((), requires_grad=True))
    y = torch.sin(x)
    token = Send.apply(wire, y)
    wire.put(y.detach())
    token.backward()


_STEPS = {
    "no-op": (_call, _serve_call),
    "16 floats there and back": (_echo, _serve_echo),
    "forward and backward over 1": (_forward_and_backward, _serve_forward_and_backward),
}


def _callee(end: socket.socket, measure: str) -> None:
    end_with_parent()
    pin(1)
    torch.set_num_threads(1)
    wire, serve = Wire(end), _STEPS[measure][1]
    while True:
        serve(wire)


def _caller(measure: str, rounds: int, seconds: float) -> list[list[float]]:
    pin(0)
    torch.set_num_threads(1)
    near, far = socket.socketpair()
    callee = multiprocessing.get_context("spawn").Process(target=_callee, args=(far, measure))
    callee.start()
    try:
        step = _STEPS[measure][0](Wire(near))
        timed(step, seconds)
        return [timed(step, seconds) for _ in range(rounds)]
    finally:
        callee.kill()
        callee.join(SECONDS)


class Alone(Function):
    """A local Function, without communication."""

    @staticmethod
    def forward(node: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return tensor.clone()

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> Any:
        """The gradient, unchanged."""
        return gradient


def _alone(looking: float, rounds: int, seconds: float) -> list[list[float]]:
    pin(0)
    torch.set_num_threads(1)
    x = torch.ones(_FLOATS, requires_grad=True)

    def sample() -> float:
        until = perf_counter() + looking
        while perf_counter() < until:
            pass
        begin = perf_counter()
        Alone.apply(x).sum().backward()
        return perf_counter() - begin

    def block() -> list[float]:
        samples, until = [sample()], perf_counter() + seconds
        while perf_counter() < until:
            samples.append(sample())
        return samples

    block()
    return [block() for _ in range(rounds)]


def rows(run: Run) -> Iterator[Row]:
    """The steps of noop and hops; then torch alone."""
    for measure in _STEPS:
        yield row("bare", measure, {BARE: apart(_caller, measure, run.rounds, run.seconds)})
    for when, looking in (("in a loop", 0.0), ("after 200 µs", _LOOKING)):
        samples = {BARE: apart(_alone, looking, run.rounds, run.seconds)}
        yield row("bare", f"a Function there and back, {when}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "bare", *sys.argv[1:]])
