"""What the tests of this folder run on other workers."""

from __future__ import annotations

import torch
from torch import nn

import gradwire


class Scaled(nn.Module):
    """y = w x + b, with a buffer that counts the calls in training mode."""

    def __init__(self, weight: float, *, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x, *, times=1):
        self.calls += self.training
        return times * (self.weight * x + self.bias)


class Several(nn.Module):
    """Takes and gives containers."""

    def forward(self, pair, named):
        left, right = pair
        return {"sum": left + right + named["third"], "all": [left, (right,)]}


class NotAModule:
    """Made like one."""


class Raising(nn.Module):
    """Cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such model")


class Hybrid(nn.Module):
    """A layer here and a layer on another worker."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.here = nn.Linear(3, 4)
        self.there = gradwire.RemoteModule(place, nn.Linear, (4, 2))

    def forward(self, x):
        return self.there(torch.tanh(self.here(x)))


def scaled_by_three():
    return Scaled(3.0)


def halve(module):
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter /= 2


def name_here():
    return gradwire.get_worker_info().name


def is_training(rref):
    return rref.local_value().training


def devices(rref):
    return sorted({str(parameter.device) for parameter in rref.local_value().parameters()})


def gradients(rref, context=None):
    """The gradients of a module's parameters: in `.grad`, or in a context's map."""
    parameters = rref.local_value().parameters()
    if context is None:
        return [parameter.grad for parameter in parameters]
    found = gradwire.get_gradients(context)
    return [found.get(parameter) for parameter in parameters]


def use(module, x):
    """Another worker uses a module that came to it in a call."""
    return module(x), module.on, module.training


def pass_on(module):
    return module


class Tuned(gradwire.RemoteModule):
    """A RemoteModule of the user's own."""


class Bare(gradwire.RemoteModule):
    """Arrives with what it needs to be called, and no more."""

    def _to_parts(self):
        return self.on, self.device, self.module_rref

    @classmethod
    def _from_parts(cls, on, device, module_rref):
        arrived = object.__new__(cls)
        vars(arrived).update(on=on, device=device, module_rref=module_rref)
        for method in ("forward_async", "forward"):
            setattr(arrived, method, getattr(arrived, method))
        return arrived


def attributes_and_results(module, x):
    return list(vars(module)), module.forward(x), module.forward_async(x).wait()
