"""TorchScript functions and modules in calls, as programs for torch.distributed.rpc send them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.rpc as stock_rpc
from torch import Tensor, nn

from gradwire import GraphCutWarning, context
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.compat.rpc.functions import async_execution
from gradwire.testing import cluster

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module")
def workers():
    with cluster(2, behavior=TORCH) as made:
        yield made


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scaled(x: Tensor, n: int = 1) -> Tensor:
        return x * 3 + n

    @async_execution
    @torch.jit.script
    def scaled_later(x: Tensor):
        return torch.jit.fork(scaled, x)

    @torch.jit.script
    def calling_itself(to: str, x: Tensor):
        return stock_rpc.rpc_sync(to, scaled, (x,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x):
        return x * self.weight


def scripted():
    return torch.jit.script(Net())


def traced():
    return torch.jit.trace(Net(), torch.ones(2))


def applied(value, x):
    return (value[0] if isinstance(value, list) else value)(x)


def own_function():
    return scaled


CALLS = {
    "rpc_sync": lambda *call, **more: rpc.rpc_sync("w1", *call, **more),
    "rpc_async": lambda *call, **more: rpc.rpc_async("w1", *call, **more).wait(),
    "remote": lambda *call, **more: rpc.remote("w1", *call, **more).to_here(),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_scripted_function_is_called(workers, how):
    x = torch.ones(2)

    def program():
        call = CALLS[how]
        return [
            call(scaled, args=(x,)).tolist(),
            call(scaled, args=(x, 5)).tolist(),
            call(scaled, kwargs={"n": 5, "x": x}).tolist(),
            call(scaled_later, args=(x,)).tolist(),
        ]

    assert workers[0].run(program) == [[4.0, 4.0], [8.0, 8.0], [8.0, 8.0], [4.0, 4.0]]


@pytest.mark.parametrize("function", [scaled, scaled_later])
@pytest.mark.parametrize("how", CALLS)
def test_the_gradient_passes_through_a_scripted_function(workers, how, function):
    x = torch.ones(2, requires_grad=True)
    weight = nn.Parameter(torch.ones(2))

    def program():
        with context():
            y = CALLS[how](function, args=(x,)) + CALLS[how](function, args=(weight,))
            y.sum().backward()

    workers[0].run(program)
    assert x.grad.tolist() == weight.grad.tolist() == [3.0, 3.0]


def test_a_scripted_function_is_an_argument_and_a_result(workers):
    def program():
        there = rpc.rpc_sync("w1", applied, args=(scaled, torch.ones(2)))
        return there.tolist(), rpc.rpc_sync("w1", own_function)(torch.ones(2)).tolist()

    assert workers[0].run(program) == ([4.0, 4.0], [4.0, 4.0])


def test_arguments_that_do_not_fit_are_refused_as_a_runtime_error(workers, capsys):
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'x'"):
        workers[0].run(rpc.rpc_sync, "w1", scaled, ("text",))


def test_a_function_that_is_not_compiled_there_is_named(workers):
    class Elsewhere:
        def __reduce__(self):
            from gradwire.rpc.codec.pickle_codec import function_named

            return function_named, ("__torch__.nowhere.lost",)

    with pytest.raises(RuntimeError, match=r"no TorchScript function nowhere\.lost is compiled"):
        workers[0].run(rpc.rpc_sync, "w1", applied, (Elsewhere(), torch.ones(2)))


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("how", CALLS)
def test_a_scripted_module_is_a_result_and_an_argument(workers, make, how):
    x = torch.ones(2)

    def program():
        here = CALLS[how](make)
        with torch.no_grad():
            return [
                here(x).tolist(),
                CALLS[how](applied, args=(here, x)).tolist(),
                CALLS[how](applied, args=([make()], x)).tolist(),
                CALLS[how](make(), args=(x,)).tolist(),
            ]

    assert workers[0].run(program) == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_scripted_module_sent_by_value_is_a_copy_and_a_warning_says_so(workers, make):
    def program():
        said = r"^a tensor that requires grad crossed in the {} .* as a copy"
        with context(), pytest.warns(GraphCutWarning, match=said.format("arguments of")):
            rpc.rpc_sync("w1", applied, args=(make(), torch.ones(2)))
        with context(), pytest.warns(GraphCutWarning, match=said.format("result of")):
            rpc.rpc_sync("w1", make)

    workers[0].run(program)


def test_rpc_inside_of_torchscript_is_said_not_to_be_there(workers, capsys):
    said = "TorchScript code called rpc_sync, rpc_async or remote, or used an RRef, which gradwire"
    with pytest.raises(RuntimeError, match=said):
        workers[0].run(rpc.rpc_sync, "w1", calling_itself, ("w0", torch.ones(2)))
