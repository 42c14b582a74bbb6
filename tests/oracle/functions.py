"""User-written functions whose backward counts, gives nothing, fails, or runs one of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.oracle.state import State

OfTensor = Callable[[torch.Tensor], torch.Tensor]


class Fuse(torch.autograd.Function):
    """Passes on what it gets, unless this worker is told to fail."""

    @staticmethod
    def forward(ctx, state: State, x: torch.Tensor) -> torch.Tensor:
        ctx.state = state
        return x * 1

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        if ctx.state.fails:
            raise RuntimeError("a fuse has blown")
        return None, gradient


class HandWritten(torch.autograd.Function):
    """A checkpoint as users write it: it computes again, and runs a backward inside the pass."""

    @staticmethod
    def forward(ctx, run: OfTensor, x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x) * 1

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        if not y.requires_grad:
            return None, None
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Reversible(torch.autograd.Function):
    """y1 = a + f(b), y2 = b + g(y1): the backward computes a and b from y1 and y2."""

    @staticmethod
    def forward(ctx, f: OfTensor, g: OfTensor, a: torch.Tensor, b: torch.Tensor):
        ctx.f, ctx.g = f, g
        y1 = a + f(b)
        y2 = b + g(y1)
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, dy1: torch.Tensor, dy2: torch.Tensor):
        y1, y2 = (y.detach() for y in ctx.saved_tensors)
        y1.requires_grad_()
        with torch.enable_grad():
            g1 = ctx.g(y1)
        torch.autograd.backward(g1, dy2)
        b = (y2 - g1).detach().requires_grad_()
        with torch.enable_grad():
            f1 = ctx.f(b)
        dy1 = dy1 + y1.grad
        torch.autograd.backward(f1, dy1)
        return None, None, dy1, dy2 + b.grad
