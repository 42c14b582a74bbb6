"""How many messages a backward takes, and what each says."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire as gw
from tests.leftovers import assert_nothing_left, eventually
from tests.listening import overheard

HERE = sys.modules[__name__]
WEIGHT = torch.ones(2, requires_grad=True)
MANY = [torch.ones(2, requires_grad=True) for _ in range(20)]


def twice(x):
    return 2 * x


def weighted(x):
    return WEIGHT * x


def weighted_by_many(x):
    return sum(MANY) * x


def relayed(x, to):
    return gw.rpc_sync(to, twice, args=(x,))


@pytest.fixture
def cluster_and_said():
    with overheard(3, expose=[HERE]) as both:
        yield both
        assert_nothing_left(both[0])
        for leaf in (WEIGHT, *MANY):
            leaf.grad = None


@pytest.fixture
def workers(cluster_and_said):
    return cluster_and_said[0]


@pytest.fixture
def said(cluster_and_said):
    return cluster_and_said[1]


def backward_of(workers, said, function, *args):
    """What is said in a backward over one call."""
    x = torch.ones(2, requires_grad=True)

    def program():
        loss = gw.rpc_sync("w1", function, args=(x, *args)).sum()
        said.clear()
        loss.backward()
        return said.names()

    return workers[0].run(program), x.grad


def test_over_one_call_a_backward_is_two_messages(workers, said):
    heard, gradient = backward_of(workers, said, twice)

    assert heard == ["Start", "Gradients"]
    assert gradient.tolist() == [2, 2]


def test_a_worker_that_has_changed_a_leaf_hears_how_the_pass_ended(workers, said):
    heard, gradient = backward_of(workers, said, weighted)

    assert heard == ["Start", "Gradients", "PassEnded"]
    assert gradient.tolist() == [1, 1]
    assert WEIGHT.grad.tolist() == [1, 1]


def test_the_gradients_of_a_run_with_many_leaves_do_not_wait_for_its_end(workers, said):
    heard, gradient = backward_of(workers, said, weighted_by_many)

    assert heard == ["Start", "Gradients", "RunDone", "PassEnded"]
    assert gradient.tolist() == [20, 20]
    assert all(leaf.grad.tolist() == [1, 1] for leaf in MANY)


def test_who_gets_no_gradients_from_the_root_is_told_when_the_first_leave(workers, said):
    heard, gradient = backward_of(workers, said, relayed, "w2")

    assert sorted(heard) == ["Gradients"] * 3 + ["RunDone"] + ["Start"] * 2
    assert heard[0] == "Start"
    assert gradient.tolist() == [2, 2]


def towards_received(x):
    """The gradient of x is behind a result: its Recv is none of the first that the run meets."""
    y = gw.rpc_sync("w2", twice, args=(x,))
    y.sum().backward(inputs=[x])
    return x.grad


def test_the_gradients_of_a_received_input_are_sent_to_nobody(workers, said):
    x = torch.ones(2, requires_grad=True)

    gradient = workers[0].run(gw.rpc_sync, "w1", towards_received, args=(x * 3,))

    assert gradient.tolist() == [2, 2]
    assert said.names().count("Gradients") == 1  # from w2, of x


def test_a_pass_over_a_worker_without_leaves_is_over_there_with_its_run(workers, said):
    x = torch.ones(2, requires_grad=True)

    def program():
        with gw.context():
            gw.rpc_sync("w1", twice, args=(x,)).sum().backward()
            return eventually(lambda: not len(workers[1].worker.engine.passes))

    assert workers[0].run(program)


@pytest.mark.parametrize("with_leaf", [False, True])
@pytest.mark.parametrize("into_map", [False, True])
def test_an_error_behind_the_last_gradients_of_a_run_is_raised(workers, into_map, with_leaf):
    """The last gradients leave when the run is over, so that nothing of it goes unheard."""
    x = torch.ones(2, requires_grad=True)

    def program():
        with gw.context() as context:
            loss = gw.rpc_sync("w1", failing_behind, args=(x, with_leaf)).sum()
            with pytest.raises(RuntimeError, match="behind"):
                gw.backward(context, [loss]) if into_map else loss.backward()
            assert not gw.get_gradients(context)
            assert not workers[1].run(gw.get_gradients, context)
            assert WEIGHT.grad is None

    workers[0].run(program)


def failing_behind(x, with_leaf):
    def fail(*_):
        raise RuntimeError("behind the Recv")

    x.grad_fn.register_hook(fail)
    return WEIGHT * x if with_leaf else 2 * x
