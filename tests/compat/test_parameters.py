"""An nn.Parameter that crosses in a call: its gradient comes home, or a warning says that it won't.

The oracle of each gradient is the same program without the call.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle  # noqa: TID251  (of which cloudpickle is made)
import sys
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

import gradwire
from gradwire import GraphCutWarning, Options, context
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.compat.rpc.internal import _InternalRPCPickler
from gradwire.rpc.codec.pickle_codec import PickleCodec
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
SAID = r"crossed in the {} \S+.* as a copy, inside a module or another object"


@pytest.fixture(scope="module")
def workers():
    with cluster(2, behavior=TORCH) as made:
        yield made
        assert_nothing_left(made)


@pytest.fixture(scope="module")
def natives():
    with cluster(2, options=Options(pickle=True), expose=[HERE]) as made:
        yield made


# -- what the workers run


Pair = namedtuple("Pair", "first second")


@dataclass
class Holder:
    weight: torch.Tensor
    scale: float = 2.0


class Fallback:
    """An object that says itself how it is pickled."""

    def __init__(self, weight):
        self.weight = weight

    def __reduce__(self):
        return Fallback, (self.weight,)


class Plain:
    """An object with state."""

    def __init__(self, weight):
        self.weight = weight

    def scaled(self, x):
        return self.weight * x


class MyTensor(torch.Tensor):
    """A tensor of a class of its own."""


class Scaling(nn.Module):
    def __init__(self, *size):
        super().__init__()
        self.weight = nn.Parameter(torch.full(size, 2.0))
        self.register_buffer("shift", torch.ones(size))

    def forward(self, x):
        return self.weight * x + self.shift


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Scaling(2), nn.Sequential(Scaling(2)))

    def forward(self, x):
        return self.layers(x)


def found_in(value):
    """The first tensor in a value of any kind this file sends."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return found_in(value[0])
    return value.weight


def scale(value):
    return found_in(value) * 3


def scale_by_name(*, weight):
    return found_in(weight) * 3


def applied(module, x):
    return module(x)


def same(a, b):
    return a is b


def described(value):
    tensor = found_in(value)
    return type(tensor).__name__, tensor.requires_grad, tensor.is_leaf


OWN = nn.Parameter(torch.ones(2))
MODULE = Scaling(2)


def own_weight():
    return OWN


def own_weights_in(shape):
    return {"list": [OWN], "dict": {"w": OWN}, "pair": Pair(OWN, 1), "holder": Holder(OWN)}[shape]


def own_module():
    return MODULE


CONTAINERS = {
    "itself": lambda p: p,
    "list": lambda p: [p, 1],
    "nested": lambda p: [(p,), 1],
    "dict": lambda p: {"w": p},
    "OrderedDict": lambda p: OrderedDict(w=p),
    "namedtuple": lambda p: Pair(p, 1),
    "dataclass": Holder,
}


def grad_of(call, weight):
    """What `call` gives `weight`, with no warning on the way."""
    weight.grad = None
    with warnings.catch_warnings(), context():
        warnings.simplefilter("error")
        call().sum().backward()
    return None if weight.grad is None else weight.grad.tolist()


# -- arguments


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("shape", CONTAINERS)
def test_the_gradient_of_an_argument_of_a_users_function_comes_home(workers, shape, how):
    weight = nn.Parameter(torch.ones(2))
    value = CONTAINERS[shape](weight)
    calls = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", scale, args=(value,)),
        "rpc_async": lambda: rpc.rpc_async("w1", scale, args=(value,)).wait(),
        "remote": lambda: rpc.remote("w1", scale, args=(value,)).to_here(),
    }

    assert workers[0].run(grad_of, calls[how], weight) == [3.0, 3.0]


def test_the_gradient_of_a_keyword_argument_comes_home(workers):
    weight = nn.Parameter(torch.ones(2))

    def call():
        return rpc.rpc_sync("w1", scale_by_name, kwargs={"weight": weight})

    assert workers[0].run(grad_of, call, weight) == [3.0, 3.0]


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_the_gradient_of_an_argument_of_a_method_comes_home(workers, how):
    weight = nn.Parameter(torch.ones(2))

    def call():
        reference = rpc.remote("w1", Plain, args=(torch.full((2,), 3.0),))
        called = getattr(reference, how)().scaled(weight)
        if how == "rpc_sync":
            return called
        return called.wait() if how == "rpc_async" else called.to_here()

    assert workers[0].run(grad_of, call, weight) == [3.0, 3.0]


@pytest.mark.parametrize("shape", CONTAINERS)
def test_the_gradient_comes_home_through_a_pickler_of_the_programs_own(workers, shape):
    weight = nn.Parameter(torch.ones(2))
    value = CONTAINERS[shape](weight)

    def call():
        with rpc._use_rpc_pickler(_InternalRPCPickler()):
            return rpc.rpc_sync("w1", scale, args=(value,))

    assert workers[0].run(grad_of, call, weight) == [3.0, 3.0]


@pytest.mark.parametrize("make", [Fallback, Plain, Holder])
def test_a_tensor_that_is_no_parameter_keeps_its_graph_in_any_object(workers, make):
    weight = torch.ones(2, requires_grad=True)
    value = make(weight)

    def call():
        return rpc.rpc_sync("w1", scale, args=(value,))

    assert workers[0].run(grad_of, call, weight) == [3.0, 3.0]


def test_a_parameter_beside_its_module_is_the_modules_there_and_gets_both_gradients(workers):
    module, x = Scaling(2), torch.ones(2)

    def call():
        return rpc.rpc_sync("w1", both, args=(module, module.weight, x))

    assert workers[0].run(grad_of, call, module.weight) == [4.0, 4.0]


def both(module, weight, x):
    assert module.weight is weight
    return module(x) + weight * 3


def test_a_parameter_given_twice_is_one_there(workers):
    weight = nn.Parameter(torch.ones(2))

    def program():
        with context():
            assert rpc.rpc_sync("w1", same, args=(weight, weight))
        with torch.no_grad():
            return rpc.rpc_sync("w1", same, args=(weight, weight))

    assert workers[0].run(program)


# -- as torch has it, where nothing records


@pytest.mark.parametrize("trains", [True, False])
def test_without_a_graph_to_lose_a_parameter_arrives_as_one(workers, trains):
    weight = nn.Parameter(torch.ones(2), requires_grad=trains)
    with torch.no_grad():
        got = workers[0].run(rpc.rpc_sync, "w1", described, ([weight],))
        back = workers[0].run(rpc.rpc_sync, "w1", own_weight)
    assert got == ("Parameter", trains, True)
    assert type(back) is nn.Parameter
    assert back.requires_grad


def test_in_a_context_a_frozen_parameter_arrives_as_one(workers):
    weight = nn.Parameter(torch.ones(2), requires_grad=False)

    def program():
        with context():
            return rpc.rpc_sync("w1", described, args=(weight,))

    assert workers[0].run(program) == ("Parameter", False, True)


def test_outside_contexts_a_module_is_sent_without_a_warning(workers):
    with torch.no_grad():
        expected = MODULE(torch.ones(2))
    module = Scaling(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference = workers[0].run(rpc.remote, "w1", applied, (module, torch.ones(2)))
        with torch.no_grad():
            assert torch.equal(workers[0].run(reference.to_here), expected)


# -- results


def test_the_gradient_of_a_returned_parameter_reaches_its_owner(workers):
    def call():
        return rpc.rpc_sync("w1", own_weight) * 3

    assert workers[0].run(grad_of, call, OWN) == [3.0, 3.0]


@pytest.mark.parametrize("shape", ["list", "dict", "pair", "holder"])
def test_the_gradient_of_a_parameter_in_a_returned_container_reaches_its_owner(workers, shape):
    def call():
        return scale(rpc.rpc_sync("w1", own_weights_in, args=(shape,)))

    assert workers[0].run(grad_of, call, OWN) == [3.0, 3.0]


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "to_here"])
def test_a_returned_module_is_a_copy_and_its_receiver_is_warned(workers, how):
    calls = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", own_module),
        "rpc_async": lambda: rpc.rpc_async("w1", own_module).wait(),
        "to_here": lambda: rpc.remote("w1", own_module).to_here(),
    }

    def program():
        with context(), pytest.warns(GraphCutWarning, match=SAID.format("result of")) as warned:
            calls[how]()
        with context(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            calls[how]()
        return [warning.filename for warning in warned]

    assert workers[0].run(program) == [__file__]


# -- copies


def warned_of_arguments(call):
    """Where the warnings of a call are; it must have made one that says so."""
    with context(), pytest.warns(GraphCutWarning, match=SAID.format("arguments of")) as warned:
        call()
    with context(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        call()
    return [warning.filename for warning in warned]


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("make", [Fallback, Plain, lambda p: Holder(Fallback(p))])
def test_a_parameter_inside_an_object_is_a_copy_and_the_caller_is_warned(workers, make, how):
    value = make(nn.Parameter(torch.ones(2)))
    call = functools.partial(getattr(rpc, how), "w1", id, args=(value,))

    assert workers[0].run(warned_of_arguments, call) == [__file__]


@pytest.mark.parametrize(
    "call",
    [
        lambda: rpc.rpc_sync("w1", applied, args=(Scaling(2), torch.ones(2))),
        lambda: rpc.rpc_sync("w1", applied, args=(Nested(), torch.ones(2))),
        lambda: rpc.rpc_sync("w1", Scaling(2), args=(torch.ones(2),)),
        lambda: rpc.rpc_sync("w1", Scaling(2).forward, args=(torch.ones(2),)),
        lambda: rpc.rpc_sync("w1", functools.partial(scale, nn.Parameter(torch.ones(2)))),
        lambda: rpc.rpc_sync(
            "w1", id, args=(torch.ones(2).as_subclass(MyTensor).requires_grad_(),)
        ),
    ],
    ids=["module", "nested", "as function", "bound method", "partial", "subclass"],
)
def test_what_is_sent_by_value_is_a_copy_and_the_caller_is_warned(workers, call):
    assert workers[0].run(warned_of_arguments, call) == [__file__]


def test_the_warning_counts_parameters_and_not_buffers(workers):
    def program():
        with context(), pytest.warns(GraphCutWarning, match=r"^2 tensors that require grad"):
            rpc.rpc_sync("w1", applied, args=(Nested(), torch.ones(2)))

    workers[0].run(program)


def test_a_pickler_of_the_programs_own_warns_of_copies(workers):
    def program():
        with (
            rpc._use_rpc_pickler(_InternalRPCPickler()),
            context(),
            pytest.warns(
                GraphCutWarning, match="crossed in what was serialized as a copy"
            ) as warned,
        ):
            rpc.rpc_sync("w1", applied, args=(Scaling(2), torch.ones(2)))
        return [warning.filename for warning in warned]

    assert workers[0].run(program) == [__file__]


class CapturesPickler(pickle.Pickler):
    """Does with a function what cloudpickle does, as far as this file is concerned."""

    def reducer_override(self, value):
        if not isinstance(value, FunctionType):
            return NotImplemented
        return list, ([cell.cell_contents for cell in value.__closure__ or ()],)


def test_what_a_function_without_a_name_captures_is_counted_as_a_copy(monkeypatch):
    if importlib.util.find_spec("cloudpickle") is None:
        stand_in = ModuleType("cloudpickle")
        stand_in.Pickler = CapturesPickler
        stand_in.__spec__ = ModuleSpec("cloudpickle", None)
        monkeypatch.setitem(sys.modules, "cloudpickle", stand_in)
    weight, other = nn.Parameter(torch.ones(2)), torch.ones(2)

    packed = PickleCodec().encode(lambda x: x * weight + other)

    assert packed.copies == 1


# -- natively, where pickles are allowed


def test_natively_a_parameter_inside_an_object_is_a_copy_and_the_caller_is_warned(natives):
    def call():
        gradwire.rpc_sync("w1", scale, args=(Fallback(nn.Parameter(torch.ones(2))),))

    assert natives[0].run(warned_of_arguments, call) == [__file__]


def test_natively_a_returned_module_is_a_copy_and_its_receiver_is_warned(natives):
    def program():
        with context(), pytest.warns(GraphCutWarning, match=SAID.format("result of")) as warned:
            gradwire.rpc_sync("w1", own_module)
        return [warning.filename for warning in warned]

    assert natives[0].run(program) == [__file__]


@pytest.mark.parametrize("shape", CONTAINERS)
def test_natively_the_gradient_of_an_argument_comes_home(natives, shape):
    weight = nn.Parameter(torch.ones(2))
    value = CONTAINERS[shape](weight)

    def call():
        return gradwire.rpc_sync("w1", scale, args=(value,))

    assert natives[0].run(grad_of, call, weight) == [3.0, 3.0]
