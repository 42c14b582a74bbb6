"""One graph over real processes; the truth is the same arithmetic in this one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire
from gradwire.compat import autograd as dist_autograd
from tests.processes import far


def _x(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def _gradients_of(*layers):
    return [layer.rpc_sync().gradient() for layer in layers]


def test_backward_reaches_the_parameters_of_every_worker(linked):
    x = _x(1, 2)
    first, second = (gradwire.remote(w, far.Layer, args=(2.0 + n,)) for n, w in enumerate(linked))
    mine = far.Layer(5.0)

    with gradwire.context():
        y = mine(second.rpc_sync().forward(first.rpc_sync().forward(x)))
        y.sum().backward()

    assert torch.equal(x.grad, torch.full((2,), 30.0, dtype=torch.float64))
    assert mine.gradient() == 18
    assert _gradients_of(first, second) == [45, 30]


def test_backward_walks_back_through_nested_calls_and_callbacks(workers):
    x = _x(1, 2, 3)

    with gradwire.context():
        _, y = gradwire.rpc_sync("w1", far.through, args=(["w2", "w0", "w1", "w2"], x))
        y.sum().backward()

    assert torch.equal(x.grad, torch.full((3,), 32.0, dtype=torch.float64))


def test_the_context_s_own_map_is_filled_on_every_worker(workers):
    x = _x(3)
    layer = gradwire.remote("w1", far.Layer, args=(2.0,))

    with gradwire.context() as context:
        loss = layer.rpc_sync().forward(x).sum()
        gradwire.backward(context, [loss])
        here = gradwire.get_gradients(context)
        there = layer.rpc_sync().mapped_gradient(context)

    assert here == {x: torch.tensor([2.0], dtype=torch.float64)}
    assert there == 3
    assert x.grad is None
    assert layer.rpc_sync().gradient() is None


def test_the_names_of_torch_distributed_autograd_lead_to_the_same(workers):
    x = _x(3)
    layer = gradwire.remote("w1", far.Layer, args=(2.0,))
    dist_autograd._init(0)
    with pytest.raises(RuntimeError, match="already initialized with worker_id: 0"):
        dist_autograd._init(1)

    with dist_autograd.context() as context:
        loss = layer.rpc_sync().forward(x).sum()
        here = far.introspected(context)
        there = gradwire.rpc_sync("w1", far.introspected, args=(context,))
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        assert dist_autograd._get_debug_info()["num_autograd_contexts"] == 1

    assert (here, there) == ([1, 1, [1]], [1, 1, [0]])
    assert gradients == {x: torch.tensor([2.0], dtype=torch.float64)}
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        dist_autograd._retrieve_context(context)


def test_second_order_gradients_cross_too(workers):
    x = _x(2, 3)

    with gradwire.context():
        y = gradwire.rpc_sync(
            "w2", far.cubed, args=(gradwire.rpc_sync("w1", far.cubed, args=(x,)),)
        )
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sum().backward()

    local = _x(2, 3)
    (expected,) = torch.autograd.grad(((local**3) ** 3).sum(), local, create_graph=True)
    expected.sum().backward()
    assert torch.equal(first, expected)
    assert torch.equal(x.grad, local.grad)


def test_grad_leaves_the_parameters_elsewhere_alone(workers):
    x = _x(4)
    layer = gradwire.remote("w1", far.Layer, args=(2.0,))

    with gradwire.context():
        (gradient,) = torch.autograd.grad(layer.rpc_sync().forward(x).sum(), x)

    assert gradient == 2
    assert layer.rpc_sync().gradient() is None


def test_a_received_tensor_may_be_the_input_of_a_backward(workers):
    x = _x(4)
    first, second = (gradwire.remote(w, far.Layer, args=(3.0,)) for w in ("w1", "w2"))

    with gradwire.context():
        y = first.rpc_sync().forward(x)
        z = second.rpc_sync().forward(y)
        (z * y).sum().backward(inputs=[y])

    assert y.grad == 2 * 3 * 12
    assert x.grad is None
    assert _gradients_of(first, second) == [None, None]


def test_a_failed_pass_is_gone_also_if_another_trainer_has_added_since(workers):
    layer = gradwire.remote("w1", far.Layer, args=(3.0,))

    def fail(_):
        with ThreadPoolExecutor(1) as outside:  # in no context
            outside.submit(gradwire.rpc_sync, "w2", far.trains, args=(layer, 0.1)).result()
        assert layer.rpc_sync().gradient() == 100 + torch.tensor(0.1, dtype=torch.float64)
        raise far.Refused("no gradient for you")

    with gradwire.context():
        x = _x(100) * 1
        x.register_hook(fail)
        loss = layer.rpc_sync().forward(x).sum()
        with pytest.raises(far.Refused, match="no gradient for you"):
            loss.backward()

    assert layer.rpc_sync().gradient() == torch.tensor(0.1, dtype=torch.float64)


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
def test_a_function_that_runs_a_backward_of_its_own_there(workers, into_map):
    x = _x(2)
    first, second = (gradwire.remote(w, far.Layer, args=(3.0,)) for w in ("w1", "w2"))

    with gradwire.context() as context:
        loss = gradwire.rpc_sync("w1", far.recomputed, args=(first, second, x * 1)).sum()
        if into_map:
            gradwire.backward(context, [loss])
            there = [layer.rpc_sync().mapped_gradient(context) for layer in (first, second)]
            assert _gradients_of(first, second) == [None, None]
            assert gradwire.get_gradients(context)[x] == 9
        else:
            loss.backward()
            there = _gradients_of(first, second)
            assert x.grad == 9

    assert there == [6, 6]


@pytest.mark.parametrize("into_map", [False, True], ids=["grad", "map"])
def test_a_failed_pass_takes_back_a_backward_inside_it_everywhere(workers, into_map):
    first, second = (gradwire.remote(w, far.Layer, args=(3.0,)) for w in ("w1", "w2"))

    def fail(_):
        raise far.Refused("no gradient for you")

    with gradwire.context() as context:
        x = _x(2) * 1
        x.register_hook(fail)
        loss = gradwire.rpc_sync("w1", far.recomputed, args=(first, second, x)).sum()
        with pytest.raises(far.Refused, match="no gradient for you"):
            gradwire.backward(context, [loss]) if into_map else loss.backward()
        there = [layer.rpc_sync().has_mapped_gradient(context) for layer in (first, second)]

    assert _gradients_of(first, second) == [None, None]
    assert there == [False, False]


def test_a_failure_in_one_worker_s_backward_is_raised_here(workers):
    x = _x(1)

    with gradwire.context():
        y = gradwire.rpc_sync("w1", far.refusing_backward, args=(x,))
        with pytest.raises(far.Refused, match="Refused on w1: no gradient for you"):
            y.sum().backward()
