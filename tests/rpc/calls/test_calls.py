"""Calls between workers: who is meant, what travels, how long it may take, what is refused."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.errors import (
    CallTimeout,
    NotExposed,
    NotSerializable,
    RemoteError,
    UnknownWorker,
    UsageError,
)
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


# -- what runs on the workers


def name():
    return gw.get_worker_info().name


def echoed(*args, **kwargs):
    return args, kwargs


def nap(gate):
    GATES[gate].wait(30)
    return name()


def ask(to, gate):
    return gw.rpc_sync(to, nap, args=(gate,))


def first_of(x, gate):
    GATES[gate].wait(30)
    return x[0].item()


def are_one(a, b):
    return a is b


def double_in_place(x):
    x.mul_(2)
    return x


def modes():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def modes_over(*path):
    return gw.rpc_sync(path[0], modes_over, args=path[1:]) if path else modes()


def ping(times, back):
    return 0 if times == 0 else 1 + gw.rpc_sync(back, ping, args=(times - 1, name()))


def make_lock():
    return threading.Lock()


def make_lock_deep_inside():
    return {"parts": [1, (2, threading.Lock())]}


def _private():
    return 1


class Counter:
    def __init__(self, start):
        self.count = start

    @staticmethod
    def of_static(n):
        return n + 1

    @classmethod
    def of_class(cls, n):
        return f"{cls.__name__} {n}"

    def method(self):
        return self.count


def call(to, function, *args, **options):
    return gw.rpc_sync(to, function, args=args, **options)


# -- who is meant


@pytest.mark.parametrize("to", ["w1", 1, gw.WorkerInfo("w1", 1)])
def test_a_worker_is_meant_by_its_name_its_number_or_its_info(workers, to):
    assert workers[0].run(call, to, name) == "w1"
    assert workers[0].run(lambda: gw.rpc_async(to, name).wait()) == "w1"
    assert workers[0].run(lambda: gw.remote(to, name).to_here()) == "w1"


def test_a_worker_may_call_itself(workers):
    assert workers[1].run(call, "w1", name) == "w1"


def test_every_worker_knows_itself_and_the_others(workers):
    for n, member in enumerate(workers):
        assert member.run(gw.get_worker_info) == gw.WorkerInfo(f"w{n}", n)
        assert member.run(gw.get_worker_info, "w2").id == 2
        assert member.run(gw.get_worker_info, 1).name == "w1"


@pytest.mark.parametrize("to", ["w7", 7, gw.WorkerInfo("w7", 7)])
@pytest.mark.parametrize("how", [gw.rpc_sync, gw.rpc_async, gw.remote])
def test_an_unknown_worker_is_refused_at_once_and_the_known_ones_are_listed(workers, how, to):
    with pytest.raises(UnknownWorker) as raised:
        workers[0].run(how, to, name)

    kind, spoken = ("id", "7") if to == 7 else ("name", "w7")
    assert str(raised.value) == (
        f"w0 could not find destination {kind} {spoken}\nhint: the workers are: w0, w1, w2"
    )


def test_outside_of_any_worker_nothing_can_be_called():
    with pytest.raises(UsageError) as raised:
        gw.rpc_sync("w1", name)

    assert str(raised.value) == (
        "no worker is running here: RPC has not been initialized\n"
        "hint: call init_rpc() first, or run inside gradwire.run() or testing.cluster()"
    )


# -- what travels


def test_arguments_and_results_arrive_as_they_were(workers):
    args = (1, "two", 3.5, None, True, b"six", [7, (8,)], {"nine": {10}}, 1 << 80, 2j, slice(1, 2))
    kwargs = {"dtype": torch.float16, "device": torch.device("cpu"), "size": torch.Size([3])}

    got = workers[0].run(gw.rpc_sync, "w1", echoed, args=args, kwargs=kwargs)

    assert got == (args, kwargs)
    assert [type(v) for v in got[0]] == [type(v) for v in args]


def test_arrays_arrive_as_arrays(workers):
    (got,), _ = workers[0].run(call, "w1", echoed, np.arange(6.0).reshape(2, 3))

    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, np.arange(6.0).reshape(2, 3))


def test_functions_travel_as_their_names(workers):
    assert workers[0].run(call, "w1", echoed, name, torch.sin, Counter) == (
        (name, torch.sin, Counter),
        {},
    )


def test_torch_operators_static_and_class_methods_run_elsewhere(workers):
    assert workers[0].run(call, "w1", torch.add, torch.ones(2), 1).tolist() == [2, 2]
    assert workers[0].run(call, "w1", torch.Tensor.mul, torch.ones(2), 3).tolist() == [3, 3]
    assert workers[0].run(call, "w1", Counter.of_static, 1) == 2
    assert workers[0].run(call, "w1", Counter.of_class, 1) == "Counter 1"


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_the_same_tensor_twice_in_one_call_arrives_as_one(workers, to):
    x = torch.ones(2)
    assert workers[0].run(call, to, are_one, x, x)
    assert not workers[0].run(call, to, are_one, x, x.view(2))


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_what_a_callee_does_in_place_the_caller_does_not_see(workers, to):
    x = torch.ones(2)

    assert workers[0].run(call, to, double_in_place, x).tolist() == [2, 2]
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_the_arguments_of_an_async_call_are_a_snapshot(workers, gate, to):
    x = torch.full((4,), 2.0)

    def sent_then_changed():
        future = gw.rpc_async(to, first_of, args=(x, gate))
        x.fill_(200)
        GATES[gate].set()
        return future.wait()

    assert workers[0].run(sent_then_changed) == 2.0


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_the_grad_mode_of_the_caller_is_that_of_the_callee_however_deep(workers, mode):
    with mode():
        here = modes()
        there = workers[0].run(call, "w1", modes_over, "w2", "w1", "w0")

    assert there == here


def test_the_grad_mode_of_a_call_does_not_stay_with_its_thread(workers):
    with torch.no_grad():
        workers[0].run(call, "w1", modes)

    assert workers[0].run(call, "w1", modes) == (True, False)


def test_calls_may_go_back_and_forth_deeper_than_there_are_threads():
    with cluster(2, expose=[HERE], options=Options(threads=2)) as few:
        assert few[0].run(call, "w1", ping, 40, "w0") == 40
        assert_nothing_left(few)


def test_many_calls_from_many_threads_get_each_its_own_answer(workers):
    def one(n):
        (answer,), _ = workers[n % 3].run(call, f"w{(n + 1) % 3}", echoed, n)
        return answer

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(24))) == list(range(24))


# -- what cannot travel


@pytest.mark.parametrize("how", [gw.rpc_sync, gw.rpc_async, gw.remote])
def test_an_argument_that_cannot_travel_is_named_with_its_place(workers, how):
    with pytest.raises(NotSerializable) as raised:
        workers[0].run(how, "w1", echoed, args=(1, {"a": [2, threading.Lock()]}))

    assert raised.value.place.endswith('[1]["a"][1]')
    assert "a value of type _thread.lock cannot be serialized" in str(raised.value)
    assert str(raised.value).startswith('args[1]["a"][1]: ')
    assert "hint: give its class a codec with gradwire.register_codec" in str(raised.value)


def test_a_keyword_argument_that_cannot_travel_is_named_with_its_place(workers):
    with pytest.raises(NotSerializable) as raised:
        workers[0].run(gw.rpc_sync, "w1", echoed, kwargs={"lock": threading.Lock()})

    assert str(raised.value).startswith('kwargs["lock"]: a value of type _thread.lock')


def test_a_result_that_cannot_travel_is_named_with_its_place_and_its_worker(workers):
    with pytest.raises(NotSerializable) as raised:
        workers[0].run(call, "w1", make_lock_deep_inside)

    assert 'result["parts"][1][1]: a value of type _thread.lock cannot be serialized' in str(
        raised.value
    )
    assert "NotSerializable on w1" in str(raised.value)


def test_a_result_that_cannot_travel_can_stay_where_it_is(workers):
    def made_and_fetched():
        rref = gw.remote("w1", make_lock)
        with pytest.raises(NotSerializable, match=r"result: a value of type _thread\.lock"):
            rref.to_here()

    workers[0].run(made_and_fetched)


def test_a_future_does_not_travel(workers):
    def sent():
        gw.rpc_sync("w1", echoed, args=(gw.rpc_async("w1", name),))

    with pytest.raises(NotSerializable, match="a future cannot be serialized"):
        workers[0].run(sent)


# -- what may not be run


def test_a_function_that_is_not_exposed_is_refused_by_the_callee(workers):
    with pytest.raises(NotExposed) as raised:
        workers[0].run(call, "w1", _private)

    assert "tests.rpc.calls.test_calls:_private is not exposed on this worker" in str(raised.value)
    assert "NotExposed on w1" in str(raised.value)
    assert "hint: decorate it with @gradwire.expose, or pass expose=[module]" in str(raised.value)


def test_a_lambda_is_refused_before_anything_is_sent(workers):
    with pytest.raises(NotExposed) as raised:
        workers[0].run(call, "w1", lambda: 1)

    assert "<lambda> is a lambda, which has no name to be called by" in str(raised.value)
    assert "hint: define it with def at module level and expose it" in str(raised.value)


def test_a_local_function_is_refused_before_anything_is_sent(workers):
    def local():
        return 1

    with pytest.raises(NotExposed, match="local is local: no other worker could find it"):
        workers[0].run(call, "w1", local)


def test_a_bound_method_is_refused_with_the_way_out(workers):
    with pytest.raises(NotExposed) as raised:
        workers[0].run(call, "w1", Counter(1).method)

    assert "Counter.method is bound to an object, which cannot be serialized" in str(raised.value)
    assert "hint: use rref.rpc_sync().method(...) on a reference to the object" in str(raised.value)


@pytest.mark.parametrize("how", [gw.rpc_sync, gw.rpc_async, gw.remote])
def test_what_cannot_be_called_is_a_type_error(workers, how):
    with pytest.raises(TypeError, match="function should be callable"):
        workers[0].run(how, "w1", 3)


# -- how long it may take


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("-inf"), float("nan")])
@pytest.mark.parametrize("how", [gw.rpc_sync, gw.rpc_async, gw.remote])
def test_a_timeout_that_is_no_time_is_refused(workers, how, timeout):
    with pytest.raises(UsageError) as raised:
        workers[0].run(how, "w1", name, timeout=timeout)

    assert str(raised.value) == (
        f"timeout={timeout!r} is not a positive number of seconds\n"
        "hint: timeout=None waits as long as the other worker lives"
    )


@pytest.mark.parametrize("field", ["join", "connect", "call", "backward", "shutdown", "stall"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_options_refuse_a_timeout_that_is_no_time(field, seconds):
    with pytest.raises(UsageError, match=f"timeout {field}=.* is not a positive, finite number"):
        Timeouts(**{field: seconds})


def test_a_timeout_far_below_a_millisecond_is_taken_as_it_is(workers, gate):
    with pytest.raises(CallTimeout):
        workers[0].run(call, "w1", nap, gate, timeout=0.0005)


def test_a_timeout_of_centuries_is_taken_as_it_is(gate):
    with cluster(2, expose=[HERE]) as patient:
        assert patient[0].run(call, "w1", name, timeout=1e10) == "w1"
        with pytest.raises(CallTimeout):  # other deadlines are still watched
            patient[0].run(call, "w1", nap, gate, timeout=0.02)
        GATES[gate].set()


def test_a_call_that_is_not_answered_in_time_says_who_which_and_how_long(workers, gate):
    with pytest.raises(CallTimeout) as raised:
        workers[0].run(call, "w1", nap, gate, timeout=0.05)

    message, hint = str(raised.value).split("\n")
    assert re.fullmatch(
        r"w1 did not answer w0#\d+ \(tests\.rpc\.calls\.test_calls\.nap\) within 0\.0\d+ s", message
    )
    assert hint.startswith("hint: a longer timeout= on the call, or Timeouts(call=…)")
    assert isinstance(raised.value, TimeoutError)


def test_an_answer_that_comes_after_its_deadline_is_dropped(workers, gate):
    with pytest.raises(CallTimeout):
        workers[0].run(call, "w1", nap, gate, timeout=0.02)
    GATES[gate].set()

    assert workers[0].run(call, "w1", name) == "w1"


def test_the_options_say_how_long_a_call_waits_that_does_not_say_so_itself(gate):
    with cluster(2, expose=[HERE], options=Options(timeouts=Timeouts(call=0.02))) as hasty:
        hasty[0].run(gw.rpc_sync, "w1", name, timeout=5)  # connects
        with pytest.raises(CallTimeout, match=r"within 0\.0"):
            hasty[0].run(call, "w1", nap, gate)
        GATES[gate].set()
        assert_nothing_left(hasty)


def test_a_nested_call_never_outlives_the_call_it_is_made_in(workers, gate):
    with pytest.raises((RemoteError, CallTimeout), match="did not answer w"):  # whichever is first
        workers[0].run(call, "w1", ask, "w2", gate, timeout=0.05)

    def inner_is_over():
        return workers[1].worker.agent.in_flight == 0

    assert eventually(inner_is_over)  # while w2 still waits at the gate
    assert not GATES[gate].is_set()


def test_a_timeout_ends_only_its_own_call(workers, gate):
    def both():
        other = gw.rpc_async("w1", nap, args=(gate,))
        with pytest.raises(CallTimeout):
            gw.rpc_sync("w1", nap, args=(gate,), timeout=0.02)
        GATES[gate].set()
        return other.wait()

    assert workers[0].run(both) == "w1"


def product_of(x, y, *more):
    assert all(each is x for each in (y, *more))
    return x * y * x


def twins(x):
    y = x * 2
    return y, [y]


@pytest.mark.parametrize("how", ["args", "kwargs", "inside"])
def test_one_tensor_passed_twice_is_one_with_the_sum_of_its_gradients(workers, how):
    x = torch.tensor(3.0, requires_grad=True)
    args, kwargs = {
        "args": ((x, x), {}),
        "kwargs": ((x,), {"y": x}),
        "inside": ((x, x, *[x] * 5), {}),
    }[how]

    y = workers[0].run(gw.rpc_sync, "w1", product_of, args=args, kwargs=kwargs)
    y.backward()

    assert (y.item(), x.grad.item()) == (27, 27)


def test_a_result_that_is_there_twice_arrives_as_one(workers):
    x = torch.tensor(3.0, requires_grad=True)

    y, (again,) = workers[0].run(gw.rpc_sync, "w1", twins, args=(x,))
    (y * again).backward()

    assert again is y
    assert x.grad == 24
