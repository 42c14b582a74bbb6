"""Modules that torch has made over, behind a reference: compiled, traced, exported, scripted.

Called through references, natively and as programs for torch.distributed.rpc call them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import gradwire
from gradwire import NotExposed, context
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.rpc.expose.registry import Registry
from gradwire.testing import cluster

HERE = sys.modules[__name__]
X = torch.ones(1, 2)

pytestmark = [
    # Dynamo looks at the .grad of each input, and says so itself if one is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * self.weight

    def doubled(self, x):
        return self.forward(x) * 2


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * self.weight

    @torch.jit.export
    def doubled(self, x):
        return x * self.weight * 2


def with_own_forward(net):
    net.forward = functools.partial(forward_of, net)
    return net


def forward_of(net, x):
    return x * net.weight


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


def compiled_forward(net):
    net.forward = torch.compile(net.forward, backend="eager")
    return net


KINDS = {
    "plain": lambda: Net(),
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "compiled by aot": lambda: torch.compile(Net(), backend="aot_eager"),
    "compiled in place": lambda: compiled_in_place(Net()),
    "compiled forward": lambda: compiled_forward(Net()),
    "own forward": lambda: with_own_forward(Net()),
    "fx": lambda: torch.fx.symbolic_trace(Net()),
    "exported": lambda: torch.export.export(Net(), (X,)).module(),
    "scripted": lambda: torch.jit.script(Scripted()),
    "traced": lambda: torch.jit.trace(Net(), X, check_trace=False),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(Scripted().eval()), ["weight"]),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Net()),
}


@functools.cache
def made(kind):
    """One of each is enough: to compile takes seconds. Nothing of it may be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = KINDS[kind]()
        module(X)
    return module


def kept(kind):
    return gradwire.RRef(made(kind))


def module_there(kind):
    return made(kind)


@pytest.fixture(scope="module")
def natives():
    with cluster(2, expose=[HERE]) as workers:
        yield workers


@pytest.fixture(scope="module")
def workers():
    with cluster(2, behavior=TORCH) as workers:
        yield workers


def called(reference, name, how, x):
    method = getattr(getattr(reference, how)(), name)
    result = method(x)
    if how == "rpc_async":
        return result.wait()
    return result if how == "rpc_sync" else result.to_here()


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("name", ["forward", "__call__"])
@pytest.mark.parametrize("kind", KINDS)
def test_natively_every_kind_is_called_and_differentiated(natives, kind, name, how):
    def program():
        reference = gradwire.rpc_sync("w1", kept, args=(kind,))
        return gradient_through(reference, name, how)

    assert natives[0].run(program) == [[2.0, 3.0]]


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("name", ["forward", "__call__"])
@pytest.mark.parametrize("kind", KINDS)
def test_under_compat_every_kind_is_called_and_differentiated(workers, kind, name, how):
    def program():
        reference = rpc.remote("w1", module_there, args=(kind,))
        return gradient_through(reference, name, how)

    assert workers[0].run(program) == [[2.0, 3.0]]


def gradient_through(reference, name, how):
    x = torch.ones(1, 2, requires_grad=True)
    with context():
        y = called(reference, name, how, x)
        assert y.tolist() == [[2.0, 3.0]]
        y.sum().backward()
    return x.grad.tolist()


def test_natively_a_compiled_module_passes_other_methods_on_by_the_rules_of_its_class(natives):
    def program():
        reference = gradwire.rpc_sync("w1", kept, args=("compiled",))
        with torch.no_grad():
            return reference.rpc_sync().doubled(X).tolist()

    assert natives[0].run(program) == [[4.0, 6.0]]
    with pytest.raises(NotExposed, match="doubled is not exposed"):
        Registry().method(made("compiled"), "doubled")
    with pytest.raises(NotExposed, match="apply is not exposed"):
        Registry(expose=[HERE]).method(made("compiled"), "apply")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        Registry(expose=[HERE]).method(made("compiled"), "absent")


@pytest.mark.parametrize("kind", ["compiled", "scripted"])
def test_under_compat_methods_that_only_the_object_has_are_called(workers, kind):
    def program():
        reference = rpc.remote("w1", module_there, args=(kind,))
        with torch.no_grad():
            assert reference.rpc_async().doubled(X).wait().tolist() == [[4.0, 6.0]]
            return reference.rpc_sync().doubled(X).tolist()

    assert workers[0].run(program) == [[4.0, 6.0]]


@pytest.mark.parametrize("kind", ["compiled", "fx", "plain"])
def test_under_compat_a_method_that_nothing_has_is_missing_as_in_python(workers, kind):
    def program():
        reference = rpc.remote("w1", module_there, args=(kind,))
        with pytest.raises(AttributeError, match="absent"):
            reference.rpc_sync().absent(X)

    workers[0].run(program)


# -- what is opened, and what is not


@pytest.mark.parametrize("kind", KINDS)
def test_without_exposure_the_call_of_a_module_is_open_and_its_insides_are_not(kind):
    registry, module = Registry(), made(kind)

    assert registry.method(module, "__call__")(X).tolist() == [[2.0, 3.0]]
    closed = (
        *("apply", "register_forward_hook", "compile", "get_submodule", "share_memory", "graph"),
        *("code", "save", "_c", "recompile", "to_folder", "print_readable", "_orig_mod", "module"),
        *("__getattr__", "__setattr__", "__reduce__", "__dict__", "add_module", "register_module"),
        *("delete_submodule", "dynamo_ctx", "add_submodule", "load_state_dict_post_hook"),
    )
    for name in closed:
        with pytest.raises((NotExposed, AttributeError)):
            registry.method(module, name)


def test_a_class_of_the_users_that_is_not_exposed_keeps_its_forward():
    for kind in ("plain", "own forward", "compiled in place", "compiled forward"):
        with pytest.raises(NotExposed, match=r"Net\.forward is not exposed"):
            Registry().method(made(kind), "forward")


class Till:
    """A class with a method, and objects that have something else in its place."""

    def __init__(self, **stored):
        vars(self).update(stored)

    def open(self):
        return "by the class"

    def __len__(self):
        return 7


def by_the_object():
    return "by the object"


def test_what_stands_on_the_object_for_a_method_is_called_as_in_python():
    registry = Registry(expose=[Till])

    assert registry.method(Till(), "open")() == "by the class"
    assert registry.method(Till(open=by_the_object), "open")() == "by the object"
    assert registry.method(Till(open=functools.partial(by_the_object)), "open")() == "by the object"
    assert registry.method(Till(__len__=by_the_object), "__len__")() == 7


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ({"open": os.system}, "open"),
        ({"open": functools.partial(functools.partial(os.system))}, "open"),
        ({"open": threading.Thread(target=print).start}, "open"),
        ({"open": torch.load}, "open"),
        ({"open": open}, "open"),
        ({"open": eval}, "open"),
        ({"open": 3}, "open"),
        ({"shut": by_the_object}, "shut"),
        ({"forward": by_the_object}, "forward"),
        ({"__call__": by_the_object}, "__call__"),
    ],
)
def test_what_an_object_holds_is_no_method_of_it(stored, name):
    with pytest.raises(NotExposed):
        Registry(expose=[Till]).method(Till(**stored), name)
