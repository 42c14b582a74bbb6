"""Each kind of wait has a timeout of its own, of any size, and ends by it."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.errors import BackwardTimeout, CallTimeout, DeadlinePassed, StepFailed, UsageError
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]


@pytest.fixture
def gate(request):
    name = request.node.name
    GATES[name] = threading.Event()
    yield name
    GATES[name].set()


@pytest.fixture
def workers(gate):
    with cluster(3, expose=[HERE]) as made:
        yield made
        GATES[gate].set()
        assert_nothing_left(made)


# -- what runs on the workers


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        GATES[ctx.gate].wait(30)
        return grad, None


def slow_backward(x, gate):
    return Waits.apply(x, gate)


def nap(gate):
    GATES[gate].wait(30)


def passed_on(through, gate, timeout=None):
    if through:
        gw.rpc_sync(through[0], passed_on, args=(through[1:], gate), timeout=timeout)
    else:
        GATES["w3"].set()
        nap(gate)


def weight():
    return torch.nn.Parameter(torch.ones(()))


class Slow(torch.optim.SGD):
    """Its step waits at the gate that its learning rate stands for."""

    def step(self, closure=None):
        GATES["step"].wait(30)
        return super().step(closure)


def differentiates(gate):
    """A whole backward pass in a call."""
    x = torch.ones((), requires_grad=True)
    with gw.context() as context:
        y = gw.rpc_sync("w2", slow_backward, args=(x, gate))
        try:
            gw.backward(context, [y])
        except gw.GradwireError as error:
            return type(error).__name__
    return "it ended"


# -- the tests

SMALL = [1e-9, 1e-6, 1e-3]
LARGE = [1e3, 1e9, 1e300]


@pytest.mark.parametrize("seconds", SMALL)
def test_a_short_one_ends_each_kind_of_wait(workers, gate, seconds):
    with workers[0].worker.scope():
        with pytest.raises(CallTimeout):
            gw.rpc_sync("w1", nap, args=(gate,), timeout=seconds)
        reference = gw.remote("w1", weight)
        with pytest.raises(CallTimeout):
            gw.remote("w1", nap, args=(gate,)).to_here(timeout=seconds)
        with gw.context() as context:
            x = torch.ones((), requires_grad=True)
            y = gw.rpc_sync("w1", slow_backward, args=(x, gate))
            with pytest.raises(DeadlinePassed) as late:
                gw.backward(context, [y], timeout=seconds)
            assert late.value.phase == "backward"
            late.value.with_traceback(None)
            GATES[gate].set()
        with torch.no_grad():
            assert reference.to_here().item() == 1
        del reference, late
    assert x.grad is None


@pytest.mark.parametrize("seconds", LARGE)
def test_a_long_one_is_no_mistake(workers, gate, seconds):
    GATES[gate].set()
    with workers[0].worker.scope():
        assert gw.rpc_sync("w1", nap, args=(gate,), timeout=seconds) is None
        assert gw.rpc_async("w1", nap, args=(gate,), timeout=seconds).wait() is None
        reference = gw.remote("w1", weight, timeout=seconds)
        with torch.no_grad():
            assert reference.to_here(timeout=seconds).item() == 1
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [reference], lr=0.5)
        with gw.context() as context:
            x = torch.ones((), requires_grad=True)
            y = gw.rpc_sync("w1", slow_backward, args=(x, gate))
            gw.backward(context, [y], timeout=seconds)
            assert gw.get_gradients(context)[x] == 1
            optimizer.step(context, timeout=seconds)
        del optimizer, reference


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_time_is_refused(workers, gate, seconds):
    with workers[0].worker.scope(), gw.context() as context:
        y = gw.rpc_sync("w1", torch.mul, args=(torch.ones((), requires_grad=True), 2.0))
        with pytest.raises(UsageError, match="not a positive, finite number"):
            gw.backward(context, [y], timeout=seconds)
        with pytest.raises(UsageError, match="not a positive, finite number"):
            gw.rpc_sync("w1", nap, args=(gate,), timeout=seconds)


def test_a_pass_says_how_long_it_was_given_and_who_is_not_done(workers, gate):
    with workers[0].worker.scope(), gw.context() as context:
        x = torch.ones((), requires_grad=True)
        y = gw.rpc_sync("w1", slow_backward, args=(x, gate))
        with pytest.raises(
            BackwardTimeout, match=r"given up on w0 after 0\.05 s.*not done: w1"
        ) as late:
            gw.backward(context, [y], timeout=0.05)
        assert (late.value.peer, late.value.phase) == ("w1", "backward")
        GATES[gate].set()
        late.value.with_traceback(None)


def test_the_next_pass_is_exact(workers, gate):
    with workers[0].worker.scope():
        x = torch.ones((), requires_grad=True)
        with gw.context() as context, pytest.raises(DeadlinePassed):
            gw.backward(context, [gw.rpc_sync("w1", slow_backward, args=(x, gate))], timeout=0.05)
        GATES[gate].set()
        with gw.context() as context:
            gw.backward(context, [gw.rpc_sync("w1", slow_backward, args=(x, gate))])
            assert gw.get_gradients(context)[x] == 1
    assert_nothing_left(workers)


def test_a_pass_never_outlives_the_call_it_is_made_in(workers, gate):
    with pytest.raises(CallTimeout):
        workers[0].run(gw.rpc_sync, "w1", differentiates, args=(gate,), timeout=0.2)

    assert eventually(lambda: len(workers[1].worker.engine.passes) == 0)  # the gate is closed


@pytest.mark.parametrize("through", [["w1"], ["w1", "w2"], ["w1", "w2", "w1"]], ids="-".join)
def test_of_nested_calls_the_one_that_is_late_is_named(gate, through):
    clock = ManualClock()
    with cluster(4, expose=[HERE], clock=clock) as four, ThreadPoolExecutor(1) as threads:
        reached = GATES["w3"] = threading.Event()
        late = threads.submit(four[0].run, passed_on, [*through, "w3"], gate, 10)
        assert reached.wait(10)
        clock.advance(10.01 - 0.5 * len(through))

        asker = through[-1]
        with pytest.raises(
            CallTimeout, match=rf"w3 did not answer {asker}#\d+ .*passed_on"
        ) as told:
            late.result(10)
        assert (told.value.peer, told.value.worker) == ("w3", asker)
        GATES[gate].set()
        told.value.with_traceback(None)
        assert_nothing_left(four)


def test_a_step_ends_by_its_own_timeout(gate):
    GATES["step"] = threading.Event()
    with cluster(3, expose=[HERE], options=Options(timeouts=Timeouts(step=600))) as three:
        with three[0].worker.scope():
            refs = [gw.remote(f"w{n}", weight) for n in (1, 2)]
            optimizer = gw.DistributedOptimizer(Slow, refs, lr=0.5)
            with gw.context() as context:
                gw.backward(context, [sum(ref.to_here() for ref in refs)])
                with pytest.raises(StepFailed, match="no worker has stepped") as failed:
                    optimizer.step(context, timeout=0.2)
            assert (failed.value.peer, failed.value.phase) == ("w1, w2", "step")
            GATES["step"].set()
            failed.value.with_traceback(None)
            failed.value.__cause__ = None
            del refs, optimizer, failed
        assert_nothing_left(three)
