"""References: made, fetched, passed on, counted, forgotten."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251  # to show that a reference refuses it
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.agent.membership.shutdown_state import OVER
from gradwire.errors import (
    CallTimeout,
    DeadlinePassed,
    NotExposed,
    NotSerializable,
    RefLeakWarning,
    UsageError,
)
from gradwire.ids import ForkId, RefId
from gradwire.rpc.messages import Reference
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
MADE: dict[str, weakref.ref] = {}
"""By worker, the last value that was made there."""
KEPT: dict[str, object] = {}


@pytest.fixture
def workers():
    MADE.clear()
    with cluster(3, expose=[HERE]) as made:
        yield made
        KEPT.clear()
        assert_nothing_left(made)


# -- what runs on the workers


class Box:
    """A value that can be watched."""

    def __init__(self, content):
        self.content = content
        MADE[name()] = weakref.ref(self)

    def get(self):
        return self.content

    def add(self, amount, *, times=1):
        self.content = self.content + amount * times
        return self.content

    def where(self):
        return name()

    def again(self):
        return Box(self.content)

    def fails(self):
        raise KeyError("nothing in the box")

    def waits(self, gate):
        GATES[gate].wait(30)
        return self.content

    def __len__(self):
        return 3

    def _secret(self):
        return "secret"


_Hidden = type("_Hidden", (), {"method": lambda self: 1, "__module__": __name__})


def name():
    return gw.get_worker_info().name


def make_hidden():
    return _Hidden()


def slow_box(gate, content):
    GATES[gate].wait(30)
    return Box(content)


def fail():
    raise FileExistsError("made of nothing")


def content_of(rref):
    return rref.local_value().content


def ask_get(rref):
    return rref.rpc_sync().get()


def describe(rref):
    return rref.owner_name(), rref.is_owner(), name()


def pass_on(rref, path):
    return gw.rpc_sync(path[0], pass_on, args=(rref, path[1:])) if path else ask_get(rref)


def same(rref):
    return rref


def keep(rref):
    KEPT[name()] = rref


def unkeep():
    del KEPT[name()]


def make_there(to, content):
    return gw.remote(to, Box, args=(content,))


def several(rrefs):
    return [rref.rpc_sync().get() for rref in rrefs["all"]]


def make_tensor(value):
    return torch.tensor(value, requires_grad=True)


def scaled(rref, x):
    return rref.local_value() * x


def is_forgotten(worker):
    return MADE[worker]() is None


def in_statistics(worker, **expected):
    """Whether a worker's references come to be counted like this."""
    refs = worker.worker.refs

    def as_expected():
        found = refs.statistics()
        return all(getattr(found, what) == n for what, n in expected.items())

    return eventually(as_expected)


# -- making


def test_remote_gives_a_reference_at_once_and_the_value_when_it_is_made(workers, gate):
    def program():
        rref = gw.remote("w1", slow_box, args=(gate, 7))
        GATES[gate].set()
        return rref.rpc_sync().get()

    assert workers[0].run(program) == 7


def test_what_remote_returns_is_an_rref(workers):
    for to in ("w0", "w1"):
        rref = workers[0].run(gw.remote, to, Box, args=(1,))
        assert isinstance(rref, gw.RRef)
        assert type(rref) is gw.RRef


def test_a_reference_knows_its_owner(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    assert rref.owner() == gw.WorkerInfo("w1", 1)
    assert rref.owner_name() == "w1"
    assert not rref.is_owner()


def test_a_reference_to_a_value_of_ones_own(workers):
    box = workers[0].run(Box, 5)
    rref = workers[0].run(gw.RRef, box)

    assert rref.is_owner()
    assert rref.owner_name() == "w0"
    assert rref.confirmed_by_owner()
    assert rref.local_value() is box
    assert workers[0].run(rref.to_here) is box


def test_remote_to_oneself_gives_the_value_itself(workers):
    rref = workers[0].run(gw.remote, "w0", Box, args=(5,))

    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()
    assert rref.local_value() is MADE["w0"]()


def test_a_reference_prints_what_it_is(workers):
    there = workers[0].run(gw.remote, "w1", Box, args=(5,))
    here = workers[0].run(gw.RRef, 3)

    assert repr(there).startswith("RRef(r0.")
    assert "on w1 as f0." in repr(there)
    assert repr(here).endswith("owned here)")


def test_an_rref_outside_of_any_worker_is_refused():
    with pytest.raises(UsageError, match="no worker is running here"):
        gw.RRef(1)


def test_what_the_making_function_raised_is_raised_where_the_reference_is_used(workers):
    def program(rref):
        for _ in range(2):
            with pytest.raises(FileExistsError, match="FileExistsError on w1: made of nothing"):
                rref.to_here()

    workers[0].run(lambda: program(gw.remote("w1", fail)))


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_what_the_making_function_raised_is_raised_by_every_method_and_forgotten(workers, to):
    def program(rref):
        for use in (rref.rpc_sync().get, rref.remote().get().to_here):
            with pytest.raises(FileExistsError, match="made of nothing"):
                use()

    workers[0].run(lambda: program(gw.remote(to, fail)))
    assert_nothing_left(workers)


def test_what_the_making_function_raised_is_raised_on_a_third_worker_too(workers):
    def program():
        gw.rpc_sync("w2", ask_get, args=(gw.remote("w1", fail),))

    with pytest.raises(FileExistsError, match="FileExistsError on w1: made of nothing"):
        workers[0].run(program)


def test_what_the_making_function_raised_here_is_raised_here_and_forgotten(workers):
    def program():
        rref = gw.remote("w0", fail)
        with pytest.raises(FileExistsError, match="made of nothing"):
            rref.local_value()

    workers[0].run(program)
    assert_nothing_left(workers)


def test_a_creation_that_cannot_leave_leaves_nothing(workers):
    for to in ("w0", "w1"):
        with pytest.raises(NotSerializable, match="lock cannot be serialized"):
            workers[0].run(gw.remote, to, Box, args=(threading.Lock(),))


# -- the value


def test_to_here_gives_a_copy_of_the_value(workers):
    def program():
        rref = gw.remote("w1", torch.ones, args=(2,))
        here = rref.to_here()
        here.mul_(5)
        return rref.to_here()

    assert workers[0].run(program).tolist() == [1, 1]


def test_local_value_on_a_user_names_the_user_and_the_owner(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    with pytest.raises(UsageError) as raised:
        rref.local_value()

    assert str(raised.value) == (
        f"For {rref.handle.ref}, can't call localValue() on user WorkerInfo(id=0, name=w0). "
        "Call it on owner w1\nhint: to_here() fetches a copy of the value"
    )


def test_a_value_that_is_not_made_in_time_is_a_call_timeout(workers, gate):
    def program():
        rref = gw.remote("w1", slow_box, args=(gate, 1))
        with pytest.raises(CallTimeout, match=r"w1 did not answer w0#\d+ \(fetch of r0\.\d+\)"):
            rref.to_here(timeout=0.02)
        GATES[gate].set()
        assert rref.rpc_sync().get() == 1

    workers[0].run(program)


def test_a_value_of_ones_own_that_is_not_made_in_time_is_a_call_timeout(workers, gate):
    rref = workers[0].run(gw.remote, "w0", slow_box, args=(gate, 1))

    with pytest.raises(CallTimeout, match=r"the value of r0\.\d+ was not made on w0 in time"):
        rref.to_here(timeout=0.02)
    GATES[gate].set()

    assert rref.to_here().content == 1


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(workers, timeout):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    for use in (rref.to_here, lambda timeout: rref.rpc_sync(timeout=timeout).get()):
        with pytest.raises(UsageError, match="is not a positive number of seconds"):
            use(timeout=timeout)


# -- proxies


def test_methods_run_on_the_owner(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    assert rref.rpc_sync().where() == "w1"
    assert rref.rpc_async().where().wait() == "w1"
    assert rref.remote().where().to_here() == "w1"


def test_methods_change_the_value_that_the_reference_points_to(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    assert rref.rpc_sync().add(2, times=3) == 7
    assert rref.rpc_async().add(1).wait() == 8
    assert rref.rpc_sync().get() == 8


def test_a_method_called_by_remote_gives_a_reference_on_the_owner(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(4,))
    other = rref.remote().again()

    assert isinstance(other, gw.RRef)
    assert other.owner_name() == "w1"
    assert other.rpc_sync().get() == 4


def test_proxies_work_on_a_reference_to_ones_own_value(workers):
    rref = workers[0].run(gw.RRef, workers[0].run(Box, 1))

    assert rref.rpc_sync().add(2) == 3
    assert rref.rpc_async().get().wait() == 3
    assert rref.remote().get().to_here() == 3
    assert rref.local_value().content == 3


def test_methods_of_tensors_modules_and_builtins_are_called_through_a_reference(workers):
    def program():
        linear = gw.remote("w1", torch.nn.Linear, args=(3, 2))
        with torch.no_grad():
            assert linear.rpc_sync().forward(torch.ones(4, 3)).shape == (4, 2)
        assert gw.remote("w1", torch.ones, args=(3,)).rpc_sync().sum() == 3
        assert gw.RRef({"a": 1}).rpc_sync().get("a") == 1

    workers[0].run(program)


def test_special_methods_are_called_through_a_reference(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    assert rref.rpc_sync().__len__() == 3


def test_what_a_method_raises_keeps_its_type(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    with pytest.raises(KeyError, match="KeyError on w1: nothing in the box"):
        rref.rpc_sync().fails()
    with pytest.raises(KeyError, match="KeyError on w1: nothing in the box"):
        rref.remote().fails().to_here()


def test_what_a_method_raises_through_a_future_holds_no_reference(workers):
    def program():
        rref = gw.remote("w1", Box, args=(1,))
        with pytest.raises(KeyError, match="KeyError on w1: nothing in the box"):
            rref.rpc_async().fails().wait()

    workers[0].run(program)
    assert_nothing_left(workers)


def test_a_method_that_does_not_exist_is_an_attribute_error(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    with pytest.raises(AttributeError, match="'Box' object has no attribute 'jump'"):
        rref.rpc_sync().jump()


def test_private_methods_and_unexposed_classes_are_refused(workers):
    box = workers[0].run(gw.remote, "w1", Box, args=(1,))
    hidden = workers[0].run(gw.remote, "w1", make_hidden)

    with pytest.raises(NotExposed, match=r"Box\._secret is private"):
        box.rpc_sync()._secret()
    with pytest.raises(NotExposed, match=r"_Hidden\.method is not exposed on this worker"):
        hidden.rpc_sync().method()


def test_a_method_that_takes_too_long_is_a_call_timeout(workers, gate):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    with pytest.raises(CallTimeout, match=r"w1 did not answer w0#\d+ \(waits\)"):
        rref.rpc_sync(timeout=0.02).waits(gate)
    GATES[gate].set()

    assert rref.rpc_sync().get() == 1


def test_a_method_waits_for_a_value_that_is_being_made(workers, gate):
    rref = workers[0].run(gw.remote, "w1", slow_box, args=(gate, 6))
    future = rref.rpc_async().get()
    assert not future.done()
    GATES[gate].set()

    assert future.wait() == 6


# -- passing on


def test_a_reference_passed_to_its_owner_is_the_value_there(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(9,))

    assert workers[0].run(gw.rpc_sync, "w1", describe, args=(rref,)) == ("w1", True, "w1")
    assert workers[0].run(gw.rpc_sync, "w1", content_of, args=(rref,)) == 9


def test_a_reference_passed_to_a_third_worker_is_one_to_the_same_value(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(9,))

    assert workers[0].run(gw.rpc_sync, "w2", describe, args=(rref,)) == ("w1", False, "w2")
    assert workers[0].run(gw.rpc_sync, "w2", ask_get, args=(rref,)) == 9
    assert workers[0].run(gw.rpc_sync, "w2", pass_on, args=(rref, ["w0", "w1", "w2", "w2"])) == 9


def test_a_reference_to_a_value_of_ones_own_is_passed_on(workers):
    def program():
        return gw.rpc_sync("w1", pass_on, args=(gw.RRef(Box(3)), ["w2", "w1"]))

    assert workers[0].run(program) == 3


def test_a_reference_passed_to_oneself_is_the_value(workers):
    rref = workers[0].run(gw.RRef, workers[0].run(Box, 2))

    assert workers[0].run(gw.rpc_sync, "w0", content_of, args=(rref,)) == 2


def test_references_travel_inside_containers_and_come_back_as_results(workers):
    def program():
        rrefs = [gw.remote(to, Box, args=(n,)) for n, to in enumerate(["w0", "w1", "w2"])]
        assert gw.rpc_sync("w1", several, args=({"all": rrefs},)) == [0, 1, 2]
        for rref in rrefs:
            back = gw.rpc_sync("w2", same, args=(rref,))
            assert back.rpc_sync().get() == rref.rpc_sync().get()
            assert back.is_owner() == rref.is_owner()

    workers[0].run(program)


def test_a_reference_made_by_a_callee_is_returned(workers):
    for to in ("w0", "w1", "w2"):
        rref = workers[0].run(gw.rpc_sync, "w1", make_there, args=(to, 8))
        assert rref.owner_name() == to
        assert rref.rpc_sync().get() == 8


def test_a_reference_may_be_passed_on_before_its_value_is_made(workers, gate):
    def program():
        rref = gw.remote("w1", slow_box, args=(gate, 4))
        asked = gw.rpc_async("w2", ask_get, args=(rref,))
        del rref
        GATES[gate].set()
        return asked.wait()

    assert workers[0].run(program) == 4


def test_a_reference_to_a_reference_is_followed_step_by_step(workers):
    def program():
        inner = gw.remote("w1", Box, args=(5,))
        outer = gw.remote("w2", same, args=(inner,))
        return outer.to_here().rpc_sync().get()

    assert workers[0].run(program) == 5


# -- counting


def test_a_reference_is_confirmed_once_its_owner_has_counted_it(workers, gate):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))

    assert eventually(rref.confirmed_by_owner)
    assert in_statistics(workers[1], owned=1, forks=1)
    assert in_statistics(workers[0], held=1, pending_users=0)


def test_a_reference_kept_by_a_third_worker_is_counted_there(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))
    workers[0].run(gw.rpc_sync, "w2", keep, args=(rref,))

    assert in_statistics(workers[1], owned=1, forks=2)
    assert in_statistics(workers[2], held=1, pending_users=0)
    assert eventually(KEPT["w2"].confirmed_by_owner)


def test_a_value_is_forgotten_when_its_last_user_dies(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))
    assert rref.rpc_sync().get() == 1
    assert not is_forgotten("w1")

    del rref

    assert eventually(lambda: is_forgotten("w1"))


def test_a_value_lives_as_long_as_any_worker_holds_it(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))
    workers[0].run(gw.rpc_sync, "w2", keep, args=(rref,))

    del rref
    assert in_statistics(workers[0], held=0, pending_children=0)
    assert in_statistics(workers[1], owned=1, forks=1)
    assert not is_forgotten("w1")
    assert KEPT["w2"].rpc_sync().get() == 1

    workers[0].run(gw.rpc_sync, "w2", unkeep)
    assert eventually(lambda: is_forgotten("w1"))


def test_a_value_of_ones_own_lives_as_long_as_another_holds_it(workers):
    def program():
        gw.rpc_sync("w1", keep, args=(gw.RRef(Box(1)),))

    workers[0].run(program)
    assert in_statistics(workers[0], owned=1, forks=1)
    assert not is_forgotten("w0")

    workers[0].run(gw.rpc_sync, "w1", unkeep)
    assert eventually(lambda: is_forgotten("w0"))


def test_a_value_lives_while_a_copy_of_its_reference_is_on_the_way(workers, gate):
    def program():
        rref = gw.remote("w1", slow_box, args=(gate, 6))
        return gw.rpc_async("w2", pass_on, args=(rref, ["w1", "w0"]))

    asked = workers[0].run(program)  # no reference is left on w0
    GATES[gate].set()

    assert asked.wait() == 6


def test_values_that_hold_references_are_forgotten_one_after_the_other(workers):
    def program():
        inner = gw.remote("w1", Box, args=(5,))
        return gw.remote("w2", same, args=(inner,))

    outer = workers[0].run(program)
    assert outer.to_here().rpc_sync().get() == 5

    del outer

    assert eventually(lambda: is_forgotten("w1"))


def test_an_answer_with_a_reference_that_nobody_waits_for_is_released(workers, gate):
    with pytest.raises(CallTimeout):
        workers[0].run(gw.rpc_sync, "w1", slow_reference, args=(gate,), timeout=0.25)
    GATES[gate].set()

    assert eventually(lambda: "w1" in MADE and is_forgotten("w1"))


def slow_reference(gate):
    GATES[gate].wait(30)
    return gw.RRef(Box(1))


def test_references_of_a_call_that_cannot_leave_are_taken_back(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))
    with pytest.raises(NotSerializable):
        workers[0].run(gw.rpc_sync, "w2", echoed, args=(rref, threading.Lock()))
    assert in_statistics(workers[0], pending_children=0, held=1)


def echoed(*args):
    return args


def test_references_of_a_refused_call_are_released(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(1,))
    for _ in range(3):
        with pytest.raises(NotExposed):
            workers[0].run(gw.rpc_sync, "w2", _not_exposed, args=(rref,))
    assert in_statistics(workers[1], owned=1, forks=1)


def _not_exposed(rref):
    return rref


def test_many_threads_may_pass_on_and_drop_one_reference(workers):
    rref = workers[0].run(gw.remote, "w1", Box, args=(3,))

    def one(n):
        return workers[0].run(gw.rpc_sync, f"w{n % 3}", pass_on, args=(rref, ["w2"]))

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(one, range(12))) == [3] * 12
    assert in_statistics(workers[1], owned=1, forks=1)


def test_a_reference_is_not_pickled_nor_copied(workers):
    rref = workers[0].run(gw.RRef, 1)
    text = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"

    for copied in (
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda rref: torch.save(rref, io.BytesIO()),
    ):
        with pytest.raises(UsageError, match=text) as raised:
            copied(rref)
        assert "hint: pass it to rpc_sync, rpc_async or remote" in str(raised.value)


def test_a_value_that_was_passed_on_a_thousand_times_remembers_nothing_of_it(workers):
    """Each time its owner is asked to count one more, by a worker that then lets go of it."""

    def program():
        rref = gw.remote("w1", Box, args=(1,))
        for _ in range(1000):
            gw.rpc_sync("w2", got, args=(rref,))
        return rref

    rref = workers[0].run(program)
    refs = workers[1].worker.refs

    assert eventually(lambda: refs.statistics().forks == 1)
    owned = refs._table.owned
    assert (len(owned.values[rref.handle.ref].requested), len(owned.requests)) == (0, 0)
    assert not workers[2].worker.refs._sender._resender._later


def got(rref):
    return rref.rpc_sync().get()


def test_a_question_to_a_worker_that_is_lost_is_not_kept(workers):
    """w1 has said that the value may still come: it will not."""
    w2 = workers[2].worker
    (handle,) = w2.refs.arrived([Reference(RefId(0, 99), 1, ForkId(0, 98))])
    table, resender = w2.refs._table, w2.refs._sender._resender
    assert eventually(lambda: table.unacknowledged() and resender._later)

    w2.agent.hang_up(1, "a test has cut it")

    assert eventually(lambda: not table.unacknowledged() and not resender._later)
    w2.refs.ended(handle)


# -- in a graph


def test_a_value_fetched_in_a_context_is_part_of_the_graph(workers):
    def program():
        rref = gw.remote("w1", make_tensor, args=(3.0,))
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            (rref.to_here() * x).backward()
        return x.grad, gw.rpc_sync("w1", grad_of, args=(rref,))

    assert workers[0].run(program) == (3, 2)


def grad_of(rref):
    return rref.local_value().grad


def test_a_value_kept_on_its_owner_is_part_of_the_graph(workers):
    def program():
        x = torch.tensor(2.0, requires_grad=True)
        with gw.context():
            kept = gw.remote("w1", torch.mul, args=(x, 3))
            gw.rpc_sync("w2", fetched_square, args=(kept,)).backward()
        return x.grad

    assert workers[0].run(program) == 36


def fetched_square(rref):
    return rref.to_here() ** 2


def test_a_fetched_value_has_its_graph_without_a_context_each_time_it_is_fetched(workers):
    def program():
        x = torch.tensor(2.0, requires_grad=True)
        rref = gw.remote("w1", torch.mul, args=(x, 3.0))
        for _ in range(3):
            rref.to_here().backward(retain_graph=True)
        return x.grad

    assert workers[0].run(program) == 9
    assert_nothing_left(workers)


# -- at the end


def test_references_that_are_still_counted_at_shutdown_are_reported():
    with cluster(2, expose=[HERE]) as made:
        made[0].run(gw.rpc_sync, "w1", keep, args=(made[0].run(gw.RRef, 5),))
        made[1].worker._graceful_shutdown._tell_all(
            OVER
        )  # its program is over, but it holds on to what it has
        with pytest.warns(RefLeakWarning) as warned, pytest.raises(DeadlinePassed, match="out w1"):
            made[0].worker.shutdown(graceful=True, timeout=0.05)
        KEPT.clear()

    assert re.fullmatch(
        r"w0 shut down while references to its values were still counted: r0\.\d+ as f0\.\d+ on w1",
        str(warned[0].message),
    )


def test_references_end_with_the_workers_that_leave_together():
    with cluster(2, expose=[HERE]) as made, ThreadPoolExecutor(2) as threads:
        made[0].run(gw.rpc_sync, "w1", keep, args=(made[0].run(gw.RRef, 5),))
        leaving = [threads.submit(m.worker.shutdown, graceful=True, timeout=10) for m in made]

        assert [thread.result() for thread in leaving] == [[], []]
        KEPT.clear()


def test_a_reference_cannot_be_used_after_its_worker_has_shut_down():
    with cluster(2, expose=[HERE]) as made:
        rref = made[0].run(gw.remote, "w1", Box, args=(1,))
        assert rref.rpc_sync().get() == 1

    with pytest.raises(UsageError, match=r"w0 has shut down: shutdown\(\) was called"):
        rref.to_here()
