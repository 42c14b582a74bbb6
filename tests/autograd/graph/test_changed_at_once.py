"""A tensor may be changed in place as soon as its message has left: its Send is there by then."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
import gradwire.testing
from gradwire.wire.message import IS_ANSWER

kept = []


def doubled(x):
    y = x * 2
    kept.append(y)
    return y


def same(x):
    return x * 1


class ChangesAtOnce:
    """Changes a tensor once the answer, or the call, is on its way."""

    def __init__(self, *, answers):
        self.answers, self.changes = answers, None

    def send(self, to, channel, frame, deadline):
        channel.send(frame, deadline)
        if bool(frame.flags & IS_ANSWER) is self.answers and self.changes is not None:
            change, self.changes = self.changes, None
            change()

    def around(self, frame, registered, run):
        return registered, run

    def take_answer(self, take, worker, channel, frame):
        take(worker, frame)


@pytest.fixture
def workers():
    kept.clear()
    with gradwire.testing.cluster(2, expose=[doubled, same]) as made:
        yield made


def test_a_result_that_the_callee_has_kept(workers):
    hasty = workers[1].worker.agent.interceptor = ChangesAtOnce(answers=True)
    hasty.changes = lambda: kept[0].mul_(10)
    x = torch.ones(2, requires_grad=True)

    def program():
        gw.rpc_sync("w1", doubled, args=(x,)).sum().backward()

    workers[0].run(program)

    assert torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("call", [gw.rpc_sync, gw.rpc_async])
def test_an_argument(workers, call):
    x = torch.ones(2, requires_grad=True)
    h = x * 3
    hasty = workers[0].worker.agent.interceptor = ChangesAtOnce(answers=False)
    hasty.changes = lambda: h.mul_(10)

    def program():
        y = call("w1", same, args=(h,))
        (y.wait() if call is gw.rpc_async else y).sum().backward()

    workers[0].run(program)

    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_a_leaf_that_is_frozen(workers):
    x = torch.ones(2, requires_grad=True)
    hasty = workers[0].worker.agent.interceptor = ChangesAtOnce(answers=False)
    hasty.changes = lambda: x.requires_grad_(False)

    def program():
        y = gw.rpc_sync("w1", same, args=(x,))
        x.requires_grad_(True)
        y.sum().backward()

    workers[0].run(program)

    assert torch.equal(x.grad, torch.ones(2))
