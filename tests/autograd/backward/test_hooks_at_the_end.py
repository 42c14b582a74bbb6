"""What hooks of a participant do to gradients and leaves around the end of its run."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import gradwire as gw
import gradwire.testing
from gradwire.errors import BackwardTimeout, UsageError

here = {}


def frees_by_callback(x):
    """As code does that uses the memory of gradients again at the end of a backward."""

    def keep(gradient):
        Variable._execution_engine.queue_callback(gradient.zero_)

    x.register_hook(keep)
    return x * 3


def frees_by_hook(x):

    def free(_, gradients):
        gradients[0].zero_()

    x.grad_fn.register_hook(free)
    return x * 3


def checkpointed(x):
    weight = here["weight"]
    return checkpoint(lambda t: t * weight, x, use_reentrant=True)


def sparse_checkpointed(x):
    weight = here["weight"]
    return checkpoint(lambda t: torch.sparse.mm(weight, t), x, use_reentrant=True)


def weighted(x):
    return x * here["weight"]


@pytest.fixture
def workers():
    here.clear()
    exposed = [frees_by_callback, frees_by_hook, checkpointed, sparse_checkpointed, weighted]
    with gradwire.testing.cluster(2, expose=exposed) as made:
        yield made


def remote(function, x):
    return gw.rpc_sync("w1", function, args=(x * 1,))


@pytest.mark.parametrize("size", [2, 1 << 16], ids=["held", "sent at once"])
@pytest.mark.parametrize("function", [frees_by_callback, frees_by_hook])
def test_the_memory_of_the_last_gradients_may_be_used_again(workers, function, size):
    x = torch.ones(size, requires_grad=True)

    workers[0].run(lambda: remote(function, x).sum().backward())

    assert torch.equal(x.grad, torch.full((size,), 3.0))


def reused_over_processes():
    x = torch.ones(2, requires_grad=True)
    for function in (frees_by_callback, frees_by_hook):
        remote(function, x).sum().backward()
    return x.grad


@pytest.mark.processes
@pytest.mark.slow
def test_it_may_also_between_processes():
    found = gw.run(reused_over_processes, 2, expose=[frees_by_callback, frees_by_hook])

    assert torch.equal(found, torch.full((2,), 6.0))


def test_a_hook_may_freeze_a_leaf_of_a_checkpoint(workers):
    weight = here["weight"] = torch.full((2,), 2.0, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda leaf: leaf.requires_grad_(False))
    x = torch.ones(2, requires_grad=True)

    workers[0].run(lambda: remote(checkpointed, x).sum().backward())

    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert torch.equal(weight.grad, torch.ones(2))


def test_a_leaf_of_a_checkpoint_may_be_sparse(workers):
    here["weight"] = torch.eye(2).to_sparse().requires_grad_()
    x = torch.ones(2, 2, requires_grad=True)

    workers[0].run(lambda: remote(sparse_checkpointed, x).sum().backward())

    assert torch.equal(x.grad, torch.ones(2, 2))
    assert torch.equal(here["weight"].grad.to_dense(), torch.eye(2) * 2)


def test_a_gradient_that_does_not_fit_its_leaf_is_refused_before_anything_changes(workers):
    weight = here["weight"] = torch.full((4,), 2.0, requires_grad=True)
    weight.grad = own = torch.ones(4)
    weight.data = weight.data[:2]
    x = torch.ones(2, requires_grad=True)

    def program():
        with gw.context() as context:
            gw.backward(context, [remote(weighted, x).sum()])

    with pytest.raises(UsageError, match=r"leaf of shape \(2,\) has a \.grad that does not fit it"):
        workers[0].run(program)

    assert weight.grad is own
    lock = workers[1].worker.engine.coordinator._locks.of(weight).lock
    assert lock.acquire(timeout=1)
    lock.release()


def test_a_leaf_that_another_backward_holds_is_awaited_no_longer_than_the_pass_may_take(workers):
    held, goes_on = threading.Event(), threading.Event()
    shared = torch.ones(2, requires_grad=True)

    def hold(_):
        if not held.is_set():
            held.set()
            assert goes_on.wait(30)

    shared.register_post_accumulate_grad_hook(hold)

    def program(timeout):
        with gw.context() as context:
            gw.backward(context, [remote(torch.neg, shared).sum()], timeout=timeout)

    first = threading.Thread(target=workers[0].run, args=(program, 60))
    first.start()
    assert held.wait(10)
    with pytest.raises(BackwardTimeout, match=r"by the hooks of another backward|given up on w0"):
        workers[0].run(program, 0.3)
    assert not goes_on.is_set()
    assert first.is_alive()
    goes_on.set()
    first.join(10)
