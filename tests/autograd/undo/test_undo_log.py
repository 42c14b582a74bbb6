"""What the books of a run cost its leaves: a gradient that is nobody else's is kept, not copied."""

from __future__ import annotations

import sys
import weakref

import torch
from torch.autograd import Function

import gradwire as gw
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.testing import cluster

HERE = sys.modules[__name__]
LEAVES: list[torch.Tensor] = []
MADE: dict[int, int] = {}


class Gives(Function):
    """Makes a gradient, and says where its memory is."""

    @staticmethod
    def forward(node, x, n):
        node.n = n
        return x * 1

    @staticmethod
    def backward(node, gradient):
        made = gradient.clone()
        MADE[node.n] = made.data_ptr()
        return made, None


class GivesTwice(Function):
    """Gives one gradient to two leaves."""

    @staticmethod
    def forward(node, x, y):
        return x + y

    @staticmethod
    def backward(node, gradient):
        return gradient, gradient


def of_many_leaves():
    return sum(Gives.apply(leaf, n) for n, leaf in enumerate(LEAVES))


def of_two_leaves():
    return GivesTwice.apply(*LEAVES)


def gradients_of(program, count):
    LEAVES[:] = [torch.ones(8, requires_grad=True) for _ in range(count)]
    MADE.clear()
    with cluster(2, expose=[HERE]) as workers:

        def run():
            with gw.context() as context:
                gw.backward(context, [gw.rpc_sync("w1", program).sum()])
                return workers[1].run(gw.get_gradients, context)

        found = workers[0].run(run)
    gradients = [found[leaf] for leaf in LEAVES]
    LEAVES.clear()
    return gradients


def test_gradients_that_nobody_else_has_are_not_copied():
    gradients = gradients_of(of_many_leaves, 50)

    assert [gradient.data_ptr() for gradient in gradients] == [MADE[n] for n in range(50)]


def test_two_leaves_that_are_given_one_gradient_do_not_share_it():
    first, second = gradients_of(of_two_leaves, 2)

    first += 1
    assert torch.equal(second, torch.ones(8))


def test_a_log_is_freed_without_the_collector():
    undo_log = UndoLog(LeafLocks(), None)
    alive = weakref.ref(undo_log)

    del undo_log

    assert alive() is None
