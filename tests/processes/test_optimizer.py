"""An optimizer over real processes: all of them step, or the error says who has."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
import torch

import gradwire
from gradwire import PeerLost, StepFailed
from gradwire.current import current_worker
from gradwire.optim.shard import optimizer_host
from tests.hearing import hearing
from tests.injection import processes
from tests.leftovers import eventually
from tests.processes import far


def _layers(*owners):
    layers = [gradwire.remote(owner, far.Layer, args=(2.0,)) for owner in owners]
    refs = [layer.rpc_sync().reference() for layer in layers]
    return layers, gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=0.5)


def _loss(layers, x=None):
    x = torch.ones((), dtype=torch.float64) if x is None else x
    for layer in layers:
        x = layer.rpc_sync().forward(x)
    return x


def _when(what, act):
    def listen(event):
        if event.what == what:
            act()

    return hearing(current_worker.maybe_default(), listen)


def test_it_steps_parameters_of_three_processes(linked):
    layers, optimizer = _layers("w0", *linked)

    with gradwire.context() as context:
        gradwire.backward(context, [_loss(layers)])
        optimizer.step(context)

    assert [layer.rpc_sync().value() for layer in layers] == [0, 0, 0]


def test_without_a_context_it_steps_by_grad(linked):
    layers, optimizer = _layers("w0", *linked)

    _loss(layers).backward()
    optimizer.step()

    assert [layer.rpc_sync().value() for layer in layers] == [0, 0, 0]
    assert [layer.rpc_sync().gradient() for layer in layers] == [4, 4, 4]
    optimizer.zero_grad()
    assert [layer.rpc_sync().gradient() for layer in layers] == [None, None, None]


WAYS = ["map", "grad", "grad in a context", "map of a graph from outside"]


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})],
    ids=["SGD", "Adam"],
)
def test_fifty_steps_with_and_without_contexts_are_those_of_one_process(workers, cls, options):
    draw = random.Random(cls.__name__)
    layers, _ = _layers("w0", "w1", "w2")
    refs = [layer.rpc_sync().reference() for layer in layers]
    optimizer = gradwire.DistributedOptimizer(cls, refs, **options)
    local = [far.Layer(2.0) for _ in layers]
    parameters = [layer.weight for layer in local]
    truth = cls(parameters, **options)

    for n in range(50):
        x = torch.tensor(draw.uniform(-1, 1), dtype=torch.float64)
        way, set_to_none = draw.choice(WAYS), draw.random() < 0.7
        truth.zero_grad(set_to_none)
        y = x
        for layer in local:
            y = layer(y)
        (y - 1).square().backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 2.0)
        truth.step()

        assert torch.equal(_step(layers, optimizer, x, way, set_to_none), norm), (n, way)
        found = [layer.rpc_sync().value() for layer in layers]
        assert found == [p.item() for p in parameters], (n, way)
    assert eventually(_has_no_edges, 30)


def _step(layers, optimizer, x, way, set_to_none):
    """One step over all workers; the norm of its gradients."""
    if way.startswith("grad"):
        with gradwire.context() if way == "grad in a context" else contextlib.nullcontext():
            optimizer.zero_grad(set_to_none)
            (_loss(layers, x) - 1).square().backward()
            norm = optimizer.clip_grad_norm_(2.0)
            optimizer.step()
            return norm
    before = (_loss(layers, x) - 1).square() if way == "map of a graph from outside" else None
    with gradwire.context() as context:
        loss = (_loss(layers, x) - 1).square() if before is None else before
        gradwire.backward(context, [loss])
        norm = optimizer.clip_grad_norm_(2.0, context_id=context)
        optimizer.step(context)
        return norm


def _has_no_edges():
    edges = current_worker.maybe_default().engine.edges
    return not edges.sent and not edges.received


def test_a_step_leaves_to_a_graph_of_another_process_the_weights_it_used(workers):
    layers, optimizer = _layers("w1", "w2")
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    loss = _loss(layers, x)
    _loss(layers).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()

    assert [layer.rpc_sync().value() for layer in layers] == [1, 1]
    assert x.grad == 4
    assert [layer.rpc_sync().gradient() for layer in layers] == [6, 6]


def test_a_worker_killed_between_prepare_and_commit_leaves_all_others_as_they_were(workers):
    layers, optimizer = _layers("w0", "w1", "w2")

    def kill():
        workers["w1"].kill()
        assert eventually(lambda: 1 in optimizer_host().lost, 30)

    with gradwire.context() as context:
        gradwire.backward(context, [_loss(layers)])
        with (
            _when("prepared", kill),
            pytest.raises(StepFailed, match=r"no worker has stepped. w1: w1 .*") as failed,
        ):
            optimizer.step(context)

    assert failed.value.stepped == failed.value.unknown == ()
    assert [layers[n].rpc_sync().value() for n in (0, 2)] == [2, 2]


def test_a_worker_killed_after_others_have_committed_is_told_from_them(workers):
    layers, optimizer = _layers("w1", "w2")

    def kill_when_w1_has_stepped():
        if eventually(lambda: layers[0].rpc_sync().value() == 1, 30):
            workers["w2"].kill()

    killer = threading.Thread(target=kill_when_w1_has_stepped)

    def freeze():
        processes.freeze(workers["w2"])
        killer.start()

    with gradwire.context() as context:
        gradwire.backward(context, [_loss(layers)])
        with (
            _when("prepared", freeze),
            pytest.raises(StepFailed, match="w1 have stepped; w2 were lost, with") as failed,
        ):
            optimizer.step(context)
    killer.join(30)

    assert failed.value.stepped == ("w1",)
    assert failed.value.unknown == ()
    assert layers[0].rpc_sync().value() == 1


def test_what_a_dead_trainer_has_prepared_is_dropped_and_others_go_on(workers):
    layers, optimizer = _layers("w0", "w2")

    with pytest.raises(PeerLost, match="w1"):
        gradwire.rpc_sync("w1", far.die_prepared, args=(layers,))
    workers["w1"].kill()  # so that nobody waits for it in the end

    assert [layer.rpc_sync().value() for layer in layers] == [2, 2]
    with gradwire.context() as context:
        gradwire.backward(context, [_loss(layers)])
        optimizer.step(context)
    assert [layer.rpc_sync().value() for layer in layers] == [1, 1]


def test_a_lost_worker_has_not_stepped_alone_if_it_could_not_be_told(workers):
    _, optimizer = _layers("w1")
    workers["w1"].kill()
    assert eventually(lambda: 1 in optimizer_host().lost, 30)

    with pytest.raises(StepFailed, match=r"no worker has stepped. w1: w1 was lost befo") as failed:
        optimizer.step()

    assert failed.value.stepped == failed.value.unknown == ()


def test_a_worker_that_dies_while_it_steps_alone_is_lost_with_its_parameters(workers):
    layer = gradwire.remote("w1", far.Layer, args=(2.0,))
    optimizer = gradwire.DistributedOptimizer(far.Fatal, [layer.rpc_sync().reference()], lr=0.5)

    with pytest.raises(StepFailed, match=r"s0\.\d+ failed: w1 were lost, with their p") as failed:
        optimizer.step()

    assert failed.value.stepped == failed.value.unknown == ()
    workers["w1"].kill()  # so that nobody waits for it in the end
