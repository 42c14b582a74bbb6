"""How a pass begins, what it tells whom, and what it refuses."""

from __future__ import annotations

import contextvars
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire import BackwardTimeout, ContextClosed, Options, PeerLost, Timeouts, UsageError
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from tests.leftovers import eventually

PARAMETERS = {}


def parameter(worker):
    return PARAMETERS.setdefault(worker, torch.ones(2, requires_grad=True))


def of_parameter():
    return parameter(gradwire.get_worker_info().name) * 3


def times_parameter(x):
    return x * parameter(gradwire.get_worker_info().name)


def with_checkpoint(x):
    return checkpoint(torch.sin, x, use_reentrant=True)


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[sys.modules[__name__]]) as workers:
        yield workers


@pytest.fixture(autouse=True)
def fresh_parameters():
    PARAMETERS.clear()


def on_w0(workers, test):
    def run():
        with gradwire.context() as context:
            test(context)

    workers[0].run(run)


def test_a_gradient_walks_back_the_way_the_call_came(workers):
    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        with workers.trace() as lines:
            y.sum().backward()
        assert lines == [
            "w0 start p0.1",
            "w0>w1 gradients e1.0",
            "w1>w0 run p0.1",
            "w1>w0 gradients e0.0",
            "w0 end p0.1",
        ]

    with cluster(2) as workers:
        on_w0(workers, program)


def test_what_the_loss_does_not_reach_hears_nothing(workers):
    def program(_):
        x = torch.ones(2, requires_grad=True)
        gradwire.rpc_sync("w2", times_parameter, args=(x,))
        y = gradwire.rpc_sync("w1", times_parameter, args=(x,))
        with workers.trace() as lines:
            y.sum().backward()
        assert not any("w2" in line for line in lines)
        assert parameter("w2").grad is None

    on_w0(workers, program)


def test_a_backward_may_begin_with_what_was_received(workers):
    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        y.backward(torch.ones(2))
        assert torch.equal(x.grad, torch.ones(2).cos())

    on_w0(workers, program)


def test_a_gradient_captured_at_a_received_value_does_not_cross(workers):
    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        h = gradwire.rpc_sync("w2", of_parameter)
        with workers.trace() as lines:
            by_h, by_x = torch.autograd.grad((h * y).sum(), [h, x])
        assert torch.equal(by_h, y)
        assert torch.equal(by_x, h * x.cos())
        assert not any("w2" in line for line in lines)

    on_w0(workers, program)


def test_grad_computes_only_what_leads_to_its_inputs(workers):
    def program(_):
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", times_parameter, args=(x,))
        z = gradwire.rpc_sync("w2", of_parameter)
        (slope,) = torch.autograd.grad((y * z).sum(), [x])
        assert torch.equal(slope, torch.full((2,), 3.0))
        assert parameter("w1").grad is None
        assert parameter("w2").grad is None

    on_w0(workers, program)


def test_the_map_gets_what_is_behind_a_reentrant_checkpoint_wherever_it_is(workers):
    """More of it in test_inner_backward.py."""

    def program(context):
        x = torch.ones(2, requires_grad=True)
        y = gradwire.rpc_sync("w1", with_checkpoint, args=(x * 1,))
        gradwire.backward(context, [y.sum()])
        gradwire.backward(context, [with_checkpoint(x * 1).sum()])
        gradwire.RRef(with_checkpoint(x * 1).sum()).backward(context)
        assert torch.equal(gradwire.get_gradients(context)[x], 3 * x.cos())
        assert x.grad is None

    on_w0(workers, program)


def test_an_unreached_checkpoint_does_not_matter_to_the_map(workers):
    def program(context):
        x = torch.ones(2, requires_grad=True)
        gradwire.rpc_sync("w1", with_checkpoint, args=(x * 1,))
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        gradwire.backward(context, [y.sum()])
        assert torch.equal(gradwire.get_gradients(context)[x], x.cos())

    on_w0(workers, program)


def test_what_was_made_in_a_context_leads_nowhere_when_that_is_closed(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gradwire.context():
            kept = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
        with pytest.raises(ContextClosed, match=r"c0\.\d+ is closed on w0"):
            kept.sum().backward()
        with pytest.raises((ContextClosed, PeerLost), match="is closed"):  # whichever is met first
            (y * kept).sum().backward()
        assert x.grad is None
        y.sum().backward()
        assert torch.equal(x.grad, x.cos())

    workers[0].run(program)


def keep(x):
    KEPT[:] = [x * 2]


def use_kept():
    return KEPT[0] * 3


KEPT = []


def test_a_graph_may_mix_two_open_contexts(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        with gradwire.context():
            gradwire.rpc_sync("w1", keep, args=(x,))
            contextvars.Context().run(workers[0].run, in_another_context, x)
        KEPT.clear()

    def in_another_context(x):
        with gradwire.context() as context:
            y = gradwire.rpc_sync("w1", use_kept)
            y.sum().backward(retain_graph=True)
            assert x.grad.tolist() == [6, 6]
            gradwire.backward(context, [y.sum()])
            assert gradwire.get_gradients(context)[x].tolist() == [6, 6]

    workers[0].run(program)


@pytest.mark.parametrize(
    ("roots", "text"),
    [
        ([], "No tensors provided for gradient computation"),
        ([torch.ones(())], "requires_grad not set on root"),
        ([torch.ones(2, requires_grad=True) * 1], r"shape \(2,\) is not a scalar, all roots need"),
        ([torch.ones((), requires_grad=True)], "does not have a valid gradient function"),
        (torch.ones(()), "incompatible function arguments: roots is a Tensor"),
    ],
)
def test_roots_are_checked_before_anything_runs(workers, roots, text):
    def program(context):
        with pytest.raises(UsageError, match=text):
            gradwire.backward(context, roots)

    on_w0(workers, program)


def test_contexts_do_not_nest(workers):
    def program(_):
        with (
            pytest.raises(UsageError, match="Already have an autograd context id"),
            gradwire.context(),
        ):
            pass

    on_w0(workers, program)


def never_ready(gradient):
    """A hook that lets the clock run out, and gives nothing before both workers have seen it."""
    CLOCK[0].advance(100)
    engines = [member.worker.engine for member in SLOW]
    assert eventually(lambda: all(p.error is not None for e in engines for p in e.passes.all()))
    return gradient


CLOCK, SLOW = [], []


def slowly(x):
    y = x * 2
    y.register_hook(never_ready)
    return y


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
def test_a_pass_that_takes_too_long_is_given_up_everywhere_and_says_what_it_waited_for(into_map):
    clock = ManualClock()
    CLOCK[:] = [clock]
    options = Options(timeouts=Timeouts(backward=50))
    with cluster(2, expose=[slowly], clock=clock, options=options) as workers:
        SLOW[:] = workers
        named = r"p0\.1 of c0\.0" if into_map else r"p0\.1"

        def program(context):
            x = torch.ones(2, requires_grad=True)
            y = gradwire.rpc_sync("w1", slowly, args=(x,), timeout=1000).sum()
            with pytest.raises(BackwardTimeout, match=f"{named} was given up on w[01]") as caught:
                gradwire.backward(context, [y]) if into_map else y.backward()
            assert "after 50 s" in str(caught.value)
            assert "Timeouts(backward=" in str(caught.value)
            assert x.grad is None

        on_w0(workers, program)
        assert all(len(member.worker.engine.passes) == 0 for member in workers)


def test_a_root_that_leaves_right_after_a_good_pass_takes_nothing_back():
    with cluster(2, expose=[sys.modules[__name__]]) as workers:

        def program(_):
            x = torch.ones(2, requires_grad=True)
            gradwire.rpc_sync("w1", times_parameter, args=(x,)).sum().backward()

        on_w0(workers, program)
        workers[0].worker.close()
        assert eventually(lambda: len(workers[1].worker.engine.passes) == 0)
        assert torch.equal(parameter("w1").grad, torch.ones(2))
