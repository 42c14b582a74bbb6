"""Each kind of wait has a timeout of its own, of any size, and ends by it."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.agent.requests.timer import nested
from gradwire.errors import (
    BackwardTimeout,
    CallTimeout,
    DeadlinePassed,
    PeerLost,
    StepFailed,
    UsageError,
)
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


def recursive(levels):
    """Calls the next worker, and so on."""
    if levels == 0:
        return gw.get_worker_info().name
    return gw.rpc_sync(f"w{levels % 3}", recursive, args=(levels - 1,))


def raises_below(levels):
    if levels == 0:
        raise ValueError("the culprit")
    return gw.rpc_sync(f"w{levels % 3}", raises_below, args=(levels - 1,))


def works_for(seconds, levels, clock):
    """At the innermost of so many calls; the time is that of the test's clock."""
    if levels:
        return gw.rpc_sync(f"w{levels % 3}", works_for, args=(seconds, levels - 1, clock))
    GATES[clock].advance(seconds)
    return gw.rpc_sync("w2", torch.add, args=(torch.ones(1), 1)).item()


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
LARGE = [1e3, 1e9, 1e300, float("inf"), None]


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


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_what_is_no_time_is_refused(workers, gate, seconds):
    with workers[0].worker.scope(), gw.context() as context:
        y = gw.rpc_sync("w1", torch.mul, args=(torch.ones((), requires_grad=True), 2.0))
        with pytest.raises(UsageError, match="not a positive number"):
            gw.backward(context, [y], timeout=seconds)
        with pytest.raises(UsageError, match="not a positive number"):
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
        due = 10.0
        for _ in through:
            due = nested(due, 0.0, 60.0)
        clock.advance(due + 0.001)

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


def test_many_instant_calls_within_calls_are_no_reason_to_give_up(workers):
    assert workers[0].run(gw.rpc_sync, "w1", recursive, args=(300,), timeout=60) == "w1"


@pytest.mark.parametrize("seconds", [6, 9])
def test_calls_within_calls_may_use_nearly_all_of_the_time(seconds):
    clock = GATES["clock"] = ManualClock()
    with cluster(3, expose=[HERE], clock=clock) as three:
        args = (seconds, 8, "clock")
        assert three[0].run(gw.rpc_sync, "w1", works_for, args=args, timeout=10) == 2


def test_a_call_that_another_one_cuts_short_says_so(gate):
    clock = ManualClock()
    with cluster(4, expose=[HERE], clock=clock) as four, ThreadPoolExecutor(1) as threads:
        reached = GATES["w3"] = threading.Event()
        late = threads.submit(four[0].run, passed_on, ["w1", "w3"], gate, 10)
        assert reached.wait(10)
        clock.advance(9.99)

        with pytest.raises(
            CallTimeout,
            match=r"w3 did not answer w1#\d+ .* within 9\.8 s, all that the call around it had "
            r"left \(no deadline was asked for\)",
        ) as told:
            late.result(10)
        assert "hint: a longer timeout= on the outermost call waits more" in str(told.value)
        GATES[gate].set()
        told.value.with_traceback(None)
        assert_nothing_left(four)


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_without_a_deadline_a_call_ends_with_its_worker(gate, timeout):
    clock = ManualClock()
    options = Options(timeouts=Timeouts(suspect=1000, dead=1000))
    with cluster(2, expose=[HERE], clock=clock, options=options) as two:
        with two[0].worker.scope():
            reference = gw.remote("w1", nap, args=(gate,), timeout=timeout)
            futures = [
                gw.rpc_async("w1", nap, args=(gate,), timeout=timeout),
                reference.rpc_async(timeout=timeout).anything(),
            ]
            bounded = gw.rpc_async("w1", nap, args=(gate,), timeout=90)
        clock.advance(100)
        with pytest.raises(CallTimeout):
            bounded.wait()
        assert not any(future.done() for future in futures)
        two[1].worker.close(0.01)

        for future in futures:
            with pytest.raises(PeerLost, match="w1 was lost before answering"):
                future.wait()
        GATES[gate].set()


def test_an_omitted_timeout_is_that_of_the_options(gate):
    options = Options(timeouts=Timeouts(call=0.02))
    with cluster(2, expose=[HERE], options=options) as two:
        with pytest.raises(CallTimeout), two[0].worker.scope():
            gw.rpc_sync("w1", nap, args=(gate,))
        GATES[gate].set()


def test_the_text_of_an_error_that_came_a_long_way_stays_short(workers):
    with pytest.raises(ValueError, match=r"^ValueError on w1: the culprit") as raised:
        workers[0].run(gw.rpc_sync, "w1", raises_below, args=(200,))

    assert len(str(raised.value)) < 20_000
    assert raised.value.worker == "w1"
    assert str(raised.value).rstrip().endswith("ValueError: the culprit")
