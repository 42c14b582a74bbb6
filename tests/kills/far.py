"""A training step over three workers, in phases: what the processes of a kill loop run.

Arithmetic is on small whole numbers in float64, so that every gradient is exact, and one that is
lost, doubled or old is another number.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import ExitStack

import torch

import gradwire
from gradwire.current import current_worker
from gradwire.testing import faults

PHASES = ("forward", "backward", "step", "release")
LR = 0.5

_here: dict = {}
"""What this process keeps between commands."""


class Layer(torch.nn.Module):
    """y = w x."""

    def __init__(self, weight) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(float(weight), dtype=torch.float64))


def join(name, rank, options) -> None:
    gradwire.init_rpc(name, rank, options=options, expose=[sys.modules[__name__]])


def leave() -> None:
    gradwire.shutdown(timeout=5)


def reset(weight) -> None:
    """A new layer, of this weight."""
    _here["layer"] = Layer(weight)
    _here.setdefault("context", None)


# -- what peers call


def onward(route, x):
    """This worker's layer, then those along the route."""
    y = _here["layer"].weight * x
    return gradwire.rpc_sync(route[0], onward, args=(route[1:], y)) if route else y


def weight_reference():
    return gradwire.RRef(_here["layer"].weight)


def number():
    return torch.tensor(3.0, dtype=torch.float64)


def fetched(reference):
    """A value of a third worker, by a reference that a second one gave."""
    return reference.to_here()


# -- what the root is told


def build(route) -> None:
    """The optimizer over the layers of all of them."""
    refs = [weight_reference()]
    refs += [gradwire.rpc_sync(worker, weight_reference) for worker in route]
    _here["optimizer"] = gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=LR)
    _here["route"] = list(route)


def forward(x):
    """The loss; on the way a reference is made, passed on, fetched and dropped."""
    route = _here["route"]
    stack = _here["stack"] = ExitStack()
    _here["context"] = stack.enter_context(gradwire.context())
    made = gradwire.remote(route[0], number)
    factor = gradwire.rpc_sync(route[-1], fetched, args=(made,))
    x = torch.tensor(float(x), dtype=torch.float64)
    _here["loss"] = onward(route, x) * factor
    return _here["loss"].item()


def backward():
    gradwire.backward(_here["context"], [_here["loss"]])
    return _here["context"]


def step() -> None:
    _here["optimizer"].step(_here["context"])


def release() -> None:
    """Nothing of the step is held any more."""
    stack = _here.pop("stack", None)
    for kept in ("loss", "optimizer", "route"):
        _here.pop(kept, None)
    _here["context"] = None
    gc.collect()
    if stack is not None:
        stack.close()


# -- what everybody is asked, by its own line


def gradient(context):
    return gradwire.get_gradients(context)[_here["layer"].weight].item()


def weight():
    return _here["layer"].weight.item()


def stray_gradient():
    """What a failed pass may not have touched."""
    found = _here["layer"].weight.grad
    return None if found is None else found.item()


def leftovers():
    worker = current_worker.find()
    gc.collect()
    refs = worker.refs.statistics()
    return {
        "contexts": len(worker.engine.contexts),
        "passes": len(worker.engine.passes),
        "requests": worker.agent.in_flight,
        "jobs": worker.agent.dispatch.active,
        **{name: getattr(refs, name) for name in refs.__dataclass_fields__},
    }


def footprint():
    """What a process that lives for ever must not collect."""
    return {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd"))}


def seen():
    points = current_worker.find().agent.interceptor
    return {} if points is None else points.seen()


arm, disarm = faults.arm, faults.disarm
