"""rpc_sync, rpc_async and remote, as programs for torch.distributed.rpc call them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

from gradwire import context
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.compat.rpc.functions import async_execution
from gradwire.compat.rpc.internal import PythonUDF, _InternalRPCPickler
from gradwire.errors import CallTimeout, GraphCutWarning, UsageError
from gradwire.rpc.codec.pickle_codec import dumps, loads
from gradwire.testing import cluster
from tests.leftovers import eventually


@pytest.fixture
def workers():
    with cluster(3, behavior=TORCH) as made:
        yield made


class Counter:
    """An object of a class that nobody has exposed."""

    def __init__(self, start):
        self.n = start

    def add(self, n):
        self.n += n
        return self.n

    @async_execution
    def add_later(self, n):
        future = torch.futures.Future()
        future.set_result(self.add(n))
        return future

    @staticmethod
    def of(n):
        return Counter(n)

    def __eq__(self, other):
        return isinstance(other, Counter) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


class Named:
    """Takes keywords that are also words of gradwire's own functions."""

    def give(self, **kwargs):
        return kwargs


class Picky(Exception):
    """Cannot be made from one string."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def give(*args, **kwargs):
    return args, kwargs


def fail_with(kind, *args):
    raise kind(*args)


def same(a, b):
    return a is b


def forward(module, x):
    return module(x)


@async_execution
def later(value):
    future = torch.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@async_execution
def later_through(to, x):
    return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda f: f.wait() * 2)


@async_execution
def fail_later(text):
    future = torch.futures.Future()
    future.set_exception(ValueError(text))
    return future


@async_execution
def no_future():
    return 3


# -- what travels


def test_any_picklable_value_travels_and_comes_back(workers):
    sent = ([Counter(1), {2: Counter}], {"key": (Counter(3), None, ...)})
    args, kwargs = workers[0].run(rpc.rpc_sync, "w1", give, sent[0], sent[1])
    assert (list(args), kwargs) == sent


def test_bound_methods_classes_and_static_methods_are_called(workers):
    assert workers[0].run(rpc.rpc_sync, "w1", Counter(1).add, (2,)) == 3
    assert workers[0].run(rpc.rpc_sync, "w1", Counter, (2,)) == Counter(2)
    assert workers[0].run(rpc.rpc_sync, "w1", Counter.of, (2,)) == Counter(2)
    assert workers[0].run(rpc.rpc_sync, 1, min, (2, 1)) == 1


def test_one_tensor_given_twice_is_one_tensor_there(workers):
    x = torch.ones(2)
    assert workers[0].run(rpc.rpc_sync, "w1", same, (x, x))


def test_a_function_without_a_name_is_refused_here(workers, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(RuntimeError, match="lambda"):
        workers[0].run(rpc.rpc_sync, "w1", lambda: 1)


def test_a_pickler_of_the_programs_own_packs_the_call(workers):
    class Noting(_InternalRPCPickler):
        def serialize(self, obj):
            noted.append(type(obj))
            return super().serialize(obj)

        def deserialize(self, binary_data, tensor_table):
            noted.append("deserialize")
            return super().deserialize(binary_data, tensor_table)

    noted = []
    with rpc._use_rpc_pickler(Noting()):
        assert workers[0].run(rpc.rpc_sync, "w1", torch.nn.Linear, (2, 2)).in_features == 2
    assert noted == [PythonUDF, "deserialize"]


class ByHand:
    """A pickler of the program's own that has nothing of ours."""

    def serialize(self, obj):
        func, (reference, *rest), _ = obj
        return dumps((func, reference._serialize(), rest)), []

    def deserialize(self, binary_data, tensor_table):
        func, reference, rest = loads(binary_data)
        return PythonUDF(func, (rpc.PyRRef._deserialize(reference), *rest), {})


def fetched(reference, *more):
    assert all(one.owner() == reference.owner() for one in more)
    return reference.to_here()


@pytest.mark.parametrize("pickler", [_InternalRPCPickler, ByHand])
def test_references_travel_beside_what_a_pickler_of_the_programs_own_packs(workers, pickler):
    def program():
        mine, theirs = rpc.RRef(Counter(1)), rpc.remote("w1", Counter, args=(2,))
        with rpc._use_rpc_pickler(pickler()):
            assert rpc.rpc_sync("w1", fetched, args=(mine,)) == Counter(1)
            assert rpc.rpc_async("w2", fetched, args=(theirs,)).wait() == Counter(2)
            assert rpc.remote("w2", fetched, args=(theirs,)).to_here() == Counter(2)
            assert theirs.rpc_sync().add(3) == 5

    workers[0].run(program)
    for one in workers:
        assert eventually(lambda one=one: not one.worker.refs.leaks())


def test_the_same_reference_twice_is_packed_by_a_pickler_of_the_programs_own(workers):
    def program():
        theirs = rpc.remote("w1", Counter, args=(2,))
        with rpc._use_rpc_pickler(_InternalRPCPickler()):
            assert rpc.rpc_sync("w2", fetched, args=(theirs, theirs)) == Counter(2)

    workers[0].run(program)


def test_a_reference_is_packed_only_for_a_call(workers):
    def program():
        with pytest.raises(UsageError, match="Can not pickle rref in python pickler"):
            _InternalRPCPickler().serialize(rpc.RRef(1))
        with pytest.raises(UsageError, match="can not be unpickled outside of a call"):
            rpc.PyRRef._deserialize((0,))

    workers[0].run(program)


def test_a_worker_of_another_manner_runs_no_sent_function():
    with cluster(2) as native, pytest.raises(RuntimeError):
        native[0].run(rpc.rpc_sync, "w1", Counter, (1,))


# -- graphs


def test_a_parameter_among_the_arguments_gets_its_gradient(workers):
    weight = nn.Parameter(torch.ones(2))

    def program():
        with context():
            rpc.rpc_sync("w1", torch.mul, args=(weight, 3.0)).sum().backward()

    workers[0].run(program)
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_module_travels_as_a_copy(workers):
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad():
        there = workers[0].run(rpc.rpc_sync, "w1", forward, (module, x))
    assert torch.equal(there, module(x))


def test_outside_a_context_a_tensor_arrives_as_a_leaf_and_a_warning_says_so(workers):
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(GraphCutWarning):
        there = workers[0].run(rpc.rpc_sync, "w1", torch.mul, (x, 2))
    assert there.requires_grad
    assert there.is_leaf


# -- futures as answers


def test_a_function_may_answer_later(workers):
    def program():
        assert rpc.rpc_sync("w1", later, args=(3,)) == 3
        assert rpc.rpc_async("w1", later_through, args=("w2", torch.ones(1))).wait().item() == 4
        assert rpc.remote("w1", later, args=(5,)).to_here() == 5
        with pytest.raises(ValueError, match="too late"):
            rpc.rpc_sync("w1", fail_later, args=("too late",))
        with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future"):
            rpc.rpc_sync("w1", no_future)

    workers[0].run(program)


# -- errors


@pytest.mark.parametrize(
    ("raised", "by_call"),
    [(ValueError, ValueError), (TypeError, TypeError), (KeyError, RuntimeError)],
)
def test_a_call_raises_few_types_and_a_fetch_all(workers, raised, by_call, capsys):
    def program():
        with pytest.raises(by_call, match=rf"On WorkerInfo\(id=1, name=w1\):\n{raised.__name__}"):
            rpc.rpc_sync("w1", fail_with, args=(raised, "no"))
        with pytest.raises(raised, match="no"):
            rpc.remote("w1", fail_with, args=(raised, "no")).to_here()

    workers[0].run(program)
    assert capsys.readouterr().err.count(f"On WorkerInfo(id=1, name=w1):\n{raised.__name__}") == 2


def test_an_exception_that_cannot_be_made_again_is_still_one_of_its_type(workers, capsys):
    def program():
        rpc.remote("w1", fail_with, args=(Picky, "this", "that")).to_here()

    with pytest.raises(Picky, match="this and that"):
        workers[0].run(program)
    assert "Picky" in capsys.readouterr().err


def test_an_operator_without_fitting_arguments(workers):
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        workers[0].run(rpc.rpc_sync, "w1", torch.add)


def test_destinations_and_functions_are_checked(workers):
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        workers[0].run(rpc.rpc_sync, 1.5, torch.add)
    with pytest.raises(TypeError, match="function should be callable"):
        workers[0].run(rpc.rpc_sync, "w1", 3)
    with pytest.raises(RuntimeError, match="could not find destination"):
        workers[0].run(rpc.rpc_sync, "w9", torch.add)


# -- references


def test_keywords_may_have_any_name(workers):
    given = {"name": 1, "function": 2, "timeout": 3, "rref": 4, "rpc_api": 5, "proxy": 6}

    def program():
        rref = rpc.remote("w1", Named)
        assert rref.rpc_sync().give(**given) == given
        assert rref.rpc_async().give(**given).wait() == given
        assert rpc.rpc_sync("w1", give, kwargs=given) == ((), given)

    workers[0].run(program)


def test_methods_are_called_through_a_reference(workers):
    def program():
        rref = rpc.remote("w1", Counter, args=(1,))
        assert rref.rpc_sync().add(2) == 3
        assert rref.rpc_async().add(2).wait() == 5
        assert rref.remote().add(2).to_here() == 7
        assert rref.rpc_sync().add_later(1) == 8
        assert rref.rpc_async().add_later(1).wait() == 9
        assert rref.remote().add_later(1).to_here() == 10
        for begin in (rref.rpc_sync, rref.remote):
            with pytest.raises(AttributeError, match="has no attribute 'sub'"):
                begin().sub(1)
        with pytest.raises(AttributeError, match="has no attribute 'sub'"):
            rref.rpc_async().sub(1).wait()
        assert rref._get_type() is Counter

    workers[0].run(program)


def test_how_references_are_written(workers):
    def program():
        mine = rpc.RRef(3)
        theirs = rpc.remote("w1", Counter, args=(1,))
        id = "GloballyUniqueId(created_on=0, local_id={})".format
        assert str(mine) == f"OwnerRRef({id(0)})"
        assert str(theirs) == f"UserRRef(RRefId = {id(1)}, ForkId = {id(2)})"
        with pytest.raises(RuntimeError) as refused:
            theirs.local_value()
        assert str(refused.value) == (
            f"For UserRRef(rref_id={id(1)}, fork_id={id(2)}), can't call localValue() on user "
            "WorkerInfo(id=0, name=w0). Call it on owner WorkerInfo(id=1, name=w1)"
        )

    workers[0].run(program)


def test_a_reference_whose_value_was_not_made_in_time_says_so(workers):
    held = threading.Event()
    HELD["event"] = held

    def program():
        rref = rpc.remote("w1", wait_for_event, timeout=0.05)
        with pytest.raises(CallTimeout, match="RPC ran for more than"):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote"):
            rref.to_here()
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote"):
            rpc.rpc_sync("w2", give, args=(rref,))
        held.set()

    workers[0].run(program)


HELD: dict[str, threading.Event] = {}


def wait_for_event():
    HELD["event"].wait(20)


def _two_calls():
    rpc.rpc_sync("w1", torch.add, args=(1, 2))
    rpc.rpc_async("w1", torch.mul, args=(1, 2)).wait()


def test_a_profile_names_each_kind_of_call(workers):
    with torch.profiler.profile() as profile:
        workers[0].run(_two_calls)

    names = {event.key for event in profile.key_averages()}
    assert {"rpc_sync#aten::add(w0 -> w1)", "rpc_async#aten::mul(w0 -> w1)"} <= names
