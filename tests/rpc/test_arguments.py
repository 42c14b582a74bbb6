"""What is passed as `args` and `kwargs` is a list of arguments, or is refused with the way out."""

from __future__ import annotations

import re
import sys
from collections import deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.compat.remote_module import RemoteModule as TorchRemoteModule
from gradwire.compat.rpc import api as torch_rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.errors import ArgumentTypeError
from gradwire.testing import cluster
from tests.case_names import case_name

HERE = sys.modules[__name__]
CALLS = [gw.rpc_sync, gw.rpc_async, gw.remote]
TORCH_CALLS = [torch_rpc.rpc_sync, torch_rpc.rpc_async, torch_rpc.remote]

# Each of these is iterable, so that `fn(*args)` would run, with arguments that nobody meant.
MISTAKEN = [
    torch.ones(1, 3),
    torch.ones(1),
    nn.Parameter(torch.ones(2)),
    np.ones((1, 3)),
    "text",
    b"bytes",
    bytearray(b"bytes"),
    {"x": 1},
    {1, 2},
]
NOT_ITERABLE = [5, 0, 1.5, torch.tensor(1.0), len]


def echoed(*args, **kwargs):
    return args, kwargs


@pytest.fixture(scope="module")
def native():
    with cluster(2, expose=[HERE]) as made:
        yield made


@pytest.fixture(scope="module")
def compat():
    with cluster(2, behavior=TORCH) as made:
        yield made


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize(
    "args", [*MISTAKEN, *NOT_ITERABLE, range(2), (n for n in (1, 2))], ids=case_name
)
def test_what_is_no_tuple_or_list_is_refused_as_args(native, how, args):
    kind = type(args).__name__

    with pytest.raises(
        ArgumentTypeError, match=f"args is a {kind}, not a tuple or a list of arguments"
    ):
        native[0].run(how, "w1", echoed, args)


@pytest.mark.parametrize("how", TORCH_CALLS)
@pytest.mark.parametrize("args", [*MISTAKEN, *NOT_ITERABLE], ids=case_name)
def test_it_is_refused_in_programs_for_torch_too(compat, how, args):
    with pytest.raises(
        ArgumentTypeError, match=f"args is a {type(args).__name__}, not a tuple or a list"
    ):
        compat[0].run(how, "w1", echoed, args)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (torch.ones(1, 3), "args=(value,) passes it as one argument, args=tuple(value) its elem"),
        ("text", "args=(value,), with the comma, passes it as one argument"),
        (5, "args=(value,), with the comma, passes it as one argument"),
        ({"x": 1}, "args=(value,) passes it as one argument, kwargs=value as named ones"),
    ],
    ids=repr,
)
def test_the_hint_says_how_it_is_passed(native, args, hint):
    with pytest.raises(ArgumentTypeError, match=f"hint: {re.escape(hint)}"):
        native[0].run(gw.rpc_sync, "w1", echoed, args)


@pytest.mark.parametrize("kwargs", [[("x", 1)], "x", 5, torch.ones(2), {"x"}], ids=repr)
def test_what_is_no_dict_is_refused_as_kwargs(native, compat, kwargs):
    refused = f"kwargs is a {type(kwargs).__name__}, not a dict"
    for how in CALLS:
        with pytest.raises(ArgumentTypeError, match=refused):
            native[0].run(how, "w1", echoed, (), kwargs)
    for how in TORCH_CALLS:
        with pytest.raises(ArgumentTypeError, match=refused):
            compat[0].run(how, "w1", echoed, (), kwargs)


@pytest.mark.parametrize("args", [(1, 2), [1, 2]], ids=repr)
def test_a_tuple_and_a_list_are_arguments(native, args):
    assert native[0].run(gw.rpc_sync, "w1", echoed, args, {"x": 3}) == ((1, 2), {"x": 3})


def test_another_mapping_is_a_dict_of_keyword_arguments(native):
    kwargs = MappingProxyType({"x": 3})

    assert native[0].run(gw.rpc_sync, "w1", echoed, kwargs=kwargs) == ((), {"x": 3})


@pytest.mark.parametrize("args", [(1, 2), [1, 2], range(1, 3), deque([1, 2])], ids=repr)
def test_programs_for_torch_may_pass_any_sequence(compat, args):
    assert compat[0].run(torch_rpc.rpc_sync, "w1", echoed, args) == ((1, 2), {})


def test_programs_for_torch_may_pass_none(compat):
    assert compat[0].run(torch_rpc.rpc_sync, "w1", echoed, None, None) == ((), {})


@pytest.mark.parametrize("args", [torch.ones(1, 2), "88", 8], ids=repr)
def test_a_remote_module_takes_no_other_arguments(native, compat, args):
    refused = f"args is a {type(args).__name__}, not a tuple or a list"
    with pytest.raises(ArgumentTypeError, match=refused):
        native[0].run(gw.RemoteModule, "w1", nn.Linear, args)
    with pytest.raises(ArgumentTypeError, match=refused):
        compat[0].run(TorchRemoteModule, "w1/cpu", nn.Linear, args)
    with pytest.raises(ArgumentTypeError, match="kwargs is a list, not a dict"):
        native[0].run(gw.RemoteModule, "w1", nn.Linear, (1, 2), [("bias", False)])


def test_run_takes_no_other_arguments():
    with pytest.raises(
        ArgumentTypeError, match="args is a Tensor, not a tuple or a list of arguments"
    ):
        gw.run(echoed, 2, torch.ones(1, 3))


# -- other lists that are easily given as what should be in them


@pytest.mark.parametrize("expose", [HERE, echoed, "module"], ids=case_name)
def test_what_is_exposed_is_given_in_a_list(expose):
    with pytest.raises(
        ArgumentTypeError, match=r"expose is .*, not a list\nhint: pass a list: expose="
    ):
        cluster(2, expose=expose).__enter__()
    with pytest.raises(ArgumentTypeError, match=r"expose is .*, not a list"):
        gw.run(echoed, 2, expose=expose)


def test_the_parameters_of_an_optimizer_are_given_in_a_list(native):
    def made():
        weight = gw.remote("w1", torch.ones, (2,), {"requires_grad": True})
        gw.DistributedOptimizer(torch.optim.SGD, weight, lr=0.1)

    with pytest.raises(ArgumentTypeError, match="params_rref is one reference, not a list of them"):
        native[0].run(made)


def test_all_workers_are_known_by_name_and_id():
    with cluster(3) as workers:
        infos = workers[1].run(gw.get_worker_infos)

    assert [(info.name, info.id) for info in infos] == [("w0", 0), ("w1", 1), ("w2", 2)]
