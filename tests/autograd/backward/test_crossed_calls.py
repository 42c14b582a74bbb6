"""Two participants, each of which has used what the other has computed."""

from __future__ import annotations

import sys

import torch

import gradwire

HERE = sys.modules[__name__]


def through(other, x):
    return gradwire.rpc_sync(other, torch.mul, args=(x, 2)) * 3


def test_workers_that_have_called_each_other_both_begin():
    with gradwire.testing.cluster(3, expose=[HERE]) as workers:

        def program():
            x = torch.ones(2, requires_grad=True)
            one = gradwire.rpc_sync("w1", through, args=("w2", x))
            other = gradwire.rpc_sync("w2", through, args=("w1", x))
            (one + other).sum().backward()
            return x.grad.tolist()

        assert workers[0].run(program) == [12.0, 12.0]
