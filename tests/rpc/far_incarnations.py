"""What the workers of test_incarnations.py and test_retry.py run."""

from __future__ import annotations

import torch

import gradwire
from tests.gates import GATES

CALLS: list[str] = []


def here():
    return gradwire.get_worker_info().name, gradwire.incarnation()


def doubled(x):
    return 2 * x


def kept(value):
    return value


def fetched(rref):
    return rref.to_here()


def relayed(to, x):
    return gradwire.rpc_sync(to, doubled, args=(x,))


def gated(gate):
    GATES[gate].wait(10)


def counted(name):
    CALLS.append(name)
    return name


def weight():
    return torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))


def product(w, x):
    return w.local_value() * x


def value_of(w):
    return w.local_value().detach().clone()


HOOKS = {}
"""What ends the worker, by the name of the moment."""


def ends_before():
    HOOKS["before"]()
    raise SystemExit("this worker has ended")


def ends_after():
    CALLS.append("after")
    HOOKS["after"]()


@gradwire.idempotent
def again_before():
    if gradwire.incarnation() == 0:
        HOOKS["before"]()
        raise SystemExit("this worker has ended")
    CALLS.append("before")
    return here()


@gradwire.idempotent
def again_after():
    CALLS.append("after")
    if gradwire.incarnation() == 0:
        HOOKS["after"]()
    return here()


@gradwire.idempotent
def again_with(rref):
    return rref.to_here()
