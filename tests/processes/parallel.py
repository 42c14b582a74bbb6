"""Data-parallel replicas on workers, over a process group of their own. Exposed on all of them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

# What a process keeps between calls; `leave` empties it.
_kept: dict[str, nn.Module] = {}


def make_model(width: int = 4) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()


class Gated(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(2))

    def forward(self, x, n=0):
        return self.layers[n](x)


MODELS = {"plain": make_model, "gated": Gated}


def join(store: str, rank: int, size: int, model: str, options: dict) -> None:
    """Take part in a group and make a replica."""
    seconds = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", seconds, size, rank)
    _kept["replica"] = DistributedDataParallel(MODELS[model](), **options)


def leave() -> None:
    _kept.clear()
    dist.destroy_process_group()


def forward(x, *more):
    return _kept["replica"](x, *more)


def forward_alone(x):
    """Without telling the others."""
    with _kept["replica"].no_sync():
        return _kept["replica"](x)


def gradients(context=None):
    """Of the replica here: in `.grad`, or in a context's map."""
    found = {} if context is None else gradwire.get_gradients(context)
    parameters = _kept["replica"].parameters()
    return [p.grad if context is None else found.get(p) for p in parameters]


def clear():
    _kept["replica"].zero_grad()


def train(last, x, *, into_map: bool):
    """A step of one trainer: its replica, then a layer that all trainers share elsewhere.

    Gives the gradients of the replica in the map, those in `.grad`, and those of the layer.
    """
    with gradwire.context() as context:
        loss = last(_kept["replica"](x)).square().sum()
        if into_map:
            gradwire.backward(context, [loss])
        else:
            loss.backward()
        shared = gradwire.rpc_sync(last.on, shared_gradients, args=(last.module_rref, context))
        return gradients(context), gradients(), shared


def shared_gradients(layer, context):
    found = gradwire.get_gradients(context)
    return [found.get(parameter) for parameter in layer.local_value().parameters()]


class Failing(torch.autograd.Function):
    """The identity; its gradient raises."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        raise ValueError("no gradient for you")


def identity_that_fails(x):
    return Failing.apply(x)
