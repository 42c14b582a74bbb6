"""Data-parallel replicas inside a graph over several workers.

w1 and w2 hold the replicas. The reducer of torch's DistributedDataParallel works from hooks on
AccumulateGrad and writes its average when the engine is through; whichever way the backward was
started, it must land where the gradients of that backward belong.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire
from gradwire import Options
from tests.process_cluster import process_cluster
from tests.processes import far, parallel
from tests.processes.conftest import TIMEOUTS

REPLICAS = ("w1", "w2")


@pytest.fixture
def replicated(hosts, tmp_path):
    """A function that makes replicas on w1 and w2."""
    options = Options(timeouts=TIMEOUTS)
    with process_cluster(3, expose=[far, parallel], options=options, hosts=hosts):

        def make(model="plain", **options):
            store = str(tmp_path / "store")
            on_all(parallel.join, *((store, n, 2, model, options) for n in range(2)))

        yield make
        on_all(parallel.leave, (), ())
        far.forget()


def on_all(func, *args, **kwargs):
    """Run a function on both replicas' workers at once, each with its own arguments."""
    calls = [
        gradwire.rpc_async(worker, func, args=own, kwargs=kwargs)
        for worker, own in zip(REPLICAS, args, strict=True)
    ]
    return [call.wait() for call in calls]


def batches(count=2):
    torch.manual_seed(7)
    return list(torch.randn(count, 5, 3, dtype=torch.float64))


def averages(model, losses):
    """The gradients that replicas agree on, computed by one."""
    for loss in losses:
        (loss / len(losses)).backward()
    return [parameter.grad for parameter in model.parameters()]


def differentiate(context, loss, *, into_map):
    if into_map:
        gradwire.backward(context, [loss])
    else:
        loss.backward()


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


KINDS = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 1e-5}]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("into_map", [True, False], ids=["map", "grad"])
def test_replicas_that_one_graph_runs_through(replicated, options, into_map):
    replicated(**options)
    local = parallel.make_model()
    first, second = batches()

    for _ in range(3):  # the reducer arranges its buckets anew after the first
        with gradwire.context() as context:
            outputs = on_all(parallel.forward, (first,), (second,))
            loss = sum(output.square().sum() for output in outputs)
            differentiate(context, loss, into_map=into_map)
            mapped = on_all(parallel.gradients, (context,), (context,))
            plain = on_all(parallel.gradients, (), ())
        on_all(parallel.clear, (), ())

        local.zero_grad()
        wanted = averages(local, [local(x).square().sum() for x in (first, second)])
        nothing = [None] * len(wanted)
        for found in mapped:
            assert_same(found, wanted if into_map else nothing)
        for found in plain:
            assert_same(found, nothing if into_map else wanted)


@pytest.mark.parametrize("into_map", [True, False], ids=["map", "grad"])
def test_trainers_with_contexts_of_their_own(replicated, into_map):
    replicated()
    last = gradwire.RemoteModule("w0", nn.Linear, (2, 1), {"dtype": torch.float64})
    first, second = batches()

    told = on_all(parallel.train, (last, first), (last, second), into_map=into_map)

    local, shared = parallel.make_model(), nn.Linear(2, 1).double()
    shared.load_state_dict(last.state_dict())
    losses = [shared(local(x)).square().sum() for x in (first, second)]
    for loss, (_, _, found) in zip(losses, told, strict=True):
        alone = torch.autograd.grad(loss, list(shared.parameters()), retain_graph=True)
        assert_same(found, alone if into_map else [None, None])
    wanted = averages(local, losses)
    for mapped, plain, _ in told:
        assert_same(mapped if into_map else plain, wanted)
        assert_same(plain if into_map else mapped, [None] * len(wanted))


def test_a_plain_grad_is_left_alone_by_a_backward_into_the_map(replicated):
    replicated()
    local = parallel.make_model()
    first, second = batches()
    with gradwire.context():
        outputs = on_all(parallel.forward, (first,), (second,))
        sum(output.sum() for output in outputs).backward()
    before = averages(local, [local(first).sum(), local(second).sum()])
    local.zero_grad()

    with gradwire.context() as context:
        for _ in range(2):  # the second adds to the map, as it would to .grad
            outputs = on_all(parallel.forward, (first,), (second,))
            gradwire.backward(context, [sum(output.square().sum() for output in outputs)])
        mapped = on_all(parallel.gradients, (context,), (context,))

    once = averages(local, [local(first).square().sum(), local(second).square().sum()])
    for found in mapped:
        assert_same(found, [2 * gradient for gradient in once])
    for found in on_all(parallel.gradients, (), ()):
        assert_same(found, before)


@pytest.mark.parametrize("into_map", [True, False], ids=["map", "grad"])
def test_parameters_that_one_replica_does_not_use(replicated, into_map):
    replicated("gated", find_unused_parameters=True)
    local = parallel.Gated()
    first, second = batches()

    with gradwire.context() as context:
        outputs = on_all(parallel.forward, (first, 0), (second, 1))
        loss = sum(output.square().sum() for output in outputs)
        differentiate(context, loss, into_map=into_map)
        which = (context,) if into_map else ()
        found = on_all(parallel.gradients, which, which)

    wanted = averages(local, [local(first, 0).square().sum(), local(second, 1).square().sum()])
    for gradients in found:
        assert_same(gradients, wanted)


def test_replicas_that_do_not_tell_each_other_keep_their_own(replicated):
    replicated()
    local = parallel.make_model()

    with gradwire.context() as context:
        outputs = on_all(parallel.forward_alone, *((x,) for x in batches()))
        gradwire.backward(context, [sum(output.square().sum() for output in outputs)])
        found = on_all(parallel.gradients, (context,), (context,))

    for x, gradients in zip(batches(), found, strict=True):
        wanted = torch.autograd.grad(local(x).square().sum(), list(local.parameters()))
        assert_same(gradients, wanted)


@pytest.mark.parametrize("into_map", [True, False], ids=["map", "grad"])
def test_a_pass_that_fails_after_the_replicas_are_through_leaves_nothing(replicated, into_map):
    replicated()
    first, second = batches()
    x = first.clone().requires_grad_()

    with gradwire.context() as context:
        inner = gradwire.rpc_sync("w1", parallel.identity_that_fails, args=(x,))
        outputs = on_all(parallel.forward, (inner,), (second,))
        loss = sum(output.sum() for output in outputs)
        with pytest.raises(ValueError, match="no gradient for you"):
            differentiate(context, loss, into_map=into_map)
        found = on_all(parallel.gradients, (context,), (context,))
        found += on_all(parallel.gradients, (), ())

    assert found == [[None] * 4] * 4
